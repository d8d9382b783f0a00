"""Suppression of small groups: whatever a site publishes, no set of too few rows follows from it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.groups import group_names, publishable_groups
from fedloom.errors import ConfigError

LEAST = 5


def rows(*counts: int) -> torch.Tensor:
    """Groups of one choice with so many rows each, without overlap; the last count is of rows in none."""
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.stack([owner == k for k in range(len(counts) - 1)])


def ones(members: torch.Tensor) -> torch.Tensor:
    return torch.ones(members.shape[1], 1)


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ((9, 8, 0), [True, True]),
        ((9, 4, 0), [False, False]),  # all rows less the first group are the second
        ((9, 4, 8, 0), [True, False, False]),  # the smallest of the others hides it
        ((9, 4, 8, 7), [True, False, True]),  # rows without a level hide it
        ((9, 8, 3), [True, False]),  # rows without a level are too few themselves
        ((9, 0, 8, 0), [True, True, True]),
        ((3, 3, 3, 0), [False, False, False]),
    ],
)
def test_a_small_group_takes_another_with_it(counts: tuple[int, ...], wanted: list[bool]) -> None:
    members = rows(*counts)
    assert publishable_groups(members, [0] * (len(counts) - 1), ones(members), LEAST) == wanted


def test_bounds_that_differ_by_few_rows_are_not_both_published() -> None:
    age = torch.arange(40)
    members = torch.stack([age >= 20, age < 20, age >= 22, age < 22])
    assert publishable_groups(members, [0, 0, 1, 1], ones(members), LEAST) != [True] * 4
    assert publishable_groups(members, [0, 0, 1, 1], ones(members), 2) == [True] * 4


def test_rare_classes_count_as_rows_do() -> None:
    members, died = rows(20, 20, 0), torch.zeros(40)
    died[:4] = died[20:30] = 1
    counts = torch.stack([torch.ones(40), died, 1 - died], 1)
    assert publishable_groups(members, [0, 0], counts, LEAST) == [False, False]
    assert publishable_groups(members, [0, 0], counts, 4) == [True, True]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_no_small_set_follows_from_what_is_published(seed: int) -> None:
    """Of all sets of rows that are alike, by exhaustion: any that the sums determine has enough rows."""
    rng = np.random.default_rng(seed)
    wards, sexes = rng.integers(0, 3, 30), rng.integers(0, 2, 30)
    members = torch.from_numpy(np.stack([*(wards == k for k in range(3)), *(sexes == k for k in range(2))]))
    is_open = publishable_groups(members, [0, 0, 0, 1, 1], ones(members), LEAST)
    cells = [(wards == w) & (sexes == s) for w, s in itertools.product(range(3), range(2))]
    cells = [cell for cell in cells if cell.any()]
    sums = np.stack([np.ones(30, bool), *(members[k].numpy() for k in range(5) if is_open[k])]).astype(float)
    reached = np.array([[row[cell].mean() for cell in cells] for row in sums])
    for chosen in itertools.product((0.0, 1.0), repeat=len(cells)):
        wanted = np.array(chosen)
        size = sum(cell.sum() for cell, inside in zip(cells, chosen, strict=True) if inside)
        if 0 < size < LEAST:
            solution = np.linalg.lstsq(reached.T, wanted, rcond=None)[0]
            assert np.abs(reached.T @ solution - wanted).max() > 1e-9, (chosen, is_open)


def test_names_of_groups_need_agreed_levels() -> None:
    names = group_names(["sex", "age >= 75"], {"sex": ("f", "m")})
    assert names == [("sex", "sex=f"), ("sex", "sex=m"), ("age >= 75", "age>=75"), ("age >= 75", "age<75")]
    with pytest.raises(ConfigError, match="have not agreed on the levels of 'ward'"):
        group_names(["ward"], {"sex": ("f", "m")})
