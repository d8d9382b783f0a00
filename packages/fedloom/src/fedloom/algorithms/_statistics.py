"""Sums of features and labels that determine the best linear head over all clients in closed form.

Let z be a sample's k features and a 1, and t its target with one number per output. A client computes the means S_zz of
z z' and S_zt of z t'. The mean of these matrices over clients, weighted by samples, is the mean over all rows, however
the rows are distributed over clients. The head (S_zz + diag(r, ..., r, 0))^-1 S_zt, which is ridge regression, does not
depend on this distribution either.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms._messages import Mean
from fedloom.algorithms._prototypes import shape_of
from fedloom.local import Work, where_moved
from fedloom.local.oracles.base import Features
from fedloom.rows.layout import Layout

SUM_IS_EXACT = (
    "its head is the solution of a system of sums, so a small error in the sums may become a large one in the head"
)

IGNORED = ("lr", "schedule", "epochs", "batch_size", "momentum", "weight_decay", "clip")
"""Keys of ``[local]`` that have no effect if a head is solved in closed form."""


class Server(NamedTuple):
    """x ``[d]``: the model with the solved head. total ``[s]``: the statistics of all clients so far."""

    x: Tensor
    total: Tensor


class Client(NamedTuple):
    """sent ``[m, s]``: the client's statistics that the server already has, or 0 before the client participates."""

    sent: Tensor


class Up(NamedTuple):
    """change ``[m, s]`` of the client's statistics since its last upload.

    The first upload contains the statistics themselves.
    """

    change: Annotated[Tensor, Mean(base="rows.sent", primary=True, accumulates=True, carries="statistics")]


class FeatureSums(NamedTuple):
    """zz ``[..., k + 1, k + 1]`` and zt ``[..., k + 1, c]`` in float64, and the rounding error of the first dtype."""

    zz: Tensor
    zt: Tensor
    rounding: float


def outputs_of(layout: Layout) -> int:
    """Return the number of outputs of the model's last matrix."""
    return list(layout.matrix_shapes.values())[-1][0]


def width_of(layout: Layout) -> int:
    """Length s of a client's statistics: a triangle of z z', and the matrix z t'."""
    size = shape_of(layout)[1] + 1
    return size * (size + 1) // 2 + size * outputs_of(layout)


def start(x0: Tensor, layout: Layout) -> tuple[Server, Client, None]:
    """Return the states before the first round."""
    nothing = x0.new_zeros(width_of(layout))
    return Server(x0, nothing), Client(nothing), None


def samples_of(part: Features, outputs: int) -> tuple[Tensor, Tensor]:
    """Return features with an added 1 ``[N, k + 1]`` and targets ``[N, c]``: 1 and 0, or for one output 1 and -1."""
    z = part.z.double()
    z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
    y = part.y.long()
    targets = 2.0 * y.double()[:, None] - 1 if outputs == 1 else torch.eye(outputs, dtype=z.dtype, device=z.device)[y]
    return z, targets


def statistics(x: Tensor, work: Work) -> Tensor:
    """Return the clients' statistics ``[m, s]`` computed with the body of ``x``, in its dtype.

    Raises:
        ConfigError: the task has no classes, or the model cannot process samples one by one.
    """
    assert work.class_counts is not None  # refuses a task without classes
    rows = []
    for part in work.features(x):
        z, targets = samples_of(part, outputs_of(work.layout))
        zz, count = z.T @ z, max(len(z), 1)
        upper = torch.triu_indices(len(zz), len(zz), device=zz.device)
        rows.append(torch.cat([zz[upper[0], upper[1]], (z.T @ targets).flatten()]) / count)
    return torch.stack(rows).to(x)


def sent_fields(x: Tensor, rows: Client, work: Work) -> tuple[Up, Client]:
    """Return the upload and the new rows of clients. A client that takes no step sends no change."""
    now = where_moved(work, statistics(x, work), rows.sent)
    return Up(now - rows.sent), Client(now)


def moments_of(row: Tensor, layout: Layout) -> FeatureSums:
    """Statistics ``[..., s]`` as matrices."""
    rounding, size, row = torch.finfo(row.dtype).eps, shape_of(layout)[1] + 1, row.double()
    upper = torch.triu_indices(size, size, device=row.device)
    zz = row.new_zeros(*row.shape[:-1], size, size)
    zz[..., upper[0], upper[1]] = zz[..., upper[1], upper[0]] = row[..., : upper.shape[1]]
    return FeatureSums(zz, row[..., upper.shape[1] :].unflatten(-1, (size, -1)), rounding)


def head_from(moments: FeatureSums, ridge: float, layout: Layout, *, bias: bool = True) -> Tensor:
    """Return the head ``[..., k + 1, c]`` of least squares, with a ``ridge`` penalty on all rows except the last.

    The last row is the bias. The bias is 0 for a model whose last layer has no bias. If the ridge is below the rounding
    error of the sums, the head ignores directions below this error, by the rule of `numpy.linalg.matrix_rank`. If
    several heads are optimal, the result is the smallest of them.
    """
    features = shape_of(layout)[1]
    used = features + 1 if bias and bias_of(layout) is not None else features
    penalty = torch.zeros(used, dtype=moments.zz.dtype, device=moments.zz.device)
    penalty[:features] = ridge
    system, right = moments.zz[..., :used, :used] + torch.diag(penalty), moments.zt[..., :used, :]
    tolerance = used * moments.rounding
    if ridge > tolerance * float(system.diagonal(dim1=-2, dim2=-1).max()):
        head = torch.linalg.solve(system, right)
    else:
        head = torch.linalg.pinv(system, rtol=tolerance, hermitian=True) @ right
    return torch.cat([head, torch.zeros_like(moments.zt[..., used:, :])], -2)


def bias_of(layout: Layout) -> str | None:
    """Return the name of the bias in the model's last layer, or None without a bias."""
    name = f"{list(layout.matrix_shapes)[-1].rpartition('.')[0]}.bias"
    return name if name in layout.names else None


def with_head(x: Tensor, head: Tensor, layout: Layout) -> Tensor:
    """Return models ``[..., d]`` with the body of ``x [d]`` and heads ``[..., k + 1, c]``."""
    models = x.expand(*head.shape[:-2], -1).clone()
    tree, bias = layout.tree(models), bias_of(layout)
    tree[list(layout.matrix_shapes)[-1]].copy_(head[..., :-1, :].mT)
    if bias is not None:
        tree[bias].copy_(head[..., -1, :])
    return models
