"""FedPAC: a shared body whose features are aligned by prototypes, and heads that combine similar clients' heads.

Problem: min over phi and h_1..h_n of sum_i alpha_i (f_i(h_i, phi) + lam mean of ||z(phi) - C_y||^2 / k).

Reference: J. Xu, X. Tong, S.-L. Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, arXiv:2306.11867v1, Algorithm 1, Eqs. 4, 5 and 11 (public code: JianXu95/FedPAC).

    paper        here          meaning
    phi          x             body (feature extractor), on the server
    w_i          heads, head   head of client i, a combination of the heads in its cohort
    c_k          prototypes    mean representation of class k over all clients
    lambda       lam           weight of the alignment
    V_i          spread        variance of the client's estimates of the class means of its features
    h_i          moment        share of a class times its mean representation under the received body
    alpha_ij     alpha         weight of client j's head in client i's head

Client state: none. The server stores the client's head. Traffic per round: body, head and prototypes down, and body,
head and 2 c k features up, for c classes. The server sees each client's head and moments: no secure aggregation.

Deviations: the quadratic program of Eq. 11 is solved by projected gradient steps. An absent client keeps its head. The
alignment follows the public code: from the second round on, every sample is pulled toward the prototype of its class.
Samples of a class without a prototype are not pulled. In the public code, they are pulled to the client's own mean.
Heads are trained with the step size of the round. The public code uses 0.1 and drops head weights below 0.001.
Public code: the clients and functions of JianXu95/FedPAC (5770f4f8), called in its loop's order, produce the same
bodies, heads and prototypes to within 1e-13, with its momentum and weight decay, if it drops no head weight.

Use this method if labels are skewed and some clients are similar. With lam = 0, features are not aligned.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Rows, Sent
from fedloom.algorithms._prototypes import pull_term, shape_of, share_range, shares, update_means
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows import masks
from fedloom.rows.algebra import onto_simplex, spectrum
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Body x ``[d]``, heads ``[n, h]``, prototypes ``[c k]``, and known ``[c]``, 1 for classes with a prototype."""

    x: Tensor
    heads: Tensor
    prototypes: Tensor
    known: Tensor


class Down(NamedTuple):
    """Body x ``[d]``, a head ``[m, h]`` for each client, prototypes ``[c k]``, and known ``[c]`` as in `Server`."""

    x: Annotated[Tensor, Sent(part="body")]
    head: Tensor
    prototypes: Tensor
    known: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the body, which is 0 in the head, trained head ``[m, h]``, and statistics of features.

    moment ``[m, c k]`` and spread ``[m, 1]`` are computed with the received body, total ``[m, c k]`` with the trained
    body. share ``[m, c]`` is each class's share of the client's samples.
    """

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="body")]
    head: Annotated[Tensor, Rows()]
    moment: Annotated[Tensor, Rows()]
    spread: Annotated[Tensor, Rows()]
    total: Annotated[Tensor, Mean()]
    share: Annotated[Tensor, Mean()]


class FedPAC(Algorithm):
    """FedPAC (Xu et al. 2023, Algorithm 1)."""

    lam: float = Field(1.0, ge=0, description="lambda, weight of the feature alignment (1 in Sec. 5.1)")
    head_epochs: int = Field(
        1, ge=0, description="number of epochs that train the head before the body is trained (1 in Sec. 5.1)"
    )

    family: ClassVar[str] = "personalised"

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.head(layout)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return masks.note_head_is_model("FedPAC", masks.head(layout), "a combination of heads")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        classes, features = shape_of(ctx.layout)
        heads = x0[masks.head(ctx.layout)].expand(ctx.n, -1).clone()
        return Server(x0, heads, x0.new_zeros(classes * features), x0.new_zeros(classes)), Nothing(), None

    def down(self, server: Server, kept: None, ctx: Ctx) -> Down:
        first = server.x[masks.head(ctx.layout).to(server.x.device)]  # for clients that join later
        heads = torch.cat([server.heads, first.expand(ctx.n - len(server.heads), -1)])
        return Down(server.x, heads[ctx.ids], server.prototypes, server.known)

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        top = masks.head(work.layout).to(down.x.device)
        w, share = masks.joined(down.x, down.head, top), shares(work, down.x)
        moment = (work.class_means(w) * share[:, :, None]).flatten(1)
        size = work.activations(w, reduce=torch.square).sum(1, keepdim=True) - moment.square().sum(1, keepdim=True)
        spread = size / work.sizes.to(w)  # V_i
        w = descend(w, work, mask=top, steps=work.epochs(self.head_epochs), stream="head")
        w = descend(w, work, mask=~top, terms=(pull_term(down.prototypes, down.known, self.lam, work),))  # Eq. 4
        total, head = (work.class_means(w) * share[:, :, None]).flatten(1), masks.part(w, top)
        return Up(masks.zero_outside_(w.sub_(down.x), ~top), head, moment, spread, total, share), rows

    def encode(self, model: Tensor, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        top = masks.head(work.layout).to(down.x.device)
        total = (work.class_means(model) * shares(work, model)[:, :, None]).flatten(1)
        up, _ = self.client(down, rows, work.idle())  # to compute moment and spread with the received body
        return up._replace(dw=masks.zero_outside_(model - down.x, ~top), head=masks.part(model, top), total=total), rows

    def decode(self, down: Down, rows: Nothing, up: Up, work: Work) -> Tensor:
        return masks.joined(down.x + up.dw, up.head, masks.head(work.layout).to(down.x.device))

    def ranges(self, down: Down, up: Up, work: Work) -> dict[str, tuple[Tensor, float]]:
        return {"share": share_range(up.share, work)}

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        moment = up.moment.cpu().double()
        alpha = combine_heads(up.spread[:, 0].cpu().double(), moment).to(up.head)
        heads = server.heads.index_copy(0, ctx.ids.to(server.heads.device), alpha @ up.head)
        x = server.x + up.dw * self.part("body", ctx.layout).to(server.x.device)
        return Server(x, heads, *update_means(server.prototypes, server.known, up.total, up.share))

    def global_model(self, server: Server) -> None:
        return None

    def personal(self, down: Down, rows: Nothing, work: Work) -> Tensor:
        return masks.joined(down.x, down.head, masks.head(work.layout).to(down.x.device))


def combine_heads(spread: Tensor, moment: Tensor, steps: int = 2000, tolerance: float = 1e-13) -> Tensor:
    """Return a matrix ``[m, m]`` whose row i minimizes sum_j a_j^2 V_j + ||h_i - sum_j a_j h_j||^2 (Eq. 11)."""
    centred = moment - moment.mean(0)
    gram = centred @ centred.mT
    p = torch.diag(spread.clamp(min=0)) + gram
    rate = 1 / spectrum(p)[0].clamp(min=1e-12)
    a = ahead = torch.eye(len(spread), dtype=spread.dtype, device=spread.device)
    age = torch.zeros_like(a[:, :1])
    for _ in range(steps):
        new = onto_simplex(ahead - rate * (ahead @ p - gram), 1.0)
        if float((new - ahead).abs().max()) < tolerance:
            return new
        turns = ((ahead - new) * (new - a)).sum(1, keepdim=True) > 0  # momentum that leads uphill starts anew
        age = torch.where(turns, 0, age + 1)
        a, ahead = new, new + age / (age + 3) * (new - a)
    return a
