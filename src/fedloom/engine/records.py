"""Records: everything measured in a run, as a tidy table, without times."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import ConfigError

TOTAL = -1
"""The client number of a figure of the whole federation."""


class Record(NamedTuple):
    """One figure of every client, or one of the federation.

    Attributes:
        round: round number, 0 before the first.
        model: "global", "personal", "hybrid", or "" for work and traffic.
        part: "train", "validation", "test", "common", or "".
        metric: name.
        values: float64 ``[n]`` by client, or ``[1]`` of the federation.
        total: a figure of the federation.
    """

    round: int
    model: str
    part: str
    metric: str
    values: NDArray[np.float64]
    total: bool


class Records:
    """A list of records that becomes a table, and tensors for a checkpoint."""

    def __init__(self, items: Iterable[Record] = ()) -> None:
        self.items = list(items)

    def clients(self, round: int, model: str, part: str, metric: str, values: Tensor) -> None:
        """Add a figure of every client, ``[n]``."""
        self.items.append(Record(round, model, part, metric, values.double().numpy(), total=False))

    def total(self, round: int, model: str, part: str, metric: str, value: float) -> None:
        """Add a figure of the federation."""
        self.items.append(Record(round, model, part, metric, np.array([float(value)]), total=True))

    def table(self) -> pa.Table:
        """Columns round, client, model, part, metric, value; sorted."""
        lengths = [len(r.values) for r in self.items]
        clients = [np.array([TOTAL]) if r.total else np.arange(len(r.values)) for r in self.items]

        def column(values: list[str] | list[int], kind: pa.DataType) -> pa.Array:
            return pa.array(np.repeat(np.array(values, object), lengths), kind)

        table = pa.table(
            {
                "round": column([r.round for r in self.items], pa.int64()),
                "client": pa.array(np.concatenate([*clients, np.array([], np.int64)]), pa.int64()),
                "model": column([r.model for r in self.items], pa.string()),
                "part": column([r.part for r in self.items], pa.string()),
                "metric": column([r.metric for r in self.items], pa.string()),
                "value": pa.array(np.concatenate([*(r.values for r in self.items), np.array([])]), pa.float64()),
            }
        )
        order = [(name, "ascending") for name in ("round", "model", "part", "metric", "client")]
        return table.sort_by(order)

    def last(self, model: str, part: str, metric: str) -> NDArray[np.float64] | None:
        """The newest values of a figure."""
        for r in reversed(self.items):
            if (r.model, r.part, r.metric) == (model, part, metric):
                return r.values
        return None

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        keys = json.dumps([[r.round, r.model, r.part, r.metric, r.total, len(r.values)] for r in self.items])
        values = np.concatenate([*(r.values for r in self.items), np.array([])])
        return {
            "keys": torch.frombuffer(bytearray(keys.encode()), dtype=torch.uint8),
            "values": torch.from_numpy(values),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Records:
        """The records of `tensors`."""
        keys = json.loads(bytes(tensors["keys"].tolist()).decode())
        pieces = np.split(tensors["values"].numpy(), np.cumsum([k[-1] for k in keys])[:-1]) if keys else []
        return cls(Record(k[0], k[1], k[2], k[3], values, total=k[4]) for k, values in zip(keys, pieces, strict=True))


def not_measured(model: str, metric: str, part: str, known: Iterable[tuple[str, str, str]]) -> ConfigError:
    """The error for a figure that is not there; ``known`` are (model, part, metric)."""
    there = ", ".join(sorted({"/".join(names) for names in known}))
    return ConfigError(f"{model}/{part}/{metric} was not measured; there are: {there}")
