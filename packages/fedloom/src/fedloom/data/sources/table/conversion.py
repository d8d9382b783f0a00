"""Conversion of a table's cells to a data set, by the roles of its columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.dataset import (
    CLASS_TASKS,
    MAX_CLASSES,
    MISSING_LEVEL,
    TOO_MANY_CLASSES_TEXT,
    Dataset,
    raise_data_problems,
)
from fedloom.data.sources._base import name_file_in_errors
from fedloom.data.sources.archive import GrowingRows
from fedloom.data.sources.table import checks
from fedloom.data.sources.table.cells import Cells, ColumnPiece, Problems, convert_to_numbers, is_missing
from fedloom.data.sources.table.checks import Coded, coded_numbers, count_rows_by_level
from fedloom.data.sources.table.designs import DesignReading
from fedloom.data.sources.table.levels import (
    AgreedColumnConverter,
    LevelCodeCollector,
    agreed_columns,
    factors_by_client,
    get_factor,
    unapplied_factor_notes,
)
from fedloom.data.sources.table.roles import TableRoles
from fedloom.data.sources.table.targets import agreed_classes, check_event, infer_task, missing_columns_message
from fedloom.data.survey.facts import MAX_DISTINCT_SHARE
from fedloom.data.survey.findings import ROW_NAMES, exclusion_reason, table_findings, text_exclusion_reason
from fedloom.data.survey.leaks import ReadColumn
from fedloom.data.survey.people import IDENTITY_KINDS, UNSURE_KIND
from fedloom.data.tables import MISSING_MARKERS, Table, TableColumn, level_name, markers_of
from fedloom.errors import ConfigError, DataError, NoSamples, direction_in
from fedloom.formats import shorten_list

MAX_SHOWN_ROWS = 10
"""Maximum number of rows that a message lists."""
MAX_COLUMNS = 100_000
"""Maximum number of columns in a table. A numeric array with this many columns can be read in a fraction of the
time."""
MAX_STORED_TEXTS = 100_000
"""Maximum number of distinct texts in a non-numeric column that are stored in order to detect names of people."""


def read_table(
    spec: TableRoles, name: str, names: list[str], cells: Iterable[ColumnPiece], problems: Problems
) -> Dataset:
    """Convert the columns of a table to a data set.

    Args:
        spec: roles of the columns, including the agreement if there is one.
        name: name of the data set.
        names: names of the columns.
        cells: pieces of all columns.
        problems: collector for all problems.

    Raises:
        ConfigError: columns do not exist, or no column remains as a feature.
        DataError: values are missing, numeric columns contain text, rows have different numbers of cells, or the label
            does not fit the task. All problems are listed in a single message.
    """
    reading = _TableReading(spec, name, names, problems)
    for piece in cells:
        reading.add(piece)
    return reading.build_dataset()


class _TableReading:
    """Conversion of a table to a data set: assign roles to the columns, add their cells, and return the result."""

    def __init__(self, spec: TableRoles, name: str, names: list[str], problems: Problems) -> None:
        where = problems.where
        if not names:
            raise NoSamples(f"{where} is empty. A table needs a header row and rows below it")
        self.spec, self.name, self.problems = spec, name, problems
        agreement = spec.agreement
        self.labels, self.event = spec.outcomes or (names[-1],), spec.targets.get("event")
        self.label = self.labels[0]
        self.task = "survival" if spec.event is not None and spec.task == "auto" else spec.task
        self.task = self.task if agreement is None else agreement.task
        check_event(where, self.task, self.event, self.label, scaled=(spec.centre, spec.unit) != (0.0, 1.0))
        self.special = [*spec.columns, *([] if spec.client_column is None else [spec.client_column])]
        self.design = design = DesignReading(spec.chosen)
        if {*self.labels} & {*design.complete} or (self.event is not None and self.event in design.complete):
            raise ConfigError(
                f"{where}: the target cannot also be subject, order or test_column. Name a different column"
            )
        wanted = {
            *design.columns,
            *self.labels,
            *([] if self.event is None else [self.event]),
            *spec.factors,
            *spec.group_columns,
        }
        if agreement is None:
            wanted |= {*spec.categorical, *spec.drop, *spec.include, *self.special}
        else:
            wanted |= {column.name for column in agreement.table.columns}
            self.special = [column for column in self.special if column in names]
        self.special += [column for column in design.complete if column != design.order]
        if len(names) > MAX_COLUMNS:
            raise DataError(
                f"{where} has {len(names):,} columns, but fedloom reads at most {MAX_COLUMNS:,}. Check the separator, "
                "or provide the features as an array (NPZ, or a folder with x.npy)"
            )
        checks.check_duplicate_columns(where, names)
        if disguised := direction_in(*names, hidden=True):
            raise DataError(f"{where}: a column {disguised}")
        if absent := sorted(wanted - set(names)):
            raise ConfigError(f"{where}: {missing_columns_message(absent, names, agreed=agreement is not None)}")
        self.agreed: dict[str, AgreedColumnConverter] = {}
        starts = {*spec.days_since.values()} - {*spec.days_since}
        no_features = {*self.labels, self.event, spec.client_column, *spec.drop, *design.no_features, *starts}
        self.features = [c for c in names if c not in no_features]
        if agreement is not None:
            if twice := {*self.labels} & {column.name for column in agreement.column}:
                raise ConfigError(
                    f"{where}: {min(twice)!r} is a feature in the agreement. Set target to the column to predict"
                )
            self.agreed = agreed_columns(agreement.table, "repair it, or agree on impute = true", spec.factors)
            self.features = list(self.agreed)
        if not self.features:
            raise ConfigError(
                f"{where}: no column is left as a feature. The header contains "
                f"{', '.join(map(repr, names))}. Check separator, target and drop"
            )
        categorical = () if self.agreed else spec.categorical
        included = () if self.agreed else [c for c in spec.include if c in self.features and c not in categorical]
        self.categorical = [c for c in self.features if c in categorical]
        self.texts: dict[str, Counter[str]] = {}
        self.place = {column: k for k, column in enumerate(self.features)}
        self.codes = {
            column: LevelCodeCollector()
            for column in {self.label, *categorical, *self.special, *spec.group_columns, *included, *design.coded}
        }
        self.numeric = {c for c in self.features if c not in categorical and c not in self.agreed}
        self.x = GrowingRows((len(self.features),), np.float64)
        self.measured = {
            column: GrowingRows((), np.float64) for column in (*self.labels, self.event) if column is not None
        }
        self.events_seen = set[str]()
        self.spellings = checks.SuspectSpellings()
        self.markers, self.unmatched = spec.markers, [text for text in spec.missing if text not in MISSING_MARKERS]

    @property
    def numeric_label(self) -> bool:
        """True if the label is a number rather than a class."""
        return self.task not in (*CLASS_TASKS, "auto")

    def add(self, piece: ColumnPiece) -> None:
        """Add the cells in a piece of a column."""
        start, column, block = piece
        roles = (self.codes, self.numeric, self.agreed, self.measured, self.design.columns)
        if not any(column in columns for columns in roles):
            return
        rows, missing = self.x.reserve(start, len(block)), is_missing(block, self.markers)
        if self.unmatched and missing.any():
            holes = [cell for cell, hole in zip(block, missing, strict=True) if hole]
            self.unmatched = [text for text in self.unmatched if not any(map(markers_of((text,)).hold, holes))]
        if column not in self.agreed or column in self.design.complete:
            self._check_gaps(piece, missing)
        self.design.add(piece, missing)
        if column in self.numeric or column in self.agreed or (column in self.measured and self.numeric_label):
            self.spellings.add(column, block)
        if column in self.codes:
            self._add_levels(piece, missing)
        if column in self.agreed:
            rows[:, self.place[column]] = self.agreed[column].read(piece, missing, self.problems)
        elif column in self.numeric:
            values = convert_to_numbers(piece, missing, self.problems)
            rows[:, self.place[column]] = values * get_factor(self.spec.factors, column)
            if self.problems.has("number", column):  # perhaps a column of names, which must not be a feature
                texts = self.texts.setdefault(column, Counter())
                if len(texts) <= MAX_STORED_TEXTS:
                    texts.update(str(cell) for cell, hole in zip(block, missing, strict=True) if not hole)
        if column in self.measured and self.numeric_label:
            if column == self.event and self.spec.event_levels:
                piece = piece._replace(cells=self._events(block))
            self.measured[column].reserve(start, len(block))[:] = convert_to_numbers(piece, missing, self.problems)

    def _events(self, cells: Cells) -> list[float]:
        """Return 1 for cells that mean an event, and 0 for all other cells."""
        counted = [level_name(cell) in self.spec.event_levels for cell in cells]
        self.events_seen.update(level_name(cell) for cell, is_event in zip(cells, counted, strict=True) if is_event)
        return [float(is_event) for is_event in counted]

    def _add_levels(self, piece: ColumnPiece, missing: NDArray[np.bool_]) -> None:
        """Add the levels in a piece of a column."""
        codes, where = self.codes[piece.column], f"{self.problems.where}: column {piece.column!r}"
        with name_file_in_errors(Path(where)):
            codes.add(piece.cells, missing)
        if piece.column == self.label and not self.numeric_label and len(codes.levels) > MAX_CLASSES:
            raise DataError(f"{where}: more than {MAX_CLASSES:,} classes; {TOO_MANY_CLASSES_TEXT}")

    def _check_gaps(self, piece: ColumnPiece, missing: NDArray[np.bool_]) -> None:
        """Report missing cells, unless an option allows them."""
        spec, column = self.spec, piece.column
        special = column in self.measured or column in self.special or column in self.design.complete
        several = self.task == "multilabel" and column in self.labels
        if (column in spec.drop and not special) or (spec.unlabelled != "refuse" if special else spec.impute):
            return
        cure = "repair it, add the column to drop, or set impute = true for a feature"
        if special:
            cure = "repair it, or set unlabelled = 'drop' to leave such rows out"
            cure += ", or 'keep' to train on the other labels of these rows" if several else ""
            if column == self.design.marked:
                rows = [str(self.problems.first + piece.start + k) for k in np.flatnonzero(missing).tolist()]
                shown = shorten_list(rows, MAX_SHOWN_ROWS)
                cure = f"write the level of training rows or of test rows there, which keeps the rows (rows {shown})"
        self.problems.add_gaps(piece, missing, cure)

    def build_dataset(self) -> Dataset:
        """Return the data set after all cells have been added."""
        spec, agreement, where, problems = self.spec, self.spec.agreement, self.problems.where, self.problems
        left_out = self._leave_out()
        sentences = problems.sentences()
        if self.x.size == 0 and not sentences:
            raise NoSamples(f"{where} contains no rows below the header, so the table is empty")
        coded = {
            column: codes.build_codes() if codes.rows else (np.empty(0), ()) for column, codes in self.codes.items()
        }
        for column, (_, named) in coded.items():
            if disguised := direction_in(*named, hidden=True):
                raise DataError(f"{where}: column {column!r}: a level {disguised}")
        label, classes = coded[self.label]
        if spec.client_column in coded:
            self._convert(*coded[spec.client_column])
        if agreement is None:
            task, wrong = infer_task(self.task, self.label, count_rows_by_level(coded[self.label]), bool(sentences))
        else:
            task = agreement.task
            label, classes, wrong = agreed_classes(agreement, self.label, label, classes)
            wrong += checks.unknown_level_errors(self.agreed, len(self._numbers))
            wrong += checks.agreed_range_errors(agreement.table, self._numbers)
        if task == "multilabel":
            wrong += checks.find_odd_labels(self._targets, problems.first)
        if task == "survival":
            times, events = self._targets.items()
            wrong += checks.survival_time_errors(times, events, problems.first)
            absent = [text for text in spec.event_levels if text not in self.events_seen]
            if absent and agreement is None:  # a single site may have no events
                wrong.append(f"event_levels: no cell of {self.event!r} is {absent[0]!r}. Name values that occur in it")
            stated = {*spec.include, *spec.group_columns} if agreement is None else {*self.features}
            columns = {name: self._numbers[:, k] for name, k in self.place.items() if name not in stated}
            wrong += checks.note_late_entry(columns, times)
        raise_data_problems(where, [*sentences, *wrong, *self.design.wrong(problems.first)])
        regression = task == "regression"
        numeric = [*self._targets.values()] or [label]
        if spec.unlabelled == "keep":
            labels = np.stack(numeric)
            has_label = ~np.isnan(labels).all(0)  # rows without any label are omitted
            numeric = [*np.where(np.isnan(labels) & has_label, -1.0, labels)]
        whole = [*numeric, *(coded[c][0] for c in self.special), *self.design.times()]
        keep = torch.from_numpy(~np.isnan(whole).any(0))
        values = torch.from_numpy(self._numbers)
        for column in self.categorical:
            values[:, self.place[column]] = torch.from_numpy(coded[column][0])
        values = values if bool(keep.all()) else values[keep]
        y = torch.from_numpy(np.stack(numeric, 1))[keep]
        split_by = [c for c in self.special if c not in self.design.complete or c in spec.columns]
        codes = {c: torch.from_numpy(coded[c][0])[keep].long() for c in split_by}
        levels = {c: coded[c][1] for c in split_by}
        for column in spec.group_columns:
            is_number = column in self.numeric or (column in self.agreed and not self.agreed[column].column.levels)
            places, names = coded[column] if not is_number else coded_numbers(self._numbers[:, self.place[column]])
            codes[column] = torch.from_numpy(np.nan_to_num(places, nan=len(names)))[keep].long()
            levels[column] = (*names, MISSING_LEVEL)
        centre, unit = (spec.centre, spec.unit) if agreement is None else (agreement.centre, agreement.divisor)
        users = spec.client_column if spec.client_column in self.special else None
        with name_file_in_errors(Path(where)):
            return Dataset(
                self.name,
                values,
                (y - centre) / unit if regression else y if self.numeric_label else y[:, 0].long(),
                task,
                self.labels if task == "multilabel" else () if self.numeric_label else classes,
                columns=codes,
                levels=levels,
                users=codes[users] if users is not None else None,
                user_names=coded[users][1] if users is not None else (),
                prepare=self._table(values, coded),
                centre=centre if regression else 0.0,
                unit=unit if regression else 1.0,
                notes=(*left_out, *self._notes(coded | {self.label: (label, classes)})),
                conversion=self._conversion,
                design=self.design.design(coded, keep),
            )

    @property
    def _conversion(self) -> dict[str, object]:
        """Options with which new rows are read in the same way (see `Dataset`).

        If there are no factors and no dates, it is empty.
        """
        spec = self.spec
        factors = {"client_column": spec.client_column, "factors": spec.factors} if spec.factors else {}
        return factors | ({"days_since": spec.days_since} if spec.days_since else {})

    def _convert(self, codes: NDArray[np.float64], clients: tuple[str, ...]) -> None:
        """Multiply each column that has one factor per client by these factors.

        If a client has no factor, its factor is 1.
        """
        values, row_clients = self._numbers, np.nan_to_num(codes, nan=len(clients)).astype(int)
        for column, factors in factors_by_client(self.spec.factors, [*clients, MISSING_LEVEL]):
            if column in self.place:
                values[:, self.place[column]] *= factors[row_clients]

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        """Features ``[N, p]``, which may be modified in place."""
        whole = cast("NDArray[np.float64]", self.x.trim())
        return whole if len(self._left) == whole.shape[1] else np.ascontiguousarray(whole[:, self._left])

    def _leave_out(self) -> list[str]:
        """Remove features that number the rows or identify people, unless an option keeps them, and return notes.

        There is one note for each removed column.

        Columns with an explicit role are kept, and if there is an agreement, it is followed without removing columns.
        """
        spec, whole = self.spec, cast("NDArray[np.float64]", self.x.trim())
        self._left = [*self.place.values()]
        if self.agreed or not len(whole):
            return []
        for column in set(spec.include) - {*self.special, *spec.group_columns}:
            if column in self.texts:  # a text column that is kept has one feature per level
                self.categorical.append(column)
                self.numeric.discard(column)
                self.problems.forget(column)
            elif column in self.numeric:
                self.codes.pop(column, None)
        stated = {*spec.include, *spec.columns, *spec.group_columns, *spec.factors, *self.design.strata}
        notes = list[str]()
        for column in [c for c in self.features if c not in stated]:
            if column in self.texts:
                reason, different = (
                    text_exclusion_reason(column, self.texts[column], len(whole)),
                    len(self.texts[column]),
                )
            else:
                read = ReadColumn(whole[:, self.place[column]])
                read = read if column in self.numeric else ReadColumn(*self.codes[column].build_codes())
                reason, different = exclusion_reason(column, read, len(whole)), len(np.unique(read.values))
            if reason == UNSURE_KIND and column in spec.categorical:
                notes.append(f"column {column!r} may contain {reason}. If they are people, add it to drop")
            elif reason:
                keep = f"include = [{json.dumps(column, ensure_ascii=False)}] keeps it"
                what = reason if reason in ROW_NAMES else f"contains {reason}"
                notes.append(f"column {column!r} {what}, so it is left out; {keep}")
                if reason in IDENTITY_KINDS and spec.subject is None and different <= MAX_DISTINCT_SHARE * len(whole):
                    notes[-1] += ". Its values repeat, so set it as subject, which keeps rows of one person together"
                self.problems.forget(column)
                self.features.remove(column)
                self.numeric.discard(column)
        if not self.features:
            reasons = "".join(f"\n  - {note}" for note in notes)
            raise ConfigError(f"{self.problems.where}: no column is left as a feature:{reasons}")
        self.categorical = [c for c in self.features if c in self.categorical]
        self._left = [self.place[column] for column in self.features]
        self.place = {column: k for k, column in enumerate(self.features)}
        return notes

    def _survey_notes(self, coded: Mapping[str, Coded]) -> Iterator[str]:
        """Yield the notes from the survey of the table."""
        values = self._numbers
        levels = {c: coded[c][1] for c in self.categorical} | {c: a.column.names for c, a in self.agreed.items()}
        features = {c: ReadColumn(values[:, k], levels.get(c, ())) for c, k in self.place.items()}
        targets = self._targets
        if self.event is not None and self.event in targets:
            event = ReadColumn(targets[self.event], ("0", "1"))
            outcome = {
                self.label: (ReadColumn(targets[self.label]), "regression"),
                self.event: (event, "classification"),
            }
        elif self.task == "multilabel":
            outcome = {name: (ReadColumn(targets[name], ("0", "1")), "classification") for name in self.labels}
        elif self.numeric_label:
            outcome = {self.label: (ReadColumn(targets[self.label]), "regression")}
        else:
            outcome = {self.label: (ReadColumn(*coded[self.label]), "classification")}
        users = self.spec.client_column
        owners = ReadColumn(*coded[users]) if users is not None and users in coded else None
        ranged = [name for name, agreed in self.agreed.items() if agreed.column.range is not None]
        subjects = None if self.design.subject is None else np.nan_to_num(coded[self.design.subject][0], nan=-1)
        units = None if subjects is None else subjects.astype(np.int64)
        yield from table_findings(features, outcome, owners, ranged, units, self.design.order is not None)

    @property
    def _targets(self) -> dict[str, NDArray[np.float64]]:
        """Numbers ``[N]`` of the label and the event, keyed by column name. It is empty if the label has classes."""
        measured = self.measured if self.numeric_label else {}
        return {name: cast("NDArray[np.float64]", rows.trim()) for name, rows in measured.items()}

    def _table(self, values: Tensor, coded: Mapping[str, Coded]) -> Table:
        """Return the agreed table, or else a table with the levels and missing values found in the file."""
        spec = self.spec
        if spec.agreement is not None:
            agreed: Table = spec.agreement.table.with_(missing=self.markers)
            return agreed
        flags = [bool(column.isnan().any()) for column in values.T]
        columns = tuple(
            TableColumn(name=c, levels=len(levels), names=levels, flag=flag, scale=spec.scale)
            for c, flag in zip(self.features, flags, strict=True)
            for levels in [coded[c][1] if c in self.categorical else ()]
        )
        return Table(columns=columns, missing=self.markers, impute=spec.impute)

    def _notes(self, coded: Mapping[str, Coded]) -> Iterator[str]:
        """Yield notes on missing-value codes that never occur, cells that an agreement fills, and odd columns."""
        clients = None if self.spec.client_column is None else self.codes.get(self.spec.client_column)
        columns = {name: self._numbers[:, place] for name, place in self.place.items()}
        agreed = {name for name, c in self.agreed.items() if not c.column.levels and c.column.range is None}
        targets = {name: values for name, values in self._targets.items() if name != self.event}
        yield from (f"missing: no cell of {self.name} is {text!r}" for text in self.unmatched)
        yield from unapplied_factor_notes(
            self.spec.factors, self.spec.client_column, None if clients is None else clients.levels
        )
        yield from checks.note_filled_cells(self.agreed)
        yield from checks.note_range_excess(self.agreed, columns)
        yield from self.spellings.notes()
        yield from self.design.notes()
        yield from checks.note_doubtful_columns(
            {**columns, **targets}, {*self.numeric, *agreed, *targets}, self.problems.first
        )
        coded = {name: column for name, column in coded.items() if name not in targets}
        yield from checks.note_doubtful_levels(coded, self.label, self.design.subject)
        if self.event is not None and self.task == "survival" and not np.nansum(self._targets[self.event]):
            yield f"the event {self.event!r} is 0 in every row, so a model cannot learn from these rows alone"
        yield from self._survey_notes(coded)
