"""Samplers: who is drawn, how often, and what is refused; hypothesis chooses federations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.choose import (
    SAMPLERS,
    Availability,
    Bernoulli,
    Clustered,
    PowerOfChoice,
    RoundRobin,
    Sampler,
    SizeWeighted,
    Uniform,
)
from fedloom.choose.samplers._base import draw_distinct
from fedloom.errors import ConfigError
from fedloom.local import Ctx, LocalSGD, Work
from fedloom.rows.layout import Layout
from fedloom.seeds import generator
from fedloom.testing import TOY_LAYOUT, Problem
from fedloom.testing.federate import ReferenceFederation

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def context(sizes: list[int], round: int = 1, seed: int = 0, layout: Layout = TOY_LAYOUT) -> Ctx:
    n = len(sizes)
    share = torch.full((n, 1), 1 / n, dtype=torch.float64)
    return Ctx(round, n, n, torch.arange(n), layout, share, torch.tensor(sizes)[:, None], None, LocalSGD(), seed, 100)


def cohort(sampler: Sampler, ctx: Ctx, info: Tensor | None = None, state: Any = None) -> list[int]:
    found: list[int] = sampler.apply(sampler.init(ctx) if state is None else state, info, ctx)[0].tolist()
    return found


def answers(sampler: Sampler, ctx: Ctx) -> Tensor | None:
    """Some answers of the candidates, if there are any."""
    candidates = sampler.query(sampler.init(ctx), ctx)
    return (candidates * 7 % 5).double()[:, None] if sampler.probes else None


# --- all


@pytest.mark.parametrize("kind", SAMPLERS)
@settings(max_examples=40)
@given(sizes=SIZES, seed=st.integers(0, 3), round=st.integers(1, 5))
def test_a_cohort_is_ascending_ids_and_depends_on_seed_and_round_only(
    kind: str, sizes: list[int], seed: int, round: int
) -> None:
    sampler, ctx = SAMPLERS[kind](), context(sizes, round, seed)
    try:
        sampler.check(len(sizes))
    except ConfigError:
        return
    first, again = (cohort(sampler, ctx, answers(sampler, ctx)) for _ in range(2))
    assert first == sorted(first) == again
    assert first
    assert set(first) <= set(range(len(sizes)))
    assert SAMPLERS[kind].kind == kind


@pytest.mark.parametrize("kind", sorted(set(SAMPLERS) - {"bernoulli", "availability"}))
@settings(max_examples=40)
@given(sizes=SIZES, data=st.data())
def test_as_many_are_drawn_as_are_asked_for(kind: str, sizes: list[int], data: st.DataObject) -> None:
    m = data.draw(st.integers(1, len(sizes)))
    sampler, ctx = SAMPLERS[kind](clients=m), context(sizes)
    sampler.check(len(sizes))
    drawn = cohort(sampler, ctx, answers(sampler, ctx))
    assert len(drawn) == m
    assert len(set(drawn)) == m or kind in ("clustered", "size-weighted")


@pytest.mark.parametrize("kind", sorted(set(SAMPLERS) - {"bernoulli"}))
def test_the_size_of_a_cohort(kind: str) -> None:
    sampler = SAMPLERS[kind]
    assert [sampler(fraction=f).size(10) for f in (0.01, 0.26, 0.5, 1.0)] == [1, 3, 5, 10]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="not both"):
        sampler(fraction=0.5, clients=2)
    with pytest.raises(ConfigError, match="at most the number of clients in the federation \\(4\\), got 5"):
        sampler(clients=5).check(4)
    sampler(clients=4).check(4)


@pytest.mark.parametrize(
    "sampler",
    [
        Uniform(clients=3),
        RoundRobin(clients=2),
        SizeWeighted(clients=3, replacement=False),
        PowerOfChoice(clients=2, candidates=4),
        Availability(clients=3, period=4, on=1),
        Availability(table=((1, 1, 1, 0, 1, 1), (0, 1, 0, 0, 0, 1), (1, 0, 0, 0, 1, 1))),
    ],
)
def test_the_fewest_clients_of_a_round_are_known_before_the_run(sampler: Sampler) -> None:
    """The bound holds in every round of a turn, and is reached."""
    rounds = [context([5, 1, 9, 2, 7, 3], t) for t in range(1, 13)]
    assert min(len(set(cohort(sampler, ctx, answers(sampler, ctx)))) for ctx in rounds) == sampler.smallest(6)


@pytest.mark.parametrize("sampler", [Bernoulli(), Clustered(clients=3), SizeWeighted(clients=3)])
def test_where_only_the_draws_tell_nothing_is_promised(sampler: Sampler) -> None:
    assert sampler.smallest(6) is None


def test_a_size_comes_from_another_sampler_only_if_none_is_given() -> None:
    assert Clustered().sized_like(Uniform(fraction=0.3)) == Clustered(fraction=0.3)
    assert Clustered(by="size").sized_like(RoundRobin(clients=3)) == Clustered(by="size", clients=3)
    assert Clustered(clients=2).sized_like(Uniform(fraction=0.3)) == Clustered(clients=2)
    assert Clustered(fraction=0.2).sized_like(Uniform(clients=3)) == Clustered(fraction=0.2)
    assert Clustered().sized_like(Bernoulli()) == Clustered()
    assert Bernoulli(probability=0.2).sized_like(Uniform(clients=3)) == Bernoulli(probability=0.2)


def test_a_sampler_as_a_table_of_every_field_is_the_same_sampler() -> None:
    """What a run writes down, defaults included, can be read again."""
    for sampler in (Uniform(clients=3), Availability(table=((1, 0),)), Clustered(fraction=0.2), PowerOfChoice()):
        assert type(sampler)(**sampler.model_dump()) == sampler
    for kind in SAMPLERS.values():
        assert kind().probes == (kind is PowerOfChoice)
        assert kind().learns == (kind is Clustered)
        assert len(kind().query(None, context([2] * 4))) == (4 if kind is PowerOfChoice else 0)


# --- without memory


def shares(sampler: Sampler, sizes: list[int], rounds: int = 2500) -> Tensor:
    """How often every client is drawn per round, on average."""
    drawn = [cohort(sampler, context(sizes, t)) for t in range(1, rounds + 1)]
    return torch.bincount(torch.tensor([i for c in drawn for i in c]), minlength=len(sizes)) / rounds


def test_uniform_and_bernoulli_draw_everyone_equally_often() -> None:
    for sampler, want in ((Uniform(clients=2), 0.5), (Bernoulli(probability=0.5), 0.5 + 0.5**4 / 4)):
        torch.testing.assert_close(shares(sampler, [1, 5, 9, 2]), torch.full((4,), want), rtol=0, atol=0.04)


def test_bernoulli_draws_each_by_itself_and_never_nobody() -> None:
    rounds = [cohort(Bernoulli(probability=1e-9), context([3] * 5, t)) for t in range(1, 200)]
    assert all(len(c) == 1 for c in rounds)
    assert {c[0] for c in rounds} == set(range(5))
    assert cohort(Bernoulli(probability=1.0), context([3] * 5)) == [0, 1, 2, 3, 4]
    sizes = {len(cohort(Bernoulli(probability=0.5), context([3] * 5, t))) for t in range(1, 100)}
    assert sizes == {1, 2, 3, 4, 5}


def test_size_weighted_draws_by_size() -> None:
    sizes = [1, 2, 3, 4]
    want = 2 * torch.tensor(sizes) / 10
    torch.testing.assert_close(shares(SizeWeighted(clients=2), sizes), want, rtol=0, atol=0.04)
    without = shares(SizeWeighted(clients=2, replacement=False), sizes)
    # the second of two draws: sum over the first i of p_i p_k / (1 - p_i)
    p = torch.tensor(sizes) / 10
    first = (p / (1 - p)).sum() - p / (1 - p)
    torch.testing.assert_close(without, p + p * first, rtol=0, atol=0.04)
    assert any(len(set(cohort(SizeWeighted(clients=2), context(sizes, t)))) == 1 for t in range(1, 30))


@given(n=st.integers(1, 9), data=st.data())
def test_round_robin_takes_everyone_in_turn(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, n))
    rounds = [cohort(RoundRobin(clients=m), context([1] * n, t)) for t in range(1, n + 1)]
    assert [rounds[0], sorted(i for c in rounds for i in c)] == [list(range(m)), sorted([*range(n)] * m)]
    assert rounds[-1][-1] == n - 1
    assert sorted(i % n for i in range(m, 2 * m)) == cohort(RoundRobin(clients=m), context([1] * n, 2))
    counts = torch.zeros(n, dtype=torch.long)
    for c in rounds:
        counts += torch.bincount(torch.tensor(c), minlength=n)
        assert int(counts.max() - counts.min()) <= 1


# --- availability


def test_availability_by_a_table_that_starts_again() -> None:
    table = ((1, 0, 0, 1), (0, 1, 0, 0), (1, 1, 1, 0))
    there = [[0, 3], [1], [0, 1, 2]]
    sampler = Availability(table=table)
    sampler.check(4)
    for t in range(1, 8):
        assert cohort(sampler, context([1] * 4, t)) == there[(t - 1) % 3]
        some = cohort(Availability(table=table, clients=2), context([1] * 4, t))
        assert len(some) == min(2, len(there[(t - 1) % 3]))
        assert set(some) <= set(there[(t - 1) % 3])
    drawn = {tuple(cohort(Availability(table=table, clients=2), context([1] * 4, 3, seed))) for seed in range(30)}
    assert drawn == {(0, 1), (0, 2), (1, 2)}


@given(period=st.integers(1, 6), data=st.data(), extra=st.integers(0, 3), round=st.integers(1, 20))
def test_availability_by_turns(period: int, data: st.DataObject, extra: int, round: int) -> None:
    on = data.draw(st.integers(1, period))
    n = period + extra
    sampler = Availability(period=period, on=on)
    sampler.check(n)
    assert cohort(sampler, context([1] * n, round)) == [i for i in range(n) if (round - 1 + i) % period < on]


def test_availability_refuses_what_leaves_a_round_empty() -> None:
    for empty, table in enumerate((((0, 0), (1, 0)), ((1, 0), (0, 0))), 1):
        with pytest.raises(ConfigError, match=f"^sampler: no client is available in round {empty}, but"):
            Availability(table=table).check(2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no client is available in round 2"):
        Availability(period=3, on=1).check(1)
    with pytest.raises(ConfigError, match="each of the 3 clients, but row 2 has 2 columns"):
        Availability(table=((1, 0, 0), (0, 1))).check(3)
    with pytest.raises(ConfigError, match="at most the number of clients in the federation \\(2\\)"):
        Availability(clients=3).check(2)
    with pytest.raises(ConfigError, match="set either `table`, or `period` and `on`"):
        Availability(table=((1,),), period=3)
    with pytest.raises(ConfigError, match="`on` must be at most `period` = 2, got 3"):
        Availability(period=2, on=3)
    Availability(period=2, on=2).check(1)


# --- power-of-choice


def test_all_candidates_of_all_clients_are_the_largest_losses() -> None:
    ctx, loss = context([1, 1, 9, 9, 3]), torch.tensor([[0.3], [2.0], [0.1], [1.0], [0.7]])
    for m, want in ((1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (5, [0, 1, 2, 3, 4])):
        assert cohort(PowerOfChoice(clients=m, candidates=5), ctx, loss) == want


def test_as_many_candidates_as_clients_is_a_weighted_draw_without_replacement() -> None:
    sizes = [1, 2, 3, 4]
    for t in range(1, 20):
        sampler, ctx = PowerOfChoice(clients=2, candidates=2), context(sizes, t)
        candidates = sampler.query(sampler.init(ctx), ctx)
        assert cohort(sampler, ctx, torch.zeros(2, 1)) == candidates.tolist()
    rounds = [PowerOfChoice(clients=1, candidates=1).query(None, context(sizes, t)) for t in range(1, 3001)]
    got = torch.bincount(torch.cat(rounds), minlength=4) / 3000
    torch.testing.assert_close(got, torch.tensor(sizes) / 10, rtol=0, atol=0.04)


def test_twice_as_many_candidates_as_clients_unless_said() -> None:
    counts = [len(PowerOfChoice(clients=m).query(None, context([1] * 7))) for m in (1, 3, 4, 7)]
    assert counts == [2, 6, 7, 7]


def test_equal_losses_are_broken_at_random() -> None:
    drawn = {
        tuple(cohort(PowerOfChoice(clients=1, candidates=4), context([1] * 4, t), torch.zeros(4, 1)))
        for t in range(1, 60)
    }
    assert drawn == {(0,), (1,), (2,), (3,)}


def test_candidates_are_refused_that_are_too_few_or_too_many() -> None:
    for candidates in (2, 6):
        with pytest.raises(ConfigError, match=rf"from 3 \(the clients in a round\) to 5 .* got {candidates}"):
            PowerOfChoice(clients=3, candidates=candidates).check(5)
    for candidates in (3, 5):
        PowerOfChoice(clients=3, candidates=candidates).check(5)


def work_of(p: Problem, ids: list[int], **local: Any) -> Work:
    return ReferenceFederation(p.oracle(noise=0.5), p.alpha, LocalSGD(batch_size=2, **local)).work(3, ids)


def test_candidates_answer_the_loss_of_the_global_model() -> None:
    p = Problem.random(2)
    ids = [0, 2, 3]
    work = work_of(p, ids)
    full = PowerOfChoice().probe(p.x0, work)
    torch.testing.assert_close(full, work_of(p, ids).loss(p.x0))
    assert work.counts.forward.tolist() == p.sizes[ids].tolist()
    work = work_of(p, ids)
    batch = PowerOfChoice(estimate="batch").probe(p.x0, work)
    assert work.counts.forward.tolist() == p.sizes[ids].clamp(max=2).tolist()
    assert batch.shape == (3, 1)
    one = p.sizes[ids] <= 2
    assert torch.allclose(batch[one], full[one])
    assert not torch.allclose(batch[~one], full[~one])


def test_remembered_losses_decide_and_strangers_come_first() -> None:
    sampler, ctx = PowerOfChoice(clients=2, candidates=4, estimate="last"), context([2] * 4)
    assert (sampler.probes, sampler.learns) == (False, True)
    assert (PowerOfChoice().probes, PowerOfChoice().learns) == (True, False)
    state = sampler.init(ctx)
    told = ctx._replace(ids=torch.tensor([0, 2]), m=2)
    after = sampler.learn(state, torch.tensor([[5.0], [7.0]]), told)
    assert bool(state.loss.isinf().all())
    assert after.loss.tolist() == [5.0, float("inf"), 7.0, float("inf")]
    assert cohort(sampler, ctx, state=after) == [1, 3]
    known = sampler.learn(after, torch.tensor([[6.0], [1.0]]), ctx._replace(ids=torch.tensor([1, 3]), m=2))
    assert cohort(sampler, ctx, state=known) == [1, 2]
    assert sampler.apply(known, None, ctx)[1] is known


def test_a_client_reports_the_loss_of_its_last_batch() -> None:
    p = Problem.random(2)
    ids, sampler = [0, 1, 2, 3, 4], PowerOfChoice(estimate="last")
    for steps in (3, 7):
        work = work_of(p, ids, steps=steps)
        plan = work.plan("local", work.steps[:, 0])
        want = work.loss(p.minimiser, plan.batch(steps - 1))
        torch.testing.assert_close(sampler.report(p.minimiser, work_of(p, ids, steps=steps)), want)
    ragged, longest = work_of(p, ids, epochs=2), work_of(p, ids, epochs=2).steps.max()
    got = sampler.report(p.minimiser, ragged)
    assert got is not None
    for k, i in enumerate(ids):
        alone = work_of(p, [i], epochs=2)
        plan = alone.plan("local", alone.steps[:, 0])
        torch.testing.assert_close(got[k], alone.loss(p.minimiser[i], plan.batch(int(alone.steps) - 1))[0])
    assert int(longest) > int(ragged.steps.min())
    idle = sampler.report(p.minimiser, work_of(p, ids, steps=0))
    assert idle is not None
    assert bool(idle.isfinite().all())


@pytest.mark.parametrize(("n", "k"), [(1, 1), (20, 20), (17, 1), (100, 6), (1000, 61), (1_000_003, 1001)])
def test_some_are_the_first_of_a_permutation(n: int, k: int) -> None:
    for seed in range(3):
        wanted = torch.randperm(n, generator=generator(seed))[:k]
        assert torch.equal(draw_distinct(n, k, generator(seed)), wanted)
