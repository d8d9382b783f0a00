"""Short runs on noisy quadratics, and what is compared of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.local import LocalSGD
from fedloom.testing import Problem, ReferenceState, federate

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
SGD = LocalSGD(lr=0.1, batch_size=2)
"""One to four steps."""
PARTIAL = [(0, 1), (1, 3, 4), (2,), (0, 2, 4), (1, 2, 3)]


def run(
    algorithm: Algorithm, p: Problem, rounds: int = 5, local: LocalSGD = SGD, **options: Any
) -> list[ReferenceState]:
    return federate(algorithm, p, rounds, local=local, **{"noise": 0.5, **options})


def equal(got: Tensor, want: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def models(states: list[ReferenceState]) -> Tensor:
    return torch.stack([s.server.x for s in states])


def steps_of(p: Problem, local: LocalSGD = SGD) -> Tensor:
    return torch.tensor([[local.batches(size)] for size in p.sizes.tolist()])
