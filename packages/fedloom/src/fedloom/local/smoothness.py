"""Estimation of smoothness constants L_i: the Lipschitz constants of f_i's gradients near a point."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.local.iterate import iterate
from fedloom.local.rows import each_client
from fedloom.rows.algebra import norm

if TYPE_CHECKING:
    from fedloom.local.work import Work


MAX_SMOOTHNESS_RATIO = 100.0
"""Maximum constant of a client, as a multiple of the median over clients."""


class _PowerIterationRows(NamedTuple):
    v: Tensor
    size: Tensor
    w: Tensor
    h: Tensor


def smoothness(w: Tensor, work: Work, iterations: int = 20) -> Tensor:
    """Estimate the largest absolute eigenvalue of f_i's Hessian at ``w`` by power iteration with central differences.

    Args:
        w: point, ``[d]`` or ``[m, d]``.
        work: the clients' local problems. Each iteration computes two full gradients.
        iterations: number of power iterations. The estimate increases toward the eigenvalue with more iterations.

    Returns:
        ``[m, 1]``.
    """
    w = each_client(w, work.m)
    draws = [torch.randn(w.shape[1], generator=g, dtype=torch.float64) for g in work.rng("smoothness")]
    v = torch.stack(draws).to(w)
    h = torch.finfo(w.dtype).eps ** (1 / 3) * (1 + norm(w))

    def power(rows: _PowerIterationRows, work: Work) -> _PowerIterationRows:
        ahead, behind = (work.full_grad(rows.w + side * rows.h * rows.v) for side in (1, -1))
        change = (ahead - behind) / (2 * rows.h)
        size = norm(change)
        return rows._replace(v=torch.where(size > 0, change / size, rows.v), size=size)

    start = _PowerIterationRows(v / norm(v), torch.zeros_like(h), w, h)
    return iterate(power, start, work, iterations, batches=0).size


def largest(smooth: Tensor, give: str) -> Tensor:
    """Return the largest of the clients' constants ``[m, 1]`` as ``[1]``, limited to `MAX_SMOOTHNESS_RATIO` medians.

    Because of this limit, a single client that reports a huge constant cannot stall a run.

    Raises:
        ConfigError: the constant is 0 or not finite. ``give`` names the options to set instead.
    """
    median = smooth.median()
    smooth = smooth.clamp(max=MAX_SMOOTHNESS_RATIO * median) if bool(median > 0) else smooth
    constant = float(smooth.max())
    if not 0 < constant < math.inf:
        raise ConfigError(f"the smoothness constant cannot be measured, got {constant:g}. Set {give}")
    return smooth.max(0).values
