"""Test samples one by one: read predictions, pooled over the seeds or folds that tested them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedloom.lab.report.reading import read_table, rows_where
from fedloom.lab.report.run import Numbers, Run
from fedloom.rundir import PREDICTIONS


class Predicted(NamedTuple):
    """Test samples of one model in the order of client and row.

    Attributes:
        client: ``[N]`` client of each.
        row: ``[N]`` its place in the data.
        target: ``[N]`` its target.
        prediction: ``[N]`` mean prediction over the seeds that tested it; of a binary task the probability of the
            second class.
        event: ``[N]`` 1 where the target is the time of an event, 0 where it is censored; None of other tasks.
    """

    client: NDArray[np.int64]
    row: NDArray[np.int64]
    target: Numbers
    prediction: Numbers
    event: Numbers | None = None

    def at(self, client: int | None) -> Predicted:
        """Those of one client; None: all."""
        if client is None:
            return self
        here = self.client == client
        event = None if self.event is None else self.event[here]
        return Predicted(self.client[here], self.row[here], self.target[here], self.prediction[here], event)


def tested(run: Run, method: str, model: str) -> Predicted | None:
    """What a model predicted for test samples; None where predictions were not kept, or have several outputs."""
    path = run.path / PREDICTIONS
    if not path.exists():
        return None
    names = ("method", "seed", "client", "model", "row", "target", "prediction")
    columns = pq.read_schema(path).names
    if "prediction" not in columns:
        return None
    measured = ["target", "prediction", *(["event"] if "event" in columns else [])]
    table = read_table(path, (*names, *measured[2:]))
    hostile = {seed: run.attackers(seed) for seed in set(table["seed"].to_pylist())}
    table = rows_where(table, method=method, model=model)
    seeds, clients = table["seed"].to_numpy(), table["client"].to_numpy()
    benign = np.array([c not in hostile[s] for s, c in zip(seeds.tolist(), clients.tolist(), strict=True)], bool)
    table = table.filter(pa.array(benign))
    means = table.group_by(["client", "row"]).aggregate([(name, "mean") for name in measured])
    means = means.sort_by([("client", "ascending"), ("row", "ascending")])
    values = [means[name].to_numpy() for name in ("client", "row", *(f"{name}_mean" for name in measured))]
    return Predicted(*values) if len(means) else None


def is_binary(run: Run, samples: Predicted) -> bool:
    """Whether targets are two classes, and predictions probabilities of the second one."""
    return len(run.summary.classes) == 2 and bool(np.isin(samples.target, (0, 1)).all())
