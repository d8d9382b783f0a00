"""Check where a command or a method may write."""

from __future__ import annotations

from fedloom.outputs.kinds import KINDS, FileKind, never
from fedloom.outputs.paths import LOCK, check_output_file, check_output_folder, draft_of, is_run_directory

__all__ = [
    "KINDS",
    "LOCK",
    "FileKind",
    "check_output_file",
    "check_output_folder",
    "draft_of",
    "is_run_directory",
    "never",
]
