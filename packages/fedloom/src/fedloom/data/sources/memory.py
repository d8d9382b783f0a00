"""Conversion of objects in memory (arrays, tensors, torch, Hugging Face and pandas data sets) to a `Dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedloom.data.dataset import Dataset, Task
from fedloom.data.sides import (
    TARGET_NAMES,
    check_joinable,
    check_target_order,
    join_roles,
    merge_class_names,
    read_sample_set,
)
from fedloom.data.sources._base import Source
from fedloom.data.sources.array_data import add_notes, make_dataset
from fedloom.data.sources.rereading import REREAD_SAMPLES, Rereading, check_reread_samples
from fedloom.data.sources.table.cells import Problems
from fedloom.data.sources.table.conversion import read_table
from fedloom.data.sources.table.frames import (
    coded_columns,
    frame_cells,
    frame_names,
    is_frame,
    is_hub,
    refuse_unread_table,
)
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.sources.tabular import Csv
from fedloom.data.subjects.design import SAMPLE_ROLES, create_design
from fedloom.data.tables import level_name
from fedloom.errors import ConfigError, DataError
from fedloom.hints import suggest_nearest
from fedloom.values import check_type, fields_of, make

COLUMN_OPTIONS = (
    "client_column", "subject", "order", "strata", "test_column", "categorical", "drop", "include", "columns",
    "group_columns", "event",
)  # fmt: skip
"""Options of a table whose values are names of columns."""
MAX_TOKENS = 2**24
"""Maximum number of tokens. Every integer up to this number can be represented exactly by the type of samples,
float32."""


def as_dataset(
    obj: Any, target: Any = None, *, task: Task | None = None, test: Any = None, name: str = "data", **options: Any
) -> Dataset:
    """Convert objects in memory to a data set.

    Args:
        obj: a `Dataset`, which is returned unchanged, or one of the following objects: features ``[N, ...]`` as an
            array or tensor, a tuple ``(x, y)``, a dictionary with ``x`` and ``y`` (or another pair of names, such as
            ``data`` and ``target``), a dictionary with ``train`` and ``test``, each of which contains such a pair, a
            torch `Dataset` or a list whose samples are tuples ``(features, target)`` or dictionaries with such a pair,
            a Hugging Face `Dataset` or `DatasetDict`, a pandas `DataFrame` (alone or with its targets), a pyarrow
            table, or another table that Arrow can read (such as a polars table). If the transforms of a torch `Dataset`
            change samples at random, the samples are read again for each training step.
        target: targets ``[N]``, ``[N, k]`` or masks ``[N, height, width]``, if `obj` contains only features. It can
            also be the name of the target column. If None, the target is the column ``label``, ``labels``,
            ``fine_label``, ``target`` or ``y``. If a table has no such column, None means its last column.
        task: meaning of the targets. If None, the task is classification if the targets are integers, text or booleans.
        test: official test set, which must have the same type as `obj`. It is not allowed for tables, because a table
            marks test rows in a column (``test_column`` or ``test_since``).
        name: name of the data set in reports and messages.
        options: options for arrays and samples, which are ``classes`` (names), ``mean``, ``std``, ``clients`` (client
            of each sample, or the column with the clients), ``subject`` (person of each sample, such as a patient),
            ``order`` (time of each sample) and ``strata`` (levels whose proportions splits preserve), which may also be
            dictionary entries, ``features`` (column with the features), ``channels_last``, ``layout`` ("sequence" for
            ``[N, time, features]``), and ``vocabulary`` (names of the tokens, or the number of tokens: features are
            then tokens ``[N, length]``). Options for tables, including CSV files, are ``client_column``, ``subject``,
            ``order``, ``strata``, ``test_column``, ``test_levels``, ``test_since``, ``categorical``, ``drop``,
            ``columns``, ``missing``, ``impute``, ``scale``, ``days_since``.

    Raises:
        ConfigError: the type of the object is unknown, or an option or a column does not exist.
        DataError: shapes, types, lengths or values are invalid. A single message lists all problems.
    """
    if isinstance(obj, Dataset):
        if target is not None or task is not None or test is not None or options:
            raise ConfigError(
                f"{obj.name} is already a Dataset. Pass target, task, test and options when you create the Dataset"
            )
        return obj
    if isinstance(obj, Mapping) and "train" in obj:
        sides = [obj["train"], *([obj["test"]] if test is None and "test" in obj else [])]
    else:
        sides = [obj]
    sides += [test] if test is not None else []
    first = sides[0]
    refuse_unread_table(first[0] if isinstance(first, tuple) and first else first, name)
    if isinstance(first, tuple) and len(first) == 2 and len(sides) == 1 and is_frame(first[0]) and target is None:
        first, target = first
    if is_frame(first):
        if len(sides) > 1:
            raise ConfigError(
                f"{name}: a table cannot have a separate test set, because its scaling is fitted per client. Join the "
                "two tables, add a column that marks test rows, and name this column in test_column"
            )
        return _table_source(first, target, task, name, options)
    allowed = ("classes", "mean", "std", "clients", "features", "channels_last", "layout", "vocabulary", *SAMPLE_ROLES)
    if odd := [key for key in options if key not in allowed]:
        raise ConfigError(f"{name}: unknown option {odd[0]!r}; {suggest_nearest(odd[0], allowed)}")
    _check_kinds(name, task, options)
    roles = {role: options.pop(role, None) for role in SAMPLE_ROLES}
    roles |= join_roles(sides, name)
    column, users, last = (
        options.pop("features", None),
        options.pop("clients", None),
        options.pop("channels_last", None),
    )
    parts = [
        read_sample_set(side, None if i and not isinstance(target, str) else target, column, users, name).placed(
            last, name
        )
        for i, side in enumerate(sides)
    ]
    if len({part.x.shape[1:] for part in parts}) > 1:
        raise DataError(
            f"{name}: training samples have shape {parts[0].x.shape[1:]}, but test samples have shape "
            f"{parts[1].x.shape[1:]}"
        )
    check_joinable(
        name, dict(zip(("the training set", "the test set"), parts, strict=False)), bool(options.get("vocabulary"))
    )
    if users is not None:
        options["users"] = users
    if parts[0].users is not None:
        options["users"] = np.concatenate([part.users for part in parts])
    x, y = (
        values[0] if len(parts) == 1 else np.concatenate(values)
        for values in zip(*((p.x, p.y) for p in parts), strict=True)
    )
    options.setdefault("classes", merge_class_names(parts))
    options["original_dtype"] = parts[0].dtype
    data = make_dataset(name, x, y, task, split=len(parts[0].x) if len(parts) == 2 else None, **options)
    data = Rereading.attach(data, [(len(part.x), part.reader) for part in parts])
    return add_notes(
        replace(
            data,
            design=create_design(roles, len(data), name),
            notes=(*data.notes, *dict.fromkeys(f"{name}: {note}" for part in parts for note in part.notes)),
        )
    )


def _table_source(obj: Any, target: Any, task: Task | None, name: str, options: dict[str, Any]) -> Dataset:
    options = {key: _name_columns(value) if key in COLUMN_OPTIONS else value for key, value in options.items()}
    if is_hub(obj):  # its rows may pass through a transform
        some = range(min(len(obj), REREAD_SAMPLES))
        for _ in check_reread_samples(
            (obj[k] for k in some), lambda places: (obj[k] for k in places), lambda: (), name
        ):
            pass
    if is_frame(target) and task == "multilabel" and hasattr(obj, "iloc") and len(target) == len(obj):
        check_target_order(obj, target, name)
        if both := [column for column in map(str, target.columns) if column in map(str, obj.columns)]:
            raise ConfigError(
                f"{name}: the features and the labels both have a column {both[0]!r}. Rename one of the columns"
            )
        obj = obj.assign(**{str(column): np.asarray(target[column]) for column in target.columns})
        target = [*map(str, target.columns)]
    if np.ndim(target) == 2 and np.shape(target)[1] == 1:
        target = target.iloc[:, 0] if hasattr(target, "iloc") else np.asarray(target)[:, 0]
    labels = isinstance(target, list | tuple) and bool(target) and all(isinstance(n, str) for n in target)
    labels = labels and (task == "multilabel" or {*target} <= {*frame_names(obj)})
    if hasattr(obj, "iloc") and np.ndim(target) == 1 and not labels:
        if len(target) != len(obj):
            raise DataError(f"{name} has {len(obj)} samples but {len(target)} targets. Every sample needs one target")
        check_target_order(obj, target, name)
        label = getattr(target, "name", None)
        label = label if isinstance(label, str) else "target"
        if label in obj.columns and not np.array_equal(obj[label].astype(object), np.asarray(target, object)):
            raise ConfigError(
                f"{name}: a column of the table is also called {label!r}, but has different values. "
                "Rename one of the two"
            )
        obj, target = obj.assign(**{label: target.array if hasattr(target, "array") else np.asarray(target)}), label
    if target is not None and not labels and (np.ndim(target) or not isinstance(target, (str, int, np.integer))):
        shown = f"{type(target).__name__} {np.shape(target)}" if np.ndim(target) else repr(target)
        raise ConfigError(f"{name}: target must be the name of a column or the targets themselves, got {shown:.60}")
    names = frame_names(obj)
    if not names:
        raise DataError(f"{name}: the table has no columns. Provide the features and the target as columns")
    target = next((n for n in TARGET_NAMES if n in names), names[-1]) if target is None else target
    target = tuple(target) if labels else str(target)
    check_type(f"{name}: client_column", options.get("client_column"), str, type(None))
    check_type(f"{name}: categorical", options.get("categorical", ()), list, tuple)
    options["categorical"] = tuple(
        {*options.get("categorical", ()), *coded_columns(obj)}
        - {*(target if labels else (target,)), options.get("client_column")}
    )
    check_type(f"{name}: task", task, str, type(None))
    table_options = {"target": target, "task": task or "auto", **options}
    spec = make(Csv, table_options, name, {k: v for k, v in fields_of(TableSource).items() if k != "path"})
    problems = Problems(name, first=0)
    return read_table(spec, name, names, spec.convert_dates(names, frame_cells(obj), problems), problems)


def _check_kinds(name: str, task: object, options: dict[str, Any]) -> None:
    """Raise an error if an option for arrays is of the wrong type. Names of classes and tokens are converted to text.

    Raises:
        ConfigError: an option has the wrong type. The message states the correct type.
    """
    for key in ("classes", "vocabulary"):
        value = options.get(key)
        if isinstance(value, list | tuple | np.ndarray) and np.ndim(value) == 1:
            options[key] = tuple(map(level_name, value))
    flat = {key: isinstance(options.get(key), str | tuple) for key in ("classes", "vocabulary")}
    size, last = options.get("vocabulary"), options.get("channels_last")
    for key, value, right, what in (
        ("task", task, isinstance(task, str), "a name, as 'regression'"),
        ("layout", options.get("layout"), isinstance(options.get("layout"), str), "'sequence' or 'image'"),
        ("channels_last", last, isinstance(last, bool), "True or False"),
        ("classes", options.get("classes"), flat["classes"], "a list of names"),
        ("vocabulary", size, flat["vocabulary"] or (isinstance(size, int) and 0 <= size <= MAX_TOKENS),
         f"a list of names, or a number up to {MAX_TOKENS:,}"),
    ):  # fmt: skip
        if value is not None and not right:
            raise ConfigError(f"{name}: {key} must be {what}, got {value!r:.60}")


def _name_columns(value: Any) -> Any:
    """Return column names as text.

    In pandas, columns without names are numbered, so that 0 may be the name of a column.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    return [*map(_name_columns, value)] if isinstance(value, list | tuple) else value


class HubData(Source):
    """Data set from the Hugging Face hub, ``hub:owner/name``, with images or numbers and a label.

    This source connects to the hub, because the user has asked for it by name.
    """

    name: str = Field(min_length=1, description="name on the Hugging Face Hub, as owner/name")
    config: str | None = Field(default=None, description="configuration of the data set, if there are several")
    train: str = Field(default="train", description="split to use for training")
    test: str | None = Field(default="test", description="split to use as the official test set, if it exists")
    x: str | None = Field(
        default=None, description="column that contains the features (default: the first image or array column)"
    )
    y: str | None = Field(
        default=None, description="column that contains the target (default: label, labels or fine_label)"
    )
    client_column: str | None = Field(
        default=None, description="column that identifies the client of each sample, such as writer_id"
    )
    task: Literal["classification", "regression"] = Field(default="classification", description="type of y")
    mean: tuple[float, ...] | None = Field(
        default=None, description="value subtracted from samples (for images: from pixels in [0, 1])"
    )
    std: tuple[float, ...] | None = Field(
        default=None, description="value by which samples are divided after the subtraction"
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the training and test splits.

        Without an Internet connection, only data in the cache of the `datasets` library can be loaded.
        """
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(f"hub:{self.name}: needs the `hub` extra. Run: pip install 'fedloom[hub]'") from error
        try:
            splits: Any = datasets.load_dataset(self.name, self.config)
        except Exception as error:  # errors of the library, urllib or httpx
            raise DataError(
                f"hub:{self.name}: cannot be loaded ({type(error).__name__}: {error}). Check the name "
                "and the connection, or load it once on a machine with a connection (the library "
                "keeps data sets in ~/.cache/huggingface)"
            ) from error
        if self.train not in splits:
            raise DataError(f"hub:{self.name} has no split {self.train!r}; {suggest_nearest(self.train, splits)}")
        data = as_dataset(
            splits[self.train],
            self.y,
            task=self.task if self.task == "regression" else None,
            test=splits[self.test] if self.test is not None and self.test in splits else None,
            name=f"hub:{self.name}",
            **{
                k: v
                for k, v in (
                    ("features", self.x),
                    ("clients", self.client_column),
                    ("mean", self.mean),
                    ("std", self.std),
                )
                if v is not None
            },
        )
        return replace(data, name=self.name)
