"""Results of a deployment, written on the server as a run directory so that `fedloom report` can read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fedloom.analyses.patients import GroupScore, group_table
from fedloom.engine.job import Job
from fedloom.engine.state import State
from fedloom.errors import Stop
from fedloom.lab.experiment import Experiment
from fedloom.lab.experiment.outputs import label_rows, partition_table, write_measured, write_parquet, write_settings
from fedloom.rundir import GROUPS_FILE, PARTITION_FILE, SUMMARY_FILE, RunRecord, SiteSummary, Summary, analysis_file
from fedloom.storage import make_folder, write_atomic
from fedloom.storage.checkpoint import save_tensors
from fedloom_sites.deploy.audit import read_entries
from fedloom_sites.deploy.ops.status import summarize_clients, summarize_counters
from fedloom_sites.deploy.settings import Server


class Results:
    """Files ``experiment.toml``, ``{metrics,timings,partition}.parquet``, ``global.safetensors``, ``summary.json``.

    Args:
        settings: the server's settings.
        experiment: experiment with one method and one seed.

    Raises:
        CheckpointError: (raised by any method) the disk is full or cannot be written to.
    """

    def __init__(self, settings: Server, experiment: Experiment) -> None:
        self._settings, self._experiment = settings, experiment
        self._job: Job | None = None
        self._rounds, self._notes = 0, tuple[str, ...]()

    def hold(self, job: Job, state: State) -> None:
        """Store the values for the summary, which is written regardless of why the run ended."""
        self._job, self._rounds, self._notes = job, state.round, state.notes

    def tables(self, job: Job, state: State) -> None:
        """Write the measured values, the public sizes of the sites, and the global model."""
        self.hold(job, state)
        out, method, seed = self._settings.results, self._experiment.methods[0], self._experiment.head.seeds[0]
        make_folder(out)
        write_settings(out, self._experiment)
        seconds = (state.times.steady_seconds(), state.times.startup())
        write_measured(out, [(method.label, seed, state.records.table(), seconds)])
        members = {m.client: m.site for m in self._settings.sites}
        names = [members.get(c, str(c)) for c in range(job.n)]
        sizes = job.fed.sizes("train").numpy()
        write_parquet(out / PARTITION_FILE, [partition_table(seed, names, sizes, np.zeros((job.n, 0), np.int64))])
        shared = job.algorithm.global_model(state.server)
        if shared is not None:
            header = {**job.oracle.layout.header(), "round": str(state.round)}
            save_tensors(out / "global.safetensors", {"rows": shared.cpu()}, header)

    def groups(self, scores: Sequence[GroupScore]) -> None:
        """Write the scores of groups after the last round."""
        label, seed = self._experiment.methods[0].label, self._experiment.head.seeds[0]
        write_parquet(
            self._settings.results / GROUPS_FILE, [label_rows(group_table(scores), label, seed)] if scores else []
        )

    def analysis(self, name: str, table: pa.Table) -> None:
        """Write the result of an analysis over the rows of all sites."""
        write_parquet(self._settings.results / analysis_file(name), [table])

    def summary(self, stop: Stop | None, detail: str, here: Collection[int], diverged: int | None = None) -> None:
        """Write a summary of the run's progress or end, and of each site's participation.

        Args:
            stop: reason why the run ended. None while the run is still in progress.
            detail: explanation of the end.
            here: connected clients.
            diverged: round in which divergence was detected, if the run still continued to its end.
        """
        settings, method, job = self._settings, self._experiment.methods[0], self._job
        reason = "the run has not ended" if stop is None else f"{stop.value}{f' ({detail})' if detail else ''}"
        more: dict[str, Any] = {} if diverged is None else {"diverged": diverged}
        if job is not None:
            more |= {"oracle": job.oracle.name, "chunk": 1, "device": "cpu", "parameters": job.oracle.layout.d}
        run = RunRecord(
            method=method.label, algorithm=method.algorithm, role=method.setting.role,
            seed=self._experiment.head.seeds[0], status=(stop or Stop.INTERRUPTED).status,
            reason=reason, rounds=self._rounds, **more,
        )  # fmt: skip
        members = {m.client: m.site for m in settings.sites}
        log = read_entries(settings.audit)
        rows = summarize_clients(log, members, self._rounds)
        summary = Summary(
            name=settings.name, runs=(run,), clients=settings.clients, classes=settings.samples.classes,
            select_on=self._experiment.common.evaluate.select_on, warnings=(*self._notes, *summarize_counters(log)),
            metrics=self._experiment.methods[0].setting.task.directions,
            stop=stop and stop.name, reason=reason if stop is None else stop.value, detail=detail,
            sites={members[c]: SiteSummary(here=c in here, **tally) for c, tally in rows.items()},
        )  # fmt: skip
        make_folder(settings.results)
        write_atomic(settings.results / SUMMARY_FILE, summary.content())
