"""A model that takes samples as they were before any scaling, and gives probabilities or values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.data.input_spec import InputSpec
from fedloom.data.tables import Column


class RawModel(nn.Module):
    """A module with what comes before and after it; one graph, which can be exported.

    It takes raw columns ``[b, p]`` float64 of a table (codes for levels, NaN where missing), else samples
    ``[b, *shape]`` as their data set has them (tokens of sequences as int64), and gives the probabilities ``[b, C]`` of
    the classes, ``[b, L, C]`` with a label per position, or the values ``[b, k]`` of a regression in the units of its
    label.

    Args:
        module: takes what training gave it.
        facts: of the data that it was trained on.
        fitted: ``[p, 3]`` what the columns of a table were fitted to; see `fedloom.data.tables.Table.fit`.
        dtype: of the module.
    """

    def __init__(
        self, module: nn.Module, facts: InputSpec, fitted: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.module, self.task, self.dtype = module, facts.task, dtype
        self.centre, self.unit = facts.centre, facts.unit
        if facts.table is not None:
            assert fitted is not None
            self.before: nn.Module = Columns(facts.table.columns, fitted)
        else:
            self.before = nn.Identity() if facts.vocabulary else Scaling(facts, dtype)
        self.takes = torch.int64 if facts.vocabulary else dtype

    def forward(self, samples: Tensor) -> Tensor:
        """Probabilities or values."""
        out: Tensor = self.module(self.before(samples).to(self.takes))
        if self.task == "regression":
            return out.double() * self.unit + self.centre
        if self.task == "binary":
            out = torch.cat([-out / 2, out / 2], -1)
        return out.double().softmax(-1)


class Scaling(nn.Module):
    """Bytes divided by 255, then less the mean, then divided by the standard deviation."""

    def __init__(self, facts: InputSpec, dtype: torch.dtype) -> None:
        super().__init__()
        width = facts.shape[0] if facts.shape else 1
        places = [width, *[1] * (len(facts.shape) - 1)]
        one, unit = torch.ones(1, dtype=torch.float64), 1 / 255 if facts.pixels else 1.0
        mean = one * 0 if facts.mean is None else torch.tensor(facts.mean, dtype=torch.float64)
        std = one if facts.std is None else torch.tensor(facts.std, dtype=torch.float64)
        self.dtype = dtype
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", (unit / std).expand(width).reshape(places).to(dtype))
        self.register_buffer("shift", (-mean / std).expand(width).reshape(places).to(dtype))

    def forward(self, samples: Tensor) -> Tensor:
        """Samples ``[b, *shape]`` as a model takes them."""
        return samples.to(self.dtype) * self.scale + self.shift


class Columns(nn.Module):
    """`fedloom.data.tables.Table.features` of one client as a graph: all numbers at once, then levels and flags."""

    def __init__(self, columns: tuple[Column, ...], fitted: Tensor) -> None:
        super().__init__()
        known = ~fitted.isnan().any(1)
        fitted = fitted.double().nan_to_num(0.0)
        self.known: Tensor
        self.fitted: Tensor
        self.order: Tensor
        self.register_buffer("known", known.double())
        self.register_buffer("fitted", torch.stack([*fitted.unbind(1)[:2], torch.where(known, fitted[:, 2], 1.0)]))
        self.numbers = [k for k, c in enumerate(columns) if not c.levels]
        self.codes = [(k, c.levels) for k, c in enumerate(columns) if c.levels]
        self.flags = [k for k, c in enumerate(columns) if c.flag]
        blocks = [*self.numbers, *(k for k, levels in self.codes for _ in range(levels)), *self.flags]
        self.register_buffer("order", torch.argsort(torch.tensor(blocks), stable=True))

    def forward(self, samples: Tensor) -> Tensor:
        """Features ``[b, q]`` in the order of the table's columns."""
        missing, (fill, centre, scale) = samples.isnan(), self.fitted.unbind(0)
        full = torch.where(missing, fill, samples)
        blocks = [(((full - centre) / scale) * self.known)[:, self.numbers]] if self.numbers else []
        for k, levels in self.codes:
            hot = full[:, k : k + 1] == torch.arange(levels, dtype=full.dtype, device=full.device)
            blocks.append(hot.to(full.dtype) * self.known[k])
        if self.flags:
            blocks.append(missing[:, self.flags].to(full.dtype))
        return torch.cat(blocks, 1)[:, self.order].float()


def typical(columns: tuple[Column, ...], fitted: Tensor) -> Tensor:
    """What columns look like at the clients together, for a row of none of them: ``[p, 3]`` of ``[n, p, 3]``.

    Of a number the means over the clients that have it; of a code the level that most of them fill with.
    """
    mean = fitted.nanmean(0)
    for k, column in enumerate(columns):
        seen = fitted[:, k, 0]
        seen = seen[~seen.isnan()]
        if column.levels and len(seen):
            mean[k] = torch.tensor([float(torch.bincount(seen.long()).argmax()), 0.0, 1.0])
    return mean


def said(facts: InputSpec, scores: NDArray[np.float64]) -> NDArray[Any]:
    """The prediction of every row, or of every position ``[N, L]``, from its probabilities or values."""
    if facts.task == "regression":
        return scores[:, 0] if scores.shape[1] == 1 else scores
    found: NDArray[Any] = np.array(facts.classes)[scores.argmax(-1)]
    return found
