"""Rows of client values: a tensor or a NamedTuple of tensors with one row per client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fedloom.errors import CodeError

R = TypeVar("R")


class Fields(Protocol):
    """NamedTuple of tensors, such as a download, an upload, client states, or the server state."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    def _replace(self, *args: Any, **changes: Any) -> Self: ...
    def _asdict(self) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


F = TypeVar("F", bound=Fields)


def map_rows(f: Callable[[Tensor], Tensor], rows: R) -> R:
    """Apply ``f`` to every tensor in ``rows``. None remains None."""
    if isinstance(rows, Tensor):
        return f(rows)  # type: ignore[return-value]
    if isinstance(rows, tuple):
        parts = [map_rows(f, part) for part in rows]
        return type(rows)(*parts) if hasattr(rows, "_fields") else tuple(parts)  # type: ignore[return-value]
    return rows


def select_rows(rows: R, mask: Tensor) -> R:
    """Select some clients' rows by a mask ``[m]`` or by indices. None remains None."""
    return map_rows(lambda field: field[mask], rows)


def concat_rows(pieces: Sequence[R]) -> R:
    """Concatenate the rows of several parts."""
    first: Any = pieces[0]
    if len(pieces) == 1 or first is None:
        return first  # type: ignore[no-any-return]
    if isinstance(first, Tensor):
        return torch.cat(pieces)  # type: ignore[arg-type, return-value]
    columns = [concat_rows(column) for column in zip(*pieces, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)  # type: ignore[return-value]


def name_tensors(tree: object, prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors in a NamedTuple or a dict of NamedTuples, keyed by dotted name.

    Args:
        tree: tensor, NamedTuple, dict of these, or None, which contains no tensor.
        prefix: first part of all names.

    Raises:
        AssertionError: the tree contains something else.
    """
    return dict(_walk_tree(tree, prefix))


def _walk_tree(tree: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, tuple | dict):
        fields = list(tree) if isinstance(tree, dict) else getattr(tree, "_fields", range(len(tree)))
        tree = tree.values() if isinstance(tree, dict) else tree
        for field, part in zip(fields, tree, strict=True):
            yield from _walk_tree(part, f"{name}.{field}" if name else str(field))
    elif tree is not None:
        raise AssertionError(f"{name or 'a state'} must contain tensors in NamedTuples, got {type(tree).__name__}")


def select_group(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors named ``name.field`` by `name_tensors`, keyed by field."""
    return {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}


def per_client(value: Tensor | float | int, m: int, like: Tensor) -> Tensor:
    """Return ``value`` as ``[m, 1]``, with the dtype and device of ``like``."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1, 1).expand(m, 1)


def per_coordinate(value: Tensor | float | int, m: int, like: Tensor) -> Tensor:
    """Return ``value`` as ``[m, 1]``, or as ``[m, d]`` if it has one entry per coordinate.

    Args:
        value: scalar or tensor ``[m, 1]``, ``[d]``, ``[1, d]`` or ``[m, d]``.
        m: number of clients.
        like: tensor ``[m, d]`` that determines the dtype and device of the result.

    Raises:
        CodeError: the value has a different shape.
    """
    rows, d = torch.as_tensor(value, dtype=like.dtype, device=like.device), like.shape[-1]
    if rows.numel() == 1 or tuple(rows.shape) == (m, 1):
        return per_client(rows, m, like)
    if tuple(rows.shape) not in ((d,), (1, d), (m, d)):
        raise CodeError(
            f"the strength of a pull has shape {list(rows.shape)}, but {m} clients have {d} parameters each. Pass a "
            f"scalar, [{m}, 1] for one per client, [{d}] for one per parameter, or [{m}, {d}]"
        )
    return rows.expand(m, d)


def each_client(value: Tensor, m: int) -> Tensor:
    """Expand a tensor ``[d]`` or ``[m, d]`` to ``[m, d]`` without a copy."""
    return value.expand(m, -1)


def rebuild_rows(like: F, fields: Iterable[Any]) -> F:
    """Return a NamedTuple of the same type with other values."""
    return type(like)(*fields)


def to_device(rows: F, device: torch.device) -> F:
    """Move a NamedTuple of tensors to a device."""
    return rebuild_rows(rows, (r.to(device) for r in rows))


def for_everyone(message: F, n: int) -> F:
    """Expand one client's message, whose fields are ``[d]`` or ``[1, .]``, to all clients without a copy."""
    return rebuild_rows(message, (f.expand(n, -1) if f.dim() > 1 else f for f in message))


def rows_of(message: F, where: slice | Tensor) -> F:
    """Select some clients' fields in a NamedTuple.

    Fields ``[m, .]`` are indexed, and fields ``[d]`` are shared by all clients.
    """
    return rebuild_rows(message, (f[where] if f.dim() > 1 else f for f in message))
