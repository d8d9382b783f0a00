"""AFL: agnostic federated learning, which finds the best model for the worst mixture of clients.

Problem: min over x, max over l in the simplex, of sum_i l_i f_i(x).

Reference: M. Mohri, G. Sivek, A. T. Suresh, "Agnostic Federated Learning", ICML 2019, arXiv:1902.00146v1, Figure 3
(Stochastic-AFL).

    paper          here        meaning
    w              x           server's model
    lambda lam mixture weights of the domains. Here every client is a domain. Its initial value is the shares alpha_i
    gamma_w local lr step size of w gamma_lambda lambda_lr step size of lambda

Kept by a client: nothing. Sent per round: d + 1 down (x, share), d + 2 up (dw, share, loss). The server receives losses
of individual clients.

Deviations: a client takes several local steps instead of one, and the server weights its change in proportion to lam_i
within the cohort. share is lam_i/alpha_i, which is 1 at the start, and the mean is weighted by alpha_i. With all
clients and one full-batch step, this is the paper's step. The losses of a cohort, multiplied by n/m, are an unbiased
estimate of all losses. The result is the last iterate, and not the mean of all iterates. Uploads contain the change
multiplied by share, so weighers and samplers see the model x + dw.

Defaults: gamma_lambda is a radius divided by the square root of the sum of squared gradient norms so far (step
"adaptive"). This is the step of adaptive projected ascent (Streeter and McMahan 2010, arXiv:1002.4862; Duchi, Hazan,
Singer, JMLR 2011). The mixtures do not change if all losses are scaled. A gradient contains the losses of a cohort,
multiplied by n/m. The radius 1/sqrt(n) covers mixtures that weight each client between 0 and twice the mean. If
lambda_lr is given, it is the step itself (step "fixed"), as in the paper. If only "fixed" is given, the step is 1/(n
sqrt(rounds)), which assumes losses of order one. A client whose loss no model can reduce, for instance because its
targets are noisy, ends with most of the weight at the expense of the other clients. This is the solution of the
problem.

Replayed: the projection in litian96/fair_flearn (f097971), in the loop of its AFL, gives the same x and lambda, to
1e-15, with one full step and a fixed step size of lambda. Its final model is the mean of all iterates.

Use it to bound the loss of the worst client, if there are few clients and all of them participate often.
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
    """x ``[d]``, lam ``[n]``. met ``[1]``: the norm of all gradients with respect to lambda so far."""

    x: Tensor
    lam: Tensor
    met: Tensor


class Down(NamedTuple):
    """x ``[d]``, share ``[m, 1]``."""

    x: Tensor
    share: Tensor


class Up(NamedTuple):
    """dw ``[m, d]``, share times the change of the model. share, loss ``[m, 1]``."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    share: Annotated[Tensor, Mean()]
    loss: Annotated[Tensor, Rows()]


class AFL(Algorithm):
    """Agnostic federated learning (Mohri et al. 2019, Figure 3)."""

    lambda_lr: DerivedFrom0 = by_rule(
        description="step size of lambda (default: follows from step; the q-FFL authors' code uses 0.1); 0 gives FedAvg"
    )
    step: Literal["adaptive", "fixed"] | None = Field(
        None,
        description="adaptive: lambda_lr over the norm of all losses so far; fixed: lambda_lr itself (default: "
        "fixed if lambda_lr is set)",
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
