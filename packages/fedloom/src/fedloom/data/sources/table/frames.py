"""Tables in memory (pandas, Arrow and Hugging Face data sets), read as columns of cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fedloom.data.samples import find_pair
from fedloom.data.sources.table.cells import ColumnPiece, decode_cells
from fedloom.errors import ConfigError

READING_METHODS = ("read_all", "collect", "toPandas", "execute")
"""Methods that give access to the rows of other libraries' tables: Arrow streams, polars, Spark and Ibis."""


def class_names(obj: Any, column: Any) -> tuple[str, ...]:
    """Return the names of the classes in a column of a Hugging Face data set, or () if it contains no class numbers."""
    return tuple(getattr(obj.features[column], "names", None) or ())


def is_hub(obj: object) -> bool:
    """Return True if the object is a Hugging Face data set."""
    return hasattr(obj, "column_names") and hasattr(obj, "features")


def is_frame(obj: Any) -> bool:
    """Return True for a pandas or Arrow table, or a Hugging Face data set in which each cell is one number or text."""
    if (hasattr(obj, "columns") and hasattr(obj, "iloc")) or _is_arrow(obj):
        return True
    if is_hub(obj) and not hasattr(obj, "__len__"):
        raise ConfigError(
            "a stream from the hub has no length. Load it without streaming, or make a Dataset from its rows"
        )
    return is_hub(obj) and len(obj) > 0 and all(np.ndim(cell) == 0 for cell in obj[0].values())


def refuse_unread_table(obj: Any, name: str) -> None:
    """Raise an error if an object contains the rows of a table, but not in a form that fedloom reads.

    Raises:
        ConfigError: the object is such a table. The message states how to convert it.
    """
    first = obj[0] if isinstance(obj, list) and obj and not is_hub(obj) else None
    reading = (m for m in READING_METHODS if callable(getattr(obj, m, None)) and not hasattr(obj, "__array__"))
    if method := next(reading, ""):
        what, cure = f"a {type(obj).__name__}, whose rows have not been read", f"the result of its method {method}()"
    elif names := getattr(getattr(obj, "dtype", None), "names", None):
        what, cure = f"a structured array with the fields {', '.join(names)}", "pandas.DataFrame(x)"
    elif isinstance(obj, Mapping) and obj and find_pair(obj) is None and all(map(_is_column, obj.values())):
        what, cure = "a dictionary of columns", "pandas.DataFrame(columns)"
    elif isinstance(first, Mapping) and find_pair(first) is None and all(np.isscalar(v) for v in first.values()):
        what, cure = "a list of rows", "pandas.DataFrame(rows)"
    elif first is not None and _is_arrow(first):
        what = f"a list of tables ({type(first).__name__})"
        cure = "one table, such as pyarrow.Table.from_batches(tables) or pyarrow.concat_tables(tables)"
    else:
        return
    raise ConfigError(f"{name} is {what}. Pass {cure}")


def _is_column(values: Any) -> bool:
    """Return True for an array of one dimension, and for a list of numbers or texts."""
    return bool(np.isscalar(values[0]) if isinstance(values, list) and values else getattr(values, "ndim", 0) == 1)


def _is_arrow(obj: object) -> bool:
    """Return True for a pyarrow table, or for a table of another library that has no index and that Arrow can read."""
    return hasattr(obj, "__arrow_c_stream__") and hasattr(obj, "columns") and not hasattr(obj, "iloc")


def _convert_to_arrow(obj: object) -> Any:
    """Convert a table to pyarrow without copying its cells."""
    import pyarrow as pa  # slow to import

    return obj if isinstance(obj, pa.Table) else pa.table(obj)


def frame_names(obj: Any) -> list[str]:
    """Return the column names of an object accepted by `is_frame`."""
    return [str(name) for name in (obj.column_names if hasattr(obj, "column_names") else obj.columns)]


def coded_columns(obj: Any) -> list[str]:
    """Return the columns of an object that `is_frame` accepts whose type defines levels."""
    names = frame_names(obj)
    if is_hub(obj):
        return [name for name in names if class_names(obj, name)]
    if _is_arrow(obj):
        from pyarrow import types  # slow to import

        return [
            name
            for name, field in zip(names, _convert_to_arrow(obj).schema, strict=True)
            if types.is_dictionary(field.type)
        ]
    return [name for name, kind in zip(names, obj.dtypes, strict=True) if kind.name == "category"]


def frame_cells(obj: Any) -> Iterator[ColumnPiece]:
    """Yield the columns of an object accepted by `is_frame`. Missing cells become None."""
    if is_hub(obj):
        for column in obj.column_names:
            cells = [v.item() if isinstance(v, torch.Tensor | np.generic) else v for v in obj[column]]
            if names := class_names(obj, column):
                cells = [None if cell is None or cell < 0 else names[int(cell)] for cell in cells]
            yield ColumnPiece(0, str(column), cells)
    elif _is_arrow(obj):
        for column, chunks in zip(frame_names(obj), _convert_to_arrow(obj).columns, strict=True):
            yield ColumnPiece(0, column, decode_cells(chunks.to_pylist()))
    else:
        for column in obj.columns:
            values = obj[column]
            yield ColumnPiece(0, str(column), decode_cells(values.astype(object).where(values.notna(), None).tolist()))
