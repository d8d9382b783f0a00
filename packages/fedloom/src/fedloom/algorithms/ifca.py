"""IFCA: several models. Every client trains the model that fits its data best.

Problem: min over x_1..x_k of sum_i alpha_i min over j of f_i(x_j).

Reference: A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020, arXiv:2006.04088v3, Algorithm 1, option II (model averaging).

    paper      here        meaning
    theta_j    x, more     models of the k clusters, on the server
    j_i choice cluster of client i: the model with the smallest loss on its training set k clusters number of models tau
    local local steps

Client state: none. Traffic per round: k d values down, d + 1 up. The server receives the models of individual clients,
so the method supports neither secure aggregation nor robust rules.

Deviations: a client is weighted by its share alpha_i relative to the other members of its cluster. If none of the
clients in the cohort chooses a model, this model remains unchanged. The model of the first cluster starts from the
run's initial model. The other models start as permutations of its entries within every tensor. Such permutations are
equally likely as initial models. In the paper, all models are drawn at random, and for the smaller problems the best of
several draws is used.

Defaults: two clusters, because the right number depends on the federation.

Public code: the training on MNIST and the server on FEMNIST of jichan3751/ifca (61e44b89), with a different network,
produce the same models and choices to within 1e-15. The MNIST training was replayed with equal shares. The FEMNIST
server was replayed with cohorts, and with shares proportional to samples.

Attackers: a forged model affects the mean of only one cluster. If k of n clients chose this cluster, the forged model
moves the cluster's model n/k times as far as it would move FedAvg's model.

Use this method if clients form groups that need separate models. If clients do not form groups, each model learns from
only some of the clients, and therefore learns more slowly. With one cluster, the method is equivalent to FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Rows
from fedloom.local import Ctx, Nothing, Work, descend


class Server(NamedTuple):
    """Model x ``[d]`` of the first cluster, and the concatenated models of the other clusters ``[(k - 1) d]``."""

    x: Tensor
    more: Tensor


class Up(NamedTuple):
    """Trained model w ``[m, d]``, and the number of the chosen cluster ``[m, 1]``."""

    w: Annotated[Tensor, Rows(primary=True)]
    choice: Annotated[Tensor, Rows(label=True)]


class IFCA(Algorithm):
    """IFCA (Ghosh et al. 2020, Algorithm 1)."""

    clusters: int = Field(2, ge=1, description="k, number of models (2 to 4 in Sec. 6)")

    family: ClassVar[str] = "clustered"
    uses_shares: ClassVar[bool] = True

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        g, more = ctx.rng("clusters"), list[Tensor]()
        for _ in range(self.clusters - 1):
            views = ctx.layout.tree(x0.clone())
            more += [
                value.flatten()[torch.randperm(value.numel(), generator=g).to(x0.device)] for value in views.values()
            ]
        return Server(x0, torch.cat([x0[:0], *more])), Nothing(), None

    def client(self, down: Server, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        start, choice = self._chosen(down, work)
        return Up(descend(start, work), choice.to(start)), rows

    def received(self, down: Server, up: Up) -> Tensor:
        return self._models(down)[up.choice[:, 0].long().clamp(0, self.clusters - 1)]

    def ranges(self, down: Server, up: Up, work: Work) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        return {"choice": (0.0, self.clusters - 1.0)}

    def _models(self, server: Server) -> Tensor:
        """Return the models of all clusters, ``[k, d]``."""
        return torch.cat([server.x, server.more]).view(self.clusters, -1)

    def _chosen(self, down: Server, work: Work) -> tuple[Tensor, Tensor]:
        """Choose the cluster of each client.

        Return the model ``[m, d]`` and the number ``[m, 1]`` of each client's cluster.
        """
        models = self._models(down)
        if self.clusters == 1:
            return models.expand(work.m, -1), torch.zeros(work.m, 1, dtype=torch.long, device=models.device)
        choice = torch.cat([work.loss(model) for model in models], 1).argmin(
            1, keepdim=True
        )  # j_i = argmin F_i(theta_j)
        return models[choice[:, 0]], choice

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        models, share = self._models(server).clone(), ctx.weight[ctx.ids].to(up.w)
        for j in range(self.clusters):
            mass = share * (up.choice == j)
            if bool(mass.any()):
                models[j] = ((mass / mass.sum()).T.double() @ up.w.double())[0]  # theta_j = mean of its clients' models
        return Server(models[0], models[1:].flatten())

    def global_model(self, server: Server) -> None:
        return None

    def personal(self, down: Server, rows: Nothing, work: Work) -> Tensor:
        return self._chosen(down, work)[0].clone()
