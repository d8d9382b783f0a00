"""FedProx: FedAvg in which local training is pulled toward the server's model.

Problem: min over x of sum_i alpha_i f_i(x).

Reference: T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, arXiv:1812.06127v5, Algorithm 2.

    paper    here    meaning
    w^t      x       server's model
    w_k      w       inexact minimizer of h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2
    mu       mu      strength of the pull

Client state: none. Traffic per round: d values down, d up.

Deviations: stragglers are not simulated, so every client takes all of its steps. Clients are drawn uniformly and
weighted by their numbers of samples. In the paper, clients are drawn with probability p_k and averaged uniformly
(sampler ``size-weighted``).

Defaults: mu = 1/(3 reach), where reach is the distance covered in a round (lr times the mean number of steps). With c =
mu reach, the model moves (1 - exp(-c))/c = 0.85 times as far in a round as in FedAvg. A stronger pull slows down
training, and a weaker pull has no measurable effect.

Public code: the clients of TsingZ0/PFLlib (d832e76f) give the same models to within 1e-15.

Use this method if local training drifts, as it does with few rounds and many local steps. The pull slows clients down
as much as it stabilizes them. With one local step, the method is equivalent to FedAvg, and a warning is issued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedloom.algorithms._base import Algorithm, Delta, DerivedFrom0, Model, by_rule
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.layout import Layout


class FedProx(Algorithm):
    """FedProx (Li et al. 2020, Algorithm 2)."""

    mu: DerivedFrom0 = by_rule(
        description="weight of the proximal term (default: 1/(3 * reach), where reach is lr times the steps per "
        "round; the paper tunes it over 0.001 to 1, Sec. 5.1)"
    )

    weighs_partial: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Any]] = {"mu": 0.01}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"mu": 1 / (3 * ctx.reach)}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        most = ctx.local.steps or ctx.local.epochs * max(map(ctx.local.batches, ctx.sizes[:, 0].tolist()))
        plain = "FedProx with one local step is the same as FedAvg. Set a larger local.epochs or local.steps"
        return [] if most > 1 else [plain]

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        w = descend(down.x, work, pull=((self.mu, down.x),))  # Eq. 2: min F_k(w) + mu/2 ||w - w^t||^2
        return Delta(w - down.x), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)  # w^{t+1} = mean of w_k^{t+1}
