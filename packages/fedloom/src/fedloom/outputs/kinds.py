"""Name the kinds of files that are written, and the endings of their names."""

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
"""Endings of names by the kind of file. A name with another ending, or without one, says nothing about the kind."""


class FileKind(NamedTuple):
    """A kind of file that is written.

    Attributes:
        name: one of `FILE_KINDS`.
        what: the file in words, e.g. ``"a file of predictions"``.
        is_own: whether a file that is there is of this kind and was written by fedloom, so that it may be replaced.
    """

    name: str
    what: str
    is_own: Callable[[Path], bool]


def never(_path: Path) -> bool:
    """Return False: of a kind that people edit, no file is replaced."""
    return False
