"""The three products of a linear layer for many clients at once, and whole descents of small networks.

A layer of many clients is many small matrix products, on which a library for large ones loses most of its time to
packing and calls. Here four rows meet four rows, which keeps the vector registers at work, and gradient, decay and
steady part of a step are one visit to the weights.

A layer's weights ``[o, i]`` and bias ``[o]`` lie in the rows ``[m, d]`` of the clients' parameters, from column ``at``
and ``bias`` (-1: there is none).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.kernels.machine import compiled
from fedloom.kernels.samples import gather


@compiled
def forward(w: Any, at: int, bias: int, x: Any, out: Any) -> None:
    """``out <- x W' + b``; x ``[m, b, i]``, out ``[m, b, o]``."""
    for c in range(len(x)):
        _outputs(w[c], at, bias, x[c], out[c])


@compiled
def apply(w: Any, at: int, bias: int, x: Any, ends: Any, out: Any) -> None:
    """`forward` of any number of samples per client: x ``[N, i]``, out ``[N, o]``, of c up to ``ends[c]``."""
    start = 0
    for c in range(len(ends)):
        _outputs(w[c], at, bias, x[start : ends[c]], out[start : ends[c]])
        start = ends[c]


@compiled
def backward(w: Any, at: int, delta: Any, out: Any) -> None:
    """``out <- delta W``; delta ``[m, b, o]``, out ``[m, b, i]``."""
    for c in range(len(delta)):
        _below(w[c], at, delta[c], out[c])


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
    for c in range(len(delta)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else out[c, :0]
        _add(out[c], at, bias, delta[c], x[c], beta[c], alpha, steady_row)


@compiled
def descend(
    w: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, steps: Any, count: Any,
    factor: Any, classes: Any, beta: Any, alpha: Any, steady: Any, pulled: Any, rate: Any,
    row: Any, velocity: Any, room: Any,
) -> Any:  # fmt: skip
    """Every step of every client, ``w <- beta w + alpha gradient + steady``, one client after another.

    So a client's parameters stay in the cache from step to step. With momentum, which beta is then, the step is
    ``v <- beta v + alpha gradient + steady + pulled w``, ``w <- w - rate v``, and v is zero before the first. The loss
    of a sample is the cross-entropy of its softmax times ``factor`` and the weight of its class, over the number of
    samples in the step.

    Args:
        w: ``[m, d]``.
        layers: ``[L, 5]`` int64: first column of weights and of bias (-1: there is none), inputs, outputs, and 1 if a
            rectifier follows.
        data: samples as they are stored, ``[N, i]``.
        scale: ``[i]``, see `gather`.
        shift: ``[i]``.
        y: ``[N]`` classes.
        where: ``[k, m, b]`` positions in ``data``.
        steps: ``[m]``, at most k.
        count: ``[k, m]`` samples in each step; those that come first.
        factor: ``[m]``.
        classes: ``[m, C]`` weights of classes, or ``[m, 0]``: all are 1.
        beta: ``[m]``.
        alpha: a number.
        steady: ``[m, d]``, ``[1, d]`` if all clients have the same, or ``[0, d]`` for zero.
        pulled: ``[m]``.
        rate: a number.
        row: ``[d]``, room for the parameters of one client, at the beginning of a line of the cache.
        velocity: ``[d]``, overwritten, or ``[0]``: there is no momentum.
        room: ``[b (i + sum of outputs + 2 largest outputs)]`` for what lies between the layers.

    Returns:
        Nothing of use, as `gather`.

    Raises:
        IndexError: a position is not within 0..N-1.
    """
    kind, last, touched = room.dtype.type, len(layers) - 1, np.int64(0)
    wide = 0
    for j in range(len(layers)):
        wide = max(wide, layers[j, 3])
    turn = where.shape[2] * wide
    spare = len(room) - 2 * turn
    for c in range(len(w)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else w[c, :0]
        moved = velocity if len(velocity) else row
        velocity[:] = 0
        _copy(w[c], row)
        for k in range(steps[c]):
            b = count[k, c]
            here = where[k, c, :b]
            start, end = 0, b * data.shape[1]
            touched |= gather(data, here, scale, shift, room[:end].reshape(b, data.shape[1]))
            for j in range(last + 1):
                at, bias, i, o = layers[j, 0], layers[j, 1], layers[j, 2], layers[j, 3]
                h = room[end : end + b * o]
                _outputs(row, at, bias, room[start:end].reshape(b, i), h.reshape(b, o))
                if layers[j, 4]:
                    _rectify(h, h)
                start, end = end, end + b * o
            delta = room[start:end]
            _slopes(delta.reshape(b, layers[last, 3]), y, here, kind(factor[c] / b), classes[c])
            for j in range(last, -1, -1):
                at, bias, i, o = layers[j, 0], layers[j, 1], layers[j, 2], layers[j, 3]
                h = room[start - b * i : start]
                to = spare + (j % 2) * turn
                below = room[to : to + b * i] if j else h[:0]
                if j:
                    _below(row, at, delta.reshape(b, o), below.reshape(b, i))
                    if layers[j - 1, 4]:
                        _rectify(below, h)
                _add(moved, at, bias, delta.reshape(b, o), h.reshape(b, i), beta[c], alpha, steady_row)
                delta, start = below, start - b * i
            if len(velocity):
                _move(row, velocity, pulled[c], rate)
        _copy(row, w[c])
    return touched


@compiled
def _copy(values: Any, out: Any) -> None:
    for k in range(len(values)):
        out[k] = values[k]


@compiled
def _rectify(values: Any, h: Any) -> None:
    """Zero where ``h`` is not positive; what is not a number stays so."""
    zero = values.dtype.type(0)
    for k in range(len(values)):
        values[k] = zero if h[k] <= zero else values[k]


@compiled
def _move(w: Any, velocity: Any, pulled: Any, rate: Any) -> None:
    for q in range(len(w)):
        moved = velocity[q] + pulled * w[q]
        velocity[q] = moved
        w[q] -= rate * moved


@compiled
def _slopes(z: Any, y: Any, where: Any, factor: Any, classes: Any) -> None:
    """``z [b, k] <-`` factor (softmax(z) - e_y), times the weight of the class y."""
    for p in range(len(z)):
        scores, label = z[p], y[where[p]]
        top, total = scores[0], scores.dtype.type(0)
        for q in range(1, len(scores)):
            top = scores[q] if scores[q] > top else top
        for q in range(len(scores)):
            scores[q] = np.exp(scores[q] - top)
            total += scores[q]
        share = factor * classes[label] if len(classes) else factor
        for q in range(len(scores)):
            scores[q] *= share / total
        scores[label] -= share


@compiled
def _outputs(w: Any, at: int, bias: int, x: Any, out: Any) -> None:
    """``out [b, o] <- x W' + b`` of one client: w ``[d]``, x ``[b, i]``."""
    b, o = out.shape
    weights = w[at : at + o * x.shape[1]].reshape(o, x.shape[1])
    for q in range(0, o, 4):
        for p in range(0, b, 4):
            _dots(x[p : p + 4], weights[q : q + 4], out[p : p + 4, q : q + 4])
    if bias >= 0:
        offsets = w[bias : bias + o]
        for p in range(b):
            for q in range(o):
                out[p, q] += offsets[q]


@compiled
def _below(w: Any, at: int, delta: Any, out: Any) -> None:
    """``out [b, i] <- delta W`` of one client: w ``[d]``, delta ``[b, o]``."""
    o, i = delta.shape[1], out.shape[1]
    weights = w[at : at + o * i].reshape(o, i)
    out[:] = 0
    for p in range(0, len(out), 4):
        _combine(out[p : p + 4], weights, delta[p : p + 4], out.dtype.type(1))


@compiled
def _add(out: Any, at: int, bias: int, delta: Any, x: Any, beta: Any, alpha: Any, steady: Any) -> None:
    """`add_gradient` of one client: out ``[d]``, delta ``[b, o]``, x ``[b, i]``, beta a number, steady ``[d]``."""
    b, o = delta.shape
    i = x.shape[1]
    weights = out[at : at + o * i].reshape(o, i)
    for q in range(0, o, 4):
        rows = weights[q : q + 4]
        _prepare(rows.reshape(rows.size), beta, steady, at + q * i)
        _combine(rows, x, delta[:, q : q + 4].T, alpha)
    if bias >= 0:
        values = out[bias : bias + o]
        _prepare(values, beta, steady, bias)
        for p in range(b):
            for q in range(o):
                values[q] += alpha * delta[p, q]


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
                sample, s = x[p], zero
                for k in range(len(row)):
                    s += sample[k] * row[k]
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
