"""FedOpt: the server applies an adaptive optimizer to the cohort's mean change of the model.

Problem: min over x of sum_i alpha_i f_i(x).

References: S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, "Adaptive
Federated Optimization", ICLR 2021, arXiv:2003.00295v5, Algorithm 2 (FedAdagrad, FedYogi, FedAdam). T.-M. H. Hsu, H. Qi,
M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
arXiv:1909.06335 (FedAvgM, ``momentum``).

    paper          here           meaning
    x_t            x              server's model
    Delta_t        up.dw          mean difference, new - old
    m_t, v_t       m, v           first and second moment
    eta            server_lr      server step size
    beta_1, _2     beta1, beta2   decay of the moments
    tau            tau            adaptivity (v starts at tau^2)

Client state: none. Traffic per round: d values down, d up.

Deviations: none from Algorithm 2. As in the paper, there is no bias correction. With momentum, the server computes m <-
beta1 m + Delta and x <- x + eta m. The mean over the cohort is weighted by the clients' shares.

Public code: the server of KarhouTam/FL-bench (06e658b) produces the same models to within 1e-14, once its v starts at
tau^2.

Defaults: in a round, the adaptive optimizers move each coordinate by little more than server_lr. The default is
reach/10, where reach is the distance covered in a local round (lr times the mean number of steps). This default is the
distance that would result from a gradient of 0.1. Of all factors that were tried in studies/benchmarks/factors.py, it
is the smallest one with which the method keeps up with FedAvg. If clients use an optimizer such as Adam, the default is
the distance that this optimizer covers. If gradients are clipped at c, the default is at most reach c/sqrt(d), so that
the first round moves no farther than FedAvg can. With momentum, the default is 0.1 = 1 - beta1, for which the method
eventually reaches FedAvg's speed.

Attackers: a forged model moves x by the step that the optimizer takes for the mean change. With momentum, this step
equals server_lr times the change of the model. The adaptive optimizers move every coordinate by about server_lr, no
matter how far the forged model is from the current one.

Use this method if the gradients of some coordinates are rarely nonzero, as in embeddings. Tune server_lr and tau
together with the local lr.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Derived, Model, by_rule
from fedloom.local import Ctx, Nothing, Work, descend


class Server(NamedTuple):
    """Model x with first moment m and second moment v, all ``[d]``. Momentum does not change v."""

    x: Tensor
    m: Tensor
    v: Tensor


class FedOpt(Algorithm):
    """FedOpt (Reddi et al. 2021, Algorithm 2)."""

    optimiser: Literal["momentum", "adagrad", "adam", "yogi"] = Field("adam", description="server optimizer")
    server_lr: Derived = by_rule(
        description="server step size eta (default: reach/10, or 0.1 with momentum, where reach is lr times the "
        "steps per round; tuned in the paper)"
    )
    beta1: float | None = Field(
        None, ge=0, lt=1, description="decay rate of the first moment (default: 0.9, or 0 for Adagrad; Sec. 4)"
    )
    beta2: float = Field(0.99, ge=0, lt=1, description="decay rate of the second moment, for Adam and Yogi (Sec. 4)")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity tau (Sec. 4)")

    needs: ClassVar[Mapping[str, str]] = {"beta2": "optimiser adam yogi", "tau": "optimiser adagrad adam yogi"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        unit = root = ctx.layout.d**0.5
        if ctx.local.follows_gradient:
            unit = 10 if ctx.local.clip is None else max(10, root / ctx.local.clip)
        return {"server_lr": 0.1 if self.optimiser == "momentum" else ctx.reach / unit}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        return Server(x0, torch.zeros_like(x0), torch.full_like(x0, self.tau**2)), Nothing(), None

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        w = descend(down.x, work)
        return Delta(w - down.x), rows  # Delta_i^t

    def server(self, server: Server, up: Delta, ctx: Ctx) -> Server:
        x, m, v = server
        beta1 = (0.0 if self.optimiser == "adagrad" else 0.9) if self.beta1 is None else self.beta1
        square = up.dw**2
        match self.optimiser:
            case "momentum":
                m = beta1 * m + up.dw
                return Server(x + self.server_lr * m, m, v)
            case "adagrad":
                v = v + square
            case "adam":
                v = self.beta2 * v + (1 - self.beta2) * square
            case "yogi":
                v = v - (1 - self.beta2) * square * (v - square).sign()
        m = beta1 * m + (1 - beta1) * up.dw
        return Server(x + self.server_lr * m / (v.sqrt() + self.tau), m, v)
