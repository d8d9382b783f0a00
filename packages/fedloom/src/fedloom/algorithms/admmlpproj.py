"""ADMM-Lp-Proj-2: FLAME in a random subspace.

Problem: min sum_i alpha_i (f_i(theta_i) + lam/2 ||P theta_i - w_i||^2) subject to w_i = w, P a fixed random matrix.

Reference: S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao, Z. Peng, "On ADMM in Heterogeneous Federated Learning:
Personalization, Robustness, and Fairness", Appendix C, Algorithm 2, Eqs. 183-188 (public code: zsk66/FLAME).

    paper      here          meaning
    theta_i    theta         personal model
    w_i, w     w             local copy of the global point in the subspace, and the global point
    pi_i       pi            dual of w_i = w
    u_i        u             message w_i + pi_i / rho
    P          projection    random matrix with rows of length 1, the same for all clients
    d_sub      dim           dimensions of the subspace (with None, P is the identity and the method is FLAME)
    lambda     lam           weight of the distance
    rho        rho           ADMM penalty
    alpha_i    work.weight   the client's share

Client state: d + 2 d_sub values (theta, w, pi). Traffic per round: d_sub + 2 values down (w, and the key from which P
is drawn), and d_sub up. The server stores every client's last u.

Deviations: "z" in line 5 of Algorithm 2 is read as u. The public code never updates w_i and pi_i. Defaults are FLAME's.

Public code: the clients of zsk66/FLAME (215a04b2) produce the same theta, w_i, pi_i and w to within 1e-15, once their
code updates w_i and pi_i and pulls theta to the client's own w_i. In their code, weight decay acts on the pull, which
overwrites theta.

Defaults: lam = 1/reach, where reach is the distance covered in a round (lr times the mean number of steps), and rho =
lam/n, which is the mean of lam alpha_i. Only ten of the model's many directions are coupled between clients. Unless dim
is increased, the models therefore stay close to the models of local training, and a warning is issued.

Use this method like Lp-Proj with p = 2. Unlike Lp-Proj, it has no step size for w_i. The method has no global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Point, by_rule
from fedloom.local import Batch, Ctx, Work, iterate, step_
from fedloom.rows.layout import Layout
from fedloom.rows.projection import new_key, projection


class Server(NamedTuple):
    """Global point w ``[dim]`` of the subspace, and the key ``[2]`` of the projection. Both are sent to clients."""

    w: Tensor
    key: Tensor


class Client(NamedTuple):
    """Personal model theta ``[m, d]``, local copy w of the global point and its dual pi, both ``[m, dim]``."""

    theta: Tensor
    w: Tensor
    pi: Tensor


class ADMMLpProj(Algorithm):
    """ADMM-Lp-Proj-2 (Zhu et al., Algorithm 2)."""

    lam: Derived = by_rule(
        description="weight lambda (default: 1/reach, where reach is lr times the steps per round; FLAME's Table III "
        "uses 1)"
    )
    rho: Derived = by_rule(description="ADMM penalty (default: lam/n; FLAME's Table III uses 0.1)")
    dim: int | None = Field(
        10,
        ge=1,
        description="d_sub, the dimension of the projection (the public code uses 10; None: P is the identity)",
    )

    family: ClassVar[str] = "personalised"
    uses_shares: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    plain_sgd: ClassVar[str | None] = "its theta steps are plain gradient steps with a penalty in a subspace"
    paper: ClassVar[Mapping[str, Any]] = {"lam": 1.0, "rho": 0.1}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        lam = self.lam or 1 / ctx.reach
        return {"lam": lam, "rho": lam * float(ctx.weight.new_tensor(1 / ctx.n))}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.dim is None or 50 * self.dim >= layout.d:
            return []
        return [
            f"ADMMLpProj couples the models in only {self.dim} of {layout.d:,} directions, so the models are nearly "
            "those of local training. Set a larger dim, or use flame, which couples all directions"
        ]

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, Point]:
        key = new_key(ctx.rng("projection"))
        w = projection(key, self.dim, x0, ctx.projection)(x0)
        return Server(w, key), Client(x0, w, torch.zeros_like(w)), Point(w)

    def client(self, down: Server, rows: Client, work: Work) -> tuple[Point, Client]:
        p = projection(down.key, self.dim, rows.theta, work.projection)

        def step(r: Client, work: Work, batch: Batch) -> Client:
            step_(r.theta, work, batch, work.lr, steady=p.back(work.lr * self.lam * (r.w - p(r.theta))))
            return r

        theta, w, pi = iterate(step, rows._replace(theta=rows.theta.clone()), work)  # Eq. 185
        pull = self.lam * work.weight  # lambda alpha_i
        w = (pull * p(theta) + self.rho * down.w - pi) / (pull + self.rho)  # Eq. 186
        pi = pi + self.rho * (w - down.w)  # Eq. 187
        return Point(w + pi / self.rho), Client(theta, w, pi)

    def server(self, server: Server, up: Point, ctx: Ctx) -> Server:
        return server._replace(w=up.u)  # Eq. 188

    def personal(self, down: Server, rows: Client, work: Work) -> Tensor:
        return rows.theta
