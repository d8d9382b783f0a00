"""Individual test samples: recorded predictions, pooled over the seeds or folds that tested them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedloom.lab.report.reading import read_table, rows_where
from fedloom.lab.report.run import Numbers, Run
from fedloom.rundir import PREDICTIONS_FILE


class Predicted(NamedTuple):
    """Test samples of one model, ordered by client and row.

    Attributes:
        client: client ``[N]`` of each sample.
        row: position of each sample in the data ``[N]``.
        target: target ``[N]`` of each sample.
        prediction: mean prediction ``[N]`` over the seeds that tested the sample. For a binary task, it is the
            probability of the second class. For several classes, it is the share of the seeds that were right (targets
            are then 1).
        event: 1 if the target is the time of an event, 0 if it is censored ``[N]``. None for other tasks.
        subject: number ``[N]`` of the subject of the sample. None: each sample belongs to a separate subject.
    """

    client: NDArray[np.int64]
    row: NDArray[np.int64]
    target: Numbers
    prediction: Numbers
    event: Numbers | None = None
    subject: NDArray[Any] | None = None

    def select_client(self, client: int | None) -> Predicted:
        """Select the predictions of one client. None selects all."""
        if client is None:
            return self
        here = self.client == client
        event, subject = (None if values is None else values[here] for values in (self.event, self.subject))
        return Predicted(self.client[here], self.row[here], self.target[here], self.prediction[here], event, subject)

    @property
    def units(self) -> NDArray[np.int64]:
        """Subject ``[N]`` of each sample, numbered from 0.

        If no subjects are known, each sample is a separate subject.
        """
        if self.subject is None:
            return np.arange(len(self.target))
        return np.unique(self.subject, return_inverse=True)[1].astype(np.int64)

    def count(self, some: NDArray[np.bool_] | None = None) -> int:
        """Return the number of subjects of the samples, or of some of them ``[N]``."""
        return len(np.unique(self.units if some is None else self.units[some]))


def tested(run: Run, method: str, model: str) -> Predicted | None:
    """Return a model's predictions for test samples.

    None if predictions were not stored, or consist of several numbers.
    """
    path = run.path / PREDICTIONS_FILE
    if not path.exists():
        return None
    names = ("method", "seed", "client", "model", "row", "target", "prediction")
    columns = pq.read_schema(path).names
    several = [] if "prediction" in columns else [f"prediction {k}" for k in range(len(run.summary.classes))]
    if "target" not in columns or several != [name for name in columns if name.startswith("prediction ")]:
        return None
    measured = ["target", "prediction", *(name for name in ("event", "subject") if name in columns)]
    table = read_table(
        path, (*(name for name in names if not several or name != "prediction"), *measured[2:], *several)
    )
    if several:
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
    return Predicted(means["client"].to_numpy(), means["row"].to_numpy(), **values) if len(means) else None


def is_binary(run: Run, samples: Predicted) -> bool:
    """Return True if targets are two classes, and predictions are probabilities of the second class."""
    return len(run.summary.classes) == 2 and bool(np.isin(samples.target, (0, 1)).all())
