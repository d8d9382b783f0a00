"""Table [tune] of an experiment file, which defines how its methods' settings are chosen on validation data."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from fedloom.values import Value

Scalar = bool | int | float | str


class Range(Value):
    """An interval of numbers. If both ends are integers, only integers are sampled."""

    low: int | float = Field(description="smallest value")
    high: int | float = Field(description="largest value")
    log: bool = Field(False, description="true to sample values uniformly on a log scale")

    @model_validator(mode="after")
    def _check_order(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low must be less than high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range needs low > 0, got {self.low}")
        return self


Dimension = Range | tuple[Scalar, ...]
"""Search space of one setting: a range, or a list of choices. An empty list leaves the setting unchanged."""


class Tune(Value):
    """Search for hyperparameters with the same number of trials and the same compute budget for every method."""

    trials: int = Field(
        20,
        ge=1,
        description="number of trials per method. If a space of lists contains fewer settings, all of them are tried",
    )
    rounds: int | None = Field(
        None,
        ge=1,
        description="compute budget of a trial, in rounds of plain local training (default: the experiment's number "
        "of rounds)",
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        (),
        description="seeds of every trial. A trial's score is averaged over these seeds (default: only the "
        "experiment's first seed)",
    )
    metric: str | None = Field(
        None,
        pattern="^[^/]+(/mean|/weighted)?$",
        description=(
            "validation metric, averaged over clients. With the suffix /weighted, as in accuracy/weighted, clients "
            "are weighted by their samples (default: the task's metric, such as AUROC for two classes)"
        ),
    )
    model: Literal["auto", "global", "personal", "hybrid", "mean", "best-on-validation"] = Field(
        "auto",
        description=(
            "model to score: auto (the personal model, if the method has one), mean (the mean score of the global and "
            "the personal model, if both exist), best-on-validation (the hybrid of the two models, if both exist)"
        ),
    )
    prune: bool = Field(
        True, description="stop a trial whose score is below the median of completed trials at the same point"
    )
    startup: int = Field(
        5, ge=1, description="number of trials that must be completed before any trial is stopped early"
    )
    simulated_seconds: float | None = Field(
        None,
        gt=0,
        description="time limit of a trial, in simulated time. The trial is then scored even if rounds remain",
    )
    equal_work: bool = Field(
        True,
        description=(
            "true: the number of rounds of each trial, and of each method in the tuned file, is chosen so that they "
            "cost as much as `rounds` plain rounds. false: each gets `rounds` rounds, or the method's own number"
        ),
    )
    seed: NonNegativeInt = Field(0, description="seed of the search")
    default_spaces: bool = Field(True, description="also search the default spaces (false: `space` only)")
    space: dict[str, dict[str, Dimension]] = Field(
        {},
        description=(
            "search space of each method (by label or algorithm, or under all for every method): setting = [choices] "
            "or {low, high, log}"
        ),
    )
