"""pFedMe: personal models are proximal points of the global model, which descends on their Moreau envelopes.

Problem: min over w of sum_i alpha_i F_i(w), F_i(w) = min over theta_i of f_i(theta_i) + lam/2 ||theta_i - w||^2.

Reference: C. T. Dinh, N. H. Tran, T. D. Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
arXiv:2006.08848, Algorithm 1 (public code: CharlieDinh/pFedMe).

    paper      here             meaning
    w_t        x                server's model
    w_i        w                local copy of the global model
    theta_i    theta            personal model, proximal point of w_i on one batch
    lambda     lam              Moreau weight
    eta        eta              step size of w_i, which becomes theta_i if eta lam = 1
    K          inner            number of SGD steps on one batch, with step size ``personal_lr``
    R          local.steps      local rounds
    beta       beta             server step size

Client state: d values (theta). Traffic per round: d values down, d up.

Deviations: theta starts every round at the received model and is carried over from batch to batch, as in the public
code. With ``theta = "kept"``, theta starts at the client's last theta, as in FLAME's public code, which also updates
w_i only once per epoch (``moves = "epoch"``). A number of steps, K, replaces the paper's accuracy nu. The public code
trains all clients but averages only the sampled clients. Here, only the sampled clients train. In the inner steps, the
public code uses a weight decay of 0.001, and FLAME's public code uses a momentum of 0.5. Here, both of them are
settings of the run.

Defaults: lam = 1/reach, where reach is the distance covered in a round (lr times the mean number of steps), so a round
balances the pull and the data. With eta = 1/lam, w_i is moved to theta_i.

Public code: the clients of TsingZ0/PFLlib (d832e76f) produce the same models to within 1e-15, without the weight decay
of 0.001 in that code.

Use this method for personal models. The method has one more parameter than Ditto has. With R > 1, the limit of the
method does not minimize the Moreau envelopes unless all curvatures are equal, whereas FLAME's limit always does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Derived, Model, by_rule
from fedloom.local import Batch, Ctx, Work, iterate, step_


class Client(NamedTuple):
    """Personal model theta ``[m, d]``."""

    theta: Tensor


class _Rows(NamedTuple):
    w: Tensor
    theta: Tensor
    velocity: Tensor | None


class PFedMe(Algorithm):
    """pFedMe (Dinh et al. 2020, Algorithm 1)."""

    lam: Derived = by_rule(
        description="Moreau weight lambda (default: 1/reach, where reach is lr times the steps per round; 15 for "
        "MNIST in the experiments)"
    )
    eta: Derived = by_rule(description="step size for w_i (default: 1/lam; 0.005 in the experiments)")
    inner: int = Field(5, ge=1, description="K, number of steps on one batch (5 in the experiments)")
    personal_lr: float | None = Field(None, gt=0, description="step size for theta (default: the local step size)")
    beta: float = Field(
        1.0, gt=0, description="server step size beta (1 in the experiments; 2 in those with tuned parameters)"
    )

    theta: Literal["received", "kept"] = Field(
        "received",
        description="starting point of theta: the received model (public code), or the client's last theta "
        "(FLAME's code)",
    )
    moves: Literal["batch", "epoch", "round"] = Field(
        "batch", description="update w_i after every batch (Algorithm 1), every epoch (FLAME's code), or once per round"
    )

    family: ClassVar[str] = "personalised"
    paper: ClassVar[Mapping[str, Any]] = {"lam": 15.0, "eta": 0.005}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        lam = self.lam or 1 / ctx.reach
        return {"lam": lam, "eta": 1 / lam}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:
        rate = work.lr if self.personal_lr is None else self.personal_lr

        def local_round(r: _Rows, work: Work, batch: Batch) -> _Rows:
            pull = rate * self.lam
            towards = pull * r.w
            for _ in range(self.inner):  # Algorithm 1: theta ~ argmin f_i(theta; batch) + lam/2 ||theta - w||^2
                if r.velocity is None:
                    step_(r.theta, work, batch, rate, keep=1 - pull, steady=towards)
                else:
                    g = work.grad(r.theta, batch).add_(r.theta - r.w, alpha=self.lam)
                    r.theta.sub_(r.velocity.mul_(work.local.momentum).add_(g), alpha=rate)
            if self.moves == "batch":
                r.w.lerp_(r.theta, self.eta * self.lam)  # w <- w - eta grad F_i = w - eta lam (w - theta)
            else:
                r.w.lerp_(r.theta, self.eta * self.lam * work.ends(self.moves).to(r.w))
            return r

        theta = rows.theta.clone() if self.theta == "kept" else down.x.expand(work.m, -1).clone()
        velocity = torch.zeros_like(theta) if work.local.momentum else None
        w, theta, _ = iterate(local_round, _Rows(down.x.expand(work.m, -1).clone(), theta, velocity), work)
        return Delta(w.sub_(down.x)), Client(theta)

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + self.beta * up.dw)  # w_{t+1} = (1 - beta) w_t + beta sum_i w_i / S

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        return rows.theta
