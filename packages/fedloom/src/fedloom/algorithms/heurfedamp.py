"""HeurFedAMP: clients whose models have similar directions attract each other. FedAMP for networks.

Problem: min over w_1..w_n of sum_i f_i(w_i) + lam/(2 alpha) sum_i ||w_i - u_i||^2, where u_i is a mixture of models at
small angles to w_i.

Reference: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated Learning on
Non-IID Data", AAAI 2021, arXiv:2007.03797, Sec. 5. The authors have not published their code.

    paper      here         meaning
    w_i        w            personal model, the last upload of every client
    u_i        u            mixture sent to client i
    xi_ij      xi           weight of client j in u_i, from the angle between w_i and w_j
    xi_ii      self_weight  weight of client i in its own mixture
    alpha_k    alpha        step size of the method, which has an effect only through lam/alpha_k
    lambda     lam          pull of w_i to u_i, lam/alpha_k
    sigma      sigma        sharpness of exp(sigma cos)

Client state: d values (w). Traffic per round: d values down (a different u to every client), d up. The server stores
every w.

Deviations: mixtures are computed over the cohort only. In the paper, all clients participate. The options ``among`` and
``start`` work as in FedAMP.

Public code: clients and server of WwZzz/easyFL (ea07f1d0) produce the same models and mixtures to within 1e-15, with
``start = "server"``, once gradients are set to zero between steps. In their code, gradients accumulate between steps.

Defaults: alpha = reach sqrt(rounds)/2, as in FedAMP. With a constant pull and large steps, a client would never be more
than one step away from u_i.

Use this method for networks, for which distances between models are not meaningful. FedAMP's mixture is a gradient step
on an explicit objective, but HeurFedAMP's mixture is not. The server receives the models of individual clients, so the
method does not support secure aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedloom.algorithms._base import Derived, by_rule
from fedloom.algorithms._mixture import Client, Down, Mixed, Up
from fedloom.choose.mixers import Among, Angles
from fedloom.local import Ctx, Work, descend


class HeurFedAMP(Mixed):
    """HeurFedAMP (Huang et al. 2021, Sec. 5)."""

    lam: float = Field(1.0, ge=0, description="lambda, weight of the attraction between models")
    alpha: Derived = by_rule(
        description="alpha_k, where lam/alpha is the strength of the pull (default: reach * sqrt(rounds)/2, "
        "where reach is lr times the steps per round; 1 in PFLlib)"
    )
    sigma: float = Field(25.0, ge=0, description="sharpness sigma of the weights exp(sigma * cos)")
    self_weight: float | None = Field(
        None, ge=0, le=1, description="weight xi_ii of the client's own model (default: 1/m for m mixed models)"
    )
    start: Literal["own", "server"] = Field(
        "own", description="starting point of local SGD: the client's own w_i, or the mixture u_i"
    )
    among: Among = Field(
        "cohort",
        description="clients whose models are mixed: the round's cohort, all clients seen so far, or all clients",
    )

    paper: ClassVar[Mapping[str, Any]] = {"alpha": 1.0}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"alpha": ctx.reach * ctx.rounds**0.5 / 2}

    def mixer(self, round: int) -> Angles:
        return Angles(sigma=self.sigma, self_weight=self.self_weight, among=self.among)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        w = descend(rows.w if self.start == "own" else down.u, work, pull=((self.lam / self.alpha, down.u),))
        return Up(w), Client(w)
