"""Settings of a run as HTML: the main settings in words, the settings of each method, versions, and the exact file."""

from __future__ import annotations

from typing import Any

from fedloom.formats import format_option, write_total
from fedloom.lab.report.markup import render_part, render_scrolling_table
from fedloom.lab.report.run import Run
from fedloom.rundir import compared_tables

TABLE_TITLES = {"augment": "Augmentation", "evaluate": "Evaluation"}
"""Titles of experiment-file tables that differ from the tables' names."""
UNREPORTED_TABLES = ("engine", "resolved", "tune")
"""Tables that do not affect the values in the report. They still appear in the full text of the file at the end of the
section."""
IGNORED_KEYS = ("algorithm", "label")
"""Keys of a method that are not compared with the keys of other methods."""


def render_settings(runs: list[Run]) -> str:
    """Render the settings, the differences between the runs, and how each run ended."""
    several = len(runs) > 1
    shown = [
        {"label": run.label, "words": _run_end_text(run), "methods": _methods_table(run), "every": _runs_table(run),
         "ended": len(run.summary.runs), "file": run.settings, **_versions_line(run)}
        for run in runs
    ]  # fmt: skip
    return render_part("settings", runs=shown, differences=_differences_table(runs) if several else "", several=several)


def _run_end_text(run: Run) -> dict[str, str]:
    options = run.options
    tables = {
        name: table for name, table in options.items() if isinstance(table, dict) and name not in UNREPORTED_TABLES
    }
    lines = {
        TABLE_TITLES.get(name, name.replace("_", " ").capitalize()): _settings_text(table)
        for name, table in tables.items()
        if table
    }
    methods = [method for method in options.get("method", []) if isinstance(method, dict)]
    lines |= {
        TABLE_TITLES.get(name, name.replace("_", " ").capitalize()): text
        for name, text in _shared_settings(methods).items()
        if text
    }
    seeds = options.get("seeds")
    return lines | ({"Seeds": _settings_text(seeds)} if seeds else {})


def _settings_text(value: object) -> str:
    """Render nested settings as a single line of text, e.g.

    ``mixed: clients 10, alpha 0.5``. Disabled and empty settings are omitted.
    """
    if isinstance(value, dict):
        head = str(value.get("kind") or value.get("source") or "")
        rest = {k: _settings_text(v) for k, v in value.items() if k not in ("kind", "source")}
        line = ", ".join(f"{k.replace('_', ' ')} {text}" for k, text in rest.items() if text)
        return f"{head}: {line}" if head and line else head or line
    if isinstance(value, list):
        return ", ".join(_settings_text(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format_option(value, 6)


def _shared_settings(methods: list[dict[str, Any]]) -> dict[str, str]:
    """Return the settings that are the same for all methods."""
    names = dict.fromkeys(name for method in methods for name in method if name not in IGNORED_KEYS)
    texts = {name: {_settings_text(method.get(name)) for method in methods} for name in names}
    return {name: text.pop() for name, text in texts.items() if len(text) == 1}


def _methods_table(run: Run) -> str:
    """Render a table of the methods that shows the settings in which they differ."""
    agreed = _shared_settings([method for method in run.options.get("method", []) if isinstance(method, dict)])
    lines = []
    for method in compared_tables(run.options):
        options = {k: v for k, v in method.items() if k not in {"label", "algorithm", *agreed}}
        algorithm = str(method.get("algorithm", ""))
        lines.append([str(method.get("label", algorithm)), algorithm, _settings_text(options)])
    heads = ("Method", "Algorithm", "Its own settings")
    return render_scrolling_table(f"Methods of {run.label}", heads, lines, (1, 2)) if lines else ""


def _versions_line(run: Run) -> dict[str, str]:
    words = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    devices = dict.fromkeys(record.device for record in run.summary.runs if record.device)
    return {"versions": words, "where": f" Computed on {', '.join(devices)}." if devices else ""}


def _runs_table(run: Run) -> str:
    heads = (
        "Method", "Seed", "Status", "Rounds", "Seconds", "Gradient engine", "Clients per batch", "Parameters",
        "Why it ended",
    )  # fmt: skip
    lines = []
    for record in run.summary.runs:
        spent = run.seconds.get((record.method, record.seed))
        cells: list[Any] = [record.method, record.seed, record.status, record.rounds]
        cells += [write_total(float(spent.value.sum())) if spent else "", record.oracle or "", record.chunk or ""]
        cells += [write_total(record.parameters) if record.parameters else "", record.reason]
        lines.append(cells)
    return render_scrolling_table(f"All runs of {run.label}", heads, lines, (8,))


def _differences_table(runs: list[Run]) -> str | None:
    flat = [_flatten_options({k: v for k, v in run.options.items() if k != "resolved"}) for run in runs]
    keys = [key for key in dict.fromkeys(k for f in flat for k in f) if len({repr(f.get(key)) for f in flat}) > 1]
    if not keys:
        return None
    lines = [[key, *(str(f.get(key, "")) for f in flat)] for key in keys]
    return render_scrolling_table("Settings that differ", ["Setting", *(run.label for run in runs)], lines)


def _flatten_options(options: object, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to the form ``{"a.b": value}``. Methods that are given as a list are numbered from 1."""
    if isinstance(options, list) and options and isinstance(options[0], dict):
        options = {str(i): value for i, value in enumerate(options, start=1)}
    if not isinstance(options, dict):
        return {prefix: options}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flatten_options(value, f"{prefix}.{key}" if prefix else key)
    return flat
