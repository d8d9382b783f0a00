"""Verdicts against the formulas they stand for, figures against the recorded rows, the page against the summaries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_recipe import TINY, tiny
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import ConfigError, RunDirError
from fedloom.report.reading import read_runs
from fedloom.reproduce import recipes, reproduce
from fedloom.reproduce import summary as summaries
from fedloom.reproduce.figures import Reference, values
from fedloom.reproduce.judge import FAILS, HOLDS, OPEN, cells, claims, within
from fedloom.reproduce.page import page
from fedloom.reproduce.recipe import Recipe, make_recipe, merged

ROOT = Path(__file__).parent.parent.parent


# --- cells


@given(st.floats(0, 1), st.floats(0, 0.1), st.integers(2, 9), st.floats(0, 1), st.floats(0, 0.1), st.integers(1, 9))
def test_within_is_two_standard_errors(m1: float, s1: float, n1: int, m2: float, s2: float, n2: int) -> None:
    word = within(m1, s1, n1, m2, s2, n2).split()[0]
    bound = 2 * math.sqrt(s1**2 / n1 + s2**2 / n2)
    assert word == ("within" if abs(m1 - m2) <= bound else "above" if m1 > m2 else "below")


def test_a_cell_says_the_difference_in_points_and_standard_errors() -> None:
    assert within(0.915, 0.03, 9, 0.9, None, 5) == "within (+1.50 points, +1.5 standard errors)"
    assert within(0.92, 0.0, 5, 0.9, None, 5) == "above (+2.00 points, no deviation known)"
    assert within(0.92, 0.0, 5, None, None, 5) == "-"


def numbers(**by_reference: list[float]) -> dict[str, dict[str, dict[str, float | None]]]:
    table = {name.replace("_", ": ") + ": accuracy": v for name, v in by_reference.items()}
    return {"few": {name: {str(seed): v for seed, v in enumerate(vs)} for name, vs in table.items()}}


def test_cells_are_means_over_seeds_beside_the_papers() -> None:
    found = cells(tiny(), numbers(flame_personal=[0.8, 1.0, math.nan], fedavg_global=[0.5, 0.7]), compare=True)
    a, b = found
    assert (a.column, a.mean, a.n, a.paper, a.paper_std) == ("a", 0.9, 2, 0.9, 0.01)
    assert a.std == pytest.approx(math.sqrt(0.02))
    assert a.verdict.startswith("within")
    assert (b.paper, b.verdict) == (None, "-")
    assert cells(tiny(), numbers(fedavg_global=[0.5]), compare=True)[0].verdict == "not run"
    assert {c.verdict for c in cells(tiny(), numbers(flame_personal=[0.8, 1.0]), compare=False)} == {"-"}


# --- claims


def with_claim(**claim: object) -> Recipe:
    table = {"text": "t", "higher": "flame: personal", "than": ["fedavg: global"], **claim}
    table = {k: v for k, v in table.items() if v is not None}
    return make_recipe("tiny", merged(TINY, {"paper": {"claims": [table]}}))


NEAR, FAR = [0.50, 0.51, 0.49, 0.50, 0.52], [0.70, 0.72, 0.69, 0.71, 0.71]


def verdict(one: Recipe, a: list[float], b: list[float]) -> str:
    return claims(one, numbers(flame_personal=a, fedavg_global=b))[0].verdict


def test_a_claim_holds_fails_or_is_open() -> None:
    assert verdict(with_claim(), FAR, NEAR) == HOLDS
    assert verdict(with_claim(), NEAR, FAR) == FAILS
    assert verdict(with_claim(), [0.5, 0.7, 0.4, 0.6, 0.5], [0.6, 0.5, 0.5, 0.55, 0.5]) == OPEN
    assert verdict(with_claim(higher=None, lower="flame: personal"), NEAR, FAR) == HOLDS
    assert verdict(with_claim(margin=0.5), NEAR, FAR) == HOLDS
    assert verdict(with_claim(than=[0.6]), FAR, NEAR) == HOLDS
    assert verdict(with_claim(than=[0.6]), NEAR, FAR) == FAILS


def test_fewer_than_five_seeds_decide_nothing_unless_it_holds_by_construction() -> None:
    assert verdict(with_claim(), FAR[:4], NEAR[:4]) == OPEN
    assert verdict(with_claim(construction=True), NEAR[:1], NEAR[:1]) == HOLDS
    assert (
        "by construction"
        in claims(with_claim(construction=True), numbers(flame_personal=NEAR, fedavg_global=NEAR))[0].summary
    )
    assert verdict(with_claim(construction=True), NEAR[:1], FAR[:1]) == FAILS


def test_comparisons_are_paired_t_tests_with_holms_correction() -> None:
    a, b = np.array(FAR), np.array([0.69, 0.70, 0.68, 0.71, 0.69])
    (judged,) = claims(with_claim(), numbers(flame_personal=list(a), fedavg_global=list(b)))
    (pair,) = judged.comparisons
    test = stats.ttest_rel(a, b)
    assert pair.p == pytest.approx(test.pvalue)
    assert pair.difference == pytest.approx(np.mean(a - b))
    assert pair.half == pytest.approx((test.confidence_interval(0.95).high - test.confidence_interval(0.95).low) / 2)
    assert 0.01 < pair.p < 0.05
    assert judged.verdict == HOLDS
    rivals = {f"m{k}_global": list(b + 1e-3 * k) for k in range(5)}
    table = {"than": [f"m{k}: global" for k in range(5)]}
    (judged,) = claims(with_claim(**table), numbers(flame_personal=list(a), **rivals))
    assert min(c.p for c in judged.comparisons) > 0.01
    assert {c.verdict for c in judged.comparisons} == {OPEN}


def test_seeds_that_only_one_side_has_are_left_out() -> None:
    (judged,) = claims(with_claim(), numbers(flame_personal=[*FAR, 9.0], fedavg_global=NEAR))
    assert judged.comparisons[0].n == 5


# --- figures


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("figures")
    reproduce(tiny(), "full", out, results=out / "results", only=["flame"], seeds=[3, 4])
    return out


def test_figures_are_what_was_recorded(finished: Path) -> None:
    run = read_runs([finished / "few"])[0]
    table = pq.read_table(finished / "few" / "metrics.parquet").to_pylist()

    def mean(seed: int, round: int, model: str = "personal", part: str = "test", metric: str = "accuracy") -> float:
        key = {"seed": seed, "round": round, "model": model, "part": part, "metric": metric}
        found = [r["value"] for r in table if r["client"] >= 0 and all(r[k] == v for k, v in key.items())]
        return float(np.nanmean(found))

    def of(text: str) -> dict[int, float]:
        return values(run, Reference.of(text, "accuracy"))

    for seed in (3, 4):
        assert of("flame: personal")[seed] == pytest.approx(mean(seed, 4))
        assert of("flame: personal: accuracy@2")[seed] == pytest.approx(mean(seed, 2))
        assert of("flame: personal: accuracy@mean")[seed] == pytest.approx((mean(seed, 2) + mean(seed, 4)) / 2)
        assert of("flame: global: train loss")[seed] == pytest.approx(mean(seed, 4, "global", "train", "loss"))
        best = max((0, 2, 4), key=lambda r: (mean(seed, r, part="validation"), -r))
        assert of("flame: personal: accuracy@validation")[seed] == pytest.approx(mean(seed, best))
        assert of("flame: : samples_backward")[seed] > 0
        hybrid = [max(r, key=lambda pair: pair[0])[1] for r in _per_client(table, seed)]
        assert of("flame: hybrid-validation")[seed] == pytest.approx(np.mean(hybrid))
    assert all(math.isnan(v) for v in of("flame: personal: accuracy@9").values())
    with pytest.raises(ConfigError, match="after @ comes"):
        of("flame: personal: accuracy@best")
    with pytest.raises(ConfigError, match="a reference is"):
        Reference.of("flame", "accuracy")


def test_figures_are_of_benign_clients(tmp_path: Path) -> None:
    attacked = TINY | {"attack": {"kind": "random-labels", "fraction": 0.5}, "variants": ["many"]}
    reproduce(make_recipe("attacked", attacked), "full", tmp_path, only=["flame"], seeds=[3])
    (run,) = read_runs([tmp_path / "many"])
    (record,) = run.summary.runs
    attackers = run.attackers(record.method, record.seed)
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
        assert values(run, Reference.of(f"flame: {model}", "accuracy"))[3] == pytest.approx(mean)


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


# --- summaries and the page


def test_a_summary_is_read_as_it_was_written(finished: Path) -> None:
    done = summaries.read(finished / "results", "tiny", "full")
    assert done is not None
    assert done.complete
    assert done.command == "fedloom reproduce tiny --scale full --seeds 3,4 --only flame"
    assert summaries.read(finished / "results", "tiny", "laptop") is None
    (finished / "results" / "tiny@laptop.json").write_text("{}")
    with pytest.raises(RunDirError, match="not a summary"):
        summaries.read(finished / "results", "tiny", "laptop")
    (finished / "results" / "tiny@laptop.json").unlink()


def test_time_that_was_spent_outlives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 107.0, 107.0, 110.0, 200.0, 230.0, 230.0, 230.0])
    monkeypatch.setattr(summaries, "_processor", lambda: next(clock))
    spent = tmp_path / summaries.SPENT
    with summaries.counted(tmp_path, "few") as note:
        note()
        assert not spent.exists()
        note()
        assert json.loads(spent.read_text()) == {"few": 7.0}  # what a kill would leave
    assert json.loads(spent.read_text()) == {"few": 10.0}
    with summaries.counted(tmp_path, "few") as note:
        note()
    assert json.loads(spent.read_text()) == {"few": 40.0}


def test_the_page_says_what_was_run_and_what_was_not(finished: Path, tmp_path: Path) -> None:
    text = page({"tiny": tiny()}, finished / "results")
    assert "run, full scale" in text
    assert "Of 1 recipes 1 were run." in text
    assert "| few | a |" in text
    assert "not decidable at this scale" not in text.partition("## tiny")[2] or "not run" in text
    assert "not run" in page({"tiny": tiny()}, tmp_path)


def test_results_of_an_earlier_version_of_a_recipe_are_said_to_be_so(finished: Path) -> None:
    now = tiny()
    assert "earlier version" not in page({"tiny": now}, finished / "results")
    other = replace(now, document=now.document | {"rounds": now.document["rounds"] + 1})
    assert "run, full scale" in page({"tiny": other}, finished / "results")
    assert "earlier version" in page({"tiny": other}, finished / "results")


def test_the_page_in_the_documentation_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "reproduction.md").read_text() == page(recipes(), ROOT / "results")


# --- the command


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_runs_a_recipe_and_writes_its_page(tmp_path: Path) -> None:
    where = ("--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    output = call("flame-table3-mnist", "--scale", "smoke", "--only", "flame", *where)
    assert "FLAME-HM" in output
    assert "handwritten digits in place of the data" in output
    assert (tmp_path / "results" / "flame-table3-mnist@smoke.json").exists()
    call("--page", str(tmp_path / "page.md"), "--results", str(tmp_path / "results"))
    assert "Not run. Command: `fedloom reproduce flame-table3-mnist`" in (tmp_path / "page.md").read_text()


def test_all_stops_in_time(tmp_path: Path) -> None:
    where = ("--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    output = call("--all", "--scale", "smoke", "--budget", "0.2s", *where, code=130)
    assert "the same command goes on from here" in output
    assert len(list((tmp_path / "results").glob("*.json"))) <= 2


def test_what_the_command_refuses(tmp_path: Path) -> None:
    assert "give one of NAME" in call(code=2)
    assert "must be a time" in call("--all", "--budget", "soon", code=2)
    assert "--seeds must be numbers" in call("fedacs-table2", "--seeds", "one", code=2)
    assert "did you mean 'smoke'" in call("fedacs-table2", "--scale", "smok", code=2)
    missing = ("--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"))
    assert "mnist" in call("flame-table3-mnist", *missing, code=2).lower()
