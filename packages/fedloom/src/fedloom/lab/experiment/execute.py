"""Run an experiment: execute all missing runs, in parallel if this is faster."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from fedloom.analyses import ANALYSES, check_analysis
from fedloom.analyses.fitted import run_setting
from fedloom.analyses.registry import get_analysis_name
from fedloom.data.dataset import default_to_cpu
from fedloom.data.federation import Federation
from fedloom.data.groups import keep_group_columns
from fedloom.engine.result import Result
from fedloom.engine.setup import check
from fedloom.engine.simulate import Progress, simulate
from fedloom.engine.state import State
from fedloom.errors import CodeError, ConfigError, DamagedCheckpoint, LayoutError, Refused, RunStopped, adapt_wording
from fedloom.lab import report
from fedloom.lab.experiment.events import EVENT_INTERVAL_SECONDS, Event, EventEmitter, EventQueue, Listener
from fedloom.lab.experiment.live import LiveFigures
from fedloom.lab.experiment.outputs import Outcome, write_analyses, write_summary, write_tables
from fedloom.lab.experiment.schema import Experiment, Method
from fedloom.lab.experiment.units.directory import ExperimentDirectory, is_whole
from fedloom.lab.experiment.units.executors import Executor, check_executor, compute_units
from fedloom.lab.experiment.units.further import FurtherRuns
from fedloom.lab.experiment.units.joined import JoinedWork, WorkUnit
from fedloom.lab.experiment.units.shares import ProcessShare, decide_share
from fedloom.lab.experiment.units.travel import PackedExperiment, pack_experiment
from fedloom.lab.report.charts.look import can_draw
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.outputs import check_output_folder, is_run_directory
from fedloom.processes.pool import WorkerPool
from fedloom.processes.ranks import SINGLE_RANK, Ranks
from fedloom.processes.signals import interruptible
from fedloom.rundir import (
    CHECKPOINTS_FOLDER,
    LIVE_FOLDER,
    MODELS_FOLDER,
    REPORT_FILE,
    RESULT_FILES,
    RESULT_FOLDERS,
    SETTINGS_FILE,
    WORK_FOLDER,
    analysis_file,
)
from fedloom.storage.checkpoint import check_file_digest
from fedloom.storage.claims import UnitClaim, publish
from fedloom.storage.files import make_folder, write_atomic
from fedloom.storage.locks import lock

NO_CHOICES: Mapping[Any, Any] = MappingProxyType({})
NO_REPORT_WARNING = (
    "no report.html is written, because its charts need another package. Run: pip install 'fedloom[charts]'"
)


class Plan:
    """Runs of an experiment in a run directory.

    Args:
        experiment: the experiment to run.
        out: run directory, which is created if it does not exist.
        data_dir: folder of data sets.
        force: True to discard the existing results. They are discarded after `run` has locked the directory.
        partly: True to discard only the results of the methods in this experiment. The directory must already belong to
            this experiment.
        dry: True to inspect the directory without writing or discarding anything.
        reads: files read by the caller, such as the experiment file.
        ranks: distributed processes, which must all make the same calls. Only rank 0 accesses the run directory, apart
            from rows stored separately on each machine.

    Attributes:
        notes: remarks about each method that are known before its first round, keyed by label.

    Raises:
        RunDirError: the directory belongs to a different experiment, or is not a run directory.
        DataError: the data cannot be read.
        ConfigError: the experiment is invalid, or the directory lies inside a different run directory or a deployment,
            or contains a file that the caller reads. Nothing has been written.
    """

    @default_to_cpu()
    @adapt_wording("file")
    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        data_dir: Path | None = None,
        *,
        force: bool = False,
        partly: bool = False,
        dry: bool = False,
        reads: Sequence[object] = (),
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        self.experiment, self.out, self.ranks = experiment, out, ranks
        self._directory = ExperimentDirectory(experiment, out, force=force, partly=partly)
        self.runs = self._directory.runs
        if ranks.rank == 0:
            entries = (
                *RESULT_FOLDERS,
                *RESULT_FILES,
                *map(analysis_file, ANALYSES),
                *(() if is_run_directory(out) else (SETTINGS_FILE,)),
            )
            check_output_folder(out, (*reads, experiment.source_options.get("source")), entries=entries)
            self._directory.check()
        data = keep_group_columns(experiment.source, experiment.kept_columns).read(data_dir)
        self.federations: dict[int, Federation] = {s: experiment.partition(data, s) for s in experiment.head.seeds}
        first = experiment.head.seeds[0]
        fed = self.federations[first]
        self._checksum = data.checksum
        self.notes = {m.label: check(m.setting.with_(seed=first), fed) for m in experiment.compared}
        for method, seed in self.runs:
            if seed != first:
                check(method.setting.with_(seed=seed), self.federations[seed])
        for analysis in experiment.analyses:
            if analysis.runs_further and ranks.size > 1:
                raise Refused(
                    f"{get_analysis_name(analysis)} trains additional runs in a single process. Omit this analysis"
                )
            for method, seed in self.runs:
                check_analysis(analysis, self.federations[seed], method.setting.with_(seed=seed))
        if ranks.rank == 0 and not dry:
            make_folder(out)

    @property
    def remarks(self) -> list[str]:
        """Remarks about the first seed's clients, and about the methods.

        Each remark is listed once, with the labels of the affected methods.
        """
        labels = dict[str, list[str]]()
        for label, notes in self.notes.items():
            for note in notes:
                labels.setdefault(note, []).append(label)
        fed = self.federations[self.experiment.head.seeds[0]]
        of_data = [f"data: {note}" for note in fed.remarks]
        return [
            *([] if can_draw() else [NO_REPORT_WARNING]),
            *of_data,
            *(f"{', '.join(m)}: {note}" for note, m in labels.items()),
        ]

    @property
    def rounds(self) -> dict[str, int]:
        """Number of rounds of each method, summed over all seeds and keyed by label."""
        return self.experiment.rounds

    @cached_property
    def share(self) -> ProcessShare:
        """Number of simultaneous runs, and number of processes per run."""
        return ProcessShare(1, 1) if self.ranks.size > 1 else decide_share(self.experiment, self.federations)

    @isolate_torch_settings()
    def run(
        self, *listeners: Listener, page: bool = True, join: bool = False, executor: Executor | None = None
    ) -> list[Outcome]:
        """Execute the missing runs, write all files of the run directory, and return all outcomes.

        Args:
            listeners: functions called with an event after every round and at the end of every run.
            page: True to write the HTML report.
            join: True to share the runs with other processes that join the experiment, on any machine that can access
                the directory.
            executor: executor with a method ``submit(function, *arguments)`` that performs the runs (see
                `units.executors`).

        Returns:
            Every run's outcome, including runs that were already complete.

        Raises:
            CheckpointError: the disk is full or a write fails. Completed work is not lost.
            RunDirError: another process is using the directory, or has started a different experiment in it. This error
                is also raised if two labels differ only in case and the file system is not case-sensitive.
            ConfigError: ``join`` is combined with ranks or with an option that discards existing results.
            RunStopped: the user interrupted this process, which had joined the experiment. The other processes
                continue.
        """
        if executor is not None:
            self._check_executor(executor, join=join)
        if join:
            return self._run_joined(listeners, page=page)
        if self.ranks.rank > 0:
            return self._run_all(listeners)
        with lock(self.out):
            self._directory.prepare(self.federations)
            ended, read = set[tuple[str, int]](), dict[tuple[str, int], Outcome]()
            interrupted, failures = False, dict[tuple[str, int], str]()
            share = ProcessShare(1, 1) if executor is not None else self.share
            if executor is not None:
                interrupted, failures = self._run_on_executor(executor)
            elif share.runs > 1:
                interrupted = self._run_side_by_side(share, listeners, ended, read)
            workers = None if share.runs == 1 else 1
            outcomes = self._run_all(
                listeners, workers=workers, interrupted=interrupted, ended=ended, failures=failures, read=read
            )
            self._write(outcomes)
            self._run_additional_runs(outcomes)
            self._write_page(outcomes, page=page)
        return outcomes

    def _check_executor(self, executor: Executor, *, join: bool) -> None:
        """Raise an error, before any work is done, if no executor can run the experiment."""
        check_executor(executor)
        if join or self.ranks.size > 1:
            raise ConfigError("an executor already distributes the work. Omit `join` and torchrun")
        self._pack_experiment()

    def _pack_experiment(self) -> PackedExperiment:
        return pack_experiment(self.experiment, self._checksum())

    def _run_on_executor(self, executor: Executor) -> tuple[bool, dict[tuple[str, int], str]]:
        """Execute the missing runs on an executor.

        Return True if the user stopped it, and the failures keyed by run.
        """
        folders = [(run, self._directory.folder(CHECKPOINTS_FOLDER, *run)) for run in self.runs]
        missing = [(run, folder) for run, folder in folders if not is_whole(folder, run[0].setting.rounds)]
        units = [json.dumps({"label": method.label, "seed": seed}) for (method, seed), _ in missing]
        failures, draft = dict[tuple[str, int], str](), self.out / WORK_FOLDER
        with interruptible() as interrupted:
            for k, reply in compute_units(executor, self._pack_experiment(), units, interrupted):
                (method, seed), folder = missing[k]
                if reply.failure:
                    failures[method.label, seed] = reply.failure
                shutil.rmtree(draft, ignore_errors=True)
                make_folder(draft)
                for name, content in reply.files.items():
                    write_atomic(draft / name, content)
                shutil.rmtree(folder, ignore_errors=True)
                publish(draft, folder)
            return interrupted(), failures

    def _run_joined(self, listeners: tuple[Listener, ...], *, page: bool) -> list[Outcome]:
        """Do the work of `run` together with other processes and return all outcomes.

        The processes share the runs, the additional runs that analyses need, and the writing of the final files.
        """
        if self.ranks.size > 1:
            raise ConfigError(
                "a process that joins computes whole runs, but the ranks of torchrun compute one run together"
            )
        if self._directory.force:
            raise ConfigError(
                "a process that joins cannot restart with --force, because other processes use the "
                f"results. Delete {self.out} first"
            )
        session, line, ended = JoinedWork(self.out), EventQueue(), set[tuple[str, int]]()
        workers = None if self.share.runs == 1 else self.share.workers
        hear: tuple[Listener, ...] = (*listeners, partial(_note_end, ended))
        units = [
            WorkUnit(path.name, path)
            for path in (self._directory.folder(CHECKPOINTS_FOLDER, *run) for run in self.runs)
        ]

        def do(k: int, claim: UnitClaim) -> str | None:
            outcome = self._run_one(*self.runs[k], hear if workers is None else (line.send,), workers, claim=claim)
            if outcome.status == "interrupted":
                raise KeyboardInterrupt
            return None if outcome.result is not None or outcome.is_damaged else outcome.failure

        with lock(self.out, joins=True):
            if session.is_begun:
                self._directory.check(joins=True)
            session.begin(partial(self._directory.prepare, self.federations, session.claims))
            with nullcontext() if workers is None else line.listening(*hear):
                session.work(units, do, self.share)
            failures = {
                (method.label, seed): session.failure(unit)
                for (method, seed), unit in zip(self.runs, units, strict=True)
            }
            outcomes = self._run_all(listeners, workers=1, interrupted=True, ended=ended, failures=failures)
            further = self._further_runs(outcomes)
            places = [further.place(k) for k in range(len(further.units))]
            session.work(places, partial(_measure_joined, further, workers or 1), self.share)
            session.finish(lambda: self._finish(outcomes, further, page=page))
        return outcomes

    def _finish(self, outcomes: list[Outcome], further: FurtherRuns, *, page: bool) -> None:
        """Write the files of a directory after several processes computed the results."""
        self._write(outcomes)
        further.write_published()
        self._write_page(outcomes, page=page)

    def _write_page(self, outcomes: Sequence[Outcome], *, page: bool) -> None:
        if page and can_draw() and any(o.result is not None for o in outcomes):
            report.write_report([self.out], self.out / REPORT_FILE, charts=False)

    def _run_all(
        self,
        listeners: tuple[Listener, ...],
        *,
        workers: int | None = None,
        interrupted: bool = False,
        ended: Collection[tuple[str, int]] = (),
        failures: Mapping[tuple[str, int], str | None] = NO_CHOICES,
        read: Mapping[tuple[str, int], Outcome] = NO_CHOICES,
    ) -> list[Outcome]:
        """Execute all missing runs and return every run's outcome.

        Runs in ``ended`` send no events, because listeners have already received them. Outcomes in ``read`` are used
        without being read again.

        Runs in ``failures`` failed in another process and are not repeated.
        """
        outcomes = []
        with interruptible() as stop_requested:
            for method, seed in self.runs:
                if (method.label, seed) in read:
                    outcomes.append(read[method.label, seed])
                    continue
                hear = () if (method.label, seed) in ended else listeners
                if (failure := failures.get((method.label, seed))) is not None:
                    outcomes.append(Outcome(method.label, method.algorithm, seed, None, failure))
                    EventEmitter(hear, method.label, method.setting.with_(seed=seed)).end(None, "failed")
                    continue
                outcomes.append(self._run_one(method, seed, hear, workers, advance=not interrupted))
                interrupted |= self.ranks.combine_flags(stop_requested())[0] or outcomes[-1].status == "interrupted"
        return outcomes

    def _run_one(
        self,
        method: Method,
        seed: int,
        listeners: tuple[Listener, ...],
        workers: int | None = None,
        *,
        advance: bool = True,
        claim: UnitClaim | None = None,
    ) -> Outcome:
        """Run one method with one seed and return the outcome.

        If ``workers`` is given, several runs are executed in parallel. If ``claim`` is given, the run is computed in
        the claim's folder.
        """
        setting = method.setting.with_(seed=seed)
        if workers is not None:
            setting = setting.with_(engine=setting.engine.with_(workers=workers))
        emitter = EventEmitter(listeners, method.label, setting, 0.0 if workers is None else EVENT_INTERVAL_SECONDS)
        folder, fed = (
            self._directory.folder(CHECKPOINTS_FOLDER, method, seed) if claim is None else claim.state,
            self.federations[seed],
        )
        place = self.out if claim is None else claim.folder
        try:
            live = [LiveFigures(place, method.label, seed, setting.rounds)] if self.ranks.rank == 0 else []
            progress: list[Progress] = [emitter, *live, *([] if claim is None else [partial(_note_round, claim)])]
            result = run_setting(setting, fed, folder=folder, callbacks=progress, advance=advance, ranks=self.ranks)
            outcome = Outcome(method.label, method.algorithm, seed, result)
        except (CodeError, RunStopped) as error:
            outcome = Outcome(method.label, method.algorithm, seed, None, str(error))
        except DamagedCheckpoint as error:
            if self.ranks.size > 1:  # the other ranks wait for the first one
                raise
            again = f"the other methods continued. To restart it: --force --method {shlex.quote(method.label)}"
            outcome = Outcome(method.label, method.algorithm, seed, None, f"{error.damage}; {again}", is_damaged=True)
        emitter.end(None if outcome.result is None else outcome.result.state, outcome.status)
        return outcome

    def _run_side_by_side(
        self,
        share: ProcessShare,
        listeners: tuple[Listener, ...],
        ended: set[tuple[str, int]],
        read: dict[tuple[str, int], Outcome],
    ) -> bool:
        """Execute the runs in forked processes and return True if the user stopped them.

        The forked processes write the checkpoints and models. Meanwhile, this process reads each run's outcome as soon
        as it is complete.
        """
        line, seconds = EventQueue(), dict[str, float]()
        seeds = self.experiment.head.seeds
        first_seeds_first = sorted(range(len(self.runs)), key=lambda k: seeds.index(self.runs[k][1]))

        def handle(_shared: None, k: int) -> tuple[bool, float]:
            start = time.perf_counter()
            outcome = self._run_one(*self.runs[k], (line.send,), share.workers)
            self._write_models(self.runs[k], outcome)
            return outcome.complete, time.perf_counter() - start

        def cost(k: int) -> float:  # known after the method's first run
            return seconds.get(self.runs[k][0].label, math.inf)

        with (
            WorkerPool([handle], share.runs, nested=share.workers > 1) as pool,
            interruptible() as interrupted,
            line.listening(*listeners, partial(_note_end, ended)),
        ):
            for k, (complete, spent) in pool.map_unordered(handle, None, first_seeds_first, interrupted, cost):
                method, seed = self.runs[first_seeds_first[k]]
                seconds[method.label] = spent
                if complete:
                    read[method.label, seed] = self._run_one(method, seed, (), 1, advance=False)
            return interrupted()

    def _write_models(self, run: tuple[Method, int], outcome: Outcome) -> None:
        if outcome.complete and outcome.result is not None:
            _save_models(outcome.result, self._directory.folder(MODELS_FOLDER, *run))

    @property
    def unanswered(self) -> list[str]:
        """Names of the sum-based analyses that have no answer for these data, after all runs have ended."""
        return [
            get_analysis_name(analysis)
            for analysis in self.experiment.analyses
            if analysis.by_sums
            and not analysis.uses_models
            and not analysis.runs_further
            and not (self.out / analysis_file(get_analysis_name(analysis))).exists()
        ]

    def _write(self, outcomes: list[Outcome]) -> None:
        for run, outcome in zip(self.runs, outcomes, strict=False):
            self._write_models(run, outcome)
        write_tables(self.out, outcomes)
        federation = self.federations[self.experiment.head.seeds[0]]
        more = write_analyses(self.out, self.experiment.analyses, outcomes, federation)
        write_summary(self.out, self.experiment, outcomes, self.federations, more)
        shutil.rmtree(self.out / LIVE_FOLDER, ignore_errors=True)

    def _further_runs(self, outcomes: Sequence[Outcome]) -> FurtherRuns:
        return FurtherRuns(self.experiment, self.federations, self.out, self.runs, outcomes, simulate)

    def _run_additional_runs(self, outcomes: Sequence[Outcome]) -> None:
        """Execute the additional runs that the analyses need for each complete run.

        Rows that have already been computed are kept.
        """
        further, tables = self._further_runs(outcomes), list[pa.Table]()
        further.write(tables)
        share = decide_share(self.experiment, self.federations, further.methods)

        def handle(_shared: None, k: int) -> pa.Table | None:
            return further.measure(k, share.workers)

        with WorkerPool([handle], share.runs, nested=share.workers > 1) as pool, interruptible() as interrupted:
            for k, rows in enumerate(pool.map(handle, None, range(len(further.units)), interrupted)):
                if rows is None:
                    return
                tables.append(rows)
                if further.is_last(k):
                    further.write(tables)


def _save_models(result: Result, folder: Path) -> None:
    """Write a result's models to a folder, unless intact files already exist."""
    try:
        for name in result.models.files():
            check_file_digest(folder / f"{name}.safetensors")
    except LayoutError:
        result.models.save_in_run(folder)


def _measure_joined(further: FurtherRuns, workers: int, k: int, claim: UnitClaim) -> None:
    rows = further.measure(k, workers)
    if rows is None:
        raise KeyboardInterrupt
    further.keep(k, rows, claim.state)


def _note_end(ended: set[tuple[str, int]], event: Event) -> None:
    if event.status:
        ended.add((event.label, event.seed))


def _note_round(claim: UnitClaim, state: State) -> None:
    claim.progress = f"round {state.round}"
