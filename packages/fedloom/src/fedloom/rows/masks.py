"""Masks of parts of a model: head, body, normalization layers and sparse layers. They depend only on the layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import Refused
from fedloom.rows.layout import Layout


def head(layout: Layout, prefixes: tuple[str, ...] = ()) -> Tensor:
    """Return a bool mask ``[d]`` of the parameters that match the prefixes, by default of the head.

    The head is the last layer with a weight matrix, including its bias.

    Raises:
        Refused: no prefix is given, and the model has no layer with a weight matrix.
        LayoutError: a prefix does not match any parameter.
    """
    if prefixes:
        return layout.mask(*prefixes)
    if not layout.matrix_shapes:
        raise Refused(
            "the model has no layer with a weight matrix that could be its head",
            rule="head-missing",
            fix="name the parameters of the head in {method.head}",
        )
    layer = _layer_name(list(layout.matrix_shapes)[-1])
    return layout.mask(*[name for name in layout.names if _layer_name(name) == layer])


def note_head_is_model(method: str, head: Tensor, equal: str) -> list[str]:
    """Return a note if the head ``[d]`` is the whole model, because ``method`` is then equivalent to ``equal``."""
    sentence = (
        f"{method} on a model that consists only of the head is the same as {equal}. Use a model with a hidden layer, "
        "or set a smaller head"
    )
    return [sentence] if bool(head.all()) else []


def normalisation(layout: Layout, prefixes: tuple[str, ...] = ()) -> Tensor:
    """Return a bool mask ``[d]`` of parameters that match the prefixes, by default of the normalization layers.

    Both the weights and the biases of these layers are included.

    A layer is a normalization layer if its weight has fewer than two dimensions or the same shape as its bias. If the
    model has no such layer, the mask is False everywhere.

    Raises:
        LayoutError: a prefix matches no parameter.
    """
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    layers = {
        _layer_name(name)
        for name, shape in shapes.items()
        if name.endswith(".weight") and (len(shape) < 2 or shapes.get(f"{_layer_name(name)}.bias") == shape)
    }
    chosen = prefixes or tuple(name for name in layout.names if _layer_name(name) in layers)
    return layout.mask(*chosen) if chosen else torch.zeros(layout.d, dtype=torch.bool)


def spans(mask: Tensor) -> list[slice]:
    """Return the ranges of consecutive True values in a bool mask ``[d]``.

    A part of a model consists of few ranges, so slicing is cheaper than indexing with a mask.
    """
    edge = torch.zeros(1, dtype=torch.int8, device=mask.device)
    edges = torch.diff(mask.to(torch.int8), prepend=edge, append=edge).nonzero()[:, 0].tolist()
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def joined(x: Tensor, personal: Tensor, mask: Tensor) -> Tensor:
    """Return models ``[m, d]`` with ``personal [m, k]`` at the coordinates in ``mask [d]``, and ``x`` elsewhere."""
    models = x.expand(len(personal), -1).clone()
    runs = spans(mask)
    for run, values in zip(runs, personal.split([run.stop - run.start for run in runs], -1), strict=True):
        models[:, run] = values
    return models


def part(models: Tensor, mask: Tensor) -> Tensor:
    """Return the ``k`` coordinates in ``mask [d]`` of models ``[m, d]``, as ``[m, k]``.

    The inverse is `joined`.
    """
    return torch.cat([models[:, run] for run in spans(mask)] or [models[:, :0]], -1)


def zero_outside_(rows: Tensor, mask: Tensor) -> Tensor:
    """Set ``rows [m, d]`` to zero at the coordinates where ``mask [d]`` is False."""
    for run in spans(~mask):
        rows[:, run] = 0
    return rows


def matrices(layout: Layout) -> Tensor:
    """Return a bool mask ``[d]`` of the parameters with at least two dimensions."""
    sizes = torch.tensor([shape.numel() for shape in layout.shapes])
    return torch.tensor([len(shape) >= 2 for shape in layout.shapes]).repeat_interleave(sizes)


def erdos_renyi_kernel(layout: Layout, density: float) -> Tensor:
    """Return the number of scalars to keep in each matrix, int64 ``[matrices]``, for a total fraction ``density``.

    The density of a layer is proportional to the sum of its dimensions divided by their product, but at most 1 (Evci et
    al. 2020, "Rigging the Lottery", Sec. 3).
    """
    shapes = [shape for shape in layout.shapes if len(shape) >= 2]
    size = torch.tensor([shape.numel() for shape in shapes], dtype=torch.float64)
    raw = torch.tensor([sum(shape) for shape in shapes], dtype=torch.float64) / size
    full = torch.zeros(len(shapes), dtype=torch.bool)
    while True:
        scale = (density * size.sum() - size[full].sum()) / (raw * size)[~full].sum()
        over = ~full & (scale * raw >= 1)
        if not bool(over.any()):
            return torch.where(full, size, scale * raw * size).round().long()
        full = full | over


def smallest(score: Tensor, layout: Layout, count: Tensor) -> Tensor:
    """Return a bool mask ``[..., d]`` of the ``count [matrices]`` smallest scores ``[..., d]`` in each matrix."""
    chosen = torch.zeros_like(score, dtype=torch.bool)
    places = {name: (o, s.numel()) for name, o, s in zip(layout.names, layout.offsets, layout.shapes, strict=True)}
    for name, k in zip(layout.matrix_shapes, count.tolist(), strict=True):
        start, size = places[name]
        _choose_smallest(score.narrow(-1, start, size), k, chosen.narrow(-1, start, size))
    return chosen


def _choose_smallest(score: Tensor, k: int, chosen: Tensor) -> None:
    """Set ``chosen [..., s]`` to True at the k smallest values of ``score [..., s]``."""
    if k > 0 and score.device.type == "cpu":  # NumPy's partition is vectorized, but may include too many ties
        kth = torch.from_numpy(np.partition(score.numpy(), k - 1)[..., k - 1 : k])
        torch.le(score, kth, out=chosen)
        if bool((chosen.sum(-1) == k).all()):
            return
        chosen.zero_()
    chosen.scatter_(-1, score.topk(k, largest=False, sorted=False).indices, True)


def _layer_name(name: str) -> str:
    return name.rpartition(".")[0]
