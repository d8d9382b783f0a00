"""The table [tune] of an experiment file: how the settings of its methods are chosen on validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from fedloom.values import Value

Scalar = bool | int | float | str


class Range(Value):
    """An interval; of whole numbers where both ends are."""

    low: int | float = Field(description="smallest value")
    high: int | float = Field(description="largest value")
    log: bool = Field(False, description="even in the logarithm")

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range needs low > 0, got {self.low}")
        return self


Dimension = Range | tuple[Scalar, ...]
"""Where a setting is looked for: a range, or a list of choices; an empty list leaves the setting alone."""
Space = Mapping[str, Dimension]
"""Settings of a method, as ``mu`` or ``local.lr``, and where they are looked for."""


class Tune(Value):
    """How hyper-parameters are looked for: the same number of trials and the same work for every method."""

    trials: int = Field(
        20, ge=1, description="settings tried per method; lists with no more settings than that are gone through whole"
    )
    rounds: int | None = Field(
        None,
        ge=1,
        description="work of a trial, in rounds of plain local training; the experiment's if not given",
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        (), description="a trial's score is the mean over these seeds; the first of the experiment when empty"
    )
    metric: str | None = Field(
        None,
        pattern="^[^/]+(/mean|/weighted)?$",
        description="validation metric, mean over clients, or with /weighted, as accuracy/weighted, weighted by their "
        "samples; that of the task if not given, as AUROC on two classes",
    )
    model: Literal["auto", "global", "personal", "hybrid", "mean", "used"] = Field(
        "auto",
        description="the model that is scored; auto is the personal one where the method has it, mean scores both the "
        "global and the personal one where the method has both, used the hybrid of both there",
    )
    prune: bool = Field(
        True, description="stop a trial that is below the median of the complete ones at the same point"
    )
    startup: int = Field(5, ge=1, description="trials that run to their end before any is stopped")
    simulated_seconds: float | None = Field(
        None,
        gt=0,
        description="a trial ends after so much virtual time and is scored there; its rounds are the most it may take",
    )
    equal_work: bool = Field(
        True,
        description="give each trial, and each method in the tuned file, the rounds that cost what `rounds` of plain "
        "training cost; false: `rounds` rounds, or those in the method's own table",
    )
    seed: NonNegativeInt = Field(0, description="of the search itself")
    defaults: bool = Field(True, description="look for the settings of the default spaces too; false: of `space` only")
    space: dict[str, dict[str, Dimension]] = Field(
        {}, description="per method (label or algorithm; all for every one): setting = [choices] or {low, high, log}"
    )
