"""Show what ran: the main settings in words, every method's own, versions, and the exact file."""

from __future__ import annotations

from html import escape
from typing import Any

from fedloom.formats import option, write_total
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import scrolling

TABLE_TITLES = {"augment": "Augmentation", "evaluate": "Evaluation"}
"""Titles of tables of the experiment file that are not their names."""
UNREPORTED_TABLES = ("engine", "resolved", "tune")
"""Tables that change no figure of the report. The whole file stands below."""
NOT_OPTIONS = ("algorithm", "label")
"""Settings of a method that no other one shares."""


def settings(runs: list[Run]) -> str:
    """Describe the settings, the differences between the runs, and the end of every run."""
    parts = [_differences(runs)] if len(runs) > 1 else []
    for place, run in enumerate(runs, start=1):
        inner = f"{_words(run)}{_methods(run)}{_versions(run)}{_every_run(run)}{_file(run, place)}"
        if len(runs) > 1:
            inner = f"<details><summary><b>{escape(run.label)}</b></summary>{inner}</details>"
        parts.append(inner)
    return "".join(parts)


def _words(run: Run) -> str:
    options = run.options
    tables = {
        name: table for name, table in options.items() if isinstance(table, dict) and name not in UNREPORTED_TABLES
    }
    lines = {TABLE_TITLES.get(name, name.capitalize()): _text(table) for name, table in tables.items() if table}
    methods = [method for method in options.get("method", []) if isinstance(method, dict)]
    lines |= {TABLE_TITLES.get(name, name.capitalize()): text for name, text in _shared(methods).items() if text}
    seeds = options.get("seeds")
    lines |= {"Seeds": _text(seeds)} if seeds else {}
    body = "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in lines.items())
    return f'<dl class="words">{body}</dl>'


def _text(value: object) -> str:
    """Nested settings in one line, e.g. ``hybrid: clients 10, beta 0.5``. What is off or empty is left out."""
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
    """Return the settings that all methods share."""
    names = dict.fromkeys(name for method in methods for name in method if name not in NOT_OPTIONS)
    texts = {name: {_text(method.get(name)) for method in methods} for name in names}
    return {name: text.pop() for name, text in texts.items() if len(text) == 1}


def _methods(run: Run) -> str:
    """Every method with its own settings."""
    methods = [method for method in run.options.get("method", []) if isinstance(method, dict)]
    agreed = _shared(methods)
    lines = []
    for method in methods:
        options = {k: v for k, v in method.items() if k not in {"label", "algorithm", *agreed}}
        algorithm = str(method.get("algorithm", ""))
        lines.append([escape(str(method.get("label", algorithm))), escape(algorithm), escape(_text(options))])
    heads = ("Method", "Algorithm", "Its own settings")
    return scrolling(f"Methods of {run.label}", heads, lines, (1, 2)) if lines else ""


def _versions(run: Run) -> str:
    words = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    devices = dict.fromkeys(record.device for record in run.summary.runs if record.device)
    where = f" Computed on {', '.join(devices)}." if devices else ""
    return f'<p class="versions"><b>Versions</b> {escape(words)}.{escape(where)}</p>' if words else ""


def _file(run: Run, place: int) -> str:
    label = escape(run.label)
    return (
        "<details><summary>Experiment file, as resolved</summary>"
        f'<div class="tools"><button data-do="text" value="toml-{place}" data-name="{label}.toml">TOML'
        f'<span class="unseen"> of {label}</span></button></div>'
        f'<pre tabindex="0" id="toml-{place}" role="region" aria-label="Experiment file of {label}">'
        f"<code>{escape(run.settings)}</code></pre></details>"
    )


def _every_run(run: Run) -> str:
    if not run.summary.runs:
        return "<p>No run has come to its end yet.</p>"
    heads = ("Method", "Seed", "Status", "Rounds", "Seconds", "Oracle", "Chunk", "Parameters", "Why it ended")
    lines = []
    for record in run.summary.runs:
        spent = run.seconds.get((record.method, record.seed))
        cells: list[Any] = [record.method, record.seed, record.status, record.rounds]
        cells += [write_total(float(spent.value.sum())) if spent else "", record.oracle or "", record.chunk or ""]
        cells += [write_total(record.parameters) if record.parameters else "", record.reason]
        lines.append([escape(str(cell)) for cell in cells])
    table = scrolling(f"All runs of {run.label}", heads, lines, (8,))
    return f"<details><summary>Every run of this experiment ({len(lines)})</summary>{table}</details>"


def _differences(runs: list[Run]) -> str:
    flat = [_flat({k: v for k, v in run.options.items() if k != "resolved"}) for run in runs]
    keys = [key for key in dict.fromkeys(k for f in flat for k in f) if len({repr(f.get(key)) for f in flat}) > 1]
    if not keys:
        return "<p>The runs have equal settings.</p>"
    lines = [[escape(key), *(escape(str(f.get(key, ""))) for f in flat)] for key in keys]
    heads = ["Setting", *(run.label for run in runs)]
    return f"<h3>What differs</h3>{scrolling('Settings that differ', heads, lines)}"


def _flat(options: object, prefix: str = "") -> dict[str, Any]:
    """Nested tables as ``{"a.b": value}``. Methods are counted from 1."""
    if isinstance(options, list) and options and isinstance(options[0], dict):
        options = {str(i): value for i, value in enumerate(options, start=1)}
    if not isinstance(options, dict):
        return {prefix: options}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat
