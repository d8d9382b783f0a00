"""The verdicts of the repository against those of `recomputed`, which shares no code with the judges."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedloom_studies.map.judge import judge
from fedloom_studies.map.records import fill_reused
from fedloom_studies.map.records import read_records as read_map
from fedloom_studies.map.setups import setups
from fedloom_studies.reproduce import judge as papers_judge
from fedloom_studies.reproduce import page
from fedloom_studies.reproduce.looks import HOLDS
from fedloom_studies.reproduce.recipe import Recipe, recipes
from tests import recomputed

ROOT = Path(__file__).resolve().parents[1]
FULL = setups("full")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["rounds", "gradients"])
def test_every_verdict_of_the_map_again(protocol: str) -> None:
    file = recomputed.RECORDS / "map-full.jsonl"
    first = read_map(file)
    records = first if protocol == "rounds" else fill_reused(read_map(file, "gradients"), first)
    rows = recomputed.map_means(protocol)
    compared = 0
    for name, own in rows.groupby("setup"):
        if not {"local", "fedavg"} <= {*own["method"]}:
            continue
        found, fresh = judge(FULL[str(name)], records), recomputed.judge_setup(own)
        assert found.reference == fresh.reference
        assert {s.method: s.verdict for s in found.standings if s.gain} == fresh.verdicts
        for s in found.standings:
            if s.gain is not None:
                assert (s.gain.mean, s.gain.half) == pytest.approx(fresh.gains[s.method], rel=1e-6, abs=1e-9)
                compared += 1
        assert (found.spread, found.needed) == (pytest.approx(fresh.spread, rel=1e-6), fresh.needed)
    assert compared > (900 if protocol == "rounds" else 200)


@pytest.mark.slow
def test_every_verdict_of_the_papers_again() -> None:
    compared, words = 0, set[str]()
    for name, recipe in recipes().items():
        summary = page.last(recipe, recomputed.RECORDS)
        if summary is None:
            continue
        fresh = again(recipe, summary.numbers)
        judged = papers_judge.claims(recipe, summary.numbers)
        found = {one.claim.text: str(one.verdict) for one in judged if one.measured}
        assert found == fresh, name
        compared, words = compared + len(found), words | {*found.values()}
    assert compared > 150
    assert len(words) == 4


def again(recipe: Recipe, numbers: dict[str, dict[str, dict[str, float | None]]]) -> dict[str, str]:
    claims = [claim.model_dump(exclude_none=True) for claim in recipe.paper.claims]
    return recomputed.judge_claims(claims, recipe.paper.figure, [*recipe.variants], recipe.document["seeds"], numbers)


def test_flame_is_fairer_on_mnist_as_the_paper_claims_it_by_ratios() -> None:
    """In all three recipes of the row; on differences one heavy seed of a rival rules the mean."""
    every = recipes()
    for name in ("flame-table3-mnist-published", "flame-table3-mnist-published-labels",
                 "flame-figures4-7-mnist-published"):  # fmt: skip
        summary = page.last(every[name], recomputed.RECORDS)
        assert summary is not None
        fresh = again(every[name], summary.numbers)
        (fairer,) = (verdict for text, verdict in fresh.items() if text.startswith("FLAME-PM is fairer"))
        assert fairer == HOLDS


def sign_flips(setup: str) -> tuple[int, int]:
    """Families with a verdict among the sign flips of a setup's gains less their means, and the number of flips."""
    rows = recomputed.map_means()
    table = rows[rows.setup == setup].pivot(index="method", columns="seed", values="mean")
    reference = max(("local", "fedavg"), key=lambda m: table.loc[m].mean())
    gaps = (table - table.loc[reference]).to_numpy()
    gaps = gaps[np.abs(gaps).max(1) > 0]
    gaps -= gaps.mean(1, keepdims=True)
    false = count = 0
    for code in range(1, 16):  # all flips but for the sign of all; that of none has means of 0
        flips = np.array([1, *(1 - 2 * (code >> k & 1) for k in range(4))])
        false, count = false + bool(judged_by_the_program(gaps * flips)), count + 1
    return false, count


def judged_by_the_program(gaps: np.ndarray) -> int:
    from fedloom.lab.report import family

    tests = family({k: dict(enumerate(row)) for k, row in enumerate(gaps.tolist())}, moderate=True)
    return sum(test.significant for test in tests.values())


def test_sign_flips_of_setups_with_methods_that_collapse_give_few_false_verdicts() -> None:
    found = [sign_flips(name) for name in ("femnist", "attack", "cross-device", "rotated")]
    assert sum(false for false, _ in found) <= 0.05 * sum(count for _, count in found)


@pytest.mark.slow
def test_sign_flips_of_every_setup_give_few_false_verdicts_as_the_page_says() -> None:
    found = [sign_flips(name) for name in FULL]
    false, count = sum(false for false, _ in found), sum(count for _, count in found)
    assert false <= 0.05 * count
    text = (ROOT / "docs" / "tuning.md").read_text()
    stated = re.search(r"at a nominal 2.5 % in ([\d.]+) % of (\d+) sign flips", text)
    assert stated is not None
    assert (float(stated[1]), int(stated[2])) == (pytest.approx(100 * false / count, abs=0.05), count)
    rows = recomputed.map_means()
    found_by_setup = {name: recomputed.judge_setup(own).verdicts for name, own in rows.groupby("setup")}
    better = {(name, m) for name, verdicts in found_by_setup.items() for m, word in verdicts.items()
              if word == "better" and m not in ("local", "fedavg", "centralized")}  # fmt: skip
    assert f"the moderated test finds {len(better)} pairs in {len({name for name, _ in better})} setups" in " ".join(
        text.split()
    )
