"""Running an experiment: every method with every seed, what is missing only, several at a time where that pays."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa

from fedloom.data.dataset import Dataset, on_cpu
from fedloom.data.federation import Federation
from fedloom.data.groups import keeping
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.engine.setup import check
from fedloom.engine.simulate import Progress, simulate
from fedloom.entrances import entered
from fedloom.errors import CodeError, DamagedCheckpoint, DataError, LayoutError, Refused, RunDirError, RunStopped, Stop
from fedloom.lab import report
from fedloom.lab.experiment.analyses.cox import cox_regression
from fedloom.lab.experiment.analyses.left_out import scores_of_new, without
from fedloom.lab.experiment.events import PAUSE, Emitter, Event, EventQueue, Listener
from fedloom.lab.experiment.file import difference_to_recorded
from fedloom.lab.experiment.live import LiveFigures
from fedloom.lab.experiment.outputs import (
    Outcome,
    left_out_before,
    write_inspection,
    write_left_out,
    write_parquet,
    write_settings,
    write_splits,
    write_summary,
    write_tables,
)
from fedloom.lab.experiment.schema import Experiment, Method
from fedloom.lab.report.charts.look import can_draw
from fedloom.local.oracles.precision import undisturbed
from fedloom.outputs import check_output_folder, is_run_directory
from fedloom.processes.pool import WorkerPool, cores, useful
from fedloom.processes.ranks import ALONE, Ranks
from fedloom.processes.signals import interruptible
from fedloom.rundir import CHECKPOINTS, COX, FILES, FOLDERS, LIVE, MODELS, REPORT, SETTINGS, check_case, folder_of
from fedloom.storage.checkpoint import check_digest
from fedloom.storage.files import is_unused, make_folder, refuse_links
from fedloom.storage.locks import lock

NO_PAGE = "no report.html is written: its charts need another package; pip install 'fedloom[charts]'"
FEW_CLIENTS = 16
"""Cohorts below this size run several runs side by side, instead of several chunks of one."""


class Plan:
    """The runs of an experiment in a run directory.

    Args:
        experiment: what to run.
        out: the run directory, created if need be.
        data_dir: folder of data sets.
        force: forget what is there, once `run` has the directory for itself.
        partly: what is forgotten is of the experiment's methods only; the directory must be of this experiment.
        dry: look only; nothing is written or forgotten.
        reads: files that the call reads, as the experiment file.
        ranks: processes that all make the same calls; rank 0 alone uses the directory, but for rows on its machine.

    Attributes:
        notes: what is known of every method before its first round, by its label.

    Raises:
        RunDirError: the directory is of another experiment, or not a run directory.
        DataError: the data cannot be read.
        ConfigError: the experiment cannot work, or the directory lies in a run directory or a deployment, or has what
            the call reads; nothing has been written then.
    """

    @on_cpu()
    @entered("file")
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
        ranks: Ranks = ALONE,
    ) -> None:
        self.experiment, self.out, self.ranks = experiment, out, ranks
        self._force, self._partly = force, partly
        if ranks.rank == 0:
            self._check_directory()
            entries = (*FOLDERS, *FILES, *(() if is_run_directory(out) else (SETTINGS,)))
            check_output_folder(out, (*reads, experiment.source_options.get("source")), entries=entries)
        data = keeping(experiment.source, experiment.common.evaluate.groups).read(data_dir)
        self.federations: dict[int, Federation] = {s: experiment.partition(data, s) for s in experiment.head.seeds}
        self.runs = [(m, seed) for m in experiment.methods for seed in experiment.head.seeds]
        fed = self.federations[experiment.head.seeds[0]]
        self._raw = data if experiment.partition.leave else None
        self._cox = None if experiment.common.evaluate.cox is None else data
        if self._raw is not None and (ranks.size > 1 or fed.n < 3):
            why = "on one process" if ranks.size > 1 else f"with 3 clients or more, and there are {fed.n}"
            raise Refused(
                f"partition.leave trains {why}", rule="leave-needs-clients", fix="leave {partition.leave} out"
            )
        self.notes = {m.label: check(m.setting.with_(seed=experiment.head.seeds[0]), fed) for m in experiment.methods}
        for method, seed in self.runs:
            if seed != experiment.head.seeds[0]:
                check(method.setting.with_(seed=seed), self.federations[seed])
        if ranks.rank == 0 and not dry:
            make_folder(out)

    @property
    def remarks(self) -> list[str]:
        """Notes on the clients of the first seed and on the methods, each once with the labels that it is about."""
        labels = dict[str, list[str]]()
        for label, notes in self.notes.items():
            for note in notes:
                labels.setdefault(note, []).append(label)
        fed = self.federations[self.experiment.head.seeds[0]]
        of_data = [f"data: {note}" for note in fed.remarks]
        return [
            *([] if can_draw() else [NO_PAGE]),
            *of_data,
            *(f"{', '.join(m)}: {note}" for note, m in labels.items()),
        ]

    @property
    def rounds(self) -> dict[str, int]:
        """Rounds of all seeds of every method together, by its label."""
        return self.experiment.rounds

    @undisturbed()
    def run(self, *listeners: Listener, page: bool = True) -> list[Outcome]:
        """Do what is missing, and write every file of the run directory, the report if ``page``.

        Args:
            listeners: hear of every round, and of the end of every run.
            page: write the report.

        Returns:
            The outcome of every run, those that were there included.

        Raises:
            CheckpointError: a disk that is full or refuses; what was finished is kept.
            RunDirError: another process works in the directory, or has made it another experiment's; or two labels
                differ only in case, which its disk ignores.
        """
        if self.ranks.rank > 0:
            return self._run_all(listeners)
        with lock(self.out):
            check_case(self.out, [method.label for method in self.experiment.methods])
            self._check_directory()
            if self._force:
                self._clear()
            write_settings(self.out, self.experiment)
            write_splits(self.out, self.federations)
            processes = 1 if self.ranks.size > 1 else side_by_side(self.experiment, self.federations.values())
            ended: set[tuple[str, int]] = set()
            interrupted = processes > 1 and self._run_side_by_side(processes, listeners, ended)
            outcomes = self._run_all(listeners, alone=processes == 1, interrupted=interrupted, ended=ended)
            self._write(outcomes)
            if self._raw is not None:
                self._leave(self._raw, outcomes)
            if page and can_draw() and any(o.result is not None for o in outcomes):
                report.write([self.out], self.out / REPORT, charts=False)
        return outcomes

    def _run_all(
        self,
        listeners: tuple[Listener, ...],
        *,
        alone: bool = True,
        interrupted: bool = False,
        ended: Collection[tuple[str, int]] = (),
    ) -> list[Outcome]:
        """The outcome of every run; the listeners have received those that have ``ended`` already."""
        outcomes = []
        with interruptible() as stop_requested:
            for method, seed in self.runs:
                hear = () if (method.label, seed) in ended else listeners
                outcomes.append(self._run_one(method, seed, hear, alone=alone, advance=not interrupted))
                interrupted |= self.ranks.any(stop_requested())[0] or outcomes[-1].status == "interrupted"
        return outcomes

    def _run_one(
        self, method: Method, seed: int, listeners: tuple[Listener, ...], *, alone: bool, advance: bool = True
    ) -> Outcome:
        setting = method.setting.with_(seed=seed)
        if not alone:
            setting = setting.with_(engine=setting.engine.with_(workers=1))
        emitter = Emitter(listeners, method.label, setting, 0.0 if alone else PAUSE)
        folder, fed = self._folder(CHECKPOINTS, method, seed), self.federations[seed]
        try:
            live = [LiveFigures(self.out, method.label, seed, setting.rounds)] if self.ranks.rank == 0 else []
            progress: list[Progress] = [emitter, *live]
            result = simulate(setting, fed, folder=folder, progress=progress, advance=advance, ranks=self.ranks)
            outcome = Outcome(method.label, method.algorithm, seed, result)
        except (CodeError, RunStopped) as error:
            outcome = Outcome(method.label, method.algorithm, seed, None, str(error))
        except DamagedCheckpoint as error:
            if self.ranks.size > 1:  # the other ranks wait for what the first has read
                raise
            again = f"the other methods went on; to begin it anew: --force --method {shlex.quote(method.label)}"
            outcome = Outcome(method.label, method.algorithm, seed, None, f"{error.damage}; {again}", damaged=True)
        emitter.end(None if outcome.result is None else outcome.result.state, outcome.status)
        return outcome

    def _run_side_by_side(self, processes: int, listeners: tuple[Listener, ...], ended: set[tuple[str, int]]) -> bool:
        """Compute the runs in forked processes; their checkpoints hold the results. True if the user stopped it."""
        line = EventQueue()

        def handle(_shared: None, k: int) -> None:
            self._run_one(*self.runs[k], (line.send,), alone=False)

        def note(event: Event) -> None:
            if event.status:
                ended.add((event.label, event.seed))

        with WorkerPool([handle], processes) as pool, interruptible() as interrupted, line.listening(*listeners, note):
            for _ in pool.map(handle, None, range(len(self.runs)), interrupted):
                pass
            return interrupted()

    def _write(self, outcomes: list[Outcome]) -> None:
        for (method, seed), outcome in zip(self.runs, outcomes, strict=False):
            if outcome.complete and outcome.result is not None:
                _save_models(outcome.result, self._folder(MODELS, method, seed))
        write_tables(self.out, outcomes)
        more = write_inspection(self.out, self.experiment.common.evaluate, outcomes)
        more += self._fit_cox() if any(outcome.complete for outcome in outcomes) else []
        write_summary(self.out, self.experiment, outcomes, self.federations, more)
        shutil.rmtree(self.out / LIVE, ignore_errors=True)

    def _fit_cox(self) -> list[str]:
        """Fit the Cox regression that was asked for, on the clients of the first seed; a note where there is none."""
        choice, seed = self.experiment.common.evaluate.cox, self.experiment.head.seeds[0]
        tables, notes = list[pa.Table](), list[str]()
        if choice is not None and self._cox is not None:
            try:
                tables = [cox_regression(choice, self._cox, self.federations[seed])]
            except (DataError, Refused) as error:
                notes = [f"the Cox regression has no fit: {error}"]
        write_parquet(self.out / COX, tables)
        return notes

    def _leave(self, data: Dataset, outcomes: Sequence[Outcome]) -> None:
        """Train every complete run again without each client in turn, and score that one; a run's scores are kept."""
        before, tables = left_out_before(self.out), dict[tuple[str, int], list[pa.Table]]()
        write_left_out(self.out, tables, before)
        for (method, seed), outcome in zip(self.runs, outcomes, strict=False):
            fed = self.federations[seed]
            scored = method.setting.evaluate.with_(every=method.setting.rounds, parts=("test",), select_on="test")
            shared = outcome.complete and outcome.result is not None and "global" in outcome.result.models.kinds()
            for client in range(fed.n) if shared and (method.label, seed) not in before else ():
                setting = method.setting.with_(seed=seed, evaluate=scored)
                result = simulate(setting, without(fed, client))
                if result.stop is Stop.INTERRUPTED:
                    return
                tables.setdefault((method.label, seed), []).append(scores_of_new(result, data, fed, client))
            if (method.label, seed) in tables:
                write_left_out(self.out, tables, before)

    def _check_directory(self) -> None:
        """Refuse what is not a run directory, or one of another experiment; methods and seeds may come and go."""
        if is_unused(self.out):
            return
        settings = self.out / SETTINGS
        if not settings.exists():
            raise RunDirError(
                f"{self.out} is not empty and not a run directory (no experiment.toml); choose another --out"
            )
        refuse_links(self.out, FOLDERS)
        if self._force and not self._partly:
            return
        free = [f"{table}.{field}" for table, value in Setting.tables().items() for field in value.base.free]
        patterns = [*map(re.escape, ["name", "rounds", "seeds", *free])]
        if self._force:
            patterns += [f"method {re.escape(method.label)}: .*" for method in self.experiment.methods]
        try:
            before = {key: value for key, value in tomllib.loads(settings.read_text()).items() if key != "resolved"}
            difference = difference_to_recorded(before, self.experiment.settings(), "|".join(patterns))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise RunDirError(
                f"{settings} is damaged: {error}; choose another --out, or start anew with --force"
            ) from None
        if difference:
            raise RunDirError(
                f"{self.out} holds another experiment: {difference}; choose another --out, or start anew with --force"
            )

    def _clear(self) -> None:
        """Forget what the directory holds; ``experiment.toml`` stays until it is replaced, so that it is still one."""
        self._force = False
        if self._partly:
            for method, seed in self.runs:
                for kind in (CHECKPOINTS, MODELS):
                    shutil.rmtree(self._folder(kind, method, seed), ignore_errors=True)
            return
        for name in FOLDERS:
            shutil.rmtree(self.out / name, ignore_errors=True)
        for name in FILES:
            (self.out / name).unlink(missing_ok=True)

    def _folder(self, kind: str, method: Method, seed: int) -> Path:
        return folder_of(self.out, kind, method.label, seed)


def side_by_side(experiment: Experiment, federations: Collection[Federation]) -> int:
    """Runs at a time: more than one where cohorts are small."""
    wanted = experiment.common.engine.workers
    if wanted == "auto":
        wanted = cores()
    small = all(fed.n < FEW_CLIENTS for fed in federations) and experiment.common.engine.device == "cpu"
    return useful(wanted, len(experiment.methods) * len(experiment.head.seeds)) if small else 1


def _save_models(result: Result, folder: Path) -> None:
    """Write the models, unless they lie there intact."""
    try:
        for name in result.models.files():
            check_digest(folder / f"{name}.safetensors")
    except LayoutError:
        result.models.save_in_run(folder)
