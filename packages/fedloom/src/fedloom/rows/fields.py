"""Fields of messages: named values and their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.layout import Layout

Kind = Literal["dense", "sparse", "lowrank", "levels", "sign"]
Ranks = Mapping[str, int | Tensor]
"""Rank of each matrix in a layout, as one number or as one number per row [m]."""

FIELD_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)


@dataclass(frozen=True, eq=False)
class Field:
    """Format of one value in a message. The sender and the receiver must use the same format.

    Attributes:
        shape: shape of one client's value, such as (d,) for a model or (1,) for a scalar.
        dtype: one of float64, float32, float16, bfloat16, int64.
        encoding: most compact encoding of the value. The encodings are listed in the table in
            `fedloom.rows.encodings`.
        mask: bool tensor of the same shape. Only the marked scalars are sent. The receiver uses its own values for the
            others.
        levels: number L of positive levels on the grid {-L..L} scale / L, in the encoding "levels".
        layout: layout that defines the matrices, in the encoding "lowrank".

    Raises:
        ConfigError: the combination of arguments cannot be encoded.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    encoding: Kind = "dense"
    mask: Tensor | None = None
    levels: int = 1
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.dtype not in FIELD_DTYPES:
            raise ConfigError(f"a field of a message must have one of the types {FIELD_DTYPES}, got {self.dtype}")
        if self.encoding not in get_args(Kind):
            raise ConfigError(f"unknown encoding {self.encoding!r}. Allowed: {', '.join(get_args(Kind))}")
        if self.mask is not None and (self.mask.dtype != torch.bool or tuple(self.mask.shape) != tuple(self.shape)):
            raise ConfigError(
                f"the mask of a field {list(self.shape)} must be bool of that shape, got {self.mask.shape}"
            )
        if self.encoding == "lowrank" and (
            self.layout is None or self.mask is not None or self.shape != (self.layout.d,)
        ):
            raise ConfigError('encoding "lowrank" needs the layout of a whole row [d] and no mask')
        if not self.dtype.is_floating_point and self.encoding not in ("dense", "sparse"):
            raise ConfigError(f"encoding {self.encoding!r} works only with floating point, got {self.dtype}")
        if not 1 <= self.levels < 2**15:
            raise ConfigError(f"levels must be in 1..32767, got {self.levels}")

    @cached_property
    def n(self) -> int:
        """Number of scalars that are sent."""
        return prod(self.shape) if self.mask is None else int(self.mask.sum())

    @property
    def item(self) -> int:
        """Number of bytes per scalar."""
        return self.dtype.itemsize

    @property
    def index(self) -> torch.dtype:
        """Data type of indices."""
        return torch.int32 if self.n < 2**31 else torch.int64

    @property
    def bits(self) -> int:
        """Number of bits per scalar in the encodings "levels" and "sign"."""
        return 1 if self.encoding == "sign" else (2 * self.levels).bit_length()

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes {name: (r, c)} of the matrices in the encoding "lowrank"."""
        assert self.layout is not None
        return self.layout.matrix_shapes

    def select_sent(self, rows: Tensor) -> Tensor:
        """Return the scalars ``[..., n]`` that are sent for values ``[..., *shape]``."""
        flat = rows.reshape((*rows.shape[: rows.dim() - len(self.shape)], prod(self.shape)))
        return flat if self.mask is None else flat[..., self.mask.reshape(-1)]
