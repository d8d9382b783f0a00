"""DBE: a separate memory relieves the body of the client-specific part of the mean representation.

Problem: min over x and m_1..m_n of sum_i alpha_i (f_i(x, m_i) + kappa/2 mean over features of (zbar_i - zbar)^2), m_i
added to the representation.

Reference: J. Zhang, Y. Hua, J. Cao, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "Eliminating Domain Bias for Federated
Learning in Representation Space", NeurIPS 2023, arXiv:2311.14975 (public code: FedDBE in TsingZ0/PFLlib).

    paper       here      meaning
    z           features  representation with k features, the head's input
    z_i^p       memory    personalized representation bias memory (PRBM), added to z before the head
    zbar_i      running   running mean of a client's representation over its batches
    zbar^g      mean      consensus of these means, computed once
    kappa       kappa     weight of the mean regularization (MR)
    mu          momentum  weight of the newest batch in the running mean

Client state: k values (memory). Traffic per round: d + k + 1 values down, d + k up. The k numbers that clients send are
used only in the first round.

Deviations: the consensus is computed in the first round, in which the cohort takes a round of FedAvg. In the paper, all
clients first train for one epoch. Each client contributes the mean representation of its samples after training. A head
applied to z + m is equivalent to a head with a different bias applied to z, so the personal model is a single network.
Means over batches are computed without dropout.

Public code: once the consensus is known, clients and server of TsingZ0/PFLlib (d832e76f) produce the same models and
memories to within 1e-15.

Defaults: kappa = 1. The paper's value of 50 is intended for 512 features, whereas a small network has fewer features.
Momentum 1.

Use this method if clients observe the same kinds of objects under different conditions. With kappa = 0 and no memory,
the method is equivalent to FedAvg. The head of the model must have a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean
from fedloom.algorithms._prototypes import head_of, require_bias, shape_of
from fedloom.local import Batch, Bound, Ctx, Work, decay_of, descend, iterate
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Model x ``[d]``, and the consensus mean ``[k]`` of the representations.

    formed ``[1]`` is 1 as soon as the mean exists.
    """

    x: Tensor
    mean: Tensor
    formed: Tensor


class Client(NamedTuple):
    """Memory ``[m, k]`` that is added to the representation."""

    memory: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the model, and the client's mean representation ``[m, k]``.

    The mean is 0 once the server knows the consensus.
    """

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    mean: Annotated[Tensor, Mean()]


class _Rows(NamedTuple):
    w: Tensor
    memory: Tensor
    running: Tensor


class DBE(Algorithm):
    """FedAvg with the domain bias eliminator (Zhang et al. 2023)."""

    kappa: float = Field(
        1.0, ge=0, description="kappa, weight of the mean regularization (50 for 512 features in the paper)"
    )
    momentum: float = Field(
        1.0, gt=0, le=1, description="mu, weight of the newest batch in the running mean of a client's representation"
    )
    memory: bool = Field(True, description="give every client a personalized representation bias memory (PRBM)")

    family: ClassVar[str] = "personalised"
    plain_sgd: ClassVar[str | None] = "each batch updates both its memory and its model by a plain SGD step"
    paper: ClassVar[Mapping[str, Any]] = {"kappa": 50.0}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        require_bias("DBE", layout)
        return masks.note_head_is_model("DBE", masks.head(layout), "FedAvg with a bias for each client")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero = x0.new_zeros(shape_of(ctx.layout)[1])
        return Server(x0, zero, x0.new_zeros(1)), Client(zero), None

    def client(self, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        if not bool(down.formed) or not (self.kappa or self.memory):
            return self.encode(descend(down.x, work), down, rows, work)

        def step(r: _Rows, work: Work, batch: Batch) -> _Rows:
            running, terms = r.running, list[Bound]()
            if self.kappa:
                running = (1 - self.momentum) * running + self.momentum * work.activations(r.w, batch=batch)
                weight = torch.full_like(r.w[:, :1], self.kappa * self.momentum)
                terms = [Bound(weight, (), running - down.mean)]
            g = work.clipped(add_memory(r.w, r.memory, work.layout), batch, [slope] * len(terms), terms)
            head, (weight, bias) = head_of(work.layout, r.w).weight, head_of(work.layout, g)
            memory = r.memory - work.lr * (bias[:, None] @ head)[:, 0] if self.memory else r.memory
            weight += bias[:, :, None] * r.memory[:, None]  # gradient of the head at z + m instead of z
            return _Rows(r.w - work.lr * (g + decay_of(work, r.w)), memory, running)

        start = _Rows(down.x.expand(work.m, -1), rows.memory, torch.zeros_like(rows.memory))
        w, memory, _ = iterate(step, start, work)
        return Up(w - down.x, torch.zeros_like(memory)), Client(memory)

    def encode(self, model: Tensor, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        mean = torch.zeros_like(rows.memory) if bool(down.formed) else work.activations(model)
        return Up(model - down.x, mean), rows

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        mean = server.mean if bool(server.formed) else up.mean
        return Server(server.x + up.dw, mean, torch.ones_like(server.formed))

    def personal(self, down: Server, rows: Client, work: Work) -> Tensor:
        return add_memory(down.x.expand(work.m, -1), rows.memory, work.layout)


def slope(z: Tensor, _outputs: Tensor, _y: Tensor, _anchors: Tensor, gap: Tensor) -> Tensor:
    """Return terms ``[b]`` with the same gradient as mean(gap^2)/2 with respect to a batch's mean representation."""
    return (z * gap).mean(1)


def add_memory(models: Tensor, memory: Tensor, layout: Layout) -> Tensor:
    """Return models ``[m, d]`` with a head bias that has the same effect as adding the memory to z."""
    moved = models.clone()
    weight, bias = head_of(layout, moved)
    bias += (weight @ memory[:, :, None])[:, :, 0]
    return moved
