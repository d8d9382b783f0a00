"""Equal work: find the number of rounds in which a method computes as many gradients as plain local training.

The work of a run is the number of samples whose gradients its rounds compute, plus the number whose gradients its
personal models need after the last round. Rounds may differ in cost, for example in FedALA's second round or if a rule
stops local training early. The plan is therefore made for the sum over rounds, and the actual cost of a run is compared
with it.
"""

from __future__ import annotations

from contextlib import closing
from itertools import chain, repeat
from typing import NamedTuple

from fedloom.choose.samplers import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.lab.experiment.measure.cost import play

MAX_BUDGET_RATIO = 1.1
"""Maximum fraction of its budget that a run may use without a warning in the terminal, the tuned file and reports."""
MIN_BUDGET_RATIO = 0.9
"""Minimum fraction of its budget that a run must use. If the actual fraction is below this value or above
`MAX_BUDGET_RATIO`, the run is planned again from the measured cost of every round."""
EQUAL_COST_TOLERANCE = 0.01
"""Relative difference in cost up to which two rounds are treated as equal. A first plan then assumes that all later
rounds cost the same."""
MAX_ROUND_MULTIPLE = 20
"""Maximum number of rounds in a plan that measures every round, as a multiple of the rounds of plain training."""


class RoundPlan(NamedTuple):
    """Plan for the length of a run.

    Attributes:
        rounds: number of rounds that the run should have.
        spent: number of samples whose gradients were computed to make this plan.
        personal: number of samples whose gradients are needed for the personal models after a round.
    """

    rounds: int
    spent: int
    personal: int = 0


class Budget(NamedTuple):
    """Budget of gradients for one run (with one seed).

    Attributes:
        plain: for each round of plain local training, the number of samples whose gradients it computes.
        spent: number of samples whose gradients were computed to determine ``plain``.
    """

    plain: tuple[int, ...]
    spent: int = 0

    @property
    def samples(self) -> int:
        """Number of samples whose gradients a run may compute."""
        return sum(self.plain)

    def missed(self, samples: float) -> bool:
        """Return True if the actual cost of a run is so far from the budget that the run must be planned again."""
        return not MIN_BUDGET_RATIO * self.samples <= samples <= MAX_BUDGET_RATIO * self.samples

    def rounds(self, setting: Setting, fed: Federation, *, whole: bool = False) -> int:
        """Return the number of rounds in the plan that `plan` makes."""
        return self.plan(setting, fed, whole=whole).rounds

    def plan(self, setting: Setting, fed: Federation, *, whole: bool = False) -> RoundPlan:
        """Find the number of rounds, at least one, for which the work of a run comes closest to the budget.

        Args:
            setting: setting of the run.
            fed: the clients and their data.
            whole: True to run every round in order to measure its cost. False to stop as soon as two rounds in a row
                have the same cost relative to plain training.

        Raises:
            ConfigError, RunStopped, ClientError: `fedloom.lab.experiment.measure.cost.play` raised the error.
        """
        totals, ratio, after, beside = [0.0], -1.0, 0, 0
        with closing(play(setting, fed)) as game:
            for round, last in enumerate(game, 1):
                total = last.samples
                totals.append(total)
                if round == 1 or total + after >= self.samples:
                    after = last.personal_samples()
                    beside += after
                spent = int(total) + beside
                if total + after >= self.samples:
                    return RoundPlan(self._nearest(totals, after), spent, after)
                before, ratio = ratio, (total - totals[-2]) / self._cost(round)
                steady = abs(ratio - before) <= EQUAL_COST_TOLERANCE * max(ratio, before)
                if not whole and steady:
                    return RoundPlan(
                        self._extrapolated(totals, ratio, after) if ratio else len(self.plain), spent, after
                    )
                if round >= MAX_ROUND_MULTIPLE * len(self.plain):
                    return RoundPlan(round, spent, after)
        raise AssertionError("a run is played until it is planned")

    def _cost(self, round: int) -> float:
        """Return the number of samples whose gradients a given round of plain training computes.

        For rounds beyond the last one, the mean over all rounds is returned.
        """
        return self.plain[round - 1] if round <= len(self.plain) else self.samples / len(self.plain)

    def _nearest(self, totals: list[float], after: int) -> int:
        """Return the number of rounds measured so far or one less, whichever comes closer to the budget.

        In case of a tie, the smaller number is returned.
        """
        *_, before, last = totals
        return max(1, len(totals) - 1 - (last + after - self.samples >= self.samples - before - after))

    def _extrapolated(self, totals: list[float], ratio: float, after: int) -> int:
        mean = self.samples / len(self.plain)
        for cost in chain(self.plain[len(totals) - 1 :], repeat(mean)):
            totals.append(totals[-1] + ratio * cost)
            if totals[-1] + after >= self.samples:
                break
        return self._nearest(totals, after)


def plain_budget(setting: Setting, fed: Federation, rounds: int) -> Budget:
    """Measure the budget: the gradients that plain local training computes in a number of rounds.

    If clients are sampled uniformly and the first two rounds have equal cost, all rounds are assumed to have this cost.
    Otherwise, every round is run.

    Args:
        setting: the experiment's setting for FedAvg.
        fed: the clients and their data.
        rounds: number of rounds.
    """
    costs: list[int] = []
    with closing(play(setting, fed)) as game:
        for last in game:
            costs.append(last.samples - sum(costs))
            alike = len(costs) == 2 and costs[0] == costs[1] and isinstance(setting.sampler, Uniform)
            if alike or len(costs) == rounds:
                break
    return Budget((*costs, *[costs[-1]] * (rounds - len(costs))), sum(costs))


class Goal(NamedTuple):
    """Compute budget of the trials, and how they are scored.

    Attributes:
        rounds: length of a trial, in rounds of plain local training if budgets are equal, or else in rounds of the
            method.
        budget: budget of a trial with one seed. None: the method's own number of rounds applies.
        metric: name of the validation metric that scores a trial.
        seeds: seeds over which the score is averaged.
        models: kinds of models over which the score is averaged.
        higher: True if higher values of the metric are better.
        statistic: how the clients' values are averaged: "mean", or "weighted" by their numbers of samples.
        time: virtual time in seconds after which a trial with one seed ends. None: the trial runs all its rounds.
    """

    rounds: int
    budget: Budget | None
    metric: str
    seeds: tuple[int, ...]
    models: tuple[str, ...]
    higher: bool
    statistic: str = "mean"
    time: float | None = None

    @property
    def figure(self) -> str:
        """Name under which the score is recorded in each round."""
        return f"{self.metric}/{self.statistic}"

    @property
    def samples(self) -> int | None:
        """Number of samples whose gradients a trial may compute, over all its seeds.

        None if trials are limited by their number of rounds instead.
        """
        return None if self.budget is None else self.budget.samples * len(self.seeds)
