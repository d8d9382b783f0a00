"""Lp-Proj: a p-norm ties personal models together in a low-dimensional random subspace.

Problem: min over w of sum_i alpha_i F_i(w), where F_i(w) = min over theta_i of f_i(theta_i) + lam/p ||w - P
theta_i||_p^p.

Reference: S. Lin, Y. Han, X. Li, Z. Zhang, "Personalized Federated Learning towards Communication Efficiency,
Robustness and Fairness", NeurIPS 2022 (public code: desternylin/perfed).

    paper      here             meaning
    w          w                global point in the subspace, on the server
    w_i        w                local copy of w
    theta_i    theta            personal model
    P          projection       random matrix with rows of length 1, the same for all clients
    d_sub      dim              dimensions of the subspace (with None, P is the identity)
    eta        eta              step size of w_i
    beta       beta             server step size

Client state: d values (theta). Traffic per round: d_sub + 2 values down (w, and the key from which P is drawn), d_sub
up.

Deviations: w starts at zero, as in the public code. For p > 1, the step of w_i in the public code uses the norm instead
of the p-th power of the norm divided by p, unless p = 2. Here, the step uses the term in the stated problem. For p = 1,
both are the same. A local round consists of the run's local steps of theta (20 in the public code), followed by one
step of w_i. Only sampled clients train. In the public code, all clients train.

Public code: clients and server of desternylin/perfed (33c68d77) produce the same theta and w to within 1e-15, for p = 1
(``lp_proj``), for p = 2 (``proj``), and for other p once the norm is omitted from the step of w_i. In ``lp_proj``,
weight decay has no effect. If P is the identity, w starts at the model of the server.

Defaults: lam = 1/(reach sqrt(rounds)), where reach is the distance covered in a round (lr times the mean number of
steps). For p = 1, the signs that are summed over a run then remain of order one. eta = reach, and there is one local
round with the run's local steps.

Use this method against attackers (p = 1 bounds the effect of a single client on w), or if uploads must be tiny. The
method has no global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, DerivedFrom0, Mean, by_rule
from fedloom.local import Batch, Ctx, Work, iterate, step_
from fedloom.rows.projection import new_key, projection


class Server(NamedTuple):
    """Global point w ``[dim]`` of the subspace, and the key ``[2]`` of the projection. Both are sent to clients."""

    w: Tensor
    key: Tensor


class Client(NamedTuple):
    """Personal model theta ``[m, d]``."""

    theta: Tensor


class Up(NamedTuple):
    """Change dw ``[m, dim]`` of the point in the subspace, relative to the received point."""

    dw: Annotated[Tensor, Mean(base="down.w", primary=True)]


class _Rows(NamedTuple):
    theta: Tensor
    w: Tensor


class LpProj(Algorithm):
    """Lp-Proj (Lin et al. 2022)."""

    p: float = Field(1.0, ge=1, le=2, description="order p of the norm (1 or 2 in the paper)")
    lam: DerivedFrom0 = by_rule(
        description="weight lambda (default: 1/(reach * sqrt(rounds)), where reach is lr times the steps per "
        "round; 15 in the public code)"
    )
    dim: int | None = Field(
        10,
        ge=1,
        description="d_sub, the dimension of the projection (the public code uses 10; None: P is the identity)",
    )
    eta: Derived = by_rule(
        description="step size for w_i (default: reach, which is lr times the steps per round; 0.1 in the public code)"
    )
    local_rounds: int = Field(1, ge=1, description="number of local rounds (5 in the public code)")
    beta: float = Field(1.0, gt=0, description="server step size beta (1 in the public code)")

    family: ClassVar[str] = "personalised"
    projects: ClassVar[bool] = True
    plain_sgd: ClassVar[str | None] = "its steps are plain steps along the gradient of a norm in a subspace"
    paper: ClassVar[Mapping[str, Any]] = {"lam": 15.0, "eta": 0.1, "local_rounds": 5}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"lam": 1 / (ctx.reach * ctx.rounds**0.5), "eta": ctx.reach}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        key = new_key(ctx.rng("projection"))
        return Server(x0.new_zeros(self.dim or len(x0)), key), Client(x0), None

    def client(self, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        p = projection(down.key, self.dim, rows.theta, work.projection)

        def slope(r: _Rows) -> Tensor:  # gradient of 1/p ||v||_p^p at v = w - P theta
            v = r.w - p(r.theta)
            return v.sign() * v.abs() ** (self.p - 1)

        def personal(r: _Rows, work: Work, batch: Batch) -> _Rows:
            step_(r.theta, work, batch, work.lr, steady=p.back(work.lr * self.lam * slope(r)))
            return r

        def local_round(r: _Rows, work: Work) -> _Rows:
            r = iterate(personal, r, work, stream=("local", work.k))
            return r._replace(w=r.w - self.eta * self.lam * slope(r))

        start = _Rows(rows.theta.clone(), down.w.expand(work.m, -1))
        theta, w = iterate(local_round, start, work, self.local_rounds * (work.steps > 0), batches=0)
        return Up(w - down.w), Client(theta)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        return server._replace(w=server.w + self.beta * up.dw)  # (1 - beta) w + beta mean of w_i

    def personal(self, down: Server, rows: Client, work: Work) -> Tensor:
        return rows.theta
