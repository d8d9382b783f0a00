"""FedProto: clients share what classes look like, the mean representation of each, and keep their models.

Problem: min over w_1..w_n of sum_i alpha_i (f_i(w_i) + lam mean over i's samples of ||z(w_i) - C_y||^2 / k).

Reference: Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, arXiv:2105.00243v4, Algorithm 1, Eqs. 3, 6 and 7 (public code: yuetan031/FedProto).

    paper        here              meaning
    C_i^(j)      work.class_means  mean representation of class j at client i
    Cbar^(j)     prototypes        their mean over clients, by samples of class j
    lambda       lam               weight of the distance to the prototype of a sample's class
    omega_i      w                 client's model

Kept by a client: d (w). Sent per round: c k down and c (k + 1) up, c classes and k features; no model.

Deviations: the distance is that of every sample to the prototype, as in the public code, in place of that of the
client's means; squared, over k. All clients have one architecture and start from one model. A client predicts with its
head, in place of the nearest prototype. A class without a prototype yet adds nothing.

Use it where models must not leave the clients, or traffic is dear. With lam = 0 it is Local.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean
from fedloom.local import Ctx, Term, Work, descend
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """prototypes ``[c k]``, known ``[c]``: 1 where there is one."""

    prototypes: Tensor
    known: Tensor


class Client(NamedTuple):
    """w ``[m, d]``."""

    w: Tensor


class Up(NamedTuple):
    """total ``[m, c k]``: a class's mean times its share of the client's samples, and that share ``[m, c]``."""

    total: Annotated[Tensor, Mean(primary=True)]
    share: Annotated[Tensor, Mean()]


class _Given(NamedTuple):
    prototypes: Tensor
    known: Tensor


def distance(z: Tensor, _outputs: Tensor, y: Tensor, _anchors: Tensor, given: _Given) -> Tensor:
    """Mean squared difference of features ``[b, k]`` to the prototypes of their classes, ``[b]``; 0 without one."""
    return (z - given.prototypes[y]).square().mean(1) * given.known[y]


class FedProto(Algorithm):
    """FedProto (Tan et al. 2022, Algorithm 1)."""

    lam: float = Field(1.0, ge=0, description="lambda, weight of the distance to prototypes; 1 for digits (Sec. 5.1)")

    family: ClassVar[str] = "personalised"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        classes, features = shape_of(ctx.layout)
        return Server(x0.new_zeros(classes * features), x0.new_zeros(classes)), Client(x0), None

    def client(self, down: Server, rows: Client, work: Work) -> tuple[Up, Client]:
        m, classes = work.m, len(down.known)
        given = _Given(down.prototypes.view(classes, -1).expand(m, -1, -1), down.known.expand(m, -1))
        w = descend(rows.w, work, terms=(Term(distance, self.lam, given=given),))  # Eq. 7
        share = work.class_counts.to(w) / work.sizes.to(w)
        total = work.class_means(w) * share[:, :, None]  # Eq. 3
        return Up(total.flatten(1), share), Client(w)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        classes, there = len(server.known), (up.share > 0).to(server.known)
        mean = up.total.view(classes, -1) / torch.where(up.share > 0, up.share, 1)[:, None]  # Eq. 6
        old = server.prototypes.view(classes, -1)
        prototypes = torch.where(
            there[:, None] > 0, mean.to(old), old
        )  # a class that no client of the cohort has stays
        return Server(prototypes.flatten(), torch.maximum(server.known, there))

    def personal(self, down: Server, rows: Client, work: Work) -> Tensor:
        return rows.w


def shape_of(layout: Layout) -> tuple[int, int]:
    """Classes and features of a model: two classes and the inputs of its last matrix where that has one output."""
    outputs, features = list(layout.matrix_shapes.values())[-1]
    return max(2, outputs), features
