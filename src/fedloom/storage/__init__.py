"""Files: written whole or not at all; rows, checkpoints and their undo journal."""

from __future__ import annotations

from fedloom.storage.files import lock, make_folder, write_atomic

__all__ = ["lock", "make_folder", "write_atomic"]
