"""FedAMP: each client receives a different mixture of models, so that clients with similar models attract each other.

Problem: min over w_1..w_n of sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2), A(t) = 1 - exp(-t/sigma).

Reference: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated Learning on
Non-IID Data", AAAI 2021, arXiv:2007.03797, Algorithm 1. The authors have not published their code.

    paper      here     meaning
    w_i        w        personal model, the last upload of every client
    u_i        u        mixture sent to client i
    xi_ij      xi       weight of client j in u_i
    alpha_k    alpha    step of the mixing
    lambda     lam      pull of w_i to u_i, lam/alpha_k
    sigma      sigma    width of A

Client state: d values (w). Traffic per round: d values down (a different u to every client), d up. The server stores
every w.

Deviations: mixtures are computed over the cohort only. With ``among = "all"``, they are computed over the last models
of all clients. In the paper, all clients participate. In the paper, alpha_k must be small enough that xi_ii is not
negative. Here, if xi_ii would be negative, the other weights are scaled to the sum 1. alpha_k stays constant over
rounds unless ``decay`` is set (in the paper's experiments, it decreases in steps). Local training starts from the
client's own w_i. With ``start = "server"``, it starts at u_i, as in FedACS.

Defaults: alpha = reach sqrt(rounds)/2, where reach is the distance covered in a round (lr times the mean number of
steps). The pull lam/alpha then equals FLAME's pull and is chosen for the same reasons. sigma = 2 (n - 1) alpha, so that
xi_ii is at least 1/2.

Public code: clients and server of TsingZ0/PFLlib (d832e76f) produce the same models to within 1e-15, once the pull is
squared and has a gradient (their code detaches the pull, so that it has no effect).

Use this method with small models, between which distances are meaningful. For networks, use HeurFedAMP instead, which
compares angles. The server receives the models of individual clients, so the method does not support secure
aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedloom.algorithms._base import Derived, by_rule
from fedloom.algorithms._mixture import Client, Down, Mixed, Up
from fedloom.choose.mixers import Among, Proximity
from fedloom.local import Ctx, Work, descend
from fedloom.rows.layout import Layout


class FedAMP(Mixed):
    """FedAMP (Huang et al. 2021, Algorithm 1)."""

    lam: float = Field(1.0, ge=0, description="lambda, weight of the attraction between models")
    alpha: Derived = by_rule(
        description="step size of the mixing (default: reach * sqrt(rounds)/2, where reach is lr times the steps "
        "per round; 1 in PFLlib)"
    )
    sigma: Derived = by_rule(
        description="width sigma of A(t) = 1 - exp(-t/sigma) (default: 2 (n - 1) alpha; 1 in PFLlib)"
    )
    decay: float = Field(
        1.0, gt=0, le=1, description="factor that multiplies alpha_k every ``every`` rounds (0.1 in the experiments)"
    )
    every: int = Field(30, ge=1, description="number of rounds between changes of alpha_k (30 in the experiments)")
    start: Literal["own", "server"] = Field(
        "own", description="starting point of local SGD: the client's own w_i, or the mixture u_i"
    )
    among: Among = Field(
        "cohort",
        description="clients whose models are mixed: the round's cohort, all clients seen so far, or all clients",
    )

    paper: ClassVar[Mapping[str, Any]] = {"alpha": 1.0, "sigma": 1.0}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        alpha = self.alpha or ctx.reach * ctx.rounds**0.5 / 2
        return {"alpha": alpha, "sigma": 2 * max(ctx.n - 1, 1) * alpha}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every != type(self).model_fields["every"].default and self.decay == 1:
            raise ValueError(
                "decay = 1 keeps alpha_k constant, so `every` has no effect. Omit `every`, or set decay < 1"
            )
        return self

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.decay == 1 or ctx.rounds > self.every:
            return []
        few = f"decay starts after {self.every} rounds, but the run has only {ctx.rounds}"
        return [f"FedAMP: {few}, so decay has no effect. Set a smaller every"]

    def _alpha(self, round: int) -> float:
        return self.alpha * self.decay ** ((max(round, 1) - 1) // self.every)  # alpha_k

    def mixer(self, round: int) -> Proximity:
        return Proximity(alpha=self._alpha(round), sigma=self.sigma, among=self.among)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        pull = ((self.lam / self._alpha(work.round), down.u),)
        w = descend(rows.w if self.start == "own" else down.u, work, pull)  # argmin f_i + lam/(2 alpha_k) ||w - u_i||^2
        return Up(w), Client(w)
