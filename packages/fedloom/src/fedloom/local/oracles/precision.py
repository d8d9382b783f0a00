"""Precision of gradients: bfloat16 or TF32, if a run requests it.

bfloat16 affects only the gradients of steps. Client rows, updates and passes over all samples keep full precision.

By default, a GPU computes products and convolutions in float32. TF32 applies to all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from fedloom.data.dataset import default_to_cpu
from fedloom.errors import Refused

T = TypeVar("T")
Precision = Literal["full", "tf32", "bf16"]
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of bfloat16 instructions in `torch.cpu.get_capabilities` on x86 and ARM."""
LOWERED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Types of layers whose weights and biases `use_bfloat16` converts to bfloat16."""


def has_bf16(device: torch.device) -> bool:
    """Return True if the device has bfloat16 instructions."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in BFLOAT16_INSTRUCTIONS)


def check_bf16(device: torch.device, dtype: torch.dtype, oracle: str) -> None:
    """Raise an error if bfloat16 is not available or would not save any time.

    Raises:
        ConfigError: bfloat16 cannot be used. The message states the reason.
    """
    choice = "engine.precision = 'bf16'"
    if dtype is not torch.float32:
        raise Refused(
            f"{choice} keeps client rows in float32, but engine.dtype is {str(dtype).removeprefix('torch.')!r}",
            rule="precision-of-float64",
            fix="set {engine.dtype = 'float32'}",
        )
    if oracle == "compiled":
        raise Refused(
            f"{choice} requires convolutions, because the engine for linear layers uses float32",
            rule="precision-of-linear-layers",
            fix="omit {engine.precision}",
        )
    if not has_bf16(device):
        raise Refused(
            f"{choice}: this processor has no bfloat16 instructions, so bfloat16 would be slower",
            rule="precision-missing",
            fix="omit {engine.precision}",
        )


def check_tf32(device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error if TF32 is not available.

    Raises:
        ConfigError: TF32 cannot be used. The message states the reason.
    """
    choice = "engine.precision = 'tf32'"
    if device.type != "cuda":
        raise Refused(
            f"{choice} works only on GPUs, but engine.device is {device.type!r}",
            rule="precision-missing",
            fix="omit {engine.precision}",
        )
    if dtype is not torch.float32:
        raise Refused(
            f"{choice} rounds float32 values, but engine.dtype is {str(dtype).removeprefix('torch.')!r}",
            rule="precision-of-float64",
            fix="set {engine.dtype = 'float32'}",
        )


@contextmanager
def isolate_torch_settings(threads: int = 1) -> Iterator[None]:
    """Within the block, use this many threads, tensors on the CPU, and gradients, regardless of the caller's settings.

    The caller's autocast or reduced precision has no effect inside the block either.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            default_to_cpu(),
            _disable_cpu_rounding(),
            ExitStack() as modes,
        ):
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                modes.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _disable_cpu_rounding() -> Iterator[None]:
    """Within the block, prevent the CPU from rounding the inputs of float32 products and convolutions.

    Since version 2.9, PyTorch has a separate switch for each library. If a caller has set the newer switches to
    different values, reading the old switch raises an error.
    """
    older = _is_readable_switch(torch.get_float32_matmul_precision)
    is_rounded = older not in (None, "highest")
    if is_rounded:
        torch.set_float32_matmul_precision("highest")
    mkldnn: Any = torch.backends.mkldnn
    switches = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn] if hasattr(mkldnn, "fp32_precision") else []
    try:
        with _switch_precision(
            [switch for switch in switches if switch.fp32_precision not in ("none", "ieee")], "ieee"
        ):
            yield
    finally:
        if is_rounded:
            torch.set_float32_matmul_precision(cast(str, older))


@contextmanager
def _switch_precision(switches: Sequence[Any], precision: str) -> Iterator[None]:
    """Set the precision of these libraries' float32 operations within the block."""
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = precision
    try:
        yield
    finally:
        for switch, chosen in zip(switches, before, strict=True):
            switch.fp32_precision = chosen


def _is_readable_switch(switch: Callable[[], T]) -> T | None:
    try:
        return switch()
    except RuntimeError:  # the caller has set newer switches
        return None


@contextmanager
def make_repeatable(device: torch.device, precision: Precision) -> Iterator[None]:
    """Set a GPU's precision, and make its results bit-for-bit reproducible inside the block.

    By default, PyTorch rounds the inputs of float32 convolutions to TF32 and uses the fastest algorithms, some of which
    add numbers in random order. If an operation in a user's model has no deterministic algorithm, PyTorch issues a
    warning.
    """
    if device.type != "cuda":
        yield
        return
    backends, filled = cast(Any, torch.backends), cast(Any, torch.utils.deterministic)
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS is not deterministic
    older, benchmark = _is_readable_switch(lambda: (cudnn.allow_tf32, matmul.allow_tf32)), cudnn.benchmark
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = filled.fill_uninitialized_memory
    newer = [cudnn.conv, cudnn.rnn, matmul] if older is None else []
    if older is not None:
        cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    cudnn.benchmark, filled.fill_uninitialized_memory = False, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with _switch_precision(newer, "tf32" if precision == "tf32" else "ieee"):
            yield
    finally:
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        if older is not None:
            cudnn.allow_tf32, matmul.allow_tf32 = older
        cudnn.benchmark = benchmark
        filled.fill_uninitialized_memory = fill


@cache
def warm_up_gpu(device: torch.device) -> None:
    """Compute the first gradient on a GPU with warnings disabled, because PyTorch warns only about the first one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(2, 2, device=device, requires_grad=True)
        (x @ x).sum().backward()


def use_bfloat16(device: torch.device, on: bool) -> AbstractContextManager[object]:
    """Compute products and convolutions in bfloat16 inside the block.

    Operations that need more precision, such as normalization statistics, still use float32.
    """
    return torch.autocast(device.type, torch.bfloat16) if on else nullcontext()


def find_product_parameters(module: nn.Module, parameters: Sequence[Tensor]) -> list[bool]:
    """Return a mask of the product parameters that `use_bfloat16` would convert to bfloat16 at each use."""
    holders: dict[int, set[bool]] = {}
    for layer in module.modules():
        for p in layer.parameters(recurse=False):
            holders.setdefault(id(p), set()).add(type(layer) in LOWERED_LAYERS)
    return [holders[id(p)] == {True} for p in parameters]
