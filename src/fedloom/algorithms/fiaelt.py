"""FIAELT: inexact ADMM for composite problems whose local solvers stop by a relative criterion.

Problem: min over y of sum_i f_i(y) + g(y): the SUM over the n clients, so that g weighs 1/n of its weight in a mean.

Reference: "Inexact Alternating Direction Method of Multipliers with Efficient Local Termination Criterion for
Cross-Silo Federated Learning", anonymous, under review at TMLR 2024, Algorithm 1.

    paper         here          meaning
    y             y             server's model
    x_i           x             local model
    z_i           z             dual of x_i = y; its fixed point is -grad f_i(y)
    beta, tau     beta, tau     penalty, dual step
    r_i           r             tolerance of criterion (9)
    m_i, eta_i    inner, lr     SVRG's inner steps and step size

Kept by a client: 2d + 1 (x, z, moved). Sent per round: d + 1 down (y as sparse as the prox makes it), 2d + 2 up.

Deviations: criterion (9) needs the unknown minimiser x*; the check is ||grad L_i(x)|| <= sqrt(r) (beta - L)/(beta + L)
||grad L_i(x^t)||, which implies it, as (beta - L) ||x - x*|| <= ||grad L_i(x)|| <= (beta + L) ||x - x*||. Proposition 5
allows r <= 0.01, but its constant is positive for 0.005 (Corollary 2), the default. SVRG and gradient descent without
beta and L measure L in the first round, which does nothing else (the largest of the cohort), and once more where more
than half of a cohort use up their iterations. Local SGD takes the steps of ``[local]``, again until (9) holds, and
needs no L. Absent clients keep x_i and z_i. The iterations taken and L travel as two
numbers, seen for each client. The public code is another method: its local problems have neither dual nor penalty.
Local work starts at the client's own x_i^t; with ``start = "server"`` at y, and the check is then against the gradient
there.

Defaults: beta = 1/(3 reach) for local SGD, reach the length of a round (lr times its mean number of steps): the local
steps then come near the local solution; at most two rounds of steps, as (9) costs a pass over the data.

Use it for composite problems on a few clients that all take part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Rows, Sent, check_full_gradients
from fedloom.algorithms._regulariser import Regulariser, penalty, proximal
from fedloom.errors import ConfigError
from fedloom.local import Ctx, Work, where_moved
from fedloom.local.inexact import Solver, augmented_lagrangian, inexact, lyapunov_step
from fedloom.local.smoothness import smoothness
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """y, xbar, zbar ``[d]``, beta (0: unknown), before (measured twice, the first) and mean iterations ``[1]``."""

    y: Tensor
    xbar: Tensor
    zbar: Tensor
    beta: Tensor
    before: Tensor
    iterations: Tensor


class Down(NamedTuple):
    """y ``[d]``, beta ``[1]``."""

    y: Annotated[Tensor, Sent(prox="regulariser")]
    beta: Tensor


class Client(NamedTuple):
    """x, z ``[m, d]``, moved ``[m, 1]``: the term of H_t in the last change of x and z."""

    x: Tensor
    z: Tensor
    moved: Tensor


class Up(NamedTuple):
    """dx, dz ``[m, d]``, iterations, smooth (0 unless measured) ``[m, 1]``."""

    dx: Annotated[Tensor, Mean(base="rows.x", primary=True, accumulates=True)]
    dz: Annotated[Tensor, Mean(base="rows.z", accumulates=True)]
    iterations: Annotated[Tensor, Rows()]
    smooth: Annotated[Tensor, Rows()]


class Seen(NamedTuple):
    """Gradient of f_i at y ``[m, d]``, energy ``[m, 1]``: the client's part of H_t."""

    gradient: Tensor
    energy: Tensor


class FIAELT(Algorithm):
    """FIAELT (Algorithm 1)."""

    regulariser: Regulariser = Field(None, description="g, a function with a prox; 0.01 ||x||_1 in Sec. 5")
    tau: float = Field(0.5, gt=0, le=1, description="dual step (Corollary 2); 1 gives ADMM")
    r: float = Field(0.005, ge=0, lt=0.5, description="tolerance r_i of (9) (Corollary 2); 0: all iterations are taken")
    beta: float | None = Field(None, gt=0, description="penalty; 1/(3 reach) for sgd, 5 L (Cor. 2) when not given")
    smooth: float | None = Field(None, gt=0, description="L; beta/5, or measured in the first round, when not given")
    solver: Solver = Field("sgd", description="local SGD, SVRG (Corollary 2) or gradient descent until (9)")
    passes: int = Field(2, ge=1, description="most rounds of sgd until (9); 1: one, and (9) is not looked at")
    iterations: int = Field(10, ge=1, description="most outer iterations of svrg (Corollary 2), or steps of gd")
    inner: int | None = Field(200, ge=2, description="m_i of svrg (Corollary 2); an epoch, at least 2, when None")
    lr: float | None = Field(None, gt=0, description="step; 1/(8 beta) = 1/(40 L) for svrg (Cor. 2), 1/beta for gd")
    start: Literal["own", "server"] = Field("own", description="where local work starts: the client's x_i, or y")

    family: ClassVar[str] = "composite"
    paper: ClassVar[Mapping[str, Any]] = {"solver": "svrg"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"beta": 1 / (3 * ctx.reach)} if self.solver == "sgd" and self.smooth is None else {}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero, none = torch.zeros_like(x0), x0.new_zeros(1)
        beta = x0.new_tensor([self.beta or 5 * (self.smooth or 0.0)])
        return Server(x0, x0, zero, beta, none, none), Client(x0, zero, none), None

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.solver != "sgd":
            check_full_gradients(f"FIAELT with solver {self.solver!r}", ctx.local)
        if self.beta is None or self.smooth is None or self.beta > self.smooth:
            return []
        return [f"FIAELT may not converge: it needs beta > L, got {self.beta:g} and {self.smooth:g}"]

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        y, beta, (x, z, _) = down.y, float(down.beta), rows
        none = torch.zeros_like(x[:, :1])
        if not beta:
            return Up(torch.zeros_like(x), torch.zeros_like(z), none, smoothness(y, work)), rows
        smooth = self.smooth or beta / 5
        lr = self.lr or {"svrg": 1 / (8 * beta), "gd": 1 / beta, "sgd": None}[self.solver]
        most = self.passes if self.solver == "sgd" else self.iterations
        start = x if self.start == "own" else where_moved(work, y.expand_as(x), x)
        new, taken = inexact(  # Eq. 8 until (9)
            start, work, (beta, y), z, self.solver, smooth, self.r, most, self.inner, lr
        )
        dx, dz = new - x, self.tau * beta * (new - y) * (work.steps > 0)  # line 4
        moved = lyapunov_step(dx, dz, beta, smooth, self.tau, self.r)
        return Up(dx, dz, taken.to(x), none), Client(new, z + dz, moved)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        if not server.beta:
            if not 0 < float(up.smooth.max()) < math.inf:
                raise ConfigError(f"FIAELT cannot measure L, got {float(up.smooth.max()):g}: give beta or smooth")
            return server._replace(beta=torch.maximum(5 * up.smooth.max(0).values, server.before))  # beta = 5 max L_i
        beta, before, share = server.beta, server.before, ctx.m / ctx.n
        xbar, zbar = server.xbar + up.dx * share, server.zbar + up.dz * share  # line 6
        y = proximal(self.regulariser, xbar + zbar / beta, 1 / (beta * ctx.n), ctx.layout)  # prox_{g/(beta p)}
        used_up = (up.iterations >= self.iterations).double().mean() > 0.5
        if used_up and self.r and not before and self.beta is None and self.smooth is None:
            before, beta = beta, torch.zeros_like(beta)  # (9) fails for many: L is measured once more
        return Server(y, xbar, zbar, beta, before, up.iterations.mean(0))

    def global_model(self, server: Server) -> Tensor:
        return server.y

    def observe(self, down: Down, rows: Client, work: Work) -> Seen:
        energy = augmented_lagrangian(rows.x, work, (down.beta, down.y), rows.z) + rows.moved
        return Seen(work.full_grad(down.y), energy)

    def diagnostics(self, server: Server, total: Seen, ctx: Ctx) -> dict[str, float]:
        y, xbar, zbar, beta, before, iterations = server
        beta = beta if beta else before
        xi = ctx.n * (beta * (xbar - y) + zbar)  # in dg(y), by the server's prox
        kkt = torch.linalg.vector_norm(total.gradient + xi)  # Theorem 1; at least dist(0, sum grad f_i(y) + dg(y))
        h = total.energy + penalty(self.regulariser, y, ctx.layout)  # H_t, Proposition 5
        figures = {"local_iterations": iterations, "kkt": kkt, "lyapunov": h, "nonzeros": y.count_nonzero()}
        return {name: float(figure) for name, figure in figures.items()}
