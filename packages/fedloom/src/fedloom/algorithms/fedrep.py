"""FedRep: a shared body, and a personal head that each client trains before the body.

Problem: min over phi of sum_i alpha_i min over h_i of f_i(h_i, phi).

Reference: L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021, arXiv:2102.07078, Algorithm 1 (public code: lgcollins/FedRep).

    paper      here           meaning
    phi        x              body (representation), on the server
    h_i        head           head of client i
    tau        head_epochs    epochs in which the head is trained, before the body

Client state: the head's parameters. Traffic per round: the body's parameters, down and up.

Deviations: tau is a number of epochs, as in the public code. The body is trained for the run's number of epochs. The
paper trains it for 1 epoch. The head is the last layer with a weight matrix, unless ``head`` names other layers.
Personal models consist of the new body and the client's head. A client that has never participated trains once before
it is evaluated.

Defaults: the head is trained for four epochs, so a round costs at most five times as much as in FedAvg.

Public code: the clients of TsingZ0/PFLlib (d832e76f) give the same models to within 1e-15.

Use this method if clients share features but not labels. If the whole model is the head (softmax regression), the
method is equivalent to Local, and a warning is issued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model, Sent
from fedloom.local import Ctx, Work, descend
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``. Only the model's body is sent."""

    x: Annotated[Tensor, Sent(part="body")]


class Client(NamedTuple):
    """The h parameters ``[m, h]`` of the client's head."""

    head: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the body, which is 0 in the head."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="body")]


class FedRep(Algorithm):
    """FedRep (Collins et al. 2021, Algorithm 1)."""

    head: tuple[str, ...] = Field((), description="name prefixes of the head's parameters (empty: the last layer)")
    head_epochs: int = Field(
        4, ge=0, description="tau, number of epochs of head training per round (10 in the public code)"
    )

    family: ClassVar[str] = "personalised"
    paper: ClassVar[Mapping[str, Any]] = {"head_epochs": 10}

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.head(layout, self.head)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        warning = "FedRep with head_epochs = 0 never trains the heads. Set head_epochs to 1 or more"
        return ([] if self.head_epochs else [warning]) + masks.note_head_is_model(
            "FedRep", masks.head(layout, self.head), "Local"
        )

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0[masks.head(ctx.layout, self.head)]), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        head = masks.head(work.layout, self.head).to(down.x.device)
        w = masks.joined(down.x, rows.head, head)
        w = descend(w, work, mask=head, steps=work.epochs(self.head_epochs), stream="head")  # h_i, tau epochs
        w = descend(w, work, mask=~head)  # phi_i, with the new head
        w_head = masks.part(w, head)
        return Up(masks.zero_outside_(w.sub_(down.x), ~head)), Client(w_head)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        body = self.part("body", ctx.layout).to(server.x.device)
        return Model(server.x + up.dw * body)  # phi = mean of phi_i

    def global_model(self, server: Model) -> None:
        return None  # x has no head

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return masks.joined(down.x, rows.head, masks.head(work.layout, self.head))
