"""Forward passes of one sample, which measure a network: its activations, and the memory format that suits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedloom.local.oracles.pooling import Pooled
from fedloom.models.dropout import Dropout
from fedloom.seeds import forked

PIECE = 4096
"""Samples evaluated together at most."""

CPU_ACTIVATION, GPU_ACTIVATION = 16 << 20, 256 << 20
"""Bytes of the widest activation of a piece: with `PIECE` samples a CNN takes two to three times as long."""

USUAL_BATCH = 20
"""Samples of a step, where pooled elements are weighed against weights of convolutions."""


@contextmanager
def caught(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """What ``layer`` gives meanwhile, call by call; nothing where there is none."""
    outputs: list[Tensor] = []
    if layer is None:
        yield outputs
        return
    hook = layer.register_forward_hook(lambda _module, _inputs, out: outputs.append(out))
    try:
        yield outputs
    finally:
        hook.remove()


def at_least_two(x: Tensor) -> Tensor:
    """A single sample twice, so that batch normalisation has a (zero) variance; means are unchanged."""
    return x.repeat(2, *[1] * (x.dim() - 1)) if len(x) == 1 else x


def evaluated_together(module: nn.Module, sample: Tensor) -> int:
    """Samples that a network evaluates together: its widest activation of one ``sample [1, ...]`` decides."""
    widths = [sample.numel()]
    hooks = [
        m.register_forward_hook(lambda _m, _x, out: widths.append(out.numel()) if isinstance(out, Tensor) else None)
        for m in module.modules()
    ]
    module.eval()
    with torch.no_grad():
        module(sample)
    for hook in hooks:
        hook.remove()
    room = CPU_ACTIVATION if sample.device.type == "cpu" else GPU_ACTIVATION
    return max(1, min(PIECE, room // (max(widths) * sample.element_size())))


def dropout_shapes(module: nn.Module, dropouts: Mapping[str, Dropout], sample: Tensor) -> dict[str, torch.Size]:
    """Shapes of what every dropout layer takes of one ``sample [1, ...]``, by name."""
    shapes: dict[str, torch.Size] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _m, args, name=name: shapes.__setitem__(name, args[0].shape[1:]))
        for name, m in dropouts.items()
    ]
    module.eval()
    with torch.no_grad():
        module(sample)
    for hook in hooks:
        hook.remove()
    return shapes


def memory_format(module: nn.Module, sample: Tensor) -> torch.memory_format:
    """Channels last on a CPU where pooling gains more by it than the weights of convolutions lose.

    Pooling is several times as fast then; weights and their gradients, whose order in a row is the other one, are
    copied in every step.
    """
    weights = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d))
    if not weights or sample.dim() != 4 or sample.device.type != "cpu":
        return torch.contiguous_format
    try:
        with torch.no_grad(), forked(sample.device), Pooled() as pooled:
            module.eval()(at_least_two(sample).clone(memory_format=torch.channels_last))
    except RuntimeError:  # a view() in user code, for one
        return torch.contiguous_format
    return torch.channels_last if USUAL_BATCH * pooled.elements >= weights else torch.contiguous_format
