"""Layout, the only class that knows the shapes of an `nn.Module`'s parameters.

Everywhere else, a model is a vector in R^d.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from fedloom.errors import LayoutError
from fedloom.hints import suggest_nearest
from fedloom.rows.algebra import ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of the parameters of a model, in the order of `named_parameters()`.

    A layout is a value: it can be compared, hashed and pickled, and holds no reference to a module. `names`, `shapes`
    and `offsets` have one entry per parameter. Parameter k is the slice `row[offsets[k] : offsets[k] + numel]`. `d` is
    the total number of scalars.

    Raises:
        LayoutError: there are no parameters, a name occurs twice, or the number of names differs from the number of
            shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[Size, ...]
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    d: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names, shapes = tuple(self.names), tuple(Size(shape) for shape in self.shapes)
        if not names or len(set(names)) != len(names) or len(names) != len(shapes):
            raise LayoutError(
                f"a layout needs distinct names with one shape each, got {len(names)} names "
                f"({len(set(names))} distinct) and {len(shapes)} shapes"
            )
        ends = [0]
        for shape in shapes:
            ends.append(ends[-1] + shape.numel())
        for name, value in (("names", names), ("shapes", shapes), ("offsets", tuple(ends[:-1])), ("d", ends[-1])):
            object.__setattr__(self, name, value)

    @classmethod
    def create(cls, module: nn.Module) -> Layout:
        """Return the layout of the trainable parameters of a module (those with ``requires_grad``).

        Tied parameters are included only once.

        Frozen parameters and buffers are not part of a row, because the module itself holds them.

        Raises:
            LayoutError: no parameter is trainable.
        """
        parameters = trainable(module)
        if not parameters and any(True for _ in module.parameters()):
            raise LayoutError(
                f"no parameter of {type(module).__name__} can be trained: all have requires_grad = "
                "False. Set requires_grad = True for some parameters"
            )
        return cls(tuple(parameters), tuple(p.shape for p in parameters.values()))

    @classmethod
    def create_from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """Return the layout for named shapes, such as ``{"weight": (10, 784), "bias": (10,)}``."""
        return cls(tuple(shapes), tuple(Size(shape) for shape in shapes.values()))

    # ------------------------------------------------------------------------------------------------ module <-> row

    def vector(self, module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """Return the module's trainable parameters as a new row [d] without a gradient."""
        row = torch.cat([p.detach().reshape(-1) for p in self._parameters(module)])
        return row if dtype is None else row.to(dtype)

    @torch.no_grad()
    def load(self, module: nn.Module, row: Tensor) -> None:
        """Copy a row [d] into the parameters of a module."""
        for p, value in zip(self._parameters(module), self.tree(row).values(), strict=True):
            p.copy_(value)

    def _parameters(self, module: nn.Module) -> list[Tensor]:
        parameters = trainable(module)
        got = {name: tuple(p.shape) for name, p in parameters.items()}
        if got != {name: tuple(shape) for name, shape in zip(self.names, self.shapes, strict=True)}:
            raise LayoutError(f"module {type(module).__name__} has the parameters {got}, but the layout is {self!r}")
        return [parameters[name] for name in self.names]

    # -------------------------------------------------------------------------------------------------- row <-> tree

    def tree(self, rows: Tensor) -> dict[str, Tensor]:
        """Return parameters {name: ``[..., *shape]``} as views of rows ``[..., d]``.

        Nothing is copied, regardless of the strides.
        """
        self.check(rows)
        lead = rows.shape[:-1]
        parts = torch.split(rows, self._sizes, dim=-1)
        return {name: part.view(lead + shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)}

    def flatten(self, tree: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors ``[..., *shape]`` into new rows ``[..., d]``. This is the inverse of `tree`."""
        if set(tree) != set(self.names):
            raise LayoutError(f"flatten needs the parameters {list(self.names)}, got {list(tree)}")
        first = tree[self.names[0]].shape
        lead = first[: len(first) - len(self.shapes[0])]
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tree[name].shape != lead + shape:
                raise LayoutError(
                    f"parameter {name!r} must have shape {list(lead + shape)}, got {list(tree[name].shape)}"
                )
        return torch.cat(
            [tree[name].reshape((*lead, size)) for name, size in zip(self.names, self._sizes, strict=True)], -1
        )

    def check(self, rows: Tensor) -> None:
        """Raise an error if the rows do not match this model.

        Raises:
            LayoutError: the last dimension of the rows is not d.
        """
        if rows.dim() == 0 or rows.shape[-1] != self.d:
            raise LayoutError(f"rows of this model must have shape [..., {self.d}], got {list(rows.shape)}")

    @cached_property
    def _sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    def mask(self, *prefixes: str) -> Tensor:
        """Return a bool mask [d] of the parameters that match any of the prefixes, e.g., ``mask("fc2", "body.0")``.

        If a prefix is the dotted name of a module or parameter, it matches only this module or parameter ("fc1" does
        not match "fc10"). Any other prefix matches every parameter whose name starts with it.

        Raises:
            LayoutError: a prefix matches no parameter. The message suggests the most similar name.
        """
        chosen: set[str] = set()
        for prefix in prefixes:
            dotted = [name for name in self.names if name == prefix or name.startswith(prefix.rstrip(".") + ".")]
            names = dotted or [name for name in self.names if name.startswith(prefix)]
            if not names or not prefix:
                raise LayoutError(f"no parameter starts with {prefix!r}; {suggest_nearest(prefix, self._prefixes())}")
            chosen.update(names)
        return torch.cat(
            [torch.full((size,), name in chosen) for name, size in zip(self.names, self._sizes, strict=True)]
        )

    def _prefixes(self) -> set[str]:
        return {".".join(parts[:k]) for parts in (n.split(".") for n in self.names) for k in range(1, len(parts) + 1)}

    # ---------------------------------------------------------------------------------------------- row <-> matrices

    @cached_property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes {name: (r, c)} of the matrix views of all parameters with at least two dimensions."""
        return {
            name: (s[0] * prod(s[2:3]), s[1] * prod(s[3:]))
            for name, s in zip(self.names, self.shapes, strict=True)
            if len(s) >= 2
        }

    def matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the matrix views [..., r, c] of all parameters with at least two dimensions in rows [..., d].

        For a weight [o, i] of a linear layer, the view is the weight itself. For a weight [o, i, k, l] of a
        convolution, the view has the shape [o*k, i*l] and is computed with swapaxes(1, 2) (FedSLR, section 3).
        Parameters with fewer dimensions have no matrix view.
        """
        tree, lead = self.tree(rows), rows.shape[:-1]
        return {
            name: self._swap(name, tree[name]).reshape((*lead, r, c)) for name, (r, c) in self.matrix_shapes.items()
        }

    def ranks(self, x: Tensor) -> Tensor:
        """Return the numerical ranks (int64) of the matrices in ``x [d]``, in the order of `matrix_shapes`.

        A matrix with nonfinite values has full rank.
        """
        matrix_ranks = [ranks(w) for w in self.matrices(x).values()]
        return torch.stack(matrix_ranks) if matrix_ranks else torch.zeros(0, dtype=torch.int64)

    def replace_matrices(self, rows: Tensor, matrices: Mapping[str, Tensor]) -> Tensor:
        """Return new rows ``[..., d]`` with the given matrices replaced.

        Other parameters remain unchanged.
        """
        if extra := set(matrices) - set(self.matrix_shapes):
            raise LayoutError(
                f"no matrix {sorted(extra)[0]!r}; {suggest_nearest(sorted(extra)[0], self.matrix_shapes)}"
            )
        shapes, lead = dict(zip(self.names, self.shapes, strict=True)), rows.shape[:-1]
        for name, matrix in matrices.items():
            if matrix.shape != (*lead, *self.matrix_shapes[name]):
                want = [*lead, *self.matrix_shapes[name]]
                raise LayoutError(f"matrix {name!r} must have shape {want}, got {list(matrix.shape)}")
        back = {
            name: self._swap(name, matrix.reshape((*lead, s[0], *s[2:3], s[1], *s[3:])))
            for name, matrix in matrices.items()
            for s in (shapes[name],)
        }
        return self.flatten(self.tree(rows) | back)

    def _swap(self, name: str, value: Tensor) -> Tensor:
        """Swap the axes [..., o, i, k, *] <-> [..., o, k, i, *] of a convolution weight.

        The weight of a linear layer is returned unchanged.
        """
        s = self.shapes[self.names.index(name)]
        return value if len(s) == 2 else value.swapaxes(1 - len(s), 2 - len(s))

    # -------------------------------------------------------------------------------------------------------- header

    def header(self) -> dict[str, str]:
        """Return the layout as a dict of strings for the metadata of a safetensors file."""
        return {"layout": json.dumps([[n, list(s)] for n, s in zip(self.names, self.shapes, strict=True)])}

    @classmethod
    def read_header(cls, header: Mapping[str, str]) -> Layout:
        """Read a layout from the dict that `header` returned.

        Raises:
            LayoutError: the header is missing or damaged.
        """
        try:
            entries = json.loads(header["layout"])
            good = all(
                isinstance(n, str) and all(type(k) is int and 0 <= k < 2**48 for k in shape) for n, shape in entries
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"the header contains no readable layout (keys {sorted(header)}): {error!r}") from error
        if not good:
            raise LayoutError(f"the layout in the header is damaged: {header['layout'][:80]!r}")
        return cls(tuple(name for name, _ in entries), tuple(Size(shape) for _, shape in entries))

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the layout, as 16 hexadecimal digits."""
        return blake2b(self.header()["layout"].encode(), digest_size=8).hexdigest()


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters of a module, keyed by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
