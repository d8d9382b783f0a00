"""Workloads of the engine benchmark: models, and clients that have random data of the appropriate size."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation, Split
from fedloom.models import CNN, MLP, ModelSpec, ResNet18, Softmax

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """Model that every client of a cohort trains by SGD for one epoch."""

    title: str
    model: ModelSpec
    shape: tuple[int, ...]
    clients: int
    cohort: int
    samples: int
    batch: int
    rounds: int
    """Number of rounds per block, chosen so that a block takes a large part of a second."""

    def federation(self) -> Federation:
        """Return clients with random images, stored as bytes like the images of data sources. No sample is shared."""
        total = self.clients * self.samples
        g = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (total, prod(self.shape)), dtype=torch.uint8, generator=g)
        y = torch.randint(0, CLASSES, (total,), generator=g)
        names = tuple(str(c) for c in range(CLASSES))
        half = torch.tensor([0.5])
        data = Dataset("random", x.view(total, *self.shape), y, classes=names, mean=half, std=half)
        empty = Split(torch.empty(0, dtype=torch.long), torch.zeros(self.clients + 1, dtype=torch.long))
        train = Split(torch.randperm(total, generator=g), torch.arange(self.clients + 1) * self.samples)
        return Federation(
            data,
            {"train": train, "validation": empty, "test": empty},
            names=tuple(f"client {i}" for i in range(self.clients)),
        )

    def cohort_of(self, round: int) -> Tensor:
        """Return the ids ``[m]`` of the clients in a round."""
        g = torch.Generator().manual_seed(round)
        return torch.randperm(self.clients, generator=g)[: self.cohort].sort().values

    def multiply_adds(self) -> int:
        """Return the number of multiply-adds in a round.

        They compute the forward passes, the gradients of all weights, and the gradients of the inputs of every layer
        except the first one.
        """
        module = self.model.build(self.shape, CLASSES)
        per_layer: list[int] = []

        def count(layer: nn.Module, _args: object, out: Tensor) -> None:
            weight = layer.weight
            assert isinstance(weight, Tensor)
            per_layer.append(weight.numel() * prod(out.shape[2:]))

        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.register_forward_hook(count)
        with torch.no_grad():
            module(torch.zeros(1, *self.shape))
        return self.cohort * self.samples * (3 * sum(per_layer) - per_layer[0])


WORKLOADS = {
    "W1": Workload("softmax 784-10, 100 clients", Softmax(), (1, 28, 28), 100, 100, 200, 20, 5),
    "W2": Workload("MLP 784-200-200-10, 100 clients", MLP(hidden=(200, 200)), (1, 28, 28), 100, 100, 200, 20, 2),
    "W3": Workload("CNN 5x5 32-64-512, 20 of 100 clients", CNN(), (1, 28, 28), 100, 20, 100, 20, 1),
    "W4": Workload(
        "CNN 3x3 32-64-128, dropout, 50 of 1,000 clients",
        CNN(kernel=3, pool=(False, True), dropout=0.25, hidden=(128,), dropout_hidden=0.5),
        (3, 32, 32),
        1000,
        50,
        50,
        10,
        1,
    ),
    "W5": Workload("ResNet-18 with GroupNorm, 2 of 20 clients", ResNet18(), (3, 32, 32), 20, 2, 160, 20, 1),
}
