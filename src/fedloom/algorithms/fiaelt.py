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

Kept by a client: 2d + 1 (x, z, moved). Sent per round: d + 2 down (y as sparse as the prox makes it), 2d + 2 up.

Deviations: criterion (9) needs the unknown minimiser x*; the check is ||grad L_i(x)|| <= sqrt(r) (beta - L)/(beta + L)
||grad L_i(x^t)||, which implies it (`fedloom.local.inexact`). Where (9) is looked at and L is not given, the first
round measures L (the largest of the cohort) and does nothing else; where beta follows from L, so does a later round if
over half of a cohort use up their iterations. A beta at or below L promises nothing: all iterations are taken, and the
run warns. Local SGD takes the steps of ``[local]``, again until (9) holds. Absent clients keep x_i and z_i. The public
code is another method: it has no dual and no penalty. With ``start = "server"`` the check is against the gradient at y.
The server sees the iterations and L of each client.

Defaults: beta = 1/(passes reach) for local SGD, reach the length of a round (lr times its mean number of steps), so
that penalty and data balance over the local work; (9) is then looked at with L = beta/5, which nothing shows. No
regulariser; models have no zeros then, of which a run warns.

Use it for composite problems on a few clients that all take part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Mean, Rows, Sent, by_rule
from fedloom.algorithms._regulariser import Regulariser, penalty, proximal, unregularised
from fedloom.local import Ctx, Work, where_moved
from fedloom.local.inexact import Seen, Solver, inexact, lyapunov_step, seen
from fedloom.local.smoothness import largest, smoothness
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """y, xbar, zbar ``[d]``, beta, smooth (0: unknown), before (first beta measured) and mean iterations ``[1]``."""

    y: Tensor
    xbar: Tensor
    zbar: Tensor
    beta: Tensor
    smooth: Tensor
    before: Tensor
    iterations: Tensor


class Down(NamedTuple):
    """y ``[d]``, beta, smooth ``[1]``."""

    y: Annotated[Tensor, Sent(prox="regulariser")]
    beta: Tensor
    smooth: Tensor


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


class FIAELT(Algorithm):
    """FIAELT (Algorithm 1)."""

    regulariser: Regulariser = Field(None, description="g, a function with a prox; 0.01 ||x||_1 in Sec. 5")
    tau: float = Field(0.5, gt=0, le=1, description="dual step (Corollary 2); 1 gives ADMM")
    r: float = Field(0.005, ge=0, lt=0.5, description="tolerance r_i of (9) (Corollary 2); 0: all iterations are taken")
    beta: Derived = by_rule(description="penalty; 1/(passes reach) for sgd, 5 L (Cor. 2) when not given")
    smooth: Derived = by_rule(
        description="L; beta/5 beside a beta that is not given, else measured in the first round where (9) is looked at"
    )
    solver: Solver = Field("sgd", description="local SGD, SVRG (Corollary 2) or gradient descent until (9)")
    passes: int = Field(2, ge=1, description="most rounds of sgd until (9); 1: one, and (9) is not looked at")
    iterations: int = Field(10, ge=1, description="most outer iterations of svrg (Corollary 2), or steps of gd")
    inner: int | None = Field(200, ge=2, description="m_i of svrg (Corollary 2); an epoch, at least 2, when None")
    lr: float | None = Field(None, gt=0, description="step; 1/(8 beta) = 1/(40 L) for svrg (Cor. 2), 1/beta for gd")
    start: Literal["own", "server"] = Field("own", description="where local work starts: the client's x_i, or y")

    family: ClassVar[str] = "composite"
    paper: ClassVar[Mapping[str, Any]] = {"solver": "svrg"}
    needs: ClassVar[dict[str, str]] = {"passes": "solver sgd", "iterations": "solver svrg gd", "inner": "solver svrg"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        if self.solver != "sgd" or self.smooth:
            return {}
        beta = 1 / (self.passes * ctx.reach)
        return {"beta": beta} | ({} if self.beta else {"smooth": beta / 5})

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero, none = torch.zeros_like(x0), x0.new_zeros(1)
        smooth = x0.new_tensor([self.smooth or 0.0])
        beta = x0.new_tensor([self.beta]) if self.beta else 5 * smooth
        return Server(x0, x0, zero, beta, smooth, none, none), Client(x0, zero, none), None

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return [*self._below(self.smooth or 0.0), *unregularised(self, c=0.01 * ctx.n)]  # 0.01 in a mean

    def remarks(self, server: Server) -> list[str]:
        return self._below(float(server.smooth))

    def _below(self, smooth: float) -> list[str]:
        """The warning that a given beta is at most L, if it is."""
        if not self.beta or self.beta > smooth:
            return []
        return [
            f"FIAELT may not converge: it needs beta > L, got beta = {self.beta:g} and L = {smooth:.3g}; criterion (9) "
            "promises nothing, so all local iterations are taken"
        ]

    def _measures(self, beta: float, smooth: float) -> bool:
        """Whether a round measures L and does nothing else."""
        looked_at = self.r > 0 and (self.solver != "sgd" or self.passes > 1)
        return not beta or (looked_at and not smooth)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        y, beta, smooth, (x, z, _) = down.y, float(down.beta), float(down.smooth), rows
        none = torch.zeros_like(x[:, :1])
        if self._measures(beta, smooth):
            return Up(torch.zeros_like(x), torch.zeros_like(z), none, smoothness(y, work)), rows
        smooth, most = smooth or beta / 5, self.passes if self.solver == "sgd" else self.iterations
        start = x if self.start == "own" else where_moved(work, y.expand_as(x), x)
        new, taken = inexact(start, work, (beta, y), z, self.solver, smooth, self.r, most, self.inner, self.lr)  # Eq. 8
        dx, dz = new - x, self.tau * beta * (new - y) * (work.steps > 0)  # line 4
        return Up(dx, dz, taken.to(x), none), Client(new, z + dz, lyapunov_step(dx, dz, beta, smooth, self.tau, self.r))

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        beta, smooth, before, share = server.beta, server.smooth, server.before, ctx.part
        if self._measures(float(beta), float(smooth)):
            top = largest(up.smooth, "smooth")
            if not self.beta:  # Corollary 2
                beta = torch.maximum(5 * top, before)
                top = beta / 5
            return server._replace(beta=beta, smooth=top)
        xbar, zbar = server.xbar + up.dx * share, server.zbar + up.dz * share  # line 6
        y = proximal(self.regulariser, xbar + zbar / beta, 1 / (beta * ctx.n), ctx.layout)  # prox_{g/(beta p)}
        if self.r and not before and not self.beta and not self.smooth:
            fails = (up.iterations >= self.iterations).double().mean() > 0.5
            before, beta, smooth = beta * fails, beta * ~fails, smooth * ~fails  # (9) fails for many: L once more
        return Server(y, xbar, zbar, beta, smooth, before, up.iterations.mean(0))

    def global_model(self, server: Server) -> Tensor:
        return server.y

    def observe(self, down: Down, rows: Client, work: Work) -> Seen:
        return seen(rows.x, work, (down.beta, down.y), rows.z, rows.moved)

    def diagnostics(self, server: Server, total: Seen, ctx: Ctx) -> dict[str, float]:
        y, xbar, zbar, beta, _, before, iterations = server
        xi = ctx.n * ((beta if beta else before) * (xbar - y) + zbar)  # in dg(y), by the server's prox
        kkt = torch.linalg.vector_norm(ctx.n * total.gradient + xi)  # Theorem 1; >= dist(0, sum grad f_i(y) + dg(y))
        h = ctx.n * total.energy + penalty(self.regulariser, y, ctx.layout)  # H_t, Proposition 5
        figures = {"local_iterations": iterations, "kkt": kkt, "lyapunov": h, "nonzeros": y.count_nonzero()}
        return {name: float(figure) for name, figure in figures.items()}
