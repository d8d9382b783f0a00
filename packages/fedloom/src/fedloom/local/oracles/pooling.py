"""ReLU followed by 2x2 max pooling, both computed in one pass on a CPU.

The results are the same, because max(0, .) and max(.) commute. This way, ReLU processes only a quarter of the elements,
and the backward pass needs one byte per output instead of both layers' activations.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode


def join_relu_and_pooling(module: nn.Module) -> None:
    """Replace each `nn.ReLU` followed by 2x2 `nn.MaxPool2d` in plain `nn.Sequential` modules by joint layers."""
    for chain in list(module.modules()):
        if isinstance(chain, nn.Sequential) and type(chain).forward is nn.Sequential.forward:
            for (name, rectifier), (after, pool) in pairwise(list(chain._modules.items())):
                if _can_join(rectifier, pool):
                    chain._modules[name], chain._modules[after] = _SkippedReLU(), _ReLUMaxPool(2)


def _can_join(rectifier: nn.Module | None, pool: nn.Module | None) -> bool:
    if type(rectifier) is not nn.ReLU or type(pool) is not nn.MaxPool2d or rectifier.inplace:
        return False
    sizes = [(n, n) if isinstance(n, int) else n for n in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
    plain = sizes == [(2, 2), (2, 2), (0, 0), (1, 1)] and not pool.ceil_mode and not pool.return_indices
    return plain and not has_hook(rectifier) and not has_hook(pool)


class _SkippedReLU(nn.ReLU):
    """ReLU that has no effect unless a hook observes it. The subsequent pooling layer always applies ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if has_hook(self) else x


class _ReLUMaxPool(nn.MaxPool2d):
    """Max pooling that applies ReLU to its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        fits = x.dim() == 4 and min(x.shape[2:]) >= 2 and x.dtype in (torch.float32, torch.float64, torch.bfloat16)
        fits = fits and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # the module may use torch.vmap
        if fits and x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last):
            return _ReLUMaxPoolFunction.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(torch.relu(x))  # type: ignore[no-any-return]


class _ReLUMaxPoolFunction(torch.autograd.Function):
    """Function ``[b, c, h, w] -> [b, c, h // 2, w // 2]`` on tensors in channels-last format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from fedloom import kernels

        samples, channels, high, wide = x.shape
        out = x.new_empty(samples, high // 2, wide // 2, channels)
        place = torch.empty_like(out, dtype=torch.uint8)
        kernels.pool(_numpy_view(x.detach().permute(0, 2, 3, 1)), _numpy_view(out), place.numpy())
        ctx.save_for_backward(place)
        ctx.shape = (samples, high, wide, channels)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        from fedloom import kernels

        (place,) = ctx.saved_tensors
        out = delta.new_empty(ctx.shape)
        kernels.unpool(_numpy_view(delta.permute(0, 2, 3, 1).contiguous()), place.numpy(), _numpy_view(out))
        return out.permute(0, 3, 1, 2)


def _numpy_view(x: Tensor) -> Any:
    """Return a NumPy array for the compiled loops, with bfloat16 values represented by their bits."""
    return x.view(torch.int16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


class PoolingMode(TorchDispatchMode):
    """Mode that counts the elements per sample that are pooled over image windows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.avg_pool2d):
            self.elements += args[0][0].numel()
        return func(*args, **(kwargs or {}))


def has_hook(layer: nn.Module) -> bool:
    """Return True if a hook observes the inputs or outputs of the layer."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(layer) or any(getattr(layer, name) for name in hooks)
