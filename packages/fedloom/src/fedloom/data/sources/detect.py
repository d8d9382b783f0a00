"""Selection of the reader for a file or folder by its contents."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from fedloom.data.sources._base import FileSource
from fedloom.data.sources.archive import iterate_entries, strip_compression_suffix
from fedloom.data.sources.arrays import Npy, Npz
from fedloom.data.sources.census import Adult, Heart
from fedloom.data.sources.cifar import Cifar10, Cifar100
from fedloom.data.sources.idx import FashionMnist, Mnist
from fedloom.data.sources.images import ImageFolder, TinyImagenet
from fedloom.data.sources.leaf import Leaf
from fedloom.data.sources.table.formats import STATISTICS_READERS, Excel, Feather, JsonLines, Statistics
from fedloom.data.sources.tabular import Csv, Parquet
from fedloom.errors import DataError

SOURCES_BY_ENDING: dict[str, type[FileSource]] = {
    ".npz": Npz,
    **dict.fromkeys((".parquet", ".pq"), Parquet),
    **dict.fromkeys((".csv", ".tsv", ".txt", ".dat", ".data"), Csv),
    **dict.fromkeys((".xlsx", ".xlsm"), Excel),
    **dict.fromkeys(STATISTICS_READERS, Statistics),
    **dict.fromkeys((".jsonl", ".ndjson"), JsonLines),
    **dict.fromkeys((".feather", ".arrow"), Feather),
}
SOURCES_BY_NAME: tuple[tuple[re.Pattern[str], type[FileSource]], ...] = (
    (re.compile(r"-idx[13]-ubyte$"), Mnist),
    (re.compile(r"(^|/)data_batch_\d(\.bin)?$"), Cifar10),
    (re.compile(r"(^|/)(fine_label_names\.txt|train\.bin|meta)$"), Cifar100),
    (re.compile(r"(^|/)processed\.\w+\.data$"), Heart),
    (re.compile(r"(^|/)adult\.(data|test)$"), Adult),
    (re.compile(r"(^|/)x\.npy$"), Npy),
    (re.compile(r"(^|/)(wnids\.txt|train/n\d{8}/.*)$"), TinyImagenet),
    (re.compile(r"\.json$"), Leaf),
    (re.compile(r"\.(jpe?g|png|bmp|gif|ppm|pgm|tiff?|webp)$", re.IGNORECASE), ImageFolder),
    (re.compile(r"\.(csv|tsv|txt|dat|data)$", re.IGNORECASE), Csv),
)
FIRST_WEAK_PATTERN_INDEX = 7
"""Index of the first weak pattern. Weak patterns are only used if no name matches a stronger one."""
WEAK_MATCH_NAME_COUNT = 2000
"""Minimum number of names before a match with a weak pattern is accepted."""
MAX_CHECKED_NAMES = 100_000
"""Maximum number of names in a folder that are checked before the search fails."""


PARQUET_MAGIC = b"PAR1"


def _starts_with(path: Path, magic: bytes) -> bool:
    """Return True if a file starts with the given bytes. Return False if the file cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(magic)) == magic
    return False


def detect_source(path: Path) -> type[FileSource]:
    """Return the class of the source that can read a path.

    Raises:
        DataError: the path does not exist, contains nothing that can be read, or is the root of the file system.
    """
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder. Check the path")
    if path.resolve() == Path(path.resolve().anchor):
        raise DataError(
            f"{path}: the root of the file system cannot be a data set. Give the folder that contains the files"
        )
    ending = Path(strip_compression_suffix(path.name)).suffix.lower()
    if path.is_file() and _starts_with(path, PARQUET_MAGIC):
        return Parquet
    if (
        path.is_file()
        and ending in SOURCES_BY_ENDING
        and not any(p.search(path.name) for p, _ in SOURCES_BY_NAME[:FIRST_WEAK_PATTERN_INDEX])
    ):
        return SOURCES_BY_ENDING[ending]
    if ending in (".xls", ".ods"):
        raise DataError(f"{path} is a spreadsheet in an older format. Save the spreadsheet as .xlsx")
    best, looked_at = len(SOURCES_BY_NAME), 0

    def enough(name: str) -> bool:
        nonlocal best, looked_at
        best, looked_at = (
            min([best, *(i for i, (pattern, _) in enumerate(SOURCES_BY_NAME) if pattern.search(name))]),
            looked_at + 1,
        )
        return (
            best < FIRST_WEAK_PATTERN_INDEX
            or (best < len(SOURCES_BY_NAME) and looked_at > WEAK_MATCH_NAME_COUNT)
            or looked_at > MAX_CHECKED_NAMES
        )

    for _ in iterate_entries(path, enough):
        break
    if best == len(SOURCES_BY_NAME):
        raise DataError(
            f"{path} contains no data set in a known format. Known formats: IDX, CIFAR, LEAF JSON, image folders, NPZ, "
            "folders with x.npy, Parquet, CSV, Excel, SPSS, Stata, SAS, JSON lines, Feather"
        )
    kind = SOURCES_BY_NAME[best][1]
    return FashionMnist if kind is Mnist and "fashion" in str(path).lower() else kind
