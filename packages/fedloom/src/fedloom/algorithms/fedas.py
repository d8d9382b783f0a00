"""FedAS: the received body is first aligned with the client's prototypes.

The server weights bodies by their Fisher information.

Problem: min over x and h_1..h_n of sum_i alpha_i f_i(h_i, x).

Reference: X. Yang, W. Huang, M. Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024
(public code: xiyuanyang45/FedAS, and FedAS in TsingZ0/PFLlib).

    paper      here    meaning
    theta      x       body, on the server
    w_i        w       client's last model, with body and head
    p_i        means   mean representation of every class under the client's last body
    FIM trace  fisher  squared gradient of a batch's mean loss, summed over the batches of an epoch

Client state: d values (w). Traffic per round: the body's parameters down, and the same parameters plus 1 number up. The
server receives the bodies of individual clients, so neither secure aggregation nor robust rules are supported.

Deviations: all samples have the same weight in the alignment. In the public code, the classes in a batch have equal
weights. The alignment uses the step size of the round, whereas the public code uses 0.01. In the authors' code, the
alignment of a client continues from the result of the previous client's alignment. A client's Fisher information is
multiplied by the client's share alpha_i. Absent clients do not compute anything. The personal model is the client's own
model after training.

Public code: clients and server of TsingZ0/PFLlib (d832e76f) produce the same models to within 1e-15, with equal shares,
``lr`` = 0.01 and equal weights of all samples in the alignment.

Attackers: a forged model is weighted by the Fisher information of the forged model itself. In one round with five
clients, an upload of noise moved x 4.3 times as far as in FedAvg, and an upload with a flipped sign moved x 0.2 times
as far.

Use this method if heads are personal and few clients participate per round, so that the body changes a lot between a
client's rounds. Without alignment and with a single client, the method is equivalent to Local. If the whole model is
the head, the method is also equivalent to Local, and a warning is issued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Model, Rows, Sent
from fedloom.algorithms._prototypes import Prototypes, distance
from fedloom.local import Batch, Bound, Ctx, Work, descend, iterate, where_moved
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``. Only the model's body is sent."""

    x: Annotated[Tensor, Sent(part="body")]


class Client(NamedTuple):
    """Client's last model w ``[m, d]``."""

    w: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the body, which is 0 in the head, and the trace of the Fisher information ``[m, 1]``."""

    dw: Annotated[Tensor, Rows(base="down.x", primary=True, part="body")]
    fisher: Annotated[Tensor, Rows()]


class _Aligned(NamedTuple):
    w: Tensor
    term: Bound


class _Trace(NamedTuple):
    w: Tensor
    fisher: Tensor


class FedAS(Algorithm):
    """FedAS (Yang et al. 2024)."""

    align: int = Field(1, ge=0, description="number of alignment epochs (1 in the public code)")
    lr: float | None = Field(
        None, gt=0, description="step size for the alignment (default: the round's step size; 0.01 in the public code)"
    )

    family: ClassVar[str] = "personalised"
    uses_shares: ClassVar[bool] = True

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.head(layout)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return masks.note_head_is_model("FedAS", masks.head(layout), "Local")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        top, rate = masks.head(work.layout).to(down.x.device), self.lr or work.lr
        moves = (work.steps > 0).cpu()

        def align(r: _Aligned, work: Work, batch: Batch) -> _Aligned:
            g = masks.zero_outside_(work.slope(r.w, batch, (distance,), (r.term,)), ~top)
            return r._replace(w=r.w - rate * g)

        w = masks.joined(down.x, masks.part(rows.w, top), top)
        if self.align:
            means = Prototypes(work.class_means(rows.w), (work.class_counts > 0).to(w))
            start = _Aligned(w, Bound(torch.ones_like(w[:, :1]), (), means))
            w = iterate(align, start, work, work.epochs(self.align) * moves, stream="alignment").w
        return self.encode(descend(w, work), down, rows, work)

    def encode(self, model: Tensor, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        def trace(r: _Trace, work: Work, batch: Batch) -> _Trace:
            g = torch.empty_like(r.w)
            work.addgrad_(g, r.w, batch, 0.0, 1.0)
            return r._replace(fisher=r.fisher + g.square().sum(1, keepdim=True))

        top, moves = masks.head(work.layout).to(down.x.device), (work.steps > 0).cpu()
        start = _Trace(model, torch.zeros_like(model[:, :1]))
        fisher = iterate(trace, start, work, work.epochs(1) * moves, stream="fisher").fisher
        dw = where_moved(work, masks.zero_outside_(model - down.x, ~top), torch.zeros_like(model))
        return Up(dw, fisher), Client(where_moved(work, model, rows.w))

    def decode(self, down: Down, rows: Client, up: Up, work: Work) -> Tensor:
        top = masks.head(work.layout).to(down.x.device)
        return masks.joined(down.x + up.dw, masks.part(rows.w, top), top)

    def ranges(self, down: Down, up: Up, work: Work) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        return {"fisher": (0.0, math.inf)}

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        mass = (up.fisher * ctx.weight[ctx.ids].to(up.fisher)).double()
        if not bool(mass.sum() > 0):
            return server
        mean = ((mass / mass.sum()).T @ up.dw.double())[0].to(server.x)
        return Model(server.x + mean * self.part("body", ctx.layout).to(server.x.device))

    def global_model(self, server: Model) -> None:
        return None  # x has no head

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return rows.w
