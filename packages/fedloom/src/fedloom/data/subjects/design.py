"""Design of a data set: which rows belong together, in which order they came, and which rows form the test set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.tables import level_name
from fedloom.errors import DataError

Ints = NDArray[np.int64]
MAX_COMPARED_SUBJECTS = 100_000
"""Maximum number of subjects in memory whose names are compared, which takes about a second."""
SAMPLE_ROLES = ("subject", "order", "strata")
"""Values that each sample in memory may have. In a table, rows may also be marked explicitly as test rows."""


@dataclass(frozen=True, eq=False)
class Design:
    """Properties of the rows that splits must take into account.

    A subject's position in the order is given by its last row, which is the latest by `order`, or the last in the data
    if there is no `order`.

    Attributes:
        subject: code of the subject (such as a patient) of each row ``[N]`` (int64). None if each row is treated as a
            separate subject.
        order: time of each row ``[N]`` (float64), which is a number, or seconds since 1970 for a date. None if this is
            unknown.
        strata: code of the stratum of each row ``[N]`` (int64). Splits and folds preserve the proportions of the
            strata. None if there are none.
        held_out: bool mask ``[N]`` of the rows that are marked as test rows. None if the partition chooses the test
            sets.
        names: source columns of these values, keyed by option, such as ``{"subject": "patient_id"}``.
        doubts: notes on subjects in memory that may be the same, or unknown.
    """

    subject: Tensor | None = None
    order: Tensor | None = None
    strata: Tensor | None = None
    held_out: Tensor | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    doubts: tuple[str, ...] = ()

    def wrong(self, rows: int) -> list[str]:
        """Return one sentence for each error in the design of a data set with this number of rows."""
        kinds = {"subject": torch.int64, "order": torch.float64, "strata": torch.int64, "held_out": torch.bool}
        sentences = []
        for name, dtype in kinds.items():
            values = getattr(self, name)
            if values is not None and (values.dtype != dtype or values.shape != (rows,)):
                sentences.append(f"{name} must be {dtype} [{rows}], got {values.dtype} {list(values.shape)}")
            elif values is not None and dtype == torch.int64 and rows and int(values.min()) < 0:
                sentences.append(f"{name} has negative codes. Number subjects and strata from 0")
            elif values is not None and dtype == torch.float64 and not bool(torch.isfinite(values).all()):
                sentences.append(f"{name} is not finite in {int((~torch.isfinite(values)).sum())} rows. Leave them out")
        return sentences

    def digest(self) -> str:
        """Return a digest of the design in hexadecimal."""
        digest = hashlib.sha256()
        for name in ("subject", "order", "strata", "held_out"):
            values = getattr(self, name)
            digest.update(name.encode() + (b"" if values is None else values.contiguous().numpy().tobytes()))
        return digest.hexdigest()[:16]

    @property
    def subject_name(self) -> str:
        """Name of the column that contains the subjects, or "subject" if this column has no name."""
        return self.names.get("subject", "subject")

    @cached_property
    def units(self) -> Ints:
        """Subject number ``[N]`` of each row, from 0 to N - 1.

        If subjects are unknown, each row is treated as a separate subject.
        """
        rows = next(len(v) for v in (self.subject, self.order, self.strata, self.held_out) if v is not None)
        if self.subject is None:
            return np.arange(rows)
        return np.unique(self.subject.numpy(), return_inverse=True)[1].astype(np.int64)

    def last_rows(self, rows: Ints) -> Ints:
        """Return the last row of each subject among the given rows ``[k]``, as indices ``[s]`` in subject order."""
        times = np.zeros(len(rows)) if self.order is None else self.order.numpy()[rows]
        ordered = rows[np.lexsort((rows, times, self.units[rows]))]
        ends = np.ones(len(ordered), bool)
        ends[:-1] = np.diff(self.units[ordered]) != 0
        return ordered[ends]

    @cached_property
    def tested(self) -> NDArray[np.bool_] | None:
        """Mask ``[N]`` of the rows in the test set, which are all rows of subjects whose last row is marked."""
        if self.held_out is None:
            return None
        of_unit = np.zeros(len(self.units), bool)
        last = self.last_rows(np.arange(len(self.units)))
        of_unit[self.units[last]] = self.held_out.numpy()[last]
        tested: NDArray[np.bool_] = of_unit[self.units]
        return tested

    def count(self, rows: Ints) -> int:
        """Return the number of distinct subjects in the rows."""
        return len(np.unique(self.units[rows]))

    def counts(self, groups: Ints, rows: Ints, total: int) -> Ints:
        """Return the number of subjects in each group, ``[total]``.

        Args:
            groups: group of each row ``[k]``.
            rows: indices of the rows ``[k]``.
            total: number of groups.
        """
        pairs = np.unique(groups.astype(np.int64) * len(self.units) + self.units[rows])
        return np.bincount(pairs // len(self.units), minlength=total)

    def notes(self, rows: Ints, owner: Ints) -> list[str]:
        """Return notes for the report about the number of subjects and about options that have no effect.

        Args:
            rows: indices of the clients' rows ``[k]``.
            owner: client of each row ``[k]``.
        """
        notes = [*self.doubts]
        if self.subject is not None:
            subjects, total = len(np.unique(self.units)), len(self.units)
            notes.append(
                f"{total:,} rows of {subjects:,} subjects ({self.subject_name!r}): partitions and folds keep the rows "
                "of a subject together, and intervals count subjects"
            )
            clients = np.unique(owner * total + self.units[rows]) % total
            if several := int((np.bincount(clients, minlength=1) > 1).sum()):
                notes.append(
                    f"{several:,} subjects have rows at several clients, and are in the same part at all these "
                    "clients. If every client numbers its patients from 1, put the client's name before the number"
                )
        if self.order is not None and self.strata is not None:
            notes.append(
                "strata have no effect with order, because earlier rows are training rows and later rows are test rows"
            )
        if self.held_out is not None and self.subject is not None:
            assert self.tested is not None
            if moved := int((self.tested != self.held_out.numpy()).sum()):
                notes.append(
                    f"{moved:,} rows are in a different part than their mark states, because the mark of a subject's "
                    "last row decides the part of all its rows"
                )
        return notes


def create_design(values: Mapping[str, object], rows: int, place: str) -> Design | None:
    """Create the design of samples in memory. Return None if no values are given.

    Args:
        values: values of ``subject`` (any identifier), ``order`` (numbers or dates) and ``strata`` (levels), with one
            value per sample.
        rows: number of samples.
        place: location that is named in messages.

    Raises:
        DataError: there are too many or too few values, values are missing, or the order consists of neither numbers
            nor dates.
    """
    arrays = {name: np.asarray(value) for name, value in values.items() if value is not None}
    if not arrays:
        return None
    from fedloom.data.sources.table.checks import note_doubtful_levels  # imported here because sources import designs

    for name, value in arrays.items():
        if value.shape != (rows,):
            raise DataError(f"{place}: {name} has shape {value.shape} for {rows} samples. Give one value per sample")
        if any(map(is_absent, value.tolist() if value.dtype.kind == "O" else value[value != value])):  # NaN, NaT
            raise DataError(
                f"{place}: {name} is missing for some samples. Give a value for each sample, or remove those samples"
            )
    design, doubts = dict[str, Tensor](), tuple[str, ...]()
    for name in ("subject", "strata"):
        if name in arrays:
            array = arrays[name]  # 1, 1.0 and " 1" are the same subject, as in a table
            array = np.array([level_name(v) for v in array.tolist()]) if array.dtype.kind in "OUS" else array
            levels, codes = np.unique(array, return_inverse=True)
            design[name] = torch.from_numpy(codes.astype(np.int64))
            if name == "subject" and len(levels) <= MAX_COMPARED_SUBJECTS:
                coded = codes.astype(np.float64), tuple(map(level_name, levels.tolist()))
                doubts = tuple(note_doubtful_levels({"subject": coded}, "", "subject"))
    if "order" in arrays:
        order = arrays["order"]
        if order.dtype.kind == "M":
            order = order.astype("datetime64[us]").astype(np.float64) / 1e6
        if order.dtype.kind not in "uifb" or not np.isfinite(order.astype(np.float64)).all():
            raise DataError(
                f"{place}: `order` must contain finite numbers or dates (datetime64), got {arrays['order'].dtype}"
            )
        design["order"] = torch.from_numpy(order.astype(np.float64))
    return Design(design.get("subject"), design.get("order"), design.get("strata"), doubts=doubts)


def is_absent(value: object) -> bool:
    """Return True for None, NaN, NaT and the missing value of pandas."""
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def count_subjects(design: Design | None, rows: Ints) -> int:
    """Return the number of subjects in the rows, or the number of rows if there is no design."""
    return len(rows) if design is None else design.count(rows)
