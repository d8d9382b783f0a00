"""Probes: what a network does, found out by running a copy of it on a few samples."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.local.oracles.forward import Spot, at_least_two, caught
from fedloom.models.imported import Mark, Values
from fedloom.rows.layout import Layout, trainable
from fedloom.seeds import forked

if TYPE_CHECKING:
    from fedloom.data.federation import Federation

TRIED = 32
"""Samples, from all clients, that an own loss, own metrics and unused parameters are tried on before work starts."""

DRAWS = 8
"""Passes of a network that draws random numbers: a layer dropped with probability 1/2 is missed by one in 256."""


def draws_itself(module: nn.Module, fed: Federation) -> bool:
    """Whether the module draws from a global generator in training, found out by running a copy on one sample."""
    with forked(fed.device):
        before = _global_state(fed.device)
        _tried(_probe(module, fed), fed)
        return not torch.equal(before, _global_state(fed.device))


def moved_values(module: nn.Module, fed: Federation) -> list[str]:
    """Names of buffers, batch statistics apart, and of attributes that training changes.

    Attributes are those of `fedloom.models.imported.VALUES`. They are found out by running a copy on one sample.
    """
    probe = _probe(module, fed)
    values = Values(probe)
    with forked(fed.device):
        _tried(probe, fed)
    return values.changed()


def written_parameters(module: nn.Module, fed: Federation) -> list[str]:
    """Names of parameters that a forward pass itself writes, as `torch.nn.Embedding` with ``max_norm`` does.

    They are found out by running a copy on one sample: what was written in place has another version, even where the
    values are the same.
    """
    probe = _probe(module, fed)
    marks = {name: (Mark.of(p), p.detach().clone()) for name, p in trainable(probe).items()}
    with forked(fed.device):
        _tried(probe, fed)
    now = trainable(probe)
    return [n for n, (mark, value) in marks.items() if not mark.is_same(now[n]) or not torch.equal(now[n], value)]


def unreached_parameters(module: nn.Module, fed: Federation, spot: Spot | None = None) -> list[str]:
    """Names of parameters that the gradient of no sample reaches, as in a part of a module that is never called.

    They are found out by running a copy on `TRIED` samples, several times if it draws random numbers.

    Args:
        module: the network.
        fed: the data.
        spot: where the network has its representation, if the loss has terms on it beside the outputs.
    """
    probe = _probe(module, fed)
    parameters = trainable(probe)
    left = dict(parameters)
    x = fed.fetch(spread_samples(fed))
    layer = None if spot is None else probe.get_submodule(spot.name)
    with forked(fed.device), torch.enable_grad():
        for _ in range(DRAWS):
            before = _global_state(fed.device)
            with caught(layer, entering=spot is not None and spot.entering) as features:
                ends = [probe(x), *features]
            total = torch.stack([end.sum() for end in ends]).sum()
            slopes: tuple[Tensor | None, ...] = torch.autograd.grad(total, list(left.values()), allow_unused=True)
            left = {name: p for (name, p), slope in zip(left.items(), slopes, strict=True) if slope is None}
            if not left or torch.equal(before, _global_state(fed.device)):
                break
    return [*left]


def reached_mask(module: nn.Module, fed: Federation, layout: Layout, spot: Spot | None = None) -> Tensor | None:
    """``[d]`` 0 for `unreached_parameters`, 1 for others; None where there are only others."""
    unused = unreached_parameters(module, fed, spot)
    shapes = zip(layout.names, layout.shapes, strict=True)
    mask = {n: torch.full(shape, float(n not in unused), dtype=fed.dtype, device=fed.device) for n, shape in shapes}
    return layout.flatten(mask) if unused else None


def _probe(module: nn.Module, fed: Federation) -> nn.Module:
    """A copy in training."""
    return copy.deepcopy(module).to(device=fed.device, dtype=fed.dtype).train()


@torch.no_grad()
def _tried(probe: nn.Module, fed: Federation) -> None:
    probe(at_least_two(fed.fetch(fed.parts["train"].index[:1])))


def spread_samples(fed: Federation) -> Tensor:
    """Positions of `TRIED` training samples, from all clients."""
    index = fed.parts["train"].index
    return index[torch.linspace(0, len(index) - 1, TRIED, device=index.device).long()]


def _global_state(device: torch.device) -> Tensor:
    cpu = torch.get_rng_state()
    return torch.cat([cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else cpu
