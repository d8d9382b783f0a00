"""Data: sources, partitions into clients, and the order in which a client uses its samples."""

from __future__ import annotations

from fedloom.data.dataset import Dataset, Prepare, Task
from fedloom.data.federation import DATA_PARTS, Federation, Split
from fedloom.data.order import plan_batches
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.data.sources import SOURCES, Source, load, source
from fedloom.lazy import make_dir

__all__ = [
    "DATA_PARTS", "PARTITIONS", "SOURCES", "Dataset", "Federation", "Partition", "Prepare", "Source", "Split", "Task",
    "load", "plan_batches", "source",
]  # fmt: skip

__dir__ = make_dir(__name__)
