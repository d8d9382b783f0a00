"""Inexact FedADMM (Zhou and Li): a few linearised steps per dual step, several dual steps per communication.

Problem: min over x of sum_i alpha_i f_i(x).

Reference: S. Zhou, G. Y. Li, "Federated Learning via Inexact ADMM", IEEE TPAMI 2023, arXiv:2204.10607, Algorithm 1 (the
authors' MATLAB code for the constants).

    paper        here              meaning
    x            x                 server's model
    x_i          w                 local model
    pi_i         y                 dual, n times the paper's; -grad f_i(w) after an exact step
    sigma_i      rho               penalty, n times the paper's, one for all clients
    z_i          u                 x_i + pi_i/sigma_i
    r_i          1/lr              curvature of the linearised step
    k_0          iterations        dual steps between two communications
    epsilon_i    eps               tolerance of a local problem
    nu_i         shrink            eps <- nu eps in every dual step

Kept by a client: 2d + 1 (w, y, eps). Sent per round: d down, d up; the server keeps the last u of every client.

Deviations: the paper weighs every f_i by 1/n; here that factor is divided out of duals, penalty and gradients, and of
eps (n^2). The paper's sigma_i differ (r0 r_i/n with the curvature r_i of the client's data); with one rho for all, sum
z_i / sum sigma_i is the mean of u. The curvature of the step is 1/lr of local training. Steps use full gradients:
epochs and batch size of the run are not used.

Defaults: one dual step after at most five linearised ones, which cost six times FedAvg's gradients, and rho = 1/(lr
inner): penalty and data balance over these steps, and the server's model moves as far as they do. Where local SGD takes
more than five steps in a round, FedAvg moves further and the method learns more slowly, of which a run warns.

Use it where full gradients are cheap and communication is not. Many dual steps on one x come near a gradient step of
size 1/rho: rho must then exceed half the curvature of the mean loss, whatever the authors' r0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Model, Point, by_rule
from fedloom.local import Ctx, Work, iterate
from fedloom.rows.algebra import norm
from fedloom.rows.layout import Layout


class Client(NamedTuple):
    """w, y ``[m, d]``, eps ``[m, 1]``."""

    w: Tensor
    y: Tensor
    eps: Tensor


class _Solve(NamedTuple):
    w: Tensor
    y: Tensor
    eps: Tensor
    residual: Tensor


class FedADMMInexact(Algorithm):
    """Inexact FedADMM (Zhou and Li 2023, Algorithm 1)."""

    rho: Derived = by_rule(description="penalty n sigma_i; 1/(lr inner) when not given; r0 r_i in MATLAB code")
    iterations: int = Field(1, ge=1, description="k_0, dual steps between two communications; 5 and more in the paper")
    inner: int = Field(5, ge=1, description="most linearised steps per dual step; 3 in the MATLAB code")
    eps0: Annotated[float, Field(gt=0)] | Literal["matlab"] = Field(
        1e-6, description="first tolerance per parameter; 'matlab': (n k_0)^2, the MATLAB code's, for f_i/n"
    )
    shrink: float = Field(
        0.95, ge=0.5, lt=1, description="nu, factor of the tolerance per dual step; 0.95 in the MATLAB code"
    )

    plain_sgd: ClassVar[str | None] = "its local steps are linearised ADMM steps, which have no momentum"

    paper: ClassVar[Mapping[str, Any]] = {"rho": 1.0, "iterations": 5, "inner": 3, "eps0": "matlab"}

    @property
    def full_gradients(self) -> str:
        return "FedADMMInexact"

    @property
    def ignored(self) -> tuple[str, ...]:
        return "batch_size", "epochs", "steps"

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"rho": 1 / (ctx.local.lr * self.inner)}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, Point]:
        eps = x0.new_tensor([(ctx.n * self.iterations) ** 2 if self.eps0 == "matlab" else self.eps0])
        return Model(x0), Client(x0, torch.zeros_like(x0), eps), Point(x0)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        steps, sgd = self.iterations * self.inner, ctx.reach / ctx.local.lr
        if steps >= sgd:
            return []
        return [
            f"FedADMMInexact takes at most {steps} full-gradient steps a round where local SGD takes {sgd:.3g}, and "
            "may learn more slowly than FedAvg: raise local.lr or inner"
        ]

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Point, Client]:
        def linearised(s: _Solve, work: Work) -> _Solve:
            work.count_steps()
            s.w.sub_(s.residual, alpha=1 / (1 / work.lr + self.rho))  # x_i = (r x_i + sigma x - pi_i - g_i)/(r + sigma)
            residual_(s.residual, s.w, s.y, work)
            return s

        def residual_(out: Tensor, w: Tensor, y: Tensor, work: Work) -> Tensor:  # g_i + pi_i + sigma (x_i - x)
            return work.add_full_grad_(torch.add(y, w, alpha=self.rho, out=out).sub_(towards), w)

        def close(s: _Solve, work: Work) -> Tensor:
            return norm(s.residual).square() < s.eps * work.layout.d  # ||.||^2 < eps_i d

        def dual(s: _Solve, work: Work) -> _Solve:
            s = iterate(linearised, s, work, self.inner, batches=0, until=close)
            for rows in (s.y, s.residual):
                rows.add_(s.w, alpha=self.rho).sub_(towards)  # pi_i += sigma (x_i - x)
            return s._replace(eps=self.shrink * s.eps)

        towards = self.rho * down.x
        w, y = rows.w.clone(), rows.y.clone()
        start = _Solve(w, y, rows.eps, residual_(torch.empty_like(w), w, y, work))
        w, y, eps, _ = iterate(dual, start, work, self.iterations * (work.steps > 0), batches=0)
        return Point(torch.add(w, y, alpha=1 / self.rho)), Client(w, y, eps)  # z_i / sigma

    def server(self, server: Model, up: Point, ctx: Ctx) -> Model:
        return Model(up.u)  # x = sum z_i / sum sigma_i over ALL clients
