"""GIFAIR-FL: a penalty on loss differences between groups, implemented as a factor on every client's steps.

Problem: min over x of sum_k p_k f_k(x) + lam sum_{a<b} |L_a(x) - L_b(x)|, where L_a is the mean of f_k over the clients
in group a.

Reference: X. Yue, M. Nouiehed, R. Al Kontar, "GIFAIR-FL: A Framework for Group and Individual Fairness in Federated
Learning", INFORMS Journal on Data Science 2(1), 2023, arXiv:2108.02741, Algorithm 1 (GIFAIR-FL-Global).

    paper     here      meaning
    theta     x, w      server's and client's model
    lambda    lam       weight of the penalty
    A_{s_k}   groups    group of client k, one of d groups
    r_k       r         number of groups with a smaller loss minus number of groups with a larger loss

Client state: none. Traffic per round: d + 1 values down (x, scale), d + 1 up (dw, loss). The server receives the losses
of individual clients and stores each client's last loss.

Deviations: losses are computed for the received model on the client's training set, so that the order of the groups is
one round old. Groups in which no client has participated are omitted from the order. The public code starts with a
random order. p_k is the client's share in the objective.

Public code: the clients and the training loop of UMDataScienceLab/GIFAIR-FL (55b892ce) produce the same models to
within 1e-15, with the lambda used there, once that code computes losses for the received model, begins without an order
and weights its mean by samples (it draws clients by p_k, and r_k follows the mean loss of the batches).

Use this method to equalize losses over known groups, or over individual clients. lam must be below min_k p_k |A_{s_k}|
/ (d - 1), so that no client increases its own loss.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, DerivedFrom0, Mean, Rows, by_rule
from fedloom.errors import Refused
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Model x ``[d]``, and the last loss ``[n]`` of every client.

    seen ``[n]`` is 1 for clients that have reported a loss, and 0 otherwise.
    """

    x: Tensor
    loss: Tensor
    seen: Tensor


class Down(NamedTuple):
    """Model x ``[d]`` and scale ``[m, 1]``, a factor by which each client's steps are multiplied."""

    x: Tensor
    scale: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the model, and the loss ``[m, 1]`` of the received model."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    loss: Annotated[Tensor, Rows()]


class GIFAIR(Algorithm):
    """GIFAIR-FL-Global (Yue et al. 2023, Algorithm 1)."""

    lam: DerivedFrom0 = by_rule(
        description="lambda (default: half of min_k p_k |A_k| / (d - 1), as in the public code); 0 gives FedAvg"
    )
    level: Literal["individual", "group"] = Field(
        "individual",
        description="treat every client as its own group (public code), or use the groups of the federation",
    )

    family: ClassVar[str] = "fair"
    needs_sgd: ClassVar[str | None] = "it scales gradients, and an optimizer that normalizes gradients undoes this"

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"lam": self._bound(ctx) / 2}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        zero = torch.zeros_like(ctx.weight[:, 0])
        return Server(x0, zero, zero), Nothing(), None

    def down(self, server: Server, kept: None, ctx: Ctx) -> Down:
        groups = self._groups(ctx)
        clients = torch.bincount(groups, server.seen)
        loss = torch.bincount(groups, server.loss * server.seen) / clients.clamp(min=1)  # L_a
        losses = loss[clients > 0].sort().values
        r = torch.searchsorted(losses, loss) + torch.searchsorted(losses, loss, right=True) - len(losses)
        r = torch.where(clients > 0, r, 0)[groups].to(server.loss)  # r_k = sum over b of sign(L_{s_k} - L_b)
        scale = 1 + self.lam * r / self._mass(ctx)  # 1 + lambda r_k / (p_k |A_{s_k}|)
        return Down(server.x, scale[ctx.ids, None])

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        w = descend(down.x, work, scale=down.scale)  # theta <- theta - eta scale_k g_k
        return Up(w.sub_(down.x), work.loss(down.x)), rows

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        loss, has_loss = server.loss.clone(), server.seen.clone()
        loss[ctx.ids], has_loss[ctx.ids] = up.loss[:, 0].to(loss), 1.0
        return Server(server.x + up.dw, loss, has_loss)  # mean over the cohort

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.level == "group" and ctx.groups is None:
            raise Refused("GIFAIR with level 'group' needs clients in groups. Use a partition that defines groups")
        if (self.lam or 0.0) >= self._bound(ctx):
            bound = self._bound(ctx)
            raise Refused(f"GIFAIR's lam must be below min p_k |A| / (d - 1) = {bound:.3g} here, got {self.lam}")
        return []

    def _groups(self, ctx: Ctx) -> Tensor:
        return torch.arange(ctx.n) if self.level == "individual" or ctx.groups is None else ctx.groups.cpu()

    def _mass(self, ctx: Ctx) -> Tensor:
        """Return p_k |A_{s_k}| for every client, ``[n]``."""
        groups = self._groups(ctx)
        return ctx.weight[:, 0] * torch.bincount(groups)[groups]

    def _bound(self, ctx: Ctx) -> float:
        return float(self._mass(ctx).min()) / max(len(self._groups(ctx).unique()) - 1, 1)
