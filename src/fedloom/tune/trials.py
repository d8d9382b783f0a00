"""Trials: what was tried, the file they are kept in, and what Optuna suggests to try next.

A suggestion depends on the recorded trials and on (seed, method, trial number) only. So a search that was killed goes
on with the very trials that it would have had. A space of lists that has no more settings than there are trials is gone
through whole (GridSampler); elsewhere past trials suggest the next one (TPESampler).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial
from pydantic import Field, TypeAdapter

from fedloom.errors import RunDirError
from fedloom.experiment.tuning import Dimension, Range
from fedloom.seeds import derive
from fedloom.storage.files import write_atomic
from fedloom.tune.spaces import Params
from fedloom.values import Value

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Trial(Value):
    """One setting that was tried.

    Attributes:
        number: 0, 1, ... within the method.
        params: values by setting.
        state: ``complete``, ``pruned`` (stopped, below the median of the complete ones) or ``failed`` (diverged).
        value: the validation metric, mean over clients and seeds; None unless complete.
        marks: the metric on the way, by point.
        rounds: rounds per seed.
        samples_backward: samples whose gradient was taken, over all clients, rounds and seeds.
        reason: why it did not complete.
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
        """The values in one line."""
        return setting(self.params)


def setting(params: Params) -> str:
    """Values of a setting in one line."""
    return ", ".join(f"{k} = {v:.4g}" if isinstance(v, float) else f"{k} = {v}" for k, v in params.items())


_RECORDS = TypeAdapter(list[Trial])


def read_trials(path: Path) -> list[Trial]:
    """The trials of a file; none where there is no file.

    Raises:
        RunDirError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        return _RECORDS.validate_json(path.read_bytes())
    except ValueError as error:
        raise RunDirError(f"{path} is damaged: {error}; choose another --out, or start anew with --force") from None


def write_trials(path: Path, trials: Sequence[Trial]) -> None:
    """Replace the file as a whole."""
    write_atomic(path, json.dumps([t.model_dump(mode="json") for t in trials], indent=1).encode())


class Search:
    """What to try next, and whether to go on with it.

    Args:
        space: where settings are looked for.
        higher: a higher value is better.
        seed: of the search.
        label: the method.
        first: the setting of trial 0; None where the space does not hold the file's own.
        startup: trials that are never pruned; None: none is.
        trials: most of them.
    """

    def __init__(
        self,
        space: Mapping[str, Dimension],
        higher: bool,
        seed: int,
        label: str,
        first: Params | None,
        startup: int | None,
        trials: int,
    ) -> None:
        self._space = {key: _distribution(dimension) for key, dimension in space.items()}
        self._direction: Literal["maximize", "minimize"] = "maximize" if higher else "minimize"
        self._seed, self._label, self._first, self._startup = seed, label, first, startup
        self._trials, self.settings = trials, settings_of(space)
        self._grid = self._shuffled(space) if self.whole else None

    @property
    def whole(self) -> bool:
        """Every setting of the space is tried once, and nothing else."""
        return self.settings <= self._trials

    def ended(self, trials: Sequence[Trial]) -> bool:
        """Whether there is nothing more to try after those recorded."""
        return len(trials) >= self._trials or (self._grid is not None and self._next(trials) is None)

    def ask(self, trials: Sequence[Trial]) -> optuna.Trial:
        """The next trial after those recorded, of a search that has not ended."""
        seed = derive(self._seed, len(trials), purpose=("tune", self._label)) % 2**32
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if self._startup is not None:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=self._startup)
        study = optuna.create_study(
            direction=self._direction, sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner
        )
        study.add_trials([self._known(t) for t in trials])
        given = self._next(trials)
        if given is not None:
            study.enqueue_trial(dict(given))
        return study.ask(self._space)

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """The complete trial of the best value, the earliest of equals; None where none completed."""
        sign = 1.0 if self._direction == "maximize" else -1.0
        scored = [(sign * t.value, -t.number, t) for t in trials if t.value is not None]
        return max(scored)[2] if scored else None

    def _next(self, trials: Sequence[Trial]) -> Params | None:
        """The setting that comes next whatever the others gave; None where Optuna is to suggest one."""
        if self._grid is None:
            return None if trials else self._first
        tried = [t.params for t in trials]
        return next((params for params in self._grid if params not in tried), None)

    def _shuffled(self, space: Mapping[str, Dimension]) -> list[Params]:
        """Every setting of a space of lists in a seeded order, the file's own first."""
        lists = {key: list(dict.fromkeys(choices)) for key, choices in space.items() if isinstance(choices, tuple)}
        seed = derive(self._seed, purpose=("tune", self._label)) % 2**32
        study = optuna.create_study(sampler=optuna.samplers.GridSampler(lists, seed=seed))
        found: list[Params] = [study.ask(self._space).params for _ in range(int(self.settings))]
        return sorted(found, key=lambda params: params != self._first)

    def _known(self, trial: Trial) -> optuna.trial.FrozenTrial:
        complete = trial.state == "complete"
        return create_trial(
            state=TrialState.COMPLETE if complete else TrialState.PRUNED,
            value=trial.value if complete else None,
            params=trial.params,
            distributions=self._space,
            intermediate_values={} if trial.state == "failed" else trial.marks,
        )


def settings_of(space: Mapping[str, Dimension]) -> float:
    """Different settings that a space holds; infinite where there is a range."""
    return math.prod(math.inf if isinstance(choices, Range) else len(set(choices)) for choices in space.values())


def _distribution(dimension: Dimension) -> BaseDistribution:
    if not isinstance(dimension, Range):
        return CategoricalDistribution(list(dimension))
    low, high = dimension.low, dimension.high
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=dimension.log)
    return FloatDistribution(float(low), float(high), log=dimension.log)
