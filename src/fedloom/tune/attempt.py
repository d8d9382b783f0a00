"""One trial: a setting trained for the work that every trial gets, and scored on validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optuna
import torch

from fedloom.data.federation import Federation, Split
from fedloom.engine.hybrid import HIGHER
from fedloom.engine.records import Records
from fedloom.engine.settings import Evaluate
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import Progress, simulate
from fedloom.engine.state import State
from fedloom.engine.timing import samples_per_round
from fedloom.errors import CodeError, ConfigError, RunStopped, Stop
from fedloom.experiment import Experiment
from fedloom.experiment.schema import Method
from fedloom.tune.trials import Trial, setting

POINTS = 5
"""Points of a trial at which it is compared with earlier ones."""
PART: Literal["validation"] = "validation"


class Interrupted(Exception):
    """The user asked to stop; the trial at hand is kept as a checkpoint."""


class Goal(NamedTuple):
    """What trials are given and judged by.

    Attributes:
        rounds: work of a trial, in rounds of plain local training, or in the method's own.
        plain: samples whose gradient a round of plain local training takes; None: rounds are the method's own.
        metric: name of the validation metric.
        seeds: the score is the mean over them.
        models: the score is the mean over them.
    """

    rounds: int
    plain: int | None
    metric: str
    seeds: tuple[int, ...]
    models: tuple[str, ...]

    @property
    def higher(self) -> bool:
        """More is better."""
        return self.metric in HIGHER

    @property
    def samples(self) -> int | None:
        """Samples whose gradient a trial takes, over all its seeds; None: what its rounds cost."""
        return None if self.plain is None else self.rounds * self.plain * len(self.seeds)

    def rounds_of(self, run: Mapping[str, Any], rounds: int) -> int:
        """Rounds of a run whose work is nearest to that of ``rounds`` plain ones; ``rounds`` where they are its own."""
        cost = 0 if self.plain is None else samples_per_round(**run)
        return max(1, round(rounds * self.plain / cost)) if self.plain is not None and cost else rounds


def without_test(fed: Federation) -> Federation:
    """The federation without its test data: no test part, no common test set."""
    none = torch.zeros(0, dtype=torch.int64)
    parts = {**fed.parts, "test": Split(none, torch.zeros(fed.n + 1, dtype=torch.int64))}
    return replace(fed, parts=parts, test=none)


def arguments(experiment: Experiment, method: Method, fed: Federation, seed: int) -> dict[str, Any]:
    """What a trial gives to `simulate`: the method's run, evaluated on validation only."""
    evaluate = Evaluate(parts=(PART,), select_on=PART)
    return {**experiment.arguments(method, fed, seed), "evaluate": evaluate}


def judged_models(given: Mapping[str, Any], wanted: str, metric: str | None, label: str) -> tuple[tuple[str, ...], str]:
    """The models and the metric that decide.

    Raises:
        ConfigError: the method has no such model, or the task no such metric; or the run cannot work.
    """
    job, server = make_job(**given)
    there = ["global"] if job.algorithm.global_model(server) is not None else []
    there += ["personal"] if job.has_personal else []
    models = {"mean": tuple(there), "auto": tuple(there[-1:])}.get(wanted, (wanted,))
    there += ["hybrid"] if len(there) == 2 else []
    if not models or not set(models) <= set(there):
        raise ConfigError(f"[tune] model is {wanted!r}, but {label} has: {', '.join(there)}; use model = 'auto'")
    task, none = job.oracle.task, torch.zeros(0, dtype=torch.int64)
    names = list(task.metrics(torch.zeros(0, task.outputs), job.judge.targets(none), none, 0))
    found = next((name for name in (*HIGHER, "loss") if name in names), "loss") if metric is None else metric
    if found not in (*(n for n in HIGHER if n in names), "loss"):
        allowed = ", ".join(n for n in (*HIGHER, "loss") if n in names)
        raise ConfigError(f"[tune] metric is {found!r}; on this data it can be: {allowed}")
    return models, found


def attempt(
    experiment: Experiment,
    method: Method,
    federations: Mapping[int, Federation],
    goal: Goal,
    trial: optuna.Trial,
    folder: Path,
    teller: Callable[[str, int, int], Progress],
) -> Trial:
    """Train and score a setting.

    Args:
        experiment: with the setting in its method.
        method: the one that is tried.
        federations: without test data, by seed.
        goal: what every trial gets.
        trial: what Optuna asked for.
        folder: for checkpoints; a trial that was stopped goes on from there.
        teller: (what is run, seed, rounds) -> what is called after every round.

    Raises:
        Interrupted: the user asked to stop.
    """
    runs = {seed: arguments(experiment, method, federations[seed], seed) for seed in goal.seeds}
    marks: dict[int, float] = {}
    values: list[float] = []
    rounds = samples = 0
    state: Literal["complete", "pruned", "failed"] = "complete"
    reason = ""
    try:
        wanted = goal.rounds_of(runs[goal.seeds[0]], goal.rounds)
        every = -(-wanted // POINTS)
        evaluate = Evaluate(every=every, parts=(PART,), select_on=PART)
        for place, seed in enumerate(goal.seeds):
            watch = _watch(marks, place * POINTS, wanted, every, goal, trial)
            tell = teller(f"{method.label}: {setting(trial.params)}", seed, wanted)
            run = {**runs[seed], "rounds": wanted, "evaluate": evaluate}
            result = simulate(**run, folder=folder / str(seed), progress=[tell, watch])
            if result.stop is Stop.INTERRUPTED:
                raise Interrupted
            rounds, samples = result.rounds, samples + _samples(result.state)
            if result.stop is not Stop.DONE:
                raise RunStopped(result.stop, result.detail)
            values.append(_score(result.state.records, goal))
    except _Hopeless as hopeless:
        rounds, samples = hopeless.state.round, samples + _samples(hopeless.state)
        state, reason = "pruned", "below the median of the complete trials at this point"
    except (RunStopped, CodeError) as error:
        state, reason = "failed", str(error)
    return Trial(
        number=trial.number,
        params=trial.params,
        state=state,
        value=sum(values) / len(values) if state == "complete" else None,
        marks=marks,
        rounds=rounds,
        samples_backward=samples,
        reason=reason,
    )


class _Hopeless(Exception):
    """A trial that is stopped early, with the state it had reached."""

    def __init__(self, state: State) -> None:
        self.state = state


def _watch(
    marks: dict[int, float], first: int, rounds: int, every: int, goal: Goal, trial: optuna.Trial
) -> Callable[[State], None]:
    """A callback of `simulate` that notes the metric at the points of a trial, and stops a hopeless one."""

    def tell(state: State) -> None:
        measured: dict[int, list[float]] = {}
        for record in state.records.items:
            wanted = record.model in goal.models and (record.part, record.metric) == (PART, f"{goal.metric}/mean")
            if wanted and 0 < record.round < rounds:
                measured.setdefault(record.round, []).append(float(record.values[0]))
        for round, values in measured.items():
            point, value = first + round // every, sum(values) / len(values)
            if point not in marks and math.isfinite(value):
                marks[point] = value
                trial.report(value, point)
                if trial.should_prune():
                    raise _Hopeless(state)

    return tell


def _score(records: Records, goal: Goal) -> float:
    found = [records.last(model, PART, f"{goal.metric}/mean") for model in goal.models]
    values = [float(value[0]) for value in found if value is not None and math.isfinite(value[0])]
    if len(values) < len(found):
        raise RunStopped(Stop.DIVERGED, f"the validation {goal.metric} is not a number")
    return sum(values) / len(values)


def _samples(state: State) -> int:
    found = state.records.last("", "", "samples_backward")
    return 0 if found is None else int(found[0])
