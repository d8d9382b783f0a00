"""The choice of a Cox regression in an experiment; `fedloom.tasks.cox_vectors` has its sums."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedloom.values import Value

FINEST = 1000
"""Time bins at most."""


class CoxRegression(Value):
    """A Cox regression over the rows of all sites, by sums."""

    width: float | None = Field(None, gt=0, description="width of time bins, in the unit of the times")
    until: float | None = Field(None, gt=0, description="end of the last bin; a later event counts as censored there")
    stratify: bool = Field(False, description="a baseline hazard for every site, in place of bins; times are exact")
    least: int = Field(5, ge=1, description="events of a site in a bin, or of all it has, below which it sends none")
    ties: Literal["efron", "breslow"] = Field("efron", description="how events of one bin, or of one time, count")
    penalty: Literal["none", "ridge"] = Field("none", description="ridge: shrink coefficients, also of separated rows")
    strength: float | None = Field(
        None, gt=0, description="of the ridge, per row and for columns of unit deviation, as lifelines' penalizer"
    )

    @model_validator(mode="after")
    def _bins_or_strata(self) -> CoxRegression:
        if (self.width is None) != (self.until is None) or (self.width is None) != self.stratify:
            raise ValueError("give width and until of the time bins, or stratify = true")
        if self.width is not None and self.until is not None and self.until / self.width > FINEST:
            raise ValueError(f"at most {FINEST} bins, got {self.until / self.width:.0f}: give a larger width")
        if (self.penalty == "ridge") != (self.strength is not None):
            raise ValueError("penalty = 'ridge' and strength go together, as in penalty = 'ridge', strength = 0.1")
        return self
