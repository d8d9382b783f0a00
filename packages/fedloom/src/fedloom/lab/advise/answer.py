"""Answer of a race: the method and its settings, its gain, advice for every client, and its cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedloom.data.federation import Federation
from fedloom.errors import RunStopped, Stop
from fedloom.formats import (
    finite_or_none,
    format_duration,
    format_options,
    format_pair,
    format_percent,
    format_significant,
    shorten_list,
    write_total,
)
from fedloom.lab.advise.laps import DECIDING_PART, ESTIMATING_PART, Arm
from fedloom.lab.advise.looks import INTERVAL_LEVEL, RACE_ERROR_LEVEL, PairedDifference, shrink_gains
from fedloom.lab.advise.race import (
    ALONE_METHOD,
    AVERAGE_METHOD,
    MAX_RACE_SEEDS,
    RaceOutcome,
    compare_methods,
    difference_table,
)
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.naming import describe_figure, lowercase_title
from fedloom.lab.report.tables import write_difference
from fedloom.metrics import metric as facts
from fedloom.storage.files import write_atomic

ANSWER_FILES = ADVISED_FILE, ADVICE_FILE, CLIENTS_FILE = "advised.toml", "advice.json", "clients.csv"
"""Files of an answer: the experiment with the recommended method, the machine-readable answer, and client advice."""
MAX_LISTED_CLIENTS = 6
"""Maximum number of clients named on one line."""


class Verdict(StrEnum):
    """Conclusion of a race, in words."""

    TOGETHER = "use this method"
    ALONE = "training alone is enough"
    UNDECIDED = "undecided within this budget"


class Choice(StrEnum):
    """Recommended action for a client, in words."""

    JOIN = "join"
    TUNE = "fine-tune"
    ALONE = "stay alone"


class ClientAdvice(NamedTuple):
    """Advice for one client of a race.

    Attributes:
        name: name of the client.
        choice: recommended action for the client.
        gain: predicted gain of the method over training alone. The prediction is computed from the data of the race,
            and is above 0 if the method is better than training alone.
        estimate: mean gain on the client's validation data that was held out from the race. NaN if there is no such
            data.
        half: half-width of the confidence interval of ``estimate`` over seeds. NaN if there is only one seed.
    """

    name: str
    choice: Choice
    gain: float
    estimate: float
    half: float


class Advice(NamedTuple):
    """Answer of a race.

    Attributes:
        verdict: conclusion of the race in words.
        method: best federated method. This method leads the race unless local training leads it.
        arms: chosen settings of each method, keyed by label.
        metric: metric used to compare the methods.
        gains: gain of the method over local training and over FedAvg, keyed by the label of the baseline. Each gain is
            measured on held-out validation data and is positive if the method is better. A gain is None if a run
            failed.
        racing: labels of the methods that are still in the race, best method first.
        departures: for each method that has left the race, the better method, the interim analysis (look) after which
            it left, the difference on the data of the race, and the reason if the method failed.
        left_out: reason why a method did not take part, keyed by the label of the method.
        more: number of additional gradients needed to decide the race. None if no more gradients are needed, or if even
            the maximum number of seeds would not be enough.
        needed: total budget that would decide the race, in FedAvg runs. None if ``more`` is None.
        clients: advice for every client.
        cost: cost of one run of the method: rounds, gradients, bytes, and hours. If no devices are simulated, the hours
            are None.
        spent: number of sample gradients that the race computed.
        budget: maximum number of sample gradients allowed for the race.
        looks: number of interim analyses (looks) performed.
        margin: largest difference that does not matter in practice. None if no margin was given.
        kept: number of validation samples held out from the race to estimate the gains.
    """

    verdict: Verdict
    method: str
    arms: Mapping[str, Arm]
    metric: str
    gains: Mapping[str, PairedDifference | None]
    racing: tuple[str, ...]
    departures: Mapping[str, tuple[str, int, float, str]]
    left_out: Mapping[str, str]
    more: int | None
    needed: float | None
    clients: tuple[ClientAdvice, ...]
    cost: Mapping[str, float | None]
    spent: int
    budget: int
    looks: int
    margin: float | None
    kept: int

    @property
    def params(self) -> dict[str, Any]:
        """Settings chosen for the recommended method."""
        return dict(self.arms[self.method].params)

    @property
    def references(self) -> tuple[str, ...]:
        """Methods to which the recommended method is compared."""
        return tuple(label for label in (ALONE_METHOD, AVERAGE_METHOD) if label != self.method)

    def lines(self) -> list[str]:
        """Return the advice as about ten lines of text."""
        settings = format_options(self.params)
        use = f"{self.method}{f' with {settings}' if settings else ''}"
        head = {
            Verdict.TOGETHER: f"use {use}",
            Verdict.ALONE: f"{Verdict.ALONE}. The best federated method is {use}",
            Verdict.UNDECIDED: (
                f"{Verdict.UNDECIDED}: {self._more_text}. The best federated method so far is {use}{self._behind_text}"
            ),
        }[self.verdict]
        lines = [f"answer: {head}"]
        for label in self.references:
            lines.append(f"gain over {label}: {self._gain_text(label)}")
        lines.append(f"still in the race, best first: {', '.join(self.racing)}{self._left_text}")
        lines += [f"not in the race: {label}: {reason}" for label, reason in self.left_out.items()]
        lines += [f"clients: {self._choices}", f"one run: {self._cost}"]
        lines.append(
            f"the race took {self.spent:,} of {self.budget:,} gradients. The probability that the best method was "
            f"eliminated is at most {format_percent(RACE_ERROR_LEVEL)}"
        )
        lines.append(
            f"gains: {self._title}, positive if the method is better, {format_percent(1 - INTERVAL_LEVEL)} intervals, "
            f"on {self.kept:,} validation samples held out from the race. No test data were read"
        )
        return lines

    def record(self) -> dict[str, Any]:
        """Return the answer as plain, unrounded values in the metric's units. Unknown values are None."""
        return {
            "verdict": str(self.verdict), "method": self.method, "defaults": self.params, "metric": self.metric,
            "gains": {label: _record_gain(gap) for label, gap in self.gains.items()},
            "racing": list(self.racing),
            "departures": {
                label: dict(zip(("rival", "look", "difference", "reason"), one, strict=True))
                for label, one in self.departures.items()
            },
            "left_out": dict(self.left_out), "gradients_to_decide": self.more, "budget_to_decide": self.needed,
            "margin": self.margin,
            "clients": [one._asdict() | {"choice": str(one.choice)} for one in self.clients],
            "cost": dict(self.cost), "spent": self.spent, "budget": self.budget, "looks": self.looks,
            "level": RACE_ERROR_LEVEL, "kept_samples": self.kept,
        }  # fmt: skip

    @property
    def _title(self) -> str:
        return lowercase_title(describe_figure(self.metric).title) + (
            " in points" if describe_figure(self.metric).scale == 100 else ""
        )

    @property
    def _behind_text(self) -> str:
        return f", behind {self.racing[0]}" if self.racing[0] != self.method else ""

    @property
    def _more_text(self) -> str:
        if self.more is None:
            return (
                f"the gain is too small, or differs too much among the clients, for {MAX_RACE_SEEDS} "
                f"seeds{self._bound}. More validation samples would help"
            )
        budget = format_significant(self.needed or 0, 4)
        more = f"about {format_significant(self.more, 2)} more gradients are needed to decide"
        return f"{more} (a budget of {budget} runs){self._bound}"

    @property
    def _bound(self) -> str:
        """Sentence about the smallest margin (rounded up) for which the answer is "training alone is enough"."""
        gain = self.gains.get(ALONE_METHOD)
        largest = math.nan if gain is None else gain.mean + gain.half_width()
        if not (math.isfinite(largest) and largest > 0):
            return ""
        step = 10.0 ** (math.floor(math.log10(largest)) - 1)
        margin = format_significant(step * (math.floor(largest / step) + 1), 2)
        bound = f". The gain over {ALONE_METHOD} is less than {margin}"
        return f"{bound}. If this gain does not matter to you, set margin = {margin}"

    def _gain_text(self, label: str) -> str:
        gap = self.gains[label]
        if gap is None or not math.isfinite(gap.mean):
            return "unknown, because too few validation samples were kept, or because a run failed"
        return format_pair(*write_difference(self.metric, gap.mean, gap.half_width()))

    @property
    def _left_text(self) -> str:
        parts = [
            f"{label} ({f'failed: {reason}' if reason else f'behind {rival}, look {look}'})"
            for label, (rival, look, _, reason) in self.departures.items()
        ]
        return f"; eliminated: {', '.join(parts)}" if parts else ""

    @property
    def _choices(self) -> str:
        by_choice = {choice: [one.name for one in self.clients if one.choice is choice] for choice in Choice}
        so_far = "no difference is significant. Predictions so far: " if self.verdict is Verdict.UNDECIDED else ""
        return so_far + "; ".join(
            f"{len(names)} {choice} ({shorten_list(names, MAX_LISTED_CLIENTS)})"
            for choice, names in by_choice.items()
            if names
        )

    @property
    def _cost(self) -> str:
        hours = self.cost["hours"]
        time = (
            "add [devices] to estimate the time" if hours is None else f"{format_duration(60 * hours)} on the devices"
        )
        return (
            f"{write_total(self.cost['rounds'] or 0)} rounds, {write_total(self.cost['gradients'] or 0)} gradients, "
            f"{format_significant((self.cost['bytes'] or 0) / 1e6, 3)} MB; {time}"
        )


def form_advice(
    outcome: RaceOutcome, fed: Federation, metric: str, margin: float | None, budget: int, work: int,
    left_out: Mapping[str, str], budget_of: Callable[[int, int], float],
) -> Advice:  # fmt: skip
    """Derive the answer of a race from its outcome.

    Args:
        outcome: outcome of the race.
        fed: federation of the race.
        metric: metric used to compare the methods.
        margin: largest difference that does not matter in practice. If None, every difference matters.
        budget: maximum number of sample gradients allowed for the race.
        work: number of gradients computed in one full run.
        left_out: reason why a method did not take part, keyed by the label of the method.
        budget_of: function that returns the budget, in FedAvg runs, that is needed for a given number of finalists and
            seeds.

    Raises:
        RunStopped: no method has a result.
    """
    sign = 1.0 if facts(metric).higher_is_better else -1.0
    if not outcome.racing:
        first = next(iter(outcome.departures.values()))
        raise RunStopped(Stop.FAILED, f"no method has a result: {first.reason}")
    shared = [label for label in outcome.racing if label != ALONE_METHOD]
    method = shared[0] if shared else AVERAGE_METHOD  # FedAvg is always trained to the end
    gains = {
        label: compare_methods(outcome.results, method, label, ESTIMATING_PART, sign)
        for label in (ALONE_METHOD, AVERAGE_METHOD)
        if label != method
    }
    verdict, seeds = decide(outcome, gains[ALONE_METHOD], margin)
    needed = None if seeds is None else budget_of(len({*outcome.racing, ALONE_METHOD, AVERAGE_METHOD}), seeds)
    more = None if needed is None else round(needed * work) - outcome.spent
    of_method = [result for (label, _), result in outcome.results.items() if label == method]
    cost: dict[str, float | None] = {
        "rounds": of_method[0].round,
        "gradients": float(np.mean([one.samples for one in of_method])),
        "bytes": float(np.mean([one.bytes for one in of_method])),
        "hours": None if of_method[0].seconds is None else float(np.mean([one.seconds for one in of_method])) / 3600,
    }
    departures = {
        label: (one.rival, one.look, one.difference.mean if one.difference else math.nan, one.reason)
        for label, one in outcome.departures.items()
    }
    return Advice(
        verdict, method, outcome.arms, metric, gains, outcome.racing, departures, left_out, more, needed,
        _advise_clients(outcome, fed, method, sign), cost, outcome.spent, budget, outcome.looks, margin,
        int(fed.sizes(ESTIMATING_PART).sum()),
    )  # fmt: skip


def write_answer(out: Path, advice: Advice, experiment: str) -> None:
    """Write the files of an answer to the directory of the race."""
    head = "".join(f"# {line}\n" for line in advice.lines())
    write_atomic(out / ADVISED_FILE, f"# Written by 'fedloom advise'.\n{head}{experiment}".encode())
    record = json.dumps(_replace_nonfinite(advice.record()), indent=2, allow_nan=False)
    write_atomic(out / ADVICE_FILE, f"{record}\n".encode())
    rows = [[one.name, str(one.choice), *map(_markdown_cell, one[2:])] for one in advice.clients]
    write_atomic(
        out / CLIENTS_FILE, render_csv(["client", "choice", "predicted_gain", "kept_gain", "half"], rows).encode()
    )


def decide(outcome: RaceOutcome, gain: PairedDifference | None, margin: float | None) -> tuple[Verdict, int | None]:
    """Return the verdict, and the number of seeds that would decide an undecided race (None if unknown or not needed).

    Args:
        outcome: outcome of the race.
        gain: gain of the best federated method over local training, on held-out data.
        margin: largest gain that does not matter in practice. If None, 0 is used.
    """
    if ALONE_METHOD not in outcome.racing:
        return Verdict.TOGETHER, None
    if outcome.racing == (ALONE_METHOD,):
        return Verdict.ALONE, None
    if gain is None:
        return Verdict.UNDECIDED, None
    half = gain.half_width()
    if gain.mean - half > 0:
        return Verdict.TOGETHER, None
    if gain.mean + half < (margin or 0.0):
        return Verdict.ALONE, None
    return Verdict.UNDECIDED, gain.seeds_needed(INTERVAL_LEVEL / 2, MAX_RACE_SEEDS)


def _advise_clients(outcome: RaceOutcome, fed: Federation, method: str, sign: float) -> tuple[ClientAdvice, ...]:
    """Return advice for every client.

    A client is advised to train alone if its predicted gain is negative. Otherwise, it is advised to use the method's
    personal or shared model, whichever is predicted to be better.
    """
    read = difference_table(outcome.results, method, ALONE_METHOD, DECIDING_PART, sign)
    kept = difference_table(outcome.results, method, ALONE_METHOD, ESTIMATING_PART, sign)
    personal = _personal_gains(outcome, method, sign)
    gains = np.full(fed.n, math.nan) if read is None else shrink_gains(read)
    advice = []
    for k, name in enumerate(fed.names):
        alone = outcome.racing == (ALONE_METHOD,) if math.isnan(gains[k]) else gains[k] < 0
        choice = Choice.ALONE if alone else Choice.TUNE if personal[k] > 0 else Choice.JOIN
        values = np.array([]) if kept is None else kept[:, k]
        half = _client_half_width(values)
        estimate = float(values.mean()) if values.size else math.nan
        advice.append(ClientAdvice(name, choice, float(gains[k]), estimate, half))
    return tuple(advice)


def _personal_gains(outcome: RaceOutcome, method: str, sign: float) -> Any:
    """Return the predicted gain of the personal over the shared model, ``[clients]``.

    The result is 1 or -1 if only one of the two models exists.
    """
    results = [result for (label, _), result in outcome.results.items() if label == method]
    pairs = [(one.values(DECIDING_PART, "personal"), one.values(DECIDING_PART, "global")) for one in results]
    personal, shared = pairs[0]
    if personal is None or shared is None:
        scores = personal if personal is not None else shared
        return np.full(0 if scores is None else len(scores), -1.0 if personal is None else 1.0)
    return shrink_gains(np.array([sign * (a - b) for a, b in pairs if a is not None and b is not None]))


def _client_half_width(values: Any) -> float:
    """Return the half-width of the confidence interval for the mean of a client's values across seeds."""
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    from scipy.stats import t  # slow to import

    return float(t.isf(INTERVAL_LEVEL / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def _record_gain(gap: PairedDifference | None) -> dict[str, float | None] | None:
    return (
        None
        if gap is None
        else {"mean": finite_or_none(gap.mean), "half": finite_or_none(gap.half_width()), "clients": gap.clients}
    )


def _markdown_cell(value: float) -> float | str:
    return round(value, 12) if math.isfinite(value) else ""


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_replace_nonfinite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
