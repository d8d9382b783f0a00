"""The portfolio of `fedloom advise`: the frozen file is what the script makes of the records."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom.lab.advise
from fedloom_studies.map.cover import greedy_cover, leave_one_out, read_figures, selection_regrets, write_portfolio
from fedloom_studies.map.records import fill_reused, read_records
from fedloom_studies.map.setups import read_setups

RECORDS = Path(__file__).parents[4] / "studies" / "results" / "map-full.jsonl"
METHODS = ("local", "fedavg", "a", "b", "c")
TABLES = st.dictionaries(
    st.sampled_from("uvwxyz"), st.fixed_dictionaries({name: st.floats(0, 1) for name in METHODS}), min_size=2
)


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, float]]:
    records = fill_reused(read_records(RECORDS, "gradients"), read_records(RECORDS))
    return {name: dict(means) for name, means in read_figures(read_setups("full").values(), records).items()}


def test_the_frozen_portfolio_is_the_cover_of_the_records(figures: dict[str, dict[str, float]]) -> None:
    frozen = Path(fedloom.lab.advise.__file__).with_name("portfolio.toml").read_text()
    assert frozen == write_portfolio(greedy_cover(figures))


def test_every_further_method_lowers_the_mean_regret(figures: dict[str, dict[str, float]]) -> None:
    by_size = [sum(selection_regrets(figures, greedy_cover(figures, size)).values()) for size in range(2, 8)]
    assert by_size == sorted(by_size, reverse=True)
    assert min(selection_regrets(figures, greedy_cover(figures)).values()) >= 0


@given(TABLES)
def test_a_cover_of_all_methods_has_no_regret_and_a_setup_left_out_is_not_read(
    tables: dict[str, dict[str, float]],
) -> None:
    assert set(selection_regrets(tables, greedy_cover(tables, 5)).values()) == {0.0}
    for setup, (methods, loss) in leave_one_out(tables, 3).items():
        changed = {**tables, setup: {**tables[setup], "c": 2.0}}
        assert leave_one_out(changed, 3)[setup][0] == methods
        assert loss == selection_regrets(tables, methods)[setup]
