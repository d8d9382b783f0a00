"""FedDyn: dynamic regularization that makes local and global stationary points agree.

Problem: min over theta of sum_i alpha_i f_i(theta), where alpha_i = 1/n in the paper.

Reference: D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated Learning
Based on Dynamic Regularization", ICLR 2021, arXiv:2111.04263, Algorithm 1.

    paper              here     meaning
    theta^t            x        server's model
    theta_k^t          w        client's model
    grad L_k(th_k^t)   hi       client's gradient memory, equal to grad f_i(w) after an exact step
    h^t                h        server's mean of all hi
    alpha              alpha    strength of the pull

Client state: d values (hi). Traffic per round: d values down, d up.

Deviations: alpha is the same for all clients, as in the paper. In the public code, the alpha of a client is scaled by
mean(n)/n_i (``scaled``, which sends one more number down). This scaling already weights clients by their numbers of
samples, so it needs ``client_weights = "uniform"``. The public code also clips gradients at 10. In this implementation,
clipping is a setting of local training. The difference w - x is sent once, and the server computes both h and the mean
over the cohort from it.

Public code: the clients of alpemreacar/FedDyn (48a19fa) produce the same models to within 1e-15, with ``scaled`` and
clipping at 10.

Defaults: alpha = 1/reach, where reach is the distance covered in a round (lr times the mean number of steps). If the
gradient is constant, the server's model then moves by 1/alpha times the gradient in each round, which is FedAvg's
speed.

Attackers: h adds the change of the mean a second time. In a round with m of n clients, a forged model therefore moves
theta (1 + m/n) times as far as in FedAvg.

Use this method like SCAFFOLD, but with half the traffic, if clients solve their local problems well. Large steps with a
small alpha can diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Mean, Model, by_rule, require_equal_shares
from fedloom.local import Ctx, Work, descend
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Model x, and h, the mean of all clients' gradient memories, both ``[d]``."""

    x: Tensor
    h: Tensor


class ScaledModel(NamedTuple):
    """Model x ``[d]`` and the mean number of samples per client ``[1]``."""

    x: Tensor
    mean: Tensor


class Client(NamedTuple):
    """Gradient memory hi ``[m, d]``."""

    hi: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the received model."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, accumulates=True)]


class FedDyn(Algorithm):
    """FedDyn (Acar et al. 2021, Algorithm 1)."""

    alpha: Derived = by_rule(
        description="weight of the dynamic regularization (default: 1/reach, where reach is lr times the steps per "
        "round; 0.01 in the authors' example)"
    )

    scaled: bool = Field(
        False,
        description="set alpha_i to alpha * mean(n) / n_i, so that it depends on client i's number of samples "
        "(public code)",
    )
    paper: ClassVar[Mapping[str, Any]] = {"alpha": 0.01}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"alpha": 1 / ctx.reach}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero = torch.zeros_like(x0)
        return Server(x0, zero), Client(zero), None

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.scaled:
            require_equal_shares(self, "scaled", ctx)
        return []

    def down(self, server: Server, kept: None, ctx: Ctx) -> Model | ScaledModel:
        return ScaledModel(server.x, ctx.sizes.to(server.x).mean(0)) if self.scaled else Model(server.x)

    def client(self, down: Model | ScaledModel, rows: Client, work: Work) -> tuple[Up, Client]:
        x, hi = down.x, rows.hi
        pull = ((self._alpha(down, work), x),)
        w = descend(x, work, pull=pull, shift=-hi)  # Eq. 1: min L_k - <hi, w> + alpha/2 ||w - x||^2
        return self.encode(w, down, rows, work)

    def encode(self, model: Tensor, down: Model | ScaledModel, rows: Client, work: Work) -> tuple[Up, Client]:
        dw = model - down.x
        return Up(dw), Client(rows.hi - self._alpha(down, work) * dw)  # grad L_k(theta_k^t), below Eq. 1

    def _alpha(self, down: Model | ScaledModel, work: Work) -> Any:
        return self.alpha * down.mean / work.sizes.to(down.x) if isinstance(down, ScaledModel) else self.alpha

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        h = server.h - self.alpha * up.dw * ctx.part  # h^t = h^{t-1} - alpha (1/m) sum_k (theta_k - theta^{t-1})
        return Server(server.x + up.dw - h / self.alpha, h)  # theta^t = mean over the cohort - h^t / alpha

    def reshared(self, server: Server, moved: Up, ctx: Ctx) -> Server | None:
        return None if self.scaled else server._replace(h=server.h - self.alpha * moved.dw)
