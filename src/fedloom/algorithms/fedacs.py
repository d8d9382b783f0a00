"""FedACS: every client starts from an attention-weighted mean of the clients most like it.

Problem: min over w_1..w_n of sum_i F_i(w_i) + lambda R(W), R a similarity-weighted sum of squared distances.

Reference: "FedACS: Federated Learning with Attention-Based Client Selection", Algorithm 1, Eqs. 3-5. No public code.

    paper     here   meaning
    w_i       w      personal model, last upload of every client
    s_ij      s      cosine similarity of w_i and w_j
    delta_k   delta  p-quantile of all entries of s
    u_i       u      mixture sent to client i
    lambda    lam    weight of R
    beta_k    lr     step size of the round

Kept by a client: d (w). Sent per round: d down (a different u to every client), d up; the server keeps every w.

Deviations: S, its quantile and Eq. 4 are those of the cohort; Algorithm 1 and Eq. 4 have them over j = 1..n
(``among = "all"``, a client never seen with the initial model, or ``"seen"``, without these). All clients start from
one model, so clients never seen have cosine 1 with each other. alpha_k is 1, which makes Eq. 3 Eq. 4: R and lambda do
not show then; with ``lam`` it is lambda beta_k, as in Theorem 2.1. The comparison with delta is >= and includes the
client itself (strict comparison leaves the set empty when models coincide); rows whose weights do not sum to a positive
number fall back to the client's own model. The server sees single models: no secure aggregation.

Use it when clients fall into groups that are not known. A larger ``quantile`` means a higher bar and LESS
collaboration: 1 is Local.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Kept
from fedloom.local import Ctx, Work, descend


class Server(NamedTuple):
    """start ``[d]``: what a client never seen has."""

    start: Tensor


class Down(NamedTuple):
    """u ``[m, d]``."""

    u: Tensor


class Client(NamedTuple):
    """w ``[m, d]``."""

    w: Tensor


class Up(NamedTuple):
    """w ``[m, d]``."""

    w: Annotated[Tensor, Kept(primary=True)]


class FedACS(Algorithm):
    """FedACS (Algorithm 1)."""

    quantile: float = Field(
        0.5, ge=0, le=1, description="p of the threshold delta_k (Algorithm 1); not given in the paper"
    )
    among: Literal["cohort", "seen", "all"] = Field(
        "cohort", description="whose models S has: the round's cohort, or also all clients seen so far, or all (Eq. 4)"
    )
    lam: float | None = Field(
        None, gt=0, description="lambda: alpha_k = lambda beta_k (Eq. 3, Theorem 2.1); None: alpha_k = 1 (Eq. 4)"
    )

    mixes: ClassVar[bool] = True
    family: ClassVar[str] = "personalised"

    @property
    def mixes_all(self) -> bool:
        return self.among != "cohort"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, Up]:
        return Server(x0), Client(x0), Up(x0)

    def down(self, server: Server, kept: Up, ctx: Ctx) -> Down:
        w, place = kept.w, torch.arange(ctx.m)
        if self.mixes_all:
            attended = torch.ones(ctx.n, dtype=torch.bool)
            if self.among == "seen":
                attended = (w != server.start).any(1).cpu().index_fill(0, ctx.ids, value=True)
            w, place = w[attended.to(w.device)], (attended.cumsum(0) - 1)[ctx.ids]
        u = attention(w, self.quantile)[place] @ w  # Eq. 4: u_i = sum_j s_ij w_j / sum_j s_ij over s_ij >= delta
        alpha = 1.0 if self.lam is None else self.lam * ctx.local.lr_at(max(ctx.round, 1))
        return Down(u if alpha == 1 else torch.lerp(w[place], u, alpha))  # Eq. 3 with grad R_i = w_i - sum_j s_ij w_j

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        w = descend(down.u, work)  # Eq. 5: steps on F_i only, from u_i
        return Up(w), Client(w)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        return server

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return rows.w


def attention(w: Tensor, quantile: float) -> Tensor:
    """Row-stochastic weights ``[m, m]`` of models ``w [m, d]``: their cosines from the ``quantile`` of all m^2 on."""
    direction = w / torch.linalg.vector_norm(w, dim=1, keepdim=True).clamp(min=1e-30)
    s = direction @ direction.T
    s = ((s + s.T) / 2).fill_diagonal_(1.0)  # s_ij; symmetric to the last bit, as delta is often one of its entries
    ordered = s.flatten().sort().values
    place = quantile * (len(ordered) - 1)
    delta = torch.lerp(ordered[math.floor(place)], ordered[math.ceil(place)], place % 1)
    delta = delta - 16 * torch.finfo(s.dtype).eps  # equal cosines pass together: clients never seen have equal rows
    s = torch.where((s >= delta).fill_diagonal_(True), s, 0.0)
    total = s.sum(1, keepdim=True)
    return torch.where(total > 1e-12, s / total, torch.eye(len(w), dtype=w.dtype, device=w.device))
