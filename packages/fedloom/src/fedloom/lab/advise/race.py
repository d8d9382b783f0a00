"""Race: decide how long each candidate is trained, which settings are kept, and which methods are eliminated.

Every method starts with the same number of settings, each of which is called a candidate (arm). After a ninth of a full
run's work with one seed, about the best third of each method's settings are kept. After a third of the work with two
seeds, only each method's best setting is kept. From then on, methods are compared with each other. A method is
eliminated if another method is significantly better (`fedloom.lab.advise.looks`). The remaining methods are trained for
all rounds. Local training and FedAvg are also trained to the end, as references. While the race is undecided, the rest
of the budget is spent on more seeds.

The functions in this module choose what to train next and interpret the results. They do not train any models, so they
can be tested with arbitrary results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedloom.errors import ConfigError
from fedloom.formats import format_percent, format_significant
from fedloom.lab.advise.laps import DECIDING_PART, Arm, Lap, LapResult
from fedloom.lab.advise.looks import PairedDifference, Values, pair_differences, pool_seeds, spend_level

EARLY_DEPTH, MIDDLE_DEPTH, WHOLE_DEPTH = 1 / 9, 1 / 3, 1.0
"""Fractions of a full run's work after which settings or methods are compared."""
MIN_RACE_SEEDS, MAX_RACE_SEEDS = 2, 5
"""Number of seeds at the first comparison of methods, followed by the maximum number of seeds."""
MAX_LOOKS = 2 + MAX_RACE_SEEDS - MIN_RACE_SEEDS
"""Maximum number of interim analyses (looks) that may eliminate methods."""
ALONE_METHOD, AVERAGE_METHOD = "local", "fedavg"
"""Methods that take part in every race and serve as references for all other methods. Both methods are always trained
for all rounds."""
DEFAULT_BUDGET_RUNS = 16.0
"""Default budget of a race, in multiples of the gradients of one FedAvg run. This budget is twice the cost of tuning
FedAvg alone with 8 trials."""
MAX_ARMS, MAX_STAYING_ARMS = 16, 4
"""Maximum number of settings per method at the start, and maximum number of settings kept after the first comparison.
The remaining budget is spent on more seeds."""

RunLaps = Callable[[Sequence[Lap]], Sequence[LapResult]]
"""Function that trains laps in parallel and returns their results in the same order."""


class Departure(NamedTuple):
    """Elimination of a method from the race.

    Attributes:
        look: number of the interim analysis (look), counted from 1.
        rival: label of the better method. If all settings of the method failed, the label is empty.
        difference: the rival's score minus the method's score, which is positive if the rival is better.
        reason: reason why there is no result, if all settings of the method have failed.
    """

    look: int
    rival: str
    difference: PairedDifference | None
    reason: str = ""


class RaceOutcome(NamedTuple):
    """Final state of a race.

    Attributes:
        arms: best setting of each method, keyed by label.
        results: results of whole runs, keyed by label and seed, for methods in the race and for the references.
        racing: labels of the methods that are still in the race, best method first.
        departures: eliminations of the other methods, keyed by label.
        looks: number of interim analyses (looks) performed.
        level: one-sided significance level at which one method may eliminate another method at the next interim
            analysis (or the last one if none is left).
        spent: number of gradients spent on all laps and on planning their number of rounds.
    """

    arms: Mapping[str, Arm]
    results: Mapping[tuple[str, int], LapResult]
    racing: tuple[str, ...]
    departures: Mapping[str, Departure]
    looks: int
    level: float
    spent: int


def last_round(depth: float, rounds: int) -> int:
    """Return the last round of a lap, in a run with the given number of rounds."""
    return max(1, round(depth * rounds))


class LapShares(NamedTuple):
    """Gradients that a method needs for its laps, as fractions of a full run.

    Attributes:
        early: gradients of the rounds up to the first comparison.
        middle: gradients of the rounds up to the second comparison.
        personal: training of the personal models that are evaluated after one lap. The personal models are trained
            again after every lap.
    """

    early: float = EARLY_DEPTH
    middle: float = MIDDLE_DEPTH
    personal: float = 0.0

    @classmethod
    def compute(cls, rounds: int, personal: float) -> LapShares:
        """Return the cost of a run's laps, given its number of rounds and the fraction for personal models."""
        early, middle = (last_round(depth, rounds) / rounds * (1 - personal) for depth in (EARLY_DEPTH, MIDDLE_DEPTH))
        return cls(early, middle, personal)


def choose_counts(methods: Sequence[LapShares], budget: float, planned: float = 0.0) -> tuple[int, int]:
    """Return the number of initial settings per method, and the number kept after the first comparison.

    The budget is then sufficient even if no method is eliminated.

    Args:
        methods: cost of the laps of each method in the race.
        budget: number of sample gradients that the race may compute, in multiples of one FedAvg run.
        planned: number of gradients computed to plan the numbers of rounds, in the same unit.

    Raises:
        ConfigError: the budget is too small for one setting per method.

    >>> choose_counts([LapShares()] * 6, 16), choose_counts([LapShares()] * 6, 32), choose_counts([LapShares()] * 2, 4)
    ((7, 1), (16, 4), (1, 1))
    """
    starts, stays, ends = _race_costs(methods, planned)

    def begin(stay: int) -> int:
        return math.floor((budget - ends - stays * stay) / starts + 1e-9)

    if begin(1) < 1:
        least = math.ceil(10 * (starts + stays + ends) - 1e-6) / 10
        raise ConfigError(
            f"a budget of {format_significant(budget, 4)} runs of FedAvg is too small for a race of {len(methods)} "
            f"methods with {MIN_RACE_SEEDS} seeds. Use a budget of at least {format_significant(least, 4)}"
        )
    stay = 1
    while stay < MAX_STAYING_ARMS and begin(stay + 1) >= 4 * (stay + 1):
        stay += 1
    return min(MAX_ARMS, begin(stay)), stay


def find_budget(methods: Sequence[LapShares], finalists: int, seeds: int, budget: float, planned: float) -> int:
    """Return a larger budget, in FedAvg runs, that is enough to train the finalists with the given number of seeds."""
    starts, stays, ends = _race_costs(methods, planned)
    larger = math.floor(budget) + 1
    while True:
        count, stay = choose_counts(methods, larger, planned)
        if larger - ends - stays * stay - starts * count >= finalists * (seeds - MIN_RACE_SEEDS):
            return larger
        larger += 1


def _race_costs(methods: Sequence[LapShares], planned: float) -> tuple[float, float, float]:
    """Return three costs, in runs: one more initial setting per method, one more kept setting, and everything else."""
    starts = sum(one.early + one.personal for one in methods)
    stays = sum(MIN_RACE_SEEDS * (one.middle + one.personal) - one.early for one in methods)
    return starts, stays, planned + sum(MIN_RACE_SEEDS * (WHOLE_DEPTH - one.middle) for one in methods)


def race(
    arms: Mapping[str, Sequence[Arm]], stay: int, budget: float, work: int, seeds: Sequence[int], run: RunLaps,
    tell: Callable[[str], None] = lambda _line: None, *, higher: bool, planned: Callable[[], int] = lambda: 0,
) -> RaceOutcome:  # fmt: skip
    """Run a race between methods and return its outcome.

    Args:
        arms: settings of every method, keyed by label. The number of settings per method and ``stay`` are determined by
            `choose_counts`.
        stay: number of settings per method that are kept after the first comparison.
        budget: maximum number of sample gradients that the race may compute.
        work: number of gradients computed in one full run.
        seeds: the `MAX_RACE_SEEDS` seeds of the race.
        run: function that trains laps and returns their results.
        tell: function that is called with a sentence after every comparison.
        higher: True if higher values of the metric are better.
        planned: function that returns the number of sample gradients computed outside of laps. These gradients count
            toward the budget.
    """
    return _Race(arms, budget, work, seeds, 1.0 if higher else -1.0, run, tell, planned).run_to_end(stay)


class _Race:
    def __init__(
        self, arms: Mapping[str, Sequence[Arm]], budget: float, work: int, seeds: Sequence[int], sign: float,
        run: RunLaps, tell: Callable[[str], None], planned: Callable[[], int],
    ) -> None:  # fmt: skip
        self._planned = planned
        self._arms: dict[str, Sequence[Arm]] = dict(arms)
        self._budget, self._work, self._seeds, self._sign, self._run, self._tell = budget, work, seeds, sign, run, tell
        self._methods = len(arms)
        self._newest = dict[tuple[str, int, int], LapResult]()
        self._departures = dict[str, Departure]()
        self._levels, self._looks, self._spent = spend_level(MAX_LOOKS), 0, 0

    def run_to_end(self, stay: int) -> RaceOutcome:
        """Run the race to the end and return the outcome."""
        self._train(self._arms, self._seeds[:1], EARLY_DEPTH)
        self._keep_best_settings(stay, self._seeds[:1])
        first = self._seeds[:MIN_RACE_SEEDS]
        self._train(self._arms, first, MIDDLE_DEPTH)
        self._keep_best_settings(1, first)
        self._eliminate_methods(first, MIDDLE_DEPTH)
        self._train(self._finalists(), first, WHOLE_DEPTH)
        self._keep_best_settings(1, first)
        self._eliminate_methods(first, WHOLE_DEPTH)
        count = MIN_RACE_SEEDS
        while self._is_open and count < MAX_RACE_SEEDS and self._can_afford(len(self._finalists())):
            self._train(self._finalists(), self._seeds[count : count + 1], WHOLE_DEPTH)
            count += 1
            self._keep_best_settings(1, self._seeds[:count])
            self._eliminate_methods(self._seeds[:count], WHOLE_DEPTH)
        results = {
            (label, seed): result
            for (label, number, seed), result in self._newest.items()
            if label in self._finalists() and self._arms[label][0].number == number
        }
        racing = self._remaining_labels()
        level = self._levels[min(self._looks, MAX_LOOKS - 1)] / max(1, self._methods - 1)
        arms = {label: one[0] for label, one in self._arms.items()}
        return RaceOutcome(arms, results, racing, self._departures, self._looks, level, self._spent + self._planned())

    def _can_afford(self, runs: int) -> bool:
        """Return True if the remaining budget is sufficient for the given number of full runs."""
        return self._spent + self._planned() + runs * self._work <= self._budget

    @property
    def _is_open(self) -> bool:
        return len(self._remaining_labels()) > 1

    def _remaining_labels(self) -> tuple[str, ...]:
        """Return the labels of the methods that are still in the race, best method first."""
        racing = [label for label in self._arms if label not in self._departures]
        means = {label: self._mean(self._arms[label][0]) for label in racing}
        return tuple(sorted(racing, key=lambda label: -means[label]))

    def _finalists(self) -> dict[str, Sequence[Arm]]:
        """Return the remaining settings of each method that is in the race or serves as a reference."""
        kept = (ALONE_METHOD, AVERAGE_METHOD)
        return {label: one for label, one in self._arms.items() if label not in self._departures or label in kept}

    def _train(self, arms: Mapping[str, Sequence[Arm]], seeds: Sequence[int], depth: float) -> None:
        laps = [Lap(arm, seed, depth) for one in arms.values() for arm in one for seed in seeds]
        for lap, result in zip(laps, self._run(laps), strict=True):
            key = (lap.arm.label, lap.arm.number, lap.seed)
            before = self._newest.get(key)
            self._spent += max(0, result.samples - (0 if before is None else before.trained))
            self._newest[key] = result

    def _mean(self, arm: Arm) -> float:
        """Return a candidate's mean score across its seeds and clients, with a sign such that higher is better.

        The mean score of a failed candidate is minus infinity.
        """
        results = [r for (label, number, _), r in self._newest.items() if (label, number) == (arm.label, arm.number)]
        values = [one for r in results if (one := r.values(DECIDING_PART)) is not None]
        if not results or len(values) < len(results):
            return -math.inf
        table = np.array(values)
        scored = np.isfinite(table).all(0)
        return self._sign * float(table[:, scored].mean()) if scored.any() else -math.inf

    def _keep_best_settings(self, count: int, seeds: Sequence[int]) -> None:
        """Retain only the best settings of each method. A method is eliminated if all of its settings have failed."""
        for label, one in [*self._arms.items()]:
            best = sorted(one, key=lambda arm: (-self._mean(arm), arm.number))
            self._arms[label] = best[:count]
            if label not in self._departures and self._mean(best[0]) == -math.inf:
                reasons = [
                    r.reason for seed in seeds if (r := self._newest.get((label, best[0].number, seed))) and r.reason
                ]
                self._departures[label] = Departure(self._looks, "", None, reasons[0] if reasons else "no score")
                self._tell(f"{label} leaves: {self._departures[label].reason}")

    def _eliminate_methods(self, seeds: Sequence[int], depth: float) -> None:
        """Eliminate each method if another method is significantly better."""
        level = self._levels[self._looks] / max(1, self._methods - 1)
        self._looks += 1
        racing, results = (
            self._remaining_labels(),
            {
                (label, seed): r
                for (label, number, seed), r in self._newest.items()
                if number == self._arms[label][0].number
            },
        )
        for label in reversed(racing):
            beaten = [
                (gap, rival)
                for rival in racing
                if rival != label and (gap := compare_methods(results, rival, label, DECIDING_PART, self._sign))
            ]
            by_p = sorted((gap.p_above(), rival, gap) for gap, rival in beaten)
            if by_p and by_p[0][0] <= level:
                self._departures[label] = Departure(self._looks, by_p[0][1], by_p[0][2])
        left = self._remaining_labels()
        self._tell(
            f"look {self._looks}, {len(seeds)} seeds, {format_percent(depth)} of a run: still in the race, best first: "
            f"{', '.join(left)}"
        )


def compare_methods(
    results: Mapping[tuple[str, int], LapResult], one: str, other: str, part: str, sign: float
) -> PairedDifference | None:
    """Return the difference between two methods on a part of the data, which is positive if the first method is better.

    Return None if either result is missing.

    The effect of seeds on the difference is estimated from all methods that have results for the same seeds.
    """
    table = difference_table(results, one, other, part, sign)
    if table is None:
        return None
    seeds = [seed for label, seed in results if label == one and (other, seed) in results]
    rows = [
        [results[label, seed].values(part) for seed in seeds if (label, seed) in results]
        for label in dict.fromkeys(label for label, _ in results)
    ]
    whole = [row for row in rows if len(row) == len(seeds) and all(values is not None for values in row)]
    return pair_differences(table, pool_seeds(np.array(whole)))


def difference_table(
    results: Mapping[tuple[str, int], LapResult], one: str, other: str, part: str, sign: float
) -> Values | None:
    """Return the difference between two methods for each client and shared seed, ``[seeds, clients]``.

    Return None if either result is missing.
    """
    seeds = [seed for label, seed in results if label == one and (other, seed) in results]
    pairs = [(results[one, seed].values(part), results[other, seed].values(part)) for seed in seeds]
    if not pairs or any(a is None or b is None for a, b in pairs):
        return None
    return np.array([sign * (a - b) for a, b in pairs if a is not None and b is not None])
