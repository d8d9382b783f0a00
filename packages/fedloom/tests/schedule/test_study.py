"""The studies of virtual time, with tiny runs."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

ROOT = Path(__file__).parents[4]


def test_a_study_makes_the_runs_that_are_missing(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "studies" / "scripts" / "time"))["main"]
    out = tmp_path / "runs.jsonl"
    main(["fedbuff", "--smoke", "--target", "0.3", "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["schedule"] for line in lines] == ["synchronous", "over-selection", "buffered"]
    assert lines[0]["seconds_to_target"] > lines[1]["seconds_to_target"]
    main(["fedbuff", "--smoke", "--out", str(out)])
    assert len(out.read_text().splitlines()) == 3


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "studies" / "scripts" / "time"))


@pytest.fixture(scope="module")
def record(script: dict[str, Any]) -> dict[str, Any]:
    return json.loads(script["KEPT"].read_text())  # type: ignore[no-any-return]


def test_the_page_of_speed_is_that_of_its_runs(script: dict[str, Any], record: dict[str, Any]) -> None:
    lines, page = script["unpacked"](record), script["PAGE"].read_text()
    assert page == script["text"](script["Speed"](record))
    assert len({tuple(line[k] for k in script["KEYS"]) for line in lines}) == len(lines) == 10 * 4 * 2 * 5
    for part in (record["fedbuff"], {key: value for key, value in record.items() if key != "fedbuff"}):
        common = {key: part[key] for key in ("data", "target", "lr")}
        assert script["packed"]([line | common for line in script["unpacked"](part)]) == part
    assert f"All methods use the same step size, {record['lr']}," in page


def test_the_finding_of_speed_follows_from_its_runs(script: dict[str, Any], record: dict[str, Any]) -> None:
    lines, paragraphs = script["unpacked"](record), script["PAGE"].read_text().split("\n\n")
    seconds = {tuple(line[k] for k in script["KEYS"]): line["seconds_to_target"] for line in lines}
    for paragraph, schedule in zip(paragraphs[1:3], ("buffered", "over-selection"), strict=True):
        gains, changes = [], []
        for slow in script["DEVICES"]:
            for method in script["METHODS"]:
                both = [(seconds[method, "synchronous", slow, s], seconds[method, schedule, slow, s]) for s in range(5)]
                if all(a and b for a, b in both):
                    gains.append(math.prod(a / b for a, b in both) ** 0.2)
            before, after = (
                fmean(x["worst_tenth"]["slow"] for x in lines if (x["schedule"], x["slow"]) == (s, slow))
                for s in ("synchronous", schedule)
            )
            changes.append(100 * (after - before))
        assert f"{min(gains):.1f} to {max(gains):.1f} times" in paragraph
        stated = [float(points) for points in re.findall(r"([+-][\d.]+) ±", paragraph)]
        assert stated == pytest.approx(changes, abs=0.06)
    missed = {s: sum(x["seconds_to_target"] is None for x in lines if x["schedule"] == s) for s in script["SCHEDULES"]}
    assert f"{missed['over-selection']} runs with over-selection never reached the target" in paragraphs[2]
    assert f"{missed['synchronous']} with synchronous rounds and {missed['buffered']} with buffered" in paragraphs[2]
    runs = script["unpacked"](record["fedbuff"])
    seconds, uploads = (
        [fmean(x[figure] for x in runs if x["schedule"] == s) for s in ("synchronous", "buffered")]
        for figure in ("seconds_to_target", "uploads_to_target")
    )
    (paragraph,) = [p for p in paragraphs if p.startswith("In this experiment, FedAvg trains 105 writers")]
    assert f"{seconds[0] / seconds[1]:.1f} times as fast" in paragraph
    assert f"{uploads[0] / uploads[1]:.1f} times as many uploads" in paragraph
    assert missed["buffered"] <= missed["synchronous"] < missed["over-selection"]


def test_speed_states_a_loss_of_slow_clients_only_where_it_is_clear_among_all_comparisons(
    script: dict[str, Any], record: dict[str, Any]
) -> None:
    worst = {tuple(x[k] for k in script["KEYS"]): x["worst_tenth"]["slow"] for x in script["unpacked"](record)}
    pairs = [(method, slow) for method in script["METHODS"] for slow in script["DEVICES"]]
    over, whole = (
        {pair: [worst[pair[0], s, pair[1], seed] for seed in range(5)] for pair in pairs}
        for s in ("over-selection", "synchronous")
    )
    p = [stats.ttest_rel(over[pair], whole[pair]).pvalue for pair in pairs]
    lost = [fmean(over[pair]) < fmean(whole[pair]) for pair in pairs]
    alone = {pair for pair, one, below in zip(pairs, p, lost, strict=True) if one <= 0.05 and below}
    certain = multipletests(p, alpha=0.05, method="holm")[0] & lost
    page = script["PAGE"].read_text()
    assert f"Of {len(pairs)} comparisons (methods times device models), {len(alone)} are significant losses" in page
    assert ("Over-selection clearly harms" in page) == any(certain)
    assert ("With Holm's correction, no loss is" in page) == (not any(certain))
