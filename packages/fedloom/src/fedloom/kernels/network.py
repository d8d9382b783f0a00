"""Gradients and training of small networks, one client at a time, so that its parameters stay in the cache.

A network consists of linear layers, each of which may be followed by a rectifier. The loss is the cross-entropy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.kernels.linear import add_gradient_one_client, backward_one_client, forward_one_client
from fedloom.kernels.machine import compile_loop
from fedloom.kernels.samples import gather

BLOCK_SAMPLES = 128
"""Maximum number of samples of a client that pass through a network together.

It is a multiple of four, so that no sum depends on it. If the gradient is written into the parameters themselves, the
whole batch passes through the network together.
"""


@compile_loop
def add_gradients(
    out: Any, w: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, count: Any, total: Any,
    classes: Any, beta: Any, alpha: Any, steady: Any, room: Any, block: int,
) -> Any:  # fmt: skip
    """Compute ``out <- beta out + alpha gradient + steady`` with the gradients of a network at ``w`` on one batch.

    Args:
        out: result for each client ``[m, d]``. It may be the same array as ``w``.
        w: parameters of each client ``[m, d]``.
        layers: linear layers, as in `descend`.
        data: stored samples, as in `descend`.
        scale: factors of the features, as in `descend`.
        shift: values added to the features, as in `descend`.
        y: classes of the samples, as in `descend`.
        where: positions of each client's samples in ``data`` ``[m, b]``.
        count: number of samples in the batch of each client ``[m]``. Only the first ``count`` positions are used.
        total: divisor of the sum of a client's sample losses ``[m]``.
        classes: weights of the classes, as in `descend`.
        beta: factor of ``out`` for each client ``[m]``.
        alpha: factor of the gradient, which is the same for all clients.
        steady: vectors that are added, as in `descend`.
        room: memory for values of the layers, as in `descend` but for ``block`` samples instead of b.
        block: maximum number of samples that pass through the network together, which must be at least b if ``out`` is
            ``w``.

    Returns:
        Value that the caller may ignore, as in `gather`.

    Raises:
        IndexError: a position is not in 0..N-1.
    """
    kind, touched = room.dtype.type, np.int64(0)
    for c in range(len(w)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else w[c, :0]
        touched |= _propagate(
            w[c], out[c], layers, data, scale, shift, y, where[c, : count[c]], kind(1 / total[c]), classes[c], beta[c],
            alpha, steady_row, room, block,
        )  # fmt: skip
    return touched


@compile_loop
def descend(
    w: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, steps: Any, count: Any,
    factor: Any, classes: Any, beta: Any, alpha: Any, steady: Any, pulled: Any, rate: Any,
    row: Any, velocity: Any, room: Any,
) -> Any:  # fmt: skip
    """Train all clients, one after another, with steps ``w <- beta w + alpha gradient + steady``.

    In this order, the parameters of a client stay in the cache from one step to the next. With momentum, a step is ``v
    <- beta v + alpha gradient + steady + pulled w`` and then ``w <- w - rate v``, where v is zero before the first
    step. The loss of a sample is its cross-entropy multiplied by ``factor`` and by the weight of its class, divided by
    the number of samples in the step.

    Args:
        w: parameters of each client ``[m, d]``, which are changed.
        layers: linear layers, as int64 ``[L, 5]``: first column of the weights, first column of the bias (-1: no bias),
            number of inputs, number of outputs, and 1 if a rectifier follows.
        data: stored samples ``[N, i]``.
        scale: factors of the features ``[i]`` (see `gather`).
        shift: values added to the features ``[i]`` (see `gather`).
        y: classes of the samples ``[N]``.
        where: positions of the samples in ``data``, for each step and client ``[k, m, b]``.
        steps: number of steps of each client ``[m]``, which is at most k.
        count: number of samples in each step of each client ``[k, m]``. Only the first ``count`` positions are used.
        factor: factor of each client's losses ``[m]``.
        classes: weights of the classes for each client ``[m, C]``, or ``[m, 0]`` if all weights are 1.
        beta: factor of each client's parameters, or of its momentum ``[m]``.
        alpha: factor of the gradient, which is the same for all clients.
        steady: vectors that are added ``[m, d]``, or ``[1, d]`` if all clients have the same vector, or ``[0, d]`` for
            zero.
        pulled: factor of each client's parameters in a step with momentum ``[m]``.
        rate: step size with momentum, which is the same for all clients.
        row: memory for the parameters of one client ``[d]``, which starts at a cache line.
        velocity: memory for the momentum of one client ``[d]``, or ``[0]`` without momentum.
        room: memory for the values of the layers, with ``b (i + sum of outputs + 2 largest outputs)`` entries.

    Returns:
        Value that the caller may ignore, as in `gather`.

    Raises:
        IndexError: a position is not in 0..N-1.
    """
    kind, touched = room.dtype.type, np.int64(0)
    for c in range(len(w)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else w[c, :0]
        moved = velocity if len(velocity) else row
        velocity[:] = 0
        _copy_values(w[c], row)
        for k in range(steps[c]):
            b = count[k, c]
            touched |= _propagate(
                row, moved, layers, data, scale, shift, y, where[k, c, :b], kind(factor[c] / b), classes[c], beta[c],
                alpha, steady_row, room, b,
            )  # fmt: skip
            if len(velocity):
                _move_parameters(row, velocity, pulled[c], rate)
        _copy_values(row, w[c])
    return touched


@compile_loop
def _propagate(
    w: Any, out: Any, layers: Any, data: Any, scale: Any, shift: Any, y: Any, where: Any, share: Any, classes: Any,
    beta: Any, alpha: Any, steady: Any, room: Any, block: int,
) -> Any:  # fmt: skip
    """Compute ``out <- beta out + alpha gradient + steady`` for one client.

    The shapes are w and out ``[d]``, where ``[b]``, and classes ``[C]``. The loss of a sample is multiplied by
    ``share`` and by the weight of its class.
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
            forward_one_client(w, at, bias, room[start:end].reshape(b, i), h.reshape(b, o))
            if layers[j, 4]:
                _rectify(h, h)
            start, end = end, end + b * o
        delta = room[start:end]
        _softmax_slopes(delta.reshape(b, layers[last, 3]), y, here, share, classes)
        for j in range(last, -1, -1):
            at, bias, i, o = layers[j, 0], layers[j, 1], layers[j, 2], layers[j, 3]
            h = room[start - b * i : start]
            to = spare + (j % 2) * turn
            below = room[to : to + b * i] if j else h[:0]
            if j:
                backward_one_client(w, at, delta.reshape(b, o), below.reshape(b, i))
                if layers[j - 1, 4]:
                    _rectify(below, h)
            add_gradient_one_client(out, at, bias, delta.reshape(b, o), h.reshape(b, i), beta, alpha, steady)
            delta, start = below, start - b * i
        beta, steady = w.dtype.type(1), steady[:0]
    return touched


@compile_loop
def _copy_values(values: Any, out: Any) -> None:
    for k in range(len(values)):
        out[k] = values[k]


@compile_loop
def _rectify(values: Any, h: Any) -> None:
    """Replace values by 0 where ``h`` is not positive. NaN values remain NaN."""
    zero = values.dtype.type(0)
    for k in range(len(values)):
        values[k] = zero if h[k] <= zero else values[k]


@compile_loop
def _move_parameters(w: Any, velocity: Any, pulled: Any, rate: Any) -> None:
    for q in range(len(w)):
        moved = velocity[q] + pulled * w[q]
        velocity[q] = moved
        w[q] -= rate * moved


@compile_loop
def _softmax_slopes(z: Any, y: Any, where: Any, factor: Any, classes: Any) -> None:
    """Compute ``z [b, k] <-`` factor (softmax(z) - e_y), multiplied by the weight of class y."""
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
