"""Sources of data sets, which are loaded by name or path."""

from __future__ import annotations

import os
from pathlib import Path

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.problems import LinearRegression, LowRank, SparseLogistic
from fedloom.data.sources._base import DATA_FOLDER_VARIABLE as DATA_FOLDER_VARIABLE
from fedloom.data.sources._base import FileSource as FileSource
from fedloom.data.sources._base import Source
from fedloom.data.sources.arrays import Npy, Npz
from fedloom.data.sources.census import Adult, Heart
from fedloom.data.sources.cifar import Cifar10, Cifar100
from fedloom.data.sources.detect import SOURCES_BY_ENDING, detect_source
from fedloom.data.sources.embedded import Digits, Embedded
from fedloom.data.sources.idx import FashionMnist, Mnist
from fedloom.data.sources.images import ImageFolder, MedicalMnist, TinyImagenet
from fedloom.data.sources.leaf import Femnist, Leaf
from fedloom.data.sources.memory import HubData
from fedloom.data.sources.synthetic import Synthetic
from fedloom.data.sources.table.formats import Excel, Feather, JsonLines, Statistics
from fedloom.data.sources.tabular import Csv, Parquet
from fedloom.data.sources.texts import Docstrings, Sent140, Shakespeare, Texts
from fedloom.errors import ConfigError
from fedloom.values import choose

__all__ = ["SOURCES", "Source", "load", "source"]

SOURCES: dict[str, type[Source]] = {
    "adult": Adult,
    "cifar-10": Cifar10,
    "cifar-100": Cifar100,
    "csv": Csv,
    "digits": Digits,
    "docstrings": Docstrings,
    "excel": Excel,
    "fashion-mnist": FashionMnist,
    "feather": Feather,
    "femnist": Femnist,
    "heart": Heart,
    "hub": HubData,
    "images": ImageFolder,
    "jsonl": JsonLines,
    "leaf": Leaf,
    "linear-regression": LinearRegression,
    "low-rank": LowRank,
    "medical-mnist": MedicalMnist,
    "mnist": Mnist,
    "npy": Npy,
    "npz": Npz,
    "parquet": Parquet,
    "sent140": Sent140,
    "shakespeare": Shakespeare,
    "sklearn": Embedded,
    "sparse-logistic": SparseLogistic,
    "statistics": Statistics,
    "synthetic": Synthetic,
    "texts": Texts,
    "tiny-imagenet": TinyImagenet,
}


@default_to_cpu()
def load(name_or_path: str | Path, data_dir: str | Path | None = None, **options: object) -> Dataset:
    """Load a data set by name or path.

    Args:
        name_or_path: key of `SOURCES`, ``"hub:owner/name"``, or a file or folder (whose contents determine the reader).
        data_dir: folder of data sets. If None, the environment variable FEDLOOM_DATA is used.
        options: options of the source.

    Raises:
        ConfigError: the name is unknown, or the source has no such option.
        DataError: a file is missing, is damaged, or is not in the expected format.
    """
    return source(name_or_path, **options).load(data_dir)


def source(name_or_path: str | Path, **options: object) -> Source:
    """Check the options of the source that `load` would read, and return the source without reading any data.

    Raises:
        ConfigError: the source does not exist, or has no such option.
    """
    name = str(name_or_path)
    if name == "hub:":
        raise ConfigError("hub: the name of a data set is missing. Write hub:owner/name")
    if name.startswith("hub:"):
        return HubData(name=name.removeprefix("hub:"), **options)
    if isinstance(name_or_path, Path) or (name not in SOURCES and _is_file(name)):
        place = Path(name).expanduser()
        kind: type[Source] | None = None
        if "agreement" in options and not place.exists():  # planning with an agreement needs no data
            kind = SOURCES_BY_ENDING.get(place.suffix.lower())
        kind = kind or detect_source(place)
        return kind(**{"path": name, **options})
    return choose("data set", SOURCES, name)(**options)


def _is_file(name: str) -> bool:
    """Return True if a name refers to a file or folder rather than to a named data set."""
    return "/" in name or "\\" in name or bool(Path(name).suffix) or os.path.exists(name)
