"""Wider models: closed-form heads on more features, compared with methods that train a model of the same width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedloom.formats import write_total
from fedloom.lab.report import DifferenceTest, pair_verdict, run_family_tests, seed_differences
from fedloom_studies.map.judge import SetupVerdict, judge_setup
from fedloom_studies.map.records import DONE_STATUS, CellRecord, stale_reason
from fedloom_studies.map.setups import Cell, Setup, wider_heads
from fedloom_studies.map.statements import format_signed, join_with_and, share_of_cells, state_result, write_percent

Records = Mapping[tuple[str, str], CellRecord]
WIDER_TEXT = """\
A closed-form head uses only the features of an untrained network, so {heads} also run with a wider model:
{model}{size}. The federation's regular model is {own}. The trials, the search spaces and the first seeds are the same
as above. The tests above and the mean ranks do not include the results of the wider model."""
MODELS_DIFFER_TEXT = (
    "This comparison uses paired t-tests across the common seeds, with Holm's correction. A difference may be due to "
    "the wider model alone."
)


def wider_section(j: SetupVerdict, wider: Setup, records: Records) -> Iterator[str]:
    """Yield the lines about wider models for the page of a setup.

    Args:
        j: verdicts on the methods with the setup's own model.
        wider: the setup with the wider model.
        records: records of all methods with wider models.
    """
    widened = judge_setup(wider, records)
    heads = [s for s in widened.standings if s.method in wider_heads()]
    sizes = {record.parameters for record in widened.records.values() if record.parameters}
    size = f", {join_with_and([write_total(size) for size in sorted(sizes)])} parameters" if sizes else ""
    yield from ("## Wider models", "")
    heads_run = join_with_and(wider_heads())
    yield WIDER_TEXT.format(heads=heads_run, model=wider.network, own=j.setup.network, size=size).replace("\n", " ")
    recorded = sum(method in widened.records for method in wider.methods)
    if recorded < len(wider.methods):
        command = f"To run the others, use `fedloom map --wider --setup {wider.name}`."
        yield from ("", f"{share_of_cells(recorded, len(wider.methods))}. {command}")
    reference = j.find(j.reference)
    if not heads or reference is None:
        yield ""
        return
    gains = run_family_tests({s.method: seed_differences(s.figures["mean"], reference.figures["mean"]) for s in heads})
    baseline = f"{reference.method} with the regular model, the baseline above"
    yield from ("", f"{_state_gains(gains, baseline)} {MODELS_DIFFER_TEXT}")
    yield from ("", " ".join(_same_width_sentences(widened)))
    titles = ["regular model", "wider model", f"gain over {reference.method} with the regular model"]
    titles += [f"gain over {widened.reference} with the wider model"] if widened.reference else []
    yield from ("", f"| method | {' | '.join(titles)} |", f"|{'---|' * (1 + len(titles))}")
    for s in widened.standings:
        narrow, gain = j.find(s.method), gains.get(s.method)
        cells = [write_percent(narrow.figures["mean"]) if narrow else "-", write_percent(s.figures["mean"]),
                 f"{format_signed(gain)}, {pair_verdict(gain, higher=True)}" if gain else "-"]  # fmt: skip
        if widened.reference:
            cells.append(f"{format_signed(s.gain)}, {s.verdict}" if s.gain else "baseline")
        stale = stale_reason(Cell(wider, s.method, s.record.space), s.record)
        yield f"| {s.method}{f' (stale: {stale})' if stale else ''} | {' | '.join(cells)} |"
    yield ""
    for record in widened.records.values():
        if record.status != DONE_STATUS:
            yield state_result(record)
    yield ""


def _state_gains(gains: Mapping[str, DifferenceTest], baseline: str) -> str:
    """Return a sentence that lists the gains of methods over a baseline, with their verdicts."""
    listed = [f"{method} {format_signed(gain)} ({pair_verdict(gain, higher=True)})" for method, gain in gains.items()]
    return f"Gains over {baseline}: {join_with_and(listed)}."


def _same_width_sentences(widened: SetupVerdict) -> Iterator[str]:
    """Yield sentences that compare closed-form heads with methods that train the same wider model."""
    if not widened.reference:
        yield "No method that trains the wider model was run in this federation."
        return
    tests = {s.method: s.gain for s in widened.standings if s.gain and s.method in wider_heads()}
    baseline = f"{widened.reference} with the wider model, the better of local training and FedAvg"
    yield _state_gains(tests, baseline)
    place, best = next((k, s) for k, s in enumerate(widened.standings, 1) if s.method in wider_heads())
    yield (
        f"The best closed-form head ({best.method}, {write_percent(best.figures['mean'])} %) has rank {place} among "
        f"the means of {len(widened.standings)} methods with the wider model."
    )


def wider_bullet(setups: Sequence[Setup], records: Records) -> str:
    """Return the lines about wider models for the map's page, or "" if no setup has a wider model."""
    if not setups:
        return ""
    heads, counts = wider_heads(), [len(setup.methods) for setup in setups]
    wanted = [(setup.name, method) for setup in setups for method in setup.methods]
    results = share_of_cells(sum(key in records for key in wanted), len(wanted))
    return (
        f"- **Wider models.** The closed-form heads {join_with_and(heads)} use the features of an untrained network. "
        f"In {len(setups)} federations, they also run with a wider model ({results}). In {counts.count(max(counts))} "
        f"of these federations, {max(counts) - len(heads)} other methods run with the wider model, too. Each "
        "federation's page compares the results. The other tests and the mean ranks do not include them.\n\n"
    )
