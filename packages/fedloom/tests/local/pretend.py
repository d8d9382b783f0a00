"""An accelerator that is not there: its tensors lie on the CPU, and meet those of the CPU only where a real one's may.

Values are those of the CPU, so that a run on the pretended device can be compared with one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
MOVES = (aten._to_copy, aten.copy_)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""What takes positions that lie on the CPU, as CUDA does."""


class Mixed(RuntimeError):
    """Tensors of two devices met."""


class Elsewhere(Tensor):
    """A tensor of the pretended device; ``here`` holds its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device="meta"
        )
        made.here = here
        return made

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, Elsewhere), "a parameter of the device got values of the CPU"
        self.here = value.here

    def tolist(self) -> Any:
        return self.here.tolist()

    def new_tensor(self, values: Any, **options: Any) -> Tensor:
        return Elsewhere(self.here.new_tensor(values, **options))

    def __matmul__(self, other: Tensor) -> Tensor:
        """Of a vector, without the change of shape in place that a wrapper does not follow."""
        return (self[None] @ other)[0] if self.dim() == 1 else super().__matmul__(other)

    def __getitem__(self, where: Any) -> Tensor:
        return super().__getitem__(torch.tensor(where) if isinstance(where, list) else where)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _away(device: object) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")  # type: ignore[arg-type]


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t for t in tensors if isinstance(t, Elsewhere)]
    packet = func.overloadpacket
    own = [t for t in tensors if not isinstance(t, Elsewhere) and t.dim() > 0]
    if there and own and packet not in MOVES and (packet not in INDEXED or not isinstance(args[0], Elsewhere)):
        raise Mixed(f"{func}: tensors of the CPU {[tuple(t.shape) for t in own]} meet those of {DEVICE}")
    asked = kwargs.get("device")
    result_away = _away(asked) if asked is not None else bool(there)
    if result_away and kwargs.get("generator") is not None:
        raise Mixed(f"{func}: a generator of the CPU draws on {DEVICE}")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(t.here): t for t in there}
    args, kwargs = tree_map(lambda v: v.here if isinstance(v, Elsewhere) else v, (args, kwargs))
    found = func(*args, **kwargs)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not result_away:
            return value
        return known[id(value)] if id(value) in known else Elsewhere(value)

    return found if packet is aten.copy_ and id(found) not in known else tree_map(wrapped, found)


class _Everywhere(TorchDispatchMode):
    """Tensors that are made for the device or moved there are the pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


@contextmanager
def accelerator() -> Iterator[None]:
    """``cuda`` is there while the context lasts."""
    state: Callable[..., Tensor] = lambda *_: torch.zeros(16, dtype=torch.uint8)  # noqa: E731
    there = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_rng_state": state,
        "set_rng_state": lambda *_: None,
        "_lazy_init": lambda: None,
    }
    makers = {"tensor": _placed(torch.tensor), "as_tensor": _placed(torch.as_tensor)}
    with patch.multiple(torch.cuda, **there), patch.multiple(torch, **makers), _Everywhere():
        yield


def _placed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of values that makes them on the CPU first: of others, the mode above is not asked."""

    def made(values: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        tensor = make(values, dtype=dtype)
        return tensor if device is None else tensor.to(device)

    return made
