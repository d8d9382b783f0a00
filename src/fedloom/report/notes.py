"""What a reader must know before believing the numbers."""

from __future__ import annotations

import re
from html import escape

import numpy as np

from fedloom.report.numbers import Row, leading_metric, run_of, seeds_of
from fedloom.report.reading import Run
from fedloom.report.robustness import share_of
from fedloom.report.tables import plain

SHOWN = 4
"""Further notes are folded away."""


def note_list(runs: list[Run], rows: list[Row]) -> str:
    """The notes as HTML: the first ones open, the others behind a fold."""
    lines = [f"<li>{escape(note)}</li>" for note in notes(runs, rows)]
    if not lines:
        return ""
    shown = lines if len(lines) <= SHOWN + 1 else lines[:SHOWN]
    rest = lines[len(shown) :]
    more = f"<details><summary>{len(rest)} more notes</summary><ul>{''.join(rest)}</ul></details>" if rest else ""
    return f'<div class="notes" role="note" aria-label="Notes"><ul>{"".join(shown)}</ul>{more}</div>'


def notes(runs: list[Run], rows: list[Row]) -> list[str]:
    """One sentence each; those of this report first, then the warnings of the runs."""
    found = [note for run in runs for note in _of_run(run, [row for row in rows if run_of(runs, row) is run], rows)]
    where = {id(run): f"{run.label}: " if len(runs) > 1 else "" for run in runs}
    warnings = [where[id(run)] + warning for run in runs for warning in _merged(run.summary.warnings)]
    texts = [f"{where[id(run)]}{text}" for run, text in found] + warnings
    return list(dict.fromkeys(texts))


def _of_run(run: Run, own: list[Row], rows: list[Row]) -> list[tuple[Run, str]]:
    texts = [_odd(own), _attack(run), _work(own), *_clients(run, own), _dropped(run), _seeds(run)]
    if run.summary.select_on == "test":
        texts.insert(0, "Hybrid models were chosen on test data (select_on = test): their results are optimistic.")
    return [(run, text) for text in texts if text]


def _odd(own: list[Row]) -> str:
    odd = dict.fromkeys(f"{row.method} {row.status}" for row in own if not row.done)
    if not odd:
        return ""
    return f"Not every run came to its end: {'; '.join(odd)}. Seeds that diverged or failed have no result."


def _attack(run: Run) -> str:
    if not share_of(run):
        return ""
    words = f"{share_of(run):.0%} of the clients attack ({run.options['attack']['kind']}). "
    if any(record.attackers for record in run.summary.runs):
        return words + "All figures and charts are of the other, benign clients."
    return (
        words
        + "Means are of the benign clients; this older run does not say who attacks, so charts of clients show all."
    )


def _work(own: list[Row]) -> str:
    work = [row.figures["samples_backward"].mean for row in own if row.done and "samples_backward" in row.figures]
    if not work or max(work) <= 1.01 * min(work):
        return ""
    return (
        f"The methods did not do equal work: {plain(min(work))} to {plain(max(work))} samples backward. Compare them "
        "by gradients of samples too."
    )


def _clients(run: Run, own: list[Row]) -> list[str]:
    lead = leading_metric([run])
    empty = max((_clients_without(run, row, lead) for row in own), default=0)
    if not empty or any("test part" in warning for warning in run.summary.warnings):
        return []
    return [f"Clients without a test result, left out of the means: up to {empty} of {run.clients}."]


def _clients_without(run: Run, row: Row, name: str) -> int:
    """Benign clients without a value at the last round, over the seeds that have a result."""
    counts = [0]
    for key in run.series:
        about = (key.method, key.model, key.part, key.metric)
        points = (
            run.benign(key) if about == (row.method, row.model, "test", name) and key.seed not in row.lost else None
        )
        if points is not None and len(points.round):
            counts.append(int(np.isnan(points.value[points.round == points.round[-1]]).sum()))
    return max(counts)


def _dropped(run: Run) -> str:
    dropped = sum(float(points.value[-1]) for key, points in run.totals.items() if key.metric == "dropped")
    return f"{plain(dropped)} uploads were dropped (not finite, out of bounds, late or lost)." if dropped else ""


def _seeds(run: Run) -> str:
    one = any(len(seeds_of(run, method)) == 1 for method in run.methods)
    return "One seed only: no intervals, and no winner can be decided." if one else ""


def _merged(warnings: tuple[str, ...]) -> list[str]:
    """Warnings that several seeds share, once with all of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for warning in warnings:
        match = re.fullmatch(r"(.+), seed (\d+): (.*)", warning, re.DOTALL)
        who, seed, text = match.groups() if match else ("", "", warning)
        found.setdefault((who, text), []).append(seed)
    return [
        f"{who}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: {text}" if who else text
        for (who, text), seeds in found.items()
    ]
