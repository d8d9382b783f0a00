"""Permutation importance of a table's columns at each client.

Reference: L. Breiman, "Random Forests", Machine Learning 2001, Section 10. The importance is computed with
scikit-learn's `permutation_importance`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.analyses.form import Analysis, AnalysisTerms, Bounds, Info, Question
from fedloom.analyses.models import ModelKind, compute_outputs, iterate_models
from fedloom.analyses.rows import ClientRows
from fedloom.analyses.tables import INTEGER_TYPE, NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.data.federation import DATA_PARTS, Federation
from fedloom.data.tables import Table
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.errors import DataError, Refused
from fedloom.metrics import leading, metric
from fedloom.seeds import generator, random_state
from fedloom.tasks import Task

PERMUTATION_REPEATS = 5
"""Number of permutations of each column, as in scikit-learn's ``permutation_importance``."""
MIN_IMPORTANCE_SAMPLES = 10
"""Minimum number of test samples that a client must have for this analysis."""


class Importance(Analysis):
    """Drop in each client's primary metric after the last round when a column of its test set is permuted."""

    kind: ClassVar[str] = "importance"

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        check_importance(fed)

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return importance(result), ()


class PooledImportance(Analysis):
    """Loss in accuracy and Brier score over all clients' test rows when a column is permuted within each client.

    Both metrics are sums over rows, so real sites can compute them. Metrics that rank rows, such as AUROC, are not
    sums. They are available in simulations with `Importance`.
    """

    kind: ClassVar[str] = "pooled-importance"
    tasks: ClassVar = ("binary", "classification")
    needs_table: ClassVar[bool] = True
    questions: ClassVar = {"scores": {}}
    uses_models: ClassVar[bool] = True

    model_kind: ModelKind = Field(
        None,
        description="model whose predictions are scored (default: global, or personal if there is no global model)",
    )

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        return client.select(client.part == DATA_PARTS.index("test"))

    def start(self, terms: AnalysisTerms) -> tuple[AnalysisTerms, Tensor | None]:
        return terms, None

    def question(self, state: tuple[AnalysisTerms, Tensor | None]) -> Question | None:
        return Question("scores") if state[1] is None else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        most = float(terms.most_rows)
        numbers = 1 + 2 * (1 + len(terms.schema.columns))
        return Bounds.between(torch.zeros(numbers), torch.full((numbers,), 2 * most))

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        rows, columns = self.used(client, terms), terms.schema.columns
        widths = torch.tensor([max(column.levels, 1) + column.flag for column in columns])
        if not len(rows):
            return torch.zeros(1 + 2 * (1 + len(columns)), dtype=torch.float64)
        inputs, ends = rows.inputs, widths.cumsum(0).tolist()
        scores = [self._scores(rows, inputs, len(terms.schema.classes))]
        for high, width in zip(ends, widths.tolist(), strict=True):
            total = torch.zeros(2, dtype=torch.float64)
            for source in _permutations(rows):
                permuted_inputs = inputs.clone()
                permuted_inputs[:, high - width : high] = inputs[source, high - width : high]
                total += self._scores(rows, permuted_inputs, len(terms.schema.classes))
            scores.append(total / PERMUTATION_REPEATS)
        return torch.cat([torch.tensor([float(len(rows))], dtype=torch.float64), *scores])

    def step(
        self, state: tuple[AnalysisTerms, Tensor | None], total: Tensor, info: Info
    ) -> tuple[AnalysisTerms, Tensor | None]:
        if not total[0]:
            raise DataError("no client has test rows. Set a larger test fraction in the partition")
        return state[0], total

    def result(self, state: tuple[AnalysisTerms, Tensor | None]) -> pa.Table:
        terms, total = state
        assert total is not None
        means = total[1:].view(-1, 2) / total[0]
        worse = (means[0] - means[1:]) * torch.tensor([1.0, -1.0], dtype=torch.float64)
        lines = [
            (column.name, name, *map(float, (worse[k, j], means[0, j], total[0])))
            for k, column in enumerate(terms.schema.columns)
            for j, name in enumerate(("accuracy", "brier"))
        ]
        numbers = dict.fromkeys(("value", "unpermuted", "rows"), NUMBER_TYPE)
        return make_table(lines, column=TEXT_TYPE, metric=TEXT_TYPE, **numbers)

    def _scores(self, rows: ClientRows, inputs: Tensor, classes: int) -> Tensor:
        """Return the number of correct predictions and the sum of squared errors (halved for two classes)."""
        outputs, label = compute_outputs(rows, self.model_kind, inputs), rows.y[:, 0].long()
        if classes == 2 and outputs.shape[1] == 1:
            outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
        p = outputs.softmax(1)
        errors = (p - torch.nn.functional.one_hot(label, classes)).square().sum() / (2 if classes == 2 else 1)
        return torch.stack([(p.argmax(1) == label).sum().double(), errors])


def _permutations(rows: ClientRows) -> Iterator[Tensor]:
    """Yield permutations of rows. Each one lists the source of every row ``[N]``.

    The permutations depend on digests of the rows but not on their order.
    """
    cells = torch.cat([rows.x, rows.y], 1).numpy()
    for repeat in range(PERMUTATION_REPEATS):
        key = f"importance {repeat}".encode()
        digests = [hashlib.blake2b(row.tobytes(), key=key, digest_size=8).digest() for row in cells]
        order = torch.tensor(sorted(range(len(digests)), key=digests.__getitem__))
        source = torch.empty_like(order)
        source[order] = order.roll(-1)
        yield source


def check_importance(fed: Federation) -> Table:
    """Return the table whose columns can be permuted.

    Raises:
        ConfigError: the samples are not rows of a table.
    """
    if fed.data.fitted is None:
        raise Refused(
            f"importance permutes columns of a table, but {fed.data.name} is not a table",
            rule="importance-needs-a-table",
            fix="omit this analysis",
        )
    return fed.data.fitted.table


def importance(result: Result) -> pa.Table:
    """Measure how much a client's primary test metric drops when a column is permuted at this client.

    A column is permuted together with all features derived from it: its levels and its missing-value flag. The table
    has the columns client, model, column, metric, value (mean over `PERMUTATION_REPEATS` permutations), and spread
    (standard deviation over these permutations).
    """
    job = result.job
    check_importance(job.eval_fed)
    rows = list[tuple[int, str, str, str, float, float]]()
    for model in ("global", "personal"):
        for client, row in iterate_models(result, model, job.scored_ids):
            index = job.eval_fed.indices("test", client)
            if len(index) >= MIN_IMPORTANCE_SAMPLES:
                scored = Scored(partial(job.oracle.run, row), job.oracle.task, job.eval_fed, index)
                rows += [(client, model, *line) for line in measure_permutations(scored, job.setting.seed, client)]
    return make_table(
        rows, client=INTEGER_TYPE, model=TEXT_TYPE, column=TEXT_TYPE, metric=TEXT_TYPE, value=NUMBER_TYPE,
        spread=NUMBER_TYPE,
    )  # fmt: skip


class Scored:
    """Wrapper of a client's model for use with scikit-learn.

    Entry ``[i, j]`` of X is the index of the row that provides column j of sample i.

    Args:
        run: function that computes the model's outputs ``[N, k]`` from features.
        task: task that defines the metrics.
        fed: federation whose samples are rows of a table.
        index: indices of the client's samples.
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
        """Do nothing. scikit-learn requires this method."""
        return self

    def __call__(self, _: object, places: NDArray[np.int64], __: object) -> float:
        """Return the value of the primary metric. Higher is better."""
        value = float(self._scores(places)[self.lead])
        return value if metric(self.lead).higher_is_better else -value

    def _scores(self, places: NDArray[np.int64]) -> dict[str, Tensor]:
        source = torch.from_numpy(places)[:, self._column].to(self._features.device)
        outputs = self._run(self._features.gather(0, source))
        return self._task.metrics(outputs, self._y, torch.zeros(len(places), dtype=torch.long), 1)


def measure_permutations(scored: Scored, seed: int, client: int) -> list[tuple[str, str, float, float]]:
    """Return, for each column, its name, the metric, and the mean and standard deviation of the metric's decrease.

    Args:
        scored: wrapper of the client's model with the client's samples.
        seed: seed of the run. Together with ``client``, the seed determines the permutations.
        client: number of the client.
    """
    from sklearn.inspection import permutation_importance  # slow to import, so imported only where it is used

    costs = permutation_importance(
        scored, scored.places, np.zeros(len(scored.places)), scoring=scored, n_repeats=PERMUTATION_REPEATS,
        random_state=random_state(generator(seed, client=client, purpose="importance")),
    )  # fmt: skip
    figures = zip(scored.columns, costs.importances_mean, costs.importances_std, strict=True)
    return [(column.name, scored.lead, float(mean), float(spread)) for column, mean, spread in figures]
