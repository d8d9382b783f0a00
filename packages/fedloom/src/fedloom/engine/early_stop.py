"""Early stopping, which ends a run when its validation metric no longer improves and selects the round to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import Field, field_validator

from fedloom.hints import unknown_name_error
from fedloom.metrics import METRICS
from fedloom.metrics import metric as facts
from fedloom.values import Value

if TYPE_CHECKING:
    from fedloom.engine.records import Record, Records


class ScoredState(Protocol):
    """State of a run with its scores (see `fedloom.engine.state.State`)."""

    @property
    def round(self) -> int:
        """Number of completed rounds."""
        ...

    @property
    def records(self) -> Records:
        """Records of the run up to and including this round."""
        ...


class EarlyStop(Value):
    """Early stopping: the run ends if its validation metric has not improved in the most recent evaluations.

    The monitored value is the mean of the metric over clients. With ``result = "best"``, the result is taken from the
    best evaluated round instead of the last round. To obtain the models, the rounds up to the best round are run again,
    so the run takes up to twice as long. An EarlyStop that is passed as a callback only ends the run. In this case,
    ``best`` raises an error.
    """

    metric: str = Field("loss", description="metric to monitor, from `fedloom.metrics.METRICS`")
    model: Literal["global", "personal", "hybrid"] | None = Field(
        None,
        description="model to monitor (None: the personal model, or the global model if there is no personal model)",
    )
    part: Literal["validation", "train"] = Field(
        "validation",
        description="data part on which the metric is computed. The test part is not allowed",
    )
    patience: int = Field(5, ge=1, description="number of evaluations without an improvement before the run stops")
    min_delta: float = Field(0.0, ge=0, description="minimum change that counts as an improvement")

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if metric.partition("[")[0] not in METRICS:
            raise unknown_name_error("metric", metric, METRICS)
        return metric

    result: Literal["last", "best"] = Field("last", description="round whose models and metrics become the result")

    def __call__(self, state: ScoredState) -> str | None:
        """Return a sentence that explains why the run should end, or None to continue."""
        model, history = self._monitored_values(state.records)
        if not history or history[-1][0] != state.round:
            return None
        last = self._best_index(history)
        if len(history) - 1 - last < self.patience:
            return None
        what = f"{model} {self.part} {self.metric}"
        return f"{what} has not improved on {history[last][1]:.4g} since round {history[last][0]}"

    def best_round(self, records: Records) -> int | None:
        """Return the number of the best evaluated round (counted from 1).

        Return None if the metric was not measured in round 1 or later.
        """
        history = [(round, value) for round, value in self._monitored_values(records)[1] if round]
        return history[self._best_index(history)][0] if history else None

    def _monitored_values(self, records: Records) -> tuple[str, list[tuple[int, float]]]:
        """Return the monitored model and the pairs of a round and its metric value."""
        models = {r.model for r in records.items if self._is_mine(r)}
        model = self.model or ("personal" if "personal" in models else "global")
        return model, [(r.round, float(r.values[0])) for r in records.items if self._is_mine(r) and r.model == model]

    def _best_index(self, history: list[tuple[int, float]]) -> int:
        """Return the index of the best value. A later value must be better by more than ``min_delta``."""
        sign = -1.0 if facts(self.metric).higher_is_better else 1.0
        best, last = history[0][1], 0
        for k, (_, value) in enumerate(history):
            if sign * value < sign * best - self.min_delta:
                best, last = value, k
        return last

    def _is_mine(self, record: Record) -> bool:
        return record.total and (record.part, record.metric) == (self.part, f"{self.metric}/mean")
