"""Sections of the analyses page: output of a package's function (an entry point), or a table of the recorded file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from fedloom.errors import RunDirError
from fedloom.formats import format_option
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.numbers import Row
from fedloom.lab.report.run import Run
from fedloom.rundir import REPAIR_HINT, RESULT_FILES, analysis_file, check_digest, has_digest

GROUP_NAME = "fedloom.sections"
"""Entry points of functions ``(runs, rows, lead) -> Section | None``. Each has the name of a kind of analysis."""
MAX_LINES = 200
"""Maximum number of lines of a plain table shown on the page. The CSV file always contains all lines."""


class Section(NamedTuple):
    """Section of the report that shows the results of an analysis.

    Attributes:
        title: heading of the section.
        lead: sentence below the heading.
        body: content of the section as HTML. Empty if the analysis did not record anything.
        files: CSV files to write next to the page, keyed by name without the file extension.
    """

    title: str
    lead: str
    body: str
    files: Mapping[str, str] = {}


MakeSection = Callable[[list[Run], list[Row], str], Section | None]


def make_sections(runs: list[Run], rows: list[Row], lead: str) -> dict[str, Section]:
    """Return the sections of all analyses that the runs recorded, keyed by the kind of analysis.

    Args:
        runs: runs that the report covers.
        rows: rows of the results table, one for each model of each method.
        lead: name of the primary metric.
    """
    sections = dict[str, Section]()
    makers: dict[str, MakeSection] = {entry.name: entry.load() for entry in entry_points(group=GROUP_NAME)}
    for kind, make in sorted(makers.items()):
        section = make(runs, rows, lead)
        if section is not None and section.body:
            sections[kind] = section
    shown_elsewhere = {*RESULT_FILES, *map(analysis_file, makers)}
    names = sorted({path.name for run in runs for path in run.path.glob("*.parquet")} - shown_elsewhere)
    return sections | {Path(name).stem: section for name in names if (section := plain_section(runs, name)).body}


def plain_section(runs: list[Run], name: str) -> Section:
    """Return a section that shows an analysis's recorded table with rounded cells.

    Its CSV file contains the unrounded values.

    Args:
        runs: runs that the report covers.
        name: name of the table's file in a run directory. Runs that did not write this file are skipped.
    """
    title = Path(name).stem.replace("_", " ").capitalize()
    body, columns, lines = "", dict.fromkeys(["run"]), list[dict[str, Any]]()
    for run in runs:
        table = _recorded_names(run.path / name)
        if not table:
            continue
        single = {head for head in ("method", "seed") if len({str(row.get(head)) for row in table}) == 1}
        heads = [head for head in table[0] if head not in single]
        cells = [[_rounded_cell(row[head]) for head in heads] for row in table[:MAX_LINES]]
        label = f"{title}{f', {run.label}' if len(runs) > 1 else ''}"
        shown = [head.replace("_", " ") for head in heads]
        body += render_scrolling_table(label, shown, cells, title=label if len(runs) > 1 else "")
        if len(table) > MAX_LINES:
            body += f"<p>The first {MAX_LINES} of {len(table)} lines are shown. The CSV file contains all lines.</p>"
        columns |= dict.fromkeys(table[0])
        lines += [{"run": run.label, **row} for row in table]
    return Section(title, "", body, {Path(name).stem: render_csv([*columns], lines)} if lines else {})


def _recorded_names(path: Path) -> list[dict[str, Any]]:
    if not path.is_file() or not has_digest(content := path.read_bytes()):
        return []
    check_digest(path, content)
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} is damaged: {error}. {REPAIR_HINT}") from error
    return rows


def _rounded_cell(value: object) -> str:
    return "" if value is None else format_option(value) if isinstance(value, float) else str(value)
