"""Equal work: the number of rounds in which a method computes as many gradients as plain local training.

Work is the cost of a whole run: the samples whose gradient its rounds compute, and the samples whose gradient its
personal models compute after the last round. The first round need not cost as much as later rounds (because of FedALA's
second round, or rules that stop local training), so a plan is made for the sum over rounds, and the actual cost of a
run is compared with the plan.
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
"""Largest share of its budget that a run may use without being mentioned on the terminal, in the tuned file and in
reports."""
MIN_BUDGET_RATIO = 0.9
"""Smallest such share: if a run is outside this share and `MAX_BUDGET_RATIO`, it is planned again, round by round."""
EQUAL_COST_TOLERANCE = 0.01
"""Relative difference up to which two rounds count as equally expensive and represent all later rounds in a first
plan."""
MAX_ROUND_MULTIPLE = 20
"""Largest number of rounds in a round-by-round plan, as a multiple of the rounds of plain training."""


class RoundPlan(NamedTuple):
    """Plan of a run.

    Attributes:
        rounds: number of rounds.
        spent: number of samples whose gradient was computed to determine this plan.
        personal: number of samples whose gradient the personal models need after a round.
    """

    rounds: int
    spent: int
    personal: int = 0


class Budget(NamedTuple):
    """Budget of gradients for a run with one seed.

    Attributes:
        plain: number of samples whose gradient plain local training computes, for every round.
        spent: number of samples whose gradient was computed to determine these numbers.
    """

    plain: tuple[int, ...]
    spent: int = 0

    @property
    def samples(self) -> int:
        """Number of samples whose gradient a run may compute."""
        return sum(self.plain)

    def missed(self, samples: float) -> bool:
        """Return True if the actual cost of a run is so far from the budget that its rounds must be planned again."""
        return not MIN_BUDGET_RATIO * self.samples <= samples <= MAX_BUDGET_RATIO * self.samples

    def rounds(self, setting: Setting, fed: Federation, *, whole: bool = False) -> int:
        """Return the number of rounds that `plan` determines."""
        return self.plan(setting, fed, whole=whole).rounds

    def plan(self, setting: Setting, fed: Federation, *, whole: bool = False) -> RoundPlan:
        """Return the number of rounds, at least one, with which the work of a run is nearest to the budget.

        Args:
            setting: the run.
            fed: the clients and their data.
            whole: True to play every round, instead of only the first rounds until two rounds cost the same share of
                plain training.

        Raises:
            ConfigError, RunStopped, ClientError: raised by `fedloom.lab.experiment.measure.cost.play`.
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
        """Return the number of samples in a round of plain training. After the last round, the mean is returned."""
        return self.plain[round - 1] if round <= len(self.plain) else self.samples / len(self.plain)

    def _nearest(self, totals: list[float], after: int) -> int:
        """Return the number of the last round or the round before it, whichever is nearer to the budget.

        In a tie, it is the cheaper number.
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
    """Return the budget of plain local training for a number of rounds.

    Under uniform sampling, two rounds with equal work represent all rounds. Otherwise, every round is played.

    Args:
        setting: setting of FedAvg in the experiment.
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
    """Inputs of trials, and the goal by which they are judged.

    Attributes:
        rounds: work of a trial, measured in rounds of plain local training, or in rounds of the method.
        budget: work of a trial with one seed. None: the method's number of rounds.
        metric: name of the validation metric.
        seeds: seeds over which the score is averaged.
        models: models over which the score is averaged.
        higher: True if a higher value is better.
        statistic: statistic of the clients' values: mean, or weighted by samples.
        time: virtual time of a trial with one seed, in seconds. None: the trial runs all its rounds.
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
        """Name under which the score of a round is recorded."""
        return f"{self.metric}/{self.statistic}"

    @property
    def samples(self) -> int | None:
        """Number of samples whose gradient a trial computes, over all its seeds. None: the cost of its rounds."""
        return None if self.budget is None else self.budget.samples * len(self.seeds)
