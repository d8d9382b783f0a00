"""The demo: who leads is computed, whoever it is, and a run of it writes a picture and a report of every federation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

import fedloom as fl

FILE = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(what: str, method: str, stands: str) -> dict[str, Any]:
    behind = "" if stands == "best mean" else "-2.0 ± 1.0"
    return {"federation": what, "method": method, "value": 90.0, "low": 89.0, "high": 91.0, "stands": stands,
            "behind": behind}  # fmt: skip


@pytest.mark.parametrize("winner", ["local", "fedavg", "fedavg-ft", "pfedme", "fedslr"])
def test_any_method_may_win(demo: ModuleType, winner: str) -> None:
    rows = [row(what, winner, "best mean") for what in "abc"]
    assert demo.summary_sentences(rows, dict.fromkeys("abc", "inconclusive")) == [
        f"{winner} has the best mean in 3 of 3 federations"
    ]
    beside, worse = (row("a", "other", stands) for stands in ("inconclusive", "worse"))
    assert demo.verdict_sentence([rows[0], beside]) == f"{winner} 90.0 %, inconclusive against other"
    assert demo.verdict_sentence([rows[0], worse]) == (
        f"{winner} 90.0 %, better than all others, worse: other (-2.0 ± 1.0)"
    )


def test_winners_that_differ(demo: ModuleType) -> None:
    rows = [row(what, winner, "best mean") for what, winner in zip("abc", ("local", "fedavg", "ditto"), strict=True)]
    first, *others = demo.summary_sentences(rows, {"a": "worse", "b": "better", "c": "inconclusive"})
    assert first == "A different method has the best mean in each of the 3 federations"
    assert [line.split("(fedavg) is ")[1] for line in others] == [
        "better than local training with b",
        "worse than local training with a",
    ]


def test_a_short_demo(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(demo, "SEEDS", range(5))
    monkeypatch.setattr(demo, "RATES", {name: demo.RATES[name] for name in ("local", "fedavg")})
    drawn, comparisons = list[dict[str, Any]](), dict[str, Any]()
    compared, picture = demo.compare_methods, demo.make_chart

    def keep(place: int, what: str, folder: Path) -> Any:
        comparisons[what] = compared(place, what, folder)
        return comparisons[what]

    monkeypatch.setattr(demo, "compare_methods", keep)
    monkeypatch.setattr(demo, "make_chart", lambda rows, end: drawn.extend(rows) or picture(rows, end))
    demo.main(tmp_path)
    printed = capfd.readouterr()
    for what, comparison in comparisons.items():
        best, other = (row for row in drawn[: len(drawn) // 4] if row["federation"] == what)
        means = {
            m: np.array([float(comparison[m, s].final().nanmean()) for s in range(5)]) for m in ("local", "fedavg")
        }
        assert best["method"] == max(means, key=lambda name: means[name].mean())
        assert [best["value"], other["value"]] == pytest.approx(
            [100 * means[m["method"]].mean() for m in (best, other)]
        )
        gaps = 100 * (means[other["method"]] - means[best["method"]])
        split = pq.read_table(comparison.folder / "partition.parquet").to_pandas()
        error = stats.sem(gaps) * (1 + 5 * split["tested"].sum() / split["size"].sum()) ** 0.5
        half = stats.t.ppf(0.975, 4) * error
        assert other["behind"] == demo.format_gap(gaps.mean(), half)
        assert (other["stands"] == "worse") == (abs(gaps.mean()) > half)
    assert printed.err == ""
    assert [what for what in demo.PARTS if f"{what}: " in printed.out] == [*demo.PARTS]
    ends = ("", "-dark", "-phone", "-phone-dark")
    for end, (low, high) in zip(ends, [(640, 760)] * 2 + [(280, 374)] * 2, strict=True):
        width = re.search(r'<svg[^>]* width="(\d+)"', (tmp_path / f"demo{end}.svg").read_text())
        assert width is not None
        assert low <= int(width[1]) <= high
    for name in ("demo.svg", "demo-dark.svg", *(f"federation-{k}/report.html" for k in (1, 2, 3))):
        assert (tmp_path / name).stat().st_size > 5000


def test_no_client_of_the_demo_is_small(demo: ModuleType) -> None:
    data = fl.load("digits")
    smallest = [int(part(data, seed).sizes("train").min()) for part in demo.PARTS.values() for seed in demo.SEEDS]
    assert min(smallest) >= 20
    assert len(demo.SEEDS) >= 5
