"""Agreement on the meaning of a table's columns at all sites, as a document that people read and sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import tomli_w
from pydantic import Field, model_validator

from fedloom.data.dataset import CLASS_TASKS, Task
from fedloom.data.tables import MISSING_MARKERS, Table, TableColumn
from fedloom.errors import ConfigError, direction_in
from fedloom.rundir import as_path
from fedloom.storage import read_toml
from fedloom.values import Value, fields_of, make

AGREEMENT_HEADER = (
    "# Meaning of the columns at every site. Fill in the units, check the levels and ranges, and sign it.\n# Columns "
    "are found by name, in any order, and others are ignored. missing = true: cells may be missing, and a feature\n# "
    "records where. impute = true: such cells, and levels that are not listed here, are filled at each site.\n# "
    "patients, events: smallest number of rows of a site that takes part, and of each class there. level_rows: "
    "smallest\n# number of rows of a level in this list (rarer ones identify people). Cells of rarer levels are "
    "filled, like unknown ones.\n# subject: column of the patient or person of a row. Then patients, events and "
    "level_rows count subjects, not rows.\n"
)


class AgreedColumn(Value):
    """Description of a column in the document of an agreement."""

    name: str = Field(description="column name in the header")
    type: Literal["number", "level"] = Field(
        "number", description="column type. number: a measured value. level: one of a list of levels"
    )
    unit: str = Field("", description="unit of a numeric column")
    levels: tuple[str, ...] = Field((), description="all levels that may occur")
    range: tuple[float, float] | None = Field(
        None, description="smallest and largest plausible values of a numeric column"
    )
    missing: bool = Field(
        False, description="whether cells may be missing. If so, an additional feature marks missing cells"
    )
    scale: bool = Field(True, description="whether each site centers and scales the numeric column")
    scoring: bool = Field(False, description="use the column only to form groups in analyses. Models do not receive it")

    @model_validator(mode="after")
    def _fits(self) -> AgreedColumn:
        if (self.type == "level") != bool(self.levels):
            raise ValueError("type = 'level' requires at least one level in `levels`, and other types accept no levels")
        if disguised := direction_in(self.name, *self.levels):
            raise ValueError(disguised)
        if len(set(self.levels)) < len(self.levels):
            raise ValueError("levels: each level may be listed only once")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range must increase, got {self.range[0]:g} to {self.range[1]:g}")
        return self

    @property
    def column(self) -> TableColumn:
        """Column of a `Table` that corresponds to the description."""
        return TableColumn(
            name=self.name, levels=len(self.levels), names=self.levels, flag=self.missing, scale=self.scale,
            unit=self.unit, range=self.range,
        )  # fmt: skip

    @classmethod
    def create(cls, column: TableColumn) -> AgreedColumn:
        """Return the description of a column of a `Table`."""
        names = column.names or tuple(str(k) for k in range(column.levels))
        return cls(
            name=column.name, type="level" if names else "number", unit=column.unit, levels=names, range=column.range,
            missing=column.flag, scale=column.scale,
        )  # fmt: skip


class Agreement(Value):
    """Columns, target, classes, missing-value codes and minimum numbers of rows that the sites agree on.

    The columns of a site's table may be in any order, and all other columns are ignored.

    Levels, classes and features that mark missing cells are always defined by the agreement, never by the file of an
    individual site.
    """

    target: str | None = Field(
        None, description="name of the target column (default: the one chosen by the data source)"
    )
    event: str | None = Field(None, description="column that indicates events, if the target is a time to event")
    task: Task = Field("binary", description="classification, binary, multilabel, regression, survival or count")
    classes: tuple[str, ...] = Field(
        (), description="all possible classes, or the label columns. Empty if targets are numbers"
    )
    centre: float = Field(0.0, description="value subtracted from the regression target")
    divisor: float = Field(
        1.0, gt=0, description="value by which the regression target is divided after the subtraction"
    )
    target_range: tuple[float, float] | None = Field(
        None, description="smallest and largest plausible targets or times, for analyses that sum over sites"
    )
    missing: tuple[str, ...] = Field((), description="additional missing-value codes")
    impute: bool = Field(True, description="whether each site imputes missing cells using its training rows")
    patients: int = Field(1, ge=1, description="minimum number of rows at a participating site")
    events: int = Field(0, ge=0, description="minimum number of rows of each class at a participating site")
    subject: str | None = Field(
        None,
        description="column that identifies the subject of each row. All minimum numbers of rows then count subjects",
    )
    order: str | None = Field(
        None,
        description="column that contains the time of each row. Earlier rows are used for training, later rows for "
        "testing",
    )
    strata: tuple[str, ...] | None = Field(None, description="columns by which the splits at every site are stratified")
    test_column: str | None = Field(None, description="column that marks test rows")
    test_levels: tuple[str, ...] | None = Field(None, description="values of test_column that mark test rows")
    test_since: float | str | None = Field(
        None, description="first number or date of the `order` column in the test set"
    )
    level_rows: int = Field(
        5,
        ge=1,
        description="minimum number of rows of each listed level. Cells with rarer levels are treated as missing",
    )
    column: tuple[AgreedColumn, ...] = Field(
        min_length=1, description="columns that are used as features or for scores"
    )

    @model_validator(mode="after")
    def _fits(self) -> Agreement:
        names = [column.name for column in self.column]
        if disguised := direction_in(self.target or "", self.event or "", *self.classes):
            raise ValueError(disguised)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"column: two columns are called {twice[0]!r}")
        roles = ("target", "event", "subject", "order", "test_column")
        for what, name in ((role, getattr(self, role)) for role in roles):
            if name in names:
                raise ValueError(f"column: {name!r} is the {what}, so it cannot be a feature")
        if all(column.scoring for column in self.column):
            raise ValueError("column: at least one column must be a feature, so it must not set scoring = true")
        if self.target_range is not None and not self.target_range[0] < self.target_range[1]:
            raise ValueError(f"target_range must increase, got {self.target_range[0]:g} to {self.target_range[1]:g}")
        several = self.task in ("classification", "multilabel")
        least = 2 if several or self.task in CLASS_TASKS else 0
        if len(self.classes) < least or (not several and len(self.classes) != least):
            raise ValueError(f"classes: a {self.task} cannot have {len(self.classes)} classes")
        return self

    @classmethod
    def create(
        cls, table: Table, task: Task, classes: Sequence[str], target: str | None = None, centre: float = 0.0,
        divisor: float = 1.0, event: str | None = None,
    ) -> Agreement:  # fmt: skip
        """Create the agreement that describes a table and its target."""
        missing = tuple(text for text in table.missing if text not in MISSING_MARKERS)
        return cls(
            target=target, event=event, task=task, classes=tuple(classes), centre=centre, divisor=divisor,
            missing=missing, impute=table.impute, column=tuple(map(AgreedColumn.create, table.columns)),
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> Agreement:
        """Read an agreement from a TOML file.

        Raises:
            ConfigError: the file does not exist, or contains an invalid value.
        """
        return make(cls, read_toml(path, "agreement"), str(path), fields_of(cls))

    @property
    def table(self) -> Table:
        """Features in the agreement, as a `Table`."""
        missing = tuple(dict.fromkeys((*MISSING_MARKERS, *self.missing)))
        return Table(columns=tuple(c.column for c in self.column if not c.scoring), missing=missing, impute=self.impute)

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """Levels of each column that has levels, including columns that are not features."""
        return {column.name: column.levels for column in self.column if column.levels}

    def drop_rare_levels(self, counts: Mapping[str, Mapping[str, int]]) -> Agreement:
        """Return the agreement without levels that are so rare that they could identify a person.

        A column is removed if fewer than two levels, or less than half of its rows, would remain.

        Args:
            counts: number of rows for each level, for each column.

        Raises:
            ConfigError: no column remains.
        """
        kept = list[AgreedColumn]()
        for column in self.column:
            rows = counts.get(column.name, {})
            common = tuple(level for level in column.levels if rows.get(level, 0) >= self.level_rows)
            if common == column.levels:
                kept.append(column)
            elif len(common) > 1 and 2 * sum(rows[level] for level in common) >= sum(rows.values()):
                kept.append(column.with_(levels=common, missing=True))
        if not any(not column.scoring for column in kept):
            raise ConfigError(f"every level of every column has fewer than {self.level_rows} rows. Group levels first")
        return self.with_(column=tuple(kept))

    def text(self) -> str:
        """Return the text of the document. Reading this text recreates the same agreement."""
        head = {k: v for k, v in self.model_dump(mode="json", exclude_none=True).items() if k != "column"}
        rows = [
            {
                **column.model_dump(mode="json", exclude_defaults=True),
                **({} if column.levels else {"unit": column.unit}),
            }
            for column in self.column
        ]
        return AGREEMENT_HEADER + tomli_w.dumps({**head, "column": rows})

    def shortcomings(self, counts: Mapping[str, int], rows: int) -> list[str]:
        """Return the reasons why a site with these numbers of rows may not participate.

        Each reason is one sentence.

        Args:
            counts: number of rows per class, or of subjects if the agreement names a subject column.
            rows: total number of rows, or of subjects, at the site.
        """
        sentences = []
        what = "rows" if self.subject is None else f"subjects ({self.subject!r})"
        if rows < self.patients:
            sentences.append(f"{rows} {what}, but the agreement requires at least {self.patients}")
        rare = {name: counts.get(name, 0) for name in self.classes if counts.get(name, 0) < self.events}
        if rare:
            shown = ", ".join(
                f"{count} of {'the target' if self.target is None else self.target} = {name}"
                for name, count in rare.items()
            )
            shown += "" if self.subject is None else f", of {what}"
            sentences.append(f"{shown}, but the agreement requires at least {self.events}")
        return sentences


def load_agreement(document: object) -> Agreement | None:
    """Return the agreement that is given by a path, by its keys or as an object. Return None if no agreement is given.

    Raises:
        ConfigError: the agreement cannot be read.
    """
    if document is None or isinstance(document, Agreement):
        return document
    if isinstance(document, str | Path):
        return Agreement.read(as_path(document, "agreement").expanduser())
    if isinstance(document, Mapping):
        return make(Agreement, dict(document), "agreement", fields_of(Agreement))
    raise ConfigError(f"agreement must be the path to a document, got {document!r:.60}")
