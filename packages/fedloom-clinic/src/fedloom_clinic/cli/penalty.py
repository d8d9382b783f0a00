"""Options for commands that fit a regression with a penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.lab.cli import say

if TYPE_CHECKING:
    from fedloom_clinic.fits.penalty import Ridge

PenaltyName = Annotated[
    Literal["none", "ridge", "firth"],
    typer.Option(help="ridge or firth. Both yield finite coefficients even if columns separate the outcomes"),
]
Strength = Annotated[
    str | None,
    typer.Option(
        help=(
            "strength of the ridge penalty, per row and for standardized columns, like lifelines' penalizer (default: "
            "cv, chosen by cross-validated likelihood)"
        ),
        show_default=False,
    ),
]


def read_strength(penalty: str, text: str | None) -> float | Literal["cv"] | None:
    """Return the value of --strength, or None if the penalty is not a ridge.

    Raises:
        ConfigError: the value is neither a number above 0 nor cv, or the penalty is not a ridge.
    """
    from fedloom_clinic.fits.penalty import check_penalty

    try:
        value: float | str | None = text if text in (None, "cv") else float(str(text))
    except ValueError:
        value = text
    check_penalty(penalty, value)  # type: ignore[arg-type]
    return "cv" if penalty == "ridge" and value is None else value  # type: ignore[return-value]


def say_penalty(penalty: str, ridge: Ridge | None) -> None:
    """Print a sentence about a regression's penalty and the meaning of its intervals."""
    if ridge is not None:
        say(
            f"{ridge.words}. Standard errors are based on the penalized likelihood and ignore the bias due to shrinkage"
        )
    elif penalty == "firth":
        say("Firth's penalty. The intervals are Wald intervals, which are too narrow if columns separate the rows")
