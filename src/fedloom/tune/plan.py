"""Tuning an experiment in a directory: every method's trials, what is missing only, and the files at the end."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, RunDirError, RunStopped, Stop
from fedloom.experiment import parse
from fedloom.experiment.schema import Method
from fedloom.experiment.tables import dump
from fedloom.experiment.tuning import Dimension
from fedloom.running.distributed import check_alone
from fedloom.running.files import file_name, is_unused, lock, make_folder, write_atomic
from fedloom.running.parallel import Pool, cores
from fedloom.running.signals import interruptible
from fedloom.running.timing import samples_per_round
from fedloom.tune.attempt import PART, Goal, Interrupted, arguments, attempt, judged_model, without_test
from fedloom.tune.report import write_report
from fedloom.tune.spaces import check_names, check_values, own_params, space_of, with_params
from fedloom.tune.trials import Search, Trial, read_trials, write_trials

Tell = Callable[[str, Trial], None]
"""(label, trial): called after every trial."""


class Study(NamedTuple):
    """The search for one method: its place in the experiment, where it looks, and the model that is scored."""

    place: int
    method: Method
    space: Mapping[str, Dimension]
    model: str
    search: Search


class Found(NamedTuple):
    """What was tried for a method, and the best of it (None: no trial completed)."""

    study: Study
    trials: Sequence[Trial]
    best: Trial | None


class Tuning:
    """The search for the settings of an experiment's methods.

    Args:
        document: the experiment file.
        where: its name, for messages.
        out: directory of the search, created if need be.
        data_dir: folder of data sets.
        force: forget what is there.

    Raises:
        ConfigError: the experiment cannot work, has no validation data, a space that cannot be, or is one of several
            ranks of torchrun; nothing is written.
        RunDirError: the directory is of another search, or not one of a search.
        DataError: the data cannot be read.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        where: str,
        out: Path,
        data_dir: Path | None = None,
        *,
        force: bool = False,
    ) -> None:
        check_alone("a search for settings")
        self.experiment = parse(document, where)
        self.tune, self.out, self._where = self.experiment.tune, out, where
        self._document = {key: value for key, value in document.items() if key != "tune"}
        check_names(self.experiment, where)
        spaces = [space_of(method, self.tune, where) for method in self.experiment.methods]
        for place, space in enumerate(spaces):
            if not space:
                label = self.experiment.methods[place].label
                raise ConfigError(f"{where}: nothing to look for in {label}; give it a setting in [tune.space.{label}]")
            check_values(document, place, space, where)
        seeds = self.tune.seeds or self.experiment.head.seeds[:1]
        data = self.experiment.source.load(data_dir)
        self.federations: dict[int, Federation] = {s: without_test(self.experiment.partition(data, s)) for s in seeds}
        if any(not int(fed.sizes(PART).sum()) for fed in self.federations.values()):
            raise ConfigError(
                f"{where}: settings are chosen on validation data, but the clients have none; set [partition] "
                "validation, for example 0.1"
            )
        plain = {**self._document, "method": [{"algorithm": "fedavg"}]}
        for table in ("weigher", "aggregator", "channel"):
            plain.pop(table, None)
        self._plain = samples_per_round(**self._arguments(plain, 0))
        metrics = set()
        self.studies: list[Study] = []
        for place, (method, space) in enumerate(zip(self.experiment.methods, spaces, strict=True)):
            given = self._arguments(self._document, place)
            model, metric = judged_model(given, self.tune.model, self.tune.metric, method.label)
            metrics.add(metric)
            self.studies.append(Study(place, method, space, model, self._search(method, space, metric)))
        rounds = self.tune.rounds or self.experiment.head.rounds
        self.goal = Goal(rounds, self._plain, metrics.pop(), tuple(seeds))
        self._claim(force)

    def run(self, tell: Tell = lambda *_: None) -> list[Found]:
        """Do the trials that are missing, and write every file.

        Raises:
            RunStopped: interrupted; or a method of which no trial completed. What was tried is kept.
            CheckpointError: a disk that is full or refuses; what was tried is kept.
        """
        with lock(self.out), interruptible() as asked:
            processes = min(self._processes(), len(self.studies))

            def handle(_shared: None, k: int) -> None:
                self._tune(self.studies[k], tell, asked)

            with Pool({"tune": handle}, processes) as pool:
                for _ in pool.map("tune", None, range(len(self.studies)), asked):
                    pass
            found = [self._found(study) for study in self.studies]
            if any(len(f.trials) < self.tune.trials for f in found):
                raise RunStopped(Stop.INTERRUPTED, f"{sum(len(f.trials) for f in found)} trials are kept in {self.out}")
            write_report(self.out, self.experiment.head.name, self.tune, self.goal, found)
            lost = [f for f in found if f.best is None]
            if lost:
                who, why = lost[0].study.method.label, lost[0].trials[-1].reason
                raise RunStopped(Stop.FAILED, f"no trial of {who} completed: {why}; look in {self.out / 'trials.csv'}")
            self._write(found)
        return found

    def _tune(self, study: Study, tell: Tell, asked: Callable[[], bool]) -> None:
        """The missing trials of a method."""
        path, folder = self._records(study.method), self.out / "checkpoints" / file_name(study.method.label)
        trials = read_trials(path)
        while len(trials) < self.tune.trials and not asked():
            trial = study.search.ask(trials)
            experiment = parse(with_params(self._document, study.place, trial.params), self._where)
            method = experiment.methods[study.place]
            place = folder / str(trial.number)
            for old in folder.glob("*"):
                if old != place:
                    shutil.rmtree(old)
            try:
                trials.append(attempt(experiment, method, self.federations, self.goal, study.model, trial, place))
            except Interrupted:
                return
            write_trials(path, trials)
            tell(study.method.label, trials[-1])
        shutil.rmtree(folder, ignore_errors=True)

    def _found(self, study: Study) -> Found:
        trials = read_trials(self._records(study.method))[: self.tune.trials]
        return Found(study, trials, study.search.best(trials))

    def _write(self, found: Sequence[Found]) -> None:
        """``tuned.toml``: the experiment with the settings of each method's best trial."""
        document = self._document
        for study, _, best in found:
            assert best is not None
            document = with_params(document, study.place, best.params, **self._rounds(study, document, best))
        parse(document, "tuned.toml")
        chosen = f"the best of {self.tune.trials} trials each by validation {self.goal.metric}"
        head = f"# {self.experiment.head.name}: settings chosen by 'fedloom tune', {chosen}.\n"
        if self.tune.equal_work:
            head += "# Every method has the rounds that make its samples_backward those of `rounds` plain ones.\n"
        write_atomic(self.out / "tuned.toml", (head + tomli_w.dumps(document)).encode())

    def _rounds(self, study: Study, document: Mapping[str, Any], best: Trial) -> dict[str, int]:
        if not self.tune.equal_work or "rounds" in document["method"][study.place]:
            return {}
        cost = samples_per_round(**self._arguments(with_params(document, study.place, best.params), study.place))
        rounds = self.experiment.head.rounds
        needed = self.goal.rounds_for(cost, rounds)
        return {} if needed == rounds else {"rounds": needed}

    def _arguments(self, document: Mapping[str, Any], place: int) -> dict[str, Any]:
        experiment = parse(document, self._where)
        seed, fed = next(iter(self.federations.items()))
        return arguments(experiment, experiment.methods[place], fed, seed)

    def _search(self, method: Method, space: Mapping[str, Dimension], metric: str) -> Search:
        tune = self.tune
        startup = tune.startup if tune.prune else None
        first = own_params(method, space)
        return Search(space, Goal(1, 1, metric, ()).higher, tune.seed, method.label, first, startup)

    def _processes(self) -> int:
        """Methods that are tuned at a time."""
        wanted = self.experiment.engine.workers
        if wanted == "auto":
            wanted = cores()
        return wanted if self.experiment.engine.device == "cpu" else 1

    def _records(self, method: Method) -> Path:
        return self.out / "trials" / f"{file_name(method.label)}.json"

    def _claim(self, force: bool) -> None:
        """Make the directory this search's own.

        Raises:
            RunDirError: it is another's.
        """
        settings = self.experiment.settings()
        for free in ("seeds", "name", "evaluate"):
            settings.pop(free)
        for free in ("workers", "checkpoint_every", "store_budget"):
            settings["engine"].pop(free)
        spaces = {s.method.label: {k: _table(d) for k, d in s.space.items()} for s in self.studies}
        tune = {**dump(self.tune), "space": spaces, "seeds": list(self.goal.seeds), "rounds": self.goal.rounds}
        now = tomllib.loads(tomli_w.dumps({**settings, "tune": tune}))
        path = self.out / "search.toml"
        there = not is_unused(self.out)
        if there and not path.exists():
            raise RunDirError(f"{self.out} is not empty and holds no search (no search.toml); choose another --out")
        if there and not force:
            _compare(self.out, tomllib.loads(path.read_text()), now)
        make_folder(self.out / "trials")
        if force:
            for old in (self.out / "trials").glob("*.json"):
                old.unlink()
            shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
        write_atomic(path, tomli_w.dumps(now).encode())


def _compare(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another search; more trials, methods and a longer final run may be asked for."""
    old, new = _flat(before), _flat(now)
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key] and key not in ("rounds", "tune.trials", "tune.equal_work"):
            raise RunDirError(
                f"{out} holds another search: {key} was {old[key]!r}, now it is {new[key]!r}; choose another --out, or "
                "start anew with --force"
            )


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if key == "method" and isinstance(value, list):  # FedSLR has an option of that name
            for m in value:
                own = {k: v for k, v in m.items() if k != "rounds"}
                flat |= {f"method {m['label']}: {inner}": v for inner, v in _flat(own).items()}
        elif isinstance(value, dict):
            flat |= {f"{key}.{inner}": v for inner, v in _flat(value).items()}
        else:
            flat[key] = value
    return flat


def _table(dimension: Dimension) -> Any:
    return list(dimension) if isinstance(dimension, tuple) else dump(dimension)
