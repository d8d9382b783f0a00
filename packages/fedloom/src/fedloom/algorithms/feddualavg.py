"""FedDualAvg: federated dual averaging.

Means are computed in the dual space, and the prox maps them to the primal space.

Problem: min over x of sum_i alpha_i f_i(x) + psi(x), where psi is convex.

Reference: H. Yuan, M. Zaheer, S. Reddi, "Federated Composite Optimization", ICML 2021, arXiv:2011.08474, Algorithm 3
(Euclidean mirror map).

    paper        here          meaning
    z            z             dual variable
    w            x             primal model prox_{t psi}(z)
    eta_c        lr            local step size
    eta_s        server_lr     server step size
    K            work.steps    local steps
    eta~_{r,k}   t             weight of psi: eta_s eta_c K r + eta_c k
    psi          regulariser   nonsmooth term of the objective

Client state: none. Traffic per round: d + 1 values down, d + 1 up.

Deviations: the server computes t from values that clients report, because step sizes and numbers of steps may change.
If step sizes and numbers of steps are constant, t equals the paper's t. A weigher that uses the received model receives
z instead. Public code: the TensorFlow clients and server steps of hongliny/FCO-ICML21 (03b0d47e) produce the same z and
w to within 1e-15, once its L1 prox covers all parameters, as here. In their code, the prox covers only the kernels of
dense layers.

Defaults: there is no regularizer, because the regularizer is part of the problem. Without a regularizer, the method is
equivalent to FedAvg, and a warning is issued.

Use this method for sparse or low-rank global models with several local steps. Unlike in FedMiD, averaging does not undo
the prox. The weight t of psi grows without bound as steps accumulate, so use small steps toward the end.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean
from fedloom.algorithms._regulariser import Regulariser, note_missing_regularizer, proximal
from fedloom.local import Batch, Ctx, Nothing, Work, iterate, step_
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Primal model x and dual variable z, both ``[d]``, and the weight t ``[1]`` of the regularizer."""

    x: Tensor
    z: Tensor
    t: Tensor


class Down(NamedTuple):
    """Dual variable z ``[d]``, and the weight t ``[1]`` of the regularizer."""

    z: Tensor
    t: Tensor


class Up(NamedTuple):
    """Change dz ``[m, d]`` of the dual variable, and time ``[m, 1]``, the number of local steps times the step size."""

    dz: Annotated[Tensor, Mean(base="down.z", primary=True)]
    time: Annotated[Tensor, Mean()]


class _Dual(NamedTuple):
    z: Tensor
    t: Tensor


class FedDualAvg(Algorithm):
    """FedDualAvg (Yuan et al. 2021, Algorithm 3)."""

    regulariser: Regulariser = Field(None, description="regularizer psi with a proximal operator (default: none)")
    server_lr: float = Field(1.0, gt=0, description="server step size eta_s; 1 gives the mean of the dual variables")

    family: ClassVar[str] = "composite"
    plain_sgd: ClassVar[str | None] = "psi is weighted by the sum of the step sizes, but momentum makes larger steps"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        return Server(x0, x0, torch.zeros_like(x0[:1])), Nothing(), None

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return note_missing_regularizer(self, "is the same as FedAvg")

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        def step(rows: _Dual, work: Work, batch: Batch) -> _Dual:
            w = proximal(self.regulariser, rows.z, rows.t, work.layout)  # w_k = prox_{eta~ psi}(z_k)
            return _Dual(step_(rows.z, work, batch, work.lr, at=w), rows.t + work.lr)  # z_{k+1} = z_k - eta_c g(w_k)

        start = _Dual(down.z.repeat(work.m, 1), down.t.expand(work.m, 1))
        end = iterate(step, start, work)
        return Up(end.z.sub_(down.z), end.t - down.t), rows

    def encode(self, model: Tensor, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return Up(model - down.z, work.lr * work.steps.to(model)), rows

    def ranges(self, down: Down, up: Up, work: Work) -> dict[str, tuple[Tensor, Tensor]]:
        time = work.lr * work.steps.to(up[0])
        return {"time": (time, time)}

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        z = server.z + self.server_lr * up.dz  # z += eta_s mean of Delta
        t = server.t + self.server_lr * up.time  # eta_s eta_c K (r + 1)
        return Server(proximal(self.regulariser, z, t, ctx.layout), z, t)
