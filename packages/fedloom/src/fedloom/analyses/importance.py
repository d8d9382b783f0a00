"""Permutation importance of a table's columns at every client.

Reference: L. Breiman, "Random Forests", Machine Learning 2001, Section 10, by scikit-learn's `permutation_importance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.analyses.form import Analysis
from fedloom.analyses.models import models_of
from fedloom.analyses.tables import INTEGER_TYPE, NUMBER_TYPE, TEXT_TYPE, table_of
from fedloom.data.federation import Federation
from fedloom.data.tables import Table
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.errors import Refused
from fedloom.metrics import leading, metric
from fedloom.seeds import generator, random_state
from fedloom.tasks import Task

PERMUTATION_REPEATS = 5
"""Number of times that a column is permuted."""
MIN_IMPORTANCE_SAMPLES = 10
"""Smallest number of test samples of a client."""


class Importance(Analysis):
    """Loss of every client's leading metric when a column of its test part is permuted, after the last round."""

    kind: ClassVar[str] = "importance"

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        check_importance(fed)

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return importance(result), ()


def check_importance(fed: Federation) -> Table:
    """Return the table whose columns are permuted.

    Raises:
        ConfigError: the samples are not rows of a table.
    """
    if fed.data.fitted is None:
        raise Refused(
            f"importance permutes columns of a table, but {fed.data.name} is not a table",
            rule="importance-needs-a-table",
            fix="leave it out",
        )
    return fed.data.fitted.table


def importance(result: Result) -> pa.Table:
    """Measure how much a client's leading test metric worsens when a column is permuted there.

    A column is permuted together with all its features: levels, and the flag of missing cells. Columns client, model,
    column,
    metric, value (mean over `PERMUTATION_REPEATS` permutations), spread (their standard deviation).
    """
    job = result.job
    check_importance(job.eval_fed)
    rows = list[tuple[int, str, str, str, float, float]]()
    for model in ("global", "personal"):
        for client, row in models_of(result, model, job.scored_ids):
            index = job.eval_fed.indices("test", client)
            if len(index) >= MIN_IMPORTANCE_SAMPLES:
                scored = Scored(partial(job.oracle.run, row), job.oracle.task, job.eval_fed, index)
                rows += [(client, model, *line) for line in permuted(scored, job.setting.seed, client)]
    return table_of(
        rows,
        client=INTEGER_TYPE,
        model=TEXT_TYPE,
        column=TEXT_TYPE,
        metric=TEXT_TYPE,
        value=NUMBER_TYPE,
        spread=NUMBER_TYPE,
    )


class Scored:
    """A client's model in scikit-learn's form: row ``[i, j]`` of X is the row from which column j of sample i comes.

    Args:
        run: outputs ``[N, k]`` of the model on features.
        task: task with the metrics.
        fed: the samples of a table.
        index: samples of the client.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], task: Task, fed: Federation, index: Tensor) -> None:
        self._run, self._task, self.columns = run, task, check_importance(fed).columns
        self._y, self._features = fed.targets(index), fed.fetch(index)
        widths = torch.tensor([max(column.levels, 1) + column.flag for column in self.columns])
        self._column = torch.arange(len(widths)).repeat_interleave(widths)
        self.places = np.tile(np.arange(len(index))[:, None], (1, len(widths)))
        self.lead = ""
        self.lead = leading(self._scores(self.places))

    def fit(self, *_: object) -> Scored:
        """Do nothing, because scikit-learn requires this method."""
        return self

    def __call__(self, _: object, places: NDArray[np.int64], __: object) -> float:
        """Return the leading metric. Higher is better."""
        value = float(self._scores(places)[self.lead])
        return value if metric(self.lead).higher else -value

    def _scores(self, places: NDArray[np.int64]) -> dict[str, Tensor]:
        source = torch.from_numpy(places)[:, self._column].to(self._features.device)
        outputs = self._run(self._features.gather(0, source))
        return self._task.metrics(outputs, self._y, torch.zeros(len(places), dtype=torch.long), 1)


def permuted(scored: Scored, seed: int, client: int) -> list[tuple[str, str, float, float]]:
    """Return each column's name, the metric, and mean and standard deviation of its loss by permutation.

    Args:
        scored: the client's model on its samples.
        seed: seed of the run, which determines the permutations with the next argument.
        client: its number.
    """
    from sklearn.inspection import permutation_importance  # slow to import, needed where it is asked for

    costs = permutation_importance(
        scored, scored.places, np.zeros(len(scored.places)), scoring=scored, n_repeats=PERMUTATION_REPEATS,
        random_state=random_state(generator(seed, client=client, purpose="importance")),
    )  # fmt: skip
    figures = zip(scored.columns, costs.importances_mean, costs.importances_std, strict=True)
    return [(column.name, scored.lead, float(mean), float(spread)) for column, mean, spread in figures]
