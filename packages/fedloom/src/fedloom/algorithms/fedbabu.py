"""FedBABU: only the body is trained in the rounds, and the head keeps its random initial values.

Afterwards, each client fine-tunes both of them.

Problem: min over phi of sum_i alpha_i f_i(h, phi) for a fixed h. From the solution, client i takes a few steps on f_i.

Reference: J. Oh, S. Kim, S.-Y. Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR
2022, arXiv:2106.06042, Algorithm 1, and its fine-tuning (public code: jhoon-oh/FedBABU).

    paper       here          meaning
    theta_ext   x             body (extractor), on the server, with the initial head
    theta_cls   head          head (classifier), drawn once at random
    tau         local         epochs of the body per round
    tau_f       epochs        epochs of the fine-tuning

Client state: the initial head's parameters. Traffic per round: the body's parameters, down and up. The personal model
is computed only when it is needed, and it is never sent. The gradients of the fine-tuning are recorded as work of the
preceding round.

Deviations: the head is the last layer with a weight matrix, unless ``head`` names other layers.

Public code: clients and server of TsingZ0/PFLlib (d832e76f) produce the same bodies and fine-tuned models to within
1e-15, once that code sends the last mean to the clients before fine-tuning. In their code, each client fine-tunes the
body that it obtained in its own last round.

Defaults: whole models are fine-tuned for 5 epochs, as in the paper's tables. If a quarter of the run's local epochs is
a larger number, that number is used, because the head must be learned from random values with the run's step size.

Use this method if clients share features but not labels, and new clients will join, because the shared body does not
depend on the labels of the head. If the whole model is the head, the rounds do not train anything, and a warning is
issued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, DerivedFrom0, Mean, Model, Sent, by_rule
from fedloom.local import Ctx, Work, descend
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``. Only the model's body is sent."""

    x: Annotated[Tensor, Sent(part="body")]


class Client(NamedTuple):
    """Initial values ``[m, h]`` of the head."""

    head: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the body, which is 0 in the head."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="body")]


class FedBABU(Algorithm):
    """FedBABU (Oh et al. 2022, Algorithm 1)."""

    head: tuple[str, ...] = Field((), description="name prefixes of the head's parameters (empty: the last layer)")
    epochs: DerivedFrom0 = by_rule(
        description="tau_f, number of fine-tuning epochs (default: a quarter of the run's local epochs, rounded, "
        "but at least 5; the paper's tables use 5)"
    )
    lr: float | None = Field(None, gt=0, description="step size for fine-tuning (default: the round's step size)")
    tunes: Literal["all", "head", "body"] = Field(
        "all", description="parameters updated by fine-tuning (Table 5 of the paper)"
    )

    family: ClassVar[str] = "personalised"
    paper: ClassVar[Mapping[str, Any]] = {"epochs": 5}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"epochs": max(5, ctx.rounds * max(ctx.local.epochs, 1) // 4)}

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.head(layout, self.head)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if not bool(masks.head(layout, self.head).all()):
            return []
        return ["the model consists only of a head, so FedBABU trains nothing before fine-tuning. Add a hidden layer"]

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0[masks.head(ctx.layout, self.head)]), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        head = masks.head(work.layout, self.head).to(down.x.device)
        w = descend(masks.joined(down.x, rows.head, head), work, mask=~head)  # theta_ext <- SGD, theta_cls fixed
        return Up(masks.zero_outside_(w.sub_(down.x), ~head)), rows

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(server.x + up.dw * self.part("body", ctx.layout).to(server.x.device))

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        head = masks.head(work.layout, self.head).to(down.x.device)
        mask = {"all": None, "head": head, "body": ~head}[self.tunes]
        start, steps = masks.joined(down.x, rows.head, head), work.epochs(round(self.epochs))
        return descend(start, work, mask=mask, steps=steps, stream="fine-tuning", lr=self.lr)
