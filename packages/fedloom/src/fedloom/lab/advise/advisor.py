"""Advisor: a race in a directory, on any number of processes, from the experiment to the answer."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.data.groups import keeping
from fedloom.engine.setting import Engine
from fedloom.engine.state import State
from fedloom.errors import CodeError, ConfigError, Refused, RunDirError, RunStopped, entered
from fedloom.formats import significant, write_total
from fedloom.lab.advise.answer import ANSWER_FILES, Advice, form_advice, write_answer
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
from fedloom.lab.advise.race import DEFAULT_BUDGET_RUNS, MOST_SEEDS, choose_counts, race
from fedloom.lab.advise.settings import STEP_SIZE_KEY, Entries, read_portfolio
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.schema import Experiment
from fedloom.lab.experiment.units.joined import JoinedWork, WorkUnit
from fedloom.lab.experiment.units.shares import decide_share
from fedloom.lab.tune.search import Read
from fedloom.lab.tune.work import plain_budget
from fedloom.outputs import check_output_folder
from fedloom.processes.distributed import check_alone
from fedloom.rundir import WORK_FOLDER, file_name
from fedloom.storage.claims import UnitClaim
from fedloom.storage.files import is_unused, make_folder, refuse_links, write_atomic
from fedloom.storage.locks import lock

RACE_FILE, LAPS_FOLDER = "race.toml", "laps"
RACE_ENTRIES = (RACE_FILE, LAPS_FOLDER, WORK_FOLDER, *ANSWER_FILES)
"""Names of the files and folders that belong to the directory of a race."""


class Advisor:
    """A race for the clients of an experiment.

    Args:
        document: content of the experiment file. Its methods are not read.
        where: name of the file, for messages.
        out: directory of the race, created if it does not exist.
        data_dir: folder of data sets.
        budget: gradients of the race, in runs of FedAvg with all rounds of the experiment.
        margin: largest difference of the metric that does not matter. None: no margin is stated.
        read: function that returns the experiment of a document.
        methods: names of methods in the registry. None: the frozen portfolio. Local training and FedAvg always take
            part.

    Raises:
        ConfigError: the experiment cannot work, has no validation data, or has too small a budget. Nothing is written.
        RunDirError: the directory belongs to another race, or is not the directory of a race.
        DataError: the data cannot be read.
    """

    @entered("file")
    def __init__(
        self,
        document: Mapping[str, Any],
        where: str,
        out: Path,
        data_dir: Path | None = None,
        *,
        budget: float = DEFAULT_BUDGET_RUNS,
        margin: float | None = None,
        read: Read = parse,
        methods: Sequence[str] | None = None,
    ) -> None:
        check_alone("a race")
        self._where, self.out, self._margin, self._runs, self._read = where, out, margin, budget, read
        self._entries = Entries(document, where, read, read_portfolio()[0] if methods is None else tuple(methods))
        base = self._entries.base
        check_output_folder(out, (where, base.source_options.get("source")), entries=RACE_ENTRIES)
        seed = base.head.seeds[0]
        data = keeping(base.source, base.kept_columns).read(data_dir)
        whole = base.partition(data, seed)
        if not int(whole.sizes("validation").sum()):
            raise ConfigError(
                f"{where}: a race compares methods on validation data, but the clients have none. Set "
                "[partition] validation, for example 0.1"
            )
        self.seeds = tuple(range(seed, seed + MOST_SEEDS))
        self._federations = dict(zip(self.seeds, cut_validation(whole, MOST_SEEDS), strict=True))
        self.fed = self._federations[seed]
        self._entries.check(whole, self.fed, seed)
        self.metric, self._higher = self._entries.metric(self.fed, seed)
        self._count, self._stay = choose_counts(len(self._entries.labels), budget)
        fedavg = base.methods[0].setting
        self._budget = plain_budget(lap_setting(fedavg, seed, fedavg.rounds), self.fed, fedavg.rounds)
        self._rounds, self._newest = dict[str, int](), dict[tuple[str, int, int], int]()
        self._check_directory()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Reason why a method of the portfolio cannot take part, by name."""
        return self._entries.left_out

    @property
    def plan(self) -> str:
        """Sentence that describes the race."""
        work = self._budget.samples
        return (
            f"{len(self._entries.labels)} methods ({', '.join(self._entries.labels)}), {self._count} settings each; "
            f"about {write_total(self._runs * work)} gradients ({significant(self._runs)} runs of FedAvg)"
        )

    def run(self, tell: Callable[[str], None] = lambda _line: None, *, join: bool = False) -> Advice:
        """Run the missing laps, write every file, and return the advice.

        Args:
            tell: function that receives a sentence after every comparison.
            join: True to share the laps with other processes that join, on any machine that can access the directory.

        Raises:
            RunStopped: the race was interrupted. Finished laps are kept.
            CheckpointError: the disk is full or rejects a write. Finished laps are kept.
        """
        with lock(self.out, joins=join):
            session = JoinedWork(self.out)
            if session.is_begun:
                self._check_directory()
            session.begin(self._begin)
            arms = self._entries.arms(self._count, self.seeds[0])
            budget = self._runs * self._budget.samples
            outcome = race(
                arms, self._stay, budget, self._budget.samples, self.seeds,
                lambda laps: self._run_laps(session, laps), tell, higher=self._higher,
            )  # fmt: skip
            advice = form_advice(
                outcome, self.fed, self.metric, self._margin, int(budget), self._budget.samples, self.left_out
            )
            session.finish(lambda: self._write(advice))
        return advice

    def _run_laps(self, session: JoinedWork, laps: Sequence[Lap]) -> list[LapResult]:
        """Train laps and return their results in order."""
        settings = [self._entries.experiment(lap.arm).methods[0].setting for lap in laps]
        rounds = [self._plan(lap.arm) for lap in laps]
        keys = [(lap.arm.label, lap.arm.number, lap.seed) for lap in laps]
        ends = [max(1, round(lap.depth * whole)) for lap, whole in zip(laps, rounds, strict=True)]
        units = [self._unit(key, end) for key, end in zip(keys, ends, strict=True)]
        before = [self._newest.get(key) for key in keys]

        def do(k: int, claim: UnitClaim) -> None:
            def note(state: State) -> None:
                claim.progress = f"round {state.round} of {ends[k]}"

            if (earlier := before[k]) is not None:
                copy_checkpoint(self._unit(keys[k], earlier).target, claim.state)
            setting = lap_setting(settings[k], laps[k].seed, rounds[k])
            setting = setting.with_(engine=setting.engine.with_(workers=share.workers))
            if not run_lap(setting, self._federations[laps[k].seed], ends[k], self.metric, claim.state, [note]):
                raise KeyboardInterrupt

        missing = [k for k, unit in enumerate(units) if not (unit.target / LAP_FILE).exists()]
        methods = list(self._entries.labels)
        experiment = self._experiment_of_share()
        share = decide_share(
            experiment, {self.seeds[0]: self.fed}, [methods.index(laps[k].arm.label) for k in missing or [0]]
        )
        session.work(units, do, share)
        self._newest.update(zip(keys, ends, strict=True))
        return [read_lap(unit.target) for unit in units]

    def _experiment_of_share(self) -> Experiment:
        labels = self._entries.labels
        arms = {label: one[0] for label, one in self._entries.arms(1, self.seeds[0]).items()}
        rounds = self._entries.base.common.rounds
        return self._read(self._entries.document(dict.fromkeys(labels, rounds), arms), self._where)

    def _plan(self, arm: Arm) -> int:
        """Return the rounds of a whole run of an arm.

        They are planned with the file's step size, which does not change the cost of a round.
        """
        params = {key: value for key, value in arm.params.items() if key != STEP_SIZE_KEY}
        key = f"{arm.label} {sorted(params.items())}"
        if key not in self._rounds:
            setting = self._entries.experiment(arm._replace(params=params)).methods[0].setting
            try:
                run = lap_setting(setting, self.seeds[0], setting.rounds)
                self._rounds[key] = self._budget.rounds(run, self.fed)
            except (RunStopped, CodeError, Refused):  # the laps of the arm end so too, and have the reason
                self._rounds[key] = setting.rounds
        return self._rounds[key]

    def _unit(self, key: tuple[str, int, int], rounds: int) -> WorkUnit:
        label, number, seed = key
        name = f"{file_name(label)}-{number}-seed-{seed}-round-{rounds}"
        return WorkUnit(name, self.out / LAPS_FOLDER / name)

    def _check_directory(self) -> None:
        path = self.out / RACE_FILE
        if not is_unused(self.out) and not path.exists():
            raise RunDirError(f"{self.out} is not empty and contains no race (no {RACE_FILE}). Choose another --out")
        refuse_links(self.out, (LAPS_FOLDER, WORK_FOLDER))
        if not path.exists():
            return
        try:
            same = tomllib.loads(path.read_text(encoding="utf-8")) == self._identity()
        except ValueError as error:
            raise RunDirError(f"{path} is damaged: {error}. Choose another --out, or delete the directory") from None
        if not same:
            raise RunDirError(
                f"{self.out} contains a race of another experiment, budget or version. Choose another "
                "--out, or delete the directory"
            )

    def _begin(self) -> None:
        self._check_directory()
        # The file comes first: a process that joins now must find a race, not a folder of someone else.
        write_atomic(self.out / RACE_FILE, tomli_w.dumps(self._identity()).encode())
        make_folder(self.out / LAPS_FOLDER)

    def _identity(self) -> dict[str, Any]:
        """Return everything that laps depend on, as it reads in a file."""
        settings = self._experiment_of_share().settings()
        for free in ("name", "seeds", "evaluate"):
            settings.pop(free)
        for free in Engine.free:
            settings["engine"].pop(free, None)
        entries = {"budget": self._runs, "settings": self._count, "metric": self.metric, "seeds": list(self.seeds)}
        arms = {
            label: [dict(arm.params) for arm in one]
            for label, one in self._entries.arms(self._count, self.seeds[0]).items()
        }
        return tomllib.loads(tomli_w.dumps({**settings, "race": {**entries, "tried": arms}}))

    def _write(self, advice: Advice) -> None:
        """Write the answer, and delete the checkpoints of laps."""
        labels = list(dict.fromkeys([advice.method, *advice.references]))
        rounds = {label: self._plan(advice.arms[label]) for label in labels}
        head = self._entries.base.head
        seeds = list(head.seeds) if len(head.seeds) >= MOST_SEEDS else list(range(head.seeds[0], head.seeds[0] + 5))
        document = self._entries.document(rounds, advice.arms, seeds=seeds)
        content = document if self._read is parse else self._read(document, "advised.toml").settings()
        self._read(document, "advised.toml")  # what is written can be read
        write_answer(self.out, advice, tomli_w.dumps(content))
        for folder in (self.out / LAPS_FOLDER).iterdir():
            for file in folder.iterdir():
                if file.is_dir():
                    shutil.rmtree(file)
                elif file.name != LAP_FILE:
                    file.unlink()
