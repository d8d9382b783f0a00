"""The deployed noise: its distribution, its grid, its source, and the sensitivity that is accounted for."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.engine import privacy
from fedloom.rows.aggregators import PrivateMean, WeightedMean
from fedloom.rows.channels import Clip, GaussianNoise
from fedloom_sites.deploy import noise
from fedloom_sites.deploy.noise import ReleasedMean, ReleasedNoise, deployed_part, noisy_sum

POSITIVE = st.floats(min_value=1e-12, max_value=1e12)


def zeros(d: int) -> torch.Tensor:
    return torch.zeros(1, d, dtype=torch.float64)


class Rng:
    """A context whose generators must not be asked for."""

    def rng(self, purpose: str) -> torch.Generator:
        raise AssertionError(purpose)


CTX: Any = Rng()


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every seedable generator of Python, numpy and PyTorch is used up at the same place before each test's draws."""
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1][1])  # noqa: NPY002


# --- distribution


@pytest.mark.parametrize(("clip", "sigma"), [(1.0, 2.0), (0.3, 1.7), (5.0, 0.01)])
def test_the_noise_is_gaussian(clip: float, sigma: float) -> None:
    """Mean, variance, kurtosis and tails of 10,000 draws, each within five standard errors."""
    n = 10_000
    z = noisy_sum(zeros(n), clip, sigma) / (sigma * clip)
    assert abs(float(z.mean())) < 5 / n**0.5
    assert abs(float(z.square().mean()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((z**4).mean()) - 3) < 5 * (96 / n) ** 0.5
    for limit, share in ((1.0, 0.317311), (2.0, 0.0455), (3.0, 0.0027)):
        assert abs(float((z.abs() > limit).double().mean()) - share) < 5 * (share / n) ** 0.5
    rank = torch.corrcoef(torch.stack([z[:-1], z[1:]]))[0, 1]
    assert abs(float(rank)) < 5 / n**0.5


def test_coarse_noise_has_the_discrete_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """P(k) proportional to exp(-k^2 / (2 t^2)) (Canonne, Kamath, Steinke, Definition 1), by a chi-squared test."""
    monkeypatch.setattr(noise, "_CLIP_BITS", 1)  # a clip of one step
    monkeypatch.setattr(noise, "_SUM_BITS", 1)
    exponent, scale, _ = noise._noise_grid(1.0, 0.75)
    n = 20_000
    k = (noisy_sum(zeros(n), 1.0, 0.75) / 2.0**exponent).long()
    reach = torch.arange(-60, 61).double()
    mass = (-(reach**2) / (2 * scale**2)).exp()
    expected = n * mass / mass.sum()
    seen = torch.stack([(k == int(j)).sum() for j in reach]).double()
    big = expected > 20
    assert int(big.sum()) >= 3
    chi = float(((seen - expected) ** 2 / expected)[big].sum())
    dof = int(big.sum())
    assert chi < dof + 5 * (2 * dof) ** 0.5


def test_what_leaves_is_on_the_grid_whatever_was_noised() -> None:
    """No trace of the values below the grid: a result is a whole number of steps, exactly (Mironov, 2012)."""
    exponent, _, _ = noise._noise_grid(1.0, 0.5)
    for row in (zeros(500), torch.full((1, 500), 1 / 3e5, dtype=torch.float64), zeros(500) + math.pi / 500):
        steps = noisy_sum(row, 1.0, 0.5).numpy() / 2.0**exponent
        assert np.array_equal(steps, np.round(steps))


# --- sensitivity


@given(clip=POSITIVE, sigma=POSITIVE)
@settings(max_examples=300, deadline=None)
def test_the_scale_over_the_bound_is_the_multiplier(clip: float, sigma: float) -> None:
    """In exact arithmetic: t / ||z|| >= sigma for every z that may be added, and 64 bits hold it all."""
    exponent, scale, bound = noise._noise_grid(clip, sigma)
    assert bound * Fraction(sigma) ** 2 <= Fraction(scale) ** 2
    assert bound * Fraction(4) ** exponent <= Fraction(clip) ** 2
    assert bound <= 4**noise._CLIP_BITS
    assert scale <= 2.0**noise._SUM_BITS
    fine = Fraction(clip) / Fraction(2) ** exponent
    assert fine >= 2 ** (noise._CLIP_BITS - 1) or scale >= 2.0 ** (noise._SUM_BITS - 2)  # no coarser than it must be


@given(
    clip=st.floats(min_value=1e-6, max_value=1e6),
    sigma=st.floats(min_value=1e-3, max_value=1e3),
    row=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=12),
    repeat=st.integers(1, 50),
)
@settings(max_examples=500, deadline=None)
def test_no_row_is_longer_than_the_bound(clip: float, sigma: float, row: list[float], repeat: int) -> None:
    """Any floats: huge, tiny, NaN; the integers' norm, computed exactly, keeps to the bound; rounding is toward 0."""
    exponent, _, bound = noise._noise_grid(clip, sigma)
    given = np.array(row * repeat)
    steps = noise._round_to_grid(given, clip, exponent, bound)
    assert sum(int(s) ** 2 for s in steps) <= bound
    if not np.isfinite(given).all():
        assert not steps.any()
        return
    assert (np.abs(np.ldexp(steps.astype(float), exponent)) <= np.abs(given)).all()
    assert (steps * np.sign(given) >= 0).all()


def test_rows_on_the_bound_lose_a_step_at_most() -> None:
    gen = torch.Generator().manual_seed(0)
    for d in (1, 3, 1000):
        row = torch.randn(d, generator=gen, dtype=torch.float64)
        for length in (0.2, 1.0, 7.0):
            x = row / row.norm() * length
            exponent, _, bound = noise._noise_grid(1.0, 2.0)
            steps = torch.from_numpy(noise._round_to_grid(x.numpy(), 1.0, exponent, bound))
            clipped = x * min(1.0, 1.0 / float(x.norm()))
            assert float((steps.double() * 2.0**exponent - clipped).abs().max()) <= 2.0**exponent * (1 + 1e-6)


def test_the_sum_of_many_is_clipped_one_by_one() -> None:
    given = [[3.0, 4.0], [math.nan, 1.0], [math.inf, 0.0], [1e308, 1e308], [0.0, 1e-320]]
    rows = torch.tensor(given, dtype=torch.float64)
    want = torch.tensor([0.6 + 0.5**0.5, 0.8 + 0.5**0.5], dtype=torch.float64)
    got = noisy_sum(rows, 1.0, 1e-9)
    assert bool(((got - want).abs() < 1e-7).all())


# --- accounting


def test_the_library_accounts_for_it_as_we_do() -> None:
    """OpenDP's own map gives rho of the measurement for the integers' sensitivity: 1 / (2 sigma^2), and Renyi's
    epsilon is at most that of rho by Proposition 12 at every order tried."""
    for clip, sigma in ((1.0, 3.0), (0.7, 1.3)):
        _, scale, bound = noise._noise_grid(clip, sigma)
        rho = noise._noise_measurement(scale).map(bound**0.5)
        assert rho == pytest.approx(1 / (2 * sigma**2), rel=1e-6)
        part = deployed_part(GaussianNoise(clip=clip, sigma=sigma, delta=1e-5, neighbours="zero"))
        orders = [1 + 10 ** (k / 500) for k in range(-1000, 1500)]
        best = min(a * rho + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1) for a in orders)
        assert best * (1 - 1e-6) <= privacy.epsilon(part, 1) <= 1.02 * best


def test_what_is_deployed_is_accounted_by_renyi() -> None:
    for part, kind in (
        (GaussianNoise(sigma=2.0, delta=1e-5), ReleasedNoise),
        (PrivateMean(sigma=2.0, delta=1e-5), ReleasedMean),
    ):
        assert part.accountant == "pld"
        put = deployed_part(part)
        assert type(put) is kind
        assert put.model_dump() == part.model_dump() | {"accountant": "rdp"}
    for other in (None, Clip(), WeightedMean()):
        assert deployed_part(other) is other


# --- source


def draws(d: int = 40) -> dict[str, torch.Tensor]:
    """What a site and a server send of nothing."""
    channel, rule = deployed_part(GaussianNoise(sigma=1.5)), deployed_part(PrivateMean(sigma=1.5))
    mean, _ = rule.combine({}, {"w": zeros(d)}, torch.ones(1, 1), "w", CTX)
    return {"site": channel.apply(None, zeros(d), ())[0][0], "server": mean["w"]}


@pytest.mark.usefixtures("seeded")
def test_no_seedable_generator_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every generator that a seed could fill out of order, the noise comes, and differs."""

    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a generator was touched")

    for name in ("randn", "rand", "randint", "normal", "Generator"):
        monkeypatch.setattr(torch, name, broken)
    for name in ("default_rng", "Generator", "RandomState", "normal", "MT19937", "PCG64", "Philox"):
        monkeypatch.setattr(np.random, name, broken)
    for name in ("randbits", "token_bytes"):
        monkeypatch.setattr(secrets, name, lambda *_: 0)
    seen = [draws() for _ in range(2)]
    for where in ("site", "server"):
        assert not bool((seen[0][where] == seen[1][where]).any())


def test_forked_processes_do_not_share_noise() -> None:
    """A process that is forked after the library's generator was used goes on with bytes of its own."""
    import multiprocessing

    draws(1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = [tuple(x.tolist()) for x in pool.map(_site, range(6))]
    found.append(tuple(_site(0).tolist()))
    assert len(set(found)) == 7
    assert len({v for row in found for v in row}) == 7 * 40


def _site(_: int) -> torch.Tensor:
    return draws()["site"]


def test_nothing_repeats_over_many_releases() -> None:
    """Beyond 32 bits of state: 300 releases of 64 numbers each have no number twice, whose grid has 2^29 steps per
    sigma and more; a source of 16 bits of state would repeat a release with near certainty, and releases are
    uncorrelated."""
    found = torch.stack([deployed_part(GaussianNoise(sigma=1.0)).apply(None, zeros(64), ())[0][0] for _ in range(300)])
    assert len({tuple(r) for r in found.tolist()}) == 300
    pairs = torch.corrcoef(found).triu(1)
    assert float(pairs.abs().max()) < 0.8
    assert abs(float(pairs.sum() / (300 * 299 / 2))) < 5 / (64 * 300 * 299 / 2) ** 0.5 * 2


def test_known_coordinates_tell_nothing_of_the_others() -> None:
    """The attack on seeded noise: some weights are known to be zero, so their noise is seen. Of seeded noise a search
    over the seeds that fit it finds the rest; here seeing it predicts no other coordinate, linear or squared."""
    d, n = 8, 4000
    sent = noisy_sum(zeros(d * n), 1.0, 2.0).view(n, d) / 2
    seen, hidden = sent[:, :4], sent[:, 4:]
    for a in (seen, seen.square() - 1, seen.roll(1, 0), seen.sign()):
        for b in (hidden, hidden.square() - 1, hidden.roll(-1, 0)):
            relation = (a - a.mean(0)).T @ (b - b.mean(0)) / n / (a.std(0)[:, None] * b.std(0))
            assert float(relation.abs().max()) < 5.5 / n**0.5
    for seed in range(2000):  # and no seed of PyTorch's generators explains what is seen
        guess = torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert not torch.allclose(guess[:4], seen[0], atol=1e-3)


def test_without_noise_it_is_clipping() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(deployed_part(GaussianNoise(sigma=0.0)).apply(None, x, [torch.Generator()])[0], x / 5)
    twice = type("Ctx", (), {"rng": lambda self, _purpose: torch.Generator()})()
    mean, _ = deployed_part(PrivateMean(sigma=0.0)).combine({}, {"w": x}, torch.ones(1, 1), "w", twice)
    assert torch.allclose(mean["w"], x[0] / 5)


def test_types_and_fields_come_back_as_they_were() -> None:
    rows = {"w": torch.ones(3, 5), "c": torch.ones(3, 2, dtype=torch.float64)}
    mean, _ = deployed_part(PrivateMean(clip=100.0, sigma=1e-6)).combine({}, rows, torch.ones(3, 1), "w", CTX)
    assert {n: (v.shape, v.dtype) for n, v in mean.items()} == {n: (v[0].shape, v.dtype) for n, v in rows.items()}
    assert all(torch.allclose(v, torch.ones_like(v), atol=1e-2) for v in mean.values())
