"""FedALA: a client mixes the received model into its own, with a learned weight per parameter, and then trains.

Problem: min over w_1..w_n of sum_i alpha_i f_i(w_i).

Reference: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive Local Aggregation for
Personalized Federated Learning", AAAI 2023, arXiv:2212.01197v4, Algorithm 1 and Eqs. 4 to 6 (public code:
TsingZ0/FedALA).

    paper        here       meaning
    Theta        x          server's model
    Theta_i      w          client's model
    W_i^p        a          aggregation weights of the adaptive layers, in [0, 1], initially 1
    p            head       adaptive layers (the last layer). All other layers are taken from the received model
    s            share      share of the client's data on which W_i is learned
    eta          eta        step size of W_i

Client state: d + h values (w, a), where h is the number of adaptive parameters. Traffic per round: d values down, d up.

Deviations: s % of the data means the first s % of the batches in a separate epoch. In the first round in which the two
models differ, the paper learns the weights until their loss converges. Here, the weights are learned during ``first``
passes over the data. The personal model is the client's own model after training. The personal model is not mixed with
the most recently received model.

Public code: clients and server of TsingZ0/PFLlib (d832e76f) give the same models and weights to within 1e-14, with the
same number of passes in the first round.

Use this method if the received model is better than the client's own model only in some layers. With eta = 0, all
weights remain 1, and the method is equivalent to FedAvg in which the personal model is the client's last model.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.local import Batch, Ctx, Work, descend, iterate, where_moved
from fedloom.rows import masks


class Client(NamedTuple):
    """Client's model w ``[m, d]``, and aggregation weights a ``[m, h]`` of the adaptive layers."""

    w: Tensor
    a: Tensor


class _Mixed(NamedTuple):
    a: Tensor
    local: Tensor
    gap: Tensor
    x: Tensor


class FedALA(Algorithm):
    """FedALA (Zhang et al. 2023, Algorithm 1)."""

    head: tuple[str, ...] = Field((), description="name prefixes of the adaptive parameters (empty: the last layer)")
    eta: float = Field(1.0, ge=0, description="step size eta for the aggregation weights (1 in Sec. 5.1)")
    share: float = Field(
        0.8,
        gt=0,
        le=1,
        description="fraction s of the data used to learn the aggregation weights (0.8 in the paper)",
    )
    first: int = Field(
        10,
        ge=1,
        description="number of passes that learn the aggregation weights in the first round in which the two models "
        "differ (paper: until convergence, Sec. 4.2)",
    )

    family: ClassVar[str] = "personalised"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0, torch.ones_like(x0[masks.head(ctx.layout, self.head)])), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:
        top = masks.head(work.layout, self.head).to(down.x.device)

        def step(s: _Mixed, work: Work, batch: Batch) -> _Mixed:
            mixed = masks.joined(s.x, s.local + s.gap * s.a, top)  # Eq. 4: Theta_i + (Theta - Theta_i) * W_i
            slope = masks.part(work.clipped(mixed, batch), top) * s.gap
            return s._replace(a=(s.a - self.eta * slope).clamp(0, 1))  # Eq. 6

        local = masks.part(rows.w, top)
        mix, once = (
            _Mixed(rows.a, local, down.x[..., top] - local, down.x.expand(work.m, -1)),
            (work.epochs(1) * self.share).ceil().long(),
        )
        differs = (mix.gap != 0).any(1, keepdim=True).cpu()
        fresh = differs & (rows.a == 1).all(1, keepdim=True).cpu()
        steps = (
            torch.where(fresh, self.first * once, torch.where(differs, once, 0))
            * (self.eta > 0)
            * (work.steps > 0).cpu()
        )
        mix = iterate(step, mix, work, steps, stream="weights")
        start = masks.joined(down.x, local + mix.gap * mix.a, top) if self.eta else down.x
        w = descend(start, work)
        return Delta(where_moved(work, w - down.x, torch.zeros_like(w))), Client(where_moved(work, w, rows.w), mix.a)

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        return rows.w
