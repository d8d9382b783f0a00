"""Gradients and complete descents of small networks, one client at a time, so that its parameters stay in the cache.

A network consists of linear layers, each optionally followed by a rectifier. The loss is the cross-entropy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.kernels.linear import add_gradient_one, backward_one, forward_one
from fedloom.kernels.machine import compiled
from fedloom.kernels.samples import gather

BLOCK_SAMPLES = 128
"""Number of samples of a client that pass through a network together. It is a multiple of four, so no sum depends on
it.

If the gradient changes the parameters, the whole batch passes through together.
"""


@compiled
def add_gradients(
    out: Any, w: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, count: Any, total: Any,
    classes: Any, beta: Any, alpha: Any, steady: Any, room: Any, block: int,
) -> Any:  # fmt: skip
    """Compute ``out <- beta out + alpha gradient + steady`` for a network, with one batch's gradient at ``w``.

    Args:
        out: ``[m, d]``. May be ``w``.
        w: ``[m, d]``.
        layers: see `descend`.
        data: see `descend`.
        scale: see `descend`.
        shift: see `descend`.
        y: see `descend`.
        where: positions in ``data`` ``[m, b]``.
        count: numbers of samples in the batch ``[m]``. The first ``count`` positions are used.
        total: divisors of the sum of sample losses ``[m]``.
        classes: see `descend`.
        beta: ``[m]``.
        alpha: a number.
        steady: see `descend`.
        room: workspace as in `descend`, with ``block`` in place of b.
        block: number of samples that pass through the network together, b or more if ``out`` is ``w``.

    Returns:
        A value that the caller ignores, as in `gather`.

    Raises:
        IndexError: a position is not within 0..N-1.
    """
    kind, touched = room.dtype.type, np.int64(0)
    for c in range(len(w)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else w[c, :0]
        touched |= _propagate(
            w[c], out[c], layers, data, scale, shift, y, where[c, : count[c]], kind(1 / total[c]), classes[c], beta[c],
            alpha, steady_row, room, block,
        )  # fmt: skip
    return touched


@compiled
def descend(
    w: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, steps: Any, count: Any,
    factor: Any, classes: Any, beta: Any, alpha: Any, steady: Any, pulled: Any, rate: Any,
    row: Any, velocity: Any, room: Any,
) -> Any:  # fmt: skip
    """Take every step of every client, ``w <- beta w + alpha gradient + steady``, one client at a time.

    A client's parameters then stay in the cache from one step to the next. With momentum beta, the step is ``v <- beta
    v + alpha gradient + steady + pulled w``, ``w <- w - rate v``, and v is zero before the first step. The loss of a
    sample is its cross-entropy times ``factor`` and the weight of its class, divided by the number of samples in the
    step.

    Args:
        w: ``[m, d]``.
        layers: layers ``[L, 5]`` int64: first column of the weights and of the bias (-1: no bias), inputs, outputs, and
            1 if a rectifier follows.
        data: stored samples ``[N, i]``.
        scale: scale ``[i]`` (see `gather`).
        shift: ``[i]``.
        y: ``[N]`` classes.
        where: positions in ``data`` ``[k, m, b]``.
        steps: numbers of steps of each client ``[m]``, at most k.
        count: numbers of samples in each step ``[k, m]``. The first ``count`` positions are used.
        factor: ``[m]``.
        classes: class weights ``[m, C]``, or ``[m, 0]`` if all are 1.
        beta: ``[m]``.
        alpha: a number.
        steady: vectors ``[m, d]``, ``[1, d]`` if all clients share it, or ``[0, d]`` for zero.
        pulled: ``[m]``.
        rate: a number.
        row: workspace for the parameters of one client ``[d]``, aligned to a cache line.
        velocity: workspace ``[d]`` that is overwritten, or ``[0]`` without momentum.
        room: workspace for values between the layers ``[b (i + sum of outputs + 2 largest outputs)]``.

    Returns:
        A value that the caller ignores, as in `gather`.

    Raises:
        IndexError: a position is not within 0..N-1.
    """
    kind, touched = room.dtype.type, np.int64(0)
    for c in range(len(w)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else w[c, :0]
        moved = velocity if len(velocity) else row
        velocity[:] = 0
        _copy(w[c], row)
        for k in range(steps[c]):
            b = count[k, c]
            touched |= _propagate(
                row, moved, layers, data, scale, shift, y, where[k, c, :b], kind(factor[c] / b), classes[c], beta[c],
                alpha, steady_row, room, b,
            )  # fmt: skip
            if len(velocity):
                _move(row, velocity, pulled[c], rate)
        _copy(row, w[c])
    return touched


@compiled
def _propagate(
    w: Any, out: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, share: Any, classes: Any,
    beta: Any, alpha: Any, steady: Any, room: Any, block: int,
) -> Any:  # fmt: skip
    """Set ``out <- beta out + alpha gradient + steady`` for a client: w, out ``[d]``, where ``[b]``, classes ``[C]``.

    The loss of a sample counts ``share`` times the weight of its class.
    """
    last, touched, wide = len(layers) - 1, np.int64(0), 0
    for j in range(len(layers)):
        wide = max(wide, layers[j, 3])
    turn = min(len(where), block) * wide
    spare = len(room) - 2 * turn
    for first in range(0, max(len(where), 1), max(block, 1)):
        here = where[first : first + block]
        b, start, end = len(here), 0, len(here) * data.shape[1]
        touched |= gather(data, here, scale, shift, room[:end].reshape(b, data.shape[1]))
        for j in range(last + 1):
            at, bias, i, o = layers[j, 0], layers[j, 1], layers[j, 2], layers[j, 3]
            h = room[end : end + b * o]
            forward_one(w, at, bias, room[start:end].reshape(b, i), h.reshape(b, o))
            if layers[j, 4]:
                _rectify(h, h)
            start, end = end, end + b * o
        delta = room[start:end]
        _slopes(delta.reshape(b, layers[last, 3]), y, here, share, classes)
        for j in range(last, -1, -1):
            at, bias, i, o = layers[j, 0], layers[j, 1], layers[j, 2], layers[j, 3]
            h = room[start - b * i : start]
            to = spare + (j % 2) * turn
            below = room[to : to + b * i] if j else h[:0]
            if j:
                backward_one(w, at, delta.reshape(b, o), below.reshape(b, i))
                if layers[j - 1, 4]:
                    _rectify(below, h)
            add_gradient_one(out, at, bias, delta.reshape(b, o), h.reshape(b, i), beta, alpha, steady)
            delta, start = below, start - b * i
        beta, steady = w.dtype.type(1), steady[:0]
    return touched


@compiled
def _copy(values: Any, out: Any) -> None:
    for k in range(len(values)):
        out[k] = values[k]


@compiled
def _rectify(values: Any, h: Any) -> None:
    """Set entries to zero where ``h`` is not positive. NaN entries stay NaN."""
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
    """Compute ``z [b, k] <-`` factor (softmax(z) - e_y), times the weight of class y."""
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
