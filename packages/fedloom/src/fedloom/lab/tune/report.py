"""Report on the trials of a search: ``trials.csv``, ``tuning.md``, and a chart of all trials, ``trials.svg``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.formats import format_percent, format_significant
from fedloom.lab.experiment.tuning import Dimension, Range, Tune
from fedloom.lab.report.charts.kit import Figure, facet_panels, mark_layer, number
from fedloom.lab.report.charts.kit import layer_chart as parts
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.naming import metric as named
from fedloom.lab.report.naming import titled
from fedloom.lab.tune.search import ALL_METHODS, SearchResult, note_limits, read_default_spaces, report_overspending
from fedloom.lab.tune.trial import Trial
from fedloom.lab.tune.work import Goal
from fedloom.storage.files import write_atomic

SEARCH_REPORT_FILES = TRIALS_CSV, TRIALS_SVG, TUNING_PAGE = "trials.csv", "trials.svg", "tuning.md"
"""Files that make up the report on a search."""


def write_report(
    out: Path, name: str, tune: Tune, goal: Goal, findings: Sequence[SearchResult], *, tuned: bool
) -> None:
    """Write the three files of the report.

    ``tuned`` is True if ``tuned.toml`` exists and the report should mention it.
    """
    write_atomic(out / TRIALS_CSV, _trials_csv(findings).encode())
    write_atomic(out / TRIALS_SVG, _search_chart(goal, findings).svg().encode())
    write_atomic(out / TUNING_PAGE, "\n".join(_report_page(name, tune, goal, findings, tuned=tuned)).encode())


def _trials_csv(findings: Sequence[SearchResult]) -> str:
    keys = sorted({key for f in findings for key in f.study.space})
    rows: list[list[object]] = []
    for f in findings:
        for t in f.trials:
            values = [t.params.get(key, "") for key in keys]
            chosen = f.best is not None and t.number == f.best.number
            row = [f.study.method.label, t.number, t.state, "" if t.value is None else t.value, *values]
            rows.append([*row, t.rounds, t.samples_backward, int(chosen), t.reason])
    columns = ["method", "trial", "state", "value", *keys, "rounds", "samples_backward", "chosen", "reason"]
    return render_csv(columns, rows)


def _report_page(name: str, tune: Tune, goal: Goal, findings: Sequence[SearchResult], *, tuned: bool) -> list[str]:
    shown = named(goal.metric)
    budget = ("", "") if goal.samples is None else (" of the budget |", "---|")
    lines = [
        f"# Tuning of {name}",
        "",
        f"Every method had {tune.trials} trials{_exhausted_note(findings)}. {_length_note(goal, findings)} It is "
        f"scored by the validation {titled(shown)} after its last round, "
        f"{_goal_statistic_text(goal)}{', and over the models of the table' if tune.model == 'mean' else ''}. Test "
        "data were not read.",
        "",
        "Trial 0 uses the experiment file's setting if it is in the search space. "
        + (
            f"After {tune.startup} trials, a trial is stopped if it is below the median of the complete trials at the "
            "same point."
            if tune.prune
            else "No trial was stopped early."
        ),
        "",
        "![Every trial](trials.svg)",
        "",
        "## Chosen",
        "",
        f"| method | model | {titled(shown)} | setting | rounds | samples_backward |{budget[0]} pruned | failed |",
        f"|---|---|---|---|---|---|{budget[1]}---|---|",
    ]
    for f in findings:
        states = [t.state for t in f.trials]
        ends = f"{states.count('pruned')} | {states.count('failed')}"
        label, b = f.study.method.label, f.best
        if b is None:
            share = "" if goal.samples is None else " - |"
            lines.append(f"| {label} | {f.study.model} | - | no trial completed | - | - |{share} {ends} |")
            continue
        share = "" if f.share is None else f" {format_percent(f.share, 1)} |"
        lines.append(
            f"| {label} | {f.study.model} | {_trial_value_text(b, goal)} | {b.setting} | {b.rounds} | "
            f"{b.samples_backward:,} |{share} {ends} |"
        )
    lines += [line for sentence in report_overspending(findings) for line in ("", f"**{sentence}**")]
    lines += [line for sentence in note_limits(findings) for line in ("", sentence)]
    lines += ["", "## Search spaces", "", "| method | setting | where | from |", "|---|---|---|---|"]
    for f in findings:
        for key, dimension in f.study.space.items():
            source = _space_source_text(f.study.method.algorithm, f.study.method.label, key, tune)
            lines.append(f"| {f.study.method.label} | {key} | {_dimension_text(dimension)} | {source} |")
    more = " The experiment with the chosen settings: `tuned.toml`." if tuned else ""
    return [*lines, "", f"All trials: [trials.csv](trials.csv).{more}", ""]


def _exhausted_note(findings: Sequence[SearchResult]) -> str:
    """Return a sentence about search spaces that were searched exhaustively, or "" if there are none."""
    spaces = [f"{f.study.method.label} ({len(f.trials)})" for f in findings if f.study.search.is_exhaustive]
    if not spaces:
        return ""
    return (
        f". Spaces of lists with no more settings than trials were searched exhaustively by Optuna's GridSampler: "
        f"{', '.join(spaces)}"
    )


def _length_note(goal: Goal, findings: Sequence[SearchResult]) -> str:
    """Return a sentence that states the length of a trial."""
    seeds = ", ".join(str(s) for s in goal.seeds)
    if goal.samples is not None:
        return (
            f"A trial trains for the work of {goal.rounds} rounds of plain local training per seed ({goal.samples:,} "
            f"sample gradients over seeds {seeds}). Its number of rounds is chosen to match this work as closely as "
            "possible."
        )
    budgets = [
        f", of {f.study.method.label} {f.study.goal.rounds}" for f in findings if f.study.goal.rounds != goal.rounds
    ]
    return f"A trial trains for {goal.rounds} rounds per seed{''.join(budgets)} (seeds {seeds}), whatever the cost."


def _search_chart(goal: Goal, findings: Sequence[SearchResult]) -> Figure:
    rows: list[dict[str, Any]] = [
        {"method": f.study.method.label, "trial": t.number, "value": value, "state": t.state}
        for f in findings
        for t in f.trials
        if (value := t.value if t.value is not None else t.marks.get(max(t.marks, default=-1))) is not None
    ]
    shown = named(goal.metric)
    state = {"field": "state", "type": "nominal", "title": None}
    value_axis = number("value", f"Validation {shown.title.lower()}")
    points = mark_layer("point", {"x": number("trial", "Trial"), "y": value_axis, "color": state, "shape": state})
    chart = facet_panels(parts(points), "method", [row["method"] for row in rows], None)
    caption = "Every trial's score after its last round. Stopped trials are shown with their score when they stopped."
    return Figure("trials", "tuning", "trials", "Every trial", caption, chart, {"rows": rows}, "facet")


def _goal_statistic_text(goal: Goal) -> str:
    weighted = goal.statistic == "weighted"
    return "mean over clients, weighted by their samples, and over seeds" if weighted else "mean over clients and seeds"


def _trial_value_text(trial: Trial, goal: Goal) -> str:
    assert trial.value is not None
    return format_significant(trial.value * named(goal.metric).scale)


def _dimension_text(dimension: Dimension) -> str:
    if isinstance(dimension, Range):
        return f"{dimension.low} to {dimension.high}{', logarithmic' if dimension.log else ''}"
    return ", ".join(str(value) for value in dimension)


def _space_source_text(algorithm: str, label: str, key: str, tune: Tune) -> str:
    if any(key in tune.space.get(name, {}) for name in (ALL_METHODS, algorithm, label)):
        return "the experiment file"
    spaces, sources = read_default_spaces()
    return sources[algorithm if key in spaces.get(algorithm, {}) else ALL_METHODS]
