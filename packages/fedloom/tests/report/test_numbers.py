"""Figures against cases worked by hand: intervals, statistics over clients, chosen rounds, winners."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedloom.algorithms import REGISTRY, get_role
from fedloom.lab import report
from fedloom.lab.report import numbers, overview
from fedloom.lab.report.comparison import criteria as compare
from fedloom.lab.report.comparison.contenders import default_baseline
from fedloom.lab.report.comparison.pairs import Pair, pairs_html, pairs_latex
from fedloom.lab.report.numbers import Estimate, Row, method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Key
from fedloom.rundir import RunRecord

COLUMNS = ("method", "seed", "round", "client", "model", "part", "metric", "value")


def store(path: Path, rows: list[tuple[str, int, int, int, str, str, str, float]], **summary: object) -> Path:
    path.mkdir(exist_ok=True)
    columns = zip(*rows, strict=True)
    pq.write_table(pa.table(dict(zip(COLUMNS, map(list, columns), strict=True))), path / "metrics.parquet")
    (path / "experiment.toml").write_text('name = "by hand"\n')
    if summary:
        (path / "summary.json").write_text(json.dumps({"name": "by hand", **summary}))
    return path


def clients(method: str, seed: int, round: int, part: str, name: str, values: list[float]) -> list:
    return [(method, seed, round, c, "global", part, name, v) for c, v in enumerate(values)]


def test_interval_by_hand() -> None:
    estimate = Estimate({0: 1.0, 1: 2.0, 2: 3.0, 7: math.nan})
    assert estimate.mean == 2
    assert estimate.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t quantile with 2 degrees of freedom
    assert math.isnan(Estimate({0: 1.0}).half)
    assert math.isnan(Estimate({}).mean)


def test_statistics_over_clients_by_hand(tmp_path: Path) -> None:
    accuracy = [*(0.5 + 0.02 * i for i in range(20)), math.nan]  # worst two of twenty: 0.50 and 0.52
    rows = clients("a", 0, 5, "test", "accuracy", accuracy) + clients(
        "a", 0, 5, "test", "loss", [1.0, 3.0, 5.0, math.nan]
    )
    (row,) = method_rows(read_runs([store(tmp_path / "r", rows)]))
    assert row.figures["accuracy"].mean == pytest.approx(0.69)
    assert row.figures["accuracy/worst10"].mean == pytest.approx(0.51)
    assert row.figures["loss/variance"].mean == pytest.approx(4.0)  # divisor n - 1
    assert row.figures["loss/worst10"].mean == 5.0


def test_recorded_statistics_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = clients("a", 0, 5, "test", "accuracy", [0.2, 0.4]) + clients("a", 0, 5, "test", "loss", [1.0, 3.0])
    rows += [
        ("a", 0, 5, -1, "global", "test", "accuracy/mean", 0.35),
        ("a", 0, 5, -1, "global", "test", "loss/variance", 7.0),
    ]
    (row,) = method_rows(read_runs([store(tmp_path / "r", rows)]))
    assert row.figures["accuracy"].mean == 0.35
    assert row.figures["loss/variance"].mean == 7.0


def test_rounds_are_chosen_on_validation_and_never_on_test(tmp_path: Path) -> None:
    rows = []
    for t, (validation, test) in enumerate([(0.5, 0.9), (0.8, 0.6), (0.8, 0.7), (0.7, 0.65)], start=1):
        rows += clients("a", 0, t, "validation", "accuracy", [validation]) + clients(
            "a", 0, t, "test", "accuracy", [test]
        )
    (row,) = method_rows(read_runs([store(tmp_path / "r", rows)]))
    assert row.figures["accuracy@validation"].mean == 0.6  # the first of the equals
    assert row.figures["accuracy"].mean == 0.65


@pytest.mark.parametrize("end", ["diverged", "failed", "interrupted"])
@pytest.mark.parametrize("whole", [0, 2])
def test_work_of_a_seed_that_ended_early_is_pooled_with_its_like_only(tmp_path: Path, end: str, whole: int) -> None:
    rows = [r for s, v in ((0, 0.5), (1, 0.7), (2, 0.1)) for r in clients("a", s, 4, "test", "accuracy", [v])]
    rows += [("a", s, 4, -1, "", "", "steps", 10.0 * (s + 1)) for s in range(3)]
    runs = [{"method": "a", "seed": s, "status": "done" if s < whole else end, "rounds": 4} for s in range(3)]
    (row,) = method_rows(read_runs([store(tmp_path / "r", rows, runs=runs)]))
    assert row.figures["steps"].mean == (15 if whole else 20)
    measured = 3 if end == "interrupted" else whole
    assert row.measured == measured
    if whole:
        assert row.status == f"{end} after round 4 (seed 2)"
        assert row.figures["accuracy"].mean == pytest.approx(0.6 if measured == 2 else 1.3 / 3)
    table = report.result_table(tmp_path / "r").to_pylist()[0]
    assert (table["accuracy_seeds"], table["seeds"]) == (measured, measured)


def test_work_is_totalled_and_traffic_goes_both_ways(tmp_path: Path) -> None:
    rows = clients("a", 0, 1, "test", "accuracy", [0.5]) + clients("a", 0, 2, "test", "accuracy", [0.9])
    for t in (1, 2):
        rows += [("a", 0, t, -1, "", "", "bytes_up", 3.0 * t), ("a", 0, t, -1, "", "", "bytes_down", 4.0 * t)]
    runs = read_runs([store(tmp_path / "r", rows)])
    assert compare.accumulate_cost(runs[0], "a", 0, "bytes").value.tolist() == [7, 14]
    assert compare.cost_to_reach(runs, method_rows(runs), "accuracy", 0.5, "bytes")[0].mean == 7
    assert compare.cost_to_reach(runs, method_rows(runs), "accuracy", 0.6, "bytes")[0].mean == 14
    assert compare.cost_to_reach(runs, method_rows(runs), "accuracy", 0.95, "bytes") == {}
    runs = read_runs([store(tmp_path / "r", [*rows, *clients("a", 0, 0, "test", "accuracy", [0.6])])])
    assert compare.cost_to_reach(runs, method_rows(runs), "accuracy", 0.9, "bytes")[0].mean == 14
    assert compare.cost_to_reach(runs, method_rows(runs), "accuracy", 0.6, "bytes") == {}  # met before any round


def row(name: str, values: list[float], status: str = "done") -> Row:
    records = tuple(RunRecord(method=name, seed=s, status=status, rounds=9) for s in range(len(values)))
    return Row("", name, name, "global", records, {"accuracy": Estimate(dict(enumerate(values)))})


def win(*rows: Row) -> compare.Winner:
    values = {i: r.figures["accuracy"] for i, r in enumerate(rows)}
    return compare.find_winner(compare.Criterion("accuracy", "", "", 1.0, True, values), list(rows))


def test_a_method_has_the_role_that_its_record_states_whatever_it_is_called() -> None:
    def of(name: str, role: str | None) -> Row:
        record = RunRecord(method=name, algorithm=name, role=role, seed=0, status="done")
        return Row("", name, name, "global", (record,), {})

    assert default_baseline([of("fedavg", None), of("local", None)]) == "local"  # of a directory without roles
    assert default_baseline([of("fedavg", "average"), of("mine:Alone", "alone")]) == "mine:Alone"
    assert default_baseline([of("local", ""), of("fedavg", "average")]) == "fedavg"
    roles = {name: get_role(entry()) for name, entry in REGISTRY.items()}
    named = {name: role for name, role in roles.items() if role}
    assert named == {"local": "alone", "fedavg": "average", "centralized": "pooled"}


def test_a_clear_lead_and_one_that_is_not() -> None:
    clear = win(row("a", [0.5, 0.6, 0.7, 0.6, 0.6]), row("b", [0.601, 0.7, 0.799, 0.7, 0.7]))
    assert (clear.row, clear.rivals, clear.runner_up, clear.decidable) == (1, (), 0, True)
    assert clear.lead == pytest.approx(0.1)
    unclear = win(row("a", [0.5, 0.6, 0.7, 0.6, 0.6]), row("b", [0.4, 0.8, 0.7, 0.6, 0.7]))
    assert (unclear.row, unclear.rivals, unclear.decidable) == (1, (0,), True)
    assert unclear.half > unclear.lead


def test_many_rivals_need_more_evidence() -> None:
    best, close = row("best", [0.70, 0.74, 0.71, 0.7, 0.7]), row("close", [0.60, 0.69, 0.64, 0.7, 0.6])  # p = 0.025
    assert win(best, close).rivals == ()
    again = replace(best, model="personal", figures={"accuracy": Estimate(dict.fromkeys(range(5), 0.69))})
    own = win(best, again, close)
    assert (own.row, own.runner_up, own.rivals) == (0, 2, ())  # its own other model is no rival
    others = [row(f"o{i}", [0.60 + 0.001 * i, 0.69, 0.64, 0.7, 0.6]) for i in range(1, 5)]
    assert len(win(best, close, *others).rivals) == 5


def test_the_target_that_costs_are_counted_to_is_of_a_method_that_ran_to_its_end() -> None:
    """A diverged method may have the best figures of all; its target would leave the costs of the others out."""
    kept, lost = row("a", [0.8, 0.8]), row("b", [0.9, 0.9], "diverged")
    assert compare.common_target([], [kept, lost], "accuracy") == pytest.approx(0.95 * 0.8)
    assert math.isnan(compare.common_target([], [lost], "accuracy"))
    mark = replace(row("a or b", [0.95, 0.95]), algorithm="")
    assert compare.common_target([], [kept, lost, mark], "accuracy") == pytest.approx(0.95 * 0.8)


def test_the_result_table_and_the_cards_have_the_same_leader_whatever_a_diverged_method_reached() -> None:
    kept, less, lost = row("a", [0.8, 0.8]), row("b", [0.7, 0.7]), row("c", [0.9, 0.9], "diverged")
    assert win(kept, less, lost).row == 0
    assert re.findall(r'<span class="best">([^<]*)</span>', overview.render_results([kept, less, lost])) == ["80.00"]


def test_a_diverged_method_is_named_as_such_beside_its_verdict_and_another_is_not() -> None:
    kept, less, lost = row("a", [0.8] * 5), row("b", [0.7] * 5), row("c", [0.9] * 5, "diverged")
    diverged, fine = [Pair(lost, kept, "accuracy", None)], [Pair(less, kept, "accuracy", None)]
    assert all(lost.status in text for text in (pairs_html(diverged), pairs_latex(diverged, "x")))
    assert not any("diverged" in text or "done" in text for text in (pairs_html(fine), pairs_latex(fine, "x")))


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_fewer_than_five_common_seeds_decide_nothing(seeds: int) -> None:
    far = win(row("a", [0.1 + 0.001 * s for s in range(seeds)]), row("b", [0.9] * seeds))
    assert (far.row, far.rivals, far.decidable, far.seeds) == (1, (0,), False, seeds)
    b = row("b", [0.9] * 5)
    shifted = Row(
        "", "c", "c", "global", b.records, {"accuracy": Estimate(dict(enumerate([0.1] * 5, start=5 - seeds)))}
    )
    assert not win(b, shifted).decidable


def test_equal_results_are_no_lead() -> None:
    one, other = row("a", [0.5, 0.6, 0.5, 0.6, 0.5]), row("b", [0.5, 0.6, 0.5, 0.6, 0.5])
    same = win(one, other)
    assert (same.rivals, same.equals, same.runner_up) == ((), (1,), None)  # the same models are one
    first, unlike = (
        replace(r, figures=r.figures | {"loss": Estimate(dict.fromkeys(range(5), loss))})
        for r, loss in ((one, 0.5), (other, 0.4))
    )
    assert (win(first, unlike).rivals, win(first, unlike).equals) == ((1,), ())
    assert win(one, unlike).equals == (1,)  # of one, the loss was not recorded


def test_a_diverged_method_cannot_win_and_a_running_one_makes_it_provisional() -> None:
    assert win(row("a", [0.5, 0.5]), row("b", [0.9, 0.9], "diverged")).row == 0
    assert win(row("a", [0.5, 0.5]), row("b", [0.9, 0.9], "interrupted")).provisional
    assert win(row("b", [0.9, 0.9], "failed")).row is None


@pytest.mark.parametrize(("figure", "words"), [("accuracy", "finished"), ("bytes", "reaches this target")])
def test_a_clear_lead_is_over_the_methods_that_were_compared(figure: str, words: str) -> None:
    best, behind = row("best", [0.9, 0.91, 0.92, 0.9, 0.93]), row("behind", [0.5, 0.52, 0.5, 0.51, 0.5])
    lost, few = row("lost", [0.95] * 5, "diverged"), row("few", [0.95, 0.96])
    criterion = compare.Criterion(figure, "", "", 1.0, True, {})
    for rows in ([best, behind], [best, behind, lost], [best, behind, few]):
        values = {i: r.figures["accuracy"] for i, r in enumerate(rows)}
        said = overview.significance_text(compare.find_winner(replace(criterion, values=values), rows), rows)
        some = f" that {words} in every seed" * (len(rows) > 2)
        lead = "ahead of behind global." if figure == "accuracy" else "times behind global&#39;s."
        assert said.startswith(f"<b>Better</b> than every other method{some}: ")
        assert said.endswith(lead)


def test_curves_are_means_over_clients_round_by_round(small: Path) -> None:
    (run,) = read_runs([small])
    key = Key("fedavg", 1, "global", "test", "accuracy")
    points = run.series[key]
    curve = numbers.benign_curve(run, key, "mean")
    expected = [np.nanmean(points.value[points.round == t]) for t in curve.round]
    assert curve.round.tolist() == [5, 10, 15, 20]
    np.testing.assert_allclose(curve.value, expected)
