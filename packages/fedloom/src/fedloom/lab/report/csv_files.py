"""Writing of CSV files: all cells are converted to text, and spreadsheet formulas are neutralized."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa
from pyarrow import csv as arrow_csv

T = TypeVar("T")


def neutralize_formula(cell: T) -> T | str:
    """Return the value to write to a CSV cell.

    A text that a spreadsheet would evaluate as a formula is prefixed with an apostrophe, as OWASP recommends.

    Floating-point numbers are written with at most 12 significant digits.

    >>> [neutralize_formula(cell) for cell in ("=1+1", "fedavg", -1.5, 1 / 3, 7856937935508588.0)]
    ["'=1+1", 'fedavg', -1.5, 0.333333333333, '7.85693793551e+15']
    """
    if isinstance(cell, float) and math.isfinite(cell):
        text = f"{cell:.12g}"
        return text if "e+" in text else float(text)  # type: ignore[return-value]
    if not isinstance(cell, str):
        return cell
    mark = "'" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else ""
    return mark + cell.replace("\r", " ")  # the csv module does not quote \r, but readers may end a row there


def render_csv(columns: Sequence[str], rows: Iterable[Sequence[object] | Mapping[str, object]]) -> str:
    """Return a header and rows as CSV, with formulas neutralized. Missing values are left empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(map(neutralize_formula, columns))
    for row in rows:
        cells = [row.get(column) for column in columns] if isinstance(row, Mapping) else row
        table.writerow(["" if cell is None else neutralize_formula(cell) for cell in cells])
    return text.getvalue()


def render_table_csv(table: pa.Table) -> bytes:
    """Return an Arrow table as CSV, with formulas in names and texts neutralized. Numbers keep all their digits."""
    names = [str(neutralize_formula(name)) for name in table.column_names]
    columns = [
        pa.array(map(neutralize_formula, column.to_pylist()), pa.string())
        if pa.types.is_string(column.type)
        else column
        for column in table.columns
    ]
    out = io.BytesIO()
    arrow_csv.write_csv(pa.table(columns, names=names), out, arrow_csv.WriteOptions(quoting_style="needed"))
    return out.getvalue()
