"""APFL: a personal model that mixes a local model and the global model, with a fixed or learned share.

Problem: min over v_i of f_i(alpha_i v_i + (1 - alpha_i) w*), with w* a minimizer of the global problem.

Reference: Y. Deng, M. M. Kamani, M. Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, Algorithm 1
(public code: MLOPTPSU/FedTorch).

    paper      here     meaning
    w          x        server's model
    w_i        w        client's copy after local SGD
    v_i        v        local part of the personal model
    v-bar_i    mix      alpha v + (1 - alpha) w, where v's gradient is taken
    alpha_i    alpha    share of the local part

Client state: d + 1 values (v, alpha). Traffic per round: d values down, d up.

Deviations: mix is computed before w changes, as in the paper. Weight decay is part of f_i, so it acts on mix. In the
public code (``mix = "after"``), mix contains the new w, and weight decay acts on v. alpha is updated once per round, in
the first local step, and stays in [0, 1], as in the public code. The gradient in the public code is (alpha^2 + (1 -
alpha)^2) times the paper's gradient. The public code takes the gradient at the new v, with a weight decay of 0.02. The
public code mixes outputs instead of parameters, which is equivalent for a linear model.

Public code: the functions of MLOPTPSU/FedTorch (ab8068d), called in the order of that code's loop, produce the same w
and v to within 1e-15, with ``mix = "after"`` and a fixed alpha on a linear model.

Use this method if clients differ in how much they benefit from federation. ``adaptive`` learns the share alpha. With
alpha = 0, the method is equivalent to FedAvg, and with alpha = 1, to Local.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.local import Batch, Ctx, Work, iterate, shrink_, step_


class Client(NamedTuple):
    """Local part v ``[m, d]`` of the personal model, and its share alpha ``[m, 1]``."""

    v: Tensor
    alpha: Tensor


class _Rows(NamedTuple):
    w: Tensor
    v: Tensor
    alpha: Tensor


class APFL(Algorithm):
    """APFL (Deng et al. 2020, Algorithm 1)."""

    alpha: float = Field(
        0.5, ge=0, le=1, description="initial weight of the local model in the mixture (FedSLR's runs use 0.5)"
    )
    adaptive: bool = Field(False, description="learn alpha by gradient descent (the paper's adaptive alpha)")
    mix: Literal["before", "after"] = Field(
        "before",
        description="compute v's gradient at the mixture before (Algorithm 1) or after (public code) w is updated",
    )

    family: ClassVar[str] = "personalised"
    plain_sgd: ClassVar[str | None] = "each of its two models takes one plain SGD step per batch"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0, x0.new_tensor([self.alpha])), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:
        def step(r: _Rows, work: Work, batch: Batch) -> _Rows:
            w, v, alpha = r
            if self.mix == "after":
                step_(w, work, batch, work.lr)
            mix = torch.lerp(w, v, alpha)  # v-bar
            learns = self.adaptive and work.k == 0
            if learns or self.mix == "after":
                g = work.grad(mix, batch) if self.mix == "before" else work.clipped(mix, batch)
                slope = ((v - w) * g).sum(1, keepdim=True)
                if learns:
                    r = r._replace(alpha=(alpha - work.lr * slope).clamp(0, 1))  # alpha -= eta <v - w, grad f_i(v-bar)>
                if self.mix == "after":
                    shrink_(work, v, work.lr)
                v.addcmul_(g, alpha, value=-work.lr)
            else:
                step_(v, work, batch, work.lr * alpha, at=mix)  # factor alpha from the chain rule
            if self.mix == "before":
                step_(w, work, batch, work.lr)
            return r

        w, v, alpha = iterate(step, _Rows(down.x.expand(work.m, -1).clone(), rows.v.clone(), rows.alpha), work)
        return Delta(w.sub_(down.x)), Client(v, alpha)

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        return rows.alpha * rows.v + (1 - rows.alpha) * down.x  # v-bar_i with the mean of all w_i
