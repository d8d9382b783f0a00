"""The same method in simulation and through the deployed apps: the same bits at the clients, the same model after."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

import fedloom.engine.simulate as simulation
from fedloom.algorithms import PRESETS, REGISTRY, encodings
from fedloom.engine.checks.refusals import check_mixer, check_together
from fedloom.engine.clients.chunk import accept_uploads, run_clients
from fedloom.engine.job import Job
from fedloom.engine.setting import Setting
from fedloom.errors import Refused, Stop
from fedloom.local.rows import rows_of
from fedloom.processes.clients import ChunkResult, TrainTask
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.state import latest_models
from tests.deploy.grid import FakeGrid
from tests.deploy.scene import FIRST, Scene, scene

SMALL = {
    "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "max_train_per_client": 24},
    "evaluate": {"every": 3},
}
NEEDED: dict[str, dict[str, Any]] = {"fedbn": {"layers": ["head.bias"]}}  # softmax has no normalisation layer

Uploads = dict[tuple[int, int], dict[str, torch.Tensor]]


def in_simulation(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Uploads]:
    uploads: Uploads = {}

    def train(job: Job, down: Any, server: Any, task: TrainTask) -> ChunkResult:
        received = rows_of(down, task.place)
        output = run_clients(job, received, task)
        for k, i in enumerate(task.ids.tolist()):
            uploads[task.round, i] = {
                name: value[k] for name, value in (output.sent or output.upload)._asdict().items()
            }
        return accept_uploads(job, server, task, received, output)

    monkeypatch.setattr(simulation, "train_chunk", train)
    return scene.simulate(), uploads


def deployed(scene: Scene) -> Uploads:
    uploads: Uploads = {}
    clients = scene.clients()
    by_node = {100 + c.site.client: c for c in clients}

    def look(node: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            data = next(iter(reply.content["arrays"].values())).data
            sent = by_node[node].trainer.forms.read_up(data)
            uploads[int(message.content["head"]["round"]), by_node[node].site.client] = {
                name: value[0] for name, value in sent.up._asdict().items()
            }
        return reply

    assert scene.serve(scene.grid(look, clients)) is Stop.DONE
    return uploads


def is_exact(scene: Scene) -> bool:
    """Low rank travels as factors, whose product has other last bits; all else travels as it is."""
    algorithm = scene.experiment.methods[0].setting.method
    return all(s.encoding != "lowrank" for way in ("down", "up") for s in encodings(algorithm, way).values())


QUICK = {
    "afl", "clustered-sampling", "equitable-fl", "fedacs", "fedavg", "feddyn", "fedrep", "fedslr", "fiaelt", "flame",
    "local", "power-of-choice", "scaffold",
}  # fmt: skip
"""One of every kind; the others take as long together as the rest of these tests."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REGISTRY if n != "centralized"],
)
def test_deployed_is_simulated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    method = {"algorithm": name, **NEEDED.get(name, {})}
    if name in PRESETS and "clusters" in REGISTRY[name].options:
        method["clusters"] = 2
    check_parity(scene(tmp_path, method, **SMALL), monkeypatch)


def test_a_rule_of_sums_is_deployed_as_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIAELT uploads changes to rows that the sites keep; the server adds them up by site."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    check_parity(scene(tmp_path, "fiaelt", **SMALL, aggregator={"kind": "median"}), monkeypatch)


PARTS: list[dict[str, Any]] = [
    {"personalized_aggregation": {"kind": "attention", "quantile": 0.3, "similarity": "change"}},
    {"upload_transform": {"kind": "top-k"}},
    {"client_weights": [1.0, 2.0, 5.0]},
    {"personalized_aggregation": {"kind": "proximity"}},
    {"upload_transform": {"kind": "qsgd"}},
    {"personalized_aggregation": {"kind": "angles", "among": "all"}, "upload_transform": {"kind": "sign"}},
    {
        "personalized_aggregation": {"kind": "clusters", "clusters": 2, "mixing_weight": 0.5},
        "client_weights": "uniform",
    },
    {"upload_transform": {"kind": "random-k"}, "aggregator": {"kind": "median"}},
    {
        "personalized_aggregation": {"kind": "attention", "among": "seen"},
        "aggregator": {"kind": "trimmed-mean", "f": 1},
    },
    {"upload_transform": {"kind": "clip", "bound": 0.5}, "aggregation_weights": {"kind": "samples"}},
    {
        "aggregation_weights": {"kind": "equitable", "clusters": 2},
        "upload_transform": {"kind": "top-k", "fraction": 0.5},
    },
    {"sampler": {"kind": "uniform", "clients": 2}, "personalized_aggregation": {"kind": "attention", "among": "all"}},
]
"""Parts, alone and two at a time, in the order in which the quick tests give one of `CARRIERS` to each."""
CARRIERS = ["fedavg", "flame", "fedslr", "ditto", "scaffold", "fedrep", "apfl", "fiaelt", "fedavg-ft"]
"""Methods of every kind of upload: means, kept rows, sums over rounds, changes to rows, parts of a model."""


def cells() -> Iterator[Any]:
    """Every part with every carrier; a quick one for each part, the first from its own place that takes it."""
    for k, parts in enumerate(PARTS):
        able = [name for name in CARRIERS[k % len(CARRIERS) :] + CARRIERS if is_taken(name, parts)]
        for name in dict.fromkeys(able):
            label = "-".join([name, *(f"{v['kind']}" if isinstance(v, dict) else key for key, v in parts.items())])
            yield pytest.param(name, parts, id=label, marks=() if name == able[0] else pytest.mark.slow)


def is_taken(name: str, parts: dict[str, Any]) -> bool:
    """Whether a simulation takes the parts, as far as that follows from the method."""
    made: Any = REGISTRY[name]()
    try:
        setting = Setting.create(made, **parts)
        check_together(
            setting.method, setting.local, setting.aggregation_weights, setting.aggregator, setting.upload_transform
        )
        if setting.personalized_aggregation is not None:
            check_mixer(setting.method, setting.personalized_aggregation, setting.aggregator)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(("name", "parts"), [*cells()])
def test_parts_are_deployed_as_simulated(
    name: str, parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a simulation takes, real sites take, with the same models and figures."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    check_parity(scene(tmp_path, name, **SMALL, **parts), monkeypatch)


def test_an_own_task_and_optimisers_that_are_kept_are_deployed_as_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches with states of their own; class weights of every site's own counts."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    loss = "torch.nn.functional:multi_margin_loss"
    task = {"loss": loss, "class_weights": "balanced", "metrics": ["balanced_accuracy", "recall", "brier"]}
    local = {"lr": 0.05, "batch_size": 60, "optimizer": "adam", "optimizer_state": "persistent"}
    here = scene(tmp_path, "ditto", **SMALL, task=task, local=local)
    check_parity(here, monkeypatch)
    names = set(pq.read_table(here.folder / "results" / "metrics.parquet")["metric"].to_pylist())
    assert {"balanced_accuracy", "recall[3]", "brier"} <= names


def check_parity(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads, models and figures of a deployment are those of a simulation."""
    sent = deployed(here)
    result, expected = in_simulation(here, monkeypatch)
    assert sent.keys() == expected.keys()
    assert {t for t, _ in sent} == {1, 2, 3}
    for key, fields in expected.items():
        for field, value in fields.items():
            if is_exact(here):
                assert torch.equal(sent[key][field], value), (key, field)
            else:
                torch.testing.assert_close(sent[key][field], value, rtol=1e-10, atol=1e-10)
    close = {"rtol": 1e-10, "atol": 1e-10}
    if "global" in result.models.kinds():
        found = load_file(here.folder / "results" / "global.safetensors")["rows"]
        torch.testing.assert_close(found, result.models.rows("global"), **close)
    if "personal" in result.models.kinds():
        rows = result.models.rows("personal")
        for site in here.sites:
            [mine] = latest_models(site.state)
            assert (mine.kind, mine.round, mine.client) == ("personal", 3, site.client)
            torch.testing.assert_close(load_file(mine.path)["rows"][0], rows[site.client], **close)
    for row, wanted in matched(here, result):
        assert row["value"] == pytest.approx(wanted["value"], rel=1e-9, abs=1e-10, nan_ok=True), row


def test_what_is_set_in_torch_changes_no_bit(tmp_path: Path, set_in_torch: Callable[[], Any]) -> None:
    """It may be set by code of the user's own, which the server and every site import."""

    def run(folder: Path, setting: Callable[[], Any]) -> list[torch.Tensor]:
        engine = {"dtype": "float32", "gradient_engine": "loop"}
        here = scene(tmp_path / folder, "ditto", **SMALL, model={"kind": "mlp", "hidden": [8]}, engine=engine)
        clients = here.clients()

        def answering(client: Client) -> Callable[[Message], Message]:
            def answer(message: Message) -> Message:
                with setting():
                    return client.answer(message)

            return answer

        grid = FakeGrid({FIRST + client.site.client: answering(client) for client in clients})
        with setting():
            for client in clients:
                client.prepare()
            assert here.serve(grid) is Stop.DONE
        figures = pq.read_table(here.folder / "results" / "metrics.parquet")["value"].to_pylist()
        personal = [load_file(latest_models(site.state)[0].path)["rows"] for site in here.sites]
        return [here.model(), *personal, torch.tensor(figures).nan_to_num()]

    want, got = run(Path("plain"), nullcontext), run(Path("set"), set_in_torch)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def matched(scene: Scene, result: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every figure of the deployed run with that of the simulation, which also has the common test set's."""
    keys = ("round", "client", "model", "part", "metric")
    known = {tuple(r[k] for k in keys): r for r in result.table().to_pylist()}
    rows = pq.read_table(scene.folder / "results" / "metrics.parquet").to_pylist()
    assert len(rows) > 50
    for row in rows:
        yield row, known[tuple(row[k] for k in keys)]


def test_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="pools the data"):
        scene(tmp_path, "centralized", **SMALL).serve()
