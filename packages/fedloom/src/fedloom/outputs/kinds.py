"""Kinds of files that fedloom writes, and their file extensions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FILE_KINDS = {
    "CSV": (".csv",),
    "HTML": (".html", ".htm"),
    "Markdown": (".md",),
    "TOML": (".toml",),
    "ONNX": (".onnx",),
    "safetensors": (".safetensors",),
    "torch": (".pt2", ".pt", ".pth"),
    "text": (".txt", ".tsv", ".json", ".jsonl", ".log", ".yaml", ".yml", ".xml", ".tex", ".py", ".ipynb"),
    "data": (".parquet", ".xlsx", ".xls", ".npz", ".npy", ".h5", ".sav", ".dta", ".sas7bdat", ".arff", ".feather"),
    "other": (".zip", ".gz", ".tar", ".pdf", ".docx", ".png", ".jpg", ".jpeg", ".svg", ".dcm", ".nii", ".db", ".key"),
}
"""File extensions of each kind of file. If a name has a different extension, or no extension, it does not determine the
kind."""


class FileKind(NamedTuple):
    """Kind of file that fedloom writes.

    Attributes:
        name: one of the names in `FILE_KINDS`.
        description: description of this kind of file, e.g. ``"a file of predictions"``.
        is_own: function that returns True if an existing file is of this kind and was written by fedloom. Such a file
            may be replaced.
    """

    name: str
    description: str
    is_own: Callable[[Path], bool]


def never_own(_path: Path) -> bool:
    """Return False, because files that people edit are never replaced."""
    return False
