"""One trial of a search: train a setting within the budget, score it on validation data and save it in a journal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import Field

from fedloom.callbacks import VirtualTime
from fedloom.data.federation import Federation, Split
from fedloom.engine.problem import JobFacts
from fedloom.engine.records import Records
from fedloom.engine.setting import Evaluate, Setting
from fedloom.engine.setup import make_problem
from fedloom.engine.simulate import Progress, simulate
from fedloom.engine.state import State
from fedloom.errors import CodeError, ConfigError, FedloomError, InvalidValue, Refused, RunDirError, RunStopped, Stop
from fedloom.formats import format_options
from fedloom.lab.experiment.schema import Method
from fedloom.lab.tune.work import Goal
from fedloom.metrics import METRICS, leading
from fedloom.metrics import metric as facts
from fedloom.storage.files import append_synced, write_atomic
from fedloom.values import Value

optuna.logging.set_verbosity(optuna.logging.WARNING)

Params = Mapping[str, Any]
"""Values of settings, keyed by name, such as ``mu`` or ``local.lr``."""
COMPARISON_POINTS = 5
"""Number of comparisons with earlier trials during a trial. Each comparison requires an evaluation. A hopeless trial
can be stopped after a fifth of its rounds."""
TRIAL_PART: Literal["validation"] = "validation"


_TRIAL_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


class Trial(Value):
    """Trial of one setting.

    Attributes:
        number: index of the trial among the trials of its method, counted from 0.
        params: values of the settings, keyed by name.
        state: ``complete``, ``pruned`` (stopped early because it was below the median of the complete trials) or
            ``failed`` (it diverged, or the method does not accept the values on these clients).
        value: validation metric over clients, averaged over seeds. The value is None unless the trial is complete.
        marks: intermediate values of the metric, keyed by comparison point.
        rounds: number of rounds trained per seed.
        samples_backward: number of sample gradients computed over all clients, rounds and seeds.
        reason: reason why the trial was not completed.
    """

    number: int
    params: dict[str, Any]
    state: Literal["complete", "pruned", "failed"]
    value: float | None = None
    marks: dict[int, float] = Field(default_factory=dict)
    rounds: int
    samples_backward: int
    reason: str = ""

    @property
    def setting(self) -> str:
        """Values of the setting as one line of text."""
        return setting_text(self.params)

    def frozen(self, space: dict[str, BaseDistribution]) -> FrozenTrial:
        """Convert the trial to Optuna's representation."""
        more = {"rounds": self.rounds, "samples_backward": self.samples_backward, "reason": self.reason}
        return create_trial(
            state=_TRIAL_STATES[self.state],
            value=self.value,
            params=self.params,
            distributions=space,
            intermediate_values=self.marks,
            user_attrs=more,
        )


def setting_text(params: Params) -> str:
    """Return the values of a setting as one line of text."""
    return format_options(params)


class TrialJournal:
    """Journal of a method's finished trials, which is stored in a file in Optuna's journal format.

    Each trial is one line of the file. Even after a crash, the file therefore contains either the whole line or no part
    of it. Because the directory is locked, other processes cannot write to the file.

    Args:
        path: path of the file, which is created if it does not exist. A line truncated by a crash is removed.
        label: label of the method, which is also the name of the Optuna study.
        higher: True if higher values of the metric are better.

    Raises:
        RunDirError: the file is damaged.
        CheckpointError: (all methods) the disk is full or a write fails. Earlier trials remain intact.
    """

    def __init__(self, path: Path, label: str, higher: bool) -> None:
        journal_bytes = path.read_bytes() if path.exists() else None
        whole = (journal_bytes or b"")[: (journal_bytes or b"").rfind(b"\n") + 1]
        if journal_bytes != whole:
            write_atomic(path, whole)
        direction: Literal["maximize", "minimize"] = "maximize" if higher else "minimize"
        try:
            storage = JournalStorage(_JournalFile(path))
            self._study = (
                optuna.load_study(storage=storage, study_name=label)
                if whole
                else optuna.create_study(storage=storage, study_name=label, direction=direction)
            )
            self.trials = [_thaw_trial(frozen) for frozen in self._study.trials]
        except Exception as error:  # the storage raises any error of its parser
            if isinstance(error, FedloomError) and not isinstance(error, InvalidValue):
                raise
            raise RunDirError(f"{path} is damaged: {error}. Choose another --out, or start over with --force") from None

    def append(self, trial: Trial, space: dict[str, BaseDistribution]) -> None:
        """Append a trial to the journal. The settings of the trial are described by the distributions ``space``."""
        self._study.add_trial(trial.frozen(space))
        self.trials.append(trial)


class _JournalFile(JournalFileBackend):
    """Optuna journal file, written in the same way as all other files of a run directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        append_synced(self._path, [json.dumps(log).encode() + b"\n" for log in logs])


def _thaw_trial(frozen: FrozenTrial) -> Trial:
    state = next(name for name, state in _TRIAL_STATES.items() if state is frozen.state)
    marks = frozen.intermediate_values
    return Trial(
        number=frozen.number, params=frozen.params, state=state, value=frozen.value, marks=marks, **frozen.user_attrs
    )


class Interrupted(Exception):
    """Interruption of a trial because the user requested a stop. The trial is saved in a checkpoint."""


def remove_test(fed: Federation) -> Federation:
    """Return the federation without test data, so that it has neither clients' test sets nor a common test set."""
    none = torch.zeros(0, dtype=torch.int64)
    parts = {**fed.parts, "test": Split(none, torch.zeros(fed.n + 1, dtype=torch.int64))}
    partition = fed.partition and {**fed.partition, "test": 0.0}  # the test set is empty on purpose
    return replace(fed, parts=parts, test=none, partition=partition)


def make_scored_setting(setting: Setting, seed: int, every: int = 5) -> Setting:
    """Return the setting of a trial's run, which is evaluated only on validation data.

    Early stopping is disabled, so that all trials of a search have equal compute budgets.
    """
    evaluate = Evaluate(every=every, parts=(TRIAL_PART,), select_on=TRIAL_PART)
    return setting.with_(seed=seed, evaluate=evaluate, early_stop=None)


def scored_models(
    setting: Setting, fed: Federation, wanted: str, metric: str | None, label: str
) -> tuple[tuple[str, ...], str, bool]:
    """Return the models and the metric that decide between trials, and True if higher values of the metric are better.

    Raises:
        ConfigError: the method does not have the model, the task does not have the metric, or the setting is invalid.
    """
    problem, start = make_problem(setting, fed, finds=False)
    model_kinds = problem.model_kinds(start.server)
    plain = tuple(model_kinds[:2])
    choices = {"mean": plain, "auto": plain[-1:]}
    models = (choices | {"best-on-validation": tuple(model_kinds[-1:])}).get(wanted, (wanted,))
    if not models or not set(models) <= set(model_kinds):
        raise ConfigError(
            f"[tune] model is {wanted!r}, but {label} has only these models: "
            f"{', '.join(model_kinds)}. Use model = 'auto'"
        )
    names = _defined_metrics(problem)
    metric_name = leading(names, "settings") if metric is None else metric
    if metric_name not in names:
        allowed = ", ".join([*(n for n in METRICS if n in names), *sorted(names - {*METRICS})])
        raise ConfigError(f"[tune] metric is {metric_name!r}, but for these data it must be one of: {allowed}")
    return models, metric_name, facts(metric_name).higher_is_better


def _defined_metrics(problem: JobFacts) -> set[str]:
    """Return the metrics that are defined on at least one client's validation data.

    The AUROC, for example, requires both classes.
    """
    fed, task = problem.eval_fed, problem.oracle.task
    owner, y = fed.owner(TRIAL_PART), fed.targets(fed.parts[TRIAL_PART].index)
    metrics_of_part = task.metrics(torch.zeros(len(y), task.outputs, dtype=problem.oracle.dtype), y, owner, fed.n)
    return {name for name, values in metrics_of_part.items() if name == "loss" or bool(values.isfinite().any())}


def run_trial(
    method: Method,
    federations: Mapping[int, Federation],
    goal: Goal,
    trial: optuna.Trial,
    folder: Path,
    emitter: Callable[[str, Setting], Progress],
) -> Trial:
    """Train a setting, score it, and return the finished trial.

    Args:
        method: method with the setting to try.
        federations: federations without test data, keyed by seed.
        goal: compute budget and scoring metric of the trial.
        trial: trial suggested by Optuna.
        folder: folder for the trial's checkpoints, from which an interrupted trial resumes.
        emitter: function that returns the callback for a run, given the run's name and setting. The callback is called
            after every round.

    Raises:
        Interrupted: the user asked to stop.
    """
    marks: dict[int, float] = {}
    values: list[float] = []
    done = Trial(number=trial.number, params=trial.params, state="complete", rounds=0, samples_backward=0)

    def run(place: int, rounds: int, *, prune: bool = True) -> State:
        seed, every = goal.seeds[place], -(-rounds // COMPARISON_POINTS)
        watch = _make_pruning_callback(marks, place * COMPARISON_POINTS, rounds, every, goal, trial if prune else None)
        chosen = make_scored_setting(method.setting, seed, every).with_(rounds=rounds)
        timed = [] if goal.time is None else [VirtualTime(seconds=goal.time)]
        figures = emitter(f"{method.label}: {setting_text(trial.params)}", chosen)
        result = simulate(
            chosen, federations[seed], folder=folder / f"{seed}-{rounds}", callbacks=[figures, watch, *timed]
        )
        if result.stop is Stop.INTERRUPTED:
            raise Interrupted
        watch(result.state)  # also for a run that ended before an interruption
        if result.stop not in (Stop.DONE, Stop.STOPPED):
            raise _LostRun(result.state, RunStopped(result.stop, result.detail))
        return result.state

    try:
        first = make_scored_setting(method.setting, goal.seeds[0]), federations[goal.seeds[0]]
        rounds = goal.rounds if goal.budget is None else goal.budget.rounds(*first)
        state = run(0, rounds)
        if goal.budget is not None and goal.budget.missed(_gradient_samples(state)):
            again = goal.budget.rounds(*first, whole=True)
            if again != rounds:
                rounds = again
                marks.clear()
                state = run(0, rounds, prune=False)
        for place in range(len(goal.seeds)):
            state = state if place == 0 else run(place, rounds)
            done = _add_run_cost(done, state)
            values.append(_score_records(state.records, goal))
    except _PrunedTrial as hopeless:
        reason = "below the median of the complete trials at this point"
        done = _add_run_cost(done, hopeless.state).with_(state="pruned", reason=reason)
    except _LostRun as lost:
        done = _add_run_cost(done, lost.state).with_(state="failed", reason=str(lost.reason))
    except (RunStopped, CodeError, Refused) as error:  # the clients may limit an option's range
        done = done.with_(state="failed", reason=str(error))
    else:
        done = done.with_(value=sum(values) / len(values))
    marked: Trial = done.with_(marks=marks)
    return marked


class _LostRun(Exception):
    """Run that ended without a score, with its last state and the reason."""

    def __init__(self, state: State, reason: RunStopped) -> None:
        self.state, self.reason = state, reason


class _PrunedTrial(BaseException):
    """Early stop of a trial, with the last state of its run.

    This class is not derived from Exception, because an Exception raised by a callback would not end the run.
    """

    def __init__(self, state: State) -> None:
        self.state = state


def _make_pruning_callback(
    marks: dict[int, float], first: int, rounds: int, every: int, goal: Goal, trial: optuna.Trial | None
) -> Callable[[State], None]:
    """Return a callback that records the metric at the comparison points and stops hopeless trials."""

    def note(state: State) -> None:
        measured: dict[int, list[float]] = {}
        for record in state.records.items:
            wanted = record.model in goal.models and (record.part, record.metric) == (TRIAL_PART, goal.figure)
            if wanted and 0 < record.round < rounds:
                measured.setdefault(record.round, []).append(float(record.values[0]))
        for round, values in measured.items():
            point, value = first + round // every, sum(values) / len(values)
            if point not in marks and math.isfinite(value):
                marks[point] = value
                if trial is None:
                    continue
                trial.report(value, point)
                if trial.should_prune():
                    raise _PrunedTrial(state)

    return note


def _score_records(records: Records, goal: Goal) -> float:
    scores = [records.last(model, TRIAL_PART, goal.figure) for model in goal.models]
    values = [float(value[0]) for value in scores if value is not None and math.isfinite(value[0])]
    if len(values) < len(scores):
        raise RunStopped(Stop.DIVERGED, f"the validation {goal.metric} is not a number")
    return sum(values) / len(values)


def _gradient_samples(state: State) -> int:
    """Return the number of sample gradients computed in a run, including the gradients for its last personal models."""
    total = state.records.last("", "", "samples_backward")
    return 0 if total is None else int(total[0])


def _add_run_cost(trial: Trial, state: State) -> Trial:
    """Return the trial with the cost of one more run added."""
    samples = trial.samples_backward + _gradient_samples(state)
    further: Trial = trial.with_(rounds=state.round, samples_backward=samples)
    return further
