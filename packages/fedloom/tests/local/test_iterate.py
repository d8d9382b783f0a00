"""The loop of local training: who takes which step, with which batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import handwritten
import pytest
import torch
from engine_cases import CASES, M, Problem, make_work
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.local import Batch, LocalSGD, Work, iterate


class Rows(NamedTuple):
    """The client's own id, the steps it took, and a row that nobody reads."""

    who: Tensor
    taken: Tensor
    nothing: Tensor | None = None


def start(work: Work) -> Rows:
    return Rows(work.ids[:, None].clone(), torch.zeros(work.m, 1, dtype=torch.long))


@pytest.fixture(scope="module")
def oracle() -> Any:
    return Problem(CASES["softmax"]).oracle("compiled")


@given(steps=st.lists(st.integers(0, 6), min_size=M, max_size=M), order=st.permutations(range(M)))
def test_every_client_takes_its_own_number_of_steps(oracle: Any, steps: list[int], order: list[int]) -> None:
    work = make_work(oracle, LocalSGD(), order)
    wanted = torch.tensor(steps)[order][:, None]
    seen: list[tuple[int, list[int]]] = []

    def step(rows: Rows, work: Work) -> Rows:
        assert torch.equal(rows.who[:, 0], work.ids)
        assert torch.equal(work.sizes[:, 0], torch.tensor(handwritten.SIZES)[work.ids])
        assert bool((rows.taken == work.k).all())
        seen.append((work.k, sorted(work.ids.tolist())))
        return rows._replace(taken=rows.taken + 1)

    begin = start(work)
    end = iterate(step, begin, work, wanted, batches=0)
    assert torch.equal(end.taken, wanted)
    assert end.who[:, 0].tolist() == list(order)
    assert end.nothing is None
    assert not begin.taken.any()
    assert seen == [(k, [i for i in range(M) if steps[i] > k]) for k in range(max(steps))]


def test_steps_are_a_number_or_the_rounds_own(oracle: Any) -> None:
    def step(rows: Rows, work: Work) -> Rows:
        return rows._replace(taken=rows.taken + 1)

    work = make_work(oracle, LocalSGD(epochs=2, batch_size=20))
    assert iterate(step, start(work), work, 3, batches=0).taken.tolist() == [[3]] * M
    assert iterate(step, start(work), work, batches=0).taken.tolist() == [[2], [2], [2], [6]]
    assert iterate(step, start(work), work, 0, batches=0).taken.tolist() == [[0]] * M
    fixed = make_work(oracle, LocalSGD(steps=4))
    assert iterate(step, start(fixed), fixed, batches=0).taken.tolist() == [[4]] * M
    assert work.k == 0


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 6, 20, "full"])
def test_batches_are_those_of_the_plan(oracle: Any, batches: int, batch_size: int | str) -> None:
    work = make_work(oracle, LocalSGD(batch_size=batch_size), [3, 0, 2, 1], seed=8, round=5)
    steps = torch.tensor([[2], [3], [0], [4]])
    got: dict[int, list[list[int]]] = {i: [] for i in range(M)}

    def step(rows: Rows, work: Work, *drawn: Batch) -> Rows:
        assert len(drawn) == batches
        for batch in drawn:
            assert torch.equal(batch.count[:, 0], (batch.position >= 0).sum(1))
            assert torch.equal(batch.total, batch.count)
            assert batch.position.shape[1] == int(batch.count.max())
            for i, position in zip(work.ids.tolist(), batch.position, strict=True):
                got[i].append(position[position >= 0].tolist())
        return rows

    iterate(step, start(work), work, steps, batches=batches, stream="some")
    for i, count in zip(work.ids.tolist(), steps[:, 0].tolist(), strict=True):
        expected = handwritten.positions(handwritten.SIZES[i], batch_size, count * batches, i, "some", seed=8, round=5)
        assert got[i] == [row.tolist() for row in expected]


def test_equal_streams_have_equal_batches(oracle: Any) -> None:
    def drawn_by(work: Work, **options: Any) -> list[list[int]]:
        found: list[list[int]] = []

        def step(rows: Rows, work: Work, batch: Batch) -> Rows:
            found.extend(batch.position.tolist())
            return rows

        iterate(step, start(work), work, 3, **options)
        return found

    work = make_work(oracle, LocalSGD(batch_size=5), [2, 3], seed=1, round=2)
    reference = drawn_by(work, stream="a")
    assert drawn_by(work, stream="a") == reference
    assert drawn_by(work, stream="b") != reference
    assert drawn_by(work, stream=("a", 1)) != reference
    for other in ({"seed": 2, "round": 2}, {"seed": 1, "round": 3}):
        assert drawn_by(make_work(oracle, LocalSGD(batch_size=5), [2, 3], **other), stream="a") != reference


@given(
    steps=st.lists(st.integers(0, 5), min_size=M, max_size=M),
    stops=st.lists(st.integers(1, 7), min_size=M, max_size=M),
    order=st.permutations(range(M)),
)
def test_until_ends_a_client_after_a_step(oracle: Any, steps: list[int], stops: list[int], order: list[int]) -> None:
    work = make_work(oracle, LocalSGD(batch_size=6), order)
    stop = torch.tensor(stops)[:, None]
    positions: dict[int, list[list[int]]] = {i: [] for i in range(M)}

    def step(rows: Rows, work: Work, batch: Batch) -> Rows:
        for i, position in zip(work.ids.tolist(), batch.position, strict=True):
            positions[i].append(position[position >= 0].tolist())
        return rows._replace(taken=rows.taken + 1)

    def until(rows: Rows, work: Work) -> Tensor:
        assert bool((rows.taken == work.k + 1).all())
        assert torch.equal(rows.who[:, 0], work.ids)
        return rows.taken >= stop[rows.who[:, 0]]

    end = iterate(step, start(work), work, torch.tensor(steps)[order][:, None], until=until)
    assert end.taken[:, 0].tolist() == [min(steps[i], stops[i]) for i in order]
    assert end.who[:, 0].tolist() == list(order)
    for i in range(M):
        expected = handwritten.positions(handwritten.SIZES[i], 6, min(steps[i], stops[i]), i)
        assert positions[i] == [row.tolist() for row in expected]


def test_loops_nest(oracle: Any) -> None:
    work = make_work(oracle, LocalSGD(batch_size=5), [3, 1, 2])
    outer_steps, inner_steps = torch.tensor([[1], [3], [2]]), {3: 2, 1: 4, 2: 1}
    seen: list[tuple[int, int, int, tuple[int, ...]]] = []

    def outer(rows: Rows, work: Work) -> Rows:
        assert bool((rows.taken % 100 == work.k).all())
        count = torch.tensor([[inner_steps[i]] for i in work.ids.tolist()])
        k = work.k

        def inner(rows: Rows, work: Work, batch: Batch) -> Rows:
            for i, position in zip(work.ids.tolist(), batch.position, strict=True):
                seen.append((i, k, work.k, tuple(position.tolist())))
            return rows._replace(taken=rows.taken + 100)

        rows = iterate(inner, rows, work, count, stream=("inner", work.k))
        assert work.k == k
        return rows._replace(taken=rows.taken + 1)

    end = iterate(outer, start(work), work, outer_steps, batches=0)
    assert end.taken[:, 0].tolist() == [1 + 200, 3 + 3 * 400, 2 + 200]
    for i, steps in zip(work.ids.tolist(), outer_steps[:, 0].tolist(), strict=True):
        for k in range(steps):
            mine = [p for who, at, _, p in seen if who == i and at == k]
            stream = ("inner", k)
            expected = handwritten.positions(handwritten.SIZES[i], 5, inner_steps[i], i, stream)
            assert [[v for v in p if v >= 0] for p in mine] == [row.tolist() for row in expected]


def test_work_of_some_clients_leaves_the_whole_alone(oracle: Any) -> None:
    work = make_work(oracle, LocalSGD())
    some, later = work.take(torch.tensor([2, 0])), work.move_to_step(7)
    assert (some.ids.tolist(), some.m, later.k) == ([2, 0], 2, 7)
    assert (work.ids.tolist(), work.m, work.k, some.k) == ([0, 1, 2, 3], 4, 0, 0)
    assert torch.equal(some.steps, work.steps[[2, 0]])
