"""Loops compiled for the processor at hand (numba): gathering samples, pooling, the three products of a linear layer.

A layer of many clients is many small matrix products, on which a library for large ones loses most of its time to
packing and calls. Here four rows meet four rows, which keeps the vector registers at work, and gradient, decay and
steady part of a step are one visit to the weights.

Arrays are C-contiguous. A layer's weights ``[o, i]`` and bias ``[o]`` lie in the rows ``[m, d]`` of the clients'
parameters, from column ``at`` and ``bias`` (-1: there is none). Every sum is taken in an order that depends on the
layer and the batch alone: what a client gets does not depend on who shares its chunk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import extending

FLAGS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # numbers that are not finite stay so
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,  # no counting of references to slices, which took a third of the time of small layers
}


ROOM = 64 << 20
"""Bytes that must be free for machine code to be kept on disk."""


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The loop as machine code, kept on disk where the package's folder or the user's cache has room for it."""
    places = [place for place in (Path(__file__).parent, Path("~").expanduser()) if place.is_dir()]
    if all(shutil.disk_usage(place).free >= ROOM for place in places):
        with suppress(RuntimeError):  # of numba: neither can be written
            return numba.njit(cache=True, **FLAGS)(loop)  # type: ignore[no-any-return]
    return numba.njit(**FLAGS)(loop)  # type: ignore[no-any-return]


@compiled
def gather(data: Any, index: Any, scale: Any, shift: Any, out: Any) -> Any:
    """``out[r] <- scale data[index[r]] + shift``.

    Args:
        data: ``[N, i]``.
        index: ``[r]``.
        scale: ``[i]``.
        shift: ``[i]``.
        out: ``[r, i]``.

    Returns:
        Nothing of use: what keeps the compiler from leaving out that rows are asked for ahead.

    Raises:
        IndexError: an index is not within 0..N-1.
    """
    kind, lines, touched = out.dtype.type, range(0, data.shape[1], 64), data.dtype.type(0)
    for start in range(0, len(index), 8):
        some = index[start : start + 8]
        for r in some:
            if not 0 <= r < len(data):
                raise IndexError("a sample's position is not in the data set")
            for k in lines:  # rows are far apart: ask for all of them before the first is needed
                touched |= data[r, k]
        for j in range(len(some)):
            row, to = data[some[j]], out[start + j]
            for k in range(len(row)):
                to[k] = kind(row[k]) * scale[k] + shift[k]
    return touched


def _number(value: Any) -> Any:
    """A number; of int16 the bfloat16 that has these bits."""
    raise NotImplementedError  # compiled only


@extending.overload(_number, strict=False)  # type: ignore[untyped-decorator]
def _number_of(value: Any) -> Callable[[Any], Any]:
    if isinstance(value, numba.types.Integer):
        return lambda value: np.int32(np.int32(value) << 16).view(np.float32)
    return lambda value: value


@compiled
def _above(value: Any, best: Any) -> Any:
    number = _number(value)
    return number > _number(best) or number != number


@compiled
def pool(x: Any, out: Any, place: Any) -> None:
    """``out <- max(0, max of every 2x2 square of x)``; what is not a number stays so.

    Args:
        x: ``[b, h, w, c]``; an odd row or column at the end is left out. int16: the bits of bfloat16.
        out: ``[b, h // 2, w // 2, c]``.
        place: where each maximum is, the first if there are several: 0 and 1 in the upper row, 2 and 3 in the lower,
            4 if the output is zero; bytes of ``out``'s shape.
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
                    best, found = first[k], np.uint8(0)
                    if _above(second[k], best):
                        best, found = second[k], np.uint8(1)
                    if _above(third[k], best):
                        best, found = third[k], np.uint8(2)
                    if _above(fourth[k], best):
                        best, found = fourth[k], np.uint8(3)
                    if _number(best) <= 0:
                        best, found = zero, np.uint8(4)
                    to[k], where[k] = best, found


@compiled
def unpool(delta: Any, place: Any, out: Any) -> None:
    """``out [b, h, w, c] <-`` gradient of `pool`'s input; ``delta [b, h // 2, w // 2, c]`` is that of its output."""
    zero = delta.dtype.type(0)
    samples, high, wide, channels = delta.shape
    for s in range(samples):
        for i in range(high):
            for j in range(wide):
                for square in range(4):  # one target at a time takes few checks for overlap
                    y, x = 2 * i + square // 2, 2 * j + square % 2
                    for k in range(channels):
                        out[s, y, x, k] = delta[s, i, j, k] if place[s, i, j, k] == square else zero
            out[s, 2 * i : 2 * i + 2, 2 * wide :] = 0
        out[s, 2 * high :] = 0


@compiled
def forward(w: Any, at: int, bias: int, x: Any, out: Any) -> None:
    """``out <- x W' + b``; x ``[m, b, i]``, out ``[m, b, o]``."""
    m, b, i = x.shape
    o = out.shape[2]
    for c in range(m):
        weights = w[c, at : at + o * i].reshape(o, i)
        for q in range(0, o, 4):
            for p in range(0, b, 4):
                _dots(x[c, p : p + 4], weights[q : q + 4], out[c, p : p + 4, q : q + 4])
        if bias >= 0:
            own = w[c, bias : bias + o]
            for p in range(b):
                for q in range(o):
                    out[c, p, q] += own[q]


@compiled
def apply(w: Any, at: int, bias: int, x: Any, ends: Any, out: Any) -> None:
    """`forward` of any number of samples per client: x ``[N, i]``, out ``[N, o]``, of c up to ``ends[c]``."""
    i, o, start = x.shape[1], out.shape[1], 0
    for c in range(len(ends)):
        end = ends[c]
        weights = w[c, at : at + o * i].reshape(o, i)
        for q in range(0, o, 4):
            for p in range(start, end, 4):
                last = min(p + 4, end)
                _dots(x[p:last], weights[q : q + 4], out[p:last, q : q + 4])
        if bias >= 0:
            own = w[c, bias : bias + o]
            for p in range(start, end):
                for q in range(o):
                    out[p, q] += own[q]
        start = end


@compiled
def backward(w: Any, at: int, delta: Any, out: Any) -> None:
    """``out <- delta W``; delta ``[m, b, o]``, out ``[m, b, i]``."""
    m, b, o = delta.shape
    i = out.shape[2]
    one = out.dtype.type(1)
    for c in range(m):
        weights = w[c, at : at + o * i].reshape(o, i)
        out[c] = 0
        for p in range(0, b, 4):
            _combine(out[c, p : p + 4], weights, delta[c, p : p + 4], one)


@compiled
def add_gradient(out: Any, at: int, bias: int, delta: Any, x: Any, beta: Any, alpha: Any, steady: Any) -> None:
    """``out <- beta out + alpha gradient + steady`` for the columns of a layer.

    The gradient of the weights is ``delta' x``, that of the bias the sum of ``delta``.

    Args:
        out: ``[m, d]``.
        at: first column of the weights.
        bias: first column of the bias, or -1.
        delta: ``[m, b, o]``.
        x: ``[m, b, i]``.
        beta: ``[m]``; 0 forgets what ``out`` held, even if not finite.
        alpha: a number.
        steady: ``[m, d]``, ``[1, d]`` if all clients have the same, or ``[0, d]`` for zero.
    """
    m, b, o = delta.shape
    i = x.shape[2]
    for c in range(m):
        own = steady[min(c, len(steady) - 1)] if len(steady) else out[c, :0]
        weights = out[c, at : at + o * i].reshape(o, i)
        for q in range(0, o, 4):
            rows = weights[q : q + 4]
            _prepare(rows.reshape(rows.size), beta[c], own, at + q * i)
            _combine(rows, x[c], delta[c, :, q : q + 4].T, alpha)
        if bias >= 0:
            values = out[c, bias : bias + o]
            _prepare(values, beta[c], own, bias)
            for p in range(b):
                for q in range(o):
                    values[q] += alpha * delta[c, p, q]


@compiled
def _prepare(values: Any, beta: Any, steady: Any, at: int) -> None:
    """``values <- beta values + steady[at:]``."""
    if beta == 0:
        values[:] = 0
    if len(steady):
        added = steady[at : at + len(values)]
        for k in range(len(values)):
            values[k] = beta * values[k] + added[k]
    elif beta != 1:
        for k in range(len(values)):
            values[k] *= beta


@compiled
def _dots(x: Any, w: Any, out: Any) -> None:
    """``out[p, q] <- <x[p], w[q]>`` for at most four rows of each."""
    zero = w.dtype.type(0)
    if len(x) == 4 and len(w) == 4:
        x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
        w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
        s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
        s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
        for k in range(len(x0)):
            a, b, c, d = w0[k], w1[k], w2[k], w3[k]
            s00 += x0[k] * a
            s01 += x0[k] * b
            s02 += x0[k] * c
            s03 += x0[k] * d
            s10 += x1[k] * a
            s11 += x1[k] * b
            s12 += x1[k] * c
            s13 += x1[k] * d
            s20 += x2[k] * a
            s21 += x2[k] * b
            s22 += x2[k] * c
            s23 += x2[k] * d
            s30 += x3[k] * a
            s31 += x3[k] * b
            s32 += x3[k] * c
            s33 += x3[k] * d
        out[0, 0], out[0, 1], out[0, 2], out[0, 3] = s00, s01, s02, s03
        out[1, 0], out[1, 1], out[1, 2], out[1, 3] = s10, s11, s12, s13
        out[2, 0], out[2, 1], out[2, 2], out[2, 3] = s20, s21, s22, s23
        out[3, 0], out[3, 1], out[3, 2], out[3, 3] = s30, s31, s32, s33
        return
    for q in range(len(w)):
        row = w[q]
        if len(x) == 4:
            x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
            s0 = s1 = s2 = s3 = zero
            for k in range(len(row)):
                s0 += x0[k] * row[k]
                s1 += x1[k] * row[k]
                s2 += x2[k] * row[k]
                s3 += x3[k] * row[k]
            out[0, q], out[1, q], out[2, q], out[3, q] = s0, s1, s2, s3
        else:
            for p in range(len(x)):
                mine, s = x[p], zero
                for k in range(len(row)):
                    s += mine[k] * row[k]
                out[p, q] = s


@compiled
def _combine(target: Any, source: Any, factor: Any, alpha: Any) -> None:
    """``target[p] += alpha sum_q factor[p, q] source[q]`` for at most four rows of ``target``."""
    n, i = source.shape
    whole = n - n % 4
    if len(target) == 4:
        t0, t1, t2, t3 = target[0], target[1], target[2], target[3]
        for q in range(0, whole, 4):
            s0, s1, s2, s3 = source[q], source[q + 1], source[q + 2], source[q + 3]
            a0, a1, a2, a3 = _four(factor, 0, q, alpha)
            b0, b1, b2, b3 = _four(factor, 1, q, alpha)
            c0, c1, c2, c3 = _four(factor, 2, q, alpha)
            d0, d1, d2, d3 = _four(factor, 3, q, alpha)
            for k in range(i):
                e, f, g, h = s0[k], s1[k], s2[k], s3[k]
                t = t0[k] + a0 * e + a1 * f + a2 * g + a3 * h
                u = t1[k] + b0 * e + b1 * f + b2 * g + b3 * h
                v = t2[k] + c0 * e + c1 * f + c2 * g + c3 * h
                w = t3[k] + d0 * e + d1 * f + d2 * g + d3 * h
                t0[k], t1[k], t2[k], t3[k] = t, u, v, w
    else:
        for p in range(len(target)):
            row = target[p]
            for q in range(0, whole, 4):
                s0, s1, s2, s3 = source[q], source[q + 1], source[q + 2], source[q + 3]
                a0, a1, a2, a3 = _four(factor, p, q, alpha)
                for k in range(i):
                    row[k] += a0 * s0[k] + a1 * s1[k] + a2 * s2[k] + a3 * s3[k]
    for q in range(whole, n):
        s0 = source[q]
        for p in range(len(target)):
            row, a0 = target[p], alpha * factor[p, q]
            for k in range(i):
                row[k] += a0 * s0[k]


@compiled
def _four(factor: Any, p: int, q: int, alpha: Any) -> tuple[Any, Any, Any, Any]:
    return alpha * factor[p, q], alpha * factor[p, q + 1], alpha * factor[p, q + 2], alpha * factor[p, q + 3]
