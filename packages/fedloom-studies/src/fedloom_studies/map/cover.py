"""Choice of a few methods that cover the map.

The selected methods form the portfolio that `fedloom advise` compares in a race.

The regret of a selection in a setup is the difference between the best of all methods and the best selected method, by
mean test score at equal gradients. Local training and FedAvg are always selected. A greedy algorithm then repeatedly
adds the method that most reduces the mean regret over the setups. Ties are broken by smaller maximum regret, and then
by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tomli_w

from fedloom.lab.experiment import Tune, parse
from fedloom.lab.tune import build_search_space
from fedloom.values import dump_value
from fedloom_studies.map.records import DONE_STATUS, CellRecord
from fedloom_studies.map.setups import REFERENCE_METHODS, Setup

FIRST_METHODS = REFERENCE_METHODS[:2]
"""Methods that every portfolio contains."""
LEFT_OUT_METHODS = ("fedavg-ft",)
"""Methods that are never selected. They train after the last round, and a race would repeat this training at each
comparison."""
PORTFOLIO_SIZE = 6
"""Number of methods in the portfolio."""
STEP_SIZE_KEY = "local.lr"
"""Name of the step size, whose range in a race is derived from the user's file."""
Figures = Mapping[str, Mapping[str, float]]
"""Mean test scores of methods, keyed by setup and method."""

FILE_HEAD = """# The methods that `fedloom advise` races, and where it looks for their settings.
# Local training and FedAvg always take part. The others are a greedy cover of the map's records at equal gradients:
# each one lowers the mean regret of the best choice most. The range of step sizes comes from the user's file.
# Written by `python studies/scripts/advise portfolio`.
"""


def read_figures(setups: Iterable[Setup], records: Mapping[tuple[str, str], CellRecord]) -> Figures:
    """Return the mean test score of every completed method in every tuned setup, keyed by setup and method."""
    figures: dict[str, dict[str, float]] = {}
    for setup in setups:
        for (name, method), record in records.items():
            means = [series.mean[-1] for series in record.seeds.values()]
            numbers = [mean for mean in means if mean is not None]
            if setup.ranks and name == setup.name and record.status == DONE_STATUS and numbers:
                figures.setdefault(name, {})[method] = math.fsum(numbers) / len(numbers)
    return figures


def selection_regrets(figures: Figures, methods: Sequence[str]) -> dict[str, float]:
    """Return a selection's regret in every setup, keyed by setup."""
    return {
        setup: max(means.values()) - max((means[name] for name in methods if name in means), default=-math.inf)
        for setup, means in figures.items()
    }


def greedy_cover(figures: Figures, size: int = PORTFOLIO_SIZE) -> tuple[str, ...]:
    """Return the methods selected by the greedy algorithm.

    >>> greedy_cover({"a": {"local": 0.1, "fedavg": 0.2, "x": 0.9, "y": 0.5}, "b": {"local": 0.7, "y": 0.6}}, 3)
    ('local', 'fedavg', 'x')
    """
    chosen = list(FIRST_METHODS)
    names = sorted({name for means in figures.values() for name in means} - {*chosen, *LEFT_OUT_METHODS})

    def loss(name: str) -> tuple[float, float, str]:
        by_setup = selection_regrets(figures, [*chosen, name]).values()
        return math.fsum(by_setup) / len(by_setup), max(by_setup), name

    while len(chosen) < size and len(chosen) < len(names) + len(FIRST_METHODS):
        chosen.append(min(loss(name) for name in names if name not in chosen)[2])
    return tuple(chosen)


def leave_one_out(figures: Figures, size: int = PORTFOLIO_SIZE) -> dict[str, tuple[tuple[str, ...], float]]:
    """Return, for each setup, the portfolio selected without this setup, and its regret in this setup."""
    chosen = {setup: greedy_cover({k: v for k, v in figures.items() if k != setup}, size) for setup in figures}
    return {setup: (methods, selection_regrets(figures, methods)[setup]) for setup, methods in chosen.items()}


def write_portfolio(methods: Sequence[str]) -> str:
    """Return the content of the portfolio file."""
    spaces = dict[str, Any]()
    for name in methods:
        plan = parse({"data": {"source": "digits"}, "method": [{"algorithm": name}]}, name)
        space = build_search_space(plan.methods[0], Tune(), name)
        settings = {
            k: list(d) if isinstance(d, tuple) else dump_value(d) for k, d in space.items() if k != STEP_SIZE_KEY
        }
        spaces |= {name: settings} if settings else {}
    return FILE_HEAD + tomli_w.dumps({"methods": list(methods), "space": spaces})
