"""FedProto: clients keep their own models and share only prototypes, which are the mean representations of classes.

Problem: min over w_1..w_n of sum_i alpha_i (f_i(w_i) + lam mean over i's samples of ||z(w_i) - C_y||^2 / k).

Reference: Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, arXiv:2105.00243v4, Algorithm 1, Eqs. 3, 6 and 7 (public code: yuetan031/FedProto).

    paper        here              meaning
    C_i^(j)      work.class_means  mean representation of class j at client i
    Cbar^(j)     prototypes        mean of C_i^(j) over clients, weighted by samples of class j
    lambda       lam               weight of the distance to the prototype of a sample's class
    omega_i      w                 client's model

Client state: d values (w). Traffic per round: c k values down and c (k + 1) up, for c classes and k features. No model.

Deviations: the distance is the distance between each sample and the prototype, as in the public code, instead of the
distance between the client's class mean and the prototype. It is squared and divided by k. All clients use the same
architecture and the same initial model. A client predicts with its head rather than with the nearest prototype.
Prototypes are computed with the trained model and weighted by samples in the mean (Eq. 6). In the public code, they are
computed from the batches of the last epoch, and clients have equal weights. Samples of a class without a prototype are
not pulled.

Public code: given the same prototypes, the clients of TsingZ0/PFLlib (d832e76f) produce the same models to within
1e-15.

Attackers: attackers forge prototypes instead of a model. A forged upload shifts the prototype of a class. The shift is
proportional to the attacker's share of the class's samples (Eq. 6).

Use this method if models must not leave the clients, or if traffic is expensive. With lam = 0, the method is equivalent
to Local. If the whole model is the head, the method is also equivalent to Local, and a warning is issued.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean
from fedloom.algorithms._prototypes import pull_term, shape_of, share_range, shares, update_means
from fedloom.local import Ctx, Work, descend
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Prototypes ``[c k]`` of the classes, and known ``[c]``, which is 1 for each class that has a prototype."""

    prototypes: Tensor
    known: Tensor


class Client(NamedTuple):
    """Client's model w ``[m, d]``."""

    w: Tensor


class Up(NamedTuple):
    """Class means ``[m, c k]`` times the class's share of the client's samples, and these shares ``[m, c]``."""

    total: Annotated[Tensor, Mean(primary=True)]
    share: Annotated[Tensor, Mean()]


class FedProto(Algorithm):
    """FedProto (Tan et al. 2022, Algorithm 1)."""

    lam: float = Field(
        1.0, ge=0, description="lambda, weight of the distance to the prototypes (1 for digits in Sec. 5.1)"
    )

    family: ClassVar[str] = "personalised"
    needs_exact: ClassVar[str | None] = (
        "its server divides sums of features by class shares, and clipping scales both by the same factor"
    )

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return masks.note_head_is_model("FedProto", masks.head(layout), "Local")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        classes, features = shape_of(ctx.layout)
        return Server(x0.new_zeros(classes * features), x0.new_zeros(classes)), Client(x0), None

    def client(self, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        w = descend(rows.w, work, terms=(pull_term(down.prototypes, down.known, self.lam, work),))  # Eq. 7
        return self.encode(work.class_means(w).flatten(1), down, Client(w), work)  # Eq. 3

    def encode(self, model: Tensor, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        share = shares(work, model)
        return Up((model.view(*share.shape, -1) * share[:, :, None]).flatten(1), share), rows

    def decode(self, down: Server, rows: Client, up: Up, work: Work) -> Tensor:
        share = up.share.repeat_interleave(up.total.shape[1] // up.share.shape[1], 1)
        return torch.where(share > 0, up.total / torch.where(share > 0, share, 1), down.prototypes)

    def ranges(self, down: Server, up: Up, work: Work) -> dict[str, tuple[Tensor, float]]:
        return {"share": share_range(up.share, work)}

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        return Server(*update_means(server.prototypes, server.known, up.total, up.share))  # Eq. 6

    def personal(self, down: Server, rows: Client, work: Work) -> Tensor:
        return rows.w
