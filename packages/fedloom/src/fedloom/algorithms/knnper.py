"""kNN-Per: the global model of FedAvg, combined with a client's own samples that are nearest in representation space.

Problem: min over x of sum_i alpha_i f_i(x). Client i predicts the probabilities lambda_i kNN_i + (1 - lambda_i) x.

Reference: O. Marfoq, G. Neglia, L. Kameni, R. Vidal, "Personalized Federated Learning through Local Memorization", ICML
2022, arXiv:2111.09360v3, Algorithm 1 (public code: omarfoq/knn-per).

    paper       here        meaning
    h_S         x           server's model
    phi_hS      features    representation, the head's input
    k           neighbours  number of samples from which a prediction is made
    lambda_m    weight      weight of the kNN in a prediction
    N_m         memory      the client's samples as (representation, label)

Client state: none. The memory can be computed from x and the client's samples. Traffic per round: the network's
parameters, down and up. The memory never leaves its client.

Deviations: a neighbor at distance r has the weight exp(-r^2 / (scale times the number of features)), as in the public
code. In the paper, the weight is exp(-r). In the paper, lambda_m is chosen on a validation set. Here, it is chosen on a
fraction of the training samples that is not used in local training. The value among 0, 0.1, ..., 1 with the best
accuracy is used. If several values tie, the one with the lowest loss is used. Afterwards, the memory contains all
samples, or a random subset of the samples if its capacity is too small for all. If the weight is chosen on fewer than
30 samples, a client's model may become worse than the server's model, and a warning is issued.

Public code: clients and server of omarfoq/knn-per (ee175202) produce the same x and the same predictions to within
1e-12, or to within 1e-6 with faiss in float32. By the accuracies that their code computes, the lambda chosen here is
also the best. Their script uses the accuracies on the test set.

Use this method if clients observe the same inputs but label or use them differently. To use this method, set ``memory``
in [model]. A file of personal models contains representations of training samples, so it should not leave the client.
With weight 0, or with a model that has no memory, the method is equivalent to FedAvg. If the model has no memory, a
warning is issued. With weight 1, predictions come from the kNN alone. The task must be a classification.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model, Sent
from fedloom.local import Ctx, Nothing, Work, descend, split
from fedloom.models.memory import KEYS, LABELS, RULE, mixed, recalled
from fedloom.models.mixture import log_probabilities
from fedloom.rows import masks
from fedloom.rows.layout import Layout
from fedloom.seeds import generator

WEIGHT_CHOICES = torch.linspace(0, 1, 11)
FEW_SAMPLES = 30  # the standard error of an accuracy on 30 samples is up to 0.09


class Down(NamedTuple):
    """The server's model x ``[d]``. The model's memory is empty and is not sent."""

    x: Annotated[Tensor, Sent(part="network")]


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the model, which is 0 in the memory."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="network")]


class KNNPer(Algorithm):
    """kNN-Per (Marfoq et al. 2022, Algorithm 1)."""

    neighbours: int = Field(10, ge=1, description="k, number of neighbors used for a prediction (10 in Sec. 5)")
    scale: float = Field(
        1.0, gt=0, description="kernel width, as a multiple of the number of features (1 in the public code)"
    )
    weight: float | None = Field(
        None, ge=0, le=1, description="lambda, weight of the kNN prediction (default: each client chooses its own)"
    )
    share: float = Field(0.2, gt=0, lt=1, description="fraction of the training samples used to choose lambda")

    family: ClassVar[str] = "personalised"

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~memory_of(layout)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if KEYS not in layout.names:
            return ["kNN-Per without a memory is the same as FedAvg. Set memory in [model] to a number of samples"]
        fewest = max(1, round(self.share * int(ctx.sizes.min())))
        few = f"kNN-Per chooses a client's weight on only {fewest} samples, so its model may become worse. Set weight"
        return [few] if self.weight is None and fewest < FEW_SAMPLES else []

    def client(self, down: Down, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        memory = memory_of(work.layout).to(down.x.device)
        if not bool(memory.any()):
            return Up(descend(down.x, work) - down.x), rows
        part = work if self.weight is not None else split(work, self.share)[0]
        return Up(masks.zero_outside_(descend(down.x, part, mask=~memory) - down.x, ~memory)), rows

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(server.x + up.dw * self.part("network", ctx.layout).to(server.x.device))

    def personal(self, down: Down, rows: Nothing, work: Work) -> Tensor:
        models = down.x.expand(work.m, -1).clone()
        if KEYS not in work.layout.names:
            return models
        tree, held = work.layout.tree(models), split(work, self.share)[1]
        assert held.places is not None
        for i, (z, y) in enumerate(work.features(down.x)):
            labels, weight = torch.eye(tree[LABELS].shape[-1]).to(z)[y.long()], self.weight
            if weight is None:
                p = log_probabilities(outputs_of(work.layout, down.x, z)).exp()
                weight = self._chosen(z, labels, p, held.places[i, : int(held.sizes[i])].to(z.device))
            order = torch.randperm(len(z), generator=generator(work.seed, client=int(work.ids[i]), purpose="memory"))
            order = order[: tree[KEYS].shape[1]].sort().values.to(z.device)
            tree[KEYS][i, : len(order)], tree[LABELS][i, : len(order)] = z[order], labels[order]
            tree[RULE][i] = z.new_tensor([weight, self.scale, self.neighbours])
        return models

    def _chosen(self, z: Tensor, labels: Tensor, p: Tensor, held: Tensor) -> float:
        """Return the kNN weight that best predicts ``held`` samples from all others, or 0 if there are no others."""
        rest, truth = torch.ones(len(z), dtype=torch.bool, device=z.device).index_fill_(0, held, False), labels[held]
        if not bool(rest.any()):
            return 0.0
        kernel = z.new_tensor([self.scale, self.neighbours])
        q = recalled(z[held], z[rest], labels[rest], *kernel)
        logs = [mixed(p[held], q, weight) for weight in WEIGHT_CHOICES.to(z)]
        wrong = [int((log.argmax(1) != truth.argmax(1)).sum()) for log in logs]
        loss = [-float((log * truth).sum()) for log in logs]
        return float(WEIGHT_CHOICES[min(range(len(WEIGHT_CHOICES)), key=lambda at: (wrong[at], loss[at]))])


def outputs_of(layout: Layout, x: Tensor, z: Tensor) -> Tensor:
    """Return the outputs ``[b, c]`` of a model's last layer for representations ``[b, k]``, given the model ``[d]``."""
    name, tree = list(layout.matrix_shapes)[-1], layout.tree(x)
    return z @ tree[name].T + tree.get(f"{name.rpartition('.')[0]}.bias", 0)


def memory_of(layout: Layout) -> Tensor:
    """Return a bool mask ``[d]`` that marks the memory in a model (`fedloom.models.WithMemory`)."""
    return layout.mask(KEYS, LABELS, RULE) if KEYS in layout.names else torch.zeros(layout.d, dtype=torch.bool)
