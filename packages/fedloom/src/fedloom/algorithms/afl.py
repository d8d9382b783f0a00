"""AFL: agnostic federated learning, which trains the model that is best for the worst mixture of clients.

Problem: min over x, max over l in the simplex, of sum_i l_i f_i(x).

Reference: M. Mohri, G. Sivek, A. T. Suresh, "Agnostic Federated Learning", ICML 2019, arXiv:1902.00146v1, Figure 3
(Stochastic-AFL).

    paper          here        meaning
    w              x           server's model
    lambda         lam         mixture weights of the domains (every client is a domain), initially the shares alpha_i
    gamma_w        local lr    step size of w
    gamma_lambda   lambda_lr   step size of lambda

Client state: none. Traffic per round: d + 1 values down (x, share), d + 2 up (dw, share, loss). The server receives the
losses of individual clients.

Deviations: a client takes several local steps instead of one, and within the cohort, the server weights a client's
change in proportion to lam_i. share is lam_i/alpha_i, which is 1 at the start, and the mean is weighted by alpha_i.
With all clients and one full-batch step, a round equals one step in the paper. The vector of a cohort's losses,
multiplied by n/m, is an unbiased estimate of the vector of all clients' losses. The result is the last iterate instead
of the mean of all iterates. Uploads contain the change multiplied by share. For weighers and samplers, a client's model
is therefore x + dw.

Defaults: gamma_lambda is a radius divided by the square root of the sum of all squared gradient norms so far (step
"adaptive"). This step size is the step size of adaptive projected ascent (Streeter and McMahan 2010, arXiv:1002.4862;
Duchi, Hazan, Singer, JMLR 2011). With this step size, scaling all losses by the same factor does not change the
mixtures. A gradient consists of the losses of a cohort, multiplied by n/m. The radius 1/sqrt(n) covers all mixtures in
which each client's weight is between 0 and twice the mean weight. If lambda_lr is set, it is the step size itself (step
"fixed"), as in the paper. If only step = "fixed" is set, the step size is 1/(n sqrt(rounds)), which assumes losses of
order one. If no model can reduce the loss of a client, for instance because its targets are noisy, this client
eventually receives most of the weight, at the expense of the other clients. This is not a defect: it is the solution of
the stated problem.

Public code: the projection in litian96/fair_flearn (f097971), used in that code's AFL loop, produces the same x and
lambda to within 1e-15, with one full step and a fixed step size for lambda. The final model in their code is the mean
of all iterates.

Use this method to limit the loss of the worst client, if there are few clients and all of them participate often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, DerivedFrom0, Mean, Rows, by_rule
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows import algebra


class Server(NamedTuple):
    """Model x ``[d]``, mixture weights lam ``[n]``, and met ``[1]``, the norm of all lambda gradients so far."""

    x: Tensor
    lam: Tensor
    met: Tensor


class Down(NamedTuple):
    """Model x ``[d]`` and share ``[m, 1]``, the mixture weight of each client relative to its share alpha_i."""

    x: Tensor
    share: Tensor


class Up(NamedTuple):
    """dw ``[m, d]``, the share times the change of the model, with the share and the loss, both ``[m, 1]``."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    share: Annotated[Tensor, Mean()]
    loss: Annotated[Tensor, Rows()]


class AFL(Algorithm):
    """Agnostic federated learning (Mohri et al. 2019, Figure 3)."""

    lambda_lr: DerivedFrom0 = by_rule(
        description="step size for lambda (default: depends on step; the q-FFL authors' code uses 0.1); 0 is "
        "equivalent to FedAvg"
    )
    step: Literal["adaptive", "fixed"] | None = Field(
        None,
        description="adaptive: divide lambda_lr by the norm of all losses so far; fixed: use lambda_lr itself "
        "(default: fixed if lambda_lr is set)",
    )

    family: ClassVar[str] = "fair"
    paper: ClassVar[Mapping[str, Any]] = {"lambda_lr": 0.1, "step": "fixed"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        step = self.step or ("fixed" if self.lambda_lr else "adaptive")
        radius = ctx.n**-0.5
        return {"lambda_lr": radius if step == "adaptive" else radius / (ctx.n * ctx.rounds) ** 0.5, "step": step}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        return Server(x0, ctx.weight[:, 0], ctx.weight.new_zeros(1)), Nothing(), None

    def down(self, server: Server, kept: None, ctx: Ctx) -> Down:
        counts = (ctx.n * ctx.masses[:, 0] / ctx.masses.sum()).to(server.lam)  # n alpha_i
        share = torch.where(counts > 0, ctx.n * server.lam / counts, 0.0)
        return Down(server.x, share[ctx.ids, None])

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        w = descend(down.x, work)  # w_t = w_{t-1} - gamma_w grad_w L(w_{t-1}, lambda_{t-1})
        return self.encode(w, down, rows, work)

    def encode(self, model: Tensor, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return Up(down.share * (model - down.x), down.share, work.loss(down.x)), rows

    def decode(self, down: Down, rows: Nothing, up: Up, work: Work) -> Tensor:
        return down.x + torch.where(up.share > 0, up.dw / up.share, 0.0)

    def ranges(self, down: Down, up: Up, work: Work) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        return {"share": (down.share, down.share), "loss": (0.0, math.inf)}

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        x = server.x + torch.where(up.share > 0, up.dw / up.share, 0.0)  # sum of lam_i (w_i - x) over sum of lam_i
        losses = torch.zeros_like(server.lam)
        losses[ctx.ids] = up.loss[:, 0].to(losses) * (ctx.n / ctx.m)  # grad_lambda L(w_{t-1}, lambda_{t-1})
        peak = losses.max().clamp(min=torch.finfo(losses.dtype).tiny)
        met = torch.hypot(server.met, peak * (losses / peak).norm())  # a norm of losses of any size
        gradient = losses / met.clamp(min=torch.finfo(met.dtype).tiny) if self.step == "adaptive" else losses
        lam = algebra.onto_simplex(server.lam + self.lambda_lr * gradient, 1.0)  # projection on the simplex
        return Server(x, lam, met)
