"""Charts of confusion, representations and relative accuracy: from the recorded files only."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import Recording

from fedloom.errors import RunDirError
from fedloom.lab.report.charts.clients import draw_clients
from fedloom.lab.report.charts.inspection import draw_inspections
from fedloom.lab.report.numbers import method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Key


def figures(path: Path) -> dict:
    runs = read_runs([path])
    found = [*draw_inspections(runs), draw_clients(runs, method_rows(runs), "accuracy")[-1]]
    return {f.id: f for f in found if f is not None}


@pytest.mark.parametrize(("lead", "sign", "scale"), [("accuracy", 1, 100), ("loss", -1, 1)])
def test_the_gain_of_a_client_is_over_its_own_model_in_the_leading_metric(
    lead: str, sign: int, scale: int, small: Path
) -> None:
    run = read_runs([small])[0]
    figure = draw_clients([run], method_rows([run]), lead)[-1]
    gains = []
    for seed in range(3):
        own, base = (run.series[Key(method, seed, "personal", "test", lead)] for method in ("ditto", "local"))
        gains += list(sign * scale * (own.value[own.round == 20] - base.value[base.round == 20]))
    found = next(r for r in figure.rows if (r["method"], r["model"]) == ("ditto", "personal"))
    assert found["median"] == pytest.approx(np.nanmedian(gains), rel=1e-3)
    assert found["clients"] == 27
    assert not any(r["method"] == "local" for r in figure.rows)
    for text in (figure.title, figure.tab, figure.caption):
        assert "local" in text


def test_without_training_alone_the_gain_is_over_fedavg(tmp_path: Path) -> None:
    path = Recording(methods=2, seeds=2, clients=4, rounds=5).write(tmp_path / "run")
    assert figures(path)["relative"].tab == "Gain over fedavg"


def test_equal_gains_are_drawn(tmp_path: Path) -> None:
    path = Recording(methods=2, seeds=2, clients=4, rounds=5).write(tmp_path / "run")
    table = pq.read_table(path / "metrics.parquet").to_pylist()
    of_fedavg = {(r["seed"], r["round"], r["client"], r["part"], r["metric"]): r["value"] for r in table
                 if r["method"] == "fedavg"}  # fmt: skip
    for row in table:
        row["value"] = of_fedavg[row["seed"], row["round"], row["client"], row["part"], row["metric"]]
    pq.write_table(pa.Table.from_pylist(table), path / "metrics.parquet")
    figure = figures(path)["relative"]
    assert {row["value"] for row in figure.data["dots"]} == {0.0}
    assert {(row["q1"], row["q3"]) for row in figure.rows} == {(0.0, 0.0)}
    assert figure.svg().startswith("<svg")


def test_confusion_and_tsne_draw_twelve_clients_of_one_method(tmp_path: Path) -> None:
    path = Recording(methods=2, seeds=1, clients=14, rounds=5).write(tmp_path / "run")
    assert set(figures(path)) == {"relative"}
    cells = [
        (method, 0, client, "global", true, guess, 3 if true == guess else 1)
        for method, client, true, guess in product(("fedavg", "fedprox"), range(14), (0, 1), (0, 1))
    ]
    names = ("method", "seed", "client", "model", "true", "predicted", "count")
    pq.write_table(pa.table(dict(zip(names, zip(*cells, strict=True), strict=True))), path / "confusion.parquet")
    points = [("fedavg", 0, c, "global", float(k % 2), float(k), 1.0) for c in (3, 5) for k in range(6)]
    names = ("method", "seed", "client", "model", "label", "x", "y")
    pq.write_table(pa.table(dict(zip(names, zip(*points, strict=True), strict=True))), path / "tsne.parquet")
    found = figures(path)
    confusion, tsne = found["confusion"], found["tsne"]
    assert {r["client"] for r in confusion.rows} == {f"site {c}" for c in range(12)}
    assert {r["share"] for r in confusion.rows if r["true"] == r["predicted"]} == {0.75}
    assert "first 12 of 14 clients" in confusion.caption
    assert len(tsne.rows) == 12
    assert all(figure.svg().startswith("<svg") for figure in found.values())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = Recording(methods=1, seeds=1, rounds=5).write(tmp_path / "run")
    (path / "confusion.parquet").write_text("not parquet")
    with pytest.raises(RunDirError, match=r"confusion\.parquet is damaged"):
        figures(path)
