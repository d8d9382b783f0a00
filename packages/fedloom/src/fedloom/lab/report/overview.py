"""Top of the report page as HTML: key facts, notes, a card for each criterion, and the results table.

All text from the records is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from fedloom.formats import UNKNOWN_DASH, format_factor, format_interval, format_pair, format_percent, write_total
from fedloom.lab.report.charts.kit import find_off_axis_names
from fedloom.lab.report.charts.tradeoffs import COST_AXES
from fedloom.lab.report.comparison.conclusion import Conclusion
from fedloom.lab.report.comparison.contenders import Models, select_one_per_method
from fedloom.lab.report.comparison.criteria import Winner, find_winners, group_comparable_runs
from fedloom.lab.report.markup import render_part
from fedloom.lab.report.naming import COST_FIGURES, describe_figure, is_ratio, lowercase_title, metric
from fedloom.lab.report.numbers import MIN_SEEDS, Row, find_run, find_seeds, leading_metric
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import list_columns, render_cell

MAX_OPEN_NOTES = 4
"""Number of notes that are always visible. If there are more notes, the others are collapsed."""
UNEQUAL_WORK_RATIO = 1.1
"""Methods do equal work if their work is at most this multiple of the smallest amount, as in `fedloom tune`. A note
lists the methods whose work exceeds FedAvg's by a larger ratio."""
FIRST_COLUMNS = ("samples_backward", "bytes_up", "bytes_down", "seconds")
"""Work and traffic, whose columns come after the primary metric."""
MAX_COLUMNS = 6
"""Maximum number of columns, in addition to the primary metric and the status, that fit on a page of 1,280 pixels."""
MAX_NAMED_MISSING = 20
"""Maximum number of clients without a result that are listed by name."""
TIE_TOLERANCE = 1e-6
"""Relative difference below which two results are considered equal."""


def render_answer(conclusions: Sequence[Conclusion]) -> str:
    """Render the conclusions for the top of the page: the winner, differences, compared models and their costs."""
    parts = []
    for one in conclusions:
        first, *pairs = one.lines()
        ends = [line for line in (one.compared, one.cost) if line]
        parts.append((first, [line.strip() for line in pairs if line not in ends], " ".join(ends)))
    return render_part("answer", conclusions=parts) if parts else ""


def render_facts(runs: list[Run], rows: list[Row]) -> str:
    """Render a line with the numbers of methods, seeds, clients and rounds, and the size of the model."""

    def span(values: list[int]) -> str:
        low, high = min(values, default=0), max(values, default=0)
        return f"{low}" if low == high else f"{low} to {high}"

    records = [record for run in runs for record in run.summary.runs]
    measured = {(row.run, row.method): row.measured for row in rows}
    reached = [int(points.round.max()) for run in runs for points in run.series.values()]  # for unfinished runs

    def counted(number: str, what: str) -> str:
        return f"{number} {what}{'s' * (number != '1')}"

    parts = [
        f"{len(runs)} runs" if len(runs) > 1 else "",
        counted(f"{len({method for _, method in measured})}", "method"),
        counted(span([*measured.values()]), "seed"),
        counted(span([run.clients for run in runs]), "client"),
        counted(span([max([record.rounds for record in records] or reached, default=0)]), "round"),
        f"{write_total(records[0].parameters)} parameters" if records and records[0].parameters else "",
    ]
    return " · ".join(part for part in parts if part)


def render_cards(runs: list[Run], rows: list[Row], models: Models = "best-on-validation") -> str:
    """Render a card for each criterion, which shows the best method, its value and the certainty of its lead.

    Runs with different data or attacks are shown in separate groups of cards.

    Args:
        runs: runs that contain the rows.
        rows: rows of the results table, one for each model of each method.
        models: which of a method's models to compare. Only one model per method is compared, even if all models are
            requested.
    """
    lead, groups = leading_metric(runs), []
    for label, own_runs, task_rows in group_comparable_runs(runs, rows):
        card_rows = task_rows if len(own_runs) > 1 else [replace(row, run="") for row in task_rows]
        card_rows = select_one_per_method(own_runs, card_rows, models)
        groups.append((label, [_render_card(winner, card_rows) for winner in find_winners(own_runs, card_rows, lead)]))
    return render_part("cards", groups=groups)


def _render_card(winner: Winner, rows: list[Row]) -> dict[str, str]:
    criterion = winner.criterion
    if winner.row is None:
        why = "Every method with this metric diverged or failed with some seed."
        return {"what": criterion.title, "who": UNKNOWN_DASH, "value": "", "sure": why}
    best, row = criterion.values[winner.row], rows[winner.row]
    if criterion.figure in COST_AXES:
        value, half = write_total(best.mean * criterion.scale), ""
    else:
        value, half = render_cell(criterion.figure, best)
    return {
        "what": criterion.title, "who": row.name, "model": row.model, "value": value, "half": half,
        "unit": f" {criterion.unit}" if criterion.unit else "", "sure": significance_text(winner, rows),
    }  # fmt: skip


def significance_text(winner: Winner, rows: list[Row]) -> str:
    """Render a sentence, as HTML, that states how certain the winner's lead is."""
    criterion = winner.criterion
    equals = ", ".join(rows[i].name for i in winner.equals)
    same = f" The models of {equals} are the same." if equals else ""
    if winner.runner_up is None:
        alone = "No other method reaches this target in every seed."
        rest = "No other method has this metric from finished runs." if not same else same.strip()
        return alone if criterion.figure in COST_AXES else rest
    other = rows[winner.runner_up]
    name = f"{other.name} {other.model}".strip()
    unit = " points" if criterion.unit == "%" else f" {criterion.unit}" if criterion.unit else ""
    amount, half = format_interval(abs(winner.lead) * criterion.scale, winner.half * criterion.scale)
    behind = winner.lead < 0  # only over the common seeds: over all of its seeds, the winner is the best
    words = ("behind" if behind else "ahead of") if criterion.higher_is_better else ("above" if behind else "below")
    lead = f"{format_pair(amount, half)}{unit} {words} {name}" + " over the common seeds" * behind
    log = is_ratio(criterion.figure)
    if log:
        lead = (
            f"{format_factor(winner.lead if criterion.higher_is_better else -winner.lead, winner.half)} {name}'s"
            + " over the common seeds" * behind
        )
    if abs(winner.lead) <= TIE_TOLERANCE * (1.0 if log else abs(criterion.values[winner.row or 0].mean)):
        lead = f"equal to {name}"
    if not winner.seeds:
        verdict, reason = "Not tested", f": no common seed with {name} ({MIN_SEEDS} are needed)."
    elif not winner.decidable:
        seeds = f"{winner.seeds} common seed{'s' * (winner.seeds != 1)}"
        verdict, reason = "Not tested", f" with {seeds} ({MIN_SEEDS} are needed): {lead}."
    elif not winner.rivals:
        sound = "reaches this target" if criterion.figure in COST_AXES else "finished"
        compared = "every other method" + f" that {sound} in every seed" * winner.excluded
        verdict, reason = "Better", f" than {compared}: {lead}."
    elif winner.runner_up in winner.rivals:
        more = len(winner.rivals) - 1
        rest = f". {more} other method{'s are' if more > 1 else ' is'} not significantly worse" if more else ""
        verdict, reason = "Inconclusive", f": {lead}{rest}."
    else:
        verdict, reason = "Inconclusive", f" against {len(winner.rivals)} of the others, though {lead}."
    provisional = " Provisional: some runs are unfinished." if winner.provisional else ""
    return Markup("<b>{}</b>{}{}{}").format(verdict, reason, same, provisional)


def render_results(rows: list[Row], runs: Sequence[Run] = ()) -> str:
    """Render the tables of results: each row's mean, status and costs, and other metrics in a collapsed table.

    Args:
        rows: rows of the results table.
        runs: runs that contain the rows. The best row of a column is set in bold. It is chosen among rows with the
            same data and attack, or among all rows if no runs are given.
    """
    columns = list_columns(rows)
    if not columns:
        return "<p>No results have been recorded yet.</p>"
    lead, *other_rows = columns
    first = [name for name in FIRST_COLUMNS if name in columns]
    first += [name for name in other_rows if name not in first and name.endswith(("/worst10", "/variance"))]
    first = first[:MAX_COLUMNS]
    rest = [name for name in other_rows if name not in first]
    main = _render_results_table(rows, runs, {name: columns[name] for name in (lead, *first)}, lead, status=True)
    if not rest:
        return main
    more = _render_results_table(rows, runs, {name: columns[name] for name in rest}, lead, status=False)
    return f"{main}<details><summary>{len(rest)} more columns</summary>{more}</details>"


def _render_results_table(
    rows: list[Row], runs: Sequence[Run], columns: Mapping[str, str], lead: str, *, status: bool
) -> str:  # fmt: skip
    """Render a table that contains the given metrics.

    In the column of the primary metric, each value is also drawn as a bar. The status of each row is also shown.
    """
    groups = [peers for _, _, peers in group_comparable_runs(list(runs), rows)] if runs else [rows]
    rated = [name for name in columns if name not in COST_FIGURES]
    best = {
        (id(row), name): top for peers in groups for name in rated for top in [_best_mean(name, peers)] for row in peers
    }
    heads = [("Method", "text"), ("Model", "text"), *((title, "") for title in columns.values())]
    heads[3:3] = [("Status", "text")] if status else []
    apart = " and of runs with the same data and attack" if len(groups) > 1 else ""
    span, lines = _scale_ends(lead, rows), []
    for row in rows:
        cells = []
        for name in columns:
            estimate = row.figures.get(name)
            mean, half = render_cell(name, estimate)
            leads = row.sound and estimate is not None and _equals_best(estimate.mean, best.get((id(row), name)))
            value = "" if estimate is None or not estimate.finite else f"{estimate.mean!r}"
            shown = {"value": value, "best": leads, "mean": mean, "half": half, "seeds": "", "bar": None}
            if name == lead and estimate is not None and 0 < len(estimate.finite) < len(estimate.by_seed):
                shown["seeds"] = f"{len(estimate.finite)} of {len(estimate.by_seed)}"
            cells.append(shown | ({"bar": _bar_position(row, name, span)} if name == lead else {}))
        lines.append({
            "name": row.name, "model": row.model, "cells": cells, "odd": not row.is_complete or row.untested,
            "status": row.status if status and lead in columns else None,
        })  # fmt: skip
    name, kind = ("Results", "results") if status else ("More columns", "further")
    return render_part("results", name=name, kind=kind, apart=apart, heads=heads, rows=lines)


def _equals_best(value: float, best: float | None) -> bool:
    return best is not None and abs(value - best) <= TIE_TOLERANCE * abs(best)


def _best_mean(name: str, rows: list[Row]) -> float | None:
    """Return the best mean in a column among rows whose runs all have results.

    If rows cannot be ranked by this metric, return None.
    """
    means = [estimate.mean for row in rows if row.sound and (estimate := row.result(name)) is not None]
    return (
        (max if describe_figure(name).higher_is_better else min)(means)
        if len(means) > 1 and describe_figure(name).rated
        else None
    )


def _scale_ends(name: str, rows: list[Row]) -> tuple[float, float]:
    """Return the ends of a column's scale. Extreme outliers are disregarded."""
    means = {row.title: estimate.mean for row in rows if (estimate := row.result(name)) is not None}
    off = find_off_axis_names(means)
    near = [mean for title, mean in means.items() if title not in off] or [0.0]
    air = 0.2 * (max(near) - min(near)) or 1.0
    return min(near) - air, max(near) + air


def _bar_position(row: Row, name: str, span: tuple[float, float]) -> dict[str, Any] | None:
    """Return the position of a row's mean on a column's scale, together with its interval or its seeds.

    Return None if there is no value.
    """
    estimate = row.result(name)
    if estimate is None:
        return None

    def place(value: float) -> float:
        return round(4 + 102 * min(1.0, max(0.0, (value - span[0]) / (span[1] - span[0]))), 1)

    few = len(estimate.finite) < MIN_SEEDS
    half = 0.0 if few else estimate.half
    low, mid, high = (place(v) for v in (estimate.mean - half, estimate.mean, estimate.mean + half))
    seeds = [place(v) for v in estimate.finite.values()] if few else []
    return {"low": low, "mid": mid, "high": high, "seeds": seeds}


def note_list(runs: list[Run], rows: list[Row]) -> str:
    """Render the notes as HTML, with the first few visible and the others collapsed."""
    lines = report_notes(runs, rows)
    count = len(lines) if len(lines) <= MAX_OPEN_NOTES + 1 else MAX_OPEN_NOTES
    return render_part("notes", first=lines[:count], rest=lines[count:])


def report_notes(runs: list[Run], rows: list[Row]) -> list[str]:
    """Return notes of one sentence each: the notes of the report, followed by the warnings of the runs."""
    remarks = [
        note
        for run in runs
        for note in _select_own_rows(run, [row for row in rows if find_run(runs, row) is run], rows)
    ]
    where = {id(run): f"{run.label}: " if len(runs) > 1 else "" for run in runs}
    warnings = [where[id(run)] + warning for run in runs for warning in _run_warnings(run.summary.warnings)]
    texts = [f"{where[id(run)]}{text}" for run, text in remarks] + warnings
    return list(dict.fromkeys(texts))


def _select_own_rows(run: Run, run_rows: list[Row], rows: list[Row]) -> list[tuple[Run, str]]:
    texts = [
        _diverged_notes(run_rows),
        _attack_notes(run),
        _work_notes(run_rows),
        *_missing_client_notes(run, run_rows),
        _dropped_notes(run),
        _seed_notes(run),
    ]
    texts.append(_repeat_notes(run, run_rows))
    if run.summary.select_on == "test":
        texts.insert(0, "Hybrid models were chosen on test data (select_on = test), so their results are optimistic.")
    return [(run, text) for text in texts if text]


def _diverged_notes(run_rows: list[Row]) -> str:
    odd = dict.fromkeys(f"{row.method} {row.status}" for row in run_rows if not row.is_complete)
    if not odd:
        return ""
    lost = any(row.lost_seeds for row in run_rows)
    end = "Seeds that failed, or diverged before their end, have no result" if lost else "Interim metrics are shown"
    return f"Some runs did not finish: {', '.join(odd)}. {end}."


def _attack_notes(run: Run) -> str:
    if not run.attacked:
        return ""
    counts = sorted({len(partition.attackers) for partition in run.partitions.values()})
    several = " to ".join(dict.fromkeys(map(str, (counts[0], counts[-1]))))
    tables = [run.options, *run.options.get("method", [])]
    kinds = dict.fromkeys(table["attack"]["kind"] for table in tables if "attack" in table)
    share = f"{several} of {run.clients} clients attack{'s' * (several == '1')} ({', '.join(kinds)})"
    return f"{share}. All results are for the other, benign clients."


def _work_notes(run_rows: list[Row]) -> str:
    work = {
        row.method: row.figures["samples_backward"].mean
        for row in run_rows
        if row.is_complete and "samples_backward" in row.figures
    }
    if not work or max(work.values()) <= UNEQUAL_WORK_RATIO * min(work.values()):
        return ""
    roles = {row.role: row.method for row in reversed(run_rows) if row.method in work}
    least = roles.get("average") or min(work, key=work.__getitem__)
    beyond = [
        f"{m} has {format_percent(w / work[least])}" for m, w in work.items() if w > UNEQUAL_WORK_RATIO * work[least]
    ]
    named = f" ({', '.join(beyond)} of the gradients of {least})" if work[least] and beyond else ""
    return (
        f"The methods did unequal work: {write_total(min(work.values()))} to {write_total(max(work.values()))} "
        f"sample gradients{named}. Also compare them at equal numbers of sample gradients."
    )


def _missing_client_notes(run: Run, run_rows: list[Row]) -> list[str]:
    lead = leading_metric([run])
    without = [clients for row in run_rows for clients in _clients_without_value(run, row, lead)]
    most = max(map(len, without), default=0)
    if not most or any("test part" in warning for warning in run.summary.warnings):
        return []
    everyone = sorted(frozenset[int]().union(*without))
    always = frozenset(everyone).intersection(*without)
    listed = ", ".join(run.client(k) + " (with some seeds)" * (k not in always) for k in everyone)
    who = f"; {listed}" if len(everyone) <= MAX_NAMED_MISSING else ""
    return [
        f"Clients without {lowercase_title(metric(lead).title)}, which the means omit: up to {most} of {run.clients}"
        f"{who}."
    ]


def _clients_without_value(run: Run, row: Row, name: str) -> list[frozenset[int]]:
    """Return the benign clients without a value in the last round, as one set for each seed that has a result."""
    without = []
    for key in run.series:
        about = (key.method, key.model, key.part, key.metric)
        points = (
            run.benign(key)
            if about == (row.method, row.model, "test", name) and key.seed not in row.lost_seeds
            else None
        )
        if points is not None and len(points.round):
            empty = (points.round == points.round[-1]) & np.isnan(points.value)
            without.append(frozenset(points.client[empty].tolist()))
    return without


def _dropped_notes(run: Run) -> str:
    dropped = sum(float(points.value[-1]) for key, points in run.totals.items() if key.metric == "dropped")
    return f"{write_total(dropped)} uploads were dropped (non-finite, out of bounds, late or lost)." if dropped else ""


def _seed_notes(run: Run) -> str:
    one = any(len(find_seeds(run, method)) == 1 for method in run.methods)
    return "There is only one seed, so there are no intervals and no tests." if one else ""


def _repeat_notes(run: Run, run_rows: list[Row]) -> str:
    methods = dict.fromkeys(row.method for row in run_rows if row.repeats)
    if not methods:
        return ""
    who = "every method" if len(methods) == len(run.methods) else ", ".join(methods)
    return (
        f"With {who}, runs with other seeds are identical to the last digit, because the seeds have no effect. A test "
        "of two such methods counts them once."
    )


def _run_warnings(warnings: tuple[str, ...]) -> list[str]:
    """Return the warnings of a run.

    A warning that occurs with several seeds is returned once, together with the numbers of these seeds.
    """
    by_text: dict[tuple[str, str], list[str]] = {}
    for warning in warnings:
        match = re.fullmatch(r"(.+), seed (\d+): (.*)", warning, re.DOTALL)
        who, seed, text = match.groups() if match else ("", "", warning)
        by_text.setdefault((who, text), []).append(seed)
    return [
        f"{who}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: {text}" if who else text
        for (who, text), seeds in by_text.items()
    ]
