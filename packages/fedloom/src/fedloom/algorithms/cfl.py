"""CFL: recursive clustering. Clients that pull their model in different directions are assigned to separate clusters.

Problem: min over x_1..x_k of sum_i alpha_i f_i(x_c(i)). Training determines the clusters c(i) and their number.

Reference: F. Sattler, K.-R. Mueller, W. Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2021, arXiv:1910.01991 (public code: felisat/clustered-federated-
learning).

    paper        here     meaning
    theta_c      models   model of a cluster, on the server
    Delta        dw       change of the model in local training
    alpha_ij     cosine   cosine of two clients' changes
    eps_1/eps_2  ratio    a cluster may be split if ||mean of its dw|| is below ratio times the longest dw
    g(alpha)     gap      smallest gap for a split: smallest cosine within a part minus largest across parts

Client state: none. The server stores the client's last dw and its cluster. Traffic per round: d values down, d up. The
server receives the changes of individual clients, so neither secure aggregation nor robust rules are supported.

Deviations: the paper uses two thresholds, eps_1 on the mean change and eps_2 on the longest change. Suitable values
depend on the model and the step size. Here, a single option sets the ratio of the two thresholds (0.4/1.6 in the public
code). The bipartition is optimal, as in the paper. The public code uses complete-linkage clustering, and in the round
of a split, its new clusters already average their own changes. A cluster may be split once each of its members has
participated since the last split. Absent members are represented by their last change. The bound on gradient noise is
omitted, as in the public code. Clients that join later are added to the first client's cluster.

Defaults: clusters are split at a separation gap of 0.1, and the ratio is a large value from the paper's range. By the
paper's definition, clients form two groups if the gap is positive. In practice, the gap becomes positive long before
the mean change is short. With random cosines, a gap of 0.1 occurs in 40 % of clusters with 4 clients, in 7 % with 5
clients and in 0.6 % with 6 clients. Smaller clusters are therefore not split. No cluster is split in the first fifth of
the rounds.

Public code: clients and server of felisat/clustered-federated-learning (23a1c388) produce the same models and clusters
to within 1e-15, with the thresholds, splits and means used here. The authors' notebook confuses positions in a cluster
with client ids, so a second split produces wrong results there.

Use this method if clients fall into groups and the number of groups is unknown. If ratio = 0, or if clients do not form
groups, the method is equivalent to FedAvg, and a warning is issued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, DerivedFrom0, Model, Rows, by_rule
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.algebra import directions, norm
from fedloom.rows.layout import Layout


class Server(NamedTuple):
    """Models of the clusters, and for every client its last change, its cluster and a flag.

    models and last are ``[n, d]``. cluster ``[n, 1]`` is the smallest id in the client's cluster, and the client uses
    this row of ``models``. seen ``[n, 1]`` is 1 if the client has participated since its cluster was last split.
    """

    models: Tensor
    last: Tensor
    cluster: Tensor
    seen: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the received model."""

    dw: Annotated[Tensor, Rows(base="down.x", primary=True)]


class CFL(Algorithm):
    """Clustered federated learning (Sattler et al. 2021)."""

    ratio: float = Field(0.75, ge=0, description="threshold ratio eps_1/eps_2 (paper: 0.1 to 1; public code: 0.25)")
    gap: float = Field(0.1, ge=-2, le=2, description="minimum separation gap between two parts; -2 allows every split")
    first: DerivedFrom0 = by_rule(description="number of rounds before the first split (default: a fifth of the run)")
    least: int = Field(6, ge=2, description="minimum number of members to split a cluster (3 in the public code)")

    family: ClassVar[str] = "clustered"
    uses_shares: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Any]] = {"ratio": 0.25, "gap": -2.0, "first": 20.0, "least": 3}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"first": float(ctx.rounds // 5)}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return [
            "CFL separates clients only if they form groups. Otherwise it equals FedAvg. A smaller gap separates sooner"
        ]

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        models = x0.repeat(ctx.n, 1)
        zero = x0.new_zeros(ctx.n, 1)
        return Server(models, torch.zeros_like(models), zero, zero), Nothing(), None

    def down(self, server: Server, kept: None, ctx: Ctx) -> Model:
        return Model(server.models[extend_rows(server.cluster, ctx.n)[ctx.ids, 0].long()])

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return Up(descend(down.x, work) - down.x), rows

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        state = Server(*[extend_rows(t, ctx.n).clone() for t in server])
        models, last, cluster, has_upload = *state[:2], state.cluster[:, 0], state.seen[:, 0]
        share = ctx.weight[:, 0].to(models)
        last[ctx.ids], has_upload[ctx.ids] = up.dw.to(models), 1.0
        here = torch.zeros_like(has_upload)
        here[ctx.ids] = 1.0
        for c in cluster.unique().long().tolist():
            members = (cluster == c).nonzero()[:, 0]
            mass = share[members] * here[members]
            if not bool(mass.any()):
                continue
            models[c] += mean(mass, last[members])  # theta_c <- theta_c + mean of its clients' dw
            if ctx.round <= self.first or len(members) < self.least or not bool(has_upload[members].all()):
                continue
            if norm(mean(share[members], last[members])[None]) < self.ratio * norm(last[members]).max():
                sides, gap = bipartition(last[members])
                for part in [members[side] for side in sides] if gap > self.gap else []:
                    models[part.min()], cluster[part], has_upload[part] = models[c].clone(), float(part.min()), 0.0
        return state

    def global_model(self, server: Server) -> None:
        return None

    def personal(self, down: Model, rows: Nothing, work: Work) -> Tensor:
        return down.x.expand(work.m, -1).clone()


def mean(mass: Tensor, rows: Tensor) -> Tensor:
    """Return the mean ``[d]`` of ``rows [m, d]``, weighted by ``mass [m]``."""
    return ((mass / mass.sum()).double() @ rows.double()).to(rows)


def extend_rows(rows: Tensor, n: int) -> Tensor:
    """Extend rows to ``[n, ...]``: clients that joined later get copies of the first client's row."""
    return torch.cat([rows, rows[:1].expand(max(n - len(rows), 0), *rows.shape[1:])])


def bipartition(changes: Tensor) -> tuple[tuple[Tensor, Tensor], float]:
    """Split clients into two parts, bool ``[m]``, with the smallest possible maximum of the cosines across parts.

    Also return the separation gap: the smallest cosine within a part minus the largest cosine across the parts.
    """
    unit = directions(changes).double()
    cosine, m = unit @ unit.T, len(unit)
    label = torch.arange(m)
    pairs = torch.triu_indices(m, m, 1)
    for i, j in pairs[:, cosine[pairs[0], pairs[1]].argsort(descending=True, stable=True).cpu()].T.tolist():
        if len(label.unique()) > 2:
            label[label == label[j]] = label[i].clone()
    side = label == label[0]
    within = side[:, None] == side
    return (side, ~side), float(cosine[within].min() - cosine[~within].max())
