"""Print tables on standard output: the results of a run, and rows with any keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.errors import printable
from fedloom.formats import DASH, option, pair
from fedloom.metrics import leading
from fedloom.report.naming import figure
from fedloom.report.tables import column_of, headline, measured


def print_texts(
    titles: Iterable[str], rows: Iterable[Iterable[str]], *, right: Collection[str] = (), width: int = 160,
    names: bool = False,
) -> None:  # fmt: skip
    """Texts in columns; long ones are folded.

    Args:
        titles: of the columns.
        rows: a text for each column.
        right: titles of the columns that are aligned to the right.
        width: characters of a line where the output is no terminal.
        names: the first column has names that people copy; they are never folded.
    """
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(titles):
        kept = names and place == 0
        shown.add_column(title, justify="right" if title in right else "left", overflow="fold", no_wrap=kept)
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = width
    if names:
        shown.columns[0].min_width = max((len(str(cell)) for cell in shown.columns[0].cells), default=0)
    console.print(shown)


def print_results(table: pa.Table) -> None:
    """The result table of a run: mean over seeds with 95 % confidence interval, and the work it took."""
    lead = leading(table.column_names)
    figures = {name: figure(name).title for name in headline(lead) if column_of(name) in table.column_names}
    figures |= {lead: f"test {lead}"} if lead in figures else {}
    titles = ("method", "model", "seeds", *(title[:1].lower() + title[1:] for title in figures.values()), "status")
    rows = [
        (
            row["method"], row["model"], str(row["seeds"]),
            *(_figure(name, row[column_of(name)], row[f"{column_of(name)}_ci95"]) for name in figures), row["status"],
        )
        for row in table.to_pylist()
    ]  # fmt: skip
    print_texts(titles, rows, right=titles[2:-1])


def print_rows(rows: Sequence[Mapping[str, Any]], first: Sequence[str] = (), *, width: int = 200) -> None:
    """Rows of any keys, numbers with four digits.

    Args:
        rows: the columns are the keys of all, in the order in which they come.
        first: columns that come before them.
        width: characters of a line where the output is no terminal.
    """
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    numbers = [name for name in columns if any(isinstance(row.get(name), int | float) for row in rows)]
    cells = [[DASH if row.get(name) is None else option(row[name]) for name in columns] for row in rows]
    print_texts(columns, cells, right=numbers, width=width)


def _figure(name: str, mean: float | None, half: float | None) -> str:
    return pair(*measured(name, math.nan if mean is None else mean, math.nan if half is None else half))
