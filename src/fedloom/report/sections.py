"""The words and tables of the page, as HTML; every recorded text is escaped."""

from __future__ import annotations

import math
from dataclasses import replace
from html import escape

from fedloom.report.compare import SEEDS, Winner, tasks, winners
from fedloom.report.cost import REACHED
from fedloom.report.naming import COSTS, figure
from fedloom.report.numbers import Row, leading_metric, seeds_of
from fedloom.report.reading import Run
from fedloom.report.tables import DASH, cell, columns_of, plain, rounded_pair

TIE = 1e-6
"""Results that differ by less than this share are called equal."""


def model_tag(model: str) -> str:
    """The model's name with its coloured dot."""
    return f'<span class="model" data-model="{escape(model)}">{escape(model)}</span>' if model else ""


def facts(runs: list[Run], rows: list[Row]) -> str:
    """One line: how many methods, seeds, clients and rounds, and how large the model is."""

    def span(values: list[int]) -> str:
        low, high = min(values, default=0), max(values, default=0)
        return f"{low}" if low == high else f"{low} to {high}"

    records = [record for run in runs for record in run.summary.runs]
    methods = len({(row.run, row.method) for row in rows})
    seeds = span([len(seeds_of(run, method)) for run in runs for method in run.methods])
    parts = [
        f"{len(runs)} runs" if len(runs) > 1 else "",
        f"{methods} method{'s' * (methods != 1)}",
        f"{seeds} seed{'s' * (seeds != '1')}",
        f"{span([run.clients for run in runs])} clients",
        f"{max((record.rounds for record in records), default=0)} rounds",
        f"{plain(records[0].parameters)} parameters" if records and records[0].parameters else "",
    ]
    return " · ".join(part for part in parts if part)


def overview(runs: list[Run], rows: list[Row]) -> str:
    """A card per criterion: who leads, with what, and how sure that is; runs of other data or attacks apart."""
    lead = leading_metric(runs)
    parts = []
    several = tasks(runs, rows)
    for label, own_runs, found in several:
        own = found if len(own_runs) > 1 else [replace(row, run="") for row in found]
        cards = "".join(_card(winner, own) for winner in winners(own_runs, own, lead))
        title = f"<h3>{escape(label)}</h3>" if len(several) > 1 else ""
        parts.append(f'{title}<div class="cards" role="list">{cards}</div>')
    return "".join(parts)


def _card(winner: Winner, rows: list[Row]) -> str:
    criterion = winner.criterion
    head = f'<div class="card" role="listitem"><p class="what">{escape(criterion.title)}</p>'
    if winner.row is None:
        return f'{head}<p class="who">{DASH}</p><p class="sure">No method has a result with every seed.</p></div>'
    best = criterion.values[winner.row]
    row = rows[winner.row]
    if criterion.figure in REACHED:
        value, half = plain(best.mean * criterion.scale), ""
    else:
        value, half = cell(criterion.figure, best)
    unit = f" {criterion.unit}" if criterion.unit else ""
    interval = f' <span class="half">± {half}</span>' if half else ""
    return (
        f'{head}<p class="who">{escape(row.name)} {model_tag(row.model)}</p>'
        f'<p class="value">{value}{interval}{unit}</p><p class="sure">{_sure(winner, rows)}</p></div>'
    )


def _sure(winner: Winner, rows: list[Row]) -> str:
    criterion = winner.criterion
    if winner.runner_up is None:
        alone = "No other method comes to this result with every seed."
        return alone if criterion.figure in REACHED else "The only method with this result."
    other = rows[winner.runner_up]
    name = escape(f"{other.name} {other.model}".strip())
    unit = " points" if criterion.unit == "%" else f" {criterion.unit}" if criterion.unit else ""
    amount, half = rounded_pair(winner.lead * criterion.scale, winner.half * criterion.scale)
    amount += f" ± {half}" if half else ""
    lead = f"{amount}{unit} {'ahead of' if criterion.higher else 'below'} {name}"
    if abs(winner.lead) <= TIE * abs(criterion.values[winner.row or 0].mean):
        lead = f"equal to {name}"
    if not winner.decidable:
        seeds = f"{winner.seeds} common seed{'s' * (winner.seeds != 1)}"
        verdict = f"<b>Not decidable</b> with {seeds} ({SEEDS} are needed): {lead}."
    elif not winner.rivals:
        verdict = f"<b>Clear</b>: {lead}, and significantly better than every other."
    elif winner.runner_up in winner.rivals:
        more = len(winner.rivals) - 1
        rest = f"; {more} other{'s are' if more > 1 else ' is'} not clearly worse either" if more else ""
        verdict = f"<b>Not significant</b>: {lead}{rest}."
    else:
        verdict = f"<b>Not significant</b> against {len(winner.rivals)} of the others, though {lead}."
    return verdict + (" Provisional: some runs are unfinished." if winner.provisional else "")


def results(rows: list[Row]) -> str:
    """The result table: every row with its figures, status, work and traffic."""
    columns = columns_of(rows)
    if not columns:
        return "<p>No results have been recorded yet.</p>"
    lead = next(iter(columns))
    best = {name: _best(name, rows) for name in columns if name not in COSTS}
    heads = [("Method", "text"), ("Model", "text"), *((title, "") for title in columns.values())]
    cells = "".join(
        f'<th scope="col" class="{kind}"><button data-do="sort">{escape(title)}</button></th>' for title, kind in heads
    )
    span = _span(lead, rows)
    body = []
    for row in rows:
        remark = "" if row.done else f' <span class="odd">{escape(row.status)}</span>'
        line = [
            f'<th scope="row" data-value="{escape(row.name)}">{escape(row.name)}{remark}</th>',
            f'<td class="text" data-value="{escape(row.model)}">{model_tag(row.model)}</td>',
        ]
        for name in columns:
            estimate = row.figures.get(name)
            mean, half = cell(name, estimate)
            value = "" if estimate is None or not estimate.finite else f"{estimate.mean!r}"
            strong = ' class="best"' if estimate is not None and _equals(estimate.mean, best.get(name)) else ""
            shown = f"<span{strong}>{mean}</span>" + (f' <span class="half">± {half}</span>' if half else "")
            if name == lead and estimate is not None and 0 < len(estimate.finite) < len(estimate.by_seed):
                shown += f' <span class="odd">({len(estimate.finite)} of {len(estimate.by_seed)} seeds)</span>'
            line.append(f'<td data-value="{value}">{shown}{_bar(row, name, span) if name == lead else ""}</td>')
        body.append(f"<tr>{''.join(line)}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Results, scrolls sideways">'
        '<table class="results"><caption class="unseen">Mean over seeds with half the width of the 95 % interval; '
        "the best of a column in bold; methods without a remark ran to the end. Heads sort.</caption>"
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _equals(value: float, best: float | None) -> bool:
    return best is not None and abs(value - best) <= TIE * abs(best)


def _best(name: str, rows: list[Row]) -> float | None:
    """Best mean of a column; None where there is nothing to compare, or no direction is better."""
    means = [row.figures[name].mean for row in rows if name in row.figures and row.figures[name].finite]
    return (max if figure(name).higher else min)(means) if len(means) > 1 and figure(name).rated else None


def _span(name: str, rows: list[Row]) -> tuple[float, float]:
    means = [row.figures[name].mean for row in rows if name in row.figures and row.figures[name].finite] or [0.0]
    air = 0.2 * (max(means) - min(means)) or 1.0
    return min(means) - air, max(means) + air


def _bar(row: Row, name: str, span: tuple[float, float]) -> str:
    """A dot with its interval, on the scale of the whole column."""
    estimate = row.figures.get(name)
    if estimate is None or not estimate.finite:
        return ""

    def place(value: float) -> float:
        return 4 + 102 * min(1.0, max(0.0, (value - span[0]) / (span[1] - span[0])))

    half = 0.0 if math.isnan(estimate.half) else estimate.half
    low, mid, high = (place(v) for v in (estimate.mean - half, estimate.mean, estimate.mean + half))
    return (
        f'<svg class="bar" data-model="{escape(row.model)}" viewBox="0 0 110 14" aria-hidden="true">'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="7" y2="7" stroke="currentColor" stroke-width="1.5" opacity=".55"/>'
        f'<circle cx="{mid:.1f}" cy="7" r="3.5" fill="currentColor"/></svg>'
    )
