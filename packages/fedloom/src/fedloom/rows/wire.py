"""Codec for messages, which can also compute the length of a message without creating it.

A message contains the values of the named fields of one client. It consists of a header (magic, version, number of
fields, fingerprint of the layout, CRC-32 of everything that follows), one descriptor per field (name, type, encoding,
shape, number of bytes in the payload), and the payloads. Before `decode` allocates memory, it compares the header, the
descriptors and all lengths with the expected layout. Decoding therefore uses at most a small multiple of the memory of
the expected fields. Code in a message is never executed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedloom.errors import ConfigError, WireError
from fedloom.rows.encodings import ENCODINGS, Encoding
from fedloom.rows.fields import FIELD_DTYPES, Field, Ranks
from fedloom.rows.layout import Layout

WIRE_MAGIC, WIRE_VERSION = b"FLOM", 1
WIRE_HEADER = struct.Struct("<4sHH8sI")
ENCODING_CODES = {name: code for code, name in enumerate(ENCODINGS)}


@dataclass(frozen=True, eq=False)
class Codec:
    """Codec for messages that contain these fields, in this order, for models with this layout.

    >>> codec = Codec(Layout.create_from_shapes({"fc": (2,)}), {"w": Field((2,)), "loss": Field((1,))})
    >>> message = codec.encode({"w": torch.ones(2), "loss": torch.zeros(1)})
    >>> codec.decode(message)
    {'w': tensor([1., 1.]), 'loss': tensor([0.])}
    >>> codec.length({"w": torch.ones(3, 2), "loss": torch.zeros(3, 1)}) - len(message)
    tensor([0, 0, 0])

    Raises:
        ConfigError: the name of a field is empty or longer than 255 bytes, or a low-rank field has a different layout.
    """

    layout: Layout
    fields: Mapping[str, Field]

    def __post_init__(self) -> None:
        for name, field in self.fields.items():
            if not 1 <= len(name.encode()) <= 255:
                raise ConfigError(f"a field name must be 1 to 255 bytes long, got {name[:20]!r}")
            if field.layout not in (None, self.layout):
                raise ConfigError(f"field {name!r} has the layout of a different model")

    def encode(self, values: Mapping[str, Tensor], ranks: Mapping[str, Ranks] | None = None) -> bytes:
        """Encode the message of one client.

        Args:
            values: dict that maps the name of each field of the codec to a tensor with the declared shape and data
                type.
            ranks: ranks {field: {matrix: rank}} of low-rank fields. If they are not given, they are computed.

        Raises:
            WireError: a value is missing or unknown, has the wrong shape or type, or is not on the grid of its
                encoding.
        """
        self._names(values)
        descriptors, payloads = [], []
        for name, field in self.fields.items():
            value, field_ranks = values[name], (ranks or {}).get(name)
            if tuple(value.shape) != tuple(field.shape) or value.dtype != field.dtype:
                got = f"{list(value.shape)} {value.dtype}"
                raise WireError(f"field {name!r} must be {list(field.shape)} {field.dtype}, got {got}")
            x = field.select_sent(value.detach().cpu())
            kind = field.encoding
            if (
                kind in ("sparse", "lowrank")
                and int(ENCODINGS[kind].size(field, x, field_ranks)) >= field.n * field.item
            ):
                kind = "dense"
            payloads.append(ENCODINGS[kind].pack(field, x, field_ranks))
            descriptors.append(self._descriptor(name, kind) + struct.pack("<Q", len(payloads[-1])))
        body = b"".join(descriptors + payloads)
        return WIRE_HEADER.pack(WIRE_MAGIC, WIRE_VERSION, len(self.fields), self._fingerprint, zlib.crc32(body)) + body

    def decode(
        self, message: bytes | bytearray | memoryview, receiver: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Decode a message to values {name: ``[*shape]``}.

        Args:
            message: received bytes, which may not be a valid message.
            receiver: the receiver's own values of masked fields, which fill in the entries that are not sent. If they
                are not given, these entries are zero.

        Raises:
            WireError: the bytes are not a message of this experiment. No other error can occur.
        """
        data = memoryview(message).cast("B")
        if len(data) < WIRE_HEADER.size:
            raise WireError(f"a message must have at least {WIRE_HEADER.size} bytes, got {len(data)}")
        magic, version, count, fingerprint, crc = WIRE_HEADER.unpack(data[: WIRE_HEADER.size])
        if magic != WIRE_MAGIC:
            raise WireError(f"this is not a fedloom message: the first bytes are {magic!r}")
        if version != WIRE_VERSION:
            raise WireError(
                f"the message has format version {version}, but this side uses {WIRE_VERSION}. "
                "Install the same release on both sides"
            )
        if fingerprint != self._fingerprint:
            raise WireError(
                f"the message belongs to a different model: its layout is {fingerprint.hex()}, but "
                f"the layout here is {self.layout.fingerprint}"
            )
        if count != len(self.fields):
            raise WireError(
                f"the message contains {count} fields, but {len(self.fields)} are expected: {', '.join(self.fields)}"
            )
        if zlib.crc32(data[WIRE_HEADER.size :]) != crc:
            raise WireError("the message is damaged: its checksum does not match")
        at, plan = WIRE_HEADER.size, []
        for name, field in self.fields.items():
            kind, length, at = self._read(data, at, name, field)
            plan.append((name, field, kind, length))
        if at + sum(length for *_, length in plan) != len(data):
            raise WireError(
                f"the payloads end at byte {at + sum(p[-1] for p in plan)}, but the message ends at byte {len(data)}"
            )
        values = {}
        for name, field, kind, length in plan:
            x = ENCODINGS[kind].unpack(field, data[at : at + length])
            values[name], at = _restore_field(field, x, (receiver or {}).get(name)), at + length
        return values

    def length(self, values: Mapping[str, Tensor], ranks: Mapping[str, Ranks] | None = None) -> Tensor:
        """Return the length of the message for each row in bytes, int64 [m], without creating messages.

        Args:
            values: values {name: [m, *shape] or [*shape]}. A value without the dimension m is the same for all clients,
                and m is 1 if no value has this dimension.
            ranks: ranks as in `encode`, each of which is a number or [m].

        Raises:
            WireError: a value is missing or unknown, or has the wrong shape.
        """
        return self._headers + self._sum(values, ranks, "size")

    def paper_bytes(self, values: Mapping[str, Tensor], ranks: Mapping[str, Ranks] | None = None) -> Tensor:
        """Return sizes as papers count them, int64 ``[m]``: 4 bytes per float, without headers, indices or integers."""
        return self._sum(values, ranks, "floats")

    def _sum(self, values: Mapping[str, Tensor], ranks: Mapping[str, Ranks] | None, count: str) -> Tensor:
        self._names(values)
        m, total = 1, torch.zeros(1, dtype=torch.int64)
        for name, field in self.fields.items():
            value, s = values[name], tuple(field.shape)
            lead = tuple(value.shape[: value.dim() - len(s)])
            if tuple(value.shape) != (*lead, *s) or len(lead) > 1:
                raise WireError(
                    f"field {name!r} must have shape [m, {', '.join(map(str, s))}], got {list(value.shape)}"
                )
            m = lead[0] if lead else m
            total = total + self._count(field, value, (ranks or {}).get(name), count)
        return total.expand(m).clone()

    @staticmethod
    def _count(field: Field, value: Tensor, ranks: Ranks | None, count: str) -> int | Tensor:
        dense: int | Tensor = getattr(ENCODINGS["dense"], count)(field, value, ranks)
        if field.encoding == "dense":
            return dense
        x = field.select_sent(value) if field.encoding in ("sparse", "lowrank") else value
        size: int | Tensor = getattr(ENCODINGS[field.encoding], count)(field, x, ranks)
        return size.cpu().clamp_max(dense) if isinstance(size, Tensor) else size

    @cached_property
    def _headers(self) -> int:
        """Number of bytes in a message apart from the payloads."""
        return WIRE_HEADER.size + sum(len(self._descriptor(n, f.encoding)) + 8 for n, f in self.fields.items())

    @cached_property
    def _fingerprint(self) -> bytes:
        return bytes.fromhex(self.layout.fingerprint)

    def _names(self, values: Mapping[str, Tensor]) -> None:
        if set(values) != set(self.fields):
            raise WireError(f"a message must contain the fields {sorted(self.fields)}, got {sorted(values)}")

    def _descriptor(self, name: str, kind: str) -> bytes:
        field, text = self.fields[name], name.encode()
        shape = struct.pack(f"<{len(field.shape)}Q", *field.shape)
        head = bytes((len(text),)) + text
        return head + bytes((FIELD_DTYPES.index(field.dtype), ENCODING_CODES[kind], len(field.shape))) + shape

    def _read(self, data: memoryview, at: int, name: str, field: Field) -> tuple[str, int, int]:
        """Read the encoding and the payload length of a field from its descriptor at byte `at`.

        Also return the position after the descriptor.
        """
        for kind in dict.fromkeys((field.encoding, "dense")):
            if kind == "dense" and field.encoding in ("levels", "sign"):
                continue
            want = self._descriptor(name, kind)
            end = at + len(want) + 8
            if end <= len(data) and data[at : at + len(want)] == want:
                length = int.from_bytes(data[end - 8 : end], "little")
                encoding: Encoding = ENCODINGS[kind]
                if not encoding.accepts_length(field, length):
                    raise WireError(f"field {name!r} ({kind}, {field.n} scalars) cannot be {length} bytes long")
                return kind, length, end
        raise WireError(
            f"field {name!r} must be {list(field.shape)} {field.dtype} {field.encoding}, but the "
            "field in the message is not"
        )


def _restore_field(field: Field, x: Tensor, receiver: Tensor | None) -> Tensor:
    if field.mask is None:
        return x.view(field.shape)
    rest = torch.zeros(field.shape, dtype=field.dtype) if receiver is None else receiver.detach().cpu().to(field.dtype)
    return rest.masked_scatter(field.mask.cpu(), x)
