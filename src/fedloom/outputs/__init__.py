"""Check where a command or a method may write."""

from __future__ import annotations

from fedloom.outputs.kinds import KINDS, Kind, never
from fedloom.outputs.paths import LOCK, check_output_file, check_output_folder, draft_of, is_run_directory

__all__ = ["KINDS", "LOCK", "Kind", "check_output_file", "check_output_folder", "draft_of", "is_run_directory", "never"]
