"""Reasons why a regression by sums has no finite fit: columns that depend on each other, or that separate the rows.

References: A. Albert and J. A. Anderson, "On the existence of maximum likelihood estimates in logistic regression
models", Biometrika 1984. K. Konis, "Linear programming algorithms for detecting separated data in binary logistic
regression models", 2007. S. Correia, P. Guimaraes, T. Zylkin, "Verifying the existence of maximum likelihood estimates
for generalized linear models", arXiv:1903.01633v6 (Poisson). M. Jacobsen, "Existence and unicity of MLEs in discrete
exponential family distributions", Scand. J. Stat. 1989 (Cox).

A recession direction of the likelihood is a direction b of the coefficients along which no row is fitted worse and some
row is fitted better. If rows are available, a linear program finds such a direction: maximize the sum of ``a_i b``
subject to ``a_i b >= 0``, where ``a_i`` is a difference that the fit must not make negative. From sums alone, Newton's
method reveals the direction (see `recession`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

Floats = NDArray[np.float64]

MAX_CONDITION_NUMBER = 1e12
"""Condition number of the information from which on columns count as dependent: a correlation above 1 - 1e-12, of which
double precision leaves no digit."""
MIN_LOADING = 1e-4
"""Weight of a column in a dependence below which the column does not count as part of it.

Rounding leaves less than 1e-6 for such a column.
"""
COLLAPSED_SHARE = 1e-6
"""Share of the information at 0 below which a direction is suspicious. If rows are separated, Newton's method ends with
a share near 1e-12. A fit that exists may also end with a share of 1e-11, if a column has a cell that is 1e6 spreads
away from all others, so the share alone decides nothing."""
MIN_LIKELIHOOD_RISE = 1e-6
"""Increase of the log-likelihood by a step below which the limit is near: no test of a coefficient detects such a small
increase."""
STILL_MOVING = 0.5
"""Ratio of the length of the last step to the length of the step before. If rows are separated, the distance of the
likelihood from its limit decreases as exp(-length), and every step of Newton's method is as long as the step before.
Otherwise steps shrink quadratically. Among 1,590 random Cox, logistic and Poisson regressions, of which the linear
program found 61 to be separated, the three conditions of `recession` identified 58, left 3 as not converged, and did
not flag any regression that has a fit. Columns were normal, skewed, rare, or contained a cell up to 1e6 spreads away,
on scales from 1e-6 to 1e6."""
MIN_PROGRAM_GAIN, MAX_PROGRAM_LOSS = 1e-6, 1e-8
"""Smallest gain of the linear program in some row, and largest loss in any row, relative to the row's largest entry."""
ROUNDING_SHARE = 1e-9
"""Part of a row visible to the remaining directions below which it is only rounding."""
PROGRAM_ROWS = 2000
"""Number of rows with which the linear program starts, and number of rows that are added at a time if some rows are
violated."""
MIN_SUPPORT_SHARE = 0.1
"""Part of the largest entry from which on a column counts in a direction that is known only from sums."""


def dependent_columns(information: Floats, names: Sequence[str]) -> list[list[str]]:
    """Return the groups of columns that depend on each other, given by the null vectors of the information at 0.

    Args:
        information: information ``[p, p]`` at coefficients of 0, where every row counts, so that it has a null vector
            only if a combination of columns has the same value in every row at risk.
        names: names of the columns.
    """
    size = np.sqrt(np.maximum(information.diagonal(), 0))
    if not (size > 0).all():
        return [[name] for name, one in zip(names, size, strict=True) if not one > 0]
    values, vectors = np.linalg.eigh(information / np.outer(size, size))
    null = _reduced(vectors[:, values < values[-1] / MAX_CONDITION_NUMBER].T)
    groups = [np.flatnonzero(np.abs(row) > MIN_LOADING * np.abs(row).max()).tolist() for row in null]
    return [[names[k] for k in group] for group in sorted(groups)]


def _reduced(rows: Floats) -> Floats:
    """Return a row space reduced to rows with few entries, each with an entry that the other rows do not have."""
    rows, done = rows.copy(), list[int]()
    for k in range(len(rows)):
        free = np.abs(rows[k:])
        free[:, done] = 0
        at, pivot = np.unravel_index(int(free.argmax()), free.shape)
        rows[[k, k + int(at)]] = rows[[k + int(at), k]]
        rows[k] /= rows[k, pivot]
        rest = np.arange(len(rows)) != k
        rows[rest] -= np.outer(rows[rest, pivot], rows[k])
        done.append(int(pivot))
    return rows


def check_columns(information: Floats, names: Sequence[str]) -> None:
    """Raise if columns depend on each other.

    Raises:
        DataError: some columns depend on each other. The message names only these columns.
    """
    groups = dependent_columns(information, names)
    if not groups:
        return
    alone = [group[0] for group in groups if len(group) == 1]
    if alone:
        raise DataError(f"{', '.join(alone)} has the same value in every row at risk. Leave this column out")
    listed = "; so do ".join(_listed(group) for group in groups)
    raise DataError(f"columns {listed} depend on each other. Leave one of these columns out")


def recession(first: Floats, information: Floats, steps: tuple[Floats, Floats], rise: float) -> Floats | None:
    """Return, from sums alone, a direction of increase without information, or None if there is none.

    In this direction, the likelihood still rises although its information has vanished.

    Three conditions must hold. In some direction, less than `COLLAPSED_SHARE` of the information at 0 remains. The
    likelihood has almost reached its limit, so that the last step raised it by less than `MIN_LIKELIHOOD_RISE`.
    Nevertheless, this step of Newton's method was at least `STILL_MOVING` times as long as the step before, measured by
    the information at 0.

    Args:
        first: information at 0 ``[p, p]``, which is regular.
        information: information at the end of the steps.
        steps: last two steps, each ``[p]``.
        rise: rise of the log-likelihood in the last step, to second order.
    """
    before, last = steps
    if not rise < MIN_LIKELIHOOD_RISE or not np.isfinite(information).all() or not is_suspect(first, information):
        return None
    if not last @ first @ last >= STILL_MOVING**2 * (before @ first @ before) > 0:
        return None
    return last


def is_suspect(first: Floats, information: Floats) -> bool:
    """Return True if some direction has lost so much information that separation must be checked."""
    from scipy.linalg import eigh  # slow to import

    if not np.isfinite(information).all():
        return True
    return bool(eigh(information, first, eigvals_only=True)[0] < COLLAPSED_SHARE)


def separating(gains: Floats, equal: Floats, free: int = 0) -> Floats | None:
    """Return a direction of separation with as few columns as possible, found by linear programs, or None without one.

    Args:
        gains: differences that must not be negative, and at least one of which must be positive ``[m, p]``.
        equal: differences that must be 0 ``[k, p]``.
        free: number of leading columns that are intercepts, which are always kept in the search for the fewest columns.
    """
    size = np.array([np.median(np.abs(column[column != 0])) if column.any() else 1.0 for column in gains.T])
    direction = _direction(gains / size, equal / size)
    if direction is None:
        return None
    kept = np.ones(len(size), bool)
    for column in [k for k in np.argsort(np.abs(direction)) if k >= free]:
        kept[column] = False
        fewer = _direction(gains[:, kept] / size[kept], equal[:, kept] / size[kept])
        if fewer is None:
            kept[column] = True
        else:
            direction = np.zeros(len(size))
            direction[kept] = fewer
    scaled: Floats = direction / size
    return scaled


def _direction(gains: Floats, equal: Floats) -> Floats | None:
    """Return the direction with the largest gain in the box [-1, 1]^p, or None without a gain."""
    from scipy.linalg import null_space  # slow to import
    from scipy.optimize import linprog

    if not gains.shape[1]:
        return None
    if len(equal):  # what is equal leaves a space of directions, in which the program is solved
        largest = np.abs(equal).max(1, keepdims=True)
        basis = null_space(equal[largest[:, 0] > 0] / largest[largest[:, 0] > 0])
    else:
        basis = np.eye(gains.shape[1])
    if not basis.shape[1]:
        return None
    noise = ROUNDING_SHARE * np.abs(gains).max(1, initial=0)
    gains = gains @ basis
    largest = np.abs(gains).max(1, initial=0)
    gains = gains[largest > noise] / largest[largest > noise, None]
    if not len(gains):
        return None
    total, used = gains.sum(0) / len(gains), np.unique(np.linspace(0, len(gains) - 1, PROGRAM_ROWS).astype(int))
    bounds = (-1, 1)
    while True:
        solved = linprog(
            -total, A_ub=-gains[used], b_ub=np.zeros(len(used)), bounds=bounds, method="highs",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )  # fmt: skip
        if solved.x is None or not np.abs(solved.x).max() > 0:
            return None
        margins = gains @ (solved.x / np.abs(solved.x).max())
        violated = np.setdiff1d(np.flatnonzero(margins < -MAX_PROGRAM_LOSS), used)
        if not len(violated):
            break
        used = np.union1d(used, violated[np.argsort(margins[violated])[:PROGRAM_ROWS]])
    if margins.max() < MIN_PROGRAM_GAIN or margins.min() < -MAX_PROGRAM_LOSS:
        return None
    direction: Floats = basis @ solved.x
    return direction


def no_finite_fit(
    direction: Floats, names: Sequence[str], free: int = 0, least: float = 1e-9, *, exact: bool = True
) -> DataError:
    """Return the error for separated rows, with the separating columns and the directions of their coefficients.

    Args:
        direction: direction of the coefficients of columns with unit spread ``[p]``.
        names: names of the columns.
        free: number of leading columns that are intercepts, which are named only if no column is named.
        least: part of the largest entry below which a column is not named.
        exact: True if no row contradicts the direction. Otherwise, some row contradicts it, but by so little that the
            likelihood changes only by rounding.
    """
    without = "without limit" if exact else "until rounding hides the rest, since far cells alone contradict"
    part = np.abs(direction)
    part = part / (part[free:].max(initial=0) or part.max())
    named = [k for k in range(free, len(names)) if part[k] > least] or [k for k in range(free) if part[k] > least]
    ways = {k: "rises" if direction[k] > 0 else "falls" for k in named}
    if len(named) == 1:
        what = f"{names[named[0]]} separates the rows: its coefficient {ways[named[0]]} {without}"
        cure = "leave it out, merge its levels until each has rows of both outcomes, or choose the penalty 'ridge'"
    else:
        parts = [f"{names[k]} {ways[k]}" for k in named]
        what = f"{_listed([names[k] for k in named])} together separate the rows: the coefficient of {_listed(parts)}"
        what, cure = (
            f"{what} {without}",
            "leave one of them out, merge levels until each has rows of both outcomes, or choose the penalty 'ridge'",
        )
    return DataError(f"no finite fit: {what}; {cure}")


def _listed(words: Sequence[str]) -> str:
    """Return words as an English list."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
