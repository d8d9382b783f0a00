"""Permutation importance of a table's columns at every client.

Reference: L. Breiman, "Random Forests", Machine Learning 2001, Section 10; by scikit-learn's `permutation_importance`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.tables import Table
from fedloom.engine.result import Result
from fedloom.errors import Refused
from fedloom.experiment.inspection import models_of
from fedloom.metrics import leading, metric
from fedloom.seeds import generator, random_state

REPEATS = 5
"""Times that a column is permuted."""
FEWEST = 10
"""Test samples of a client at least."""


def check_importance(fed: Federation) -> Table:
    """The table whose columns are permuted.

    Raises:
        Refused: the samples are no rows of a table.
    """
    if fed.data.fitted is None:
        raise Refused(f"evaluate.importance permutes columns of a table, and {fed.data.name} is none; leave it out")
    return fed.data.fitted.table


def importance(result: Result) -> pa.Table:
    """How much the leading metric of a client's test part gets worse by permuting a column there.

    A column is permuted with all its features: levels, and the flag of missing cells. Columns client, model, column,
    metric, value (mean over `REPEATS` permutations), spread (their standard deviation).
    """
    job = result.job
    table, rows = check_importance(job.eval_fed), list[tuple[int, str, str, str, float, float]]()
    for model in ("global", "personal"):
        for client, row in models_of(result, model, job.scored_ids):
            index = job.eval_fed.indices("test", client)
            if len(index) >= FEWEST:
                scored = _Scored(result, table, row, index)
                importances = _permuted(scored, client)
                rows += [
                    (client, model, column.name, scored.lead, float(mean), float(spread))
                    for column, mean, spread in zip(table.columns, *importances, strict=True)
                ]
    kinds = {"client": pa.int64(), "model": pa.string(), "column": pa.string(), "metric": pa.string()}
    columns = [*kinds.items(), ("value", pa.float64()), ("spread", pa.float64())]
    return pa.table({name: pa.array([row[k] for row in rows], kind) for k, (name, kind) in enumerate(columns)})


class _Scored:
    """A client's model as scikit-learn scores it: row ``[i, j]`` of X is where column j of sample i comes from."""

    def __init__(self, result: Result, table: Table, row: Tensor, index: Tensor) -> None:
        self._job, self._row, self._y = result.job, row, result.job.eval_fed.targets(index)
        self._features = result.job.eval_fed.fetch(index)
        widths = torch.tensor([max(column.levels, 1) + column.flag for column in table.columns])
        self._column = torch.arange(len(widths)).repeat_interleave(widths)
        self.places = np.tile(np.arange(len(index))[:, None], (1, len(widths)))
        self.lead = ""
        self.lead = leading(self._scores(self.places))

    def fit(self, *_: Any) -> _Scored:
        """Do nothing, as scikit-learn needs."""
        return self

    def __call__(self, _: Any, places: NDArray[np.int64], __: Any) -> float:
        """The leading metric, more of which is better."""
        value = float(self._scores(places)[self.lead])
        return value if metric(self.lead).higher else -value

    def _scores(self, places: NDArray[np.int64]) -> dict[str, Tensor]:
        source = torch.from_numpy(places)[:, self._column].to(self._features.device)
        outputs = self._job.oracle.run(self._row, self._features.gather(0, source))
        return self._job.oracle.task.metrics(outputs, self._y, torch.zeros(len(places), dtype=torch.long), 1)


def _permuted(scored: _Scored, client: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation ``[p]`` of what permuting a column costs."""
    from sklearn.inspection import permutation_importance  # slow to import, needed where it is asked for

    state = random_state(generator(scored._job.setting.seed, client=client, purpose="importance"))
    importances = permutation_importance(
        scored, scored.places, np.zeros(len(scored.places)), scoring=scored, n_repeats=REPEATS, random_state=state
    )
    return importances.importances_mean, importances.importances_std
