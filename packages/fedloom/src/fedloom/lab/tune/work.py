"""Equal work: how many rounds of a method take as many gradients as the rounds of plain local training.

Work is what a whole run takes: the samples whose gradient its rounds take, and those that its personal models take
after the last one. A round need not cost what the first did (FedALA's second round, rules that stop local training), so
a plan is for the sum over rounds, and what a run really took is compared with it.
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
"""A run with more than this share of its budget is named: on the terminal, in the tuned file, in reports."""
MIN_BUDGET_RATIO = 0.9
"""A run with less than this share, or more than `MAX_BUDGET_RATIO`, is planned again, by every single round."""
EQUAL_COST_TOLERANCE = 0.01
"""Two rounds that cost the same, but for this share, stand for all later ones in a first plan."""
MAX_ROUND_MULTIPLE = 20
"""Most rounds of a plan of single rounds, in those of plain training."""


class Budget(NamedTuple):
    """Gradients that a run may take with one seed.

    Attributes:
        plain: samples whose gradient every round of plain local training takes, one number per round.
    """

    plain: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Samples whose gradient a run may take."""
        return sum(self.plain)

    def missed(self, samples: float) -> bool:
        """Return whether what a run took is so far from the budget that its rounds must be planned again."""
        return not MIN_BUDGET_RATIO * self.samples <= samples <= MAX_BUDGET_RATIO * self.samples

    def rounds(self, setting: Setting, fed: Federation, *, whole: bool = False) -> int:
        """Return the rounds of a run whose work is nearest to the budget, at least one.

        Args:
            setting: the run.
            fed: the clients and their data.
            whole: play every round, instead of the first ones until two cost the same share of plain training's.

        Raises:
            ConfigError, RunStopped, ClientError: as `fedloom.lab.experiment.measure.cost.play`.
        """
        totals, ratio, after = [0.0], -1.0, 0
        with closing(play(setting, fed)) as game:
            for round, last in enumerate(game, 1):
                total = last.samples
                totals.append(total)
                if round == 1 or total + after >= self.samples:
                    after = last.personal_samples()
                if total + after >= self.samples:
                    return self._nearest(totals, after)
                before, ratio = ratio, (total - totals[-2]) / self._cost(round)
                steady = abs(ratio - before) <= EQUAL_COST_TOLERANCE * max(ratio, before)
                if not whole and steady:
                    return self._extrapolated(totals, ratio, after) if ratio else len(self.plain)
                if round >= MAX_ROUND_MULTIPLE * len(self.plain):
                    return round
        raise AssertionError("a run is played until it is planned")

    def _cost(self, round: int) -> float:
        """Return the samples of a round of plain training. After the last round, the mean."""
        return self.plain[round - 1] if round <= len(self.plain) else self.samples / len(self.plain)

    def _nearest(self, totals: list[float], after: int) -> int:
        """Return the last round or the one before it, whichever is nearer to the budget. The cheaper one in a tie."""
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
    """Compute the budget of plain local training for a number of rounds.

    Under uniform sampling two rounds of equal work stand for all. Else every round is played.

    Args:
        setting: FedAvg as the experiment has it.
        fed: the clients and their data.
        rounds: how many.
    """
    costs: list[int] = []
    with closing(play(setting, fed)) as game:
        for last in game:
            costs.append(last.samples - sum(costs))
            alike = len(costs) == 2 and costs[0] == costs[1] and isinstance(setting.sampler, Uniform)
            if alike or len(costs) == rounds:
                break
    return Budget((*costs, *[costs[-1]] * (rounds - len(costs))))


class Goal(NamedTuple):
    """Inputs of trials, and the goal by which they are judged.

    Attributes:
        rounds: work of a trial, in rounds of plain local training, or in the method's own.
        budget: work of a trial with one seed. None: its rounds are the method's own.
        metric: name of the validation metric.
        seeds: the score is the mean over them.
        models: the score is the mean over them.
        higher: more is better.
        statistic: of the clients' values: mean, or weighted by samples.
        time: virtual time of a trial with one seed, in seconds. None: it has all its rounds.
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
        """The name under which the score of a round is recorded."""
        return f"{self.metric}/{self.statistic}"

    @property
    def samples(self) -> int | None:
        """Samples whose gradient a trial takes, over all its seeds. None: what its rounds cost."""
        return None if self.budget is None else self.budget.samples * len(self.seeds)
