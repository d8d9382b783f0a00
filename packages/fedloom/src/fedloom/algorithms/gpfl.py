"""GPFL: a shared body that learns class embeddings along one route and each client's own task along another route.

Problem: min over x and h_1..h_n of sum_i alpha_i (f_i(x, h_i) + a_i(x) + lam b_i(x)) + mu/2 ||v||^2, where v is a part
of x, a_i is the cross-entropy of the cosines between the features on the generic route and the embeddings of the
classes, and b_i is the mean distance between these features and the received embedding of their class.

Reference: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, J. Cao, H. Guan, "GPFL: Simultaneously Learning Global and
Personalized Feature Information for Personalized Federated Learning", ICCV 2023, arXiv:2308.10279v3 (public code:
TsingZ0/GPFL).

    paper     here       meaning
    phi       x          body, valve (CoV) and embeddings (GCE), on the server
    psi_i     head       head of client i
    g, p_i    condition  means of the embeddings over classes (g) and over the client's samples (p_i)
    lambda    lam        weight of the distance to the embedding (magnitude-level guidance)
    mu        mu         weight decay of v, which is the valve and the embeddings

Client state: the head's parameters. Traffic per round: all other parameters except the 2 k of the conditions, down and
up, for k features.

Deviations: the conditions are computed from the received embeddings. In the public code, the conditions are computed
from the client's own embeddings after its last training, and are 0 before its first training. In that code, the norm is
also taken over a batch, which gives about the square root of the batch size times the mean of the norms.

Public code: clients and server of TsingZ0/PFLlib (d832e76f) produce the same models and conditions to within 1e-15,
once the conditions are computed from the received embeddings from the first round on, and the norm is the mean over a
batch.

Defaults: lam = 0.01 and mu = 0.1, which are the public code's values for small networks.

Use this method if labels are skewed. To use this method, set ``guided`` in [model]. If a model has no valve and no
embeddings, the method is equivalent to FedPer, and a warning is issued. The method is also equivalent to FedPer if
``angle``, lam and mu are 0 and the model's valve does not change. The task must be a classification.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model, Sent
from fedloom.algorithms._prototypes import shares
from fedloom.local import Ctx, Term, Work, descend
from fedloom.models.guided import CONDITION, EMBEDDING
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``. Only the shared parameters are sent."""

    x: Annotated[Tensor, Sent(part="shared")]


class Client(NamedTuple):
    """The h parameters ``[m, h]`` of the client's head."""

    head: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the shared parameters, which is 0 in the head and in the conditions."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="shared")]


class GPFL(Algorithm):
    """GPFL (Zhang et al. 2023)."""

    lam: float = Field(
        0.01, ge=0, description="lambda, weight of the distance to the class embeddings (0.01, or 1e-4 for ResNet-18)"
    )
    mu: float = Field(0.1, ge=0, description="weight decay of the valve and the embeddings (0.1, or 0 for ResNet-18)")
    angle: float = Field(1.0, ge=0, description="weight of the angle-level guidance (1 in the paper)")

    family: ClassVar[str] = "personalised"

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~(masks.head(layout) | condition_of(layout))

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        plain = "GPFL on a model without valve and embeddings is the same as FedPer. Set guided in [model]"
        return [] if guided(layout) else [plain, *masks.note_head_is_model("GPFL", masks.head(layout), "Local")]

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0[masks.head(ctx.layout)]), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        shared, w = self.part("shared", work.layout).to(down.x.device), self.personal(down, rows, work)
        if guided(work.layout):
            w = descend(w, work, terms=(self._guidance(down, work),), mask=~condition_of(work.layout).to(w.device))
        else:
            w = descend(w, work)
        head = masks.part(w, masks.head(work.layout).to(w.device))
        return Up(masks.zero_outside_(w.sub_(down.x), shared)), Client(head)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(server.x + up.dw * self.part("shared", ctx.layout).to(server.x.device))

    def global_model(self, server: Model) -> None:
        return None  # x has no head

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        models = masks.joined(down.x, rows.head, masks.head(work.layout).to(down.x.device))
        if guided(work.layout):
            embedding, tree = work.layout.tree(down.x)[EMBEDDING], work.layout.tree(models)
            tree[CONDITION][:, 0], tree[CONDITION][:, 1] = embedding.mean(0), shares(work, down.x) @ embedding
        return models

    def _guidance(self, down: Down, work: Work) -> Term:
        """Return the loss terms of the generic route, plus mu/2 times the squared norm of valve and embeddings."""
        received = work.layout.tree(down.x)[EMBEDDING]

        def guidance(z: Tensor, _outputs: Tensor, y: Tensor, _anchors: Tensor, embedding: Tensor) -> Tensor:
            feature, cosines, size = z.split([embedding.shape[1], len(embedding), 1], 1)
            angle = -cosines.log_softmax(1).gather(1, y.long()[:, None])[:, 0]
            magnitude = torch.linalg.vector_norm(feature - embedding[y.long()], dim=1)
            total: Tensor = self.angle * angle + self.lam * magnitude + self.mu * size[:, 0]
            return total

        return Term(guidance, float(bool(self.angle or self.lam or self.mu)), argument=received.expand(work.m, -1, -1))


def guided(layout: Layout) -> bool:
    """Return True if a model has a valve and embeddings (`fedloom.models.Guided`)."""
    return CONDITION in layout.names


def condition_of(layout: Layout) -> Tensor:
    """Return a bool mask ``[d]`` that marks the conditions in a model's valve."""
    return layout.mask(CONDITION) if guided(layout) else torch.zeros(layout.d, dtype=torch.bool)
