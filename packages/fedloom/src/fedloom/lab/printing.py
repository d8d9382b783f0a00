"""Printing of tables to standard output without cutting off content, regardless of the terminal's width."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedloom.errors import escape_controls
from fedloom.formats import UNKNOWN_DASH, format_option, format_pair
from fedloom.lab.report.naming import describe_figure, lowercase_title
from fedloom.lab.report.tables import column_of, headline_metrics, render_measured
from fedloom.metrics import leading, metric

MIN_COLUMN_WIDTH = 12
"""Minimum width of a column with wrapped text, in characters."""
COLUMN_GAP = 3
"""Number of characters between two columns."""
UNLIMITED_WIDTH = 100_000
"""Line width in characters that exceeds the width of any table."""


class _Output(Console):
    """Console on standard output that propagates the error raised when the reader has closed the pipe."""

    def on_broken_pipe(self) -> None:
        raise


def print_texts(
    titles: Sequence[str], rows: Iterable[Iterable[str]], *, right: Collection[str] = (), width: int = 200,
    names: bool = False, lead: int = 0,
) -> None:  # fmt: skip
    """Print texts in columns.

    Numbers are never wrapped. Columns that do not fit are printed in additional blocks, and each block repeats the
    first columns.

    Args:
        titles: titles of the columns.
        rows: rows that contain one text per column.
        right: titles of the right-aligned columns.
        width: maximum line width in characters if the output is not a terminal.
        names: True if the first column contains names that users may want to copy. They are never wrapped. If they
            leave too little space for the other columns, those columns are printed below each name.
        lead: number of columns that each block repeats. 0 means all columns before the first one in ``right``.
    """
    texts = [[escape_controls(text) for text in row] for row in rows]
    console = _Output()
    if not console.is_terminal:
        console.width = width
    whole = _column_table(titles, texts, range(len(titles)), right, names)
    if _table_width(console, whole) <= console.width or not texts:
        console.print(whole)
    elif names:
        longest = max(len(row[0]) for row in texts)
        if console.width - longest >= MIN_COLUMN_WIDTH * (len(titles) - 1):
            console.print(whole)
            return
        for first, *cells in texts:
            line = "; ".join(f"{title}: {text}" for title, text in zip(titles[1:], cells, strict=True) if text)
            indented = wrap(line, console.width, initial_indent="  ", subsequent_indent="  ")
            console.print(Text("\n".join([first, *indented])), soft_wrap=True)
    else:
        lead = lead or next((place for place, title in enumerate(titles) if title in right), 1) or 1
        places = list(range(lead))
        for place in range(lead, len(titles)):
            wider = _column_table(titles, texts, [*places, place], right)
            if len(places) > lead and _table_width(console, wider) > console.width:
                _print_block(console, titles, texts, places, right)
                places = list(range(lead))
            places.append(place)
        _print_block(console, titles, texts, places, right)


def _print_block(
    console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], places: Sequence[int],
    right: Collection[str],
) -> None:  # fmt: skip
    """Print one block of columns.

    If a word in the last column, such as a path, would be broken, this column is instead printed below each row.
    """
    *first, last = places
    room = console.width - _table_width(console, _column_table(titles, rows, first, right)) - COLUMN_GAP
    longest = max(cell_len(word) for row in rows for word in [*row[last].split(), ""])
    if not first or titles[last] in right or longest <= room:
        console.print(_column_table(titles, rows, places, right))
        return
    for row in rows:
        names = "  ".join(row[place] for place in first)
        console.print(Text(f"{names}\n  {titles[last]}: {row[last]}"), soft_wrap=True)


def _column_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], places: Sequence[int], right: Collection[str],
    names: bool = False,
) -> Table:  # fmt: skip
    """Return a table with some of the columns."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place in places:
        kept, justify = names and place == 0, "right" if titles[place] in right else "left"
        longest = max((cell_len(row[place]) for row in rows), default=0) if kept else None
        shown.add_column(Text(titles[place]), justify=justify, overflow="fold", no_wrap=kept, min_width=longest)  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*(Text(row[place]) for place in places))
    return shown


def _table_width(console: Console, table: Table) -> int:
    """Return the unwrapped width of a table in characters."""
    return Measurement.get(console, console.options.update(max_width=UNLIMITED_WIDTH), table).maximum


NARROW_FIGURES = ("worst10", "attack_success", "samples_backward", "bytes_up", "bytes_down")
"""Suffixes of the metrics shown next to the primary metric if the terminal is too narrow for all metrics."""
NARROW_TITLES = {"sample gradients": "gradients"}
"""Shorter column titles for narrow terminals."""
BEST_MARK = "*"
"""Mark after the method with the best mean."""


def print_results(table: pa.Table) -> None:
    """Print a run's results: means over seeds with 95 % intervals, the costs, and a mark at the best mean.

    A narrow terminal shows fewer columns. The file ``results.csv`` and the report contain all columns.
    """
    lead, rows = leading(table.column_names), table.to_pylist()
    figures = {
        name: lowercase_title(describe_figure(name).title)
        for name in headline_metrics(lead)
        if column_of(name) in table.column_names
    }
    figures |= {lead: f"test {lead}"} if lead in figures else {}
    best = _best_place(rows, lead) if lead in figures else None
    titles, cells, right = _result_cells(rows, figures, best, ("seeds", "status"))
    console = _Output()
    if (
        console.is_terminal
        and _table_width(console, _column_table(titles, cells, range(len(titles)), right)) > console.width
    ):
        short = {name: NARROW_TITLES.get(title, title) for name, title in figures.items()
                 if name == lead or name.endswith(NARROW_FIGURES)}  # fmt: skip
        more = () if all(row["status"] == "done" for row in rows) else ("status",)
        titles, cells, right = _result_cells(rows, short, best, more)
    print_texts(titles, cells, right=right)
    if best is not None and len(rows) > 1:
        console.print(Text(f"{BEST_MARK} best mean test {lowercase_title(describe_figure(lead).title)}"))


def _result_cells(
    rows: Sequence[Mapping[str, Any]], figures: Mapping[str, str], best: int | None, more: Sequence[str]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the column titles, the cells, and the titles of numeric columns.

    ``more`` may contain ``seeds`` and ``status``.
    """
    first, last = (["seeds"] if "seeds" in more else []), (["status"] if "status" in more else [])
    cells = [
        [
            f"{row['method']} {BEST_MARK}" if k == best else row["method"], row["model"],
            *(str(row[name]) for name in first),
            *(_figure_text(name, row[column_of(name)], row[f"{column_of(name)}_ci95"]) for name in figures),
            *(row[name] for name in last),
        ]
        for k, row in enumerate(rows)
    ]  # fmt: skip
    return ["method", "model", *first, *figures.values(), *last], cells, [*first, *figures.values()]


def _best_place(rows: Sequence[Mapping[str, object]], lead: str) -> int | None:
    """Return the index of the completed row with the best mean of the primary metric, or None if there is none."""
    means = {k: float(str(row[column_of(lead)])) for k, row in enumerate(rows)
             if row["status"] == "done" and row[column_of(lead)] is not None}  # fmt: skip
    return (max if metric(lead).higher_is_better else min)(means, key=means.__getitem__, default=None)


def print_rows(rows: Sequence[Mapping[str, object]], first: Sequence[str] = (), *, width: int = 200) -> None:
    """Print rows with arbitrary keys. Numbers are rounded to four digits.

    Args:
        rows: rows of the table. Their keys become columns, in order of first appearance.
        first: columns that come first. In a narrow terminal, each block repeats them.
        width: maximum line width in characters if the output is not a terminal.
    """
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    numbers = [name for name in columns if any(isinstance(row.get(name), int | float) for row in rows)]
    cells = [[UNKNOWN_DASH if row.get(name) is None else format_option(row[name]) for name in columns] for row in rows]
    print_texts(columns, cells, right=numbers, width=width, lead=len(first))


def _figure_text(name: str, mean: float | None, half: float | None) -> str:
    return format_pair(*render_measured(name, math.nan if mean is None else mean, math.nan if half is None else half))
