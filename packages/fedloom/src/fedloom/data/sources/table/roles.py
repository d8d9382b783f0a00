"""Roles of a table's columns, as options of its source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from fedloom.data.sources.table.designs import DesignOptions
from fedloom.data.survey.agreement import Agreement, load_agreement
from fedloom.data.tables import MISSING_MARKERS


class TableRoles(DesignOptions):
    """Roles of the columns in a table: a label, and features, which are all columns without another role."""

    target: str | tuple[str, ...] | None = Field(
        default=None,
        description="name of the target column (default: the last column). For a multilabel task, the names of "
        "all label columns",
    )
    event: str | None = Field(
        default=None,
        description="column that contains 1 if the event was observed and 0 if the time is censored. The target "
        "column then contains times",
    )
    event_levels: tuple[str, ...] = Field(
        default=(),
        description="values of the event column that indicate an event. All other values indicate censoring "
        "(default: 1 is an event, 0 is censored)",
    )
    task: Literal["auto", "binary", "classification", "multilabel", "regression", "survival", "count"] = Field(
        default="auto",
        description=(
            "task. auto: classification if the target contains text or integers, binary if it has two values, "
            "survival if event is set. multilabel: the targets are 0/1 columns"
        ),
    )
    categorical: tuple[str, ...] = Field(
        default=(), description="columns that contain codes or text. Each level becomes one feature"
    )
    drop: tuple[str, ...] = Field(default=(), description="columns to drop")
    include: tuple[str, ...] = Field(
        default=(), description="columns to keep as features even if they number the rows or contain people's names"
    )
    client_column: str | None = Field(
        default=None, description="column that identifies the client of each row. It is not used as a feature"
    )
    columns: tuple[str, ...] = Field(
        default=(), description="columns by which a partition can split. They can also be features"
    )
    group_columns: tuple[str, ...] = Field(
        default=(),
        description="columns by which scores are grouped. They can also be features, unless they are listed in drop",
    )
    missing: tuple[str, ...] = Field(
        default=(),
        description=("additional missing-value codes, besides empty cells, ? and pandas' markers except None"),
    )
    impute: bool = Field(
        default=False, description="allow missing cells. Each client imputes them using its training set"
    )
    unlabelled: Literal["refuse", "drop", "keep"] = Field(
        default="refuse",
        description=(
            "what to do with rows that have no target or client: raise an error, or drop the rows. In a "
            "multilabel task, 'keep' drops only rows that have no client or no known label"
        ),
    )
    scale: bool = Field(default=True, description="center and scale numeric columns, using each client's training set")
    centre: float = Field(default=0.0, description="value subtracted from the regression target")
    unit: float = Field(
        default=1.0,
        gt=0,
        description="value by which the regression target is divided after the subtraction. Errors are in units of "
        "this value",
    )
    agreement: Annotated[
        Agreement | None,
        BeforeValidator(load_agreement),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}], "default": None}),
    ] = Field(default=None, description="the sites' agreement on the meaning of the columns: a path, or its keys")
    factors: dict[str, float | dict[str, float]] = Field(
        default={},
        description="factors that convert columns to the units in the agreement. With client_column, a factor can be "
        "a table with one factor per client",
    )

    days_since: dict[str, str] = Field(
        default={},
        description=(
            "date columns to convert to features: the number of days since another date column or a fixed date, "
            "such as { admission = 'birth_date' }"
        ),
    )

    @model_validator(mode="after")
    def _several_labels(self) -> TableRoles:
        """Raise an error if a task with one target has several, or a task with several labels has one target."""
        several = (self.task if self.agreement is None else self.agreement.task) == "multilabel"
        if not isinstance(self.target, tuple):
            if several and (self.target is not None or self.agreement is None):
                raise ValueError("task = 'multilabel' requires target = [...], a list of 0/1 columns, one per label")
        elif not several or len({*self.target}) < max(2, len(self.target)):
            raise ValueError(
                f"a model predicts a single column, got {', '.join(map(str, self.target))}. For time-to-event "
                "data, set "
                "`target` to the time and `event` to the event. For several 0/1 columns, each given once, set task = "
                "'multilabel'. For several numbers, run one experiment for each"
            )
        if self.unlabelled == "keep" and not several:
            raise ValueError("unlabelled = 'keep' works only for task = 'multilabel'. Use 'drop'")
        return self

    @model_validator(mode="after")
    def _factors_by_client(self) -> TableRoles:
        """Raise an error if a column has one factor per client, but no column contains the clients."""
        if self.client_column is None and (
            columns := [c for c, factor in self.factors.items() if isinstance(factor, dict)]
        ):
            raise ValueError(
                f"factors of {columns[0]!r} differ by client, but client_column is not set. Set "
                "client_column to the column with the client of each row"
            )
        return self

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that mark missing cells: first the general ones, then those of this table."""
        agreed = () if self.agreement is None else self.agreement.missing
        return tuple(dict.fromkeys((*MISSING_MARKERS, *agreed, *self.missing)))

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Target columns, if they are named by the source or the agreement."""
        target: str | tuple[str, ...] = self.targets.get("target", ())
        return (target,) if isinstance(target, str) else target

    @property
    def targets(self) -> dict[str, Any]:
        """Names of the columns ``target`` and ``event``, if the source or the agreement sets them."""
        agreement = self.agreement
        target = self.target
        if agreement is not None and target is None:
            target = agreement.classes if agreement.task == "multilabel" else agreement.target
        event = agreement.event if self.event is None and agreement is not None else self.event
        return {key: name for key, name in (("target", target), ("event", event)) if name is not None}
