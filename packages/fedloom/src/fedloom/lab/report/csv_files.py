"""Writer of all CSV files: cells are converted to text here, and spreadsheet formulas are made inert."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa
from pyarrow import csv as arrow_csv

T = TypeVar("T")


def inert(cell: T) -> T | str:
    """Return an inert CSV cell.

    Text that a spreadsheet would evaluate as a formula is prefixed with an apostrophe, as OWASP advises.

    Numbers are written with up to 12 digits.

    >>> inert("=1+1"), inert("fedavg"), inert(-1.5), inert(1 / 3), inert(7856937935508588.0)
    ("'=1+1", 'fedavg', -1.5, 0.333333333333, '7.85693793551e+15')
    """
    if isinstance(cell, float) and math.isfinite(cell):
        text = f"{cell:.12g}"
        return text if "e+" in text else float(text)  # type: ignore[return-value]
    if not isinstance(cell, str):
        return cell
    mark = "'" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else ""
    return mark + cell.replace("\r", " ")  # which the csv module does not quote, though readers end a row there


def csv_of(columns: Sequence[str], rows: Iterable[Sequence[object] | Mapping[str, object]]) -> str:
    """Render a header and rows as CSV with inert cells. Missing values are empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(map(inert, columns))
    for row in rows:
        cells = [row.get(column) for column in columns] if isinstance(row, Mapping) else row
        table.writerow(["" if cell is None else inert(cell) for cell in cells])
    return text.getvalue()


def csv_of_table(table: pa.Table) -> bytes:
    """Render an Arrow table as CSV with inert names and texts, and all digits of numbers."""
    names = [str(inert(name)) for name in table.column_names]
    columns = [
        pa.array(map(inert, column.to_pylist()), pa.string()) if pa.types.is_string(column.type) else column
        for column in table.columns
    ]
    out = io.BytesIO()
    arrow_csv.write_csv(pa.table(columns, names=names), out, arrow_csv.WriteOptions(quoting_style="needed"))
    return out.getvalue()
