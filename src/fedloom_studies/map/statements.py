"""State what the records of the map support: the advice that comes first, and sentences on every setup."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fedloom.formats import fixed, pair, percent, significant
from fedloom.report import Estimate, TestedDifference, differences
from fedloom_studies.map.judge import SetupVerdict, Standing
from fedloom_studies.map.references import References, models_alone
from fedloom_studies.map.setups import MARKS, POOLED

FOLDER = "map"
"""Beside the page: a page and pictures per setup, and the table."""
WANTED = 3
"""Points that every setup should show; one that cannot is marked."""
NONE = TestedDifference(math.nan, math.nan, math.nan, math.nan, significant=False, seeds=0)
"""The comparison of methods without a result."""


def advice(verdicts: Sequence[SetupVerdict], references: References) -> Iterator[str]:
    """Rows of the table that comes first: what to take in each setup, what it gains and what it costs.

    That is the best of those significantly better than the better of local and FedAvg; without any, that one. Gains
    are means over clients and seeds with the plain 95 % interval over seeds. Where data are a table, training alone is
    the best model of a client alone, those of scikit-learn included. The largest gains come first.
    """
    rows: list[tuple[float, str]] = []
    for j in verdicts:
        local, fedavg = (j.of(method) for method in MARKS[:2])
        if local is None or fedavg is None:
            continue
        chosen = next((s for s in rivals_of(j) if s.better), None) or j.of(j.reference)
        assert chosen is not None
        mean = chosen.figures["mean"]
        alone, best = max(models_alone(j, references).items(), key=lambda model: model[1].mean)
        marks = {fedavg.method: fedavg.figures["mean"], alone: best}
        gains = {mark: Estimate(differences(mean, figure)) for mark, figure in marks.items()}
        cells = ["-" if mark == chosen.method else signed(gain) for mark, gain in gains.items()]
        cells[1] += "" if alone == local.method else f" ({alone})"
        times = chosen.figures["gradients"].mean / fedavg.figures["gradients"].mean
        sent = chosen.figures["bytes"].mean / 1e6
        megabytes = f"{significant(sent, 3)} MB" if sent else "nothing sent"
        cost = f"{significant(times, 2)} times FedAvg's gradients, {megabytes}"
        link = f"[{j.setup.title}]({FOLDER}/{j.setup.name}.md)"
        better = "" if chosen.better else " (no method is clearly better)"
        largest = max(gain.mean for gain in gains.values())
        rows.append((largest, f"| {link} | {chosen.method}{better} | {' | '.join(cells)} | {cost} |"))
    if not rows:
        return
    yield "| your clients | take | points over FedAvg | points over training alone | what it costs |"
    yield "|---|---|---|---|---|"
    yield from (row for _, row in sorted(rows, key=lambda row: -row[0]))
    yield ""
    yield (
        "The largest gains come first. ± is half of the plain 95 % interval over seeds; whether a method is clearly "
        "better is tested with Holm's correction."
    )


def finding(verdicts: Sequence[SetupVerdict]) -> str:
    """The page's first paragraphs: where a method is significantly better than the better of local and FedAvg."""
    whole = [j for j in verdicts if j.reference]
    if not whole:
        return "No setup has results of both local and FedAvg yet."
    won = [(j.setup.title, better) for j in whole if (better := [s for s in rivals_of(j) if s.better])]
    none = len(whole) - len(won)
    first = (
        f"**In {none} of {len(whole)} setups no method is significantly better than the better of local training and "
        "FedAvg.**"
    )
    rest = ["\n".join(f"- *{title}*: {listed(s.method for s in better)}" for title, better in won)] if won else []
    tested = [j for j in whole if math.isfinite(j.visible)]
    blind = sum(100 * j.visible > WANTED for j in tested)
    last = f"In {blind} of {len(tested)} setups a method of median spread cannot show {WANTED} points."
    return "\n\n".join([f"{first} Better are:" if rest else first, *rest, *([last] if tested else [])])


def rivals_of(j: SetupVerdict) -> list[Standing]:
    """Choose the standings but those of local, FedAvg and pooled data."""
    return [s for s in j.standings if s.method not in MARKS]


def sentences(j: SetupVerdict) -> list[str]:
    """Three sentences that the records of a setup support, and what it can show; one where they support none."""
    if not j.reference:
        return [f"Not run to the end: {len(j.records)} cells, local and FedAvg not both." if j.records else "Not run."]
    local, fedavg = (j.of(method) for method in MARKS[:2])
    assert local is not None
    assert fedavg is not None
    gain = fedavg.gain or -(local.gain or NONE)
    first = (
        f"FedAvg reaches {in_percent(fedavg.figures['mean'])}, local training {in_percent(local.figures['mean'])}: "
        f"{percent(fedavg.figures['gainers_local'].mean)} of the clients gain from FedAvg, the mean change is "
        f"{signed(gain)} points{'' if gain.significant else ', not significant'}."
    )
    rivals = rivals_of(j)
    won, lost = [s for s in rivals if s.better], [s for s in rivals if s.worse]
    named = f" Better {'is' if len(won) < 2 else 'are'} {listed(_gain(s) for s in won)}." if won else ""
    second = (
        f"Of {len(rivals)} other methods {len(won) or 'none'} {'is' if len(won) < 2 else 'are'} significantly better "
        f"than the better of the two, and {len(lost) or 'none'} {'is' if len(lost) < 2 else 'are'} significantly "
        f"worse.{named}"
    )
    top, *behind = j.rivals
    level = [s for s in behind if s.level]
    if level:
        sent = min(s.figures["bytes"].mean for s in (top, *level))
        frugal = [s.method for s in (top, *level) if s.figures["bytes"].mean == sent]
        have = "has" if len(frugal) == 1 else "have"
        each = " each" if len(frugal) > 1 else ""
        least = f"the least traffic, {significant(sent / 1e6, 3)} MB{each}" if sent else "no traffic"
        methods = "the two" if len(level) == 1 else f"these {len(level) + 1} methods"
        beside = (
            f"{len(level)} of the {len(behind)} others {'is' if len(level) == 1 else 'are'} level with it. "
            f"Of {methods}, {enumerated(frugal)} {have} {least}."
        )
    else:
        beside = f"It is significantly better than each of the {len(behind)} others."
    best = f"The best mean is that of {top.method}, {in_percent(top.figures['mean'])}."
    third = f"{best} {beside}{_pooled(j.of(POOLED))}"
    return [first, second, third, *_visible(j)]


def _visible(j: SetupVerdict) -> Iterator[str]:
    """Yield the sentence on the smallest difference that a setup can show; none where nothing is tested."""
    if math.isfinite(j.visible):
        points = f"{fixed(100 * j.visible, 1)} points"
        enough = 100 * j.visible <= WANTED
        shown = f"shows differences of {points} and more." if enough else f"*shows nothing below {points}.*"
        yield f"A method of median spread {shown}"


def _pooled(standing: Standing | None) -> str:
    return f" One model on the pooled data reaches {in_percent(standing.figures['mean'])}." if standing else ""


def joined(values: Iterable[object]) -> str:
    """Join values with commas."""
    return ", ".join(map(str, values))


def enumerated(items: Sequence[str]) -> str:
    """Join items with commas, the last two with "and"."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def _gain(s: Standing) -> str:
    twice = {True: ", seen twice", False: ", not confirmed", None: ""}[s.confirmed]
    return f"{s.method} {signed(s.gain or NONE)}{twice}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Join the first names with commas, and count the others."""
    items = list(names)
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def share_of_cells(run: int, cells: int) -> str:
    """Write how many of a protocol's cells have a record: 9 of 12 cells so far, or all 12 cells."""
    return f"all {cells} cells" if run == cells else f"{run} of {cells} cells so far"


def signed(difference: Estimate | TestedDifference) -> str:
    """Write a mean with its sign and half of its interval, in points."""
    return ("+" if difference.mean > 0 else "") + in_percent(difference)


def in_percent(estimate: Estimate | TestedDifference | None) -> str:
    """Write a mean and half of its interval, in points; "-" without one."""
    if estimate is None or not math.isfinite(estimate.mean):
        return "-"
    return pair(fixed(100 * estimate.mean, 1), fixed(100 * estimate.half, 1) if math.isfinite(estimate.half) else "")
