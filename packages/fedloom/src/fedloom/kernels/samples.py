"""Gathering of samples, and pooling of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import extending

from fedloom.kernels.machine import compile_loop


@compile_loop
def gather(data: Any, index: Any, scale: Any, shift: Any, out: Any) -> Any:
    """Compute ``out[r] <- scale data[index[r]] + shift``.

    Args:
        data: stored samples ``[N, i]``.
        index: positions of the samples in ``data`` ``[r]``.
        scale: factors of the features ``[i]``.
        shift: values added to the features ``[i]``.
        out: normalized samples ``[r, i]``.

    Returns:
        Value that the caller may ignore. Its only purpose is to prevent the compiler from removing the code that loads
        rows in advance.

    Raises:
        IndexError: a position in ``index`` is not in 0..N-1.
    """
    kind, lines, touched = out.dtype.type, range(0, data.shape[1], 64 // data.itemsize), np.int64(0)
    for start in range(0, len(index), 8):
        some = index[start : start + 8]
        for r in some:
            if not 0 <= r < len(data):
                raise IndexError("a position is outside the data set")
            for k in lines:  # rows are far apart, so prefetch all of them
                touched |= np.int64(data[r, k])
        for j in range(len(some)):
            row, to = data[some[j]], out[start + j]
            for k in range(len(row)):
                to[k] = kind(row[k]) * scale[k] + shift[k]
    return touched


def _read_number(value: object) -> Any:
    """Return a value as a number. An int16 value contains the bits of a bfloat16 number."""
    raise NotImplementedError  # runs only when compiled


@extending.overload(_read_number, strict=False)  # type: ignore[untyped-decorator]
def _write_number(value: object) -> Callable[[Any], Any]:
    if isinstance(value, numba.types.Integer):
        return lambda value: np.int32(np.int32(value) << 16).view(np.float32)
    return lambda value: value


@compile_loop
def _is_above(value: object, best: object) -> Any:
    number = _read_number(value)
    return number > _read_number(best) or number != number


@compile_loop
def pool(x: Any, out: Any, place: Any) -> None:
    """Compute ``out <- max(0, maximum of each 2x2 square of x)``. NaN values remain NaN.

    Args:
        x: images ``[b, h, w, c]``. If the height or width is odd, the last row or column is ignored. int16 values
            contain the bits of bfloat16 numbers.
        out: pooled images ``[b, h // 2, w // 2, c]``.
        place: position of each maximum (the first one if there are several): 0 and 1 in the upper row, 2 and 3 in the
            lower row, 4 if the result is zero. These are bytes in an array with the shape of ``out``.
    """
    zero = x.dtype.type(0)
    samples, high, wide, channels = out.shape
    for s in range(samples):
        for i in range(high):
            for j in range(wide):
                first, second = x[s, 2 * i, 2 * j], x[s, 2 * i, 2 * j + 1]
                third, fourth = x[s, 2 * i + 1, 2 * j], x[s, 2 * i + 1, 2 * j + 1]
                to, where = out[s, i, j], place[s, i, j]
                for k in range(channels):
                    best, corner = first[k], np.uint8(0)
                    if _is_above(second[k], best):
                        best, corner = second[k], np.uint8(1)
                    if _is_above(third[k], best):
                        best, corner = third[k], np.uint8(2)
                    if _is_above(fourth[k], best):
                        best, corner = fourth[k], np.uint8(3)
                    if _read_number(best) <= 0:
                        best, corner = zero, np.uint8(4)
                    to[k], where[k] = best, corner


@compile_loop
def unpool(delta: Any, place: Any, out: Any) -> None:
    """Compute the gradient of the input of `pool`, ``out [b, h, w, c]``, from ``delta [b, h // 2, w // 2, c]``."""
    zero = delta.dtype.type(0)
    samples, high, wide, channels = delta.shape
    for s in range(samples):
        for i in range(high):
            for j in range(wide):
                for square in range(4):  # separate loops need fewer overlap checks
                    y, x = 2 * i + square // 2, 2 * j + square % 2
                    for k in range(channels):
                        out[s, y, x, k] = delta[s, i, j, k] if place[s, i, j, k] == square else zero
            out[s, 2 * i : 2 * i + 2, 2 * wide :] = 0
        out[s, 2 * high :] = 0
