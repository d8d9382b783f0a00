"""Files: written whole or not at all; rows, checkpoints and their undo journal."""

from __future__ import annotations

from fedloom.storage.files import make_folder, write_atomic
from fedloom.storage.locks import lock

__all__ = ["lock", "make_folder", "write_atomic"]
