"""Advisor: run a race between methods in a directory, using any number of processes, and derive the advice."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedloom.data.groups import keep_group_columns
from fedloom.engine.setting import Engine, Setting
from fedloom.engine.state import State
from fedloom.errors import CodeError, ConfigError, Refused, RunDirError, RunStopped, Stop, adapt_wording
from fedloom.formats import format_significant, write_total
from fedloom.lab.advise.answer import ANSWER_FILES, Advice, form_advice, write_answer
from fedloom.lab.advise.elsewhere import compute_lap, pack_lap
from fedloom.lab.advise.laps import (
    LAP_FILE,
    Arm,
    Lap,
    LapResult,
    copy_checkpoint,
    cut_validation,
    lap_setting,
    read_lap,
    run_lap,
)
from fedloom.lab.advise.race import (
    AVERAGE_METHOD,
    DEFAULT_BUDGET_RUNS,
    EARLY_DEPTH,
    MAX_RACE_SEEDS,
    LapShares,
    choose_counts,
    find_budget,
    last_round,
    race,
)
from fedloom.lab.advise.settings import STEP_SIZE_KEY, RaceEntries, read_portfolio
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.schema import Experiment
from fedloom.lab.experiment.units.executors import Executor, check_executor, compute_units
from fedloom.lab.experiment.units.joined import JoinedWork, WorkUnit
from fedloom.lab.experiment.units.shares import decide_share
from fedloom.lab.experiment.units.travel import PackedExperiment, pack_experiment
from fedloom.lab.tune.search import ReadExperiment
from fedloom.lab.tune.work import MAX_BUDGET_RATIO, MIN_BUDGET_RATIO, RoundPlan, plain_budget
from fedloom.outputs import check_output_folder
from fedloom.processes.distributed import check_alone
from fedloom.processes.signals import interruptible
from fedloom.rundir import WORK_FOLDER, file_name
from fedloom.storage.claims import UnitClaim
from fedloom.storage.files import is_unused, make_folder, refuse_links, write_atomic
from fedloom.storage.locks import lock
from fedloom.values import check_is_table

RACE_FILE, LAPS_FOLDER = "race.toml", "laps"
RACE_ENTRIES = (RACE_FILE, LAPS_FOLDER, WORK_FOLDER, *ANSWER_FILES)
"""Names of the files and folders that a race creates in its directory."""


IDENTITY_ARM_COUNT = 4
"""Number of settings per method that identify a race when it is resumed. A race with a larger budget tries these
settings first, and then more."""

LapKey = tuple[str, int, int]
"""Label of a method, index of one of its settings (arm), and seed."""


class LapWork(NamedTuple):
    """Lap of a race, with its setting and the number of rounds to train.

    Attributes:
        lap: the lap.
        setting: setting of the full run that the lap belongs to.
        rounds: number of rounds in the full run.
        end: round at which the lap ends.
        unit: unit of work, with the path of its published result.
        previous_round: round at which the previous lap of the same candidate and seed ended. None for the first lap.
    """

    lap: Lap
    setting: Setting
    rounds: int
    end: int
    unit: WorkUnit
    previous_round: int | None

    @property
    def is_done(self) -> bool:
        """True if there is a result for the lap."""
        return (self.unit.target / LAP_FILE).exists()


TrainLaps = Callable[[Sequence[LapWork]], list[LapResult]]
"""Function that trains the missing laps and returns the results of all laps in order."""


def _lap_key(lap: Lap) -> LapKey:
    return lap.arm.label, lap.arm.number, lap.seed


class Advisor:
    """A race in which methods compete on the clients of an experiment.

    Args:
        document: content of the experiment file. The methods listed in the file are ignored.
        where: name of the file, for error messages.
        out: directory of the race, which is created if it does not exist.
        data_dir: folder of data sets.
        budget: compute budget of the race, in multiples of the gradients of one FedAvg run with all rounds of the
            experiment.
        margin: largest difference in the metric that does not matter in practice. If None, no margin is stated.
        read: function that converts a document to an experiment.
        methods: registered names of the methods that take part in the race. If None, the package's portfolio is used.
            Local training and FedAvg are always included.

    Raises:
        ConfigError: the experiment is invalid, has no validation data, or the budget is too small. Nothing is written.
        RunDirError: the directory belongs to a different race, or is not a race directory.
        DataError: the data cannot be read.
    """

    @adapt_wording("file")
    def __init__(
        self, document: Mapping[str, Any], where: str, out: Path, data_dir: Path | None = None, *,
        budget: float = DEFAULT_BUDGET_RUNS, margin: float | None = None, read: ReadExperiment = parse,
        methods: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        check_alone("a race")
        self._where, self.out, self._margin, self._runs, self._read = where, out, margin, budget, read
        self._entries = RaceEntries(document, where, read, read_portfolio()[0] if methods is None else tuple(methods))
        base = self._entries.base
        check_output_folder(out, (where, base.source_options.get("source")), entries=RACE_ENTRIES)
        seed = base.head.seeds[0]
        data = keep_group_columns(base.source, base.kept_columns).read(data_dir)
        whole = base.partition(data, seed)
        if not int(whole.sizes("validation").sum()):
            raise ConfigError(
                f"{where}: a race compares methods on validation data, but the clients have no "
                "validation data. Set [partition] validation, for example 0.1"
            )
        self.seeds = tuple(range(seed, seed + MAX_RACE_SEEDS))
        self._federations = dict(zip(self.seeds, cut_validation(whole, MAX_RACE_SEEDS), strict=True))
        self.fed = self._federations[seed]
        self._entries.check(whole, self.fed, seed)
        self.metric, self._higher = self._entries.metric(self.fed, seed)
        fedavg = base.methods[0].setting
        self._budget = plain_budget(lap_setting(fedavg, seed, fedavg.rounds), self.fed, fedavg.rounds)
        self._rounds, self._newest = dict[tuple[str, int], int](), dict[LapKey, int]()
        self._checksum, self._planned = data.checksum(), self._budget.spent
        self._check_directory()
        shares = self._plan_methods()
        planned = self._planned / self._budget.samples
        self._count, self._stay = choose_counts(shares, budget, planned)
        self._budget_of = lambda finalists, seeds: find_budget(shares, finalists, seeds, budget, planned)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Reasons why some methods of the portfolio cannot take part, keyed by method name."""
        return self._entries.left_out

    @property
    def plan(self) -> str:
        """Sentence that announces the methods, the number of settings and the budget of the race."""
        work = self._budget.samples
        return (
            f"{len(self._entries.labels)} methods ({', '.join(self._entries.labels)}), {self._count} settings each; "
            f"about {write_total(self._runs * work)} gradients ({format_significant(self._runs)} runs of FedAvg)"
        )

    def run(
        self, tell: Callable[[str], None] = lambda _line: None, *, join: bool = False, executor: Executor | None = None
    ) -> Advice:
        """Train the missing laps, write all files of the race, and return the advice.

        Args:
            tell: function called with a sentence after every comparison.
            join: True to share the laps with other processes that join the race, on any machine that can access the
                directory.
            executor: executor with a method ``submit(function, *arguments)`` used to train the laps.

        Raises:
            ConfigError: the experiment cannot be sent to the workers of the executor.
            RunStopped: the race was interrupted. Completed laps are kept.
            CheckpointError: the disk is full or a write fails. Completed laps are kept.
        """
        if executor is not None:
            check_executor(executor)
            if join:
                raise ConfigError("an executor already distributes the work. Omit `join`")
        do = self._train_locally
        if executor is not None:
            luggage = pack_experiment(self._entries.base, self._checksum)
            do = partial(self._train_on_executor, executor, luggage)
        with lock(self.out, joins=join):
            session = JoinedWork(self.out)
            if session.is_begun:
                self._check_directory(joins=True)
            session.begin(self._begin)
            arms = self._entries.arms(self._count, self.seeds[0])
            budget = self._runs * self._budget.samples
            outcome = race(
                arms, self._stay, budget, self._budget.samples, self.seeds,
                lambda laps: self._run_laps(laps, partial(do, session)), tell, higher=self._higher,
                planned=lambda: self._planned,
            )  # fmt: skip
            advice = form_advice(
                outcome, self.fed, self.metric, self._margin, int(budget), self._budget.samples, self.left_out,
                self._budget_of,
            )  # fmt: skip
            session.finish(lambda: self._write(advice))
        return advice

    def _run_laps(self, laps: Sequence[Lap], train: TrainLaps) -> list[LapResult]:
        """Train several laps, and return their results in the same order.

        Each method's number of rounds is planned from its first setting. If a round of another setting costs much more
        or less, the first lap of that setting is repeated with an adjusted number of rounds.
        """
        results = train([self._make_work(lap) for lap in laps])
        firsts = {lap.arm.label: result for lap, result in zip(laps, results, strict=True) if lap.arm.number == 0}
        again = list[int]()
        for k, (lap, result) in enumerate(zip(laps, results, strict=True)):
            first = firsts.get(lap.arm.label)
            if lap.depth != EARLY_DEPTH or not (first and first.trained and result.trained):
                continue
            ratio = (result.trained / result.round) / (first.trained / first.round)
            if not MIN_BUDGET_RATIO <= ratio <= MAX_BUDGET_RATIO:
                self._rounds[lap.arm.label, lap.arm.number] = max(1, round(self._plan(lap.arm) / ratio))
                self._planned += result.trained
                self._newest.pop(_lap_key(lap))
                again.append(k)
        repeated = train([self._make_work(laps[k]) for k in again]) if again else []
        for k, result in zip(again, repeated, strict=True):
            results[k] = result
        return results

    def _make_work(self, lap: Lap) -> LapWork:
        whole = self._plan(lap.arm)
        setting = lap_setting(self._entries.experiment(lap.arm).methods[0].setting, lap.seed, whole)
        end = last_round(lap.depth, whole)
        return LapWork(lap, setting, whole, end, self._unit(lap, end), self._newest.get(_lap_key(lap)))

    def _train_locally(self, session: JoinedWork, works: Sequence[LapWork]) -> list[LapResult]:
        """Train laps in processes on this machine, and share them with other processes that have joined."""

        def do(k: int, claim: UnitClaim) -> None:
            work = works[k]

            def note(state: State) -> None:
                claim.progress = f"round {state.round} of {work.end}"

            if work.previous_round is not None:
                copy_checkpoint(self._unit(work.lap, work.previous_round).target, claim.state)
            setting = work.setting.with_(engine=work.setting.engine.with_(workers=share.workers))
            if not run_lap(setting, self._federations[work.lap.seed], work.end, self.metric, claim.state, [note]):
                raise KeyboardInterrupt

        missing = [work for work in works if not work.is_done]
        methods = list(self._entries.labels)
        experiment = self._experiment_of_share()
        share = decide_share(
            experiment, {self.seeds[0]: self.fed}, [methods.index(work.lap.arm.label) for work in missing] or [0]
        )
        session.work([work.unit for work in works], do, share)
        return self._compute_results(works)

    def _train_on_executor(
        self, executor: Executor, luggage: PackedExperiment, session: JoinedWork, works: Sequence[LapWork]
    ) -> list[LapResult]:
        """Train the laps on an executor."""
        missing = [work for work in works if not work.is_done]
        units = list[str]()
        for work in missing:
            before = None if work.previous_round is None else self._unit(work.lap, work.previous_round).target
            table = self._entries.experiment(work.lap.arm).settings()["method"][0]
            units.append(pack_lap(work.lap.seed, table, work.rounds, work.end, self.metric, self.seeds, before))
        with interruptible() as interrupted:
            for k, reply in compute_units(executor, luggage, units, interrupted, compute_lap):
                claim = session.claims.take(missing[k].unit.name)
                if claim is not None:
                    for name, content in reply.files.items():
                        make_folder(claim.state)
                        write_atomic(claim.state / name, content)
                    claim.publish(missing[k].unit.target)
                    claim.release()
        if not all(work.is_done for work in works):
            raise RunStopped(
                Stop.INTERRUPTED, f"finished laps are kept in {self.out}. Run the same command again to resume the race"
            )
        return self._compute_results(works)

    def _compute_results(self, works: Sequence[LapWork]) -> list[LapResult]:
        self._newest.update((_lap_key(work.lap), work.end) for work in works)
        return [read_lap(work.unit.target) for work in works]

    def _experiment_of_share(self) -> Experiment:
        labels = self._entries.labels
        arms = {label: one[0] for label, one in self._entries.arms(1, self.seeds[0]).items()}
        rounds = self._entries.base.common.rounds
        return self._read(self._entries.document(dict.fromkeys(labels, rounds), arms), self._where)

    def _plan(self, arm: Arm) -> int:
        """Return the number of rounds in a full run of a candidate.

        This is the number planned for the candidate's method, unless the candidate's rounds differ in cost.
        """
        return self._rounds.get((arm.label, arm.number), self._rounds[arm.label, 0])

    def _plan_methods(self) -> list[LapShares]:
        """Plan each method's number of rounds from its first setting, and return the cost of its laps.

        The step size in the file is used, because the step size does not affect the cost of a round.
        """
        shares = list[LapShares]()
        for label, (arm,) in self._entries.arms(1, self.seeds[0]).items():
            params = {key: value for key, value in arm.params.items() if key != STEP_SIZE_KEY}
            setting = self._entries.experiment(arm._replace(params=params)).methods[0].setting
            plan = RoundPlan(setting.rounds, 0)
            if label != AVERAGE_METHOD:
                with suppress(RunStopped, CodeError, Refused):  # the candidate's laps report it
                    plan = self._budget.plan(lap_setting(setting, self.seeds[0], setting.rounds), self.fed)
            self._rounds[label, 0] = plan.rounds
            self._planned += plan.spent
            shares.append(LapShares.compute(plan.rounds, min(1.0, plan.personal / self._budget.samples)))
        return shares

    def _unit(self, lap: Lap, rounds: int) -> WorkUnit:
        name = f"{file_name(lap.arm.label)}-{lap.arm.number}-seed-{lap.seed}-round-{rounds}"
        return WorkUnit(name, self.out / LAPS_FOLDER / name)

    def _check_directory(self, *, joins: bool = False) -> None:
        """Raise an error unless the directory is unused, or contains this race with a budget that is not larger."""
        path = self.out / RACE_FILE
        if not is_unused(self.out) and not path.exists():
            raise RunDirError(f"{self.out} is not empty and contains no race (no {RACE_FILE}). Choose another --out")
        refuse_links(self.out, (LAPS_FOLDER, WORK_FOLDER))
        if not path.exists():
            return
        try:
            recorded = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunDirError(f"{path} is damaged: {error}. Choose another --out, or delete the directory") from None
        identity, budget = (
            self._identity(),
            check_is_table(recorded.get("race", {}), f"{path}: [race]").pop("budget", None),
        )
        identity["race"].pop("budget")
        if identity != recorded or not isinstance(budget, int | float):
            raise RunDirError(
                f"{self.out} contains a race of a different experiment or version. Choose another "
                "--out, or delete the directory"
            )
        if budget > self._runs or (joins and budget != self._runs):
            raise RunDirError(
                f"{self.out} contains a race with a budget of {format_significant(budget, 6)} runs, got "
                f"{format_significant(self._runs, 6)}. Use a budget of "
                f"{format_significant(budget, 6)}{'' if joins else ' or more'}, or choose another --out"
            )

    def _begin(self) -> None:
        self._check_directory()
        # The file is written first, so that a process that joins now recognizes the folder as this race's.
        write_atomic(self.out / RACE_FILE, tomli_w.dumps(self._identity()).encode())
        make_folder(self.out / LAPS_FOLDER)

    def _identity(self) -> dict[str, Any]:
        """Return all information that affects the laps' results, as a TOML document."""
        settings = self._experiment_of_share().settings()
        for free in ("name", "seeds", "evaluate"):
            settings.pop(free)
        for free in Engine.free:
            settings["engine"].pop(free, None)
        entries = {"budget": self._runs, "metric": self.metric, "seeds": list(self.seeds)}
        arms = {
            label: [dict(arm.params) for arm in one]
            for label, one in self._entries.arms(IDENTITY_ARM_COUNT, self.seeds[0]).items()
        }
        return tomllib.loads(tomli_w.dumps({**settings, "race": {**entries, "tried": arms}}))

    def _write(self, advice: Advice) -> None:
        """Write the advice, and delete the checkpoints of the laps."""
        labels = list(dict.fromkeys([advice.method, *advice.references]))
        rounds = {label: self._plan(advice.arms[label]) for label in labels}
        head = self._entries.base.head
        seeds = list(head.seeds) if len(head.seeds) >= MAX_RACE_SEEDS else list(range(head.seeds[0], head.seeds[0] + 5))
        document = self._entries.document(rounds, advice.arms, seeds=seeds)
        content = document if self._read is parse else self._read(document, "advised.toml").settings()
        self._read(document, "advised.toml")  # check that the file can be read again
        write_answer(self.out, advice, tomli_w.dumps(content))
        for folder in (self.out / LAPS_FOLDER).iterdir():
            for file in folder.iterdir():
                if file.is_dir():
                    shutil.rmtree(file)
                elif file.name != LAP_FILE:
                    file.unlink()
