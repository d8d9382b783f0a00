"""Search space of a method, and the choice of the setting to try next.

The search space of a method consists of the defaults in `spaces.toml` and the changes in the experiment. Each
suggestion depends only on the finished trials and on (seed, method, trial number). An interrupted search therefore
resumes with the same trials. If a space consists of lists and contains no more settings than there are trials, every
setting is tried (GridSampler). Otherwise, the next trial is suggested based on the results of past trials (TPESampler).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import GridSampler, TPESampler

from fedloom.engine.privacy import find_accounted_noise
from fedloom.errors import ConfigError, write_singular
from fedloom.formats import format_percent
from fedloom.hints import unknown_name_error
from fedloom.lab.experiment import Experiment, parse
from fedloom.lab.experiment.schema import Method
from fedloom.lab.experiment.tuning import Dimension, Range, Tune
from fedloom.lab.tune.trial import Params, Trial
from fedloom.lab.tune.work import MAX_BUDGET_RATIO, Goal
from fedloom.local import LocalSGD
from fedloom.seeds import generator, words
from fedloom.values import fields_of

ReadExperiment = Callable[[Mapping[str, Any], str], Experiment]
"""Function that converts a document to an experiment. It also receives the document's name for error messages, and
raises ConfigError if the document is invalid."""
ALL_METHODS = "all"
DERIVED_FACTOR = "1x"
"""Value of a derived option that keeps its derived default."""


@cache
def read_default_spaces() -> tuple[Mapping[str, Mapping[str, Dimension]], Mapping[str, str]]:
    """Return each method's default search space, and a sentence about its source."""
    tables = tomllib.loads((files("fedloom.lab.tune") / "spaces.toml").read_text(encoding="utf-8"))
    sources = {name: str(table.pop("source")) for name, table in tables.items()}
    return Tune(space=tables).space, sources


def build_search_space(method: Method, tune: Tune, where: str) -> dict[str, Dimension]:
    """Return the search space of a method's settings.

    Changes in the experiment replace the defaults, and entries for a single method replace entries for all methods.

    Raises:
        ConfigError: the method does not have one of the settings.
    """
    default_spaces = read_default_spaces()[0] if tune.default_spaces else {}
    settings_of_method = [*fields_of(method.entry), *(f"local.{name}" for name in LocalSGD.model_fields)]
    space: dict[str, Dimension] = {}
    for table in (default_spaces, tune.space):
        for name in dict.fromkeys((ALL_METHODS, method.algorithm, method.label)):
            for key, dimension in table.get(name, {}).items():
                if key not in settings_of_method:
                    raise unknown_name_error("setting", key, settings_of_method, f"{where}: [tune.space.{name}]")
                space[key] = dimension
    return {key: dimension for key, dimension in sorted(space.items()) if dimension}


def check_names(experiment: Experiment, where: str) -> None:
    """Raise an error if the file defines a search space for a method that the experiment does not compare.

    Raises:
        ConfigError: a method does not exist in the experiment. The message lists the known names.
    """
    names = [ALL_METHODS, *(name for m in experiment.methods for name in (m.label, m.algorithm))]
    for name in experiment.tune.space:
        if name not in names:
            raise unknown_name_error("method", name, dict.fromkeys(names), f"{where}: [tune.space]")


def check_values(
    document: Mapping[str, Any], place: int, space: Mapping[str, Dimension], where: str, read: ReadExperiment = parse
) -> None:
    """Raise an error if a search space contains a value that the method does not accept.

    Raises:
        ConfigError: a value is not accepted. The message contains the method's own error message.
    """
    alone = {**document, "method": [document["method"][place]]}  # the other methods need not be parsed again
    for key, dimension in space.items():
        for value in (dimension.low, dimension.high) if isinstance(dimension, Range) else dimension:
            try:
                with suppress(ConfigError):
                    read(replace_params(alone, 0, {key: value}), where)
                    continue
                read(replace_params(document, place, {key: value}), where)
            except ConfigError as error:
                raise ConfigError(f"{where}: [tune.space], {key} = {value!r} cannot be tried: {error}") from None


def replace_params(document: Mapping[str, Any], place: int, params: Params, **more: object) -> dict[str, Any]:
    """Return a copy of a document in which only the given settings of method number ``place`` are replaced."""
    method = {**document["method"][place], **more}
    for key, value in params.items():
        table, _, name = key.rpartition(".")
        if table:
            method[table] = {**method.get(table, {}), name: value}
        else:
            method[key] = value
    methods = [*document["method"][:place], method, *document["method"][place + 1 :]]
    return {**document, "method": methods}


def file_setting_values(method: Method, space: Mapping[str, Dimension]) -> Params | None:
    """Return the experiment file's values of the searched settings, or None if the search space excludes them."""
    table = {**{key: field.default for key, field in fields_of(method.entry).items()}, **method.settings()}
    params = {key: _value_at(table, key) for key in space}
    params = {
        k: DERIVED_FACTOR if v is None and DERIVED_FACTOR in _dimension_choices(space[k]) else v
        for k, v in params.items()
    }
    return params if all(_contains_value(space[key], value) for key, value in params.items()) else None


def _value_at(table: Mapping[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    return table[first].get(rest) if rest else table.get(first)


def _dimension_choices(dimension: Dimension) -> Sequence[Any]:
    return () if isinstance(dimension, Range) else dimension


def _contains_value(dimension: Dimension, value: object) -> bool:
    if isinstance(dimension, Range):
        return isinstance(value, int | float) and dimension.low <= value <= dimension.high
    return value in dimension


class Search:
    """Search over one method's settings, which chooses the next trial and determines when the search ends.

    Args:
        space: range or choices for every setting.
        tune: number of trials, seed, and rules for stopping trials early.
        label: label of the method.
        higher: True if higher values of the metric are better.
        first: settings of trial 0, taken from the experiment file. None if the space does not contain these settings.
    """

    def __init__(
        self, space: Mapping[str, Dimension], tune: Tune, label: str, higher: bool, first: Params | None
    ) -> None:
        self.space = {key: _optuna_distribution(dimension) for key, dimension in space.items()}
        self.settings, self.higher = count_settings(space), higher
        self._tune, self._label, self._first = tune, label, first
        self._grid = self._shuffle_settings(space) if self.is_exhaustive else None

    @property
    def is_exhaustive(self) -> bool:
        """True if the search tries every setting of the space exactly once."""
        return self.settings <= self._tune.trials

    def ended(self, trials: Sequence[Trial]) -> bool:
        """Return True if there is nothing left to try after the given finished trials."""
        return len(trials) >= self._tune.trials or (self._grid is not None and self._next_setting(trials) is None)

    def ask(self, trials: Sequence[Trial]) -> optuna.Trial:
        """Return the next trial after the given finished trials. The search must not have ended.

        The trial belongs to a new study in memory, so an interrupted trial cannot influence later ones.
        """
        tune = self._tune
        study = optuna.create_study(
            direction="maximize" if self.higher else "minimize",
            sampler=TPESampler(seed=self._seed(len(trials))),
            pruner=MedianPruner(n_startup_trials=tune.startup) if tune.prune else NopPruner(),
        )
        # the sampler treats a failed trial as one of the worst, and the pruner ignores it
        usable_trials = [t.with_(state="pruned", marks={}) if t.state == "failed" else t for t in trials]
        study.add_trials([t.frozen(self.space) for t in usable_trials])
        next_params = self._next_setting(trials)
        if next_params is not None:
            study.enqueue_trial(dict(next_params))
        return study.ask(self.space)

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """Return the complete trial with the best value (the earliest if tied), or None if no trial is complete."""
        scored = [(t.value if self.higher else -t.value, -t.number, t) for t in trials if t.value is not None]
        return max(scored)[2] if scored else None

    def _next_setting(self, trials: Sequence[Trial]) -> Params | None:
        """Return the next setting if it does not depend on results, or None if Optuna suggests it."""
        if self._grid is None:
            return None if trials else self._first
        tried = [t.params for t in trials]
        return next((params for params in self._grid if params not in tried), None)

    def _shuffle_settings(self, space: Mapping[str, Dimension]) -> list[Params]:
        """Return all settings of a space that consists of lists, in seeded random order after the file's setting."""
        lists = {key: list(dict.fromkeys(choices)) for key, choices in space.items() if isinstance(choices, tuple)}
        study = optuna.create_study(sampler=GridSampler(lists, seed=self._seed()))
        candidates: list[Params] = [study.ask(self.space).params for _ in range(int(self.settings))]
        return sorted(candidates, key=lambda params: params != self._first)

    def _seed(self, trial: int = 0) -> Any:
        """Return a 128-bit seed of a type that numpy's random generators accept."""
        return words(generator(self._tune.seed, trial, purpose=("tune", self._label)))


class Study(NamedTuple):
    """Search of one method: the method's position in the experiment, its search space, and the inputs of its trials."""

    place: int
    method: Method
    space: Mapping[str, Dimension]
    goal: Goal
    search: Search

    @property
    def model(self) -> str:
        """Names of the scored models, in words."""
        return " and ".join(self.goal.models)


class SearchResult(NamedTuple):
    """Trials of a method, including the best one. ``best`` is None if no trial was completed."""

    study: Study
    trials: Sequence[Trial]
    best: Trial | None

    @property
    def share(self) -> float | None:
        """Fraction of the compute budget that the best trial used.

        None if no trial was completed, or if the compute budgets are not equal.
        """
        samples = self.study.goal.samples
        return None if self.best is None or samples is None else self.best.samples_backward / samples


def report_overspending(findings: Sequence[SearchResult]) -> list[str]:
    """Return a sentence about each method whose best trial exceeded its compute budget (`MAX_BUDGET_RATIO`)."""
    return [
        write_singular(
            f"{f.study.method.label} did a different amount of work: in its {f.best.rounds} rounds, it computed "
            f"{format_percent(f.share)} of the gradients of {f.study.goal.rounds} plain rounds."
        )
        for f in findings
        if f.best is not None and f.share is not None and f.share > MAX_BUDGET_RATIO
    ]


def note_limits(findings: Sequence[SearchResult]) -> list[str]:
    """Return warnings about the chosen settings.

    Trials may be shorter than the final runs, and a run's epsilon does not include the trials.
    """
    return [*_fewer_rounds_warning(findings), *_privacy_cost_warning(findings)]


def _fewer_rounds_warning(findings: Sequence[SearchResult]) -> list[str]:
    """Return a warning if trials are shorter than the runs, because the best setting may diverge in longer runs."""
    pairs = dict.fromkeys((f.study.goal.rounds, f.study.method.setting.rounds) for f in findings)
    return [
        f"Trials did the work of {tried} rounds, but the runs do the work of {rounds}, and a chosen setting may "
        f"diverge in longer runs. Set [tune] rounds = {rounds} to search with the same number of rounds."
        for tried, rounds in pairs
        if tried < rounds
    ]


def _privacy_cost_warning(findings: Sequence[SearchResult]) -> list[str]:
    """Return a warning if runs report an epsilon, because it does not cover the trials that chose their settings."""
    counts = [
        len(f.trials)
        for f in findings
        if find_accounted_noise(f.study.method.setting.upload_transform, f.study.method.setting.aggregator) is not None
    ]
    if not sum(counts):
        return []
    return [
        f"{write_singular(f'settings were chosen by {sum(counts)} trials')} on the same data. A run's epsilon does "
        "not include the choice among trials. Add each trial's epsilon (basic composition), or choose settings on "
        "public data."
    ]


def count_settings(space: Mapping[str, Dimension]) -> float:
    """Return the number of different settings in a space, or inf if it contains a range."""
    return math.prod(math.inf if isinstance(choices, Range) else len(set(choices)) for choices in space.values())


def _optuna_distribution(dimension: Dimension) -> BaseDistribution:
    if not isinstance(dimension, Range):
        return CategoricalDistribution(list(dimension))
    low, high = dimension.low, dimension.high
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=dimension.log)
    return FloatDistribution(float(low), float(high), log=dimension.log)
