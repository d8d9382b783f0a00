"""Forward passes with one sample, which measure activations and find a network's fastest memory format."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.local.oracles.pooling import PoolingMode
from fedloom.models import head_prefixes, penultimate_layer
from fedloom.models.dropout import Dropout
from fedloom.seeds import forked

FORWARD_SAMPLES = 4096
"""Maximum number of samples in one evaluation pass."""

CPU_ACTIVATION, GPU_ACTIVATION = 16 << 20, 256 << 20
"""Maximum size of the largest activation in an evaluation pass, in bytes. If `FORWARD_SAMPLES` were the only limit, a
CNN would take two to three times as long."""

TYPICAL_BATCH_SIZE = 20
"""Assumed number of samples per step when comparing the sizes of pooled activations and convolution weights."""


@contextmanager
def record_layer_calls(layer: nn.Module | None, *, entering: bool = False) -> Iterator[list[Tensor]]:
    """Record the outputs of ``layer`` in each call, or its inputs if ``entering`` is True.

    If ``layer`` is None, nothing is recorded.
    """
    values: list[Tensor] = []
    if layer is None:
        yield values
        return
    hook = (
        layer.register_forward_pre_hook(lambda _module, inputs: values.append(inputs[0]))
        if entering
        else layer.register_forward_hook(lambda _module, _inputs, out: values.append(out))
    )
    try:
        yield values
    finally:
        hook.remove()


def set_training(module: nn.Module, training: bool) -> None:
    """Set the mode of a network, unless it already has this mode.

    Setting the mode visits all layers, which takes time.
    """
    if module.training is not training:
        module.train(training)


class RepresentationSpot(NamedTuple):
    """Location of a network's representation: the output of a submodule, or its input if ``entering`` is True."""

    name: str
    entering: bool = False


def find_representation(module: nn.Module, sample: Tensor) -> RepresentationSpot:
    """Find a network's representation, which is the input of its head.

    This is the output of the layer `penultimate_layer`, unless a function such as ``F.relu`` is applied between this
    layer and the head. A pass of a ``sample [1, ...]`` through the network detects this, because the two tensors then
    occupy different memory. If the network itself names a layer, this layer is used without a check.

    Raises:
        ConfigError: the head is the first layer.
    """
    spot = RepresentationSpot(penultimate_layer(module))
    if isinstance(getattr(module, "penultimate", None), str):
        return spot
    probe = copy.deepcopy(module).to(sample.device).eval()
    probe = probe.to(sample.dtype) if sample.is_floating_point() else probe
    last = head_prefixes(module)[0].removesuffix(".")
    modules = dict(probe.named_modules())
    with (
        torch.no_grad(),
        forked(sample.device),
        record_layer_calls(modules[spot.name]) as outputs,
        record_layer_calls(modules[last], entering=True) as inputs,
    ):
        probe(sample)
    if not inputs:
        return spot
    return spot if outputs and _is_same(outputs[-1], inputs[-1]) else RepresentationSpot(last, entering=True)


def _is_same(output: object, taken: Tensor) -> bool:
    """Return True if the input of the head is the output of the layer, possibly in a different shape.

    Comparing only the values would not be sufficient, because they could be equal by coincidence.
    """
    if not isinstance(output, Tensor) or output.untyped_storage().data_ptr() != taken.untyped_storage().data_ptr():
        return False
    return torch.equal(output.flatten(1), taken.flatten(1))


def repeat_single(x: Tensor) -> Tensor:
    """Repeat a single sample, so that batch normalization can compute a variance (of zero).

    Means are unchanged.
    """
    return x.repeat(2, *[1] * (x.dim() - 1)) if len(x) == 1 else x


def samples_per_evaluation(module: nn.Module, sample: Tensor) -> int:
    """Return the number of samples to evaluate together, based on the largest activation of one ``sample [1, ...]``."""
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
    return max(1, min(FORWARD_SAMPLES, room // (max(widths) * sample.element_size())))


def dropout_shapes(module: nn.Module, dropouts: Mapping[str, Dropout], sample: Tensor) -> dict[str, torch.Size]:
    """Return the shape of each dropout layer's input for one ``sample [1, ...]``, keyed by layer name."""
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
    """On a CPU, return channels last if pooling saves more time than the convolution weights cost.

    Pooling is several times faster in this format. However, rows store weights and gradients in a different order, so
    they must be copied in every step.
    """
    weights = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d))
    if not weights or sample.dim() != 4 or sample.device.type != "cpu":
        return torch.contiguous_format
    try:
        with torch.no_grad(), forked(sample.device), PoolingMode() as pooled:
            module.eval()(repeat_single(sample).clone(memory_format=torch.channels_last))
    except RuntimeError:  # for example a view() in user code
        return torch.contiguous_format
    return torch.channels_last if TYPICAL_BATCH_SIZE * pooled.elements >= weights else torch.contiguous_format
