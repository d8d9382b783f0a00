"""Confusion counts and t-SNE of finished runs: they agree with the recorded accuracies, and say who is left out."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from fedloom.algorithms import FLAME
from fedloom.analyses.inspection import Confusion, Tsne, confusion, tsne
from fedloom.data import partitions
from fedloom.data.sources import load
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Refused
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.execute import Plan

FED = partitions.shards(clients=4, labels_per_client=2)(load("digits"), seed=0)


@pytest.fixture(scope="module")
def flame():
    return simulate(FLAME(), FED, rounds=2, seed=3)


def test_confusion_counts_are_the_test_parts_and_their_diagonal_the_accuracy(flame) -> None:
    table = confusion(flame).to_pylist()
    assert table == sorted(table, key=lambda r: tuple(r.values()))
    for model in ("global", "personal", "hybrid"):
        accuracy = flame.final(model)
        for client in range(FED.n):
            own = [r for r in table if (r["client"], r["model"]) == (client, model)]
            hits = sum(r["count"] for r in own if r["true"] == r["predicted"])
            labels = FED.data.y[FED.indices("test", client)]
            assert hits / len(labels) == pytest.approx(float(accuracy[client]))
            held = {c: sum(r["count"] for r in own if r["true"] == c) for c in range(10)}
            assert list(held.values()) == torch.bincount(labels, minlength=10).tolist()


def test_tsne_is_one_point_per_test_sample_and_a_function_of_the_seed(flame) -> None:
    table, notes = tsne(flame, (2, 0))
    assert not notes
    assert table["client"].to_pylist() == [0] * len(FED.indices("test", 0)) + [2] * len(FED.indices("test", 2))
    assert set(table["model"].to_pylist()) == {"personal"}
    assert table.equals(tsne(flame, (0, 2, 2))[0])
    labels = [r["label"] for r in table.to_pylist() if r["client"] == 2]
    assert labels == FED.data.y[FED.indices("test", 2)].tolist()


def test_clients_with_few_test_samples_are_left_out_with_a_note() -> None:
    fed = partitions.iid(clients=2, max_train_per_client=20, test=0.002)(load("digits"), seed=0)
    table, notes = tsne(simulate(FLAME(), fed, rounds=1), (0, 1))
    assert len(table) == 0
    assert notes == ["t-SNE omits clients with fewer than 5 test samples: 0, 1"]


def test_what_cannot_be_shown_is_refused() -> None:
    regression = partitions.iid(clients=2)(load("sklearn", set="diabetes"), seed=0)
    with pytest.raises(Refused, match="regression"):
        Confusion().check_run(regression)
    with pytest.raises(ConfigError, match="no client 4; the clients are numbered 0 to 3"):
        Tsne(clients=(1, 4)).check_run(FED)


def test_a_run_writes_both_tables_also_when_asked_afterwards(tmp_path: Path) -> None:
    document = {
        "rounds": 1,
        "data": {"source": "digits"},
        "partition": {"kind": "iid", "clients": 2, "max_train_per_client": 20, "test": 0.02},
        "method": [{"algorithm": "fedavg"}, {"algorithm": "local"}],
    }
    Plan(parse(document), tmp_path).run()
    assert not (tmp_path / "confusion.parquet").exists()
    before = (tmp_path / "metrics.parquet").read_bytes()
    Plan(parse({**document, "analysis": [{"kind": "confusion"}, {"kind": "tsne", "clients": [1]}]}), tmp_path).run()
    assert (tmp_path / "metrics.parquet").read_bytes() == before
    table = pq.read_table(tmp_path / "confusion.parquet")
    assert table.column_names == ["method", "seed", "client", "model", "true", "predicted", "count"]
    assert set(zip(table["method"].to_pylist(), table["model"].to_pylist(), strict=True)) == {
        ("fedavg", "global"),
        ("local", "personal"),
    }
    places = pq.read_table(tmp_path / "tsne.parquet")
    assert places.column_names == ["method", "seed", "client", "model", "label", "x", "y"]
    with pytest.raises(ConfigError, match="client 7"):
        Plan(parse({**document, "analysis": [{"kind": "tsne", "clients": [7]}]}), tmp_path.with_name("other"))
    assert not tmp_path.with_name("other").exists()
