"""Records of everything that a run measures (except durations), as a tidy table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom import metrics
from fedloom.errors import ConfigError
from fedloom.processes.clients import Scores

ROUNDING_UNITS = 8
"""Largest relative change in a loss, in units of the floating-point precision, that is considered a rounding error."""
NEGLIGIBLE_STEP_UNITS = 1e-3
"""Smallest step size, in units of the floating-point precision, that may change a loss.

Some methods compute with a model that they do not train, which changes the model's last digits. With step sizes from
this value up to the square root of the precision, training may change a loss by no more than that. With a larger step
size, a gradient that changes no loss is zero."""
DIVERGENCE_FACTOR = 10.0
"""A run is diverging as long as its mean training loss exceeds this multiple of the initial loss (or of 1, if larger).

The value was calculated, not tuned: with ten classes, training begins at a loss of ln 10 = 2.3. A loss of 23 means that
the true class has a probability of 1e-10, which never happens in a run that learns."""
WATCHED_PARTS = {"train": DIVERGENCE_FACTOR, "validation": 1000.0, "test": 1000.0}
"""Data parts for detecting divergence, with their multiples of the initial loss. The first evaluated part is used.

On validation and test samples, the loss of a run that merely overfits may exceed ten times its initial value.
"""
DIVERGING_EVALUATIONS = 3
"""Number of consecutive evaluations above the multiple after which a run is reported as diverged.

Fewer evaluations are enough at the end of the run.

The value was not tuned: after an unlucky cohort, a single evaluation may exceed the multiple, but the next one is below
it again."""

FEDERATION_CLIENT = -1
"""Client number in records of the federation as a whole."""


class Record(NamedTuple):
    """A metric's values for all evaluated clients, or its value for the whole federation.

    Attributes:
        round: round number, or 0 before the first round.
        model: "global", "personal", "hybrid", or "" for work and traffic.
        part: "train", "validation", "test", "common", or "".
        metric: name of the metric.
        values: one value per evaluated client, float64 ``[s]``, or one value for the federation, ``[1]``.
        total: True if the value describes the federation as a whole.
    """

    round: int
    model: str
    part: str
    metric: str
    values: NDArray[np.float64]
    total: bool

    @classmethod
    def make_client_record(cls, round: int, model: str, part: str, metric: str, values: Tensor) -> Record:
        """Create a record of a metric with one value per evaluated client ``[s]``."""
        return cls(round, model, part, metric, values.double().numpy(), total=False)

    @classmethod
    def make_federation_record(cls, round: int, model: str, part: str, metric: str, value: float) -> Record:
        """Create a record of a metric with one value for the federation."""
        return cls(round, model, part, metric, np.array([float(value)]), total=True)


class Records:
    """Immutable collection of a run's records, which can be converted to a table or to tensors for a checkpoint.

    Args:
        items: records to hold.
        ids: ids of the evaluated clients ``[s]`` in ascending order, or None if all clients are evaluated.
    """

    def __init__(self, items: Iterable[Record] = (), ids: Tensor | None = None) -> None:
        self.items, self.ids = tuple(items), ids

    def plus(self, items: Iterable[Record]) -> Records:
        """Append records."""
        return Records((*self.items, *items), self.ids)

    @property
    def round(self) -> int:
        """Round of the newest record, or -1 if there are no records."""
        return self.items[-1].round if self.items else -1

    def table(self) -> pa.Table:
        """Return a sorted table with the columns round, client, model, part, metric and value."""
        items = sorted(self.items, key=lambda r: (r[:4], not r.total))
        keys = dict(zip(Record._fields, zip(*items, strict=True), strict=True)) if items else {}
        place = pa.array(np.repeat(np.arange(len(items)), [len(r.values) for r in items]))
        ids = None if self.ids is None else self.ids.numpy()
        clients = [[FEDERATION_CLIENT] if r.total else np.arange(len(r.values)) if ids is None else ids for r in items]

        def column(name: str, kind: pa.DataType) -> pa.Array:
            return pa.array(keys.get(name, ()), kind).take(place)

        return pa.table(
            {
                "round": column("round", pa.int64()),
                "client": pa.array(np.concatenate([*clients, np.array([], np.int64)]), pa.int64()),
                **{name: column(name, pa.string()) for name in ("model", "part", "metric")},
                "value": pa.array(np.concatenate([*(r.values for r in items), np.array([])]), pa.float64()),
            }
        )

    def last(self, model: str, part: str, metric: str) -> NDArray[np.float64] | None:
        """Return the most recent values of a metric, or None if it was not measured."""
        for r in reversed(self.items):
            if (r.model, r.part, r.metric) == (model, part, metric):
                return r.values
        return None

    def is_unchanged(self, tolerance: float = 0.0) -> bool:
        """Return True if each loss that was measured in several rounds has the same value in all of them.

        A loss that is NaN for every client, because the part has no rows, counts as not measured. The same applies to a
        held-out loss that is 0 for every client, such as the partial likelihood of rows without an event. Under secure
        aggregation, only means of the loss over the sites are measured, and these means are compared instead.

        Args:
            tolerance: largest relative change in a loss to ignore.
        """
        first: dict[tuple[str, str, str, bool], Record] = {}
        is_repeated = False
        losses = [r for r in self.items if r.metric == "loss"]
        for r in losses or [r for r in self.items if r.metric.startswith("loss/")]:
            if np.isnan(r.values).all() or (r.part != "train" and not np.nan_to_num(r.values).any()):
                continue
            start = first.setdefault((r.model, r.part, r.metric, r.total), r)
            is_repeated = is_repeated or r.round > start.round
            if not np.allclose(r.values, start.values, rtol=tolerance, atol=0.0, equal_nan=True):
                return False
        return is_repeated

    def tensors(self) -> dict[str, Tensor]:
        """Return the records as tensors, for a checkpoint."""
        keys = json.dumps([[r.round, r.model, r.part, r.metric, r.total, len(r.values)] for r in self.items])
        values = np.concatenate([*(r.values for r in self.items), np.array([])])
        columns = {
            "keys": torch.frombuffer(bytearray(keys.encode()), dtype=torch.uint8),
            "values": torch.from_numpy(values),
        }
        return columns if self.ids is None else {**columns, "ids": self.ids}

    @classmethod
    def read_tensors(cls, tensors: dict[str, Tensor]) -> Records:
        """Read records from the tensors returned by `tensors`."""
        keys, values = json.loads(tensors["keys"].numpy().tobytes()), tensors["values"].numpy()
        ends = accumulate(k[-1] for k in keys)
        items = (
            Record(k[0], k[1], k[2], k[3], values[end - k[-1] : end], total=k[4])
            for k, end in zip(keys, ends, strict=True)
        )
        return cls(items, tensors.get("ids"))


def score_records(
    round: int, scores: Scores, sizes: Mapping[str, NDArray[np.float64]], benign: NDArray[np.float64] | None
) -> Iterator[Record]:
    """Yield records of the scores, and of the federation's metrics that are computed from them.

    Args:
        round: last round before the evaluation.
        scores: scores of each model on each part.
        sizes: each evaluated client's number of samples ``[s]``, keyed by part.
        benign: float mask ``[s]`` with NaN for attackers, which excludes them from the federation's metrics. None if
            there are no attackers.
    """
    for (model, part), metrics_of_part in scores.items():
        for name, value in metrics_of_part.items():
            if not part or (part == "common" and len(value) == 1):
                yield Record.make_federation_record(round, model, part, name, float(value.mean()))
                continue
            yield Record.make_client_record(round, model, part, name, value)
            counted = value.numpy() if benign is None else value.numpy() * benign
            if part == "common":
                yield Record.make_federation_record(round, model, part, f"{name}/mean", metrics.client_mean(counted))
                continue
            centre = scores.get(("global", "common"), {}).get(name)
            with np.errstate(over="ignore", invalid="ignore"):
                figures = metrics.over_clients(name, counted, sizes[part], None if centre is None else float(centre[0]))
            for figure, figure_value in figures.items():
                yield Record.make_federation_record(round, model, part, figure, figure_value)


class Divergence:
    """Detector of divergence in a run whose metrics are still finite. It uses only the records.

    Losses are compared to the largest training loss of any model at the first evaluation. If the ``train`` part is not
    evaluated, losses on another part are compared (see `WATCHED_PARTS`).

    Args:
        robust: True to use the median loss over clients, so that a single client (out of three or more) cannot decide
            the result. In this case, divergence is not detected if the records contain only values of the federation as
            a whole. False to use the mean over clients or, if only this is recorded, the mean over samples.

    Attributes:
        round: evaluated round in which divergence was detected. None if the run has not diverged so far.
        sentence: sentence that states the model, its loss and the initial loss. Empty if the run has not diverged.
    """

    def __init__(self, *, robust: bool = False) -> None:
        self._robust = robust
        self.round: int | None = None
        self.sentence = ""
        self._records_read, self._start, self._first, self._part = 0, 1.0, -1, ""
        self._beyond: dict[str, list[tuple[int, float]]] = {}

    def read(self, records: Records, *, ended: bool = False) -> str:
        """Read a run's new records. If they show for the first time that the run has diverged, return a sentence.

        Otherwise, return an empty string.

        Args:
            records: all records of the run. Those that have already been read are skipped.
            ended: True if no further evaluation will follow.
        """
        before = self.sentence
        new = records.items[self._records_read :]
        mean = "loss/mean" if any(record.metric == "loss/mean" for record in new) else "loss/weighted"
        losses = ("loss", "loss/mean", "loss/weighted")
        evaluated = {record.part for record in new if record.metric in losses and not np.isnan(record.values).all()}
        self._part = self._part or next((part for part in WATCHED_PARTS if part in evaluated), "")
        for record in new:
            if (record.part, record.metric) != (self._part, "loss" if self._robust else mean):
                continue
            if record.total and not self._robust:
                self._add_loss(record.round, record.model, float(record.values[0]))
            elif not record.total and self._robust and not np.isnan(record.values).all():
                self._add_loss(record.round, record.model, float(np.nanmedian(record.values)))
        self._records_read = len(records.items)
        for model, beyond in self._beyond.items():
            if ended and beyond:
                self._tell(model)
        return self.sentence if self.sentence != before else ""

    def _add_loss(self, round: int, model: str, loss: float) -> None:
        self._first = round if self._first < 0 else self._first
        if round == self._first:
            self._start = max(self._start, loss if math.isfinite(loss) else 1.0)
            return
        beyond = self._beyond.setdefault(model, [])
        if math.isfinite(loss) and loss > WATCHED_PARTS[self._part] * self._start:
            beyond.append((round, loss))
        else:
            beyond.clear()
        if len(beyond) >= DIVERGING_EVALUATIONS:
            self._tell(model)

    def _tell(self, model: str) -> None:
        if self.round is None:
            (first, _), (self.round, loss) = self._beyond[model][0], self._beyond[model][-1]
            part = "training" if self._part == "train" else self._part
            self.sentence = (
                f"round {self.round}: the {part} loss of the {model} model is {loss:.3g}, and it has exceeded "
                f"{WATCHED_PARTS[self._part]:g} times its initial value of {self._start:.3g} since round {first}"
            )


def unmeasured_metric_error(
    model: str, metric: str, part: str, measured: Iterable[tuple[str, str, str]]
) -> ConfigError:
    """Return an error for a metric that was not measured.

    ``measured`` contains all measured combinations of model, part and metric.
    """
    names = set(measured)
    models = sorted({kind for kind, _, _ in names})
    if model not in models:
        return ConfigError(
            f"no scores were recorded for {model} models. Models of this method: {', '.join(models) or 'none'}"
        )
    listing = ", ".join(sorted(map("/".join, names)))
    return ConfigError(f"{model}/{part}/{metric} was not recorded. Recorded: {listing}")
