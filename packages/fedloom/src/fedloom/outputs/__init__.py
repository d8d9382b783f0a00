"""Checks of whether a command or a method may write to a location."""

from __future__ import annotations

from fedloom.outputs.kinds import FILE_KINDS, FileKind, never_own
from fedloom.outputs.paths import LOCK_FILE, check_output_file, check_output_folder, draft_path, is_run_directory

__all__ = [
    "FILE_KINDS", "LOCK_FILE", "FileKind", "check_output_file", "check_output_folder", "draft_path", "is_run_directory",
    "never_own",
]  # fmt: skip
