"""Trees of rows: a tensor, or a NamedTuple of tensors, with a row per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


def map_rows(f: Callable[[Tensor], Tensor], rows: R) -> R:
    """``f`` on every tensor of ``rows``; None stays None."""
    if isinstance(rows, Tensor):
        return f(rows)  # type: ignore[return-value]
    if isinstance(rows, tuple):
        parts = [map_rows(f, part) for part in rows]
        return type(rows)(*parts) if hasattr(rows, "_fields") else tuple(parts)  # type: ignore[return-value]
    return rows


def concat_rows(pieces: Sequence[R]) -> R:
    """The rows of all pieces, one after the other."""
    first: Any = pieces[0]
    if len(pieces) == 1 or first is None:
        return first  # type: ignore[no-any-return]
    if isinstance(first, Tensor):
        return torch.cat(pieces)  # type: ignore[arg-type, return-value]
    columns = [concat_rows(column) for column in zip(*pieces, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)  # type: ignore[return-value]


def per_client(value: Tensor | float | int, m: int, like: Tensor) -> Tensor:
    """``value`` as ``[m, 1]`` of the dtype and device of ``like``."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1, 1).expand(m, 1)


def each_client(value: Tensor, m: int) -> Tensor:
    """``[d]`` or ``[m, d]`` as ``[m, d]``, without a copy."""
    return value.expand(m, -1)


def to_device(rows: Any, device: torch.device) -> Any:
    """A NamedTuple of tensors on a device."""
    return rows if device.type == "cpu" else type(rows)(*[r.to(device) for r in rows])


def rows_of(message: Any, where: slice | Tensor) -> Any:
    """Some clients of a NamedTuple whose fields are ``[d]``, the same for all, or ``[m, .]``."""
    return type(message)(*[f[where] if f.dim() > 1 else f for f in message])
