"""One run of a run directory, with its recorded metrics and its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import torch
from torch import Tensor

from fedloom.engine.records import unmeasured_metric_error
from fedloom.lab.report.reading import rows_where
from fedloom.metrics import leading
from fedloom.trained.models import KIND_PREFERENCE, Models
from fedloom.trained.saved import SavedModels

if TYPE_CHECKING:
    from altair import LayerChart


@dataclass(frozen=True)
class RecordedRun:
    """One run in a run directory, as recorded in its `fedloom.engine.result.Result` at the end.

    Attributes:
        method: label of the method.
        seed: seed of the run.
        status: word that states how the run ended: done, diverged, interrupted or failed.
        reason: sentence that states how the run ended.
        rounds: number of completed rounds.
    """

    method: str
    seed: int
    status: str
    reason: str
    rounds: int
    _whole: Callable[[], pa.Table] = field(repr=False, compare=False)
    _saved: Callable[[], SavedModels] = field(repr=False, compare=False)

    def table(self) -> pa.Table:
        """Return a tidy table with the columns round, client (-1 for the federation), model, part, metric and value."""
        return rows_where(self._whole(), method=self.method, seed=self.seed).drop_columns(["method", "seed"])

    def final(self, model: str | None = None, metric: str | None = None, part: str = "test") -> Tensor:
        """Return a metric of each scored client after the last evaluated round, as float64 ``[s]``.

        Args:
            model: kind of model, as in `fedloom.engine.result.Result.final`. If None, this is the model that a client
                would use.
            metric: name of the metric. If None, this is accuracy, or the task's primary metric if accuracy was not
                measured.
            part: part of each client's samples, such as "test".

        Raises:
            ConfigError: the metric was not measured.
        """
        import pyarrow.compute as pc  # slow to import

        if model is None:
            measured = {kind for kind, _, _ in self.measured()}
            model = next((kind for kind in KIND_PREFERENCE if kind in measured), KIND_PREFERENCE[-1])
        names = {name for kind, place, name in self.measured() if (kind, place) == (model, part)}
        metric = metric or ("accuracy" if "accuracy" in names else leading(names))
        if (model, part, metric) not in self.measured():
            raise unmeasured_metric_error(model, metric, part, self.measured())
        rows = rows_where(self._clients, model=model, part=part, metric=metric)
        last = rows.filter(pc.equal(rows["round"], pc.max(rows["round"]))).sort_by("client")
        return torch.from_numpy(last["value"].to_numpy().copy())

    def chart(self, metric: str | None = None, part: str = "test") -> LayerChart:
        """Return an Altair chart of a metric by round (see `fedloom.lab.report.notebook.draw_curve`)."""
        from fedloom.lab.report import notebook as display  # slow to import, needed where charts are drawn

        return display.draw_curve(self.table(), metric, part)

    def _repr_html_(self) -> str:
        from fedloom.lab.report import notebook as display

        return display.notebook_page(
            self.table(), f"{self.method}, seed {self.seed}: {self.rounds} rounds, {self.reason}"
        )

    def measured(self) -> set[tuple[str, str, str]]:
        """Return the metrics recorded for every client, each as (model, part, metric)."""
        kinds = self._clients.group_by(["model", "part", "metric"]).aggregate([])
        return {(r["model"], r["part"], r["metric"]) for r in kinds.to_pylist()}

    @cached_property
    def _clients(self) -> pa.Table:
        import pyarrow.compute as pc  # slow to import

        return self.table().filter(pc.field("client") >= 0)

    @cached_property
    def models(self) -> Models:
        """Models of the run, loaded on first use.

        Raises:
            RunDirError: the run has no models, for example because it is not finished.
            LayoutError: the files are damaged or contain a different architecture.
        """
        return Models(self._saved())
