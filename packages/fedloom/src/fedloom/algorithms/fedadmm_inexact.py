"""Inexact FedADMM (Zhou and Li): each dual step takes a few linearized steps, and each round takes several dual steps.

Problem: min over x of sum_i alpha_i f_i(x).

Reference: S. Zhou, G. Y. Li, "Federated Learning via Inexact ADMM", IEEE TPAMI 2023, arXiv:2204.10607, Algorithm 1.

    paper        here              meaning
    x            x                 server's model
    x_i          w                 local model
    pi_i         y                 dual, n times the paper's, equal to -grad f_i(w) after an exact step
    sigma_i      sigma             penalty r0 r_i, n times the paper's, the same for all clients
    z_i          u                 x_i + pi_i/sigma_i
    r_i          r                 curvature of the linearized step
    k_0          iterations        dual steps between two communications
    eps_i, nu_i  eps, shrink       tolerance of a local problem, multiplied by nu in every dual step

Client state: 2d + 2 values (w, y, eps, r). The server stores every client's last u and r. Traffic per round: d + 1
values down and up.

Deviations: duals, penalty and gradients omit the paper's factor 1/n, and eps omits 1/n^2. The mean is weighted by the
clients' shares. The paper's formula for r_i applies to linear models. Here, r_i starts at 1/lr and is adapted. If the
curvature k along the last step exceeds 2 (r + sigma), r is set to k/2, which ensures that L decreases. If ||change of
g|| < r/4 ||change of w||, r is reduced, but at most by half and never below sigma. With r = k, networks would become
sharper and sharper (Roulet et al., arXiv:2407.06183). The value of r that is sent is limited to the range from e^-10/lr
to e^10/lr, so that a client of weight w changes sigma by at most the factor e^(20 w). All clients share the same sigma,
which is r0 times the geometric mean of the r_i. sigma is updated only if it differs from this value by a factor above
1.9, because the u of absent clients was computed with an older sigma. If ``rho`` is set, sigma and r are fixed, and r_i
= 1/lr. Epochs, steps and batch size have no effect. The schedule has no effect either, unless a batch size is set.
Public code: ShenglongZhou/FedADMM (6525b2ae), run in Octave, produces the same x to within 1e-15, with ``rho`` and
equal r_i, once its dual step starts at x_i instead of x and evaluates the gradient there.

Defaults: r0 = 1/inner, and up to five linearized steps (six full gradients), which cover 0.6 of the way to a solution.

Use this method if full gradients are cheap to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Kept, by_rule
from fedloom.local import Ctx, Work, iterate
from fedloom.rows.algebra import norm, total

FARTHEST = 1.0  # largest absolute curvature


class Server(NamedTuple):
    """Model x ``[d]`` and penalty sigma ``[1]``."""

    x: Tensor
    sigma: Tensor


class Client(NamedTuple):
    """Local model w and dual y, both ``[m, d]``, with tolerance eps and curvature r, both ``[m, 1]``."""

    w: Tensor
    y: Tensor
    eps: Tensor
    r: Tensor


class Up(NamedTuple):
    """Message u ``[m, d]`` and curvature ``[m, 1]``, where the curvature is log(r lr)/10.

    The curvature is small compared to u, so it survives clipping and noise.
    """

    u: Annotated[Tensor, Kept(primary=True)]
    curvature: Annotated[Tensor, Kept()]


class _Solve(NamedTuple):
    w: Tensor
    y: Tensor
    eps: Tensor
    r: Tensor
    residual: Tensor
    sigma: Tensor
    towards: Tensor


class FedADMMInexact(Algorithm):
    """Inexact FedADMM (Zhou and Li 2023, Algorithm 1)."""

    r0: Derived = by_rule(description="penalty ratio sigma/r (default: 1/inner; 0.5 and 0.05 in the MATLAB code)")
    rho: float | None = Field(None, gt=0, description="fixed penalty instead of r0 * r_i. Sets r_i to 1/lr")
    iterations: int = Field(1, ge=1, description="k_0, number of dual steps per round (5 or more in the paper)")
    inner: int = Field(5, ge=1, description="maximum number of linearized steps per dual step (3 in the MATLAB code)")
    eps0: PositiveFloat | Literal["matlab"] = Field(1e-6, description="initial tolerance ('matlab': (n * k_0)^2)")
    shrink: float = Field(0.95, ge=0.5, lt=1, description="nu, tolerance decay factor per dual step (MATLAB code)")

    plain_sgd: ClassVar[str | None] = "its local steps are linearized ADMM steps, which use no momentum"
    needs: ClassVar[Mapping[str, str]] = {"r0": "rho None"}
    paper: ClassVar[Mapping[str, Any]] = {"rho": 1.0, "iterations": 5, "inner": 3, "eps0": "matlab"}

    @property
    def full_gradients(self) -> str:
        return "FedADMMInexact"

    @property
    def ignored(self) -> tuple[str, ...]:
        return ("batch_size", "epochs", "steps", *(() if self.rho else ("schedule",)))

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"r0": 1 / self.inner}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, Up]:
        eps = x0.new_tensor([(ctx.n * self.iterations) ** 2 if self.eps0 == "matlab" else self.eps0])
        penalty = self.rho or (self.r0 or 1 / self.inner) / ctx.local.lr
        r, sigma = x0.new_tensor([1 / ctx.local.lr]), x0.new_tensor([penalty])
        return Server(x0, sigma), Client(x0, torch.zeros_like(x0), eps, r), Up(x0, torch.zeros_like(r))

    def client(self, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        def linearised(s: _Solve, work: Work) -> _Solve:
            work.count_steps()
            step, before = s.residual / (s.r + s.sigma), s.residual.clone()
            s.w.sub_(step)  # x_i = (r x_i + sigma x - pi_i - g_i)/(r + sigma)
            residual_(s, work)
            change = before.sub_(s.residual).sub_(step * s.sigma)  # g(w) - g(w')
            slope, along = norm(change) / norm(step), total(change * step) / norm(step).square()
            lower = torch.where(slope > 0, torch.maximum(4 * slope, s.r / 2).maximum(s.sigma).minimum(s.r), s.r)
            return s if self.rho else s._replace(r=torch.where(along > 2 * (s.r + s.sigma), along / 2, lower))

        def residual_(s: _Solve, work: Work) -> Tensor:  # g_i + pi_i + sigma (x_i - x)
            return work.add_full_grad_(torch.addcmul(s.y, s.w, s.sigma, out=s.residual).sub_(s.towards), s.w)

        def close(s: _Solve, work: Work) -> Tensor:
            return norm(s.residual).square() < s.eps * work.layout.d  # ||.||^2 < eps_i d

        def dual(s: _Solve, work: Work) -> _Solve:
            s = iterate(linearised, s, work, self.inner, batches=0, until=close)
            for rows in (s.y, s.residual):
                rows.addcmul_(s.w, s.sigma).sub_(s.towards)  # pi_i += sigma (x_i - x)
            return s._replace(eps=self.shrink * s.eps)

        w, y, eps, sigma = rows.w, rows.y, rows.eps, down.sigma.expand_as(rows.r)
        r = torch.full_like(rows.r, 1 / work.lr) if self.rho else rows.r
        start = _Solve(w.clone(), y.clone(), eps, r, torch.empty_like(w), sigma, sigma * down.x)
        residual_(start, work)
        w, y, eps, r, *_ = iterate(dual, start, work, self.iterations * (work.steps > 0), batches=0)
        curvature = torch.zeros_like(r) if self.rho else ((r * work.local.lr).log() / 10).clamp(-FARTHEST, FARTHEST)
        return Up(torch.addcdiv(w, y, sigma), curvature), Client(w, y, eps, r)  # z_i / sigma

    def ranges(self, down: Server, up: Up, work: Work) -> dict[str, tuple[float, float]]:
        return {"curvature": (-FARTHEST, FARTHEST)}

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        old = server.sigma  # x = sum z_i / sum sigma_i over ALL clients
        mean = old if self.rho else (self.r0 / ctx.local.lr * (10 * up.curvature).exp()).to(old)
        return Server(up.u, torch.where((mean / old).log().abs() > 0.64, mean, old))  # 0.64 = log 1.9
