"""Fixed random linear projection to a low-dimensional space, determined by a key."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import norm
from fedloom.seeds import generator


class Projection(NamedTuple):
    """Linear projection with a matrix P ``[k, d]``, or the identity."""

    matrix: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply P to rows ``[..., d]``, which gives ``[..., k]``."""
        return rows if self.matrix is None else rows @ self.matrix.T

    def back(self, rows: Tensor) -> Tensor:
        """Apply the transpose of P to rows ``[..., k]``, which gives ``[..., d]``."""
        return rows if self.matrix is None else rows @ self.matrix


def new_key(gen: torch.Generator) -> Tensor:
    """Return a new key of 128 bits for a random projection, as int64 ``[2]``."""
    return torch.randint(256, (16,), generator=gen, dtype=torch.uint8).view(torch.int64)


def projection(key: Tensor, k: int | None, like: Tensor, matrix: Tensor | None = None) -> Projection:
    """Return the projection for a key: Gaussian rows scaled to length 1, or the identity if ``k`` is None.

    Args:
        key: key from `new_key`.
        k: number of dimensions of the subspace. If None, the projection is the identity.
        like: tensor ``[..., d]``. The projection has the dimension d, dtype and device of this tensor.
        matrix: matrix ``[k, d]`` that is used instead of a matrix drawn from the key, or None.

    Raises:
        ConfigError: the matrix has the wrong shape, or a matrix is given although k is None.
    """
    if matrix is not None:
        if k is None:
            raise ConfigError(
                "projection and dim = None contradict each other: dim = None is the identity. Omit one of the two"
            )
        if matrix.shape != (k, like.shape[-1]):
            raise ConfigError(
                f"projection must have shape [{k}, {like.shape[-1]}] (dim, parameters), got {[*matrix.shape]}"
            )
        return Projection(matrix.to(like))
    if k is None:
        return Projection(None)
    return Projection(_matrix(tuple(key.tolist()), k, like.shape[-1], like.dtype, like.device))


@lru_cache(maxsize=1)
def _matrix(key: tuple[int, ...], k: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw the matrix for a key.

    The most recent projection is cached. The matrix must not be modified, because it is shared by callers.
    """
    p = torch.randn(k, d, generator=generator(0, purpose=("projection", *key)), dtype=torch.float64)
    return (p / norm(p)).to(device, dtype)
