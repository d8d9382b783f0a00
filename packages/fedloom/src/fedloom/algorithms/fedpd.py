"""FedPD: a primal-dual method in which clients may solve several local problems between two communications.

Problem: min over x of sum_i alpha_i f_i(x).

Reference: X. Zhang, M. Hong, S. Dhople, W. Yin, Y. Liu, "FedPD: A Federated Learning Framework with Adaptivity to
Non-IID Data", IEEE Transactions on Signal Processing 69, 2021, arXiv:2005.11418, Algorithm 1.

    paper      here    meaning
    x_0        x       server's model
    x_{0,i}    u       client's copy of the server's model, shifted by its dual
    x_i        w       local model
    lambda_i   y       dual of x_i = x_0, equal to -grad f_i(w) after an exact step
    eta        eta     1/eta is the penalty
    p          skip    probability that an iteration has no communication

Client state: 2d values (w, y). Traffic per round: d values down, d up. The server stores every client's last u.

Deviations: a round consists of all iterations between two communications. The server draws the number of iterations
from a geometric distribution and sends it. This number is the same for all clients. Iterations without communication
therefore do not cause any traffic. In the paper, all clients participate. Here, an absent client is represented by its
last u. Local training starts at the client's own x_i, or at its copy of the server's model if ``start = "server"``.

Public code: the TensorFlow clients and server of FedPD in unc-optimization/FedDR (4097eb44) produce the same x_i,
lambda_i and x_0 to within 1e-15, with p = 0.

Defaults: eta = reach, the distance covered in a round (lr times the mean number of steps), and local training starts at
the server's model. If the gradient is constant, the server's model then moves by eta times the gradient per round,
which is FedAvg's speed. If local training started at x_i, the server's model would move by only the fraction 1 - 1/e of
this distance. If eta is set, local training starts at x_i, as in the paper.

Use this method like FedDyn or FedADMM, of which it is the variant with full participation (eta = 1/alpha = 1/rho). The
method is intended for settings in which all clients participate. If most clients are absent, the model moves little,
and a warning is issued. ``skip`` is useful only if clients differ little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Model, Point, by_rule
from fedloom.local import Ctx, Work, descend, iterate


class Down(NamedTuple):
    """Model x ``[d]``, and the number of iterations ``[1]`` in this round."""

    x: Tensor
    iterations: Tensor


class Client(NamedTuple):
    """Local model w and dual y, both ``[m, d]``."""

    w: Tensor
    y: Tensor


class _Iterate(NamedTuple):
    w: Tensor
    y: Tensor
    u: Tensor


class FedPD(Algorithm):
    """FedPD (Zhang et al. 2021, Algorithm 1)."""

    eta: Derived = by_rule(
        description="inverse of the penalty (default: reach, which is lr times the steps per round; 1 and 10 in "
        "FedDR's scripts)"
    )
    skip: float = Field(
        0.0, ge=0, lt=1, description="probability p that an iteration skips communication (Algorithm 1)"
    )
    start: Literal["own", "server"] | None = Field(
        None,
        description="starting point of local SGD: the client's own x_i, or its shifted copy x_{0,i} of the "
        "server's model (default: x_i if eta is set, otherwise x_{0,i})",
    )

    paper: ClassVar[Mapping[str, Any]] = {"eta": 1.0, "start": "own"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {} if self.eta else {"eta": ctx.reach, "start": "server"}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, Point]:
        return Model(x0), Client(x0, torch.zeros_like(x0)), Point(x0)

    def down(self, server: Model, kept: None, ctx: Ctx) -> Down:
        u = torch.rand((), generator=ctx.rng("communication"), dtype=torch.float64).item()
        more = math.log(1 - u) / math.log(self.skip) if self.skip else 0.0  # with probability p no communication
        return Down(server.x, server.x.new_tensor([1 + math.floor(more)]))

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Point, Client]:
        def solve(rows: _Iterate, work: Work) -> _Iterate:
            stream = ("local", work.k) if work.k else "local"
            start = rows.u if self.start == "server" else rows.w
            w = descend(start, work, pull=((1 / self.eta, rows.u),), shift=rows.y, stream=stream)  # Oracle_i(L_i)
            y = rows.y + (w - rows.u) / self.eta  # lambda_i^{r+1}
            return _Iterate(w, y, w + self.eta * y)  # x_{0,i}^{r+} = x_i^{r+1} + eta lambda_i^{r+1}

        start = _Iterate(rows.w, rows.y, down.x.expand_as(rows.w))
        w, y, u = iterate(solve, start, work, down.iterations, batches=0)
        return Point(u), Client(w, y)

    def server(self, server: Model, up: Point, ctx: Ctx) -> Model:
        return Model(up.u)  # x_0^{r+1} = (1/N) sum of x_{0,i}^{r+}
