"""Functions that compare and copy states as named tensors, and convert states as a checkpoint does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
from torch import Tensor

from fedloom.local.rows import map_rows, name_tensors

Index = Sequence[int] | slice | int


def take_rows(tree: object, clients: Index) -> Any:
    """Return the rows ``clients`` of every tensor."""
    return map_rows(lambda t: t[clients], tree)


def select_download(down: object, clients: Index) -> Any:
    """Return the download for the clients at the positions ``clients`` in a cohort, with all shared fields."""
    return map_rows(lambda t: t[clients] if t.dim() == 2 else t, down)


def substitute(tree: object, tensors: Mapping[str, Tensor], prefix: str = "") -> Any:
    """Return a copy of ``tree`` with the named tensors replaced."""
    if isinstance(tree, Tensor):
        return tensors[prefix]
    if not isinstance(tree, tuple):
        return tree
    fields = getattr(tree, "_fields", range(len(tree)))
    parts = [substitute(p, tensors, f"{prefix}.{f}" if prefix else str(f)) for f, p in zip(fields, tree, strict=True)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def plus(tree: object, other: Mapping[str, Tensor]) -> Any:
    """Return ``tree`` after adding the tensors in ``other`` to the tensors with the same names.

    Fields that ``other`` does not contain remain unchanged.
    """
    return substitute(tree, {name: value + other.get(name, 0) for name, value in name_tensors(tree).items()})


def reload_from_checkpoint(tree: object) -> Any:
    """Convert a state to the bytes of a safetensors file and back.

    Values that are not tensors are taken from ``tree``.
    """
    tensors = {name: value.contiguous().clone() for name, value in name_tensors(tree).items()}
    return substitute(tree, safetensors.torch.load(safetensors.torch.save(tensors)))


def locate_difference(got: object, want: object, tol: float = 0.0) -> str | None:
    """Return a phrase that describes the first difference between two trees of tensors, or None if they are equal.

    Args:
        got: tensor, NamedTuple, or dict of these, of any type that `name_tensors` accepts.
        want: tree with the same structure and the same names.
        tol: largest tolerated difference, at least 0, relative to the size of the tensors. If it is 0, tensors must be
            bitwise equal.

    Raises:
        AssertionError: a tree contains something other than tensors.
    """
    a, b = name_tensors(got), name_tensors(want)
    if a.keys() != b.keys():
        return f"fields {sorted(a)} instead of {sorted(b)}"
    for name in a:
        x, y = a[name], b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name or 'it'} is {list(x.shape)} {x.dtype} instead of {list(y.shape)} {y.dtype}"
        if not distance(x, y) <= tol:
            return f"{name or 'it'} differs by {(x.double() - y.double()).abs().max().item():.3g}"
    return None


def distance(x: Tensor, y: Tensor) -> float:
    """Return the largest difference between tensors of the same shape, divided by 1 plus the largest entry of ``y``."""
    if not x.numel():
        return 0.0
    return ((x.double() - y.double()).abs().max() / (1 + y.double().abs().max())).item()
