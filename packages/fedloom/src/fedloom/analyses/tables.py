"""Tables of analyses: column types, and the conversion of rows to tables."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

INTEGER_TYPE, TEXT_TYPE, NUMBER_TYPE = pa.int64(), pa.string(), pa.float64()


def make_table(rows: Sequence[tuple[object, ...]], /, **kinds: pa.DataType) -> pa.Table:
    """Return a table with the given rows and with columns of these names and types."""
    return pa.table({n: pa.array([r[k] for r in rows], kind) for k, (n, kind) in enumerate(kinds.items())})
