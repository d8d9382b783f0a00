"""Oracles, which compute gradients, and the rule that selects an oracle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from fedloom.errors import Refused
from fedloom.local.oracles.base import Oracle
from fedloom.local.oracles.fused import Fused, find_chains
from fedloom.local.oracles.looped import Looped
from fedloom.local.oracles.network import Network
from fedloom.local.oracles.precision import Precision, check_bf16, check_tf32
from fedloom.local.oracles.probes import draws_globally, fails_stacked, find_changed_values
from fedloom.local.oracles.quadratic import Quadratic
from fedloom.local.oracles.stacked import Stacked
from fedloom.models.parts import BATCH_STATISTICS, MultiBodyNetwork
from fedloom.values import choose

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.models import Augment
    from fedloom.tasks import Task

ORACLES: dict[str, type[Network]] = {"compiled": Fused, "vmap": Stacked, "loop": Looped}

CPU_BYTES = 4 << 20
"""Parameter bytes per chunk that fit in a core's cache: about five clients of a network with 200,000 parameters."""

GPU_BYTES = 1 << 30
"""Parameter bytes per chunk on an accelerator."""


def make_oracle(
    module: nn.Module,
    task: Task,
    fed: Federation,
    name: str = "auto",
    augment: Augment | None = None,
    precision: Precision = "full",
) -> Network:
    """Create the oracle that computes a model's gradients on a federation.

    ``auto`` follows a fixed rule: `Fused` computes models of linear layers with pointwise activations. On a CPU, it
    also computes larger networks whose bodies consist of such layers (`fedloom.models.parts.MultiBodyNetwork`).
    `Looped` computes a model that uses batch statistics, changes buffers or attributes in training, draws its own
    random numbers, or is rejected by vmap. All other models use `Looped` on a CPU and `Stacked` on an accelerator.

    Raises:
        ConfigError: the gradient engine is unknown.
        ConfigError: samples to be augmented are not images, or the oracle does not support the model or the precision.
    """
    if augment is not None and len(fed.data.shape) != 3:
        raise Refused(
            f"augment requires images of shape channels x height x width, but a sample of {fed.data.name!r} has shape "
            f"{'x'.join(map(str, fed.data.shape))}",
            rule="augment-needs-images",
            fix="omit {augment}",
        )
    if augment is not None and fed.data.each:
        raise Refused("these images have a label per pixel, which augment would not transform. Omit `augment`")
    oracle = choose(
        "gradient engine",
        {**ORACLES},
        _choose_oracle(module, fed) if name == "auto" else name,
        "engine.gradient_engine",
    )
    if name == "vmap" and _needs_loop(module, fed):
        raise Refused(
            "gradient engine 'vmap' does not support batch statistics, buffers or attributes that training changes, "
            "or a module's own randomness",
            rule="oracle-stacked",
            fix="set {engine.gradient_engine = 'loop'}",
        )
    if name == "vmap" and (rejection := fails_stacked(module, fed)):
        raise Refused(
            f"gradient engine 'vmap' does not support this model: vmap reports {rejection!r}",
            rule="oracle-stacked",
            fix="set {engine.gradient_engine = 'loop'}",
        )
    if precision == "bf16":
        check_bf16(fed.device, fed.dtype, oracle.name)
    if precision == "tf32":
        check_tf32(fed.device, fed.dtype)
    network: Network = oracle(module, task, fed, augment)
    network.low = precision == "bf16"
    return network


def _choose_oracle(module: nn.Module, fed: Federation) -> str:
    cpu = fed.device.type == "cpu"
    if find_chains(module) is not None and (cpu or not isinstance(module, MultiBodyNetwork)) and not fed.data.each:
        return "compiled"
    return "loop" if cpu or _needs_loop(module, fed) or fails_stacked(module, fed) else "vmap"


def _needs_loop(module: nn.Module, fed: Federation) -> bool:
    statistics = any(isinstance(m, BATCH_STATISTICS) for m in module.modules())
    return statistics or draws_globally(module, fed) or bool(find_changed_values(module, fed))


def loop_reason(module: nn.Module, fed: Federation) -> str:
    """Return vmap's error if it is the only reason why `auto` uses `Looped` on an accelerator, otherwise ""."""
    return "" if fed.device.type == "cpu" or _needs_loop(module, fed) else fails_stacked(module, fed)


def chunk_limit(oracle: Oracle) -> int:
    """Return the maximum number of clients per chunk for a model and a device."""
    if oracle.name == "loop":
        return 1
    budget = CPU_BYTES if oracle.device.type == "cpu" else GPU_BYTES
    return max(1, budget // (oracle.layout.d * oracle.dtype.itemsize))


def chunk_count(m: int, limit: int) -> int:
    """Return the number K of chunks for ``m`` clients, which is the smallest multiple of 4 with m/K <= ``limit``.

    If m < 16, or if four times as many clients would fit in one chunk, K is the smallest sufficient number, because the
    cost of a step then does not depend on the number of clients.

    >>> chunk_count(100, 10), chunk_count(100, 200), chunk_count(10, 200), chunk_count(100, 400)
    (12, 4, 1, 1)
    """
    if m < 16 or 4 * m <= limit:
        return max(1, math.ceil(m / limit))
    return min(m, 4 * math.ceil(m / (4 * limit)))


__all__ = [
    "Fused",
    "Looped",
    "Network",
    "Oracle",
    "Quadratic",
    "Stacked",
    "chunk_count",
    "chunk_limit",
    "find_chains",
    "loop_reason",
    "make_oracle",
]  # fmt: skip
