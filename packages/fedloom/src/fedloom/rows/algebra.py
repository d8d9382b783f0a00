"""Operations on rows [..., d] and on batches of matrices [..., r, c].

Numbers that belong to rows have the shape [..., 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Scalar = float | Tensor
"""Number that applies to all rows, or one number for each row [m, 1]."""


def norm(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, [..., 1]."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return length


def directions(rows: Tensor) -> Tensor:
    """Scale rows [m, d] to length 1.

    If a row's norm cannot be computed exactly, the scaled row is shorter than 1, so that no cosine exceeds 1.
    """
    return torch.nn.functional.normalize(rows, dim=1, eps=shortest(rows))


def shortest(rows: Tensor) -> float:
    """Return the smallest allowed divisor of rows: 1e-16 in float32, because smaller squares may underflow."""
    return 1024 * math.sqrt(torch.finfo(rows.dtype).tiny)


def soft(v: Tensor, t: Scalar) -> Tensor:
    """Return the soft-thresholded values sign(v) max(|v| - t, 0)."""
    return v.sign() * (v.abs() - t).clamp_min(0)


def distances(rows: Tensor) -> Tensor:
    """Return Euclidean distances [m, m] between rows [m, d], computed from differences to avoid cancellation."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


def total(terms: Tensor) -> Tensor:
    """Return the sum of each row: [m, 1] for [m, .], or a scalar for [.]."""
    return terms.sum(-1, keepdim=terms.dim() > 1)


def onto_simplex(v: Tensor, radius: Scalar) -> Tensor:
    """Project onto the simplex {x >= 0, sum x = radius} (Duchi et al., ICML 2008, Fig. 1).

    Sums are computed in float64.
    """
    u = v.double().sort(-1, descending=True).values
    excess = u.cumsum(-1) - radius
    k = torch.arange(1, v.shape[-1] + 1, dtype=torch.float64, device=v.device)
    rho = (u * k > excess).sum(-1, keepdim=True).clamp_min(1)
    return (v - (excess.gather(-1, rho - 1) / rho).to(v.dtype)).clamp_min(0)


def onto_l1_ball(v: Tensor, radius: Scalar) -> Tensor:
    """Project onto the l1 ball {||x||_1 <= radius}."""
    inside = v.abs().sum(-1, keepdim=True) <= radius
    return torch.where(inside, v, v.sign() * onto_simplex(v.abs(), radius))


def spectrum(matrices: Tensor) -> Tensor:
    """Return the singular values [..., min(r, c)] of matrices [..., r, c], in descending order.

    If a matrix contains values that are not finite, they are NaN.
    """
    finite = matrices.isfinite().flatten(-2).all(-1, keepdim=True)
    s: Tensor = torch.linalg.svdvals(torch.where(finite.unsqueeze(-1), matrices, 0.0))
    return torch.where(finite, s, torch.nan)


def map_spectrum(matrices: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to the singular values [..., min(r, c)] of matrices [..., r, c], and return the new matrices.

    The result is NaN if a matrix contains values that are not finite.
    """
    finite = matrices.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u, s, vh = torch.linalg.svd(torch.where(finite, matrices, 0.0), full_matrices=False)
    return torch.where(finite, (u * change(s).unsqueeze(-2)) @ vh, torch.nan)


def dequantize(scale: Tensor, codes: Tensor, levels: int) -> Tensor:
    """Dequantize the integers `codes` (from -levels to levels): divide them by `levels` and multiply by `scale`."""
    return scale * (codes.to(scale.dtype) / levels)


def lifted(cov: Tensor, least: float) -> Tensor:
    """Return the nearest covariance matrix (flattened to ``[k k]``) whose eigenvalues are at least ``least``.

    A covariance matrix whose eigenvalues are large enough is returned unchanged.
    """
    square = cov.double().view(math.isqrt(len(cov)), -1)
    values, vectors = torch.linalg.eigh((square + square.mT) / 2)
    return cov if bool(values.min() >= least) else ((vectors * values.clamp(min=least)) @ vectors.mT).flatten().to(cov)


def solved(a: Tensor, b: Tensor) -> Tensor:
    """Solve a x = b for ``a [..., k, k]`` and x ``[..., k, n]``, with a separate call for each system.

    In torch 2.13, a single call for all systems returns wrong results on a CPU with several threads (due to oneMKL's
    batched LU).
    """
    systems = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
    return torch.stack([torch.linalg.solve(*system) for system in systems]).view(b.shape)


def ranks(matrices: Tensor) -> Tensor:
    """Return numerical ranks [...] (int64): the number of singular values above s_max * max(r, c) * eps.

    A matrix with nonfinite values has full rank.
    """
    s = spectrum(matrices)
    return (~(s <= s[..., :1] * max(matrices.shape[-2:]) * torch.finfo(s.dtype).eps)).sum(-1)
