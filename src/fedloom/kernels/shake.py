"""SHAKE-128 of many short names at once (FIPS 202), eight beside each other, so that the loops are of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.kernels.machine import compiled

RATE = 168
"""Bytes of a block; a name is shorter."""

# fmt: off
CONSTANTS = np.array([
    0x0000000000000001, 0x0000000000008082, 0x800000000000808A, 0x8000000080008000, 0x000000000000808B,
    0x0000000080000001, 0x8000000080008081, 0x8000000000008009, 0x000000000000008A, 0x0000000000000088,
    0x0000000080008009, 0x000000008000000A, 0x000000008000808B, 0x800000000000008B, 0x8000000000008089,
    0x8000000000008003, 0x8000000000008002, 0x8000000000000080, 0x000000000000800A, 0x800000008000000A,
    0x8000000080008081, 0x8000000000008080, 0x0000000080000001, 0x8000000080008008,
], np.uint64)
"""Of the rounds of Keccak-f[1600] (FIPS 202, Section 3.2.5)."""
# fmt: on


def shake(names: list[bytes], size: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The first ``size`` words of 32 bits of SHAKE-128 of each name, ``[m, size]``, or one more."""
    blocks = np.frombuffer(bytearray().join([(name + b"\x1f").ljust(RATE, b"\0") for name in names]), np.uint8)
    blocks.reshape(-1, RATE)[:, -1] ^= 0x80
    out = np.empty((len(names), (size + 1) // 2), "<u8")
    _sponges(blocks.view("<u8").reshape(-1, RATE // 8), CONSTANTS, np.empty(200, np.uint64), out)
    return out.view("<u4")


@compiled
def _sponges(blocks: Any, constants: Any, s: Any, out: Any) -> None:
    """Absorb one block ``[m, 21]`` of each and give ``[m, w]`` words of 64 bits; ``s [25 x 8]`` is room for states."""
    rate, width = blocks.shape[1], out.shape[1]
    for first in range(0, len(blocks), 8):
        count = min(8, len(blocks) - first)
        s[:] = 0
        for k in range(rate):
            for lane in range(count):
                s[8 * k + lane] = blocks[first + lane, k]
        for start in range(0, width, rate):
            _permute(s, constants)
            for lane in range(count):
                for k in range(min(rate, width - start)):
                    out[first + lane, start + k] = s[8 * k + lane]


@compiled
def _turned(word: Any, by: int) -> Any:
    return (word << np.uint64(by)) | (word >> np.uint64(64 - by))


@compiled
def _permute(s: Any, constants: Any) -> None:
    """Keccak-f[1600] on eight states: ``s[8 i + lane]`` is word i = x + 5 y of one of them."""
    for constant in constants:
        for lane in range(8):
            c0 = s[lane] ^ s[40 + lane] ^ s[80 + lane] ^ s[120 + lane] ^ s[160 + lane]
            c1 = s[8 + lane] ^ s[48 + lane] ^ s[88 + lane] ^ s[128 + lane] ^ s[168 + lane]
            c2 = s[16 + lane] ^ s[56 + lane] ^ s[96 + lane] ^ s[136 + lane] ^ s[176 + lane]
            c3 = s[24 + lane] ^ s[64 + lane] ^ s[104 + lane] ^ s[144 + lane] ^ s[184 + lane]
            c4 = s[32 + lane] ^ s[72 + lane] ^ s[112 + lane] ^ s[152 + lane] ^ s[192 + lane]
            d0 = c4 ^ _turned(c1, 1)
            d1 = c0 ^ _turned(c2, 1)
            d2 = c1 ^ _turned(c3, 1)
            d3 = c2 ^ _turned(c4, 1)
            d4 = c3 ^ _turned(c0, 1)
            b0 = s[lane] ^ d0
            b10 = _turned(s[8 + lane] ^ d1, 1)
            b20 = _turned(s[16 + lane] ^ d2, 62)
            b5 = _turned(s[24 + lane] ^ d3, 28)
            b15 = _turned(s[32 + lane] ^ d4, 27)
            b16 = _turned(s[40 + lane] ^ d0, 36)
            b1 = _turned(s[48 + lane] ^ d1, 44)
            b11 = _turned(s[56 + lane] ^ d2, 6)
            b21 = _turned(s[64 + lane] ^ d3, 55)
            b6 = _turned(s[72 + lane] ^ d4, 20)
            b7 = _turned(s[80 + lane] ^ d0, 3)
            b17 = _turned(s[88 + lane] ^ d1, 10)
            b2 = _turned(s[96 + lane] ^ d2, 43)
            b12 = _turned(s[104 + lane] ^ d3, 25)
            b22 = _turned(s[112 + lane] ^ d4, 39)
            b23 = _turned(s[120 + lane] ^ d0, 41)
            b8 = _turned(s[128 + lane] ^ d1, 45)
            b18 = _turned(s[136 + lane] ^ d2, 15)
            b3 = _turned(s[144 + lane] ^ d3, 21)
            b13 = _turned(s[152 + lane] ^ d4, 8)
            b14 = _turned(s[160 + lane] ^ d0, 18)
            b24 = _turned(s[168 + lane] ^ d1, 2)
            b9 = _turned(s[176 + lane] ^ d2, 61)
            b19 = _turned(s[184 + lane] ^ d3, 56)
            b4 = _turned(s[192 + lane] ^ d4, 14)
            s[lane] = b0 ^ (~b1 & b2) ^ constant
            s[8 + lane] = b1 ^ (~b2 & b3)
            s[16 + lane] = b2 ^ (~b3 & b4)
            s[24 + lane] = b3 ^ (~b4 & b0)
            s[32 + lane] = b4 ^ (~b0 & b1)
            s[40 + lane] = b5 ^ (~b6 & b7)
            s[48 + lane] = b6 ^ (~b7 & b8)
            s[56 + lane] = b7 ^ (~b8 & b9)
            s[64 + lane] = b8 ^ (~b9 & b5)
            s[72 + lane] = b9 ^ (~b5 & b6)
            s[80 + lane] = b10 ^ (~b11 & b12)
            s[88 + lane] = b11 ^ (~b12 & b13)
            s[96 + lane] = b12 ^ (~b13 & b14)
            s[104 + lane] = b13 ^ (~b14 & b10)
            s[112 + lane] = b14 ^ (~b10 & b11)
            s[120 + lane] = b15 ^ (~b16 & b17)
            s[128 + lane] = b16 ^ (~b17 & b18)
            s[136 + lane] = b17 ^ (~b18 & b19)
            s[144 + lane] = b18 ^ (~b19 & b15)
            s[152 + lane] = b19 ^ (~b15 & b16)
            s[160 + lane] = b20 ^ (~b21 & b22)
            s[168 + lane] = b21 ^ (~b22 & b23)
            s[176 + lane] = b22 ^ (~b23 & b24)
            s[184 + lane] = b23 ^ (~b24 & b20)
            s[192 + lane] = b24 ^ (~b20 & b21)
