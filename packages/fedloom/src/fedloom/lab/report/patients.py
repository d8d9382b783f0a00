"""Predictions for individual test samples, combined over seeds or folds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedloom.lab.report.reading import read_table, rows_where
from fedloom.lab.report.run import Numbers, Run
from fedloom.rundir import PREDICTIONS_FILE


class StoredPredictions(NamedTuple):
    """Predictions of one model for test samples, ordered by client and row.

    Attributes:
        client: client of each sample, ``[N]``.
        row: position of each sample in the data, ``[N]``.
        target: target of each sample, ``[N]``. In a multilabel task, 1 or 0 for each label, or NaN if it is unknown,
            ``[N, k]``.
        prediction: mean prediction for each sample over the seeds that tested it, in the shape of the targets. For two
            classes and for labels, predictions are probabilities. For more classes, it is the fraction of seeds that
            predicted the correct class, and all targets are 1.
        event: 1 if the target is an event time, 0 if it is a censoring time, ``[N]``. None if the task has no events.
        subject: number of each sample's subject, ``[N]``. None if each sample belongs to a different subject.
    """

    client: NDArray[np.int64]
    row: NDArray[np.int64]
    target: Numbers
    prediction: Numbers
    event: Numbers | None = None
    subject: NDArray[Any] | None = None

    def select_client(self, client: int | None) -> StoredPredictions:
        """Return the predictions for one client, or all predictions if ``client`` is None."""
        if client is None:
            return self
        here = self.client == client
        event, subject = (None if values is None else values[here] for values in (self.event, self.subject))
        return StoredPredictions(
            self.client[here], self.row[here], self.target[here], self.prediction[here], event, subject
        )

    @property
    def units(self) -> NDArray[np.int64]:
        """Number of each sample's subject, counted from 0, ``[N]``.

        If the subjects are unknown, each sample is treated as a separate subject.
        """
        if self.subject is None:
            return np.arange(len(self.target))
        return np.unique(self.subject, return_inverse=True)[1].astype(np.int64)

    def count(self, some: NDArray[np.bool_] | None = None) -> int:
        """Return the number of subjects of all samples, or of the samples that the mask ``some [N]`` selects."""
        return len(np.unique(self.units if some is None else self.units[some]))


def benign_test_predictions(run: Run, method: str, model: str) -> StoredPredictions | None:
    """Return a model's predictions for the benign clients' test samples.

    Return None if no predictions were stored, or if predictions are vectors other than class probabilities.
    """
    path = run.path / PREDICTIONS_FILE
    if not path.exists():
        return None
    names = ("method", "seed", "client", "model", "row", "target", "prediction")
    columns = pq.read_schema(path).names
    several = [] if "prediction" in columns else [f"prediction {k}" for k in range(len(run.summary.classes))]
    if several != [name for name in columns if name.startswith("prediction ")]:
        return None
    several_labels = [name for name in columns if name.startswith("target ")]
    measured = ["target", "prediction", *(name for name in ("event", "subject") if name in columns)]
    if several_labels:
        measured = [*measured[2:], *several_labels, *several]
        table = read_table(path, (*names[:5], *measured))
    else:
        table = read_table(
            path, (*(name for name in names if not several or name != "prediction"), *measured[2:], *several)
        )
    if several and not several_labels:
        best = np.stack([table[name].to_numpy() for name in several], 1).argmax(1)
        right = pa.array((best == table["target"].to_numpy()).astype(float))
        place = table.column_names.index("target")
        table = table.set_column(place, "target", pa.array(np.ones(len(table)))).append_column("prediction", right)
    hostile = {seed: run.attackers(seed) for seed in set(table["seed"].to_pylist())}
    table = rows_where(table, method=method, model=model)
    seeds, clients = table["seed"].to_numpy(), table["client"].to_numpy()
    benign = np.array([c not in hostile[s] for s, c in zip(seeds.tolist(), clients.tolist(), strict=True)], bool)
    table = table.filter(pa.array(benign))
    means = table.group_by(["client", "row"]).aggregate([(name, "mean") for name in measured])
    means = means.sort_by([("client", "ascending"), ("row", "ascending")])
    values = {name: means[f"{name}_mean"].to_numpy() for name in measured}
    if "subject" in values:
        values["subject"] = np.rint(values["subject"]).astype(np.int64)
    if several_labels:
        values["target"] = np.stack([values.pop(name) for name in several_labels], 1)
        values["prediction"] = np.stack([values.pop(name) for name in several], 1)
    return StoredPredictions(means["client"].to_numpy(), means["row"].to_numpy(), **values) if len(means) else None


def is_binary(run: Run, samples: StoredPredictions) -> bool:
    """Return True if there are two classes and the predictions are probabilities of the second class."""
    return samples.target.ndim == 1 and len(run.summary.classes) == 2 and bool(np.isin(samples.target, (0, 1)).all())
