"""Composite FedADMM (Wang et al.): ADMM with partial participation, in which the server applies a prox.

The prox is the prox of the regularizer.

Problem: min over x of sum_i alpha_i f_i(x) + g(x).

Reference: H. Wang, S. Marella, J. Anderson, "FedADMM: A Federated Primal-Dual Algorithm Allowing Partial
Participation", IEEE CDC 2022, arXiv:2203.15104, Algorithm 1.

    paper      here          meaning
    xbar       x             server's model
    x_i        w             local model
    z_i        y             dual of x_i = xbar, equal to -grad f_i(w) after an exact step
    xhat_i     u             x_i + eta z_i
    eta        eta           1/eta is the penalty
    g          regulariser   nonsmooth term of the objective

Client state: 2d values (w, y). Traffic per round: d values down (sparse or of low rank, depending on the prox), d up.
The server stores every client's last u.

Deviations: clients send u instead of the difference from the last u. The server's mean over all clients is the same in
both cases. Local training starts at the client's own x_i, or at xbar with ``start = "server"``.

Defaults: eta = reach, the distance covered in a round (lr times the mean number of steps), and local training starts at
the server's model. If the gradient is constant, the server's model then moves by eta times the gradient per round,
which is FedAvg's speed. If local training started at x_i, the server's model would move by only the fraction 1 - 1/e of
this distance. If eta is set, local training starts at x_i, as in the paper. There is no default regularizer, because
the regularizer is part of the problem. Without a regularizer, no parameters of the models are zero, and a warning is
issued.

Use this method for composite problems with partial participation, like FedDR, which equals this method if alpha = 1. If
most clients are absent, the model moves little, and a warning is issued.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Model, Point, Sent, by_rule
from fedloom.algorithms._regulariser import Regulariser, note_missing_regularizer, proximal
from fedloom.local import Ctx, Work, descend
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``."""

    x: Annotated[Tensor, Sent(prox="regulariser")]


class Client(NamedTuple):
    """Local model w and dual y, both ``[m, d]``."""

    w: Tensor
    y: Tensor


class FedADMMComposite(Algorithm):
    """Composite FedADMM (Wang et al. 2022, Algorithm 1)."""

    eta: Derived = by_rule(
        description="inverse of the penalty (default: reach, which is lr times the steps per round; the paper states "
        "several values)"
    )
    regulariser: Regulariser = Field(None, description="regularizer g with a proximal operator (default: none)")
    start: Literal["own", "server"] | None = Field(
        None,
        description="starting point of local SGD: the client's own x_i, or the server's xbar (default: x_i if "
        "eta is set, otherwise xbar)",
    )

    family: ClassVar[str] = "composite"
    needs_sgd: ClassVar[str | None] = "its prox steps use the step size of SGD"

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {} if self.eta else {"eta": ctx.reach, "start": "server"}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return note_missing_regularizer(self)

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, Point]:
        return Model(x0), Client(x0, torch.zeros_like(x0)), Point(x0)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Point, Client]:
        x, (w, y) = down.x, rows
        w = x if self.start == "server" else w
        w = descend(
            w, work, pull=((1 / self.eta, x),), shift=y
        )  # min f_i(w) + <z_i, w - xbar> + ||w - xbar||^2/(2 eta)
        y = y + (w - x) / self.eta  # z_i += (x_i - xbar)/eta
        return Point(w + self.eta * y), Client(w, y)  # xhat_i = x_i + eta z_i

    def server(self, server: Model, up: Point, ctx: Ctx) -> Model:
        return Model(proximal(self.regulariser, up.u, self.eta, ctx.layout))  # xbar = prox_{eta g}(mean of xhat_i)
