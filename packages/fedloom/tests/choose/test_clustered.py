"""Clustered sampling: exact distributions, Ward's tree against its definition, unbiased cohorts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.choose import Clustered
from fedloom.choose.samplers.clustered import Gradients, distances, subtrees
from fedloom.local import Ctx, LocalSGD
from fedloom.seeds import generator
from fedloom.testing import TOY_LAYOUT

FEDERATION = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def context(sizes: list[int], round: int = 1, seed: int = 0) -> Ctx:
    n = len(sizes)
    share = torch.full((n, 1), 1 / n, dtype=torch.float64)
    return Ctx(
        round, n, n, torch.arange(n), TOY_LAYOUT, share, torch.tensor(sizes)[:, None], None, LocalSGD(), seed, 100
    )


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, purpose="test"), dtype=torch.float64)


def gradients(seed: int, n: int) -> Gradients:
    """Random ones; some clients have not been seen."""
    g = normal(seed, n, TOY_LAYOUT.d)
    return Gradients(torch.where((torch.arange(n) % 3 == seed % 3)[:, None], 0.0, g))


@pytest.mark.parametrize("options", [{"by": "size"}, {}, {"distance": "l1"}, {"distance": "l2"}, {"masses": "uniform"}])
@settings(max_examples=40)
@given(sizes=FEDERATION, data=st.data(), seed=st.integers(0, 5))
def test_the_two_invariants(options: dict[str, Any], sizes: list[int], data: st.DataObject, seed: int) -> None:
    """Every distribution sums to 1, and those of client i together to m p_i: exactly, in samples."""
    m, ctx = data.draw(st.integers(1, len(sizes))), context(sizes, seed=seed)
    sampler = Clustered(clients=m, **options)
    p = [1] * len(sizes) if "masses" in options else sizes
    state = gradients(seed, len(sizes)) if sampler.learns else sampler.init(ctx)
    w = sampler.distributions(state, ctx)
    assert w.shape == (m, len(sizes))
    assert int(w.min()) >= 0
    assert w.sum(1).tolist() == [sum(p)] * m
    assert w.sum(0).tolist() == [m * k for k in p]


@settings(max_examples=40)
@given(sizes=FEDERATION, data=st.data(), seed=st.integers(0, 5))
def test_a_heavy_client_fills_whole_distributions_and_groups_stay_together(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    m, ctx = data.draw(st.integers(1, len(sizes))), context(sizes)
    sampler, state, full = Clustered(clients=m), gradients(seed, len(sizes)), sum(sizes)
    w = sampler.distributions(state, ctx)
    for i, k in enumerate(sizes):
        assert int((w[:, i] == full).sum()) >= m * k // full
    rest = m * torch.tensor(sizes) % full
    groups = subtrees(distances(state.g, "arccos"), rest, full)
    masses = [int(rest[group].sum()) for group in groups]
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert masses == sorted(masses, reverse=True)
    assert max(masses) <= full
    own = m - sum(m * k // full for k in sizes)
    for row, group in enumerate(groups[:own], m - own):
        assert w[row, group].tolist() == rest[group].tolist()


def test_algorithm_1_fills_by_falling_size() -> None:
    w = Clustered(clients=3, by="size").distributions((), context([2, 5, 3, 2]))
    assert w.tolist() == [[0, 12, 0, 0], [0, 3, 9, 0], [6, 0, 0, 6]]
    w = Clustered(clients=3, by="size").distributions((), context([3, 3, 2, 2, 2]))
    assert w.tolist() == [[9, 3, 0, 0, 0], [0, 6, 6, 0, 0], [0, 0, 0, 6, 6]]


def test_algorithm_2_by_hand() -> None:
    """Two pairs of like directions, four equal clients: two distributions, one for each pair."""
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1], [0.1, 3.0]])
    w = Clustered(clients=2).distributions(Gradients(g), context([4, 4, 4, 4]))
    assert sorted(w.tolist()) == [[0, 8, 0, 8], [8, 0, 8, 0]]
    # three distributions of 16 for four clients of 12: three keep one, the last client is spread over them
    w = Clustered(clients=3).distributions(Gradients(g), context([4, 4, 4, 4]))
    assert sorted(w.amax(1).tolist()) == [12, 12, 12]
    assert sorted(w.sum(0).tolist()) == [12] * 4
    assert sorted((w > 0).sum(1).tolist()) == [2, 2, 2]


def test_leftovers_are_filled_in_a_random_order() -> None:
    """Four pairs of eight equal clients, three distributions: the fourth pair is spread, either client first."""
    g = Gradients(torch.eye(4).repeat(2, 1))
    rounds = [Clustered(clients=3).distributions(g, context([1] * 8, t)) for t in range(1, 20)]
    assert {tuple(sorted((w > 0).sum(0).tolist())) for w in rounds} == {(1, 1, 1, 1, 1, 1, 2, 2)}
    assert len({str(w.tolist()) for w in rounds}) == 2


# --- distances and the tree


def test_angles() -> None:
    g = normal(0, 6, 4)
    g[2] = 0
    g[4] = -3 * g[1]
    g[5] = 2 * g[0]
    got = distances(g, "arccos")
    for i, j in itertools.product(range(6), repeat=2):
        a, b = g[i], g[j]
        if i == j or 2 in (i, j):
            assert got[i, j] == 0
            continue
        cosine = float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))
        assert float(got[i, j]) == pytest.approx(math.acos(max(-1.0, min(1.0, cosine))), abs=1e-7)
    assert float(got[1, 4]) == pytest.approx(math.pi, abs=1e-7)
    torch.testing.assert_close(distances(1e-3 * g, "arccos"), got, rtol=0, atol=1e-6)
    parallel = normal(3, 1, 50) * normal(4, 200, 1)
    assert bool(distances(parallel, "arccos").isfinite().all())


def test_norms() -> None:
    g = normal(1, 5, 4)
    torch.testing.assert_close(distances(g, "l1"), (g[:, None] - g[None]).abs().sum(-1))
    torch.testing.assert_close(distances(g, "l2"), (g[:, None] - g[None]).square().sum(-1).sqrt())


def ward(points: Tensor) -> list[set[frozenset[int]]]:
    """The partitions of Ward's method, from its definition: merge what adds least to the sum of squares."""

    def cost(group: frozenset[int]) -> float:
        members = points[sorted(group)]
        return float((members - members.mean(0)).square().sum())

    parts = {frozenset([i]) for i in range(len(points))}
    found = [set(parts)]
    while len(parts) > 1:
        a, b = min(itertools.combinations(parts, 2), key=lambda ab: cost(ab[0] | ab[1]) - cost(ab[0]) - cost(ab[1]))
        parts = (parts - {a, b}) | {a | b}
        found.append(set(parts))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1, 3, 4, 6, 8])
def test_groups_are_the_largest_subtrees_of_wards_tree(seed: int, limit: int) -> None:
    distance = distances(normal(seed, 8, 3), "arccos")
    nodes = set().union(*ward(distance))
    fitting = {node for node in nodes if len(node) <= limit}
    want = {node for node in fitting if not any(node < other for other in fitting)}
    assert {frozenset(g) for g in subtrees(distance, torch.ones(8, dtype=torch.long), limit)} == want


# --- draws


def test_cohorts_are_unbiased_and_have_less_variance_than_draws_by_size() -> None:
    sizes, m, rounds = [1, 2, 3, 4, 9, 5], 3, 600
    p = torch.tensor(sizes) / sum(sizes)
    state = Gradients(normal(2, 6, TOY_LAYOUT.d))
    for sampler in (Clustered(clients=m), Clustered(clients=m, by="size")):
        remembered = state if sampler.learns else sampler.init(context(sizes))
        times = torch.stack(
            [
                torch.bincount(sampler.apply(remembered, None, context(sizes, t))[0], minlength=6)
                for t in range(1, rounds + 1)
            ]
        ).double()
        assert bool((times.sum(1) == m).all())
        assert bool((times.mean(0) - m * p).abs().max() < 0.08)
        assert bool((times.var(0) < m * p * (1 - p) + 0.06).all())
        assert float(times.var(0).sum()) < float((m * p * (1 - p)).sum()) - 0.1


def test_gradients_are_the_last_seen_and_zero_before() -> None:
    sampler, ctx = Clustered(clients=2), context([1, 2, 3, 4])
    state = sampler.init(ctx)
    assert isinstance(state, Gradients)
    assert state.g.shape == (4, TOY_LAYOUT.d)
    update = normal(0, 2, TOY_LAYOUT.d)
    after = sampler.learn(state, update, ctx._replace(ids=torch.tensor([3, 1]), m=2))
    assert isinstance(after, Gradients)
    assert not bool(state.g.any())
    torch.testing.assert_close(after.g[[3, 1]], update.to(after.g))
    assert not bool(after.g[[0, 2]].any())
    again = sampler.learn(after, -update, ctx._replace(ids=torch.tensor([1, 0]), m=2))
    assert isinstance(again, Gradients)
    torch.testing.assert_close(again.g[[3, 1, 0]], torch.stack([update[0], -update[0], -update[1]]).to(again.g))
    assert sampler.report(update, None) is None  # type: ignore[arg-type]
    assert (sampler.learns, Clustered(by="size").learns, sampler.probes) == (True, False, False)
    assert Clustered(by="size").learn((), update, ctx) == ()


@pytest.mark.parametrize(("sizes", "options"), [([5, 5, 5], {}), ([9, 2, 4], {"masses": "uniform"})])
def test_where_it_says_that_nobody_is_drawn_everyone_takes_part_once(sizes: list[int], options: dict[str, Any]) -> None:
    ctx, sampler = context(sizes), Clustered(**options)
    assert sampler.remarks(ctx) == [
        "sampler 'clustered' has no effect, because all 3 clients take part with equal masses. "
        "Lower fraction or clients"
    ]
    assert sampler.apply(sampler.init(ctx), None, ctx)[0].tolist() == [0, 1, 2]
    assert Clustered(clients=2, **options).remarks(ctx) == []
    assert Clustered().remarks(context([9, 2, 4])) == []
