"""FIAELT: inexact ADMM for composite problems. Local solvers stop as soon as a relative criterion is met.

Problem: min over y of sum_i f_i(y) + g(y). It is the SUM over n clients, so g has 1/n of its usual weight.

Reference: "Inexact Alternating Direction Method of Multipliers with Efficient Local Termination Criterion for
Cross-Silo Federated Learning", anonymous, under review at TMLR 2024, Algorithm 1.

    paper         here          meaning
    y, x_i        y, x          server's model, local model
    z_i           z             dual of x_i = y, with the fixed point -grad f_i(y)
    beta, tau     beta, tau     penalty, dual step size
    r_i           r             tolerance of criterion (9)
    m_i, eta_i    inner, lr     SVRG's inner steps and step size

Client state: 2d + 1 values (x, z, moved). Traffic per round: d + 2 down (y as sparse as the prox makes it), 2d + 3 up.

Deviations: criterion (9) contains the unknown minimizer. The condition that `fedloom.local.inexact` checks implies (9).
If the criterion is checked and L is not given, the first round only measures the L of the cohort. If beta follows from
L and most clients of a cohort use all their iterations, L is measured again in a later round. If beta <= L, all
iterations are run, and a warning is issued. Local SGD repeats its steps until (9) holds. The server receives every L.

Variant: solver "released" follows the public code, which runs SVRG on f_i alone from the server's model, with a
snapshot that is never refreshed. The dual, the penalty, the prox and (9) then do not affect the models: the server's
model is the mean of the x_i.

Defaults: for local SGD, beta = 1/(passes reach), where reach is lr times the mean number of steps in a round. This
balances the penalty and the data. Criterion (9) then uses L = beta/5. Without a regularizer, a warning is issued.

Attackers: z_i adds tau times the change of x_i, so a forged model moves y (1 + tau) times as far as in FedAvg.

Use it for composite problems on a few clients that all participate. If they differ much, tau = 1 is faster at first.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Mean, Rows, Sent, by_rule
from fedloom.algorithms._regulariser import Regulariser, note_missing_regularizer, proximal, stationarity
from fedloom.local import Ctx, Work, where_moved
from fedloom.local.inexact import LyapunovParts, Solver, below, inexact, lyapunov_parts, lyapunov_step
from fedloom.local.smoothness import largest, smoothness
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Model y and means xbar, zbar ``[d]``, and numbers ``[1]``: beta (0 while L is measured), L, and solver counts."""

    y: Tensor
    xbar: Tensor
    zbar: Tensor
    beta: Tensor
    smooth: Tensor
    before: Tensor
    iterations: Tensor
    met: Tensor


class Down(NamedTuple):
    """Model y ``[d]``, penalty beta ``[1]``, and the smoothness constant L ``[1]``."""

    y: Annotated[Tensor, Sent(prox="regulariser")]
    beta: Tensor
    smooth: Tensor


class Client(NamedTuple):
    """Local model x and dual z, both ``[m, d]``, and moved ``[m, 1]``, the term of H_t for their last change."""

    x: Tensor
    z: Tensor
    moved: Tensor


class Up(NamedTuple):
    """Changes dx, dz ``[m, d]``, and ``[m, 1]``: iterations, met (1 if (9) was checked and holds), measured L or 0."""

    dx: Annotated[Tensor, Mean(base="rows.x", primary=True, accumulates=True)]
    dz: Annotated[Tensor, Mean(base="rows.z", accumulates=True)]
    iterations: Annotated[Tensor, Rows()]
    met: Annotated[Tensor, Rows()]
    smooth: Annotated[Tensor, Rows()]


class FIAELT(Algorithm):
    """FIAELT (Algorithm 1)."""

    regulariser: Regulariser = Field(None, description="regularizer g with a prox (0.01 ||x||_1 in Sec. 5)")
    tau: float = Field(0.5, gt=0, le=1, description="dual step size (Corollary 2); 1 gives ADMM")
    r: float = Field(0.005, ge=0, lt=0.5, description="tolerance r_i of (9) (Corollary 2); 0 runs all iterations")
    beta: Derived = by_rule(description="penalty (default: 1/(passes * reach) for sgd, otherwise 5 * L; Cor. 2)")
    smooth: Derived = by_rule(description="L (default: beta/5 if beta is derived, else measured with (9))")
    solver: Solver = Field("sgd", description="SGD, SVRG (Corollary 2) or GD until (9), or the public code's SVRG")
    passes: int = Field(2, ge=1, description="maximum number of passes of sgd until (9); with 1, (9) is not checked")
    iterations: int = Field(10, ge=1, description="maximum outer iterations of svrg (Corollary 2), or steps of gd")
    inner: int | None = Field(200, ge=2, description="m_i of svrg (Corollary 2; None: an epoch's steps, at least 2)")
    lr: float | None = Field(None, gt=0, description="step size (default: 1/(8 beta) for svrg, 1/beta for gd)")
    start: Literal["own", "server"] = Field("own", description="start of local work: own x_i, or the server's y")
    weighs_partial: ClassVar[bool] = True
    family: ClassVar[str] = "composite"
    paper: ClassVar[dict[str, Any]] = {"solver": "svrg"}
    released: ClassVar[dict[str, Any]] = {"solver": "released"}
    needs: ClassVar[dict[str, str]] = {"passes": "solver sgd", "iterations": "solver svrg gd", "inner": "solver svrg"}
    needs |= {"start": "solver not released"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        if self.solver == "released":  # its constant, which scales a dual that enters no model
            return {} if self.beta else {"beta": 1.0}
        rule = {} if self.solver != "sgd" or self.smooth else {"beta": 1 / (self.passes * ctx.reach)}
        return rule if self.beta or not rule else {**rule, "smooth": rule["beta"] / 5}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero, none = x0.new_zeros(x0.shape), x0.new_zeros(1)
        looks = self.r > 0 and self.solver != "released" and (self.solver, self.passes) != ("sgd", 1)
        unknown = not self.smooth and (not self.beta or looks)
        beta, smooth = 0.0 if unknown else self.beta or 5 * self.smooth, self.smooth or 0.0
        return Server(x0, x0, zero, none + beta, none + smooth, none, none, none), Client(x0, zero, none), None

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return [*below(self, self.beta, self.smooth or 0.0), *note_missing_regularizer(self, c=0.01 * ctx.n)]

    def remarks(self, server: Server) -> list[str]:
        return below(self, self.beta, float(server.smooth))

    def affordable(self, samples: Tensor, work: Work) -> Tensor:
        if self.passes > 1:  # SGD gets the time that the full gradients of (9) leave
            samples = ((samples - (self.passes + 1) * work.sizes) / self.passes).clamp(min=0)
        return super().affordable(samples, work)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        y, beta, smooth, (x, z, _) = down.y, float(down.beta), float(down.smooth), rows
        none = rows.moved.new_zeros(rows.moved.shape)
        if not beta:
            return Up(x.new_zeros(x.shape), z.new_zeros(z.shape), none, none, smoothness(y, work)), rows
        smooth, most = smooth or beta / 5, self.passes if self.solver == "sgd" else self.iterations
        start = x if self.start == "own" and self.solver != "released" else where_moved(work, y.expand_as(x), x)
        how = self.solver, smooth, self.r, most, self.inner, self.lr
        new, steps, met = inexact(start, work, (beta, y), z, *how)  # Eq. 8
        up, rows = self.encode(new, down, rows, work)
        return up._replace(iterations=steps.to(x), met=met.to(x)), rows

    def encode(self, model: Tensor, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        if not bool(down.beta):  # L is measured, and no model is sent
            return self.client(down, rows, work)
        beta, (x, z, _), none = float(down.beta), rows, rows.moved.new_zeros(rows.moved.shape)
        dx, dz = model - x, self.tau * beta * (model - down.y) * (work.steps > 0)  # line 4
        moved = lyapunov_step(dx, dz, beta, float(down.smooth) or beta / 5, self.tau, self.r)
        return Up(dx, dz, none, none, none), Client(model, z + dz, moved)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        _, xbar, zbar, beta, smooth, before, *_ = server
        xbar, zbar = xbar + up.dx * ctx.part, zbar + up.dz * ctx.part  # line 6
        if not beta:
            top = largest(up.smooth, "smooth")
            beta = top.new_full((1,), self.beta) if self.beta else (5 * top).maximum(before)  # Corollary 2
            return server._replace(xbar=xbar, zbar=zbar, beta=beta, smooth=top if self.beta else beta / 5)
        if self.solver == "released":
            return server._replace(y=xbar, xbar=xbar, zbar=zbar, iterations=up.iterations.mean(0))
        y = proximal(self.regulariser, xbar + zbar / beta, 1 / (beta * ctx.n), ctx.layout)  # prox_{g/(beta p)}
        fails = (up.iterations >= self.iterations).double().mean() > 0.5
        if self.r and fails and not (before or self.beta or self.smooth):
            before, beta = beta, beta.new_zeros(beta.shape)  # (9) fails at many clients, so measure L again
        return Server(y, xbar, zbar, beta, smooth, before, up.iterations.mean(0), up.met.mean(0))

    def reshared(self, server: Server, moved: Up, ctx: Ctx) -> Server:
        return server._replace(xbar=server.xbar + moved.dx, zbar=server.zbar + moved.dz)

    def global_model(self, server: Server) -> Tensor:
        return server.y

    def observe(self, down: Down, rows: Client, work: Work) -> LyapunovParts:
        return lyapunov_parts(rows.x, work, (down.beta, down.y), rows.z, rows.moved)

    def diagnostics(self, server: Server, total: LyapunovParts, ctx: Ctx) -> dict[str, float]:
        y, gap, beta = server.y, server.xbar - server.y, server.beta if server.beta else server.before
        figures = stationarity(self.regulariser, y, ctx.n * (beta * gap + server.zbar), total, ctx)  # xi in dg(y)
        return {"local_iterations": float(server.iterations), "criterion_met": float(server.met), **figures}
