"""Planning at equal gradients: finds the number of rounds that makes a method compute as many gradients as FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.data import Federation
from fedloom.engine import Setting
from fedloom.errors import RunStopped
from fedloom.lab.experiment import parse
from fedloom.lab.tune import Budget, make_scored_setting, plain_budget, replace_params
from fedloom_studies.map.records import DONE_STATUS, CellRecord, stale_reason
from fedloom_studies.map.setups import Cell, Setup

EQUAL_GRADIENTS_TOLERANCE = 0.01
"""Relative difference up to which a number of gradients is considered equal to FedAvg's."""


class GradientBudget:
    """Numbers of gradients that FedAvg computes in all rounds of a setup, for each seed, and plans for other methods.

    Args:
        setup: federation, with its number of rounds.
        data_dir: folder with the data sets.

    Raises:
        DataError: the data are missing.
    """

    def __init__(self, setup: Setup, data_dir: Path | None) -> None:
        self._setup, self._plan = setup, parse({**setup.document, "method": [{"algorithm": "fedavg"}]}, setup.name)
        self._samples = self._plan.source.read(data_dir)
        self._by_seed: dict[int, tuple[Federation, Budget]] = {}

    def rounds(self, cell: Cell, params: Mapping[str, Any], seed: int, *, whole: bool = False) -> int:
        """Return the number of rounds that brings a method's total number of gradients closest to FedAvg's total.

        Args:
            cell: the method in the given setup.
            params: settings of the method, keyed by name.
            seed: the run's seed.
            whole: True to run every round when measuring the cost, as in `fedloom.lab.tune.Budget.rounds`.

        Raises:
            ConfigError, RunStopped, ClientError: see `fedloom.lab.tune.Budget.rounds`.
        """
        fed, budget = self._budget_of_seed(seed)
        setting: Setting = parse(replace_params(cell.document, 0, params), cell.where).methods[0].setting
        return budget.rounds(make_scored_setting(setting, seed), fed, whole=whole)

    def missed(self, samples: float, seed: int) -> bool:
        """Return True if a run's number of gradients is so far from FedAvg's that the run must be planned again."""
        return self._budget_of_seed(seed)[1].missed(samples)

    def has_equal_work(self, cell: Cell, first: CellRecord | None) -> bool:
        """Return True if a method computes as many gradients as FedAvg in all recorded trials and equal-round runs."""
        setup = self._setup
        if first is None or first.status != DONE_STATUS or stale_reason(Cell(setup, cell.method, first.space), first):
            return False
        samples_by_seed = {int(seed): series.gradients[-1] for seed, series in first.seeds.items()}
        if any(
            abs(samples / self._budget_of_seed(seed)[1].samples - 1) > EQUAL_GRADIENTS_TOLERANCE
            for seed, samples in samples_by_seed.items()
        ):
            return False
        runs = [*((params, setup.tuning[0]) for params, _ in first.trials), *((first.chosen, s) for s in setup.seeds)]
        try:
            return all(self.rounds(cell, params, seed) == self._plan.common.rounds for params, seed in runs)
        except RunStopped:  # the cost of a trial that diverged is unknown
            return False

    def _budget_of_seed(self, seed: int) -> tuple[Federation, Budget]:
        if seed not in self._by_seed:
            fed = self._plan.partition(self._samples, seed)
            setting = make_scored_setting(self._plan.methods[0].setting, seed)
            self._by_seed[seed] = fed, plain_budget(setting, fed, self._plan.common.rounds)
        return self._by_seed[seed]
