"""Files that are written completely or not at all. TOML. They store rows, checkpoints and their undo journal."""

from __future__ import annotations

from fedloom.storage.claims import Claims
from fedloom.storage.files import make_folder, write_atomic
from fedloom.storage.locks import hold, lock, release
from fedloom.storage.toml_files import read_toml

__all__ = ["Claims", "hold", "lock", "make_folder", "read_toml", "release", "write_atomic"]
