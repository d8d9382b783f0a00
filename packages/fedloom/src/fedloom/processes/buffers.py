"""Messages between forked processes, with large tensors in shared memory and everything else in a pickle."""

from __future__ import annotations

import io
import mmap
import pickle  # noqa: TID251 (between our own forked processes, never a file)
from typing import Any

import torch
from torch import Tensor

MIN_SHARED_BYTES = 1 << 14
"""Minimum number of bytes of a tensor that is passed through shared memory. A smaller tensor is included in the message
itself."""


class SharedBuffer:
    """Memory shared by forked processes. A message's large tensors are written to it one after another.

    Args:
        size: number of bytes. The operating system allocates the memory only when something is written to it. Tensors
            that do not fit are included in the message itself.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE))

    def pack(self, value: object) -> bytes:
        """Pack a value into a message, which another process can read with `unpack`.

        The message is valid until `pack` is called again.
        """
        return pack_message(value, self._map)

    def unpack(self, message: bytes, *, copy: bool) -> Any:
        """Return the value in a message created by `pack`.

        The large tensors of the value are views of the shared memory or, if ``copy`` is True, copies.
        """
        return _Unpacker(io.BytesIO(message), self._map, copy).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None) -> None:
        super().__init__(file, protocol=5)
        self._memory, self._end = memory, 0

    def persistent_id(self, obj: object) -> Any:
        if type(obj) is not Tensor:
            return None
        size, start = obj.numel() * obj.element_size(), self._end
        row = obj.reshape(-1)
        row = row.clone(memory_format=torch.contiguous_format) if row.stride(0) != 1 else row  # a broadcast scalar
        if self._memory is None or size < MIN_SHARED_BYTES or start + size > len(self._memory):
            return row.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape)
        torch.frombuffer(self._memory, dtype=obj.dtype, count=obj.numel(), offset=start).copy_(row)
        self._end += -(-size // 64) * 64
        return start, obj.dtype, tuple(obj.shape)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None, copy: bool) -> None:
        super().__init__(file)
        self._memory, self._copy = memory, copy

    def persistent_load(self, pid: Any) -> Tensor:
        where, dtype, shape = pid
        count = torch.Size(shape).numel()
        if isinstance(where, bytes):
            flat = torch.frombuffer(bytearray(where), dtype=dtype) if count else torch.empty(0, dtype=dtype)
            return flat.view(shape).clone()  # aligned as in torch, because rounding depends on it
        assert self._memory is not None
        view = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=where).view(shape)
        return view.clone() if self._copy else view


def unpack_message(message: bytes) -> Any:
    """Return the value of a message without using shared memory."""
    return _Unpacker(io.BytesIO(message), None, copy=True).load()


def pack_message(value: object, memory: mmap.mmap | None = None) -> bytes:
    """Pack a value into a message. If there is shared memory and large tensors fit into it, they are written there."""
    out = io.BytesIO()
    _Packer(out, memory).dump(value)
    return out.getvalue()
