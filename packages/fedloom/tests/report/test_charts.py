"""What the charts show: attackers left out, clusters aligned, skew as the federation has it, only like with like."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recorded import SPLIT, Recording

from fedloom.data import partitions
from fedloom.data.sources import source
from fedloom.lab.report import overview
from fedloom.lab.report.charts import look, tradeoffs
from fedloom.lab.report.charts.kit import Figure
from fedloom.lab.report.charts.partition import align_cluster_labels, label_skew, skew_table
from fedloom.lab.report.numbers import benign_curve, method_rows
from fedloom.lab.report.overview import report_notes
from fedloom.lab.report.page import make_figures
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Key, Run
from fedloom.lab.report.settings import render_settings

COLUMNS = ("method", "seed", "round", "client", "model", "part", "metric", "value")


def charts(runs: list[Run]) -> dict[str, Figure]:
    return {figure.id: figure for figure in make_figures(runs, method_rows(runs))}


@pytest.fixture(scope="module")
def drawn(small: Path) -> dict[str, Figure]:
    return charts(read_runs([small]))


def change_split(run: Path, name: str, clients: dict[int, object]) -> None:
    """Set a column of the partition, for every seed."""
    rows = pq.read_table(run / "partition.parquet").to_pylist()
    for row in rows:
        row[name] = clients.get(row["client"], row[name])
    pq.write_table(pa.Table.from_pylist(rows, SPLIT), run / "partition.parquet")


def add(run: Path, rows: list[tuple]) -> None:
    table = pq.read_table(run / "metrics.parquet")
    more = pa.table(dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)), schema=table.schema)
    pq.write_table(pa.concat_tables([table, more]), run / "metrics.parquet")


@pytest.fixture
def attacked(tmp_path: Path) -> Path:
    run = Recording(methods=2, seeds=2, clients=6, rounds=10, attack=0.3, aggregates=False).write(tmp_path / "attacked")
    change_split(run, "attacks", {0: True, 4: True})
    return run


def test_attackers_are_in_no_chart_and_no_mean(attacked: Path) -> None:
    runs = read_runs([attacked])
    key = Key("fedavg", 0, "global", "test", "accuracy")
    points = runs[0].series[key]
    last = points.value[(points.round == 10) & ~np.isin(points.client, [0, 4])]
    assert benign_curve(runs[0], key, "mean").last == pytest.approx(np.nanmean(last))
    drawn = charts(runs)
    for id, names in (
        ("single-clients", "rows"),
        ("each-client", "rows"),
        ("clients", "dots"),
        ("relative", "dots"),
    ):
        rows = drawn[id].data[names]
        assert {row["client"] for row in rows} == {"site 2", "site 3", "site 5"}, id  # site 1 has no test part
        assert "Attacking clients are not shown." in drawn[id].caption
    flagged = {row["client"] for row in drawn["partition-0"].rows if "\N{BLACK FLAG}" in row["client"]}
    assert flagged == {"site 0 \N{BLACK FLAG}", "site 4 \N{BLACK FLAG}"}
    assert "2 of 6 clients attack (sign-flip)" in " ".join(report_notes(runs, method_rows(runs)))


def test_confusion_leaves_attackers_out(attacked: Path) -> None:
    cells = [("fedavg", 0, c, "global", t, t, 2) for c in range(6) for t in (0, 1)]
    names = ("method", "seed", "client", "model", "true", "predicted", "count")
    pq.write_table(pa.table(dict(zip(names, zip(*cells, strict=True), strict=True))), attacked / "confusion.parquet")
    shown = {row["client"] for row in charts(read_runs([attacked]))["confusion"].rows}
    assert shown == {"site 1", "site 2", "site 3", "site 5"}


def test_robustness_joins_only_runs_that_differ_in_the_share_alone(tmp_path: Path) -> None:
    recording = Recording(methods=2, seeds=2, clients=4, rounds=5)
    paths = [recording.write(tmp_path / "none")]
    for kind, share in (("sign-flip", 0.2), ("sign-flip", 0.4), ("gaussian", 0.3)):
        path = Recording(methods=2, seeds=2, clients=4, rounds=5, attack=share).write(tmp_path / f"{kind}-{share}")
        text = (path / "experiment.toml").read_text()
        (path / "experiment.toml").write_text(text.replace("sign-flip", kind))
        paths.append(path)
    other = Recording(methods=2, seeds=2, clients=4, rounds=6, attack=0.4).write(tmp_path / "other")
    drawn = charts(read_runs([*paths, other]))
    shares = {id: {row["x"] for row in f.rows} for id, f in drawn.items() if f.group == "attacks"}
    both = {"attacks": {0.0, 0.2, 0.4}, "attacks-2": {0.0, 0.3}}
    assert shares == both | {id.replace("attacks", "attacks-accuracy-worst10"): s for id, s in both.items()}
    assert all("other" not in row["run"] for f in drawn.values() if f.group == "attacks" for row in f.rows)


def test_runs_under_other_attacks_have_winners_of_their_own(tmp_path: Path) -> None:
    paths = [
        Recording(methods=2, seeds=2, clients=4, rounds=5, attack=a).write(tmp_path / f"share {a}") for a in (0.0, 0.2)
    ]
    runs = read_runs(paths)
    text = overview.render_cards(runs, method_rows(runs))
    assert re.findall("<h3>(.*?)</h3>", text) == ["share 0.0", "share 0.2"]
    assert not re.search('class="who">[^<]*share', text)
    best = [row["method"] for row in charts(runs)["fairness"].rows if row["best"]]
    assert {name.split(" · ")[1] for name in best} == {"share 0.0", "share 0.2"}


def test_a_ring_means_that_no_other_is_better_in_both(drawn: dict[str, Figure]) -> None:
    rows = drawn["fairness"].rows
    for row in rows:
        beaten = any(o["result"] >= row["result"] and o["variance"] <= row["variance"] and o is not row for o in rows)
        assert row["best"] is not beaten


def test_skew_of_every_seed_is_the_federations_own() -> None:
    data = source("digits").load(None)
    fed = partitions.dirichlet(clients=7, alpha=0.3)(data, seed=1)
    own, known = label_skew(fed.class_counts().double().numpy()), fed.skew()
    assert set(own) == {"sizes", "emd", "js", "effective_classes"}
    for name, values in own.items():
        torch.testing.assert_close(torch.from_numpy(values), torch.tensor(known[name], dtype=torch.float64))


def test_skew_by_hand() -> None:
    skew = label_skew(np.array([[4.0, 0.0], [0.0, 4.0], [2.0, 2.0], [0.0, 0.0]]))
    np.testing.assert_allclose(skew["emd"], [1, 1, 0, np.nan])
    np.testing.assert_allclose(skew["effective_classes"], [1, 1, 2, np.nan])
    middle = 0.75 * np.log2(4 / 3) + 0.25 * 2  # entropy of (3/4, 1/4), between (1, 0) and (1/2, 1/2)
    np.testing.assert_allclose(skew["js"], [middle - 0.5, middle - 0.5, 0, np.nan], atol=1e-12)


def test_every_seed_is_in_the_table_and_drawn(small: Path, drawn: dict[str, Figure]) -> None:
    assert re.findall('<th scope="row">(.*?)</th>', skew_table(read_runs([small]))) == ["0", "1", "2", "All"]
    assert len({drawn[f"partition-{i}"].caption for i in range(3)}) == 3


def test_clusters_take_the_number_of_their_group() -> None:
    assert align_cluster_labels(np.array([2, 2, 0, 1, -1]), np.array([0, 0, 1, 2, 2])).tolist() == [0, 0, 1, 2, -1]
    gen = np.random.default_rng(0)
    groups = gen.integers(0, 4, 40)
    assert (align_cluster_labels(gen.permutation(4)[groups], groups) == groups).all()


def test_shares_by_clusters_are_drawn_as_recorded(tmp_path: Path) -> None:
    run = Recording(methods=1, seeds=1, clients=4, rounds=10).write(tmp_path / "run")
    by_round = {5: [0.25, 0.25, 0.25, 0.25], 10: [0.5, 0.25, 0.125, 0.125]}
    add(run, [("fedavg", 0, t, c, "", "", "share", v) for t, row in by_round.items() for c, v in enumerate(row)])
    figure = charts(read_runs([run]))["cluster-shares"]
    assert [(row["round"], row["share"]) for row in figure.rows] == [(t, v) for t, row in by_round.items() for v in row]


def test_clusters_are_drawn_round_by_round(tmp_path: Path) -> None:
    run = Recording(methods=1, seeds=1, clients=4, rounds=10).write(tmp_path / "run")
    change_split(run, "group", dict(enumerate([1, 0, 0, 1])))
    labels = {5: [0, 1, 1, 0], 10: [1, 0, 1, -1]}
    add(run, [("fedavg", 0, t, c, "", "", "cluster", float(v)) for t, row in labels.items() for c, v in enumerate(row)])
    cells = {(r["round"], r["client"]): r["cluster"] for r in charts(read_runs([run]))["clusters"].rows}
    assert cells == {
        (5, "site 0 (2)"): 2, (5, "site 1 (1)"): 1, (5, "site 2 (1)"): 1, (5, "site 3 (2)"): 2,
        (10, "site 0 (2)"): 2, (10, "site 1 (1)"): 1, (10, "site 2 (1)"): 2,
    }  # fmt: skip


def test_sparse_models_are_compared_with_dense_ones(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=1, clients=4, rounds=10).write(tmp_path / "run")
    add(run, [("fedavg", 0, t, -1, "global", "", "nonzeros", 100.0) for t in (5, 10)])
    add(run, [("fedavg", 0, t, -1, "", "", "kkt", 10.0 ** (4 - t)) for t in (5, 10)])
    drawn = charts(read_runs([run]))
    assert {row["method"]: row["nonzeros"] for row in drawn["sparsity"].rows} == {"fedavg": 100, "fedprox": 7850}
    residual = next(f for f in drawn.values() if f.group == "convergence")
    assert '"type": "log"' in json.dumps(residual.spec())


def test_a_method_without_traffic_has_no_curve_over_it(drawn: dict[str, Figure]) -> None:
    traffic = drawn["curves-accuracy-bytes"]
    assert "local" not in {row["method"] for row in traffic.rows}
    assert "Not shown because they spent nothing: local." in traffic.caption


def test_many_clients_are_drawn_from_the_worst_to_the_best(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=1, clients=50, rounds=10).write(tmp_path / "run")
    figure = charts(read_runs([run]))["each-client"]
    last = {row["client"]: row["value"] for row in figure.rows if row["round"] == 10 and row["row"] in figure.caption}
    assert len(last) == 16
    assert list(last.values()) == sorted(last.values())
    assert "16 of 49 clients" in figure.caption


def test_warnings_that_seeds_share_are_one_note(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=2, clients=4, rounds=5).write(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["warnings"] = ["fedavg, seed 0: too fast", "few samples", "fedavg, seed 1: too fast"]
    (run / "summary.json").write_text(json.dumps(summary))
    runs = read_runs([run])
    found = report_notes(runs, method_rows(runs))
    assert [note for note in found if "fast" in note or "few" in note] == [
        "fedavg, seeds 0, 1: too fast",
        "few samples",
    ]


def test_settings_are_in_words_with_versions(small: Path) -> None:
    text = render_settings(read_runs([small]))
    assert "<dt>Partition</dt><dd>mixed: clients 10, alpha 0.5</dd>" in text
    assert "torch 2.13.0" in text
    assert "kind = &#34;mixed&#34;" in text


def test_a_point_far_off_the_axis_leaves_the_plot_its_width(tmp_path: Path) -> None:
    """A text counts toward the width of a chart wherever it is, even without letters."""
    run = Recording(methods=4, seeds=5, rounds=10, clients=6).write(tmp_path / "run")
    table = pq.read_table(run / "metrics.parquet").to_pylist()
    for row in table:
        if row["method"] == "local" and row["metric"] == "loss":
            row["value"] *= 1000
    pq.write_table(pa.Table.from_pylist(table, pq.read_schema(run / "metrics.parquet")), run / "metrics.parquet")
    chart = charts(read_runs([run]))["fairness"]
    assert "Far outside the axis: local" in chart.caption
    fitted = {**chart.spec(), "width": 640, "autosize": {"type": "fit-x", "contains": "padding"}}
    axis = re.search(r'aria-label="X-axis.*?role-axis-title', look.render_svg(fitted), re.DOTALL)
    assert axis
    ticks = [float(x) for x in re.findall(r'<text text-anchor="\w+" transform="translate\(([\d.]+),', axis[0])]
    assert max(ticks) - min(ticks) > 320


def test_labels_of_points_do_not_overlap_on_a_phone(tmp_path: Path) -> None:
    run = Recording(methods=10, seeds=2, rounds=10, clients=6).write(tmp_path / "run")
    chart = charts(read_runs([run]))["fairness"]
    x = chart.chart["layer"][-1]["encoding"]["x"]["scale"]["domain"]
    y = chart.chart["layer"][-1]["encoding"]["y"]["scale"]["domain"]
    for field, width in (("label", tradeoffs.WIDE_PLOT_WIDTH), ("label_narrow", tradeoffs.NARROW_PLOT_WIDTH)):
        boxes = []
        for row in chart.rows:
            length = len(row[field]) * look.LETTER_WIDTH
            at, height = (row["variance"] - x[0]) / (x[1] - x[0]) * width, (row["result"] - y[0]) / (y[1] - y[0]) * 360
            boxes += [(at if row["side"] == "left" else at - length, length, height)] if row[field] else []
        assert len(boxes) >= 3
        for k, (left, length, height) in enumerate(boxes):
            for other, size, level in boxes[:k]:
                assert left + length <= other or other + size <= left or abs(height - level) >= 12
