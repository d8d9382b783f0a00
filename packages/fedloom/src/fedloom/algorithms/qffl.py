"""q-FFL: losses are raised to the power q + 1, which gives more weight to clients with large losses.

Problem: min over x of sum_i alpha_i f_i(x)^(q+1) / (q + 1).

Reference: T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020,
arXiv:1905.10497v2, Algorithm 2 (q-FedAvg).

    paper      here                  meaning
    w^t        x                     server's model
    w_k        w                     client's model after local SGD
    L          lipschitz             Lipschitz estimate, which is 1/eta
    Dw_k       L (x - w)             pseudo-gradient
    Delta_k    -L dw, L = lipschitz  F_k^q(x) Dw_k
    h_k        L h                   upper estimate of the local Lipschitz constant

Client state: none. Traffic per round: d values down, d + 1 up (dw, h), both as means.

Deviations: Delta_k and h_k are divided by L before they are sent, with the sign of a difference. With q = 0, dw is
therefore the change of the model. Losses below 1e-10 are set to 1e-10, as in the public code. The run's sampler chooses
the cohort. In the paper, clients are drawn with probability p_k (sampler ``size-weighted``). The loss is the loss of
the received model on the client's whole training set. Clients send the change multiplied by F_k^q. For weighers and
samplers, a client's model is therefore x + dw.

Public code: with L = "step", the server of litian96/fair_flearn (f097971) produces the same models to within 1e-11.

Defaults: L = 1/reach, where reach is the distance covered in a round (lr times the mean number of steps), so that a
round is treated as one step of this size. With the paper's value 1/lr, every local step would be treated as a round.

Attackers: h_k grows with the square of the model's change. A forged model that is far from x therefore increases sum
h_k, so that the server takes a short step. With this step, x moves less than in FedAvg, but the progress of honest
clients is also slower.

Use this method to make accuracies more even over clients, at some cost to the mean accuracy. Tune q. With q = 0, the
method is equivalent to FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, WrapValidator
from torch import Tensor

from fedloom.algorithms._base import AS_IT_IS, Algorithm, Mean, Model, by_rule
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.values import or_derived

MIN_LOSS = 1e-10
"""Smallest loss. Losses below this value are replaced by it, so that their powers are finite."""


class Up(NamedTuple):
    """dw ``[m, d]``, which is F_k^q times the change of the model, and the Lipschitz estimate h ``[m, 1]``."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    h: Annotated[Tensor, Mean()]


class QFFL(Algorithm):
    """q-FFL by q-FedAvg (Li et al. 2020, Algorithm 2)."""

    q: float = Field(
        1.0,
        ge=0,
        description="degree of fairness; 0 is equivalent to FedAvg (Sec. 4 tunes it over {0.001, 0.01, 0.1, 1, 2, 5, "
        "...})",
    )
    lipschitz: Annotated[Annotated[float, Field(gt=0)] | Literal["step"], WrapValidator(or_derived), AS_IT_IS] = (
        by_rule(
            description="Lipschitz constant L (default: 1/reach, where reach is lr times the steps per round); "
            "'step' uses 1 / (the round's step size) (Sec. 3.3)"
        )
    )

    family: ClassVar[str] = "fair"
    paper: ClassVar[Mapping[str, Any]] = {"lipschitz": "step"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"lipschitz": 1 / ctx.reach}

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        change = descend(down.x, work) - down.x  # -Dw_k / L
        return self._upload(change, self._loss(down, work), work), rows

    def encode(self, model: Tensor, down: Model, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return self._upload(model - down.x, self._loss(down, work), work), rows

    def decode(self, down: Model, rows: Nothing, up: Up, work: Work) -> Tensor:
        scale = self._loss(down, work) ** self.q
        return down.x + torch.where(scale > 0, up.dw / scale, 0.0)

    def _loss(self, down: Model, work: Work) -> Tensor:
        return work.loss(down.x).clamp(min=MIN_LOSS)  # F_k(w^t)

    def _upload(self, change: Tensor, f: Tensor, work: Work) -> Up:
        q, lipschitz = self.q, 1 / work.lr if self.lipschitz == "step" else self.lipschitz
        square = (change * change).sum(1, keepdim=True)
        h = q * f ** (q - 1) * lipschitz * square + f**q  # h_k / L
        return Up(f**q * change, h)  # -Delta_k / L

    def ranges(self, down: Model, up: Up, work: Work) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """Return the range of h = q L |dw|^2 F^(-q-1) + F^q over all losses F, for this length of dw."""
        q, lipschitz = self.q, 1 / work.lr if self.lipschitz == "step" else self.lipschitz
        square = (up.dw * up.dw).sum(1, keepdim=True)
        if not q:
            return {"h": (1.0, 1.0)}
        f = ((q + 1) * lipschitz * square) ** (1 / (2 * q + 1))
        f = f.clamp(min=MIN_LOSS)
        return {"h": (q * lipschitz * square * f ** (-q - 1) + f**q, math.inf)}

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(server.x + up.dw / up.h)  # w^{t+1} = w^t - sum Delta_k / sum h_k
