"""Probes, which determine a network's properties by running a copy of it on a few samples."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedloom.errors import attribute_error
from fedloom.local.oracles.forward import RepresentationSpot, record_layer_calls, repeat_single
from fedloom.models.imported import ModuleValues, ValueRecord, batch_norm_layers
from fedloom.models.sequences import TorchLSTMLayer
from fedloom.rows.layout import Layout, trainable
from fedloom.seeds import as_global, forked, generator, preserve_rng, rng_states

if TYPE_CHECKING:
    from fedloom.data.federation import Federation

PROBE_SAMPLES = 32
"""Number of samples from all clients for trying custom losses and metrics and finding unused parameters."""

MIXED_TOLERANCE = 1e-4
"""Largest difference between a sample's outputs in two batches that is considered a rounding error."""

RANDOM_PASSES = 8
"""Number of passes for a network that draws random numbers. A layer that is dropped with probability 1/2 is missed with
probability 1/256."""


def draws_globally(module: nn.Module, fed: Federation, *, trains: bool = True) -> bool:
    """Return True if the module draws from a global random generator of torch, NumPy or Python.

    A copy of the module is run on one sample to find out.

    Args:
        module: the network.
        fed: clients and their data.
        trains: True for training mode, False for evaluation mode.
    """
    with preserve_rng():
        before = _global_state(fed.device)
        _try_probe(_copy_in_training_mode(module, fed).train(trains), fed)
        return before != _global_state(fed.device)


def hides_randomness(module: nn.Module, fed: Federation) -> bool:
    """Return True if two passes over a sample differ although the global random generators start in the same state.

    Such a module has its own random generator, or reads a clock or a device.
    """
    probe, outputs = _copy_in_training_mode(module, fed), list[Tensor]()
    for _ in range(2):
        with as_global(generator(0, purpose="probe"), fed.device):
            outputs.append(_try_probe(probe, fed))
    return not torch.equal(outputs[0].nan_to_num(), outputs[1].nan_to_num())


def mixes_samples(module: nn.Module, fed: Federation) -> bool:
    """Return True if the outputs for a sample depend on the other samples of a batch, e.g. due to a wrong axis.

    Modules are tested in evaluation mode. Normalization by batch statistics is not considered. Each batch is tested
    twice: if the outputs differ, the module itself draws random numbers or counts calls, so the test is inconclusive.
    """
    if batch_norm_layers(module):
        return False
    probe, x, outputs = _copy_in_training_mode(module, fed).eval(), fed.fetch(spread_samples(fed)), list[Tensor]()
    for pair in [[0, len(x) // 2]] * 2 + [[0, len(x) - 1]] * 2:
        with as_global(generator(0, purpose="probe"), fed.device), torch.no_grad():
            try:
                outputs.append(probe(x[pair])[0].nan_to_num())
            except Exception:  # user code fails on these samples; the run reports it if needed
                return False
    equal = [torch.allclose(a, b, rtol=MIXED_TOLERANCE, atol=MIXED_TOLERANCE) for a, b in pairwise(outputs)]
    return equal == [True, False, True]


def returns_probabilities(module: nn.Module, fed: Federation) -> bool:
    """Return True if the outputs for a sample are nonnegative and sum to 1, as after a softmax."""
    try:
        with preserve_rng():
            outputs = _try_probe(_copy_in_training_mode(module, fed).eval(), fed)
    except Exception:  # user code fails on this sample; the run reports it if needed
        return False
    far = (outputs.sum(-1) - 1).abs() > MIXED_TOLERANCE
    return outputs.ndim == 2 and outputs.shape[1] > 1 and not bool((outputs < 0).any() or far.any())


def unregistered_modules(module: nn.Module) -> list[str]:
    """Return the names of layers and parameters that torch does not find, because they are in plain lists or dicts."""
    registered, names = {*map(id, module.modules()), *map(id, module.parameters())}, list[str]()
    for owner, m in module.named_modules():
        for key, held in vars(m).items():
            pairs = held.items() if isinstance(held, dict) else enumerate(held if type(held) in (list, tuple) else ())
            if not key.startswith("_"):
                lost = (
                    k for k, one in pairs if isinstance(one, nn.Module | nn.Parameter) and id(one) not in registered
                )
                names += [f"{owner}.{key}[{k!r}]".lstrip(".") for k in lost]
    return names


def fails_stacked(module: nn.Module, fed: Federation) -> str:
    """Return vmap's error message for a training step of the module, or "" if vmap accepts it.

    A copy of the module computes one step of two models on one sample each, and then outputs without vmap.
    """
    probe = _copy_in_training_mode(module, fed)
    for layer in probe.modules():
        if isinstance(layer, TorchLSTMLayer):
            layer.plain = True
    x = repeat_single(fed.fetch(fed.parts["train"].index[:1]))
    leaves = {name: torch.stack([p.detach(), p.detach()]).requires_grad_() for name, p in trainable(probe).items()}
    try:
        with preserve_rng(), torch.enable_grad():
            outputs = vmap(lambda tree, rows: functional_call(probe, tree, (rows,)))(leaves, torch.stack([x, x]))
            torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
            _try_probe(probe.eval(), fed)
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def find_changed_values(module: nn.Module, fed: Federation) -> list[str]:
    """Return the names of buffers (except batch statistics) and attributes that training changes.

    Only attributes whose types are in `fedloom.models.imported.CHANGEABLE_TYPES` are considered. A copy of the module
    is run on one sample to find them.
    """
    probe = _copy_in_training_mode(module, fed)
    values = ModuleValues(probe)
    with forked(fed.device):
        _try_probe(probe, fed)
    return values.changed()


def find_written_parameters(module: nn.Module, fed: Federation) -> list[str]:
    """Return the names of parameters that a forward pass changes, as in `torch.nn.Embedding` with ``max_norm``.

    A copy is run on one sample. A tensor that is modified in place has a new version, even if its values are the same.
    """
    probe = _copy_in_training_mode(module, fed)
    marks = {name: (ValueRecord.record(p), p.detach().clone()) for name, p in trainable(probe).items()}
    with forked(fed.device):
        _try_probe(probe, fed)
    now = trainable(probe)
    return [
        name
        for name, (mark, value) in marks.items()
        if not mark.is_same(now[name]) or not torch.equal(now[name].nan_to_num(), value.nan_to_num())
    ]


def find_unreached_parameters(module: nn.Module, fed: Federation, spot: RepresentationSpot | None = None) -> list[str]:
    """Return the names of parameters that affect no sample, such as the parameters of submodules that are never called.

    A copy is run on `PROBE_SAMPLES` samples, several times if it draws random numbers.

    Args:
        module: the network.
        fed: clients and their data.
        spot: location of the representation if the loss contains terms on it, or None.
    """
    probe = _copy_in_training_mode(module, fed)
    parameters = trainable(probe)
    left = dict(parameters)
    x = fed.fetch(spread_samples(fed))
    layer = None if spot is None else probe.get_submodule(spot.name)
    with preserve_rng(), torch.enable_grad():
        for _ in range(RANDOM_PASSES):
            before = _global_state(fed.device)
            with (
                attribute_error("model", module, "a trial on a few samples"),
                record_layer_calls(layer, entering=spot is not None and spot.entering) as features,
            ):
                ends = [probe(x), *features]
            total = torch.stack([end.sum() for end in ends]).sum()
            slopes: tuple[Tensor | None, ...] = torch.autograd.grad(total, list(left.values()), allow_unused=True)
            left = {name: p for (name, p), slope in zip(left.items(), slopes, strict=True) if slope is None}
            if not left or before == _global_state(fed.device):
                break
    return [*left]


def reached_mask(
    module: nn.Module, fed: Federation, layout: Layout, spot: RepresentationSpot | None = None
) -> Tensor | None:
    """Return a mask ``[d]`` with 0 for `find_unreached_parameters` and 1 for all others, or None if all are reached."""
    unused = find_unreached_parameters(module, fed, spot)
    shapes = zip(layout.names, layout.shapes, strict=True)
    mask = {n: torch.full(shape, float(n not in unused), dtype=fed.dtype, device=fed.device) for n, shape in shapes}
    return layout.flatten(mask) if unused else None


def _copy_in_training_mode(module: nn.Module, fed: Federation) -> nn.Module:
    """Return a copy of the module in training mode."""
    return copy.deepcopy(module).to(device=fed.device, dtype=fed.dtype).train()


@torch.no_grad()
def _try_probe(probe: nn.Module, fed: Federation) -> Tensor:
    with attribute_error("model", probe, "a trial on one sample"):
        outputs: Tensor = probe(repeat_single(fed.fetch(fed.parts["train"].index[:1])))
    return outputs


def spread_samples(fed: Federation) -> Tensor:
    """Return the indices of `PROBE_SAMPLES` training samples, spread over all clients."""
    index = fed.parts["train"].index
    return index[torch.linspace(0, len(index) - 1, PROBE_SAMPLES, device=index.device).long()]


def _global_state(device: torch.device) -> tuple[object, ...]:
    on_gpu = (torch.cuda.get_rng_state(device).numpy().tobytes(),) if device.type == "cuda" else ()
    return (*rng_states(), *on_gpu)
