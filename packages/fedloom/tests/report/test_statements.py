"""Sentences of the page say what the records hold: the target, the best, and how many clients attack."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from recorded import Recording

import fedloom as fl
from fedloom.lab.report import overview
from fedloom.lab.report.charts.kit import Figure
from fedloom.lab.report.comparison import devices
from fedloom.lab.report.comparison.contenders import COMPARED_MODELS, Models, select_contenders
from fedloom.lab.report.comparison.criteria import Criterion, find_winner
from fedloom.lab.report.comparison.gains import federated_leader
from fedloom.lab.report.document import READING_TEXTS
from fedloom.lab.report.numbers import Estimate, Row, method_rows
from fedloom.lab.report.page import make_figures
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Run
from fedloom.rundir import RunRecord, Summary

ODD = Recording(methods=6, seeds=5, clients=6, rounds=10, aggregates=False)
"""Ditto and FLAME of it have three models."""


def charts(runs: list[Run], models: Models = "best-on-validation") -> dict[str, Figure]:
    return {figure.id: figure for figure in make_figures(runs, method_rows(runs), models)}


def diverge(run: Path, *methods: str, by: float = 0.2) -> Path:
    """Let methods diverge by their second round, go on to the end, and have the best results of all."""
    summary = json.loads((run / "summary.json").read_text())
    for record in summary["runs"]:
        record.update({"status": "diverged", "diverged": 2} if record["method"] in methods else {})
    (run / "summary.json").write_text(json.dumps(summary))
    table = pq.read_table(run / "metrics.parquet")
    lifted = pc.and_(pc.is_in(table["method"], pa.array(methods)), pc.equal(table["metric"], "accuracy"))
    values = pc.if_else(lifted, pc.add(table["value"], by), table["value"])
    pq.write_table(table.set_column(table.column_names.index("value"), "value", values), run / "metrics.parquet")
    return run


@pytest.mark.parametrize("models", COMPARED_MODELS)
def test_the_page_has_one_target(tmp_path: Path, models: Models) -> None:
    """A personal model may be better than the one of the same method that the overview compares."""
    runs = read_runs([diverge(ODD.write(tmp_path / "run"), "flame")])
    rows = method_rows(runs)
    compared = [
        row
        for row in select_contenders(runs, rows, "best-on-validation" if models == "all" else models)
        if row.sound and row.algorithm
    ]
    best = max(np.mean([*row.figures["accuracy"].by_seed.values()]) for row in compared)
    said = set(re.findall(r"until accuracy ([\d.]+) %", unescape(overview.render_cards(runs, rows, models))))
    chart = charts(runs, models)["costs-reached"]
    (goal,) = said
    assert float(goal) == pytest.approx(95 * best, rel=1e-3)
    assert chart.title == f"Spent until accuracy {goal} %"
    np.testing.assert_allclose([point["target"] for point in chart.rows], 0.95 * best)


def test_classes_of_devices_have_the_target_of_the_overview(tmp_path: Path) -> None:
    """Of two runs that are compared the better one sets it for both."""
    runs = read_runs([ODD.write(tmp_path / "one"), replace(ODD, seed=1).write(tmp_path / "two")])
    goals = {devices.find_run_target(run, runs, method_rows(runs), "accuracy") for run in runs}
    assert goals == {point["target"] for point in charts(runs)["costs-reached"].rows}


@pytest.mark.parametrize(
    "bad", [("flame",), ("flame", "ditto"), ("fedavg", "fedprox", "local", "ditto", "flame", "fedacs")]
)
def test_a_diverged_method_is_called_best_nowhere(tmp_path: Path, bad: tuple[str, ...]) -> None:
    runs = read_runs([diverge(ODD.write(tmp_path / "run"), *bad)])
    rows, drawn = method_rows(runs), charts(runs)
    thick = re.findall(r"Thick: (\S+)", drawn["each-client"].caption)
    sound = [row for row in rows if row.sound]
    means = {row.title: row.figures["accuracy"].mean for row in sound}
    assert thick == [max(means, key=means.__getitem__).split(" · ")[0]] if sound else not thick
    for id in ("fairness", "worst"):
        assert {point["method"] for point in drawn[id].rows if point["best"]} <= {row.method for row in sound}
    assert ("costs-reached" in drawn) is bool(sound)
    leader = federated_leader(select_contenders(runs, rows), "accuracy")
    assert leader in sound if sound else leader is None
    assert not set(re.findall(r'class="who">(\S+) <', overview.render_cards(runs, rows))) & set(bad)


def test_a_ring_is_where_no_sound_method_is_better_in_both(tmp_path: Path) -> None:
    runs = read_runs([diverge(ODD.write(tmp_path / "run"), "flame")])
    peers = [point for point in charts(runs)["worst"].rows if point["method"] != "flame"]
    for one in peers:
        beaten = any(
            min(two["result"] - one["result"], two["worst"] - one["worst"]) >= 0 and two != one for two in peers
        )
        assert one["best"] is not beaten


def test_the_best_of_a_column_is_that_of_runs_on_equal_data(tmp_path: Path) -> None:
    """Another partition is another question: each has its own best."""
    one, two = ODD.write(tmp_path / "one"), replace(ODD, seed=1).write(tmp_path / "two")
    settings = (two / "experiment.toml").read_text()
    (two / "experiment.toml").write_text(settings.replace("alpha = 0.5", "alpha = 0.1"))
    runs = read_runs([one, two])
    rows = method_rows(runs)
    page, caption = overview.render_results(rows, runs), charts(runs)["each-client"].caption
    bold = re.findall(r'data-value="(\S+ · \w+)">.*?<td data-value="[^"]*"><span( class="best")?>', page, re.DOTALL)
    for run in runs:
        means = {row.title: row.figures["accuracy"].mean for row in rows if row.run == run.label}
        best = max(means, key=means.__getitem__)
        assert best in caption
        assert best.rpartition(" · ")[0] in [name for name, strong in bold if strong]
    assert sum(bool(strong) for _, strong in bold) == len(runs)
    assert "of runs with the same data and attack" in page


@pytest.mark.parametrize(("hostile", "words"), [((0,), "1 of 6 clients attacks"), ((0, 4), "2 of 6 clients attack ")])
def test_attackers_are_counted_as_recorded(tmp_path: Path, hostile: tuple[int, ...], words: str) -> None:
    """The share that is set may be no whole number of clients."""
    run = Recording(methods=2, seeds=2, clients=6, rounds=5, attack=0.3).write(tmp_path / "run")
    table = pq.read_table(run / "partition.parquet")
    attacks = pc.is_in(table["client"], pa.array(hostile))
    pq.write_table(table.set_column(table.column_names.index("attacks"), "attacks", attacks), run / "partition.parquet")
    runs = read_runs([run])
    assert words in " ".join(overview.report_notes(runs, method_rows(runs)))


def test_a_lead_over_common_seeds_has_its_sign_and_none_without_such_seeds() -> None:
    """Runs of two directories may have as many seeds, but not the same ones."""

    def row(name: str, by_seed: dict[int, float]) -> Row:
        records = tuple(RunRecord(method=name, seed=s, status="done") for s in by_seed)
        return Row("", name, name, "global", records, {"accuracy": Estimate(by_seed)})

    def said(*rows: Row) -> str:
        values = {i: r.figures["accuracy"] for i, r in enumerate(rows)}
        return overview.significance_text(
            find_winner(Criterion("accuracy", "", "%", 100.0, True, values), list(rows)), list(rows)
        )

    best = row("best", {s: 0.5 + 0.4 * (s > 4) for s in range(10)})
    level = row("level", dict.fromkeys(range(-5, 5), 0.6))
    assert "points behind level global over the common seeds" in said(best, level)
    assert "Better" not in said(best, level)
    apart = row("apart", dict.fromkeys(range(20, 30), 0.6))
    assert said(best, apart) == "<b>Not tested</b>: no common seed with apart global (5 are needed)."


def test_a_status_names_how_many_seeds_ended_alike() -> None:
    def status(*ends: int) -> str:
        records = tuple(
            RunRecord(method="a", seed=s, status="diverged" if end else "done", rounds=end)
            for s, end in enumerate(ends)
        )
        return Row("", "a", "a", "global", records, {}).status

    assert status(3, 3, 3) == "diverged after round 3"
    assert status(3, 0, 3) == "diverged after round 3 (2 of 3 seeds)"
    assert status(3, 3, 4) == "diverged after round 3 (2 of 3 seeds); diverged after round 4 (seed 2)"
    assert status(1, 2, 3, 3) == "diverged after round 1 (seed 0); diverged after round 2 (seed 1) and 2 more"
    assert status(0) == "done"


def test_where_every_method_diverged_no_card_denies_its_result(tmp_path: Path) -> None:
    """A diverged method that went on to its end has results with every seed."""
    runs = read_runs([diverge(ODD.write(tmp_path / "run"), *ODD.labels())])
    cards = overview.render_cards(runs, method_rows(runs))
    assert "Every method with this metric diverged or failed with some seed." in cards
    assert "No method has" not in cards
    assert all(len(row.figures["accuracy"].finite) == 5 for row in method_rows(runs))


def test_page_of_one_client_and_one_round_counts_them_as_one() -> None:
    record = RunRecord(method="a", seed=0, status="done", rounds=1)
    run = Run(Path(), "one", "", Summary(runs=(record,)), {}, ["site"], {}, {}, {})
    row = Row("", "a", "a", "global", (record,), {"accuracy": Estimate({0: 1.0})})
    assert overview.render_facts([run], [row]) == "1 method · 1 seed · 1 client · 1 round"


def test_methods_that_tune_where_they_are_scored_do_so_in_round_0() -> None:
    fed = fl.partitions.iid(clients=2, max_train_per_client=60)(fl.load("digits"), 0)
    for name in ("fedavg-ft", "fedbabu"):
        rows = fl.simulate(name, fed, "mlp", rounds=1).table().to_pylist()
        at_start = [row for row in rows if (row["round"], row["part"], row["metric"]) == (0, "test", "loss")]
        losses = {(row["model"], row["client"]): row["value"] for row in at_start}
        assert losses["personal", 0] != losses["global", 0]
    said = "fine-tune it from the global model before each evaluation, including round 0."
    assert f"FedAvg-FT, FedBABU and similar methods {said}" in READING_TEXTS["Models"]


def test_page_of_two_runs_counts_their_methods_once() -> None:
    record = RunRecord(method="a", seed=0, status="done", rounds=1)
    runs = [Run(Path(), label, "", Summary(runs=(record,)), {}, ["site"], {}, {}, {}) for label in ("one", "two")]
    rows = [Row(run.label, "a", "a", "global", (record,), {"accuracy": Estimate({0: 1.0})}) for run in runs]
    assert overview.render_facts(runs, rows) == "2 runs · 1 method · 1 seed · 1 client · 1 round"
