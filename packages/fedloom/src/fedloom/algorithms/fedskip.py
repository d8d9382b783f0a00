"""FedSkip: local models move from client to client and are averaged only every few rounds.

Problem: min over x of sum_i f_i(x).

Reference: Z. Fan, Y. Wang, J. Yao, L. Lyu, Y. Zhang, Q. Tian, "FedSkip: Combatting Statistical Heterogeneity with
Federated Skip Aggregation", ICDM 2022, Algorithm 1.

    paper    here    meaning
    w        x       server's model, the mean of the local models
    w_k      w       local model
    n_k      seen    samples that a local model has been trained on since the last aggregation
    Delta    skip    number of rounds from one aggregation to the next

Client state: none. Traffic per round: d + 1 values down (another client's model, or the mean), d + 1 up. The server
stores every client's last model.

Deviations: in the paper, all clients participate. Here, the models of the cohort are permuted within the cohort. The
mean is taken over the last models of all clients that have participated, weighted by the number of samples on which
each model was trained. The run's ``weights`` have no effect on this mean. The server receives the models of individual
clients, so the method does not support secure aggregation.

Public code: given the same permutations, the training loop of MediaBrain-SJTU/FedSkip (96acb90f) produces the same
models to within 1e-15.

Use this method if clients are allowed to see the models of other clients. With ``skip`` = 1 and all clients, the method
is equivalent to FedAvg weighted by samples. If most clients are absent, the model moves little, and a warning is
issued.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Kept, Model
from fedloom.local import Ctx, Nothing, Work, descend


class Down(NamedTuple):
    """Model w ``[m, d]``, and the number of samples ``[m, 1]`` used to train it since the last aggregation."""

    w: Tensor
    seen: Tensor


class Up(NamedTuple):
    """Model w ``[m, d]``, and the number of samples ``[m, 1]`` used to train it since the last aggregation."""

    w: Annotated[Tensor, Kept(primary=True, weight="seen")]
    seen: Annotated[Tensor, Kept()]


class FedSkip(Algorithm):
    """FedSkip (Fan et al. 2022, Algorithm 1)."""

    skip: int = Field(3, ge=1, description="number of rounds from one aggregation to the next (3 in the authors' code)")

    mixes: ClassVar[bool] = True

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Nothing, Up]:
        return Model(x0), Nothing(), Up(x0, torch.zeros_like(x0[:1]))

    def down(self, server: Model, kept: Up, ctx: Ctx) -> Down:
        if (ctx.round - 1) % self.skip == 0:
            return Down(server.x.expand(ctx.m, -1), torch.zeros_like(kept.seen))  # aggregation: start from the mean
        order = torch.argsort(ctx.ids)  # permute clients independently of the cohort's order
        source = torch.empty_like(order)
        source[order] = order[torch.randperm(ctx.m, generator=ctx.rng("permutation"))]
        return Down(kept.w[source], kept.seen[source])  # skip: every client continues with another's model

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return Up(descend(down.w, work), down.seen + work.sizes.to(down.seen)), rows

    def ranges(self, down: Down, up: Up, work: Work) -> dict[str, tuple[Tensor, Tensor]]:
        samples = down.seen + work.sizes.to(down.seen)
        return {"seen": (samples, samples)}

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(up.w)  # mean of all local models, weighted by their samples
