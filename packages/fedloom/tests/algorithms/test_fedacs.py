"""FedACS: whom its attention is over, and Theorem 2.1 with lambda and alpha_k of Eq. 3."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from fedloom.algorithms import FedACS
from fedloom.choose.mixers import attention
from fedloom.local import LocalSGD
from fedloom.testing import Problem, federate
from fedloom.testing.federate import ReferenceFederation

COHORTS = [(0, 2, 3), (2, 3), (3, 4)]
"""Client 1 is never seen."""


def mixture(w: Tensor, quantile: float) -> Tensor:
    """Eq. 4 over all rows, in sums."""
    unit = [v / v.norm() for v in w]
    s = torch.stack([torch.stack([a @ b for b in unit]) for a in unit])
    delta = torch.quantile(s.flatten(), quantile)
    rows = []
    for i in range(len(w)):
        chosen = [j for j in range(len(w)) if j == i or s[i, j] >= delta - 1e-12]
        rows.append(sum(s[i, j] * w[j] for j in chosen) / sum(s[i, j] for j in chosen))
    return torch.stack(rows)


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("among", "whose"), [("cohort", (0, 3)), ("seen", (0, 2, 3, 4)), ("all", (0, 1, 2, 3, 4))])
def test_attention_is_over_the_clients_that_are_named(
    among: Literal["cohort", "seen", "all"], whose: tuple[int, ...], quantile: float
) -> None:
    p, method = Problem.random(3), FedACS(among=among, quantile=quantile, copies="off")
    state = federate(method, p, 3, cohorts=COHORTS)[-1]
    cohort, everyone = (0, 3), state.kept
    kept = type(everyone)(everyone.w if method.mixes_all else everyone.w[[*cohort]])
    down = method.down(state.server, kept, ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(4, cohort))
    want = mixture(everyone.w[[*whose]], quantile)[[whose.index(i) for i in cohort]]
    torch.testing.assert_close(down.u, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("among", ["seen", "all"])
def test_with_every_client_in_every_round_all_three_are_one(among: Literal["seen", "all"]) -> None:
    p = Problem.random(5)
    here, there = (federate(FedACS(among=a), p, 4, noise=0.5)[-1] for a in ("cohort", among))
    assert torch.equal(here.rows.w, there.rows.w)


def test_lambda_moves_by_alpha_k_towards_the_mixture() -> None:
    """Eq. 3 with grad R_i = w_i - sum_j s_ij w_j; alpha_k = 1 is Eq. 4."""
    p, local = Problem.random(4), LocalSGD(lr=0.2, schedule="exponential", decay=0.5)
    state = federate(FedACS(), p, 3, noise=0.5)[-1]
    ctx = ReferenceFederation(p.oracle(), p.alpha, local).ctx(3, range(p.n))
    w = state.kept.w
    mixed = FedACS().down(state.server, state.kept, ctx).u
    for lam in (0.4, 2.0):
        got = FedACS(lam=lam).down(state.server, state.kept, ctx).u
        torch.testing.assert_close(got, w - lam * 0.05 * (w - mixed), rtol=0, atol=1e-12)
    whole = FedACS(lam=20.0).down(state.server, state.kept, ctx).u
    assert torch.equal(whole, mixed)


def residuals(p: Problem, rounds: int, lam: float, method: FedACS) -> list[float]:
    """||grad F + lambda grad R||^2 of every round's models, with one full gradient step of size 1/sqrt(K) per round."""
    local = LocalSGD(lr=1 / math.sqrt(rounds), batch_size="full", epochs=1)
    found = []
    for state in federate(method, p, rounds, local=local):
        w = state.kept.w
        slope = torch.einsum("nij,nj->ni", p.hessian, w - p.minimiser)
        found.append(float((slope + lam * (w - attention(w, method.quantile) @ w)).square().sum()))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_theorem_2_1(seed: int) -> None:
    """With beta_k = 1/sqrt(K) and alpha_k = lambda/sqrt(K) the smallest squared gradient falls like 1/sqrt(K)."""
    p, lam = Problem.random(seed), 0.5
    method = FedACS(lam=lam, quantile=0.0)
    least = {k: min(residuals(p, k, lam, method)) for k in (25, 100, 400)}
    assert least[25] > 4 * least[100] > 16 * least[400]  # each by more than the theorem's factor 2
    plain = min(residuals(p, 400, lam, FedACS(quantile=0.0)))  # alpha_k = 1 is no step of lambda R
    assert plain > 100 * least[400]
