"""Tune an experiment in a directory: run the missing trials of every method and write the final files."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.analyses import check_analysis
from fedloom.data.federation import Federation
from fedloom.data.groups import keep_group_columns
from fedloom.engine.checks.moved import update_document
from fedloom.engine.setting import Engine, Setting
from fedloom.engine.setup import check
from fedloom.engine.workers import note_idle_workers
from fedloom.errors import ConfigError, RunDirError, RunStopped, Stop, adapt_wording
from fedloom.lab.experiment import Experiment, parse
from fedloom.lab.experiment.events import EVENT_INTERVAL_SECONDS, EventEmitter, EventQueue, Listener
from fedloom.lab.experiment.file import difference_to_recorded
from fedloom.lab.experiment.tuning import Dimension, Tune
from fedloom.lab.experiment.units.executors import Executor, check_executor, compute_units
from fedloom.lab.experiment.units.grid import expand_grid
from fedloom.lab.experiment.units.joined import JoinedWork, WorkUnit
from fedloom.lab.experiment.units.shares import ProcessShare, decide_share
from fedloom.lab.experiment.units.travel import (
    UnitReply,
    pack_experiment,
    read_document,
    read_federation,
    receive_data,
    unit_folder,
    worker_name,
)
from fedloom.lab.tune.report import SEARCH_REPORT_FILES, write_report
from fedloom.lab.tune.search import (
    ReadExperiment,
    Search,
    SearchResult,
    Study,
    build_search_space,
    check_names,
    check_values,
    file_setting_values,
    note_limits,
    replace_params,
    report_overspending,
)
from fedloom.lab.tune.trial import (
    TRIAL_PART,
    Interrupted,
    Trial,
    TrialJournal,
    make_scored_setting,
    remove_test,
    run_trial,
    scored_models,
)
from fedloom.lab.tune.work import Budget, Goal, plain_budget
from fedloom.outputs import check_output_folder
from fedloom.processes.distributed import check_alone
from fedloom.processes.pool import WorkerPool
from fedloom.processes.signals import interruptible
from fedloom.rundir import WORK_FOLDER, check_case, file_name, get_label
from fedloom.storage.claims import Claims, UnitClaim
from fedloom.storage.files import is_unused, make_folder, refuse_links, write_atomic
from fedloom.storage.locks import lock
from fedloom.values import dump_value, find_difference, flatten_document

TRIAL_FREE_PARTS = ("seeds", "name", "evaluate")
"""Keys of an experiment that do not affect trials."""
SEARCH_FILE, LOG_FILE = "search.toml", "trials.log"
SEARCH_FOLDERS = ("trials", "checkpoints", WORK_FOLDER)
SEARCH_ENTRIES = (*SEARCH_FOLDERS, "search.toml", "tuned.toml", *SEARCH_REPORT_FILES)
"""Names of the files and folders that a search creates in its directory, folders first."""

OnTrial = Callable[[str, Trial], None]
"""Function that is called with (label, trial) after each trial."""


class Tuning:
    """Search for the best settings of the methods in an experiment.

    Args:
        document: content of the experiment file.
        where: name of the file, for error messages.
        out: directory of the search, which is created if it does not exist.
        data_dir: folder of data sets.
        force: True to discard the existing trials.
        read: function that converts a document to an experiment.
        clients: function that returns the federation for a given seed. If None, the federations are those that the
            experiment defines.

    Raises:
        ConfigError: the experiment is invalid, has no validation data, has an invalid search space, or is run on
            several ranks of torchrun. This error is also raised if the directory lies inside a run directory or
            contains a file that the search reads. Nothing is written.
        RunDirError: the directory belongs to a different search, or is not a search directory.
        DataError: the data cannot be read.
    """

    @adapt_wording("file")
    def __init__(
        self,
        document: Mapping[str, Any],
        where: str,
        out: Path,
        data_dir: Path | None = None,
        *,
        force: bool = False,
        read: ReadExperiment = parse,
        clients: Callable[[int], Federation] | None = None,
    ) -> None:
        check_alone("a search for settings")
        document = expand_grid(document, where)
        self.experiment = read(document, where)
        self.tune, self.out, self._where, self._read = self.experiment.tune, out, where, read
        check_output_folder(out, (where, self.experiment.source_options.get("source")), entries=SEARCH_ENTRIES)
        self._document = {key: value for key, value in document.items() if key != "tune"}
        check_names(self.experiment, where)
        spaces = [build_search_space(method, self.tune, where) for method in self.experiment.methods]
        for place, space in enumerate(spaces):
            if not space:
                label = self.experiment.methods[place].label
                raise ConfigError(f"{where}: {label} has no setting to search. Add a setting in [tune.space.{label}]")
            check_values(document, place, space, where, read)
        seeds = self.tune.seeds or self.experiment.head.seeds[:1]
        if clients is None:
            data = keep_group_columns(self.experiment.source, self.experiment.kept_columns).read(data_dir)
            clients, self._checksum = partial(self.experiment.partition, data), data.checksum
        whole = {s: clients(s) for s in seeds}
        for s, fed in whole.items():
            for method in self.experiment.methods:
                check(method.setting.with_(seed=s), fed)
                for analysis in self.experiment.analyses:
                    check_analysis(analysis, fed, method.setting.with_(seed=s))
        self.federations: dict[int, Federation] = {s: remove_test(fed) for s, fed in whole.items()}
        if any(not int(fed.sizes(TRIAL_PART).sum()) for fed in self.federations.values()):
            raise ConfigError(
                f"{where}: settings are chosen on validation data, but the clients have no validation "
                "data. Set [partition] validation, for example 0.1"
            )
        rounds = self.tune.rounds or self.experiment.common.rounds
        budget = self._measure_budget(rounds) if self.tune.equal_work and self.tune.simulated_seconds is None else None
        wanted, _, statistic = (self.tune.metric or "").partition("/")
        self.studies: list[Study] = []
        for place, (method, space) in enumerate(zip(self.experiment.methods, spaces, strict=True)):
            experiment_rounds = self._run(self._document, place)
            models, metric, higher = scored_models(*experiment_rounds, self.tune.model, wanted or None, method.label)
            method_rounds = rounds if self.tune.equal_work else document["method"][place].get("rounds", rounds)
            time = self.tune.simulated_seconds
            goal = Goal(method_rounds, budget, metric, tuple(seeds), models, higher, statistic or "mean", time)
            if time is not None and method.setting.devices is None:
                raise ConfigError(f"{where}: [tune] simulated_seconds needs simulated times. Add [devices]")
            search = Search(space, self.tune, method.label, goal.higher_is_better, file_setting_values(method, space))
            self.studies.append(Study(place, method, space, goal, search))
        self.goal = self.studies[0].goal._replace(rounds=rounds)
        self._force = force
        self._check_directory()

    @property
    def remarks(self) -> list[str]:
        """Remarks about the search as a whole."""
        return note_idle_workers(self.experiment.common.engine)

    @property
    def rounds(self) -> int:
        """Total number of rounds of all trials.

        With equal compute budgets, the number is expressed in rounds of local training without federation.
        """
        trials = [min(self.tune.trials, study.search.settings) * study.goal.rounds for study in self.studies]
        return int(sum(trials)) * len(self.goal.seeds)

    def run(
        self,
        on_trial: OnTrial = lambda *_: None,
        *listeners: Listener,
        tuned: bool = True,
        join: bool = False,
        executor: Executor | None = None,
    ) -> list[SearchResult]:
        """Run the missing trials, write all files of the search, and return the result for every method.

        Args:
            on_trial: function called with the label and the trial after each trial.
            listeners: functions that are called with an event after each round of a trial.
            tuned: True to also write ``tuned.toml``. Every method must then have a complete trial.
            join: True to divide the methods among all processes that join the search, on any machine that can access
                the directory. One method's trials always run sequentially, because each trial depends on the previous
                ones.
            executor: executor with a method ``submit(function, *arguments)`` that executes the methods' searches.

        Returns:
            The result of the search for each method, in the order of the experiment.

        Raises:
            RunStopped: the search was interrupted, or no trial of some method was completed. Finished trials are kept.
            CheckpointError: the disk is full or a write fails. Finished trials are kept.
        """
        self._stopped = False
        if executor is not None:
            return self._run_on_executor(executor, on_trial, tuned=tuned, join=join)
        with lock(self.out, joins=join), interruptible() as interrupted:
            share = decide_share(self.experiment, self.federations, range(len(self.studies)))
            line, beside = EventQueue(), share.runs > 1

            def emitter(label: str, run: Setting) -> EventEmitter:
                return (
                    EventEmitter((line.send,), label, run, EVENT_INTERVAL_SECONDS)
                    if beside
                    else EventEmitter(listeners, label, run)
                )

            def search(k: int, place: Path) -> None:
                self._tune(self.studies[k], on_trial, emitter, share.workers, place)

            with line.listening(*listeners) if beside else nullcontext():
                if join:
                    return self._run_joined(search, share, tuned=tuned)
                check_case(self.out, [study.method.label for study in self.studies])
                self._claim_directory()
                if (self.out / WORK_FOLDER).exists():
                    self._take_over_trials(Claims(self.out / WORK_FOLDER))

                def handle(_shared: None, k: int) -> None:
                    search(k, self.out)

                with WorkerPool([handle], share.runs, nested=share.workers > 1) as pool:
                    for _ in pool.map(handle, None, range(len(self.studies)), interrupted):
                        pass
            return self._write_findings(tuned=tuned)

    def _run_on_executor(self, executor: Executor, on_trial: OnTrial, *, tuned: bool, join: bool) -> list[SearchResult]:
        """Do the work of `run` on an executor that computes each method's search as one unit.

        An interrupted search restarts from its first trial.
        """
        check_executor(executor)
        if join:
            raise ConfigError("an executor already distributes the work. Omit `join`")
        tune = {key: value for key, value in self._recorded_identity()["tune"].items() if key in Tune.model_fields}
        luggage = pack_experiment(self.experiment, self._checksum(), tune=tune)
        with lock(self.out), interruptible() as interrupted:
            check_case(self.out, [study.method.label for study in self.studies])
            self._claim_directory()
            if (self.out / WORK_FOLDER).exists():
                self._take_over_trials(Claims(self.out / WORK_FOLDER))
            studies = [s for s in self.studies if not s.search.ended(self._open_journal(s, self.out).trials)]
            units = [json.dumps({"label": study.method.label, "rounds": study.goal.rounds}) for study in studies]
            for k, reply in compute_units(executor, luggage, units, interrupted, compute_search):
                write_atomic(self._log(studies[k], self.out), reply.files[LOG_FILE])
                for trial in self._open_journal(studies[k], self.out).trials:
                    on_trial(studies[k].method.label, trial)
            return self._write_findings(tuned=tuned)

    def search_one(self) -> bytes | None:
        """Search for the settings of the experiment's only method.

        Return the journal of the trials, or None if the user stopped the search.
        """
        (study,) = self.studies
        self._stopped = False
        self._claim_directory()
        self._tune(study, lambda *_: None, lambda label, run: EventEmitter((), label, run), 1, self.out)
        ended = study.search.ended(self._open_journal(study, self.out).trials)
        return self._log(study, self.out).read_bytes() if ended else None

    def _write_findings(self, *, tuned: bool) -> list[SearchResult]:
        """Write all files of the search, and return the result for each method."""
        findings = [self._make_result(study) for study in self.studies]
        if not all(f.study.search.ended(f.trials) for f in findings):
            raise RunStopped(Stop.INTERRUPTED, f"{sum(len(f.trials) for f in findings)} trials are saved in {self.out}")
        write_report(self.out, self.experiment.head.name, self.tune, self.goal, findings, tuned=tuned)
        lost = [f for f in findings if f.best is None]
        if lost and tuned:
            who, why = lost[0].study.method.label, lost[0].trials[-1].reason
            raise RunStopped(Stop.FAILED, f"no trial of {who} completed: {why}. See {self.out / 'trials.csv'}")
        if tuned:
            self._write(findings)
        return findings

    def _run_joined(
        self, search: Callable[[int, Path], None], share: ProcessShare, *, tuned: bool
    ) -> list[SearchResult]:
        """Do the work of `run` together with other processes and return the result for every method.

        Each method is searched by a single process.
        """
        if self._force:
            raise ConfigError(
                "a process that joins cannot restart with --force, because other processes use the "
                f"results. Delete {self.out} first"
            )
        session = JoinedWork(self.out)
        if session.is_begun and tomllib.loads((self.out / SEARCH_FILE).read_text()) != self._recorded_identity():
            raise RunDirError(
                f"{self.out}: another search's processes are using this folder. To join them, "
                "use the same file. To change the file, wait until all processes have ended. If no "
                f"process is left, delete {self.out / WORK_FOLDER}"
            )
        session.begin(self._claim_directory)
        names = [file_name(study.method.label) for study in self.studies]
        units = [WorkUnit(name, self.out / WORK_FOLDER / name / "done") for name in names]

        def do(k: int, claim: UnitClaim) -> None:
            log = self._log(self.studies[k], claim.state)
            make_folder(log.parent)
            for before in (claim.earlier, self.out):
                if before is not None and not log.exists() and self._log(self.studies[k], before).exists():
                    write_atomic(log, self._log(self.studies[k], before).read_bytes())
            search(k, claim.state)
            if not self.studies[k].search.ended(self._open_journal(self.studies[k], claim.state).trials):
                raise KeyboardInterrupt

        def write() -> None:
            for study, unit in zip(self.studies, units, strict=True):
                write_atomic(self._log(study, self.out), self._log(study, unit.target).read_bytes())
            results.extend(self._write_findings(tuned=tuned))

        results = list[SearchResult]()
        session.work(units, do, share)
        session.finish(write)
        return results or [self._make_result(study) for study in self.studies]

    def _take_over_trials(self, claims: Claims) -> None:
        """Take over the trials of processes that joined the search and have since ended."""
        claims.check_ended()
        for study in self.studies:
            name = file_name(study.method.label)
            for state in (claims.find_abandoned(name), claims.folder / name / "done"):
                if state is not None and self._log(study, state).exists():
                    write_atomic(self._log(study, self.out), self._log(study, state).read_bytes())
        claims.forget()

    def _tune(
        self, study: Study, on_trial: OnTrial, emitter: Callable[[str, Setting], EventEmitter], workers: int, out: Path
    ) -> None:
        """Run the missing trials of a method, with their journal and their checkpoints in the folder ``out``."""
        journal, folder = self._open_journal(study, out), out / "checkpoints" / file_name(study.method.label)
        with interruptible() as interrupted:
            while not study.search.ended(journal.trials) and not self._stopped:
                trial = study.search.ask(journal.trials)
                experiment = self._experiment(replace_params(self._document, study.place, trial.params), workers)
                method = experiment.methods[study.place]
                place = folder / str(trial.number)
                for old in folder.glob("*"):
                    if old != place:
                        shutil.rmtree(old)
                try:
                    done = run_trial(method, self.federations, study.goal, trial, place, emitter)
                except Interrupted:
                    self._stopped = True
                    return
                journal.append(done, study.search.space)
                on_trial(study.method.label, done)
                self._stopped = interrupted()
        if study.search.ended(journal.trials):
            shutil.rmtree(folder, ignore_errors=True)

    def _make_result(self, study: Study) -> SearchResult:
        trials = self._open_journal(study, self.out).trials[: self.tune.trials]
        return SearchResult(study, trials, study.search.best(trials))

    def _open_journal(self, study: Study, out: Path) -> TrialJournal:
        return TrialJournal(self._log(study, out), study.method.label, study.search.higher)

    def _log(self, study: Study, out: Path) -> Path:
        return out / "trials" / f"{file_name(study.method.label)}.log"

    def _write(self, findings: Sequence[SearchResult]) -> None:
        """Write ``tuned.toml``, the experiment file with the settings of each method's best trial."""
        document = self.tuned(findings)
        experiment = self._read(document, "tuned.toml")
        chosen = f"the best of {self.tune.trials} trials each by validation {self.tune.metric or self.goal.metric}"
        head = f"# {self.experiment.head.name}: settings chosen by 'fedloom tune', {chosen}.\n"
        if self.tune.equal_work:
            head += "# Each method's rounds are chosen so that it does about as much work as `rounds` local rounds.\n"
            head += "".join(f"# {sentence}\n" for sentence in report_overspending(findings))
        head += "".join(f"# {sentence}\n" for sentence in note_limits(findings))
        content = document if self._read is parse else experiment.settings()  # TOML cannot represent objects
        write_atomic(self.out / "tuned.toml", (head + tomli_w.dumps(content)).encode())

    def tuned(self, findings: Sequence[SearchResult]) -> dict[str, Any]:
        """Return the experiment document with the settings of each method's best trial."""
        document = self._document
        for one in findings:
            assert one.best is not None
            document = replace_params(document, one.study.place, one.best.params, **self._rounds(one, document))
        return dict(document)

    def _rounds(self, finding: SearchResult, document: Mapping[str, Any]) -> dict[str, int]:
        study, _, best = finding
        assert best is not None
        if not self.tune.equal_work or "rounds" in document["method"][study.place]:
            return {}
        wanted = self.experiment.common.rounds
        needed = best.rounds
        if wanted != study.goal.rounds:  # scale by the work per round of the best trial
            needed = max(1, round(best.rounds * wanted / study.goal.rounds / (finding.share or 1.0)))
        return {} if needed == wanted else {"rounds": needed}

    def _measure_budget(self, rounds: int) -> Budget:
        """Measure the compute budget: the cost of local training for some rounds, with the first seed."""
        plain = {**self._document, "method": [{"algorithm": "fedavg"}]}
        for table in ("aggregation_weights", "personalized_aggregation", "aggregator", "upload_transform"):
            plain.pop(table, None)
        return plain_budget(*self._run(plain, 0), rounds)

    def _run(self, document: Mapping[str, object], place: int) -> tuple[Setting, Federation]:
        seed, fed = next(iter(self.federations.items()))
        return make_scored_setting(self._experiment(document).methods[place].setting, seed), fed

    def _experiment(self, document: Mapping[str, object], workers: int = 1) -> Experiment:
        experiment = self._read(document, self._where)
        return experiment.with_(engine=experiment.common.engine.with_(workers=workers))

    def _check_directory(self) -> None:
        """Raise an error if the directory does not belong to this search.

        The file ``search.toml`` in the directory records the settings that affect the trials.
        """
        out, path = self.out, self.out / SEARCH_FILE
        if not is_unused(out) and not path.exists():
            raise RunDirError(f"{out} is not empty and contains no search (no search.toml). Choose another --out")
        refuse_links(out, SEARCH_FOLDERS)
        if self._force:
            return
        now = self._recorded_identity()
        try:
            difference = (
                _changed_setting_message(update_document(tomllib.loads(path.read_text())), now) if path.exists() else ""
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunDirError(f"{path} is damaged: {error}. Choose another --out, or start over with --force") from None
        if difference:
            raise RunDirError(
                f"{out} contains a different search: {difference}. Choose another --out, or start over with --force"
            )

    def _claim_directory(self) -> None:
        """Claim the directory for this search. Existing results are deleted if ``force`` is set."""
        self._check_directory()
        if self._force:
            for name in SEARCH_FOLDERS:
                shutil.rmtree(self.out / name, ignore_errors=True)
        self._force = False
        write_atomic(self.out / "search.toml", tomli_w.dumps(self._identity()).encode())
        make_folder(self.out / "trials")

    def _recorded_identity(self) -> dict[str, Any]:
        """Return `_identity` as it would be read from a file."""
        return tomllib.loads(tomli_w.dumps(self._identity()))

    def _identity(self) -> dict[str, Any]:
        """Return everything that affects the trials, as a TOML document."""
        settings = self.experiment.settings()
        for free in TRIAL_FREE_PARTS:
            settings.pop(free)
        for free in Engine.free:
            settings["engine"].pop(free, None)
        spaces = {s.method.label: {k: _dimension_table(d) for k, d in s.space.items()} for s in self.studies}
        tune = {**dump_value(self.tune), "space": spaces, "seeds": list(self.goal.seeds), "rounds": self.goal.rounds}
        if not self.tune.equal_work:
            tune["rounds_of"] = {study.method.label: study.goal.rounds for study in self.studies}
        return {**settings, "tune": tune}


def compute_search(experiment: str, unit: str, data: bytes | None = None) -> bytes:
    """Search for the settings of one method of an experiment in any process, and return the reply as bytes.

    The same arguments always give the same trials.

    Args:
        experiment: text that `pack_experiment` returned, including the table ``tune``.
        unit: JSON object with the keys ``label`` and ``rounds`` (the number of rounds of a trial).
        data: bytes that `pack_experiment` returned. Each worker receives the data only once.

    Returns:
        A `UnitReply` that contains the journal of the trials, encoded as bytes.

    Raises:
        DataError: the worker's data differ from the data of the experiment.
        ConfigError: the worker cannot import code that the experiment needs.
    """
    if not receive_data(experiment, data):
        return UnitReply({}, wants_data=True, worker=worker_name()).pack()
    key = json.loads(unit)
    label = key["label"]
    with unit_folder() as folder:
        document = read_document(experiment)
        document["method"] = [table for table in document["method"] if get_label(table) == label]
        document["method"][0]["rounds"] = key["rounds"]
        document["tune"]["space"] = {label: document["tune"]["space"][label]}
        search = Tuning(document, "executor", folder, clients=partial(read_federation, experiment))
        log = search.search_one()
        return UnitReply({} if log is None else {LOG_FILE: log}, interrupted=log is None, worker=worker_name()).pack()


def _dimension_table(dimension: Dimension) -> Any:
    return list(dimension) if isinstance(dimension, tuple) else dump_value(dimension)


def _changed_setting_message(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a message about a changed setting that affects trials, or "" if no such setting has changed.

    The number of trials, the methods and the final number of rounds may be different.
    """
    tunes = [document.pop("tune") for document in (before, now)]
    free = "|".join(map(re.escape, (f"engine.{free}" for free in Engine.free)))
    if key_and_values := difference_to_recorded(
        before, now, rf"{'|'.join(TRIAL_FREE_PARTS)}|evaluate\..*|{free}|rounds|method .*: rounds"
    ):
        return key_and_values
    was, new = (flatten_document({"tune": {**dump_value(Tune()), **tune}}) for tune in tunes)
    options = {f"tune.{name}" for name in Tune.model_fields}
    wanted = (options | was.keys() & new.keys()) - {"tune.trials"}
    return find_difference(*({key: tune[key] for key in wanted & tune.keys()} for tune in (was, new)))
