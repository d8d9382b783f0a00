"""Encodings, which convert the numbers in a message field to bytes, and can compute the length without encoding.

All numbers are little-endian. In the table, `n` is the number of transmitted scalars, and `item` is the number of bytes
per scalar.

| encoding | payload                                                              | bytes                       |
|----------|----------------------------------------------------------------------|-----------------------------|
| dense    | n values                                                             | n item                      |
| sparse   | the k nonzero values, then their k ascending indices (int32 or 64)   | k (item + 4 or 8)           |
| lowrank  | a rank (uint32) per matrix, then U [r, k] and V [k, c], or the values | 4 L + sum min(rc, k(r + c)) |
| levels   | the scale max|x|, then n integers of ceil(log2(2 levels + 1)) bits   | item + ceil(n bits / 8)     |
| sign     | the scale max|x|, then n signs of one bit                            | item + ceil(n / 8)          |

If the dense form of a sparse or low-rank field is not longer, the field is sent as a dense vector.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ConfigError, WireError
from fedloom.rows.algebra import dequantize, ranks
from fedloom.rows.fields import Field, Ranks

WORD_MASK = 0xFFFFFFFF  # marks a matrix that is stored without factors


class Encoding(Protocol):
    """Method of encoding the transmitted scalars x [n] of a field."""

    def size(self, field: Field, x: Tensor, ranks: Ranks | None) -> int | Tensor:
        """Return the payload bytes for rows [..., n], as one number if all rows have equal sizes, or else as [...]."""
        ...

    def floats(self, field: Field, x: Tensor, ranks: Ranks | None) -> int | Tensor:
        """Return the size as papers count it: 4 bytes per floating-point number, plus packed integers."""
        ...

    def pack(self, field: Field, x: Tensor, ranks: Ranks | None) -> bytes:
        """Encode one row ``[n]`` as a payload."""
        ...

    def accepts_length(self, field: Field, length: int) -> bool:
        """Return True if a payload can have this length."""
        ...

    def unpack(self, field: Field, payload: memoryview) -> Tensor:
        """Decode a row ``[n]`` from a payload whose length has been checked."""
        ...


def raw_bytes(x: Tensor) -> bytes:
    """Return the bytes of a tensor in little-endian order."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_from_bytes(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """Copy bytes into a new tensor whose memory PyTorch allocates.

    The number of bytes must be a multiple of the item size.
    """
    return torch.frombuffer(bytearray(payload), dtype=dtype).clone() if len(payload) else torch.empty(0, dtype=dtype)


class _Dense:
    """Encoding that sends all values of a field."""

    def size(self, field: Field, x: Tensor, ranks: Ranks | None) -> int:
        return field.n * field.item

    def floats(self, field: Field, x: Tensor, ranks: Ranks | None) -> int:
        return 4 * field.n * field.dtype.is_floating_point

    def pack(self, field: Field, x: Tensor, ranks: Ranks | None) -> bytes:
        return raw_bytes(x)

    def accepts_length(self, field: Field, length: int) -> bool:
        return length == field.n * field.item

    def unpack(self, field: Field, payload: memoryview) -> Tensor:
        return tensor_from_bytes(payload, field.dtype)


class _Sparse:
    """Encoding as nonzero values and their indices."""

    def size(self, field: Field, x: Tensor, ranks: Ranks | None) -> Tensor:
        return torch.count_nonzero(x, -1) * (field.item + field.index.itemsize)

    def floats(self, field: Field, x: Tensor, ranks: Ranks | None) -> Tensor:
        return 4 * torch.count_nonzero(x, -1) * field.dtype.is_floating_point

    def pack(self, field: Field, x: Tensor, ranks: Ranks | None) -> bytes:
        at = x.nonzero().squeeze(-1)
        return raw_bytes(x[at]) + raw_bytes(at.to(field.index))

    def accepts_length(self, field: Field, length: int) -> bool:
        k, rest = divmod(length, field.item + field.index.itemsize)
        return rest == 0 and k <= field.n

    def unpack(self, field: Field, payload: memoryview) -> Tensor:
        split = len(payload) // (field.item + field.index.itemsize) * field.item
        at = tensor_from_bytes(payload[split:], field.index).long()
        if at.numel() and (at[0] < 0 or at[-1] >= field.n or (at.diff() <= 0).any()):
            raise WireError(f"indices of a sparse field must increase within 0..{field.n - 1}")
        return torch.zeros(field.n, dtype=field.dtype).index_copy(
            0, at, tensor_from_bytes(payload[:split], field.dtype)
        )


class _LowRank:
    """Encoding as two factors per matrix if they are smaller than the matrix. Other parameters are sent unchanged."""

    def size(self, field: Field, x: Tensor, ranks: Ranks | None) -> Tensor | int:
        return 4 * len(field.matrices) + field.item * self._scalars(field, x, ranks)

    def floats(self, field: Field, x: Tensor, ranks: Ranks | None) -> Tensor | int:
        return 4 * self._scalars(field, x, ranks)

    def _scalars(self, field: Field, x: Tensor, ranks_of: Ranks | None) -> Tensor | int:
        total = torch.tensor(field.n - sum(r * c for r, c in field.matrices.values()))
        for name, rank in self._ranks(field, x, ranks_of).items():
            r, c = field.matrices[name]
            total = total + (torch.as_tensor(rank) * (r + c)).clamp_max(r * c)
        return total

    def _ranks(self, field: Field, x: Tensor, ranks_of: Ranks | None) -> Ranks:
        if ranks_of is None:
            assert field.layout is not None
            return {name: ranks(wide(matrix)) for name, matrix in field.layout.matrices(x).items()}
        if set(ranks_of) != set(field.matrices):
            raise ConfigError(f"ranks are needed for the matrices {list(field.matrices)}, got {list(ranks_of)}")
        return ranks_of

    def pack(self, field: Field, x: Tensor, ranks: Ranks | None) -> bytes:
        layout = field.layout
        assert layout is not None
        tree, matrices, rank = layout.tree(x), layout.matrices(x), self._ranks(field, x, ranks)
        table, payload = [], []
        for name in layout.names:
            r, c = field.matrices.get(name, (0, 0))
            k = min(int(rank[name]), r, c) if name in rank else 0
            factored = name in rank and k * (r + c) < r * c
            if name in rank:
                table.append(k if factored else WORD_MASK)
            if factored:
                u, s, vh = torch.linalg.svd(wide(matrices[name]), full_matrices=False)
                payload += [raw_bytes((u[:, :k] * s[:k]).to(x.dtype)), raw_bytes(vh[:k].to(x.dtype))]
            else:
                payload.append(raw_bytes(tree[name]))
        return np.asarray(table, "<u4").tobytes() + b"".join(payload)

    def accepts_length(self, field: Field, length: int) -> bool:
        return 4 * len(field.matrices) <= length <= 4 * len(field.matrices) + field.n * field.item

    def unpack(self, field: Field, payload: memoryview) -> Tensor:
        layout = field.layout
        assert layout is not None
        head = 4 * len(field.matrices)
        table = dict(zip(field.matrices, np.frombuffer(payload[:head], "<u4").tolist(), strict=True))
        counts = []
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            r, c = field.matrices.get(name, (0, 0))
            k = table.get(name, WORD_MASK)
            if k != WORD_MASK and k * (r + c) >= r * c:
                raise WireError(f"matrix {name!r} {r} x {c} cannot have factors of rank {k}")
            counts.append(shape.numel() if k == WORD_MASK else k * (r + c))
        if head + sum(counts) * field.item != len(payload):
            raise WireError(f"factors need {head + sum(counts) * field.item} bytes, got {len(payload)}")
        parts = torch.split(tensor_from_bytes(payload[head:], field.dtype), counts)
        tree, back = {}, {}
        for name, shape, part in zip(layout.names, layout.shapes, parts, strict=True):
            k = table.get(name, WORD_MASK)
            if k == WORD_MASK:
                tree[name] = part.view(shape)
            else:
                r, c = field.matrices[name]
                u, v = wide(part[: r * k].view(r, k)), wide(part[r * k :].view(k, c))
                tree[name], back[name] = part.new_empty(shape), (u @ v).to(field.dtype)
        return layout.replace_matrices(layout.flatten(tree), back)


class _Packed:
    """Encoding as a scale and integers of a few bits, which are quantization levels or signs."""

    def size(self, field: Field, x: Tensor, ranks: Ranks | None) -> int:
        return field.item + -(-field.n * field.bits // 8)

    def floats(self, field: Field, x: Tensor, ranks: Ranks | None) -> int:
        return 4 + -(-field.n * field.bits // 8)

    def pack(self, field: Field, x: Tensor, ranks: Ranks | None) -> bytes:
        scale = x.abs().amax(-1, keepdim=True) if field.n else x.new_zeros(1)
        if field.encoding == "sign":
            codes = (x >= 0).int()
        else:
            codes = (x.double() / scale.double() * field.levels).round().nan_to_num(0, 0, 0).long() + field.levels
        if not torch.equal(self._values(field, scale, codes), x):
            raise WireError(
                f"a field of encoding {field.encoding!r} must contain only values of its grid "
                f"(largest value {float(scale)})"
            )
        bits = np.stack([(codes.numpy() >> k & 1).astype(np.uint8) for k in range(field.bits)], -1)
        return raw_bytes(scale) + np.packbits(bits).tobytes()

    def accepts_length(self, field: Field, length: int) -> bool:
        return length == field.item + -(-field.n * field.bits // 8)

    def unpack(self, field: Field, payload: memoryview) -> Tensor:
        flat = np.unpackbits(np.frombuffer(payload[field.item :], np.uint8), count=field.n * field.bits)
        bits = torch.from_numpy(flat).view(field.n, field.bits)
        codes = sum((bits[:, k].int() << k for k in range(field.bits)), torch.zeros(field.n, dtype=torch.int32))
        if field.encoding == "levels" and (codes > 2 * field.levels).any():
            raise WireError(f"a packed integer is larger than 2 * {field.levels}")
        return self._values(field, tensor_from_bytes(payload[: field.item], field.dtype), codes)

    def _values(self, field: Field, scale: Tensor, codes: Tensor) -> Tensor:
        return (
            scale * (2 * codes - 1)
            if field.encoding == "sign"
            else dequantize(scale, codes - field.levels, field.levels)
        )


def wide(x: Tensor) -> Tensor:
    """Return the tensor in float32 or a wider type, as LAPACK requires."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


ENCODINGS: dict[str, Encoding] = {
    "dense": _Dense(),
    "sparse": _Sparse(),
    "lowrank": _LowRank(),
    "levels": _Packed(),
    "sign": _Packed(),
}
