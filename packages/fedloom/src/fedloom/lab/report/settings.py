"""Settings of a run as HTML: the main settings in words, the settings of each method, versions, and the exact file."""

from __future__ import annotations

from typing import Any

from fedloom.formats import option, write_total
from fedloom.lab.report.markup import render_part, scrolling
from fedloom.lab.report.run import Run

TABLE_TITLES = {"augment": "Augmentation", "evaluate": "Evaluation"}
"""Titles of tables in the experiment file that differ from the names of the tables."""
UNREPORTED_TABLES = ("engine", "resolved", "tune")
"""Tables that have no effect on the values in the report. The full text of the file at the end of the section still
contains these tables."""
NOT_OPTIONS = ("algorithm", "label")
"""Keys of a method that are not compared with the keys of other methods."""


def settings(runs: list[Run]) -> str:
    """Render the settings, the differences between the runs, and how each run ended."""
    several = len(runs) > 1
    shown = [
        {"label": run.label, "words": _words(run), "methods": _methods(run), "every": _every_run(run),
         "ended": len(run.summary.runs), "file": run.settings, **_versions(run)}
        for run in runs
    ]  # fmt: skip
    return render_part("settings", runs=shown, differences=_differences(runs) if several else "", several=several)


def _words(run: Run) -> dict[str, str]:
    options = run.options
    tables = {
        name: table for name, table in options.items() if isinstance(table, dict) and name not in UNREPORTED_TABLES
    }
    lines = {
        TABLE_TITLES.get(name, name.replace("_", " ").capitalize()): _text(table)
        for name, table in tables.items()
        if table
    }
    methods = [method for method in options.get("method", []) if isinstance(method, dict)]
    lines |= {
        TABLE_TITLES.get(name, name.replace("_", " ").capitalize()): text
        for name, text in _shared(methods).items()
        if text
    }
    seeds = options.get("seeds")
    return lines | ({"Seeds": _text(seeds)} if seeds else {})


def _text(value: object) -> str:
    """Render nested settings as a single line of text, e.g. ``mixed: clients 10, alpha 0.5``.

    Settings that are turned off or empty are omitted.
    """
    if isinstance(value, dict):
        head = str(value.get("kind") or value.get("source") or "")
        rest = {k: _text(v) for k, v in value.items() if k not in ("kind", "source")}
        line = ", ".join(f"{k.replace('_', ' ')} {text}" for k, text in rest.items() if text)
        return f"{head}: {line}" if head and line else head or line
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else option(value, 6)


def _shared(methods: list[dict[str, Any]]) -> dict[str, str]:
    """Return the settings that are the same for all methods."""
    names = dict.fromkeys(name for method in methods for name in method if name not in NOT_OPTIONS)
    texts = {name: {_text(method.get(name)) for method in methods} for name in names}
    return {name: text.pop() for name, text in texts.items() if len(text) == 1}


def _methods(run: Run) -> str:
    """Render a table of the methods, with the settings in which each differs from the others."""
    methods = [method for method in run.options.get("method", []) if isinstance(method, dict)]
    agreed = _shared(methods)
    lines = []
    for method in methods:
        options = {k: v for k, v in method.items() if k not in {"label", "algorithm", *agreed}}
        algorithm = str(method.get("algorithm", ""))
        lines.append([str(method.get("label", algorithm)), algorithm, _text(options)])
    heads = ("Method", "Algorithm", "Its own settings")
    return scrolling(f"Methods of {run.label}", heads, lines, (1, 2)) if lines else ""


def _versions(run: Run) -> dict[str, str]:
    words = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    devices = dict.fromkeys(record.device for record in run.summary.runs if record.device)
    return {"versions": words, "where": f" Computed on {', '.join(devices)}." if devices else ""}


def _every_run(run: Run) -> str:
    heads = (
        "Method",
        "Seed",
        "Status",
        "Rounds",
        "Seconds",
        "Gradient engine",
        "Clients per batch",
        "Parameters",
        "Why it ended",
    )
    lines = []
    for record in run.summary.runs:
        spent = run.seconds.get((record.method, record.seed))
        cells: list[Any] = [record.method, record.seed, record.status, record.rounds]
        cells += [write_total(float(spent.value.sum())) if spent else "", record.oracle or "", record.chunk or ""]
        cells += [write_total(record.parameters) if record.parameters else "", record.reason]
        lines.append(cells)
    return scrolling(f"All runs of {run.label}", heads, lines, (8,))


def _differences(runs: list[Run]) -> str | None:
    flat = [_flat({k: v for k, v in run.options.items() if k != "resolved"}) for run in runs]
    keys = [key for key in dict.fromkeys(k for f in flat for k in f) if len({repr(f.get(key)) for f in flat}) > 1]
    if not keys:
        return None
    lines = [[key, *(str(f.get(key, "")) for f in flat)] for key in keys]
    heads = ["Setting", *(run.label for run in runs)]
    return scrolling("Settings that differ", heads, lines)


def _flat(options: object, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to the form ``{"a.b": value}``. Methods that are given as a list are numbered from 1."""
    if isinstance(options, list) and options and isinstance(options[0], dict):
        options = {str(i): value for i, value in enumerate(options, start=1)}
    if not isinstance(options, dict):
        return {prefix: options}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat
