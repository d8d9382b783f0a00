"""FedACS: what its attention is at its ends, and what it does not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from short_runs import PARTIAL, SEEDS, equal
from torch import Tensor

from fedloom.algorithms import FedACS, LocalOnly
from fedloom.choose.mixers import attention
from fedloom.local import LocalSGD
from fedloom.seeds import generator
from fedloom.testing import Problem, federate

QUANTILES = [0.0, 0.1, 0.37, 0.5, 0.74, 0.9, 1.0]
SGD = LocalSGD(lr=0.1, batch_size=2)


def draw(seed: int, m: int = 6, d: int = 7, centre: float = 0.0) -> Tensor:
    return centre + torch.randn(m, d, generator=generator(seed, purpose="models"), dtype=torch.float64)


def cosines(w: Tensor) -> np.ndarray:
    a = w.numpy()
    return np.array([[x @ y / np.sqrt((x @ x) * (y @ y)) for y in a] for x in a])


@SEEDS
@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("centre", [0.0, 0.5, 2.0])
def test_attention_by_definition(seed: int, quantile: float, centre: float) -> None:
    w = draw(seed, centre=centre)
    s = cosines(w)
    np.fill_diagonal(s, 1.0)
    delta = np.quantile(s, quantile)
    for i, row in enumerate(attention(w, quantile)):
        chosen = s[i] * ((s[i] >= delta) | (np.arange(len(s)) == i))
        if chosen.sum() > 1e-3:  # nearer to zero the quotient has no twelve digits
            equal(row, torch.tensor(chosen / chosen.sum()))


@SEEDS
def test_without_threshold_everyone_counts_by_cosine(seed: int) -> None:
    w = draw(seed, centre=2.0)
    s = torch.tensor(cosines(w))
    assert (s > 0).all()
    equal(attention(w, 0.0) @ w, (s @ w) / s.sum(1, keepdim=True))


@SEEDS
def test_with_the_highest_threshold_it_is_local_training(seed: int) -> None:
    p = Problem.random(seed)
    options = {"local": SGD, "noise": 0.5, "cohorts": PARTIAL}
    got = federate(FedACS(quantile=1.0), p, 5, **options)
    want = federate(LocalOnly(), p, 5, **options)
    for a, b in zip(got, want, strict=True):
        equal(a.rows.w, b.rows.v)
        equal(a.kept.w, b.rows.v)


@pytest.mark.parametrize("quantile", QUANTILES)
def test_equal_models_stay(quantile: float) -> None:
    w = draw(0, m=1).expand(5, -1)
    equal(attention(w, quantile) @ w, w)


@SEEDS
@pytest.mark.parametrize("quantile", QUANTILES)
def test_permutation_and_scale(seed: int, quantile: float) -> None:
    w, order = draw(seed, centre=0.5), torch.tensor([3, 0, 5, 1, 4, 2])
    a = attention(w, quantile)
    equal(attention(w[order], quantile), a[order][:, order])
    scale = torch.tensor([[0.1], [7.0], [1.0], [3.0], [0.5], [20.0]], dtype=torch.float64)
    equal(attention(scale * w, quantile), a)


@SEEDS
@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("centre", [0.0, 2.0])
def test_rows_sum_to_one(seed: int, quantile: float, centre: float) -> None:
    a = attention(draw(seed, centre=centre), quantile)
    equal(a.sum(1), torch.ones(6, dtype=torch.float64), 1e-10)


@SEEDS
def test_orthogonal_groups_do_not_mix(seed: int) -> None:
    w = torch.zeros(6, 8, dtype=torch.float64)
    w[:3, :4], w[3:, 4:] = draw(seed, 3, 4, 2.0), draw(seed + 10, 3, 4, 2.0)
    for quantile in (0.51, 0.6, 0.8):  # half of all cosines are zero, so these thresholds are positive
        a = attention(w, quantile)
        equal(a[:3, 3:], torch.zeros(3, 3, dtype=torch.float64), 0)
        equal(a[3:, :3], torch.zeros(3, 3, dtype=torch.float64), 0)
        assert (a > 0).sum() > 6


def test_equiangular_models_in_closed_form() -> None:
    n, s = 5, 0.3
    gram = torch.full((n, n), s, dtype=torch.float64).fill_diagonal_(1.0)
    w = torch.linalg.cholesky(gram)
    others = w.sum(0) - w
    equal(attention(w, 0.0) @ w, (w + s * others) / (1 + s * (n - 1)))


def test_more_quantile_is_less_collaboration() -> None:
    w = draw(1, centre=3.0)
    assert bool((w @ w.T > 0).all())
    partners = [int((attention(w, q) != 0).sum()) for q in QUANTILES]
    assert partners == sorted(partners, reverse=True)
    assert partners[0] == 36
    assert partners[-1] == 6


def test_weights_that_cancel_leave_a_client_its_own_model() -> None:
    a = attention(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), 0.0)
    equal(a, torch.eye(2, dtype=torch.float64), 0)
    zero = torch.zeros(3, 4, dtype=torch.float64)
    equal(attention(zero, 0.0), torch.eye(3, dtype=torch.float64), 0)


def test_tiny_models_have_directions() -> None:
    w = draw(2, centre=1.0)
    equal(attention(1e-20 * w, 0.4), attention(w, 0.4))


def test_clients_out_of_the_cohort_keep_their_rows_and_mix_with_no_one() -> None:
    p = Problem.random(0)
    before, after = federate(FedACS(quantile=0.0), p, 4, local=SGD, noise=0.5, cohorts=PARTIAL)[-2:]
    rest = [1, 3]
    equal(after.rows.w[rest], before.rows.w[rest], 0)
    equal(after.kept.w[rest], before.kept.w[rest], 0)
    mine = before.kept.w[[0, 2, 4]]
    local = federate(FedACS(quantile=0.0), p, 1, local=SGD, noise=0.0, cohorts=[PARTIAL[3]] * 4, start=before)[-1]
    steps = torch.tensor([[SGD.batches(size)] for size in p.sizes.tolist()])
    start = before.kept.w.clone()
    start[[0, 2, 4]] = attention(mine, 0.0) @ mine
    equal(local.kept.w[[0, 2, 4]], p.descent(start, steps, 0.1)[[0, 2, 4]])
