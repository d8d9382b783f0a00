"""Result of a run: its metrics and models."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedloom.data.input_spec import InputSpec
from fedloom.engine.clients.scores import choose_model, pass_own, pass_shared, personal_models, recalibration_lines
from fedloom.engine.job import Job
from fedloom.engine.records import unmeasured_metric_error
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import FATE_COLUMN, LOG_COLUMNS, Clock, ReplyOutcome
from fedloom.errors import ConfigError, Stop
from fedloom.formats import as_pandas, fold_repeated_notes
from fedloom.lazy import import_display
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.local.rows import Fields, to_device
from fedloom.metrics import SUMMARY_METRICS, leading
from fedloom.metrics import metric as facts
from fedloom.trained.adapt import ServerSide
from fedloom.trained.model import ModelRecipe, running_statistics
from fedloom.trained.model_source import MODEL_CHOICES
from fedloom.trained.models import KIND_PREFERENCE, Models

if TYPE_CHECKING:
    from altair import LayerChart


class Result:
    """Metrics and models of a completed or interrupted run.

    Attributes:
        stop: reason why the run ended.
        detail: round, clients and numbers that explain an early end, as text.
        rounds: number of completed rounds.
        notes: sentences that start with ``data:`` and describe the data and their split, and sentences about the run,
            for example about dropped clients. Identical notes are listed once, with the number of occurrences.
        status: done, diverged, interrupted or failed.
        diverged: round in which divergence was detected, if the run still continued to its last round with finite
            metrics. Otherwise None.
        seconds: duration of each round in seconds, excluding evaluation and the one-time costs in the first round of a
            process.
        startup: one-time costs of each round, such as compilation, forks and page faults (see
            `fedloom.engine.state.Times`).
        models: the method's "global", "personal" and "hybrid" models (see `Models`).
    """

    def __init__(self, job: Job, state: State, stop: Stop, detail: str, diverged: int | None = None) -> None:
        job = job.replace_shares(state.shares)
        self.job, self.state, self.stop, self.detail, self.diverged = job, state, stop, detail, diverged
        self.rounds, self.notes, self.status = state.round, fold_repeated_notes(state.notes), stop.status
        self.seconds, self.startup = state.times.steady_seconds(), state.times.startup()
        self.models = Models(LiveModels(job, state))

    def table(self) -> pa.Table:
        """Return a tidy table with the columns round, client (-1 is the federation), model, part, metric and value."""
        return self.state.records.table()

    def to_pandas(self) -> Any:
        """Return `table` as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        return as_pandas(self.table())

    def final(self, model: str | None = None, metric: str | None = None, part: str = "test") -> Tensor:
        """Return a metric's last value for each evaluated client (see `Job.scored_ids`), float64 ``[s]``.

        Args:
            model: "global", "personal" or "hybrid". If None, the model that a client would use: the hybrid model if it
                was measured, otherwise the personal model, otherwise the global model.
            metric: name of the metric. If None, accuracy, or the task's primary metric if accuracy was not measured.
            part: part of the clients' data.

        Raises:
            ConfigError: the metric was not measured.
        """
        metric, model = self._measured(model, metric, part)
        values = self.state.records.last(model, part, metric)
        assert values is not None
        return torch.from_numpy(values)

    def _measured(self, model: str | None, metric: str | None, part: str) -> tuple[str, str]:
        """Check that a metric was measured for each client, and return the metric and the model."""
        model = model or self.used
        names = {r.metric for r in self.state.records.items if (r.model, r.part) == (model, part) and not r.total}
        metric = metric or ("accuracy" if "accuracy" in names else leading(names))
        if metric not in names:
            measured = ((r.model, r.part, r.metric) for r in self.state.records.items if not r.total)
            raise unmeasured_metric_error(model, metric, part, measured)
        return metric, model

    @property
    def used(self) -> str:
        """Model that a client would use: the most personal model that was measured."""
        measured = {r.model for r in self.state.records.items}
        return next((kind for kind in KIND_PREFERENCE if kind in measured), KIND_PREFERENCE[-1])

    def uploads(self) -> pa.Table:
        """Return a table of all training tasks in virtual time, ordered by end time.

        Columns: ``client``. ``version`` is the number of server steps when the task was dispatched. ``round`` is the
        server step that used the result or during which the task was abandoned. ``start``, ``end`` and ``busy`` are
        times in seconds. ``fate`` tells how the task ended (see `fedloom.engine.virtual.clock.ReplyOutcome`), and
        ``staleness`` is the number of server steps between the dispatch of the task and the use of its result.

        Raises:
            ConfigError: the run has no devices.
        """
        log = self._clock().history()
        columns: dict[str, Any] = {name: log[:, k].astype(np.int64) for k, name in enumerate(LOG_COLUMNS[:3])}
        columns |= {name: log[:, k] for k, name in enumerate(LOG_COLUMNS) if name in ("start", "end", "busy")}
        fates = [ReplyOutcome(int(code)).name.lower() for code in log[:, FATE_COLUMN]]
        return pa.table({**columns, "fate": fates, "staleness": columns["round"] - columns["version"] - 1})

    def time_to(
        self,
        target: float,
        metric: str | None = None,
        model: str | None = None,
        part: str = "test",
        by: Literal["all", "client", "device"] = "all",
    ) -> dict[str, float]:
        """Return the simulated seconds until an evaluation first reaches the target value, or inf if none does.

        Args:
            target: target value of the metric.
            metric: name of the metric. If None, accuracy, or the task's primary metric if accuracy was not measured.
            model: "global", "personal" or "hybrid". If None, the model that a client would use.
            part: part of the clients' data.
            by: "all" for the mean over clients, "client" for each client (keyed by number), or "device" for the mean
                over each device class.

        Raises:
            ConfigError: the run has no devices, or the metric was not measured.
        """
        self._clock()
        fleet = self.job.fleet
        assert fleet is not None
        name, wanted = self._measured(model, metric, part)
        ids, items = self.job.scored_ids, self.state.records.items
        times = {r.round: float(r.values[0]) for r in items if r.metric == "simulated_seconds"}
        groups = {"all": torch.zeros(len(ids), dtype=torch.long), "client": torch.arange(len(ids))}
        member = groups.get(by, fleet.member[ids]).numpy()
        names = {"all": ["all"], "client": [str(i) for i in ids.tolist()]}.get(by, [*fleet.names])
        reached = dict.fromkeys((label for k, label in enumerate(names) if (member == k).any()), math.inf)
        for r in items:
            if (r.model, r.part, r.metric, r.total) != (wanted, part, name, False):
                continue
            for k, label in enumerate(names):
                group_values = r.values[member == k]
                if len(group_values) and not np.isnan(group_values).all() and math.isinf(reached[label]):
                    mean = float(np.nanmean(group_values))
                    if mean >= target if facts(name).higher_is_better else mean <= target:
                        reached[label] = times[r.round]
        return reached

    def _clock(self) -> Clock:
        if self.state.clock is None:
            raise ConfigError(
                "this run has no simulated clock. Pass devices to fl.simulate, for example devices='lognormal'"
            )
        return self.state.clock

    def chart(self, metric: str | None = None, part: str = "test") -> LayerChart:
        """Plot a metric by round as an Altair chart (see `fedloom.lazy.import_display`)."""
        chart: LayerChart = import_display().draw_curve(self.table(), metric, part)
        return chart

    plot = chart

    def _repr_html_(self) -> str:
        """Return a small table and a curve as HTML for notebooks."""
        page: str = import_display().notebook_page(self.table(), repr(self))
        return page

    def __repr__(self) -> str:
        """Return a one-line summary of the run and its outcome."""
        end = f" ({self.detail})" if self.detail else ""
        parts = [type(self.job.algorithm).__name__, f"{self.rounds} rounds", f"{self.stop.value}{end}"]
        names = {r.metric for r in self.state.records.items if (r.model, r.part) == (self.used, "test") and not r.total}
        if names:
            name = leading(names)
            values = self.final(None, name)
            parts.append(f"test {name} {float(values.nanmean()):.4g} ({self.used})")
        return f"Result({', '.join(parts)})"


class LiveModels:
    """Source of models that takes them from a run in memory."""

    def __init__(self, job: Job, state: State) -> None:
        self._job, self._state = job, state
        self.names = job.eval_fed.names
        run, facts = job.setting, InputSpec.create(job.eval_fed.data)
        self.recipe = ModelRecipe(run.model, facts, run.seed, job.oracle.dtype, run.task)
        name = type(job.algorithm).__name__
        conversion = job.eval_fed.data.conversion
        self.about = {"method": name, "algorithm": name, "seed": job.setting.seed, "rounds": state.round}
        self.about |= {"conversion": conversion} if conversion else {}

    @property
    def fitted(self) -> Tensor | None:
        fitted = self._job.eval_fed.data.fitted
        return None if fitted is None else fitted.values

    def kinds(self) -> list[str]:
        shared = self._job.algorithm.global_model(self._state.server) is not None
        personal = self._job.has_personal
        evaluate, every = self._job.setting.evaluate, len(self._job.scored_ids) == len(self.names)
        chosen = evaluate.select_on in evaluate.parts and every
        return [
            k
            for k, exists in zip(MODEL_CHOICES, (shared, personal, shared and personal and chosen), strict=True)
            if exists
        ]

    @isolate_torch_settings()
    def shared(self) -> tuple[Tensor, Tensor]:
        row = self._job.algorithm.global_model(self._state.server)
        assert row is not None
        return row.cpu(), self._statistics(row, self._state.cohort)

    @isolate_torch_settings()
    def personal(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        job = self._job
        rows = personal_models(job, self._down, max(self._state.round, 1), ids)
        width = sum(s.numel() for s in running_statistics(job.oracle.module))
        statistics = torch.zeros(len(ids), width, dtype=job.oracle.dtype)
        for k, i in enumerate(ids if width else ()):
            statistics[k] = self._statistics(rows[k], i[None])
        return rows.cpu(), statistics

    @cached_property
    def _down(self) -> Fields:
        """Download for all clients. It may depend on all rows that the server stores."""
        return self._job.down(self._state.server, max(self._state.round, 1))

    @isolate_torch_settings()
    def calibration(self, kind: str) -> Tensor | None:
        job, ids = self._job, torch.arange(len(self.names))
        part = job.setting.task.line_part
        if part is None:
            return None
        if kind == "personal":
            models = personal_models(job, self._down, max(self._state.round, 1), ids)
            return recalibration_lines(job, pass_own(job, models, ids, part))
        row = job.algorithm.global_model(self._state.server)
        assert row is not None
        job.oracle.set_statistics(row.to(job.oracle.device), self._state.cohort)
        return recalibration_lines(job, pass_shared(job, row.to(job.oracle.device), ids, part))

    def takes_global(self) -> Tensor:
        records, part = self._state.records, self._job.setting.evaluate.select_on
        scores: dict[tuple[str, str], dict[str, Tensor]] = {
            (model, part): {
                metric: torch.from_numpy(values)
                for metric in SUMMARY_METRICS
                if (values := records.last(model, part, metric)) is not None
            }
            for model in ("global", "personal")
        }
        return choose_model(scores, part)

    def server(self) -> ServerSide:
        job, cpu = self._job, torch.device("cpu")
        kept = job.kept.read(torch.arange(job.n)) if job.algorithm.mixes else None
        server = to_device(self._state.server, cpu)
        local, seed = job.setting.local, job.setting.seed
        return ServerSide(job.algorithm, local, server, kept, job.alpha, job.train_sizes, self._state.round, seed)

    def _statistics(self, row: Tensor, ids: Tensor) -> Tensor:
        """Compute a model's running statistics ``[b]`` from clients' training data."""
        oracle = self._job.oracle
        oracle.set_statistics(row.to(oracle.device), ids)
        statistics = [s.flatten() for s in running_statistics(oracle.module)]
        return torch.cat([torch.zeros(0, dtype=oracle.dtype, device=oracle.device), *statistics]).cpu()
