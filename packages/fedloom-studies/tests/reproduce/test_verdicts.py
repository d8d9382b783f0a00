"""Verdicts against the formulas they stand for, figures against the recorded rows, the page against the summaries."""

from __future__ import annotations

import json
import math
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_recipe import FAR, NEAR, TINY, numbers, tiny, with_claim
from statsmodels.stats.multitest import multipletests

from fedloom.errors import ConfigError, RunDirError
from fedloom.lab.printing import print_texts
from fedloom.lab.report.reading import read_runs
from fedloom_studies.reproduce import reproduce
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.cells import make_table_cells, position_in_range
from fedloom_studies.reproduce.choices import CHOICE_FILE, read_choices
from fedloom_studies.reproduce.figures import Reference, get_unit, values_by_seed
from fedloom_studies.reproduce.judge import JudgedClaim, judge_at_validation, judge_claims, smallest_printed_lead
from fedloom_studies.reproduce.looks import DETECTION_PROBABILITY, FAILS, HOLDS, LOOK_LEVELS, PARTLY, UNDECIDED
from fedloom_studies.reproduce.recipe import Recipe, make_recipe, merge_tables, read_recipes
from fedloom_studies.store import read_records_of_file
from tests import commands
from tests.local import pretend

ROOT = Path(__file__).parents[4]


# --- cells


@given(st.floats(0, 1), st.floats(0, 0.1), st.integers(2, 9), st.floats(0, 1), st.floats(0, 0.1), st.integers(1, 9))
def test_within_is_two_standard_errors(m1: float, s1: float, n1: int, m2: float, s2: float, n2: int) -> None:
    word = position_in_range(m1, s1, n1, m2, s2, n2, "accuracy").split()[0]
    bound = 2 * math.sqrt(s1**2 / n1 + s2**2 / n2)
    assert word == ("within" if abs(m1 - m2) <= bound else "above" if m1 > m2 else "below")


def test_a_cell_says_the_difference_in_its_unit_and_standard_errors() -> None:
    assert position_in_range(0.915, 0.03, 9, 0.9, None, 5, "accuracy") == "within (+1.50 points, +1.5 standard errors)"
    assert position_in_range(0.92, 0.0, 5, 0.9, None, 5, "accuracy") == "above (+2.00 points, no deviation known)"
    assert position_in_range(0.92, 0.0, 5, 0.9, None, 5, "train loss") == "above (+0.0200, no deviation known)"
    assert position_in_range(0.92, 0.0, 5, None, None, 5, "accuracy") == "-"


def test_figures_are_shown_in_units_that_people_use() -> None:
    for figure in ("accuracy", "common accuracy@mean", "accuracy/sigma", "train accuracy/weighted@validation"):
        assert get_unit(figure).difference(-0.381, 0.0531) == "-38.1 ± 5.3 points"
        assert get_unit(figure).write_words(-0.0067, 0.0039) == "0.67 ± 0.39 points lower than"
        assert get_unit(figure).value(0.9498, 0.002) == "94.98 ± 0.20 %"
    assert get_unit("samples_backward@to 0.7").difference(217_990, 157_510) == "+218\u202f000 ± 158\u202f000 gradients"
    assert get_unit("samples_backward").write_words(math.log(0.5)) == "0.5 times as many gradients"
    assert get_unit("bytes_up@to 0.7").write_words(math.log(2), math.log(1.25)) == "2 (1.6 to 2.5) times as many bytes"
    assert get_unit("loss/variance").lead(math.log(1.2), math.nan) == "1.2 times"
    assert get_unit("accuracy").lead(0.01, 0.005) == get_unit("accuracy").difference(0.01, 0.005)
    for figure in ("loss/variance", "train loss@mean", "cd", "nmi", "accuracy/jain", "factorised"):
        assert get_unit(figure).difference(0.3105) == "+0.3105"
    assert get_unit("nonzeros").value(106_369.1, 46.813) == "106\u202f369 ± 47"
    assert get_unit("accuracy").value(math.nan) == get_unit("cd").difference(math.nan) == "-"


def test_cells_are_means_over_seeds_beside_the_papers() -> None:
    found = make_table_cells(
        tiny(), numbers(flame_personal=[0.8, 1.0, math.nan], fedavg_global=[0.5, 0.7]), compare=True
    )
    a, b = found
    assert (a.column, a.mean, a.n, a.paper, a.paper_std) == ("a", 0.9, 2, 0.9, 0.01)
    assert a.std == pytest.approx(math.sqrt(0.02))
    assert a.verdict.startswith("within")
    assert (b.paper, b.verdict) == (None, "-")
    assert make_table_cells(tiny(), numbers(fedavg_global=[0.5]), compare=True)[0].verdict == "not run"
    assert {c.verdict for c in make_table_cells(tiny(), numbers(flame_personal=[0.8, 1.0]), compare=False)} == {"-"}


# --- claims


def verdict(one: Recipe, a: list[float], b: list[float]) -> str:
    return judge_claims(one, numbers(flame_personal=a, fedavg_global=b))[0].verdict


def test_a_claim_holds_fails_or_is_open() -> None:
    assert verdict(with_claim(), FAR, NEAR) == HOLDS
    assert verdict(with_claim(), NEAR, FAR) == FAILS
    assert verdict(with_claim(), [0.5, 0.7, 0.4, 0.6, 0.5], [0.6, 0.5, 0.5, 0.55, 0.5]) == UNDECIDED
    assert verdict(with_claim(higher=None, lower="flame: personal"), NEAR, FAR) == HOLDS
    assert verdict(with_claim(margin=0.5), NEAR, FAR) == HOLDS
    assert verdict(with_claim(than=[0.6]), FAR, NEAR) == HOLDS
    assert verdict(with_claim(than=[0.6]), NEAR, FAR) == FAILS
    assert verdict(with_claim(), FAR, FAR) == FAILS  # equal in every seed is not more
    assert verdict(with_claim(margin=0.01), FAR, FAR) == HOLDS


def test_fewer_than_five_seeds_decide_nothing_unless_it_holds_by_construction() -> None:
    assert verdict(with_claim(), FAR[:4], NEAR[:4]) == UNDECIDED
    assert verdict(with_claim(construction=True), NEAR[:1], NEAR[:1]) == HOLDS
    assert (
        "by construction"
        in judge_claims(with_claim(construction=True), numbers(flame_personal=NEAR, fedavg_global=NEAR))[0].summary
    )
    assert verdict(with_claim(construction=True), NEAR[:1], FAR[:1]) == FAILS


def test_a_margin_is_no_part_of_the_difference_and_equivalence_has_two_sides() -> None:
    one = judge_claims(with_claim(margin=0.5), numbers(flame_personal=NEAR, fedavg_global=FAR))[0]
    assert one.closest_rival.look.difference == pytest.approx(np.mean(NEAR) - np.mean(FAR))
    a, close, ahead = [0.50, 0.51, 0.49, 0.50, 0.52], [0.501, 0.508, 0.491, 0.499, 0.521], [0.6, 0.61, 0.58, 0.6, 0.62]
    equal = with_claim(margin=0.05, equivalent=True)
    assert verdict(equal, close, a) == HOLDS
    assert verdict(equal, ahead, a) == verdict(equal, a, ahead) == FAILS
    assert verdict(with_claim(margin=0.05), ahead, a) == HOLDS
    assert verdict(equal, [0.5, 0.7, 0.4, 0.6, 0.5], a) == UNDECIDED
    with pytest.raises(ConfigError, match="equivalence needs a margin"):
        with_claim(equivalent=True)


def test_a_claim_on_spreads_is_levenes_test_paired_and_knows_no_level() -> None:
    """Distances from the median, as Brown and Forsythe take them; a shift of either side changes nothing."""
    rng = np.random.default_rng(0)
    calm, wild = 0.5 + 0.001 * rng.standard_normal(20), 0.9 + 0.1 * rng.standard_normal(20)
    less = with_claim(higher=None, lower="flame: personal", spread=True)
    assert verdict(less, list(calm), list(wild)) == verdict(less, list(calm + 0.4), list(wild)) == HOLDS
    assert verdict(less, list(wild), list(calm)) == FAILS
    a, b = calm[:5], wild[:5]
    (one,) = judge_claims(less, numbers(flame_personal=list(a), fedavg_global=list(b)))
    distances = [abs(values - np.median(values)) for values in (a, b)]
    assert one.closest_rival.look.difference == pytest.approx(np.mean(distances[1] - distances[0]))
    assert one.closest_rival.look.p == pytest.approx(stats.ttest_rel(*distances).pvalue)
    with pytest.raises(ConfigError, match="must compare references, not numbers"):
        with_claim(spread=True, than=[0.1])


def judged(*gaps: float, spread: float = 1.0, **claim: Any) -> JudgedClaim:
    """A claim whose subject is ahead of its rivals by these gaps."""
    a, noise = np.array(FAR), spread * np.array([0.004, -0.003, 0.001, -0.002, 0.0])
    rivals = {f"m{k}_global": list(a - gap + (k + 1) * noise) for k, gap in enumerate(gaps)}
    table = {"than": [f"m{k}: global" for k in range(len(gaps))], **claim}
    return judge_claims(with_claim(**table), numbers(flame_personal=list(a), **rivals))[0]


def test_a_rival_is_one_number_per_seed_and_its_interval_is_the_one_that_decides() -> None:
    """The mean over variants of the difference; the least over rivals is the claim's."""
    a, b, c = np.array(FAR), np.array(NEAR), np.array([0.69, 0.70, 0.70, 0.71, 0.69])
    few = numbers(flame_personal=list(a), fedavg_global=list(b), other_global=list(c))["few"]
    many = numbers(flame_personal=list(a), fedavg_global=list(b - 0.1), other_global=list(c))["few"]
    table = {"text": "t", "higher": "flame: personal", "than": ["fedavg: global", "other: global"]}
    (one,) = judge_claims(with_claim(**table), {"few": few, "many": many})
    assert [rival.name for rival in one.rivals] == ["fedavg: global: accuracy", "other: global: accuracy"]
    leads = (a - b + 0.05, a - c)
    p = [stats.ttest_1samp(lead, 0).pvalue for lead in leads]
    rejected = sum(multipletests(p, alpha=LOOK_LEVELS[0][1], method="holm")[0])
    for k, (rival, lead) in enumerate(zip(one.rivals, leads, strict=True)):
        step = min(sum(q < p[k] for q in p), rejected)
        interval = stats.ttest_1samp(lead, 0).confidence_interval(1 - LOOK_LEVELS[0][1] / (2 - step))
        assert rival.is_significant == (interval.low > 0 or interval.high < 0)
        assert rival.look.difference == pytest.approx(lead.mean())
        assert rival.look.half == pytest.approx((interval.high - interval.low) / 2)
        assert rival.look.p == pytest.approx(stats.ttest_1samp(lead, 0).pvalue)
    assert one.closest_rival == one.rivals[1]


def test_work_and_variances_are_compared_by_ratios() -> None:
    """A heavy seed rules the mean of differences, and not that of the logarithms of ratios."""
    ours, theirs = [0.010, 0.011, 0.009, 0.010, 0.200], [0.013, 0.014, 0.012, 0.013, 0.260]
    table = {"higher": None, "lower": "flame: personal: loss/variance", "than": ["fedavg: global: loss/variance"]}
    known = {"few": {"flame: personal: loss/variance": dict(zip("01234", ours, strict=True)),
                     "fedavg: global: loss/variance": dict(zip("01234", theirs, strict=True))}}  # fmt: skip
    (one,) = judge_claims(with_claim(**table), known)
    lead = np.log(theirs) - np.log(ours)
    assert one.verdict == HOLDS
    assert one.rivals[0].look.difference == pytest.approx(lead.mean())
    assert stats.ttest_1samp(np.subtract(theirs, ours), 0).pvalue > LOOK_LEVELS[0][1]
    scaled = {"few": {k: {s: 100 * v for s, v in by.items()} for k, by in known["few"].items()}}
    assert judge_claims(with_claim(**table), scaled)[0].rivals[0].look.p == pytest.approx(one.rivals[0].look.p)


def test_one_rival_neither_carries_nor_drowns_the_others() -> None:
    assert judged(0.3, 0.2, 0.05).verdict == HOLDS
    assert judged(0.3, 0.2, -0.05).verdict == FAILS  # a mean over rivals would be clearly ahead
    assert judged(-0.3, 0.2, 0.2, 0.2).verdict == FAILS
    assert judged(0.3, 0.2, 0.001).verdict == PARTLY  # level with one, behind none
    assert judged(0.05, 0.05, 0.3, spread=0.1).verdict == HOLDS
    wild = judged(0.05, 0.05, 0.3, spread=20)  # spread in one rival is not spread in all
    assert wild.verdict in (PARTLY, UNDECIDED)
    assert judged(0.3, 0.2, -0.02).closest_rival.name == "m2: global: accuracy"


def test_of_a_claim_that_does_not_hold_the_least_is_clearly_against_it() -> None:
    """A rival that is farther ahead on average, and not clearly, decides nothing and is not the number."""
    wild = np.array(FAR) + np.array([0.9, -0.5, 0.7, -0.4, 0.8])
    clear = np.array(FAR) + np.array([0.10, 0.11, 0.09, 0.10, 0.11])
    measured = numbers(flame_personal=FAR, m0_global=list(wild), m1_global=list(clear))
    (one,) = judge_claims(with_claim(than=["m0: global", "m1: global"]), measured)
    assert one.verdict == FAILS
    assert one.closest_rival == one.rivals[1]
    assert one.closest_rival.look.difference > one.rivals[0].look.difference


def test_rivals_have_holms_correction() -> None:
    """Five rivals at p = 0.0021 each are not clear together, one is."""
    lead = np.array([0.0148, 0.0088, 0.0106, 0.0136, 0.0064])
    p = float(stats.ttest_1samp(lead, 0).pvalue)
    assert LOOK_LEVELS[0][1] / 5 < p < LOOK_LEVELS[0][1]
    for count, verdict in ((1, HOLDS), (5, UNDECIDED)):
        rivals = {f"m{k}_global": list(np.array(FAR) - lead) for k in range(count)}
        table = {"than": [f"m{k}: global" for k in range(count)]}
        assert judge_claims(with_claim(**table), numbers(flame_personal=FAR, **rivals))[0].verdict == verdict


def test_of_most_rivals_is_more_than_half_of_them() -> None:
    assert judged(0.3, 0.2, -0.1, most=True).verdict == HOLDS
    assert judged(0.3, -0.2, -0.1, most=True).verdict == FAILS
    assert judged(0.3, 0.3, -0.1, -0.1, most=True).verdict == FAILS  # half are clearly ahead
    assert judged(-0.01, -0.01, -0.1, most=True, margin=0.05).verdict == HOLDS
    assert judged(0.5, 0.4, 0.3, most=True, margin=0.02).verdict == HOLDS  # better is not worse


def test_a_comparison_that_is_clearly_against_a_claim_leaves_it_in_part() -> None:
    """On average over variants the subject leads; in one of them it is clearly behind."""
    few = numbers(flame_personal=FAR, fedavg_global=NEAR)["few"]
    many = numbers(flame_personal=NEAR, fedavg_global=list(np.array(NEAR) + 0.03))["few"]
    (one,) = judge_claims(with_claim(), {"few": few, "many": many})
    assert one.rivals[0].verdict == HOLDS
    assert (one.verdict, one.right, len(one.measured)) == (PARTLY, 1, 2)
    assert one.count == "1 of 2 comparisons favor the claim, 1 of them clearly, 1 clearly contradicts it"
    assert judge_claims(with_claim(), {"few": few, "many": few})[0].verdict == HOLDS
    for rival in ("fedavg: global", 0.6):  # a claim on each variant is not carried by the others
        (one,) = judge_claims(with_claim(each=True, than=[rival]), {"few": few, "many": many})
        assert (one.verdict, len(one.rivals)) == (FAILS, 2)
        assert one.closest_rival.name == f"many | {rival if rival == 0.6 else 'fedavg: global: accuracy'}"
        assert judge_claims(with_claim(each=True, than=[rival]), {"few": few, "many": few})[0].verdict == HOLDS


def test_the_rivals_are_tested_on_the_seeds_that_all_of_them_have() -> None:
    """A seed that one rival lacks is in neither, though the others have it."""
    known = numbers(flame_personal=[9.0, *FAR], m0_global=[math.nan, *NEAR], m1_global=[0.0, *NEAR])
    (one,) = judge_claims(with_claim(than=["m0: global", "m1: global"]), known)
    first, second = one.rivals
    assert first.look == replace(second.look, level=first.look.level)
    assert {first.look.level, second.look.level} == {LOOK_LEVELS[0][1], LOOK_LEVELS[0][1] / 2}  # of Holm's steps


def test_of_a_claim_of_equivalence_the_least_is_the_farthest_from_it() -> None:
    one = judged(0.06, -0.07, -0.05, margin=0.03, equivalent=True)
    assert one.closest_rival.name == "m1: global: accuracy"
    assert one.verdict == FAILS


def test_a_claim_is_judged_at_the_round_chosen_on_validation_too() -> None:
    known = numbers(flame_personal=NEAR, fedavg_global=FAR)["few"]
    turned = {f"{name}@validation": value for name, value in zip(known, reversed(known.values()), strict=True)}
    for margin in (0.0, 0.01):
        one = with_claim(margin=margin)
        (last_round,) = judge_claims(one, {"few": known | turned})
        then = judge_at_validation(one, last_round, {"few": known | turned})
        assert then is not None
        assert then.claim.margin == margin
        assert then.closest_rival.look.difference == pytest.approx(-last_round.closest_rival.look.difference)
        assert judge_at_validation(one, last_round, {"few": known}) is None
    fixed = with_claim(higher="flame: personal: accuracy@2", than=[0.5])
    seen = {"few": {"flame: personal: accuracy@2": known["flame: personal: accuracy"]}}
    assert judge_at_validation(fixed, judge_claims(fixed, seen)[0], seen) is None


def test_single_comparisons_have_holms_correction() -> None:
    a, b = np.array(FAR), np.array([0.69, 0.70, 0.68, 0.71, 0.69])
    rivals = {f"m{k}_global": list(b - 0.004 - 0.005 * k) for k in range(5)}
    table = {"than": [f"m{k}: global" for k in range(5)]}
    (judged,) = judge_claims(with_claim(**table), numbers(flame_personal=list(a), **rivals))
    p = sorted(stats.ttest_rel(a, np.array(r)).pvalue for r in rivals.values())
    clear = sum(all(p[j] <= LOOK_LEVELS[0][1] / (5 - j) for j in range(k + 1)) for k in range(5))
    assert 0 < clear < 5
    assert sum(c.look.verdict == HOLDS for c in judged.comparisons) == clear


@given(st.integers(0, 2**16), st.floats(-0.5, 1.5), st.integers(0, 24))
def test_the_first_clear_look_decides_and_later_seeds_change_nothing(seed: int, mean: float, n: int) -> None:
    lead = list(np.random.default_rng(seed).normal(mean, 1, n))
    one = judge_claims(with_claim(than=[0.0]), numbers(flame_personal=lead))[0].closest_rival.look if n else None
    expected = UNDECIDED
    for count, level in LOOK_LEVELS:
        if n >= count and expected == UNDECIDED:
            test = stats.ttest_1samp(lead[:count], 0)
            expected = UNDECIDED if test.pvalue > level else HOLDS if test.statistic > 0 else FAILS
            assert one is not None
            used = count
    if n >= 5:
        assert one is not None
        assert (one.verdict, one.n) == (expected, used)


def test_looks_see_the_recipes_own_seeds_first() -> None:
    one = make_recipe("tiny", merge_tables(TINY, {"seeds": [1, 10, 100]}))
    assert one.seeds(6) == [1, 10, 100, 0, 2, 3]
    assert one.ordered(["0", "10", "1", "2", "100"]) == ["1", "10", "100", "0", "2"]
    assert len(set(one.seeds(20))) == 20


def test_a_difference_called_detectable_is_decided_as_often_as_said() -> None:
    one, spread = with_claim(than=[0.0]), np.array([-0.2, -0.1, 0.0, 0.1, 0.2])
    detectable = judge_claims(one, numbers(flame_personal=list(spread)))[0].closest_rival.look.detectable
    leads = np.random.default_rng(0).normal(detectable, spread.std(ddof=1), (500, 5))
    verdicts = [judge_claims(one, numbers(flame_personal=list(lead)))[0].verdict for lead in leads]
    assert stats.binomtest(verdicts.count(HOLDS), len(verdicts), DETECTION_PROBABILITY).pvalue > 0.01


def test_the_papers_own_margin_is_the_mean_of_its_cells() -> None:
    table = {"than": ["fedavg: global"]}
    claim = {"text": "t", "higher": "flame: personal", **table}
    printed = {"few": [[0.9, 0.01], 0.7], "many": [0.8, 0.8]}
    one = make_recipe("tiny", merge_tables(TINY, {"paper": {"cells": printed, "claims": [claim]}}))
    assert smallest_printed_lead(one, one.paper.claims[0]) == pytest.approx(0.1)
    assert math.isnan(smallest_printed_lead(tiny(), tiny().paper.claims[0]))


def test_seeds_that_only_one_side_has_are_left_out() -> None:
    (judged,) = judge_claims(with_claim(), numbers(flame_personal=[*FAR, 9.0], fedavg_global=NEAR))
    assert judged.comparisons[0].look.n == 5


# --- figures


def test_figures_are_what_was_recorded(finished: Path) -> None:
    run = read_runs([finished / "few"])[0]
    table = pq.read_table(finished / "few" / "metrics.parquet").to_pylist()

    def mean(seed: int, round: int, model: str = "personal", part: str = "test", metric: str = "accuracy") -> float:
        key = {"seed": seed, "round": round, "model": model, "part": part, "metric": metric}
        found = [r["value"] for r in table if r["client"] >= 0 and all(r[k] == v for k, v in key.items())]
        return float(np.nanmean(found))

    def of(text: str) -> dict[int, float]:
        return values_by_seed(run, Reference.create(text, "accuracy"))

    for seed in (3, 4):
        assert of("flame: personal")[seed] == pytest.approx(mean(seed, 4))
        assert of("flame: personal: accuracy@2")[seed] == pytest.approx(mean(seed, 2))
        assert of("flame: personal: accuracy@mean")[seed] == pytest.approx((mean(seed, 2) + mean(seed, 4)) / 2)
        assert of("flame: global: train loss")[seed] == pytest.approx(mean(seed, 4, "global", "train", "loss"))
        best = max((0, 2, 4), key=lambda r: (mean(seed, r, part="validation"), -r))
        assert of("flame: personal: accuracy@validation")[seed] == pytest.approx(mean(seed, best))
        work = {r: of(f"flame: : samples_backward@{r}")[seed] for r in (0, 2, 4)}
        assert of("flame: : samples_backward")[seed] == work[4] > work[2] > work[0]
        for target in (0.0, 0.3, 0.6, 1.1):  # accuracy of the personal models on validation data
            first = next((r for r in (0, 2, 4) if mean(seed, r, part="validation") >= target), 4)
            assert of(f"flame: personal: samples_backward@to {target}")[seed] == work[first]
        hybrid = [max(r, key=lambda pair: pair[0])[1] for r in _per_client(table, seed)]
        assert of("flame: hybrid-validation")[seed] == pytest.approx(np.mean(hybrid))
    assert all(math.isnan(v) for v in of("flame: personal: accuracy@9").values())
    for when in ("best", "to", "to best"):
        with pytest.raises(ConfigError, match="after @, use"):
            of(f"flame: personal: accuracy@{when}")
    with pytest.raises(ConfigError, match="a reference must have the form"):
        Reference.create("flame", "accuracy")


def test_figures_are_of_benign_clients(tmp_path: Path) -> None:
    attacked = TINY | {"attack": {"kind": "random-labels", "fraction": 0.5}, "variants": ["many"]}
    reproduce(make_recipe("attacked", attacked), "full", tmp_path, only=["flame"], seeds=[3])
    (run,) = read_runs([tmp_path / "many"])
    (record,) = run.summary.runs
    attackers = run.attackers(record.seed)
    assert len(attackers) == 3
    table = [
        row
        for row in pq.read_table(tmp_path / "many" / "metrics.parquet").to_pylist()
        if row["client"] not in attackers
    ]
    both = _per_client(table, 3)
    expected = {
        "personal": np.mean([personal for (_, personal), _ in both]),
        "global": np.mean([shared for _, (_, shared) in both]),
        "hybrid-validation": np.mean([max(pair, key=lambda known: known[0])[1] for pair in both]),
    }
    for model, mean in expected.items():
        assert values_by_seed(run, Reference.create(f"flame: {model}", "accuracy"))[3] == pytest.approx(mean)


def _per_client(table: list[dict[str, object]], seed: int) -> list[list[tuple[float, float]]]:
    """Per client (validation, test) accuracy of the personal, then of the global model, after the last round."""
    known = {
        (r["client"], r["model"], r["part"]): r["value"]
        for r in table
        if r["seed"] == seed and r["round"] == 4 and r["metric"] == "accuracy" and r["client"] >= 0
    }
    clients = sorted({c for c, _, _ in known})
    return [
        [(known[c, model, "validation"], known[c, model, "test"]) for model in ("personal", "global")] for c in clients
    ]


# --- summaries


def test_a_summary_is_read_as_it_was_written(finished: Path, tmp_path: Path) -> None:
    done = summaries.read_summary(finished / "results", "tiny", "full")
    assert done is not None
    assert done.complete
    assert done.command == "fedloom reproduce tiny --scale full --seeds 3,4 --only flame"
    assert summaries.read_summary(finished / "results", "tiny", "laptop") is None
    (tmp_path / summaries.SUMMARIES_FILE).write_text('{"recipe": "tiny", "scale": "laptop"}')
    with pytest.raises(RunDirError, match="line 1, is not a record"):
        summaries.read_summary(tmp_path, "tiny", "laptop")


@pytest.mark.parametrize("content", [b"", b"\xff", b"null", b"[1]", b'{"few": "x"}', b'{"few": null}', b"[" * 100_000])
def test_a_file_of_a_recipe_that_is_damaged_is_named(content: bytes, tmp_path: Path) -> None:
    readers: dict[str, Callable[[], object]] = {
        summaries.SPENT_FILE: lambda: summaries.spent_seconds(tmp_path),
        summaries.ESTIMATES_FILE: lambda: summaries.read_needs(tmp_path),
        CHOICE_FILE: lambda: read_choices(tmp_path, tiny().make_documents("full")["few"]),
    }
    for name, reader in readers.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RunDirError, match=f"{name} is damaged: .*; delete it and run it again"):
            reader()


def test_time_that_was_spent_outlives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 107.0, 107.0, 110.0, 200.0, 230.0, 230.0, 230.0])
    monkeypatch.setattr(summaries, "_processor_seconds", lambda: next(clock))
    spent = tmp_path / summaries.SPENT_FILE
    with summaries.count_spent_time(tmp_path, "few") as note:
        note()
        assert not spent.exists()
        note()
        assert json.loads(spent.read_text()) == {"few": 7.0}  # what a kill would leave
    assert json.loads(spent.read_text()) == {"few": 10.0}
    with summaries.count_spent_time(tmp_path, "few") as note:
        note()
    assert json.loads(spent.read_text()) == {"few": 40.0}


def test_a_commit_is_dirty_where_the_package_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record beside the package, written while a queue runs, changes nothing that the next one rests on."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    code, record = tmp_path / "src" / "package" / "rooms" / "summary.py", tmp_path / "results" / "a.json"
    for file in (code, record):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    monkeypatch.setattr(summaries, "__file__", str(code))
    found = summaries.current_commit.__wrapped__
    git("init", "--quiet")
    assert found() == ""
    git("add", ".")
    git("commit", "--quiet", "--message", "a")
    head = git("rev-parse", "HEAD").strip()
    record.write_text("2")
    assert found() == head
    (code.parent.parent / "other.py").write_text("1")
    assert found() == head
    code.write_text("2")
    assert found() == f"{head}-dirty"


# --- the command


call = partial(commands.call, "reproduce")


def test_the_command_runs_a_recipe_and_writes_its_page(tmp_path: Path) -> None:
    where = ("--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    output = call("flame-table3-mnist", "--scale", "smoke", "--only", "flame", *where)
    assert "FLAME-HM" in output
    assert "handwritten digits in place of the data" in output
    assert summaries.read_summary(tmp_path / "results", "flame-table3-mnist", "smoke") is not None
    call("--page", str(tmp_path / "page.md"), "--results", str(tmp_path / "results"))
    assert "Of " in (tmp_path / "page.md").read_text()
    text = (tmp_path / "papers" / "flame-table3-mnist.md").read_text()
    assert "Not run (up to 60 core-minutes). To run it, use `fedloom reproduce flame-table3-mnist`" in text


def test_one_seed_of_a_summary_is_verified(tmp_path: Path) -> None:
    where = ("--results", str(tmp_path / "results"))
    smoke = ("flame-table3-as-published", "--scale", "smoke", *where)
    assert "contains no summary of flame-table3-as-published" in call("--verify", *smoke, code=2)
    call(*smoke, "--out", str(tmp_path / "out"))
    assert "seed 1: equal:" in call("--verify", *smoke)
    file = tmp_path / "results" / summaries.SUMMARIES_FILE
    kept = json.loads(file.read_text())
    (by_reference,) = kept["numbers"].values()
    for change, code, words in ((1e-5, 0, "within numerical noise"), (0.1, 1, "not equal")):
        by_reference["flame: personal: accuracy"]["1"] += change
        file.write_text(json.dumps(kept))
        assert f"seed 1: {words}:" in call("--verify", *smoke, code=code)
    file.write_text(json.dumps(kept | {"protocol": "other"}))
    assert "an earlier version of the recipe" in call("--verify", *smoke, code=2)


def test_all_stops_in_time_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.reading_takes_a_second(monkeypatch)
    where = ("--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))

    def stopped() -> dict[str, Any]:
        output = call("--all", "--scale", "smoke", "--budget", "60s", *where, code=130)
        assert "The same command resumes from here" in output
        return {
            summary["recipe"]: summary
            for summary in read_records_of_file(tmp_path / "results" / summaries.SUMMARIES_FILE)
        }

    first = stopped()
    assert 0 < len(first) < len(read_recipes()) / 4
    whole = {name: summary for name, summary in first.items() if summary["complete"]}
    then = stopped()
    assert len(then) > len(first)
    assert then.items() >= whole.items()


def test_what_the_command_refuses(tmp_path: Path) -> None:
    assert "use one of NAME" in call(code=2)
    assert "--verify works only with NAME" in call("--verify", "--all", code=2)
    assert "differently. Omit --device" in call("fedacs-table2", "--verify", "--device", "cuda", code=2)
    assert "must be a time" in call("--all", "--budget", "soon", code=2)
    for seeds in ("one", "1,", "-1", "1.5", "²"):
        assert f"--seeds must be numbers separated by commas, e.g. 1,10,100, got {seeds!r}" in call(
            "fedacs-table2", "--seeds", seeds, code=2
        )
    assert "did you mean 'smoke'" in call("fedacs-table2", "--scale", "smok", code=2)
    missing = ("--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    assert "mnist" in call("flame-table3-mnist", *missing, code=2).lower()


def test_a_recipe_runs_on_a_device_that_the_command_names(tmp_path: Path) -> None:
    folders = ("--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    assert "no CUDA device" in call("fedacs-table2", "--scale", "smoke", "--device", "cuda", *folders, code=2)
    with pretend.accelerator():
        done = reproduce(tiny(), "smoke", tmp_path / "device", only=["fedavg"], device="cuda:0")
    assert done is not None
    assert done.complete
    assert done.command == "fedloom reproduce tiny --scale smoke --only fedavg --device cuda:0"
    with pytest.raises(
        RunDirError, match="'few' was run on device cuda:0 in .*few, but this run uses cpu. .* --device cuda:0"
    ):
        reproduce(tiny(), "smoke", tmp_path / "device", only=["fedavg"])
    for file in (tmp_path / "device").rglob("experiment.toml"):
        assert tomllib.loads(file.read_text())["engine"]["device"] == "cuda:0"


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_listing_breaks_no_name(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    names = [f"flame-table3-fashion-mnist-published-labels-{k}" for k in range(2)]
    titles = ("recipe", "what", "data", "state", "budget", "time")
    print_texts(titles, [(n, "Table III of a paper", "digits", "run", "5 min", "4 min") for n in names], names=True)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
