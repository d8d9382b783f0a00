"""Messages between ranks. A message consists of a JSON text and the bytes of tensors.

No content of a message is ever executed as code.

A message may contain None, booleans, numbers, strings, tuples, lists, dictionaries, `ChunkResult`, `Answers`, tensors,
and the errors of `fedloom.errors`. Numbers are transmitted exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom import errors
from fedloom.errors import FedloomError
from fedloom.processes.clients import Answers, ChunkResult

ALIGNMENT_BYTES = 16
"""Each tensor is padded to a multiple of this number of bytes."""

DTYPES_BY_NAME = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


TUPLE_CLASSES: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (ChunkResult, Answers)}
"""Named tuples that can be sent, keyed by name."""


class TensorForm(NamedTuple):
    """Data type, shape and device of a tensor. ``place`` is the kind of device: "cpu" or "cuda"."""

    dtype: str
    shape: tuple[int, ...]
    place: str

    @property
    def bytes(self) -> int:
        """Number of bytes of the tensor in a message, including padding."""
        return -(-prod(self.shape) * DTYPES_BY_NAME[self.dtype].itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def tensor_form(tensor: Tensor) -> TensorForm:
    """Return the data type, shape and device of a tensor."""
    return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)


def encode_value(value: object) -> tuple[bytes, list[Tensor]]:
    """Split a value into a JSON text and its tensors."""
    tensors: list[Tensor] = []
    tree = _write_value(value, tensors)
    return json.dumps([tree, [tensor_form(t) for t in tensors]]).encode(), tensors


def tensor_forms(text: bytes) -> list[TensorForm]:
    """Return the data types, shapes and devices of the tensors that belong to a text."""
    return [TensorForm(dtype, tuple(shape), place) for dtype, shape, place in json.loads(text)[1]]


def decode_value(text: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the value that was split by `encode_value`."""
    return _read_value(json.loads(text)[0], tensors)


def pack_tensors(text: bytes, tensors: Sequence[Tensor]) -> Tensor:
    """Pack a text and its tensors into bytes ``[b]`` on the CPU."""
    head = torch.frombuffer(bytearray(text) + bytes(-len(text) % ALIGNMENT_BYTES), dtype=torch.uint8)
    body = fill_bytes(tensors, [tensor_form(t) for t in tensors], "cpu")
    return torch.cat([torch.tensor([len(text), len(body)]).view(torch.uint8), head, body])


def unpack_tensors(packed: Tensor) -> Iterator[tuple[bytes, Tensor]]:
    """Yield each text with the bytes of its tensors, from one or more consecutive results of `pack_tensors`."""
    while len(packed):
        length, size = packed[:ALIGNMENT_BYTES].view(torch.long).tolist()
        begin = ALIGNMENT_BYTES + length + -length % ALIGNMENT_BYTES
        yield packed[ALIGNMENT_BYTES : ALIGNMENT_BYTES + length].numpy().tobytes(), packed[begin : begin + size]
        packed = packed[begin + size :]


def fill_bytes(tensors: Sequence[Tensor], forms: Sequence[TensorForm], place: str) -> Tensor:
    """Pack tensors into bytes ``[b]`` on a device, one after another."""
    buffer = torch.empty(sum(f.bytes for f in forms), dtype=torch.uint8, device=place)
    for part, tensor in zip(cut_tensors(buffer, forms), tensors, strict=True):
        part.copy_(tensor)
    return buffer


def cut_tensors(buffer: Tensor, forms: Sequence[TensorForm]) -> list[Tensor]:
    """Split the bytes packed by `fill_bytes` into one view per tensor."""
    pieces = []
    for form, data in zip(forms, buffer.split([f.bytes for f in forms]), strict=True):
        dtype = DTYPES_BY_NAME[form.dtype]
        pieces.append(data[: prod(form.shape) * dtype.itemsize].view(dtype).view(form.shape))
    return pieces


def _write_value(value: object, tensors: list[Tensor]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case ChunkResult() | Answers():
            return {type(value).__name__: [_write_value(v, tensors) for v in value]}
        case tuple() | list() if type(value) in (tuple, list):
            return {type(value).__name__: [_write_value(v, tensors) for v in value]}
        case dict():
            return {"dict": [[_write_value(k, tensors), _write_value(v, tensors)] for k, v in value.items()]}
        case FedloomError():
            return {"error": [type(value).__name__, [_write_value(v, tensors) for v in value.__reduce__()[1]]]}
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks")


def _read_value(tree: object, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_read_value(k, tensors): _read_value(v, tensors) for k, v in content}
    if kind == "error":
        return _rebuild_error(content[0], [_read_value(v, tensors) for v in content[1]])
    values = [_read_value(v, tensors) for v in content]
    return TUPLE_CLASSES[kind](*values) if kind in TUPLE_CLASSES else values if kind == "list" else tuple(values)


def _rebuild_error(name: str, content: list[Any]) -> FedloomError:
    error_class = getattr(errors, name, FedloomError)
    return (
        error_class(*content)
        if isinstance(error_class, type) and issubclass(error_class, FedloomError)
        else FedloomError(*content)
    )
