"""Storage in files that are written either completely or not at all.

The files hold TOML documents, clients' rows, checkpoints, and the undo journal of the rows.
"""

from __future__ import annotations

from fedloom.storage.claims import Claims
from fedloom.storage.files import make_folder, write_atomic
from fedloom.storage.locks import lock, release_lock, take_lock
from fedloom.storage.toml_files import read_toml

__all__ = ["Claims", "lock", "make_folder", "read_toml", "release_lock", "take_lock", "write_atomic"]
