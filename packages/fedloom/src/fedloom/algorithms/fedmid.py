"""FedMiD: federated mirror descent, with proximal steps at the clients and at the server.

Problem: min over x of sum_i alpha_i f_i(x) + psi(x), where psi is convex.

Reference: H. Yuan, M. Zaheer, S. Reddi, "Federated Composite Optimization", ICML 2021, arXiv:2011.08474, Algorithm 2
(Euclidean mirror map).

    paper     here          meaning
    w         x             server's model
    w_{r,k}   w             client's model
    eta_c     lr            local step size
    eta_s     server_lr     server step size
    K         work.steps    local steps
    psi       regulariser   nonsmooth term of the objective

Client state: none. Traffic per round: d values down (sparse or of low rank, depending on the prox), d + 1 up.

Deviations: clients send the number eta_c K to the server, whose prox needs it, because clients may take different
numbers of steps. The server uses the mean of these numbers.

Public code: the TensorFlow clients and server steps of hongliny/FCO-ICML21 (03b0d47e) produce the same w to within
1e-15, once its L1 prox covers all parameters, as here. In their code, the prox covers only the kernels of dense layers.

Defaults: there is no regularizer, because the regularizer is part of the problem. Without a regularizer, the method is
equivalent to FedAvg, and a warning is issued.

Use this method as the simplest composite baseline. The limit is biased even with one local step. The prox is applied
twice per round (with one client and one step, the threshold is 2 eta_c c), and the mean of sparse local models is not
sparse ("curse of primal averaging").
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model, Sent
from fedloom.algorithms._regulariser import Regulariser, note_missing_regularizer, proximal, to_prox
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``."""

    x: Annotated[Tensor, Sent(prox="regulariser")]


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the model, and time ``[m, 1]``, the number of local steps times the step size."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    time: Annotated[Tensor, Mean()]


class FedMiD(Algorithm):
    """FedMiD (Yuan et al. 2021, Algorithm 2)."""

    regulariser: Regulariser = Field(None, description="regularizer psi with a proximal operator (default: none)")
    server_lr: float = Field(1.0, gt=0, description="server step size eta_s; 1 gives the mean of the local models")

    family: ClassVar[str] = "composite"
    plain_sgd: ClassVar[str | None] = (
        "its thresholds are the step size times the weight of psi, but momentum makes larger steps"
    )

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return note_missing_regularizer(self, "is the same as FedAvg")

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        psi = to_prox(self.regulariser)
        w = descend(down.x, work, prox=None if psi is None else (psi, None))  # w <- prox_{eta_c psi}(w - eta_c g(w))
        return self.encode(w, down, rows, work)

    def encode(self, model: Tensor, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return Up(model - down.x, work.lr * work.steps.to(model)), rows

    def ranges(self, down: Down, up: Up, work: Work) -> dict[str, tuple[Tensor, Tensor]]:
        time = work.lr * work.steps.to(up[0])
        return {"time": (time, time)}

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        x = server.x + self.server_lr * up.dw
        t = self.server_lr * up.time
        return Model(proximal(self.regulariser, x, t, ctx.layout))  # prox_{eta_s eta_c K psi}(w + eta_s mean of Delta)
