"""The three matrix products of a linear layer, for many clients at once or for a single client.

If each client has its own layer, many small matrix products are computed. A library for large products would spend most
of the time copying matrices and calling functions. Here, products of blocks of four rows make full use of the
processor's vector registers, and the gradient, the decay and the constant part of a step are applied in a single pass
over the weights.

The weights ``[o, i]`` and the bias ``[o]`` of a layer are stored in the rows ``[m, d]`` of the clients' parameters. The
weights start at column ``at``, and the bias starts at column ``bias`` (-1: no bias).
"""

from __future__ import annotations

from typing import Any

from fedloom.kernels.machine import compile_loop


@compile_loop
def forward(w: Any, at: int, bias: int, x: Any, out: Any) -> None:
    """Compute ``out <- x W' + b`` with x ``[m, b, i]`` and out ``[m, b, o]``."""
    for c in range(len(x)):
        forward_one_client(w[c], at, bias, x[c], out[c])


@compile_loop
def apply(w: Any, at: int, bias: int, x: Any, ends: Any, out: Any) -> None:
    """Compute `forward` for x ``[N, i]`` and out ``[N, o]``, where the rows of client c end before row ``ends[c]``."""
    start = 0
    for c in range(len(ends)):
        forward_one_client(w[c], at, bias, x[start : ends[c]], out[start : ends[c]])
        start = ends[c]


@compile_loop
def backward(w: Any, at: int, delta: Any, out: Any) -> None:
    """Compute ``out <- delta W`` with delta ``[m, b, o]`` and out ``[m, b, i]``."""
    for c in range(len(delta)):
        backward_one_client(w[c], at, delta[c], out[c])


@compile_loop
def add_gradient(out: Any, at: int, bias: int, delta: Any, x: Any, beta: Any, alpha: Any, steady: Any) -> None:
    """Compute ``out <- beta out + alpha gradient + steady`` for the columns of a layer.

    The gradient of the weights is ``delta' x``, and the gradient of the bias is the sum of the rows of ``delta``.

    Args:
        out: rows of the clients ``[m, d]``. The function changes the columns of the layer.
        at: first column of the weights.
        bias: first column of the bias, or -1 if the layer has no bias.
        delta: gradients with respect to the outputs of the layer ``[m, b, o]``.
        x: inputs of the layer ``[m, b, i]``.
        beta: factor of ``out`` for each client ``[m]``. If a factor is 0, ``out`` is discarded even if it is not
            finite.
        alpha: factor of the gradient, which is the same for all clients.
        steady: vectors that are added ``[m, d]``, or ``[1, d]`` if all clients have the same vector, or ``[0, d]`` for
            zero.
    """
    for c in range(len(delta)):
        steady_row = steady[min(c, len(steady) - 1)] if len(steady) else out[c, :0]
        add_gradient_one_client(out[c], at, bias, delta[c], x[c], beta[c], alpha, steady_row)


@compile_loop
def forward_one_client(w: Any, at: int, bias: int, x: Any, out: Any) -> None:
    """Compute ``out [b, o] <- x W' + b`` for one client with w ``[d]`` and x ``[b, i]``."""
    b, o = out.shape
    weights = w[at : at + o * x.shape[1]].reshape(o, x.shape[1])
    for q in range(0, o, 4):
        for p in range(0, b, 4):
            _dot_four_rows(x[p : p + 4], weights[q : q + 4], out[p : p + 4, q : q + 4])
    if bias >= 0:
        offsets = w[bias : bias + o]
        for p in range(b):
            for q in range(o):
                out[p, q] += offsets[q]


@compile_loop
def backward_one_client(w: Any, at: int, delta: Any, out: Any) -> None:
    """Compute ``out [b, i] <- delta W`` for one client with w ``[d]`` and delta ``[b, o]``."""
    o, i = delta.shape[1], out.shape[1]
    weights = w[at : at + o * i].reshape(o, i)
    out[:] = 0
    for p in range(0, len(out), 4):
        _add_combination_of_rows(out[p : p + 4], weights, delta[p : p + 4], out.dtype.type(1))


@compile_loop
def add_gradient_one_client(
    out: Any, at: int, bias: int, delta: Any, x: Any, beta: Any, alpha: Any, steady: Any
) -> None:
    """Compute `add_gradient` for one client with out ``[d]``, delta ``[b, o]``, x ``[b, i]``, steady ``[d]``."""
    b, o = delta.shape
    i = x.shape[1]
    weights = out[at : at + o * i].reshape(o, i)
    for q in range(0, o, 4):
        rows = weights[q : q + 4]
        _scale_and_add_steady(rows.reshape(rows.size), beta, steady, at + q * i)
        _add_combination_of_rows(rows, x, delta[:, q : q + 4].T, alpha)
    if bias >= 0:
        values = out[bias : bias + o]
        _scale_and_add_steady(values, beta, steady, bias)
        for p in range(b):
            for q in range(o):
                values[q] += alpha * delta[p, q]


@compile_loop
def _scale_and_add_steady(values: Any, beta: Any, steady: Any, at: int) -> None:
    """Compute ``values <- beta values + steady[at:]``."""
    if beta == 0:
        values[:] = 0
    if len(steady):
        added = steady[at : at + len(values)]
        for k in range(len(values)):
            values[k] = beta * values[k] + added[k]
    elif beta != 1:
        for k in range(len(values)):
            values[k] *= beta


@compile_loop
def _dot_four_rows(x: Any, w: Any, out: Any) -> None:
    """Compute the scalar products ``out[p, q] <- <x[p], w[q]>`` for at most four rows of x and w."""
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


@compile_loop
def _add_combination_of_rows(target: Any, source: Any, factor: Any, alpha: Any) -> None:
    """Compute ``target[p] += alpha sum_q factor[p, q] source[q]`` for at most four rows of ``target``."""
    n, i = source.shape
    whole = n - n % 4
    if len(target) == 4:
        t0, t1, t2, t3 = target[0], target[1], target[2], target[3]
        for q in range(0, whole, 4):
            s0, s1, s2, s3 = source[q], source[q + 1], source[q + 2], source[q + 3]
            a0, a1, a2, a3 = _combine_four(factor, 0, q, alpha)
            b0, b1, b2, b3 = _combine_four(factor, 1, q, alpha)
            c0, c1, c2, c3 = _combine_four(factor, 2, q, alpha)
            d0, d1, d2, d3 = _combine_four(factor, 3, q, alpha)
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
                a0, a1, a2, a3 = _combine_four(factor, p, q, alpha)
                for k in range(i):
                    row[k] += a0 * s0[k] + a1 * s1[k] + a2 * s2[k] + a3 * s3[k]
    for q in range(whole, n):
        s0 = source[q]
        for p in range(len(target)):
            row, a0 = target[p], alpha * factor[p, q]
            for k in range(i):
                row[k] += a0 * s0[k]


@compile_loop
def _combine_four(factor: Any, p: int, q: int, alpha: Any) -> tuple[Any, Any, Any, Any]:
    return alpha * factor[p, q], alpha * factor[p, q + 1], alpha * factor[p, q + 2], alpha * factor[p, q + 3]
