"""SCAFFOLD: control variates that counteract client drift.

Problem: min over x of sum_i alpha_i f_i(x).

Reference: S. P. Karimireddy, S. Kale, M. Mohri, S. Reddi, S. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, arXiv:1910.06378v4, Algorithm 1.

    paper     here        meaning
    x, c      x, c        server's model and control variate
    y_i       y           client's model
    c_i       ci          client's control variate, an estimate of grad f_i
    eta_l     work.lr     local step size
    eta_g     server_lr   server step size
    K         work.steps  local steps

Client state: d values (ci). Traffic per round: 2d values down (x, c), 2d up (dy, dc).

Deviations: K is each client's own number of steps instead of a number common to all clients. Control variates start at
zero. ``scaled`` follows FedDyn's public code (alpemreacar/FedDyn), which sends one more number down. With s_i =
n_i/mean(n), clients correct by c/s_i - c_i, and c is the mean of all s_i c_i, which clients then store instead of c_i.
This scaling already weights clients by their numbers of samples, so it needs ``client_weights = "uniform"``.

Public code: with equal shares, clients and server of TsingZ0/PFLlib (d832e76f) produce the same x and c to within
1e-15.

Attackers: c_i is computed from a forged model in the same way as from any other model (option II), and c contains the
attacker's share of c_i. In the following rounds, the honest clients therefore repeat the attacker's change.

Use this method to train one good global model if clients differ, and if they participate often enough that their
control variates stay current.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, require_equal_shares
from fedloom.local import Ctx, Work, descend, where_moved
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Model x and control variate c, both ``[d]``. Both are sent to clients."""

    x: Tensor
    c: Tensor


class Scaled(NamedTuple):
    """Model x and control variate c, both ``[d]``, and the mean number of samples per client ``[1]``."""

    x: Tensor
    c: Tensor
    mean: Tensor


class Client(NamedTuple):
    """Client's control variate ci ``[m, d]``."""

    ci: Tensor


class Up(NamedTuple):
    """Change dy of the model and change dc of the control variate, both ``[m, d]``."""

    dy: Annotated[Tensor, Mean(base="down.x", primary=True)]
    dc: Annotated[Tensor, Mean(base="rows.ci", accumulates=True)]


class SCAFFOLD(Algorithm):
    """SCAFFOLD (Karimireddy et al. 2020, Algorithm 1)."""

    server_lr: float = Field(1.0, gt=0, description="global step size eta_g (1 in the paper's experiments, Sec. 7)")
    option: Literal["I", "II"] = Field(
        "II",
        description="update of c_i: with the gradient at x (option I), or with the mean local gradient (option II)",
    )

    scaled: bool = Field(
        False,
        description="scale the control variates by n_i/mean(n), in proportion to the number of samples (FedDyn's "
        "public code)",
    )

    plain_sgd: ClassVar[str | None] = "option II divides x - y by K lr, which is the mean gradient only for plain SGD"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero = torch.zeros_like(x0)
        return Server(x0, zero), Client(zero), None

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.scaled:
            require_equal_shares(self, "scaled", ctx)
        return []

    def down(self, server: Server, kept: None, ctx: Ctx) -> Server | Scaled:
        return Scaled(*server, ctx.sizes.to(server.x).mean(0)) if self.scaled else server

    def client(self, down: Server | Scaled, rows: Client, work: Work) -> tuple[Up, Client]:
        s = self._scale(down, work)
        shift = down.c - rows.ci if s is None else (down.c - rows.ci) / s
        dy = descend(down.x, work, shift=shift).sub_(down.x)  # Eq. 3: y <- y - eta_l (g(y) - c_i + c)
        return self._send(dy, down, rows, work)

    def encode(self, model: Tensor, down: Server | Scaled, rows: Client, work: Work) -> tuple[Up, Client]:
        return self._send(model - down.x, down, rows, work)

    def _scale(self, down: Server | Scaled, work: Work) -> Tensor | None:
        return work.sizes.to(down.x) / down.mean if isinstance(down, Scaled) else None

    def _send(self, dy: Tensor, down: Server | Scaled, rows: Client, work: Work) -> tuple[Up, Client]:
        x, c, ci, s = down.x, down.c, rows.ci, self._scale(down, work)
        if self.option == "I":
            g = work.full_grad(x)
            dc = (g if s is None else s * g) - ci  # Eq. 4, option I
        else:
            dc = torch.addcmul(-c, dy, -1 / (work.lr * work.steps.to(dy)))  # Eq. 4, option II: (x - y)/(K eta_l) - c
            dc = dc if s is None else s * dc
        dc = where_moved(work, dc, torch.zeros_like(c))
        return Up(dy, dc), Client(ci + dc)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        x, c = server
        return Server(x + self.server_lr * up.dy, c + up.dc * ctx.part)  # Eq. 5

    def reshared(self, server: Server, moved: Up, ctx: Ctx) -> Server | None:
        return None if self.scaled else server._replace(c=server.c + moved.dc)
