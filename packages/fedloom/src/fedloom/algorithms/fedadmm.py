"""FedADMM (Gong et al.): ADMM with partial participation and uploads of augmented differences.

Problem: min over theta of sum_i alpha_i f_i(theta).

Reference: Y. Gong, Y. Li, N. M. Freris, "FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System
Heterogeneity", ICDE 2022, arXiv:2204.03529v2, Algorithm 1.

    paper     here        meaning
    theta     x           server's model
    w_i       u - y/rho   local model
    y_i       y           dual of w_i = theta, equal to -grad f_i(w_i) after an exact step
    Delta_i   du          change of the augmented model u = w_i + y_i/rho
    rho       rho         penalty
    eta       server_lr   server step size

Client state: 2d values (u, y). Traffic per round: d values down, d up.

Deviations: in Delta_i, the public code uses theta in place of the old w_i. This difference gives theta = 2 mean(w_i) -
theta, which is a different method. Here, Delta_i is the paper's Delta_i, with eta = |S|/n from the paper's theory. The
paper's experiments use eta = 1, which is suitable for the public code if few clients participate. Clients train for the
run's number of epochs. In the paper, this number is random.

Public code: the clients of YonghaiGong/FedADMM (1efef575) produce the same theta and y_i to within 1e-14, once their
Delta_i uses the old w_i, with server_lr = 1 and |S|/n.

Defaults: rho = 1/reach, where reach is the distance covered in a round (lr times the mean number of steps). If the
gradient is constant, the server's model then moves by 1/rho times the gradient per round, which is FedAvg's speed.
server_lr is |S|/n, so that the server's model is the mean of u over all clients. Delta_i contains all changes of theta
since the client's last round, and if server_lr is larger, these changes are added a second time. With server_lr = 1 and
one client in ten, theta nearly doubles in every round.

Use this method to train one global model if clients differ. If most clients are absent, the model moves little, and a
warning is issued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Mean, Model, by_rule
from fedloom.local import Ctx, Work, descend, where_moved


class Client(NamedTuple):
    """Augmented model u and dual y, both ``[m, d]``."""

    u: Tensor
    y: Tensor


class Up(NamedTuple):
    """Change du ``[m, d]`` of the augmented model."""

    du: Annotated[Tensor, Mean(base="rows.u", primary=True, accumulates=True)]


class FedADMM(Algorithm):
    """FedADMM (Gong et al. 2022, Algorithm 1)."""

    rho: Derived = by_rule(
        description="penalty rho (default: 1/reach, where reach is lr times the steps per round; the experiments in "
        "Sec. V use 0.01)"
    )
    server_lr: Annotated[float, Field(gt=0)] | Literal["fraction"] = Field(
        "fraction",
        description="server step size eta; 'fraction' is |S|/n, as in the theory (the experiments use 1, and 0.5 "
        "from round 60 on)",
    )
    start: Literal["own", "server"] = Field(
        "server", description="starting point of local SGD: the server's theta (public code), or the client's own w_i"
    )

    paper: ClassVar[Mapping[str, Any]] = {"rho": 0.01, "server_lr": 1.0}
    counting_option = "server_lr = 'fraction'"

    @property
    def counts_absent(self) -> bool:
        return self.server_lr == "fraction"

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"rho": 1 / ctx.reach}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0, torch.zeros_like(x0)), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Up, Client]:
        x, (u, y) = down.x, rows
        start = x if self.start == "server" else u - y / self.rho
        w = descend(start, work, pull=((self.rho, x),), shift=y)  # min f_i(w) + <y_i, w> + rho/2 ||w - theta||^2
        y = where_moved(work, torch.add(y, w - x, alpha=self.rho), y)  # y_i += rho (w_i - theta)
        new = where_moved(work, torch.add(w, y, alpha=1 / self.rho), u)
        return Up(new - u), Client(new, y)  # Delta_i = (w_i^+ - w_i) + (y_i^+ - y_i)/rho

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        eta = ctx.part if self.server_lr == "fraction" else self.server_lr
        return Model(server.x + eta * up.du)  # theta += eta/|S| sum of Delta_i

    def reshared(self, server: Model, moved: Up, ctx: Ctx) -> Model | None:
        return Model(server.x + moved.du) if self.server_lr == "fraction" else None  # otherwise, x is no weighted mean
