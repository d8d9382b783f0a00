"""LG-FedAvg: every client learns its own body, and all clients share one head.

Problem: min over h, phi_1..phi_n of sum_i alpha_i f_i(h, phi_i).

Reference: P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency, "Think
Locally, Act Globally: Federated Learning with Local and Global Representations", arXiv:2001.01523, Algorithm 1 (public
code: pliang279/LG-FedAvg).

    paper      here     meaning
    theta_g    x        parameters of the global model (head), on the server
    theta_m    body     parameters of the local model of client m

Client state: the body's parameters. Traffic per round: the head's parameters, down and up.

Deviations: training starts from the run's initial model. The public code starts from a model that was trained with
FedAvg. The head is the last layer with a weight matrix, unless ``head`` names other layers. Personal models contain the
most recent head.

Public code: the clients of TsingZ0/PFLlib (d832e76f) give the same models to within 1e-15.

Use this method if inputs differ between clients (sensors, scanners) and communication is expensive. If the whole model
is the head, the method is equivalent to FedAvg, and a warning is issued.
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
    """The server's model x ``[d]``. Only the model's head is sent."""

    x: Annotated[Tensor, Sent(part="head")]


class Client(NamedTuple):
    """The k parameters ``[m, k]`` of the client's body."""

    body: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the head, which is 0 in the body."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="head")]


class LGFedAvg(Algorithm):
    """LG-FedAvg (Liang et al. 2020, Algorithm 1)."""

    head: tuple[str, ...] = Field((), description="name prefixes of the head's parameters (empty: the last layer)")

    family: ClassVar[str] = "personalised"

    def part(self, name: str, layout: Layout) -> Tensor:
        return masks.head(layout, self.head)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return masks.note_head_is_model("LGFedAvg", masks.head(layout, self.head), "FedAvg")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0[~masks.head(ctx.layout, self.head)]), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        head = masks.head(work.layout, self.head).to(down.x.device)
        w = descend(masks.joined(down.x, rows.body, ~head), work)  # (theta_g, theta_m) <- SGD
        w_body = masks.part(w, ~head)
        return Up(masks.zero_outside_(w.sub_(down.x), head)), Client(w_body)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        head = self.part("head", ctx.layout).to(server.x.device)
        return Model(server.x + up.dw * head)  # theta_g = mean of theta_g of the cohort

    def global_model(self, server: Model) -> None:
        return None  # x has no body

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return masks.joined(down.x, rows.body, ~masks.head(work.layout, self.head))
