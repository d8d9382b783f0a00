"""Equal work: find the number of rounds in which a method computes as many gradients as local training.

The work of a run is the number of sample gradients that its rounds compute, plus the number that its personal models
need after the last round. Rounds may differ in cost, for example the second round of FedALA, or rounds in which a rule
stops local training early. The plan is therefore based on the sum over rounds, and is compared with a run's actual
cost.
"""

from __future__ import annotations

from contextlib import closing
from itertools import chain, repeat
from typing import NamedTuple

from fedloom.choose.samplers import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.errors import Refused
from fedloom.lab.experiment.measure.cost import play_rounds

MAX_BUDGET_RATIO = 1.1
"""Maximum fraction of its budget that a run may use without a warning in the terminal, tuned file and reports."""
MIN_BUDGET_RATIO = 0.9
"""Minimum fraction of its budget that a run must spend. If the actual fraction is below this value or above
`MAX_BUDGET_RATIO`, the run is planned again based on the measured cost of every round."""
EQUAL_COST_TOLERANCE = 0.01
"""Maximum relative difference in cost between two rounds that are treated as equal. A first plan then assumes that all
later rounds have the same cost."""
MAX_ROUND_MULTIPLE = 20
"""Maximum number of rounds in a plan that measures every round, as a multiple of the rounds of local training."""


class RoundPlan(NamedTuple):
    """Plan for the length of a run.

    Attributes:
        rounds: number of rounds that the run should have.
        spent: number of sample gradients computed to create this plan.
        personal: number of sample gradients needed for the personal models after a round.
    """

    rounds: int
    spent: int
    personal: int = 0


class Budget(NamedTuple):
    """Number of sample gradients that one run (with one seed) may compute.

    Attributes:
        plain: number of sample gradients computed in each round of local training without federation.
        spent: number of sample gradients computed to determine ``plain``.
    """

    plain: tuple[int, ...]
    spent: int = 0

    @property
    def samples(self) -> int:
        """Maximum number of sample gradients that a run may compute."""
        return sum(self.plain)

    def missed(self, samples: float) -> bool:
        """Return True if a run's actual cost is so far from the budget that the run must be planned again."""
        return not MIN_BUDGET_RATIO * self.samples <= samples <= MAX_BUDGET_RATIO * self.samples

    def rounds(self, setting: Setting, fed: Federation, *, whole: bool = False) -> int:
        """Return the number of rounds from `plan`."""
        return self.plan(setting, fed, whole=whole).rounds

    def plan(self, setting: Setting, fed: Federation, *, whole: bool = False) -> RoundPlan:
        """Find the number of rounds, at least one, that brings the work of a run closest to the budget.

        Args:
            setting: setting of the run.
            fed: the clients and their data.
            whole: True to run every round so that its cost can be measured. False to stop as soon as two rounds in a
                row have the same cost in proportion to local training without federation.

        Raises:
            ConfigError, RunStopped, ClientError: `fedloom.lab.experiment.measure.cost.play_rounds` raised the error.
        """
        totals, ratio, after, beside = [0.0], -1.0, 0, 0
        with closing(play_rounds(setting, fed)) as game:
            for round, last in enumerate(game, 1):
                total = last.samples
                totals.append(total)
                if round == 1 or total + after >= self.samples:
                    after = last.personal_samples()
                    beside += after
                spent = int(total) + beside
                if total + after >= self.samples:
                    return RoundPlan(self._closest_rounds(totals, after), spent, after)
                before, ratio = ratio, (total - totals[-2]) / self._cost(round)
                steady = abs(ratio - before) <= EQUAL_COST_TOLERANCE * max(ratio, before)
                if not whole and steady:
                    return RoundPlan(
                        self._extrapolate_rounds(totals, ratio, after) if ratio else len(self.plain), spent, after
                    )
                if round >= MAX_ROUND_MULTIPLE * len(self.plain):
                    return RoundPlan(round, spent, after)
        raise AssertionError("a run is played until it is planned")

    def _cost(self, round: int) -> float:
        """Return the number of sample gradients that a given round of plain local training computes.

        For rounds beyond the measured ones, return the mean over all measured rounds.
        """
        return self.plain[round - 1] if round <= len(self.plain) else self.samples / len(self.plain)

    def _closest_rounds(self, totals: list[float], after: int) -> int:
        """Return the number of rounds measured so far, or one less if that comes closer to the budget.

        Ties go to the smaller number.
        """
        *_, before, last = totals
        return max(1, len(totals) - 1 - (last + after - self.samples >= self.samples - before - after))

    def _extrapolate_rounds(self, totals: list[float], ratio: float, after: int) -> int:
        mean = self.samples / len(self.plain)
        for cost in chain(self.plain[len(totals) - 1 :], repeat(mean)):
            totals.append(totals[-1] + ratio * cost)
            if totals[-1] + after >= self.samples:
                break
        return self._closest_rounds(totals, after)


def plain_budget(setting: Setting, fed: Federation, rounds: int) -> Budget:
    """Measure the budget: the gradients that local training without federation computes in a number of rounds.

    If clients are sampled uniformly and the first two rounds have the same cost, all rounds are assumed to have this
    cost. Otherwise, all rounds are run.

    Args:
        setting: the experiment's setting for FedAvg.
        fed: the clients and their data.
        rounds: number of rounds.

    Raises:
        Refused: no client computes a gradient.
    """
    costs: list[int] = []
    with closing(play_rounds(setting, fed)) as game:
        for last in game:
            costs.append(last.samples - sum(costs))
            alike = len(costs) == 2 and costs[0] == costs[1] and isinstance(setting.sampler, Uniform)
            if alike or len(costs) == rounds:
                break
    if not any(costs):
        raise Refused(
            "no client computes a gradient in any round, so methods cannot be compared at equal work",
            rule="no-gradient",
            fix="omit {attack}, or use a smaller {attack.fraction}",
        )
    return Budget((*costs, *[costs[-1]] * (rounds - len(costs))), sum(costs))


class Goal(NamedTuple):
    """Compute budget of the trials, and how they are scored.

    Attributes:
        rounds: length of a trial. If compute budgets are equal, it is given in rounds of local training without
            federation, or else in rounds of the method.
        budget: budget of a trial with one seed. If None, the method's own number of rounds applies.
        metric: name of the validation metric used to score a trial.
        seeds: seeds over which a trial's score is averaged.
        models: kinds of models over which the score is averaged.
        higher_is_better: True if higher values of the metric are better.
        statistic: type of mean over the clients: "mean", or "weighted" by their numbers of samples.
        time: virtual time limit of a trial with one seed, in seconds. If None, the trial runs all of its rounds.
    """

    rounds: int
    budget: Budget | None
    metric: str
    seeds: tuple[int, ...]
    models: tuple[str, ...]
    higher_is_better: bool
    statistic: str = "mean"
    time: float | None = None

    @property
    def figure(self) -> str:
        """Name of the recorded score in each round."""
        return f"{self.metric}/{self.statistic}"

    @property
    def samples(self) -> int | None:
        """Maximum number of sample gradients that a trial may compute, over all its seeds.

        None if trials are limited by their number of rounds instead.
        """
        return None if self.budget is None else self.budget.samples * len(self.seeds)
