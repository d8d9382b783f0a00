"""Penalties of regressions computed from sums: options, and cross-validation folds at each client.

Firth's penalty needs tr(V dI / d beta_r), where V is the inverse of the information. If V is public, this quantity is a
sum over rows or is computed from sums over the rows at risk. Clients therefore answer two questions in every step: the
first asks for the information, and the second contains V. In a cross-validation, the fits for all strengths are
requested at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, from_numpy

from fedloom.analyses import AnalysisTerms, ClientRows, ModelAnalysis, Question, ScriptedAnalysis, Transcript
from fedloom.errors import Refused
from fedloom_clinic.cells import forbids_small_cells
from fedloom_clinic.columns import (
    DesignColumns,
    Floats,
    Mask,
    design_of,
    list_column_names,
    select_columns,
    symmetric_from_triangles,
    upper_triangles,
    varying_columns,
)
from fedloom_clinic.fits.penalty import CV_FOLDS, RIDGE_STRENGTHS, FoldSums, Likelihood

FIT_COUNT = len(RIDGE_STRENGTHS) * (CV_FOLDS + 1)
"""Number of cross-validation fits that a question covers."""


class Penalized(ModelAnalysis, ScriptedAnalysis):
    """Regression with a penalty, computed from sums over clients."""

    penalty: Literal["none", "ridge", "firth"] = Field(
        "none", description="ridge or firth. Both yield finite coefficients even if columns separate the outcomes"
    )
    strength: float | Literal["cv"] | None = Field(
        None,
        description="strength of the ridge penalty, per row and for standardized columns, like lifelines' penalizer. "
        "Intercepts are not penalized. cv: chosen by cross-validated likelihood",
    )

    @model_validator(mode="after")
    def _check_strength(self) -> Penalized:
        if (self.penalty == "ridge") != (self.strength is not None):
            raise ValueError(
                "penalty = 'ridge' and strength must be set together, as in penalty = 'ridge', "
                "strength = 0.1, or strength = 'cv'"
            )
        if isinstance(self.strength, float) and not 0 < self.strength < np.inf:
            raise ValueError(
                f"the strength of a ridge penalty must be greater than 0, got {self.strength!r}. Use "
                "a number such as 0.1, or 'cv'"
            )
        return self

    @property
    def most_questions(self) -> int:
        return 24 if self.penalty != "firth" else 80  # Firth needs two questions per step, and more steps

    def start(self, terms: AnalysisTerms) -> Transcript:
        if self.strength == "cv":
            find_divided_clients(terms)
        return super().start(terms)

    @property
    def last_question(self) -> str:
        """Name of the question in every step."""
        return "paths" if self.strength == "cv" else "tilted" if self.penalty == "firth" else "step"


def require_shapes(question: Question, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise an error if a field of a question does not have the expected shape.

    Raises:
        Refused: a field has a different shape.
    """
    for name in shapes.keys() & question.values.keys():
        got, wanted = (" x ".join(map(str, shape)) for shape in (question.values[name].shape, shapes[name]))
        if got != wanted:
            raise Refused(f"{name} of a question must have {wanted} numbers, got {got}")


def assign_folds(design: DesignColumns, client: ClientRows, event: Mask) -> NDArray[np.int64]:
    """Return each row's fold, ``[N]``. A subject is in a single fold, and folds have similar numbers of events.

    Subjects are assigned to folds in the order of digests of their rows, so the folds depend only on the rows.

    Args:
        design: rows that the regression uses.
        client: client with the rows.
        event: True for rows with the outcome, ``[N]``.
    """
    cells = np.hstack([design.x, design.y])
    order = np.array([hashlib.blake2b(row.tobytes(), key=b"folds", digest_size=8).hexdigest() for row in cells])
    units, place = np.unique(client.subjects[design.rows].numpy(), return_inverse=True)
    first, had = np.full(len(units), "~" * 16), np.zeros(len(units), bool)
    for unit, digest, one in zip(place, order, event, strict=True):
        first[unit], had[unit] = min(first[unit], digest), had[unit] | one
    fold = np.zeros(len(units), np.int64)
    fold[np.lexsort((first, had))] = np.arange(len(units)) % CV_FOLDS
    return fold[place]


def flag_folds(client: ClientRows, terms: AnalysisTerms, event_of: Callable[[Floats], Mask], least: int) -> Tensor:
    """Return flags ``[1 + p]`` for a cross-validation: 1 if every fold has enough subjects in total and per column.

    Args:
        client: client whose rows are divided into folds.
        terms: the analysis's terms.
        event_of: function that maps targets ``[N, k]`` to True for the rows with the outcome.
        least: minimum number of subjects with the outcome, and of subjects without it, in a fold.
    """
    design = design_of(client, terms, flagged=False)
    event, subjects = event_of(design.y), client.subjects[design.rows].numpy()
    fold = assign_folds(design, client, event)
    columns, outcomes = np.ones(design.x.shape[1]), True
    for k in range(CV_FOLDS):
        here = fold == k
        columns = columns * varying_columns(design.x[here], subjects[here], terms.rules.min_subjects)
        outcomes &= all(len(np.unique(subjects[here & side])) >= least for side in (event, ~event))
    return from_numpy(np.append(float(outcomes), columns))


def find_divided_clients(terms: AnalysisTerms) -> list[bool]:
    """Return a flag for each client: True if its rows are divided into folds.

    The rows of the other clients are never held out.

    They are divided if each of the client's folds reaches the minimum counts in every cell.

    Raises:
        Refused: too few clients have divisible rows.
    """
    if not forbids_small_cells(terms.rules) or not terms.published:
        return [True] * len(terms.sizes)
    p, kept = len(list_column_names(terms.schema)), select_columns(terms)
    flags = [some[-2 * p - 1 : -p].numpy() for some in terms.published]
    able = [bool(some[0] > 0 and (some[1:][kept] > 0).all()) for some in flags]
    needed = terms.rules.min_clients + terms.rules.missing
    if sum(able) < needed:
        raise Refused(
            f"only {sum(able)} clients have {terms.rules.min_subjects} subjects of every column and "
            f"outcome in each of {CV_FOLDS} folds, but {needed} clients are required",
            rule="small-cells",
            fix="set strength to a number, or agree on a smaller minimum count",
        )
    return able


def fold_sums(at: Callable[[Floats, Mask], Likelihood], betas: Floats, fold: NDArray[np.int64]) -> list[Floats]:
    """Return a client's contribution to `FoldSums`, in the order that `read_fold_sums` expects.

    Args:
        at: function that returns the likelihood of some rows ``[N]`` at given coefficients.
        betas: coefficients of all fits, ``[K, q]``.
        fold: fold of each row, or -1 for rows that are never held out, ``[N]``.
    """
    sets = [fold != k for k in range(CV_FOLDS)] + [np.ones(len(fold), bool)]
    parts = [np.array([float(rows.sum()) for rows in sets])]
    for k, beta in enumerate(betas):
        here = at(beta, sets[k % len(sets)])
        whole = here if k % len(sets) == CV_FOLDS else at(beta, sets[-1])
        parts += [np.array([here.value, whole.value]), here.gradient, upper_triangles(here.information)]
    return parts


def read_fold_sums(numbers: Floats, size: int) -> FoldSums:
    """Return the sums of all fits from a vector. Each fit has ``size`` coefficients."""
    rows, rest = np.split(numbers, [CV_FOLDS + 1])
    fits = rest.reshape(FIT_COUNT, -1)
    return FoldSums(
        rows, fits[:, 0], fits[:, 1], fits[:, 2 : 2 + size], symmetric_from_triangles(fits[:, 2 + size :], size)
    )
