"""Parts of models: runs of a mask, taking a part out and putting it back, the smallest scores of every matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.rows import masks
from fedloom.rows.layout import Layout
from fedloom.rows.projection import projection

bits = st.lists(st.booleans(), min_size=1, max_size=12)


@given(bits)
def test_spans_are_the_runs_of_true(chosen: list[bool]) -> None:
    mask, again = torch.tensor(chosen), torch.zeros(len(chosen), dtype=torch.bool)
    found = masks.spans(mask)
    for run in found:
        assert run.start < run.stop
        again[run] = True
    assert torch.equal(again, mask)
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))


@given(bits, st.integers(1, 3))
def test_a_part_is_taken_out_and_put_back(chosen: list[bool], m: int) -> None:
    mask, d = torch.tensor(chosen), len(chosen)
    models, x = torch.arange(1.0, m * d + 1).reshape(m, d), -torch.arange(1.0, d + 1)
    own = masks.part(models, mask)
    assert torch.equal(own, models[:, mask])
    assert torch.equal(masks.joined(x, own, mask), torch.where(mask, models, x))
    assert torch.equal(masks.zero_outside_(models.clone(), mask), models * mask)


@given(
    st.integers(0, 6), st.integers(0, 4), st.lists(st.integers(-2, 2), min_size=26, max_size=26), st.integers(0, 10**6)
)
def test_the_smallest_of_every_matrix(first: int, second: int, whole: list[int], seed: int) -> None:
    """As many as asked for, none larger than one that is left out; ties and parts that are no matrices included."""
    layout = Layout.create_from_shapes({"a.weight": (2, 3), "a.bias": (3,), "b.weight": (4, 1)})
    noise = torch.rand(2, 13, generator=torch.Generator().manual_seed(seed))
    for score in (torch.tensor(whole, dtype=torch.float32).reshape(2, 13), noise):
        chosen = masks.smallest(score, layout, torch.tensor([first, second]))
        assert not chosen[:, 6:9].any()
        for where, count in ((slice(6), first), (slice(9, 13), second)):
            for row, picked in zip(score[:, where], chosen[:, where], strict=True):
                assert int(picked.sum()) == count
                if 0 < count < len(row):
                    assert row[picked].max() <= row[~picked].min()
        assert torch.equal(masks.smallest(score[0], layout, torch.tensor([first, second])).sum(), chosen[0].sum())


@pytest.mark.parametrize("k", [None, 3])
def test_a_projection_is_its_keys(k: int | None) -> None:
    key, like = torch.tensor([5]), torch.zeros(2, 7, dtype=torch.float64)
    one, again, other = (projection(torch.tensor([n]), k, like).matrix for n in (5, 5, 6))
    if k is None:
        assert one is None
        return
    assert one is not None
    torch.testing.assert_close(again, one, rtol=0, atol=0)
    assert other is not None
    assert not torch.equal(one, other)
    torch.testing.assert_close(one.norm(dim=1), torch.ones(3, dtype=torch.float64))
    assert projection(key, k, like.float()).matrix.dtype == torch.float32  # type: ignore[union-attr]
