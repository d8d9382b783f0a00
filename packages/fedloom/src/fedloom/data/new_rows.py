"""Unlabeled rows in the same representation as a model's training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, default_to_cpu, raise_data_problems
from fedloom.data.input_spec import NO_TABLE_HINT, InputSpec
from fedloom.data.samples import stack_unlabelled_samples
from fedloom.data.sources.array_data import as_features, convert_to_plain_array
from fedloom.data.sources.table.cells import ColumnPiece, Problems, decode_cells, is_missing
from fedloom.data.sources.table.checks import check_duplicate_columns
from fedloom.data.sources.table.dates import check_dates, replace_dates
from fedloom.data.sources.table.frames import frame_cells, frame_names, is_frame, refuse_unread_table
from fedloom.data.sources.table.levels import Factors, agreed_columns, factors_by_client, unapplied_factor_notes
from fedloom.data.sources.table.reading import RawTable
from fedloom.data.tables import level_name
from fedloom.data.text import UNKNOWN_TOKEN, encode_texts
from fedloom.errors import DataError, NoSamples, write_singular

REPAIR_HINT = "repair the cell, or train with impute = true, which fills missing cells"


class NewRows(NamedTuple):
    """Rows to predict.

    Attributes:
        x: raw columns of a table ``[N, p]`` (float64) in the order of the training data, with codes for levels and NaN
            for missing cells. For data that are not a table, samples ``[N, *shape]``.
        sites: client of each row, read from a column of the table. None if no column contains the names of the clients.
        notes: notes on cells that were filled.
        unknown: the notes on levels that do not occur in the training data.
        files: file that contains each row, if each row has a separate file.
        copied_columns: columns to write next to the predictions, as text, keyed by name.
    """

    x: Tensor
    sites: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    files: Sequence[str] | None = None
    copied_columns: Mapping[str, Sequence[str]] = {}
    unknown: tuple[str, ...] = ()


@default_to_cpu()
def new_rows(
    facts: InputSpec,
    rows: object,
    name: str = "rows",
    users: str | None = None,
    factors: Factors | None = None,
    keep: Sequence[str] = (),
    days_since: Mapping[str, str] | None = None,
) -> NewRows:
    """Return unlabeled rows as a model needs them: columns are matched by name, and levels become codes.

    Args:
        facts: description of the model's training data.
        rows: a `Dataset`, an open table (`fedloom.data.sources.tabular.RawTable`), a pandas, pyarrow or polars table, a
            dict of columns, or an array ``[N, *shape]``. If a table contains no text, it may also be given as an array
            of
            its columns. A model of sequences accepts texts or tokens ``[N, length]``. Columns that the model does not
            use are ignored. Samples may also be a list of arrays, tensors or pictures, a torch data set, or a data set
            from the hub (see `fedloom.data.samples.stack_unlabelled_samples` and, for bytes and floats,
            `InputSpec.samples`).
        name: name of the data in messages.
        users: column that contains the client of each row, or None.
        factors: factors of columns (see `fedloom.data.sources.tabular.TableSource`).
        keep: columns of a table that are added to the result, such as a patient number.
        days_since: date columns, each with the start of its days (a column or a date). It must not be used
            if the table is open.

    Raises:
        DataError: columns are missing, the shape does not match the model, numeric columns contain text, or the model
            was trained without imputation and cells are missing or levels are unknown. All problems are listed in a
            single message.
    """
    if isinstance(rows, (str, Path)) and not facts.vocabulary:
        raise DataError(f"{name} must be a table or an array, got the path {str(rows)!r}. Read the file first")
    if not isinstance(rows, Mapping):
        refuse_unread_table(rows, name)
    if isinstance(rows, Dataset):
        sites = None if rows.users is None else [rows.user_names[k] for k in rows.users.tolist()]
        return NewRows(facts.raw(rows), sites)
    if isinstance(rows, RawTable):
        new = _read_columns(facts, rows.names, rows.cells, rows.problems, users, factors, keep)
    elif is_frame(rows):
        names, problems = frame_names(rows), Problems(name, first=0)
        cells = _replace_dates(names, frame_cells(rows), problems, days_since, facts)
        new = _read_columns(facts, names, cells, problems, users, factors, keep)
    elif isinstance(rows, Mapping):
        arrays = {
            str(c): convert_to_plain_array(values, f"{name}, column {c!r}", mixed=True) for c, values in rows.items()
        }
        if single := [c for c, values in arrays.items() if values.ndim != 1]:
            raise DataError(f"{name}: column {single[0]!r} must be a list with one cell per row, even for a single row")
        columns = {c: decode_cells(values.tolist()) for c, values in arrays.items()}
        if len({len(cells) for cells in columns.values()}) > 1:
            raise DataError(
                f"{name}: columns have different lengths: {', '.join(f'{len(v)} ({c})' for c, v in columns.items())}"
            )
        names, problems = list(columns), Problems(name, first=0)
        cells = _replace_dates(names, (ColumnPiece(0, c, v) for c, v in columns.items()), problems, days_since, facts)
        new = _read_columns(facts, names, cells, problems, users, factors, keep)
    elif facts.vocabulary:
        new = _read_sequences(facts, convert_to_plain_array(rows, name), name)
    else:
        new = _read_array(facts, *stack_unlabelled_samples(rows, name), name, factors)
    if keep and not new.copied_columns:
        raise DataError(f"{name} has no column names, so {keep[0]!r} cannot be kept")
    if not len(new.x):
        raise NoSamples(f"{name} contains no rows to predict. Pass at least one row")
    return new


def _replace_dates(
    names: Sequence[str],
    cells: Iterator[ColumnPiece],
    problems: Problems,
    days_since: Mapping[str, str] | None,
    facts: InputSpec,
) -> Iterator[ColumnPiece]:
    """Replace dates in cells by numbers of days, in the same way as for training."""
    if not days_since or facts.table is None:
        return cells
    check_dates(days_since, names, problems.where)
    return replace_dates(cells, days_since, facts.table.missing, problems)


def _read_columns(
    facts: InputSpec,
    names: Sequence[str],
    cells: Iterable[ColumnPiece],
    problems: Problems,
    users: str | None,
    factors: Factors | None = None,
    keep: Sequence[str] = (),
) -> NewRows:
    table, where = facts.table, problems.where
    if table is None:
        shape = "x".join(map(str, facts.shape))
        raise DataError(f"{where} is a table, but the model takes samples of shape {shape}; {NO_TABLE_HINT}")
    if absent := [c.name for c in table.columns if c.name not in names]:
        raise DataError(
            f"{where} lacks the column{'s'[: len(absent) > 1]} {', '.join(map(repr, absent))} that "
            f"the model was trained on. Its columns: {', '.join(map(repr, names))}"
        )
    if lost := [column for column in keep if column not in names]:
        raise DataError(f"{where} has no column {lost[0]!r} to keep. Its columns: {', '.join(map(repr, names))}")
    check_duplicate_columns(where, names)
    agreed = agreed_columns(table, REPAIR_HINT, factors or {})
    parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in agreed}
    sites: list[str] = []
    kept: dict[str, list[str]] = {column: [] for column in keep}
    for piece in cells:
        if piece.column in kept:
            kept[piece.column] += ["" if cell is None else level_name(cell) for cell in piece.cells]
        if piece.column != users and piece.column not in agreed:
            continue
        missing = is_missing(piece.cells, table.missing)
        if piece.column == users:
            sites += ["" if out else level_name(cell) for cell, out in zip(piece.cells, missing, strict=True)]
        if piece.column in agreed:
            parts[piece.column].append(agreed[piece.column].read(piece, missing, problems))
    raise_data_problems(where, problems.sentences())
    columns = {name: np.concatenate(blocks) if blocks else np.empty(0) for name, blocks in parts.items()}
    for column, by_row in factors_by_client(factors or {}, sites):
        if column in columns and users in names:
            columns[column] *= by_row
    notes = [f"column {n!r}: {one.filled} cells filled as in training" for n, one in agreed.items() if one.filled]
    unknown = [
        f"column {n!r}: {one.unknown.total()} cells contain levels that the training data do not contain: "
        f"{one.listed_levels}"
        for n, one in agreed.items()
        if one.unknown
    ]
    x = torch.from_numpy(np.stack(list(columns.values()), 1))
    unknown = [*map(write_singular, unknown)]
    notes = [*map(write_singular, notes), *unknown]
    notes += [] if users in names else unapplied_factor_notes(factors or {}, users, None)
    return NewRows(x, sites if users in names else None, tuple(notes), copied_columns=kept, unknown=tuple(unknown))


def _read_sequences(facts: InputSpec, rows: np.ndarray[Any, Any], name: str) -> NewRows:
    """Return texts ``[N]`` or tokens ``[N, length]`` as rows for a model of sequences."""
    if rows.dtype.kind != "U":
        wide = torch.from_numpy(rows) if rows.dtype.kind in "ui" else torch.zeros(0)
        if wide.ndim != 2:
            raise DataError(
                f"{name} must be texts, or tokens [N, length] as whole numbers, got {rows.dtype} {rows.shape}"
            )
        return NewRows(facts.samples(wide.to(torch.int64), name))
    if facts.vocabulary[1:2] != (UNKNOWN_TOKEN,):
        raise DataError(f"{name} contains texts, but the model was trained on tokens given as numbers. Pass numbers")
    x = encode_texts([str(text) for text in rows.ravel()], facts.vocabulary, facts.shape[0])
    strange = int((x == 1).sum())
    note = f"tokens outside the vocabulary of the training data, read as {UNKNOWN_TOKEN}: {strange}"
    return NewRows(x.long(), notes=(write_singular(note),) if strange else ())


def _read_array(facts: InputSpec, x: np.ndarray[Any, Any], dtype: str, name: str, factors: Factors | None) -> NewRows:
    table = facts.table
    if x.dtype.kind not in "uifb":
        raise DataError(f"{name} must contain numbers, got {x.dtype}. A table with text needs column names")
    if table is not None:
        if any(column.levels for column in table.columns):
            raise DataError(f"{name}: the model was trained on text columns. Pass a table with column names")
        if x.ndim != 2 or x.shape[1] != len(table.columns):
            raise DataError(f"{name} has shape {x.shape}, but expected [rows, {len(table.columns)}]")
        cells = (ColumnPiece(0, c.name, x[:, k].tolist()) for k, c in enumerate(table.columns))
        return _read_columns(facts, [c.name for c in table.columns], cells, Problems(name, first=0), None, factors)
    if x.ndim == 4 and x.shape[1] == 1 and x.shape[2:] == facts.shape:  # sequences from a torch data set
        x = x[:, 0]
    if x.ndim > 1 and x.shape[1:] != facts.shape and (x.shape[0], 1, *x.shape[1:]) == (x.shape[0], *facts.shape):
        x = x[:, None]
    samples = torch.from_numpy(np.require(as_features(x, name), requirements=["C", "W"]))
    return NewRows(facts.samples(samples, name, dtype))
