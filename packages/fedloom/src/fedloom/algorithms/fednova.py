"""FedNova: normalized averaging, in which clients that take more local steps do not gain more influence.

Problem: min over x of sum_i p_i f_i(x).

Reference: J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020, arXiv:2007.07481v1, Eq. 8 and Section 5.

    paper        here         meaning
    x            x            server's model
    tau_i        work.steps   local steps
    a_i          -            weights of the local gradients in the change of the model
    ||a_i||_1    size         sum of these weights, equal to tau_i for plain SGD
    mu           mu           proximal weight of the local problems
    gamma_i      gamma        factor by which the step size changes in each local step
    eta d_i      -dw          normalized change of the model
    tau_eff      mean size    effective number of steps, sum_i p_i ||a_i||_1

Client state: none. Traffic per round: d values down, d + 1 up (dw, size).

Deviations: p_i is the client's share, which is n_i/n as in the paper unless the run uses other ``weights``. The
momentum is part of the run's local training. ``mu`` and ``gamma`` give the a_i of Section 3 for a proximal term and for
a decaying step size. Momentum, ``mu`` and ``gamma`` can be combined (momentum then also acts on the proximal term),
whereas the paper uses one at a time. Clients send the change divided by ||a_i||_1. For weighers and samplers, a
client's model is therefore x + dw.

Public code: the clients of JYWa/FedNova (47b4e09) produce the same models to within 1e-15, with and without momentum,
for mu = 0. If mu > 0, the tau_eff in their code is a number of steps.

Use this method if clients take different numbers of local steps. If all clients take the same number of steps, the
method is equivalent to FedAvg, and a warning is issued.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.layout import Layout


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the model, divided by the size, and the size ``[m, 1]``, which is ||a_i||_1."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    size: Annotated[Tensor, Mean()]


class FedNova(Algorithm):
    """FedNova (Wang et al. 2020, Eq. 8)."""

    mu: float = Field(0.0, ge=0, description="weight mu of the proximal term in the local problems, as in FedProx")
    gamma: float = Field(
        1.0,
        gt=0,
        le=1,
        description="factor gamma by which the step size changes after every local step; 1 keeps it constant",
    )

    weighs_partial: ClassVar[bool] = True
    needs_sgd: ClassVar[str | None] = "it divides updates by the weights that SGD with momentum gives to gradients"

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        equal = ctx.local.steps is not None or len({ctx.local.batches(n) for n in ctx.sizes[:, 0].tolist()}) == 1
        if not equal or self.mu or self.gamma < 1:
            return []
        return [
            "all clients take the same number of local steps, so FedNova is equivalent to FedAvg. The two "
            "methods differ if clients of different sizes train for local.epochs"
        ]

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        change = descend(down.x, work, pull=((self.mu, down.x),), decay=self.gamma) - down.x
        return self._upload(change, work), rows

    def encode(self, model: Tensor, down: Model, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return self._upload(model - down.x, work), rows

    def decode(self, down: Model, rows: Nothing, up: Up, work: Work) -> Tensor:
        return down.x + up.size.clamp(min=1) * up.dw

    def _upload(self, change: Tensor, work: Work) -> Up:
        size = self._size(work, change)
        return Up(change / size.clamp(min=1), size)  # -eta d_i

    def ranges(self, down: Model, up: Up, work: Work) -> dict[str, tuple[Tensor, Tensor]]:
        size = self._size(work, up.dw)
        return {"size": (size, size)}

    def _size(self, work: Work, like: Tensor) -> Tensor:
        """Compute ||a_i||_1, which is the change, divided by -eta, of a model whose batch gradients are all 1."""
        rho, tau = work.local.momentum, work.steps.to(like)
        if not self.mu and self.gamma == 1:
            return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        size = velocity = torch.zeros_like(like[:, :1])
        for k in range(int(work.steps.max())):
            velocity = work.local.momentum * velocity + 1 - work.lr * self.mu * size
            size = torch.where(work.steps > k, size + self.gamma**k * velocity, size)
        return size

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(server.x + up.size * up.dw)  # Eq. 8: x - tau_eff sum_i p_i eta d_i
