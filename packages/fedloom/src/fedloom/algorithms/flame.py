"""FLAME: personalized federated learning by ADMM on the Moreau envelope, with personal, global and hybrid models.

Problem: min sum_i alpha_i (f_i(theta_i) + lam/2 ||theta_i - w_i||^2) + g(w) subject to w_i = w. In the paper, g = 0.

Reference: S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao, Z. Peng, "On ADMM in Heterogeneous Federated Learning:
Personalization, Robustness, and Fairness", Algorithm 1, Eqs. 11-14 (public code: zsk66/FLAME). The method is unrelated
to the backdoor defense FLAME of Nguyen et al. (USENIX Security 2022).

    paper      here          meaning
    theta_i    theta         personal model
    w_i, w     w, x          local copy of the global model, and the global model
    pi_i       pi            dual of w_i = w
    u_i        u             message w_i + pi_i / rho
    lambda     lam           Moreau weight
    rho        rho           ADMM penalty
    alpha_i    work.weight   the client's share, 1/m in the paper
    H          local.epochs  epochs of the theta step
    eps_i      eps           tolerance of the theta step, if ``eps0`` is given
    upsilon_i  shrink        eps <- upsilon eps in every round of the client

Client state: 3d + 1 values (theta, w, pi, eps). Traffic per round: d values down, d up. The server stores every
client's last u.

Deviations: the theta step starts at the client's theta, and theta is pulled to the client's w_i^t, as in Eq. 11. In the
public code, theta is pulled to the received w (``centre = "received"``), and w_i and pi_i are updated after every epoch
(``dual = "epoch"``), so the next epoch is pulled to the new w_i. With ``eps0``, the theta step is gradient descent
until the client's tolerance is reached (Eqs. 17, 18), but for at most ``most`` steps. The run's epochs and batch size
then have no effect. Public code: with these two options, the clients of zsk66/FLAME (215a04b2) produce the same models
and duals to within 1e-15. The clients of its predecessor zsk66/FLAME-master (5a7bf7c5) produce the same results with
only the received w, and follow Eq. 11 once theta is pulled to w_i^t.

Defaults: lam = 4/(reach rounds), where reach is the distance covered in a round (lr times the mean number of steps). If
the gradient is constant, a personal model then moves as far from the global model as local training moves in a quarter
of the run. A client with enough data therefore has time to learn from its data. With lam = 1/(reach rounds), the models
would be tied together only toward the end. rho is lam/n, the mean of lam alpha_i. If shares are equal, w is then the
mean of the theta_i in every round. Theorem 1 also requires (lam alpha_i/rho)^2 (1 + rho) < (lam alpha_i + rho)/2. A
small rho violates this condition, as do the paper's own values.

Diagnostics (``residuals``): the augmented Lagrangian is recorded, which decreases in every round if lam and rho satisfy
Lemma 1. The primal residual is the distance between all w_i and w. The dual residual is the distance between all
-alpha_i grad f_i(theta_i) and pi_i.

An extension of the paper: ``regulariser`` is g, and Eq. 14 becomes w = prox_{g/(n rho)}(mean of u_i). The result is a
sparse or low-rank global model together with personal models. At a fixed point, w_i = w, pi_i = lambda alpha_i (theta_i
- w), and the sum of the pi_i is in dg(w). ``solver = "criterion"`` ends the theta step when FIAELT's criterion (9)
holds: gradient descent runs until the distance between theta and the minimizer has shrunk by the factor sqrt(r). This
criterion requires lambda > L, where L is the smoothness of f_i. Then the envelope F_i of f_i is l-smooth with l =
alpha_i lambda max(1, L/(lambda - L)), and FLAME is FIAELT's scheme (tau = 1, beta = rho) for min sum_i F_i + g with x_i
= w_i. The theorems about this scheme require (9) for w_i. If theta is exact, Eq. 12 satisfies (9) with the tolerance r
for rho >= l (3 + 2/sqrt(r)), but none of the defaults satisfies this condition.

Use this method to train personal models and a global model for clients with skewed labels. A client's hybrid model is
whichever of the two is better on its validation set. If most clients are absent, the global model moves little, and a
warning is issued. A personal model is then hardly better than a local model. No values of lam and rho that were tried
change this. A client's first message is x + 2c/(c + 1) (theta - x), with c = lam alpha_i/rho, so it contributes less
than twice its change. n messages are averaged, and clients that have never participated still contribute x0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms._base import Derived, Model, Point, Sent, by_rule
from fedloom.algorithms._regulariser import Regulariser, penalty, proximal
from fedloom.algorithms._theta_step import ThetaStep
from fedloom.local import Ctx, Work
from fedloom.local.dual import Residuals, epochs_with_dual, residuals_of


class Client(NamedTuple):
    """Personal model theta, local copy w and dual pi ``[m, d]``, and tolerance eps ``[m, 1]`` (0 without ``eps0``)."""

    theta: Tensor
    w: Tensor
    pi: Tensor
    eps: Tensor


class Down(NamedTuple):
    """The server's model x ``[d]``."""

    x: Annotated[Tensor, Sent(prox="regulariser")]


class FLAME(ThetaStep):
    """FLAME (Algorithm 1)."""

    rho: Derived = by_rule(description="ADMM penalty rho (default: lam/n; 0.1 in Table III)")
    centre: Literal["own", "received"] = Field(
        "own", description="center of the prox for theta: the client's w_i (Eq. 11), or the received w (public code)"
    )
    dual: Literal["round", "epoch", "none"] = Field(
        "round",
        description="update w_i and pi_i once per round (Algorithm 1) or every epoch (public code), or set pi_i "
        "to 0 (IV-E)",
    )
    regulariser: Regulariser = Field(None, description="regularizer g of the global model (the paper uses none)")
    residuals: bool = Field(
        False, description="record the Lagrangian and both residuals, computed from the gradients of all samples"
    )

    family: ClassVar[str] = "personalised"
    uses_shares: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Any]] = {"lam": 1.0, "rho": 0.1}
    released: ClassVar[Mapping[str, Any]] = {"lam": 1.0, "rho": 0.1, "centre": "received", "dual": "epoch"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        lam = self.lam or 4 / (ctx.reach * ctx.rounds)
        return {"lam": lam, "rho": lam * float(ctx.weight.new_tensor(1 / ctx.n))}

    @model_validator(mode="after")
    def _has_epochs(self) -> Self:
        if self.dual == "epoch" and (self.eps0 is not None or self.solver == "criterion"):
            raise ValueError(
                f"dual = 'epoch' needs epochs, but with {'eps0' if self.eps0 else 'solver'} a round "
                "has no epochs. Omit one of the two"
            )
        return self

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, Point]:
        return Model(x0), Client(x0, x0, torch.zeros_like(x0), x0.new_tensor([self.eps0 or 0.0])), Point(x0)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Point, Client]:
        x, (theta, w, pi, eps) = down.x, rows
        pull = self.lam * work.weight  # lambda alpha_i
        centre = w if self.centre == "own" else x.expand_as(w)
        if self.dual == "epoch":
            theta, w, pi = epochs_with_dual(theta, centre, pi, x, work, self.lam, self.rho)
            return Point(w + pi / self.rho), Client(theta, w, pi, eps)
        theta, eps = self.theta_step(theta, centre, eps, work)  # Eq. 11: theta_i ~ prox_{f_i/lambda}(w_i)
        w = (pull * theta + self.rho * x - pi) / (pull + self.rho)  # Eq. 12
        if self.dual == "round":
            pi = pi + self.rho * (w - x)  # Eq. 13
        return Point(w + pi / self.rho), Client(theta, w, pi, eps)  # the message u_i of Algorithm 1

    def server(self, server: Model, up: Point, ctx: Ctx) -> Model:
        x = proximal(self.regulariser, up.u, 1 / (ctx.n * self.rho), ctx.layout)
        return Model(x)  # Eq. 14: w = (1/m) sum over ALL clients of w_i + pi_i/rho

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return rows.theta

    def observe(self, down: Down, rows: Client, work: Work) -> Residuals | None:
        return residuals_of(*rows[:3], down.x, work, self.lam, self.rho) if self.residuals else None

    def diagnostics(self, server: Model, total: Residuals | None, ctx: Ctx) -> dict[str, float]:
        g = penalty(self.regulariser, server.x, ctx.layout)
        roots = {} if total is None else {"primal_residual": total.primal.sqrt(), "dual_residual": total.dual.sqrt()}
        figures = {} if total is None else {"lagrangian": total.lagrangian + g, **roots}
        return {name: float(figure) for name, figure in figures.items()}
