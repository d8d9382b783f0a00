"""Statements that the map's records support: first the recommendation, then sentences about each setup."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fedloom.formats import format_fixed, format_pair, format_percent, format_significant
from fedloom.lab.report import DifferenceTest, Estimate, pair_verdict, seed_differences
from fedloom.metrics import metric
from fedloom_studies.map.judge import DETECTABLE_GAIN, DETECTION_PROBABILITY, MethodStanding, SetupVerdict
from fedloom_studies.map.records import FAILED_STATUS, CellRecord
from fedloom_studies.map.references import References, models_alone
from fedloom_studies.map.setups import POOLED_METHOD, REFERENCE_METHODS

MAP_FOLDER = "map"
"""Folder for each setup's page and pictures, and for the table of all runs."""
DETECTABLE_GAIN_POINTS = format_fixed(100 * DETECTABLE_GAIN, 0)
NO_DIFFERENCE = DifferenceTest(math.nan, math.nan, math.nan, math.nan, significant=False, seeds=0)
"""Comparison that represents a method without a result."""


def advice_lines(verdicts: Sequence[SetupVerdict], references: References) -> Iterator[str]:
    """Yield the lines of the first table, which contains the recommendation for each setup, with its gain and cost.

    The recommended method is the best of those that are better than the baseline (the better of local training and
    FedAvg). If no method is better than the baseline, the baseline is recommended, provided that it is better than the
    other of the two, and that the setup would have detected a gain of `DETECTABLE_GAIN`. In all other cases, no method
    is recommended. For tables, training alone is represented by the best model that a single client can train,
    including scikit-learn models. The largest gains come first.
    """
    rows: list[tuple[float, str]] = []
    for j in verdicts:
        local, fedavg = (j.find(method) for method in REFERENCE_METHODS[:2])
        if local is None or fedavg is None:
            continue
        link, chosen = f"[{j.setup.title}]({MAP_FOLDER}/{j.setup.name}.md)", recommended_method(j)
        if chosen is None:
            rows.append(
                (
                    -math.inf,
                    f"| {link} | inconclusive | {planned_seeds_phrase(j)}{_state_better_reference(j)} | - | - | - |",
                )
            )
            continue
        mean = chosen.figures["mean"]
        alone, best = max(models_alone(j, references).items(), key=lambda model: model[1].mean)
        marks = {fedavg.method: fedavg.figures["mean"], alone: best}
        gains = {mark: Estimate(seed_differences(mean, figure)).mean for mark, figure in marks.items()}
        cells = [
            "-" if mark == chosen.method else format_fixed(100 * gain, 1, signed=True) for mark, gain in gains.items()
        ]
        cells[1] += "" if alone == local.method else f" ({alone})"
        times = chosen.figures["gradients"].mean / fedavg.figures["gradients"].mean
        sent = chosen.figures["bytes"].mean / 1e6
        megabytes = f"{format_significant(sent, 3)} MB" if sent else "no traffic"
        cost = f"{format_significant(times, 2)} times as many gradients as FedAvg, {megabytes}"
        gain = format_signed(chosen.gain) if chosen.gain else "no method is better"
        rows.append((max(gains.values()), f"| {link} | {chosen.method} | {gain} | {' | '.join(cells)} | {cost} |"))
    if not rows:
        return
    heads = ("your clients", "use", "gain over the baseline", "gain over FedAvg", "gain over local training")
    yield f"| {' | '.join(heads)} | cost |"
    yield "|---|---|---|---|---|---|"
    yield from (row for _, row in sorted(rows, key=lambda row: -row[0]))
    yield ""
    yield (
        "All methods train for the same number of rounds. [Another table](#at-equal-gradients) compares them after the "
        "same number of gradients. Gains are in percentage points, and rows are sorted by the largest gain. The "
        "verdict depends on the interval of the gain over the baseline. The gains in the next two columns were not "
        "tested. *Inconclusive* means that no method is better, but that there are too few seeds to rule out a gain of "
        f"{DETECTABLE_GAIN_POINTS} points."
    )


def recommended_method(j: SetupVerdict) -> MethodStanding | None:
    """Return the method that the results of a setup recommend, or None if there are too few seeds to decide."""
    if better := [s for s in list_rivals(j) if s.better]:
        return better[0]
    gaps = [s for s in j.standings if s.method in REFERENCE_METHODS[:2] and s.method != j.reference]
    return j.find(j.reference) if j.decides and all(s.worse for s in gaps) else None


def planned_seeds_phrase(j: SetupVerdict) -> str:
    """Return a phrase about the number of seeds that a setup needs, given the common spread of its methods' gains."""
    if not j.needed:
        return "too few results to plan the number of seeds"
    return f"{j.needed} seeds are needed to detect a difference of {DETECTABLE_GAIN_POINTS} points"


def _state_better_reference(j: SetupVerdict) -> str:
    """Return a sentence that states whether local training or FedAvg is better, or "" if this is undecided."""
    worse = [s for s in j.standings if s.method in REFERENCE_METHODS[:2] and s.worse]
    return (
        f". {j.reference} is better than {worse[0].method} ({format_signed(-(worse[0].gain or NO_DIFFERENCE))} points)"
        if worse
        else ""
    )


def finding_text(verdicts: Sequence[SetupVerdict]) -> str:
    """Render the page's first paragraphs, about the methods that are better than the baseline."""
    whole = [j for j in verdicts if j.reference]
    if not whole:
        return "No federation has results of both local training and FedAvg yet."
    won = [(j.setup.title, better) for j in whole if (better := [s for s in list_rivals(j) if s.better])]
    none = len(whole) - len(won)
    first = f"**In {none} of {len(whole)} federations, no method is better than the baseline.**"
    rest = ["\n".join(f"- *{title}*: {list_names(s.method for s in better)}" for title, better in won)] if won else []
    tested = [j for j in whole if j.needed]
    blind = sum(not j.decides for j in tested)
    powered = sum(j.decides and not any(s.better for s in list_rivals(j)) for j in tested)
    last = (
        f"In {blind} of {len(tested)} federations, there are too few seeds to detect a gain of "
        f"{DETECTABLE_GAIN_POINTS} points with a probability of {format_percent(DETECTION_PROBABILITY)}. In these "
        f"federations, an inconclusive verdict is not evidence against a method. Of the {none} federations without a "
        f"better method, {powered} have enough seeds."
    )
    return "\n\n".join(
        [
            f"{first} In the other federations, the following methods are better:" if rest else first,
            *rest,
            *([last] if tested else []),
        ]
    )


def list_rivals(j: SetupVerdict) -> list[MethodStanding]:
    """Return the results of all methods except local training, FedAvg and training on pooled data."""
    return [s for s in j.standings if s.method not in REFERENCE_METHODS]


def setup_sentences(j: SetupVerdict) -> list[str]:
    """Return three sentences that a setup's records support, followed by a sentence about its statistical power.

    If there are not enough records, a single sentence is returned.
    """
    if not j.reference:
        return [
            f"Incomplete: the {len(j.records)} results do not include both local training and FedAvg."
            if j.records
            else "Not run."
        ]
    local, fedavg = (j.find(method) for method in REFERENCE_METHODS[:2])
    assert local is not None
    assert fedavg is not None
    gain = fedavg.gain or -(local.gain or NO_DIFFERENCE)
    first = (
        f"The clients' mean {_name_metric(local)} is {write_percent(fedavg.figures['mean'])} % with FedAvg and "
        f"{write_percent(local.figures['mean'])} % with local training. FedAvg helps "
        f"{format_percent(fedavg.figures['gainers_local'].mean)} of the clients. Its mean difference from local "
        f"training is {format_signed(gain)} points ({pair_verdict(gain, higher=True)})."
    )
    rivals = list_rivals(j)
    won, lost = [s for s in rivals if s.better], [s for s in rivals if s.worse]
    lead = "better methods are" if len(won) > 1 else "better method is"
    named = f" The {lead} {list_names(_gain_text(s) for s in won)}." if won else ""
    rest = len(rivals) - len(won) - len(lost)
    second = (
        f"Of the {len(rivals)} other methods, {_count(len(won))} better than the baseline, and {_count(len(lost))} "
        f"worse. The verdict is inconclusive for {rest or 'no method'}.{named}"
    )
    top = j.rivals[0]
    third = (
        f"The method with the best mean is {top.method} ({write_percent(top.figures['mean'])} %)."
        f"{_pooled_sentence(j.find(POOLED_METHOD))}"
    )
    return [first, second, third, *_power_sentences(j)]


def _name_metric(standing: MethodStanding) -> str:
    title = metric(standing.record.metric).title
    return title if title.isupper() else title.lower()


def _power_sentences(j: SetupVerdict) -> Iterator[str]:
    """Yield a sentence that states how many seeds are needed to detect a relevant gain.

    If no gain was tested, nothing is yielded.
    """
    if j.needed:
        seeds, spread = len(j.seeds), format_fixed(100 * j.spread, 1)
        enough = planned_seeds_phrase(j) if j.decides else f"*{planned_seeds_phrase(j)}*"
        last = j.setup.stages[-1]
        more = (
            f" {len(last)} seeds are planned, but some methods have not run all of them yet."
            if seeds < len(last)
            else ""
        )
        yield (
            f"The gains have a standard deviation of {spread} points across seeds. With this spread, {enough}, "
            f"{'and' if j.decides else 'but only'} {seeds} were run.{more}"
        )


def _pooled_sentence(standing: MethodStanding | None) -> str:
    return (
        f" A single model trained on the pooled data scores {write_percent(standing.figures['mean'])} %."
        if standing
        else ""
    )


def _count(methods: int) -> str:
    return f"{methods or 'none'} {'is' if methods < 2 else 'are'}"


def join_with_commas(values: Iterable[object]) -> str:
    """Join values with commas."""
    return ", ".join(map(str, values))


def join_with_and(items: Sequence[str]) -> str:
    """Join items with commas, but the last two with "and"."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def state_result(record: CellRecord) -> str:
    """Return a list item that explains why a method has no result of its own."""
    status = record.status if record.status == FAILED_STATUS else f"is {record.status}"
    return f"- `{record.method}` {status}: {record.reason}"


def _gain_text(s: MethodStanding) -> str:
    twice = {True: ", seen twice", False: ", not confirmed", None: ""}[s.confirmed]
    return f"{s.method} ({format_signed(s.gain or NO_DIFFERENCE)}{twice})"


def list_names(names: Iterable[str], most: int = 5) -> str:
    """Join the first few names with commas, and state how many more there are."""
    items = list(names)
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def share_of_cells(run: int, cells: int) -> str:
    """Return the number of cells with a record, such as "9 of 12 results so far" or "all 12 results"."""
    return f"all {cells} results" if run == cells else f"{run} of {cells} results so far"


def format_signed(difference: Estimate | DifferenceTest) -> str:
    """Return a signed mean with the half-width of its confidence interval, in points."""
    return ("+" if difference.mean > 0 else "") + write_percent(difference)


def write_percent(estimate: Estimate | DifferenceTest | None) -> str:
    """Return a mean with the half-width of its confidence interval, in points.

    Return "-" if there is no mean to print.
    """
    if estimate is None or not math.isfinite(estimate.mean):
        return "-"
    return format_pair(
        format_fixed(100 * estimate.mean, 1),
        format_fixed(100 * estimate.half, 1) if math.isfinite(estimate.half) else "",
    )
