"""Sums of features and labels from which the best linear head over all clients is computed in closed form.

Let z be the k features of a sample followed by a 1, and let t be the sample's target, which contains one number per
output. A client computes S_zz, the mean of z z', and S_zt, the mean of z t'. The mean of these matrices over clients,
weighted by samples, equals the mean over all rows, no matter how the rows are distributed over clients. The head (S_zz
+ diag(r, ..., r, 0))^-1 S_zt, which is the solution of ridge regression, therefore does not depend on this distribution
either.
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
    "its head is the solution of a linear system of sums, so a small error in the sums can cause a large error "
    "in the head"
)

IGNORED_LOCAL_KEYS = ("lr", "schedule", "epochs", "batch_size", "momentum", "weight_decay", "clip")
"""Keys of ``[local]`` that have no effect on a method that computes its head in closed form."""


class Server(NamedTuple):
    """The model x ``[d]`` with the solved head, and the statistics total ``[s]`` of all clients so far."""

    x: Tensor
    total: Tensor


class Client(NamedTuple):
    """Statistics ``[m, s]`` that each client sent and the server stored.

    The statistics are 0 until the client participates.
    """

    sent: Tensor


class Up(NamedTuple):
    """Change ``[m, s]`` of a client's statistics since its last upload.

    The first upload contains the statistics themselves.
    """

    change: Annotated[Tensor, Mean(base="rows.sent", primary=True, accumulates=True, carries="statistics")]


class FeatureSums(NamedTuple):
    """Sums of features and targets as float64 matrices, with the relative rounding error of the statistics' own dtype.

    zz is ``[..., k + 1, k + 1]`` and zt is ``[..., k + 1, c]``.
    """

    zz: Tensor
    zt: Tensor
    rounding: float


def outputs_of(layout: Layout) -> int:
    """Return a model's number of outputs, read from its last matrix."""
    return list(layout.matrix_shapes.values())[-1][0]


def width_of(layout: Layout) -> int:
    """Return the length s of a client's statistics, which are one triangle of z z' and the matrix z t'."""
    size = shape_of(layout)[1] + 1
    return size * (size + 1) // 2 + size * outputs_of(layout)


def start(x0: Tensor, layout: Layout) -> tuple[Server, Client, None]:
    """Return the server's and the clients' states before the first round."""
    nothing = x0.new_zeros(width_of(layout))
    return Server(x0, nothing), Client(nothing), None


def samples_of(part: Features, outputs: int) -> tuple[Tensor, Tensor]:
    """Return features ``[N, k + 1]`` that end with a 1, and targets ``[N, c]``: 1 and 0, or 1 and -1 for one output."""
    z = part.z.double()
    z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
    y = part.y.long()
    targets = 2.0 * y.double()[:, None] - 1 if outputs == 1 else torch.eye(outputs, dtype=z.dtype, device=z.device)[y]
    return z, targets


def statistics(x: Tensor, work: Work) -> Tensor:
    """Return the clients' statistics ``[m, s]``, computed with the body of ``x`` and in the dtype of ``x``.

    Raises:
        ConfigError: the task has no classes, or the model cannot process samples individually.
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
    """Return the uploads and the new states of clients. The upload of a client that takes no steps is 0."""
    now = where_moved(work, statistics(x, work), rows.sent)
    return Up(now - rows.sent), Client(now)


def unpack_statistics(row: Tensor, layout: Layout) -> FeatureSums:
    """Return statistics ``[..., s]`` as matrices."""
    rounding, size, row = torch.finfo(row.dtype).eps, shape_of(layout)[1] + 1, row.double()
    upper = torch.triu_indices(size, size, device=row.device)
    zz = row.new_zeros(*row.shape[:-1], size, size)
    zz[..., upper[0], upper[1]] = zz[..., upper[1], upper[0]] = row[..., : upper.shape[1]]
    return FeatureSums(zz, row[..., upper.shape[1] :].unflatten(-1, (size, -1)), rounding)


def solve_head(
    moments: FeatureSums, ridge: float, layout: Layout, *, bias: bool = True, penalize_bias: bool = False
) -> Tensor:
    """Return the least-squares head ``[..., k + 1, c]``, with a ``ridge`` penalty on all rows except the last.

    The last row is the bias, which is also penalized if ``penalize_bias`` is set. The bias is 0 for a model whose last
    layer has no bias. If the ridge is below the rounding error of the sums, the head ignores directions in which the
    sums are below this error, by the rule of `numpy.linalg.matrix_rank`. If several heads are optimal, the head with
    the smallest norm is returned.
    """
    features = shape_of(layout)[1]
    used = features + 1 if bias and bias_of(layout) is not None else features
    penalty = torch.zeros(used, dtype=moments.zz.dtype, device=moments.zz.device)
    penalty[: used if penalize_bias else features] = ridge
    system, right = moments.zz[..., :used, :used] + torch.diag(penalty), moments.zt[..., :used, :]
    tolerance = used * moments.rounding
    if ridge > tolerance * float(system.diagonal(dim1=-2, dim2=-1).max()):
        head = torch.linalg.solve(system, right)
    else:
        head = torch.linalg.pinv(system, rtol=tolerance, hermitian=True) @ right
    return torch.cat([head, torch.zeros_like(moments.zt[..., used:, :])], -2)


def bias_of(layout: Layout) -> str | None:
    """Return the name of the bias in the last layer of a model, or None if this layer has no bias."""
    name = f"{list(layout.matrix_shapes)[-1].rpartition('.')[0]}.bias"
    return name if name in layout.names else None


def replace_head(x: Tensor, head: Tensor, layout: Layout) -> Tensor:
    """Return models ``[..., d]`` that consist of the body of ``x [d]`` and the heads ``[..., k + 1, c]``."""
    models = x.expand(*head.shape[:-2], -1).clone()
    tree, bias = layout.tree(models), bias_of(layout)
    tree[list(layout.matrix_shapes)[-1]].copy_(head[..., :-1, :].mT)
    if bias is not None:
        tree[bias].copy_(head[..., -1, :])
    return models
