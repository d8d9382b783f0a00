"""FedAvg: the average of locally trained models.

Problem: min over x of sum_i alpha_i f_i(x).

Reference: B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017, arXiv:1602.05629v4, Algorithm 1.

    paper    here          meaning
    w_t      x             server's model
    w_k      w             client's model after local SGD
    eta, E   local         step size and epochs

Client state: none. Traffic per round: d values down, d up.

Deviations: none by default. A client is weighted by its share n_k/n of all samples. ``client_weights = "uniform"``
gives the unweighted mean. The server's step may have a length ``server_lr`` other than 1, the value in the paper.

Use this method as the baseline of every comparison. If clients differ and take several local steps, the limit of the
method is biased.
"""

from __future__ import annotations

from pydantic import Field

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.local import Ctx, Nothing, Work, descend


class FedAvg(Algorithm):
    """FedAvg (McMahan et al. 2017, Algorithm 1)."""

    server_lr: float = Field(
        1.0, gt=0, description="server step size that scales the mean difference (1 in Algorithm 1)"
    )

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        w = descend(down.x, work)  # ClientUpdate(k, w_t)
        return Delta(w - down.x), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + self.server_lr * up.dw)  # w_{t+1} = sum_k (n_k/n) w_k
