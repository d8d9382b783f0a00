"""Sections of the map's pages about gains and losses of methods at equal gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedloom.formats import format_fixed, format_options, format_significant
from fedloom.lab.report import DifferenceTest, run_family_tests, seed_differences
from fedloom_studies.map.budget import EQUAL_GRADIENTS_TOLERANCE
from fedloom_studies.map.judge import SetupVerdict, judge_setup
from fedloom_studies.map.records import DONE_STATUS, REUSED_STATUS, CellRecord, fill_reused, stale_reason
from fedloom_studies.map.setups import REFERENCE_METHODS, Cell, Protocol, Setup, list_methods
from fedloom_studies.map.statements import (
    MAP_FOLDER,
    format_signed,
    join_with_and,
    join_with_commas,
    list_names,
    list_rivals,
    setup_sentences,
    share_of_cells,
    state_result,
    write_percent,
)

GRADIENTS_PROTOCOL: Protocol = "gradients"
Records = Mapping[tuple[str, str], CellRecord]
EQUAL_GRADIENTS_TEXT = """\
This protocol compares FedAvg, local training, FedAvg-FT and {picked} other methods. A rule selected these methods in
advance. Every run computes as many gradients as FedAvg's run with equal rounds, to within 10 %. This budget includes
work before the first round and after the last round, and determines the number of rounds.{dearer} All methods are tuned
again with the same trials, seeds and data. If a method already computes as many gradients as FedAvg with equal rounds,
its runs are reused or repeated, and the change in its mean is not tested. The table is based on {cells}. Of these,
{reused} were reused and {repeated} were repeated. The columns *lower* and *higher* list the methods whose mean differs
significantly from their mean with equal rounds. The paired t-tests across seeds use Holm's correction, which covers all
methods of a federation with a different number of gradients."""


class BothProtocols(NamedTuple):
    """Results in one setup under both protocols.

    Attributes:
        rounds: verdicts at equal rounds.
        gradients: verdicts at equal gradients.
        records: records at equal gradients, as originally written, keyed by method. Reused records contain no values.
        changes: mean at equal gradients minus mean at equal rounds, for every method whose work differs. All
            differences form one family of tests.
    """

    rounds: SetupVerdict
    gradients: SetupVerdict
    records: Mapping[str, CellRecord]
    changes: dict[str, DifferenceTest]

    @property
    def repeated(self) -> list[str]:
        """Return the methods that were rerun even though their work is the same as at equal rounds."""
        again = [
            name for name, record in self.records.items() if record.status == DONE_STATUS and name not in self.changes
        ]
        return [name for name in again if self.rounds.find(name) is not None]

    def changed(self, sign: int) -> list[str]:
        """Return the methods whose change is significant and has the given sign, largest change first."""
        clear = [(name, c) for name, c in self.changes.items() if c.significant and sign * c.mean > 0]
        return [
            f"{name} {format_signed(change)}" for name, change in sorted(clear, key=lambda item: -abs(item[1].mean))
        ]


def compare_protocols(rounds: SetupVerdict, first: Records, second: Records) -> BothProtocols:
    """Compare the results of a setup at equal gradients with those at equal rounds, with the setup's first seeds.

    Args:
        rounds: the setup's verdicts at equal rounds.
        first: all records at equal rounds.
        second: all records at equal gradients.
    """
    setup = replace(rounds.setup, plan=())  # both protocols include the first seeds
    rounds, gradients = (
        judge_setup(setup, first) if rounds.setup.plan else rounds,
        judge_setup(setup, fill_reused(second, first)),
    )
    recorded = {method: record for (name, method), record in second.items() if name == rounds.setup.name}
    means, fedavg = {}, rounds.find(REFERENCE_METHODS[1])
    for s in gradients.standings:
        before, reused = rounds.find(s.method), recorded[s.method].status == REUSED_STATUS
        if before and not reused and not (fedavg and _is_same_work(before.record, fedavg.record)):
            means[s.method] = seed_differences(s.figures["mean"], before.figures["mean"])
    return BothProtocols(rounds, gradients, recorded, run_family_tests(means))


def _is_same_work(one: CellRecord, fedavg: CellRecord) -> bool:
    """Return True if a method computed as many gradients as FedAvg with every seed."""
    spent = [(series.gradients[-1], fedavg.seeds[seed].gradients[-1])
             for seed, series in one.seeds.items() if seed in fedavg.seeds]  # fmt: skip
    return all(abs(samples / fedavgs - 1) <= EQUAL_GRADIENTS_TOLERANCE for samples, fedavgs in spent)


def changes_in_words(c: BothProtocols) -> str:
    """Return sentences about methods whose means at equal gradients and at equal rounds differ significantly."""
    if not c.changes:
        return ""
    lower, higher = c.changed(-1), c.changed(1)
    named = [f" {word}: {list_names(names)}." if names else ""
             for word, names in (("Lower", lower), ("Higher", higher))]  # fmt: skip
    return (
        f"{len(c.changes)} methods compute more or fewer gradients than FedAvg with equal rounds. With equal "
        f"gradients, {len(lower) or 'no method'} {'is' if len(lower) < 2 else 'are'} significantly lower, and "
        f"{len(higher) or 'no method'} {'is' if len(higher) < 2 else 'are'} significantly higher.{''.join(named)}"
    )


def protocol_summary_lines(comparisons: Sequence[BothProtocols]) -> Iterator[str]:
    """Yield lines for the map's page: the protocol, and a row for every setup that has results for both baselines."""
    methods = list_methods(GRADIENTS_PROTOCOL)
    records = [record for c in comparisons for name, record in c.records.items() if name in methods]
    yield from ("## At equal gradients", "")
    yield EQUAL_GRADIENTS_TEXT.format(
        picked=len(methods) - 3, cells=share_of_cells(len(records), len(methods) * len(comparisons)),
        reused=sum(record.status == REUSED_STATUS for record in records), dearer=_costlier_sentence(comparisons),
        repeated=sum(len(c.repeated) for c in comparisons) or "none",
    )  # fmt: skip
    begun = [c for c in comparisons if c.gradients.reference]
    if begun:
        titles = ["your clients", "results", "best mean", "better than the baseline", "lower", "higher"]
        yield from ("", f"| {' | '.join(titles)} |")
        yield "|---|---|---|---|---|---|"
    for c in begun:
        j = c.gradients
        top, better = j.standings[0], list_names(s.method for s in list_rivals(j) if s.better)
        link = f"[{j.setup.title}]({MAP_FOLDER}/{j.setup.name}.md#at-equal-gradients)"
        outside = len(c.records.keys() - set(methods))
        count = f"{len(c.records) - outside} of {len(methods)}{f' and {outside} more' if outside else ''}"
        shown = [link, count, f"{top.method} {write_percent(top.figures['mean'])}",
                 better or "none", list_names(c.changed(-1)) or "none", list_names(c.changed(1)) or "none"]  # fmt: skip
        yield f"| {' | '.join(shown)} |"
    waiting = [c.rounds.setup.name for c in comparisons if c not in begun]
    if waiting:
        yield from (
            "",
            f"To run the missing federations ({join_with_commas(waiting)}), use "
            "`fedloom map --protocol gradients --setup NAME`.",
        )
    yield ""


def _costlier_sentence(comparisons: Sequence[BothProtocols]) -> str:
    """Return a sentence about the methods that compute over 10 % more gradients than FedAvg.

    A single round of these methods alone exceeds the budget.
    """
    named = []
    for c in comparisons:
        fedavg = c.gradients.find(REFERENCE_METHODS[1])
        times = {s.method: s.figures["gradients"].mean / fedavg.figures["gradients"].mean
                 for s in c.gradients.standings if fedavg}  # fmt: skip
        methods = [
            f"{name} (by a factor of {format_significant(share, 2)})" for name, share in times.items() if share > 1.1
        ]
        if methods:
            named.append(f"{join_with_and(methods)} in *{c.rounds.setup.title}*")
    return (
        f" A run lasts at least one round, so some methods exceed the budget: {join_with_and(named)}." if named else ""
    )


def equal_section(c: BothProtocols) -> Iterator[str]:
    """Yield lines for a setup's page: sentences, a row for each method, and the methods that were not run."""
    setup, j = c.rounds.setup, c.gradients
    yield from ("## At equal gradients", "", " ".join([*setup_sentences(j), changes_in_words(c)]).strip())
    if j.standings:
        titles = [
            "equal rounds",
            "equal gradients",
            "change",
            "rounds",
            "gradients / FedAvg's gradients",
            "chosen settings",
        ]
        yield from ("", f"| method | {' | '.join(titles)} | remarks |", f"|{'---|' * (len(titles) + 2)}")
    fedavg = j.find(REFERENCE_METHODS[1])
    for s in j.standings:
        before, change = c.rounds.find(s.method), c.changes.get(s.method)
        rounds = np.mean([series.rounds[-1] for series in s.record.seeds.values()])
        share = s.figures["gradients"].mean / fedavg.figures["gradients"].mean if fedavg else float("nan")
        shown = [s.method, write_percent(before.figures["mean"] if before else None), write_percent(s.figures["mean"]),
                 format_signed(change) if change else "-", format_fixed(float(rounds), 0),
                 format_significant(share, 3) if fedavg else "-",
                 format_options(s.record.chosen, 3), _method_notes(setup, c, s.method)]  # fmt: skip
        yield f"| {' | '.join(shown)} |"
    yield ""
    for record in c.records.values():
        if record.status not in (DONE_STATUS, REUSED_STATUS):
            yield state_result(record)
    missing = [name for name in list_methods(GRADIENTS_PROTOCOL) if name not in c.records]
    if missing:
        named = join_with_commas(missing) if c.records else "all methods"
        yield f"- To run the missing methods ({named}), use `fedloom map --protocol gradients --setup {setup.name}`."
    yield ""


def _method_notes(setup: Setup, c: BothProtocols, method: str) -> str:
    """Return remarks on a method: a stale or reused record, and its significant changes and gains."""
    record, standing, change = c.records[method], c.gradients.find(method), c.changes.get(method)
    old = stale_reason(Cell(setup, method, record.space, GRADIENTS_PROTOCOL), record)
    remarks = [f"stale ({old})"] if old else []
    remarks += ["reused runs"] if record.status == REUSED_STATUS else []
    remarks += ["repeated runs with the same number of gradients"] if method in c.repeated else []
    if standing is not None and (standing.better or standing.worse):
        remarks.append(f"{standing.verdict} than the baseline")
    if change is not None and change.significant:
        remarks.append(f"significantly {'higher' if change.mean > 0 else 'lower'} than with equal rounds")
    return ", ".join(remarks)
