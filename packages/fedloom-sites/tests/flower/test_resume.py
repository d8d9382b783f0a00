"""A server that dies goes on from its folder, with the nodes' states as Flower or the nodes' folders have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

import fedloom_sites.flower as ff
from fedloom.errors import CheckpointError, ConfigError
from fedloom_sites.flower.members import RUN_FILE
from fedloom_sites.flower.records import VALUES_RECORD
from tests.flower.app import App

CHOICES: dict[str, Any] = {"local": {"lr": 0.1, "batch_size": 4}, "engine": {"dtype": "float64"}, "wait": 0.1}


class Died(Exception):
    """The server's process ends."""


def samples(k: int, count: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    x = torch.randn(count + k, 4, generator=g)
    return x, (x[:, 0] > 0).long()


def net(width: int = 3) -> nn.Module:
    """The same one each time."""
    module = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    for value in module.parameters():
        nn.init.normal_(value, generator=torch.Generator().manual_seed(value.numel()))
    return module


class Nodes:
    """Three nodes, with or without folders of their own; the server dies when it asks for the scores of a round."""

    def __init__(self, folder: Path | None = None, dies: int | None = None) -> None:
        self.folder, self.dies = folder, dies
        self.app = App(self.local, 3)
        self.app.grid.fault = self.fault

    def local(self, context: Context) -> ff.Local:
        k = int(context.node_config["partition-id"])
        return ff.Local(net(), samples(k), testset=samples(10 + k), folder=self.folder)

    def fault(self, _node: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "evaluate" and message.content[VALUES_RECORD]["round"] == self.dies:
            raise Died
        return reply

    def new_run(self) -> None:
        """Flower's state of a run is not that of the next one."""
        for node, context in self.app.contexts.items():
            context.run_id, context.state = 2, RecordDict()
            self.app.restart(node, self.local)

    def start(self, name: str, folder: Path | None, rounds: int = 4, **choices: Any) -> tuple[ff.Strategy, Any]:
        strategy = ff.Strategy(name, net(), folder=folder, **{**CHOICES, **choices})
        seen: list[int] = []

        def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
            seen.append(t)
            return MetricRecord({"sum": float(sum(v.sum() for v in arrays.to_torch_state_dict().values()))})

        start = ArrayRecord(net().state_dict())
        return strategy, strategy.start(self.app.grid, start, rounds, evaluate_fn=evaluate)


def interrupted(name: str, tmp_path: Path, **choices: Any) -> tuple[Nodes, ff.Strategy, Any]:
    nodes = Nodes(tmp_path / "nodes", dies=2)
    with pytest.raises(Died):
        nodes.start(name, tmp_path / "server", **choices)
    nodes.dies = None
    nodes.new_run()
    return nodes, *nodes.start(name, tmp_path / "server", **choices)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("ditto", {"lam": 0.5}),
        ("scaffold", {"sampler": {"kind": "uniform", "fraction": 0.7}}),
        ("fedopt", {"upload_transform": {"kind": "top-k", "fraction": 0.4}}),
        ("feddyn", {"local": {"lr": 0.1, "batch_size": 4, "optimizer": "adam", "optimizer_state": "persistent"}}),
    ],
)
def test_a_run_that_was_interrupted_is_the_run_that_was_not(name: str, choices: dict[str, Any], tmp_path: Path) -> None:
    whole, figures = Nodes().start(name, None, **choices)
    nodes, resumed, later = interrupted(name, tmp_path, **choices)
    assert whole.state is not None
    assert resumed.state is not None
    for here, there in zip(resumed.state.server, whole.state.server, strict=True):
        assert torch.equal(here, there)
    assert torch.equal(resumed.state.totals, whole.state.totals)
    assert set(later.train_metrics_clientapp) == {3, 4}
    assert {t: figures.evaluate_metrics_serverapp[t] for t in (2, 3, 4)} == later.evaluate_metrics_serverapp
    assert resumed.client_metrics == {t: whole.client_metrics[t] for t in (3, 4)}
    again, same = nodes.start(name, tmp_path / "server", **choices)
    assert again.client_metrics == {}
    assert all(
        torch.equal(value, later.arrays.to_torch_state_dict()[key])
        for key, value in same.arrays.to_torch_state_dict().items()
    )


def test_nodes_without_a_folder_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes(dies=2)
    with pytest.raises(Died):
        nodes.start("ditto", tmp_path)
    nodes.dies = None
    nodes.new_run()
    strategy, _ = nodes.start("ditto", tmp_path)
    assert "the state of round 2 is no longer on this node, so the node starts again" in capsys.readouterr().err
    assert strategy.state is not None
    assert strategy.state.uploads.tolist() == [3, 3, 3]


def test_nodes_of_another_run_of_flower_are_named_while_the_server_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a simulation, where every run has new nodes."""
    Nodes().start("ditto", tmp_path, 1)
    nodes = Nodes()
    nodes.app.grid.nodes = {node + 50: answer for node, answer in nodes.app.grid.nodes.items()}
    with pytest.raises(
        ConfigError, match=r"0 suitable nodes are connected, but 2 are needed; node 150: .* name another folder"
    ):
        nodes.start("ditto", tmp_path, 2)
    assert caplog.text.index("node 152 takes no part: it does not belong to the run") < caplog.text.index(
        "waiting at most 0 s"
    )


def test_a_node_that_leaves_is_left_out_until_it_is_back() -> None:
    nodes = Nodes()
    away = {2: [100, 102], 3: [100, 102]}
    ids = nodes.app.grid.get_node_ids

    def here() -> list[int]:
        state = strategy.state
        return away.get(1 if state is None else state.round + 1, ids())

    nodes.app.grid.get_node_ids = here  # type: ignore[method-assign]
    strategy = ff.Strategy("ditto", net(), **CHOICES)
    strategy.start(nodes.app.grid, ArrayRecord(net().state_dict()), 5)
    assert strategy.state is not None
    assert int(strategy.state.totals[-1]) == 2
    assert set(strategy.client_metrics[1]) == {0, 2}
    assert set(strategy.client_metrics[5]) == {0, 1, 2}


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    nodes = Nodes()
    nodes.start("ditto", tmp_path, 1)
    with pytest.raises(
        ConfigError, match=r"belongs to another run: .*\"ditto\".*, but this is .*\"apfl\".*Name another folder"
    ):
        nodes.start("apfl", tmp_path, 2)
    with pytest.raises(ConfigError, match="belongs to another model"):
        ff.Strategy("ditto", net(5), folder=tmp_path, **CHOICES).start(
            nodes.app.grid, ArrayRecord(net(5).state_dict()), 2
        )
    content = json.loads((tmp_path / RUN_FILE).read_text())
    content["members"]["sizes"][1] = [5, 0, 19]
    (tmp_path / RUN_FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"node 101: its samples are 10/0/20 of \[4\] .* before they were 5/0/19 of"):
        nodes.start("ditto", tmp_path, 2, min_nodes=3)
    (tmp_path / RUN_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        nodes.start("ditto", tmp_path, 2)
