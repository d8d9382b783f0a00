"""Settings of a race: the portfolio's methods that can take part, and the settings to try for each method."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fedloom.data.federation import Federation
from fedloom.engine.setup import check
from fedloom.errors import ConfigError
from fedloom.formats import round_significant
from fedloom.lab.advise.laps import Arm, lap_setting
from fedloom.lab.advise.race import ALONE_METHOD, AVERAGE_METHOD
from fedloom.lab.experiment import Experiment
from fedloom.lab.experiment.schema import Method
from fedloom.lab.experiment.tuning import Dimension, Range, Tune
from fedloom.lab.tune.search import (
    ReadExperiment,
    build_search_space,
    check_values,
    file_setting_values,
    replace_params,
)
from fedloom.lab.tune.trial import scored_models
from fedloom.seeds import numpy_generator
from fedloom.values import dump_value

STEP_SIZE_KEY = "local.lr"
"""Name of the step-size setting, which is tuned for every method."""
STEP_SIZE_FACTOR = 10.0
"""Factor that determines the range of step sizes that are tried. The range extends from the file's step size divided by
the factor to the file's step size multiplied by the factor."""
LEFT_OUT_TABLES = ("method", "grid", "analysis")
"""Tables of an experiment file that a race ignores."""
UPLOAD_TABLES = ("aggregator", "upload_transform", "personalized_aggregation")
"""Tables of an experiment file that affect uploads. They apply to all methods of a race except local training."""
SETTING_DIGITS = 3
"""Number of significant digits in the values to try."""


@cache
def read_portfolio() -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the methods of the portfolio and their search spaces, as stored in the package's ``portfolio.toml``."""
    table = tomllib.loads((files("fedloom.lab.advise") / "portfolio.toml").read_text(encoding="utf-8"))
    return tuple(table["methods"]), table["space"]


class RaceEntries:
    """Methods that take part in a race, together with an experiment for each of them.

    Args:
        document: content of an experiment file. The methods listed in the file are ignored.
        where: name of the file, for error messages.
        read: function that converts a document to an experiment.
        methods: registered names of the methods that take part in the race. Local training and FedAvg are always added.

    Attributes:
        base: experiment that contains only FedAvg.
        left_out: reasons why methods cannot take part, keyed by the label of the method.

    Raises:
        ConfigError: the document is not a valid experiment.
    """

    def __init__(self, document: Mapping[str, Any], where: str, read: ReadExperiment, methods: tuple[str, ...]) -> None:
        self._where, self._read = where, read
        self._document = {k: v for k, v in document.items() if k not in (*LEFT_OUT_TABLES, *UPLOAD_TABLES)}
        self._for_uploads = {key: document[key] for key in UPLOAD_TABLES if key in document}
        self._names = tuple(dict.fromkeys((ALONE_METHOD, AVERAGE_METHOD, *methods)))
        self.base = self._experiment(AVERAGE_METHOD)
        rate = self.base.common.local.lr
        steps = {
            "low": _round_setting(rate / STEP_SIZE_FACTOR),
            "high": _round_setting(rate * STEP_SIZE_FACTOR),
            "log": True,
        }
        spaces = {name: dict(space) for name, space in self.base.tune.space.items()}
        frozen = {name: {**space, **spaces.pop(name, {})} for name, space in read_portfolio()[1].items()}
        all_methods = {STEP_SIZE_KEY: steps, **spaces.pop("all", {})}
        self._tune = Tune.model_validate(
            {**dump_value(self.base.tune), "space": {**frozen, **spaces, "all": all_methods}}
        )
        self.left_out = dict[str, str]()
        self._methods = dict[str, Method]()
        self.spaces = dict[str, Mapping[str, Dimension]]()

    def check(self, whole: Federation, fed: Federation, seed: int) -> None:
        """Check which of the methods can be run on the clients.

        Args:
            whole: clients with their test data, as used in a final comparison.
            fed: the federation of the race.
            seed: seed of the first run.

        Raises:
            ConfigError: local training or FedAvg cannot be run on these data.
        """
        for name in self._names:
            try:
                method = self._experiment(name).methods[0]
                check(method.setting.with_(seed=seed), whole)
                check(lap_setting(method.setting, seed, method.setting.rounds), fed)
                space = build_search_space(method, self._tune, self._where)
                check_values(self._read_entry(name), 0, space, self._where, self._read)
            except ConfigError as error:
                if name in (ALONE_METHOD, AVERAGE_METHOD):
                    raise error.placed(f"every race includes {name!r}") from None
                self.left_out[name] = str(error).removeprefix(f"{self._where}: ")
                continue
            self._methods[name], self.spaces[name] = method, space

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the methods that take part."""
        return tuple(self._methods)

    def metric(self, fed: Federation, seed: int) -> tuple[str, bool]:
        """Return the name of the metric that compares methods, and True if higher values are better."""
        wanted = (self.base.tune.metric or "").partition("/")[0] or None
        setting = lap_setting(self._methods[AVERAGE_METHOD].setting, seed, 1)
        return scored_models(setting, fed, "best-on-validation", wanted, AVERAGE_METHOD)[1:]

    def arms(self, count: int, seed: int) -> dict[str, list[Arm]]:
        """Return the settings to try for each method: those in the file, then settings spread over the search space."""
        arms = dict[str, list[Arm]]()
        for name, method in self._methods.items():
            tried = spread_settings(
                self.spaces[name], file_setting_values(method, self.spaces[name]), count, name, seed
            )
            arms[name] = [Arm(name, number, params) for number, params in enumerate(tried)]
        return arms

    def experiment(self, arm: Arm) -> Experiment:
        """Return the experiment that contains only one candidate."""
        return self._read(replace_params(self._read_entry(arm.label), 0, arm.params), self._where)

    def document(self, arms: Mapping[str, int], params: Mapping[str, Arm], **more: Any) -> dict[str, Any]:
        """Return the document of an experiment that compares several methods with the given settings.

        ``arms`` maps labels to numbers of rounds.
        """
        tables = [
            replace_params(self._read_entry(label), 0, params[label].params, rounds=rounds)["method"][0]
            for label, rounds in arms.items()
        ]
        return {**{key: value for key, value in self._document.items() if key != "tune"}, **more, "method": tables}

    def _read_entry(self, name: str) -> dict[str, Any]:
        options = {} if name == ALONE_METHOD else self._for_uploads
        return {**self._document, "method": [{"algorithm": name, "label": name, **options}]}

    def _experiment(self, name: str) -> Experiment:
        return self._read(self._read_entry(name), self._where)


def spread_settings(
    space: Mapping[str, Dimension], first: Mapping[str, Any] | None, count: int, label: str, seed: int
) -> list[Mapping[str, Any]]:
    """Return settings that are spread over a space.

    The list starts with ``first``, if given, and continues with points of a scrambled Halton sequence.

    A longer list always starts with the shorter list, so a race with a larger budget only tries additional settings.

    Args:
        space: range or choices of every setting.
        first: settings in the experiment file. None if these settings are not in the space.
        count: maximum number of settings to return. A space that consists only of lists may contain fewer settings.
        label: label of the method, which affects the random sequence.
        seed: seed of the random sequence.

    >>> [one["mu"] for one in spread_settings({"mu": (0.1, 1.0)}, {"mu": 1.0}, 5, "fedprox", 0)]
    [1.0, 0.1]
    """
    from scipy.stats import qmc  # slow to import

    tried: list[Mapping[str, Any]] = [] if first is None else [dict(first)]
    keys, wanted = sorted(space), count - len(tried)
    if wanted > 0 and keys:
        sequence = qmc.Halton(d=len(keys), rng=numpy_generator(seed, purpose=("advise", label)))
        for point in sequence.random(wanted):
            params = {key: _dimension_value(space[key], float(u)) for key, u in zip(keys, point, strict=True)}
            tried += [] if params in tried else [params]
    return tried or [{}]


def _dimension_value(dimension: Dimension, u: float) -> Any:
    """Return the value of a search dimension that corresponds to a point ``u`` in [0, 1)."""
    if not isinstance(dimension, Range):
        return dimension[int(u * len(dimension))]
    low, high = dimension.low, dimension.high
    if isinstance(low, int) and isinstance(high, int):
        return min(high, int(low * ((high + 1) / low) ** u if dimension.log else low + u * (high + 1 - low)))
    value = low * (high / low) ** u if dimension.log else low + u * (high - low)
    return min(high, max(low, _round_setting(value)))


def _round_setting(value: float) -> float:
    return round_significant(value, SETTING_DIGITS) or 0.0
