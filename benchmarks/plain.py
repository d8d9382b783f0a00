"""Plain PyTorch loop to which the engine benchmark compares fedloom: one nn.Module and one SGD optimizer per client.

The clients' batches are sliced and normalized before the measurement starts. Methods operate on lists of parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import CLASSES, Workload

from fedloom.data.federation import Federation
from fedloom.models import Dropout

Batches = list[tuple[Tensor, Tensor]]
Parameters = list[Tensor]
Extra = Callable[[Tensor, int], Tensor]
"""Function that takes (parameter, index of the parameter) and returns the term to add to the parameter's gradient."""

RATE, LAM, RHO = 0.01, 1.0, 0.1


def with_torch_dropout(module: nn.Module) -> nn.Module:
    """Replace fedloom's dropout layers in a module by `torch.nn.Dropout`, and return the module."""
    for name, child in module.named_children():
        if isinstance(child, Dropout):
            setattr(module, name, nn.Dropout(child.p))
        else:
            with_torch_dropout(child)
    return module


def train(module: nn.Module, batches: Batches, extra: Extra | None = None) -> None:
    """Train a module for one epoch of SGD."""
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    module.train()
    for x, y in batches:
        optimiser.zero_grad()
        functional.cross_entropy(module(x), y).backward()
        if extra is not None:
            for k, p in enumerate(module.parameters()):
                assert p.grad is not None
                p.grad.add_(extra(p.detach(), k))
        optimiser.step()


class PlainLoop:
    """Rounds of a method on a workload, in which the clients are trained one after another."""

    def __init__(self, workload: Workload, fed: Federation, method: str) -> None:
        module = with_torch_dropout(workload.model.build(workload.shape, CLASSES))
        self.workload, self.method = workload, method
        self.x = [p.detach().clone() for p in module.parameters()]
        self.c = [torch.zeros_like(p) for p in self.x]
        self.cohort = workload.cohort_of(0).tolist()
        self.modules = {i: copy.deepcopy(module) for i in self.cohort}
        self.personal = {i: copy.deepcopy(module) for i in self.cohort}
        self.state = {i: [torch.zeros_like(p) for p in self.x] for i in self.cohort}
        self.local = {i: [p.clone() for p in self.x] for i in self.cohort}
        self.batches: dict[int, Batches] = {}
        self._changes: Parameters = []
        for i in self.cohort:
            where = fed.indices("train", i)
            pieces = zip(fed.fetch(where).split(workload.batch), fed.targets(where).split(workload.batch), strict=True)
            self.batches[i] = [(x.clone(), y.clone()) for x, y in pieces]

    def __call__(self, round: int) -> None:
        """Compute one round. All rounds have the same cohort."""
        client = getattr(self, self.method)
        mean = [torch.zeros_like(p) for p in self.x]
        for i in self.cohort:
            for total, new in zip(mean, client(i), strict=True):
                total.add_(new, alpha=1 / len(self.cohort))
        if self.method == "scaffold":
            for c, change in zip(self.c, self._changes, strict=True):
                c.add_(change, alpha=1 / self.workload.clients)
            self._changes = []
        self.x = mean

    def _start(self, i: int) -> nn.Module:
        module = self.modules[i]
        with torch.no_grad():
            for p, x in zip(module.parameters(), self.x, strict=True):
                p.copy_(x)
        return module

    def fedavg(self, i: int) -> Sequence[Tensor]:
        module = self._start(i)
        train(module, self.batches[i])
        return [p.detach() for p in module.parameters()]

    def ditto(self, i: int) -> Sequence[Tensor]:
        x, module = self.x, self._start(i)
        train(module, self.batches[i])
        train(self.personal[i], self.batches[i], lambda p, k: LAM * (p - x[k]))
        return [p.detach() for p in module.parameters()]

    def flame(self, i: int) -> Sequence[Tensor]:
        w, pi, alpha = self.local[i], self.state[i], LAM / self.workload.clients
        train(self.personal[i], self.batches[i], lambda p, k: LAM * (p - w[k]))
        sent = []
        for k, p in enumerate(self.personal[i].parameters()):
            w[k] = (alpha * p.detach() + RHO * self.x[k] - pi[k]) / (alpha + RHO)
            pi[k] = pi[k] + RHO * (w[k] - self.x[k])
            sent.append(w[k] + pi[k] / RHO)
        return sent

    def scaffold(self, i: int) -> Sequence[Tensor]:
        ci, module, steps = self.state[i], self._start(i), len(self.batches[i])
        shift = [c - mine for c, mine in zip(self.c, ci, strict=True)]
        train(module, self.batches[i], lambda _p, k: shift[k])
        ended = [p.detach() for p in module.parameters()]
        fresh = [mine - c + (x - y) / (steps * RATE) for mine, c, x, y in zip(ci, self.c, self.x, ended, strict=True)]
        changes = [new - old for new, old in zip(fresh, ci, strict=True)]
        self._changes = [a + b for a, b in zip(self._changes, changes, strict=True)] if self._changes else changes
        self.state[i] = fresh
        return ended
