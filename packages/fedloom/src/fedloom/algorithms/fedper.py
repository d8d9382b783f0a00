"""FedPer: a shared body and personal heads, which are trained together.

Problem: min over phi, h_1..h_n of sum_i alpha_i f_i(h_i, phi).

Reference: M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, "Federated Learning with Personalization Layers",
arXiv:1912.00818, Algorithms 1 and 2.

    paper      here     meaning
    W_B        x        base layers, on the server
    W_P_j      head     personalization layers of client j

Client state: the head's parameters. Traffic per round: the body's parameters, down and up.

Deviations: the head is the last layer with a weight matrix, unless ``head`` names other layers.

Public code: the clients of TsingZ0/PFLlib (d832e76f) give the same models to within 1e-15.

Use this method as the simplest way to split a model into a shared and a personal part. In contrast, FedRep trains the
head to completion before it trains the body. If the whole model is the head, the method is equivalent to Local, and a
warning is issued. If the model has no head, the method is equivalent to FedAvg.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

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


class FedPer(Algorithm):
    """FedPer (Arivazhagan et al. 2019, Algorithms 1 and 2)."""

    head: tuple[str, ...] = Field((), description="name prefixes of the head's parameters (empty: the last layer)")

    family: ClassVar[str] = "personalised"

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.head(layout, self.head)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return masks.note_head_is_model("FedPer", masks.head(layout, self.head), "Local")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0[masks.head(ctx.layout, self.head)]), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        head = masks.head(work.layout, self.head).to(down.x.device)
        w = descend(masks.joined(down.x, rows.head, head), work)  # (W_B, W_P_j) <- SGD
        w_head = masks.part(w, head)
        return Up(masks.zero_outside_(w.sub_(down.x), ~head)), Client(w_head)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        body = self.part("body", ctx.layout).to(server.x.device)
        return Model(server.x + up.dw * body)  # W_B = sum_j gamma_j W_B_j

    def global_model(self, server: Model) -> None:
        return None  # x has no head

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return masks.joined(down.x, rows.head, masks.head(work.layout, self.head))
