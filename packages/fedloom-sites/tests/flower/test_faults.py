"""Nodes of an app that fail, come back, differ or send what they should not; forms of samples; bad choices."""

from __future__ import annotations

import ast
import inspect
import re
import zlib
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as flower_strategies
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server import Server, SimpleClientManager
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedloom as fl
import fedloom_sites.flower as ff
from fedloom.algorithms import Ditto
from fedloom.engine.setting import Engine
from fedloom.errors import ConfigError, LayoutError, Refused, RunStopped
from fedloom.rows.wire import WIRE_HEADER
from fedloom_sites.deploy.protocol.envelope import ARRAYS_RECORD, pack_arrays, unpack_arrays
from fedloom_sites.flower import documents
from fedloom_sites.flower.records import VALUES_RECORD
from tests.deploy.grid import outside_flower
from tests.flower.app import App

SAMPLES, CLASSES = 24, 3
CHOICES: dict[str, Any] = {"local": {"lr": 0.1, "batch_size": 8}}


class Net(nn.Module):
    """With statistics and randomness of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        out: Tensor = self.head(self.body(x))
        return out


def samples(k: int, count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    x = torch.randn(count, 5, generator=g)
    return x, (x[:, 0] > k - 1).long() + (x[:, 1] > 0).long()


def local(context: Context) -> ff.Local:
    k = int(context.node_config["partition-id"])
    device = torch.device("cpu")
    return ff.Local(Net(), samples(k), nn.CrossEntropyLoss(), testset=samples(10 + k), device=device)


def run(app: App, name: str = "ditto", rounds: int = 3, **choices: Any) -> tuple[ff.Strategy, Any]:
    strategy = ff.Strategy(name, Net(), wait=0.1, **CHOICES, **choices)
    return strategy, strategy.start(app.grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)


def test_a_model_with_statistics_and_dropout_trains_and_is_kept_at_every_node() -> None:
    app = App(local, 3)
    strategy, result = run(app, rounds=25)
    figures = result.evaluate_metrics_clientapp
    assert set(figures) == set(range(1, 26))
    assert figures[25]["personal/train/loss"] < 0.8 * figures[1]["personal/train/loss"]
    Net().load_state_dict(result.arrays.to_torch_state_dict())
    models = [ff.personal_model(context) for context in app.contexts.values()]
    assert not torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    assert set(strategy.client_metrics[25]) == {0, 1, 2}


def test_a_model_is_saved_in_the_folder_that_its_node_names(tmp_path: Path) -> None:
    """With the statistics that its node's samples give it, so that its figures are those that the server has."""

    def saving(context: Context) -> ff.Local:
        node = local(context)
        node.folder = tmp_path / "models"
        return node

    app = App(saving, 3)
    strategy, _ = run(app, rounds=4)
    for k, context in enumerate(app.contexts.values()):
        model = fl.open_model(tmp_path / "models" / f"{context.node_id}.safetensors", Net())
        x, y = samples(10 + k)
        loss = nn.functional.cross_entropy(model(x), y).item()
        assert loss == pytest.approx(strategy.client_metrics[4][k]["personal/test/loss"], rel=1e-5)
        Net().load_state_dict(ff.personal_model(context))
        with pytest.raises(LayoutError, match=r"'0.weight' has shape none, but shape \[2, 8\] in the given module"):
            fl.open_model(tmp_path / "models" / f"{context.node_id}.safetensors", nn.Sequential(nn.Linear(8, 2)))


def test_a_node_whose_folder_cannot_be_takes_no_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    def mixed(context: Context) -> ff.Local:
        node = local(context)
        node.folder = tmp_path / "file" if context.node_id == 101 else None
        return node

    strategy, _ = run(App(mixed, 3))
    assert set(strategy.client_metrics[3]) == {0, 1}
    assert f"{tmp_path / 'file'} is a file, not a folder" in capsys.readouterr().err


class Pairs(Dataset[Any]):
    """A data set that gives numpy arrays and plain numbers, as a user's may."""

    def __init__(self, k: int) -> None:
        self.x, self.y = samples(k)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Any, int]:
        return self.x[k].numpy(), int(self.y[k])


@pytest.mark.parametrize(
    "wrap",
    [Pairs, lambda k: TensorDataset(*samples(k)), lambda k: DataLoader(TensorDataset(*samples(k)), batch_size=3)],
    ids=["own", "tensors", "loader"],
)
def test_samples_in_any_form_are_the_same(wrap: Any) -> None:
    def other(context: Context) -> ff.Local:
        return ff.Local(Net(), wrap(int(context.node_config["partition-id"])))

    start = ArrayRecord(Net().state_dict())
    rows = []
    for kind in (local, other):
        strategy = ff.Strategy("fedavg", Net(), evaluate_every=0, **CHOICES)
        rows.append(strategy.start(App(kind, 3).grid, start, num_rounds=2).arrays.to_torch_state_dict())
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Twice the mean squared error."""
    return 2 * (outputs - targets).square().mean()


class Huber(nn.Module):
    """A loss as a module of the user's."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the batch."""
        return nn.functional.huber_loss(outputs, targets)


LOSSES: dict[str, tuple[Any, Any, int]] = {
    "squared error": (nn.MSELoss(), lambda x: x[:, :1] * 2, 1),
    "squared error, flat targets": (None, lambda x: x[:, 0] * 2, 1),
    "own function": (squared, lambda x: x[:, :1] * 2, 1),
    "own module": (Huber(), lambda x: x[:, :2] * 2, 2),
    "two classes, one output": (nn.BCEWithLogitsLoss(), lambda x: (x[:, 0] > 0).float(), 1),
    "smoothed labels": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda x: (x[:, 0] > 0).long(), 2),
    "weighted classes": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), lambda x: (x[:, 0] > 0).long(), 2),
}


@pytest.mark.parametrize(("loss", "targets", "outputs"), LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_of_the_apps_own_is_what_nodes_train_for(loss: Any, targets: Any, outputs: int) -> None:
    def other(context: Context) -> ff.Local:
        x, _ = samples(int(context.node_config["partition-id"]))
        return ff.Local(nn.Linear(5, outputs), (x, targets(x)), loss, testset=(x, targets(x)))

    strategy = ff.Strategy("ditto", nn.Linear(5, outputs), **CHOICES)
    result = strategy.start(App(other, 2).grid, ArrayRecord(nn.Linear(5, outputs).state_dict()), num_rounds=12)
    figures = result.evaluate_metrics_clientapp
    assert figures[12]["personal/test/loss"] < 0.9 * figures[1]["personal/test/loss"]


def test_the_loss_of_one_full_step_is_that_of_torch() -> None:
    """With one step over all samples, the model of a single node moves by the gradient that autograd gives."""
    x, y = samples(0)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 2.0]), label_smoothing=0.1)
    module = nn.Linear(5, CLASSES)
    strategy = ff.Strategy("fedavg", module, min_nodes=1, local={"lr": 0.1, "batch_size": "full", "steps": 1})
    app = App(lambda context: ff.Local(nn.Linear(5, CLASSES), (x, y), loss), 1)
    moved = strategy.start(app.grid, ArrayRecord(module.state_dict()), num_rounds=1).arrays.to_torch_state_dict()
    grads = torch.autograd.grad(loss(module(x), y), list(module.parameters()))
    for (name, value), g in zip(module.named_parameters(), grads, strict=True):
        torch.testing.assert_close(moved[name], value.detach() - 0.1 * g, rtol=1e-5, atol=1e-6)


def lost(node: int, rounds: tuple[int, ...]) -> Any:
    def fault(at: int, message: Message, reply: Message) -> Message | None:
        kind, t = message.metadata.message_type, message.content.get(VALUES_RECORD, {}).get("round")
        return None if at == node and kind == "train" and t in rounds else reply

    return fault


def test_a_node_whose_reply_is_lost_is_as_one_that_was_not_asked() -> None:
    """Its state goes back to the last accepted one, so that its next answer is the one it would have given."""
    strategy, _ = run(App(local, 3, lost(101, (2,))), "scaffold", rounds=3)
    assert strategy.state is not None
    assert strategy.state.uploads.tolist() == [3, 3, 3]
    assert strategy.state.totals[-1] == 1
    assert bool(strategy.state.server.x.isfinite().all())


def test_a_process_that_begins_anew_goes_on_from_the_state_that_flower_kept() -> None:
    start = ArrayRecord(Net().state_dict())

    def rounds(restart: bool) -> dict[str, Tensor]:
        app = App(local, 3)

        def fault(node: int, message: Message, reply: Message) -> Message:
            if restart and node == 100:
                app.restart(100, local)
            return reply

        app.grid.fault = fault
        strategy = ff.Strategy("ditto", Net(), **CHOICES)
        strategy.start(app.grid, start, num_rounds=4)
        return ff.personal_model(app.contexts[100])

    plain, anew = rounds(False), rounds(True)
    assert all(torch.equal(plain[name], anew[name]) for name in plain)


def test_a_node_that_lost_its_state_says_so_and_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    app = App(local, 3)

    def fault(node: int, message: Message, reply: Message) -> Message:
        if node == 102 and message.metadata.message_type == "train" and message.content[VALUES_RECORD]["round"] == 2:
            app.restart(102, local, forget=True)
        return reply

    app.grid.fault = fault
    strategy, _ = run(app, rounds=5)
    assert "the state of round 2 is no longer on this node, so" in capsys.readouterr().err
    assert strategy.state is not None
    assert int(strategy.state.totals[-1]) <= 1
    assert set(strategy.client_metrics[5]) == {0, 1, 2}


def upload_in(content: RecordDict) -> bytes:
    return bytes(unpack_arrays(content[ARRAYS_RECORD], 1e9)[0])


def not_finite(message: bytes) -> bytes:
    """The message with NaN as its last number, and a checksum that fits."""
    body = message[WIRE_HEADER.size : -4] + b"\x00\x00\xc0\x7f"
    return WIRE_HEADER.pack(*WIRE_HEADER.unpack_from(message)[:-1], zlib.crc32(body)) + body


BENT: dict[str, Any] = {
    "other arrays": lambda content: content.__setitem__(ARRAYS_RECORD, ArrayRecord(nn.Linear(2, 2).state_dict())),
    "no upload": lambda content: content.pop(ARRAYS_RECORD),
    "no arrays": lambda content: content.__setitem__(ARRAYS_RECORD, pack_arrays([])),
    "another message": lambda content: content.__setitem__(ARRAYS_RECORD, pack_arrays([b"FLOM"])),
    "damaged": lambda content: content.__setitem__(ARRAYS_RECORD, pack_arrays([upload_in(content)[:-1] + b"?"])),
    "not finite": lambda content: content.__setitem__(ARRAYS_RECORD, pack_arrays([not_finite(upload_in(content))])),
    "another round": lambda content: content.__setitem__(
        VALUES_RECORD, ConfigRecord({**content[VALUES_RECORD], "round": 99})
    ),
    "another client": lambda content: content.__setitem__(
        VALUES_RECORD, ConfigRecord({**content[VALUES_RECORD], "client": 0})
    ),
    "another release": lambda content: content.__setitem__(
        VALUES_RECORD, ConfigRecord({**content[VALUES_RECORD], "release": "0"})
    ),
    "impossible work": lambda content: content.__setitem__(
        VALUES_RECORD, ConfigRecord({**content[VALUES_RECORD], "work": [-1, 0, 0]})
    ),
    "nothing": lambda content: [content.pop(name) for name in list(content)],
}


@pytest.mark.parametrize("bend", BENT.values(), ids=BENT.keys())
def test_a_reply_that_makes_no_sense_costs_its_node_the_round(bend: Any) -> None:
    def fault(node: int, message: Message, reply: Message) -> Message:
        if node == 101 and message.metadata.message_type == "train":
            bend(reply.content)
        return reply

    strategy, result = run(App(local, 3, fault), "flame", rounds=2)
    assert strategy.state is not None
    assert strategy.state.cohort.sort().values.tolist() == [0, 2]
    assert strategy.state.round == 2
    assert all(bool(v.isfinite().all()) for v in result.arrays.to_torch_state_dict().values())


def test_replies_that_come_twice_or_from_others_count_once() -> None:
    def fault(node: int, message: Message, reply: Message) -> list[Message]:
        return [reply, reply]

    strategy, _ = run(App(local, 3, fault), "fedavg", rounds=2)
    other, _ = run(App(local, 3), "fedavg", rounds=2)
    assert strategy.state is not None
    assert other.state is not None
    assert torch.equal(strategy.state.totals, other.state.totals)


def test_without_a_usable_reply_nothing_changes_and_the_run_goes_on() -> None:
    strategy, _ = run(App(local, 3, lambda node, message, reply: None if _trains(message, 2) else reply), rounds=3)
    assert strategy.state is not None
    assert (strategy.state.round, strategy.state.uploads.tolist()) == (3, [2, 2, 2])


def test_a_round_that_all_nodes_have_left_is_named(caplog: pytest.LogCaptureFixture) -> None:
    strategy, app = ff.Strategy("ditto", Net(), **CHOICES), App(local, 2)
    here = iter([True] * 3)  # the greeting, and the first round's training and evaluation
    nodes = app.grid.get_node_ids
    app.grid.get_node_ids = lambda: nodes() if next(here, False) else []  # type: ignore[method-assign]
    result = strategy.start(app.grid, ArrayRecord(Net().state_dict()), num_rounds=2)
    assert [*result.train_metrics_clientapp] == [1]
    assert "node 100 has disconnected" in caplog.text
    assert "nothing changes in round 2: none of its nodes answered" in caplog.text


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_only_nodes_that_keep_something_miss_a_state_that_is_gone(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, app = ff.Strategy(method, Net(), **CHOICES), App(local, 2)
    send = app.grid.send_and_receive

    def forgetting(messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = send(messages, timeout=timeout)
        for context in app.contexts.values():
            context.state = RecordDict()
        return replies

    app.grid.send_and_receive = forgetting  # type: ignore[method-assign]
    strategy.start(app.grid, ArrayRecord(Net().state_dict()), num_rounds=2)
    assert strategy.state is not None
    assert strategy.state.uploads.tolist() == [2, 2]
    assert ("the node starts again" in caplog.text) == (method == "ditto")


def test_without_a_global_model_no_function_scores_one(caplog: pytest.LogCaptureFixture) -> None:
    strategy, start = ff.Strategy("fedrep", Net(), **CHOICES), ArrayRecord(Net().state_dict())
    result = strategy.start(App(local, 2).grid, start, num_rounds=1, evaluate_fn=lambda t, arrays: 1 / 0)
    assert not result.arrays
    assert not result.evaluate_metrics_serverapp
    assert "fedrep has no global model" in caplog.text
    assert "evaluate_fn is not called" in caplog.text


class Tied(nn.Module):
    """A network with one matrix under two names, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.decode.weight = self.encode.weight
        for name, buffer in {"steps": 0, "order": [2, 0, 1], "none": [], "on": [True], "phase": [1j]}.items():
            self.register_buffer(name, torch.tensor(buffer))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decode(self.encode(x).relu()))
        return logits[:, self.order]


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_parameter_with_two_names_has_one_value_at_both_ends() -> None:
    app, start = App(lambda context: ff.Local(Tied(), samples(0), testset=samples(1)), 2), Tied().state_dict()
    result = ff.Strategy("ditto", Tied(), **CHOICES).start(app.grid, ArrayRecord(start), num_rounds=1)
    for values in (result.arrays.to_torch_state_dict(), ff.personal_model(app.contexts[100])):
        assert torch.equal(values["encode.weight"], values["decode.weight"])
        assert not torch.equal(values["encode.weight"], start["encode.weight"])
        assert values["order"].tolist() == [2, 0, 1]


def test_a_config_that_no_node_reads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    strategy, start = ff.Strategy("fedavg", Net(), **CHOICES), ArrayRecord(Net().state_dict())
    strategy.start(App(local, 2).grid, start, num_rounds=1, train_config=ConfigRecord({"lr": 0.1}))
    assert "train_config contains 'lr', which nodes do not read; give local={'lr': ...} to the strategy" in caplog.text
    strategy.start(App(local, 2).grid, start, num_rounds=1, evaluate_config=ConfigRecord({"threshold": 0.5}))
    assert "evaluate_config contains 'threshold', which nodes do not read; for your own scores" in caplog.text


def test_a_config_that_a_subclass_sets_in_its_rounds_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Slowing(ff.Strategy):
        """Sets a step size, as strategies of Flower's apps do."""

        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
            config["lr"] = 0.1 / server_round
            return super().configure_train(server_round, arrays, config, grid)

    Slowing("fedavg", Net(), **CHOICES).start(App(local, 2).grid, ArrayRecord(Net().state_dict()), num_rounds=3)
    assert caplog.text.count("train_config contains 'lr', which nodes do not read") == 1


def test_the_last_round_hands_flower_the_model_whether_or_not_anything_reads_it() -> None:
    """Flower's own log ends with the size of the arrays that it was given."""
    app, strategy = App(local, 2), ff.Strategy("fedavg", Net(), **CHOICES)
    aggregate, sizes = strategy.aggregate_train, []
    strategy.aggregate_train = lambda t, replies: (sizes.append((done := aggregate(t, replies))[0]), done)[1]
    result = strategy.start(app.grid, ArrayRecord(Net().state_dict()), num_rounds=3)
    assert [arrays is None for arrays in sizes] == [True, True, False]
    assert sizes[-1] == result.arrays


@pytest.mark.parametrize("module", [Net, lambda: nn.Linear(5, CLASSES)], ids=["with", "without"])
def test_that_the_global_model_has_no_statistics_is_said(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its state dict has those of the initial arrays, and an ``evaluate_fn`` scores another model."""

    def node(context: Context) -> ff.Local:
        return ff.Local(module(), samples(int(context.node_config["partition-id"])))

    net = module()
    start = ArrayRecord(net.state_dict())
    arrays = ff.Strategy("fedavg", net, **CHOICES).start(App(node, 2).grid, start, num_rounds=2).arrays
    has = any("running" in name for name in net.state_dict())
    assert ("statistics of normalization layers, so" in caplog.text) == has
    values = arrays.to_torch_state_dict()
    assert all(torch.equal(values[name], old) for name, old in net.state_dict().items() if "running" in name)
    assert not any(torch.equal(values[name], old) for name, old in net.named_parameters() if "weight" in name)


def test_a_strategy_that_starts_again_has_the_figures_of_its_newest_run() -> None:
    strategy, start = ff.Strategy("fedavg", Net(), **CHOICES), ArrayRecord(Net().state_dict())
    for rounds in (3, 1):
        strategy.start(App(local, 2).grid, start, num_rounds=rounds)
        assert set(strategy.client_metrics) == set(range(1, rounds + 1))


def test_a_strategy_scores_the_parts_that_it_names_at_every_node() -> None:
    strategy, _ = run(App(local, 3), rounds=1, evaluate={"parts": ["test"]})
    figures = strategy.client_metrics[1]
    assert len(figures) == 3
    assert {key.split("/")[1] for scores in figures.values() for key in scores if "/" in key} == {"test"}
    with pytest.raises(Refused, match=r"evaluate\.clients works only in simulations, because every node scores models"):
        ff.Strategy("fedavg", Net(), evaluate={"parts": ["test"], "clients": 2})


def _trains(message: Message, t: int) -> bool:
    return message.metadata.message_type == "train" and message.content[VALUES_RECORD]["round"] == t


def test_a_node_with_another_model_takes_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    def mixed(context: Context) -> ff.Local:
        k = int(context.node_config["partition-id"])
        return ff.Local(Net(9 if k == 1 else 8), samples(k))

    app = App(mixed, 3)
    strategy, _ = run(app, "fedavg", rounds=2)
    assert strategy.state is not None
    assert len(strategy.state.uploads) == 2
    assert "parameter 'body.0.weight' has the shape [9, 5] in the node's model, but [8, 5] in the server's model" in (
        capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="2 suitable nodes are connected, but 3 are needed; node 101: parameter"):
        run(app, "fedavg", min_nodes=3)


def test_a_strategy_that_waits_for_nodes_says_for_how_many(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with pytest.raises(ConfigError, match="2 suitable nodes are connected, but 9 are needed"):
        run(App(local, 2), "fedavg", min_nodes=9)
    assert caplog.text.count("s for 9 nodes, of which 2 are connected") == 1


def test_a_first_node_with_other_samples_does_not_turn_the_others_away(caplog: pytest.LogCaptureFixture) -> None:
    def mixed(context: Context) -> ff.Local:
        k = int(context.node_config["partition-id"])
        x, y = samples(k)
        return ff.Local(Net(), (x, torch.nn.functional.one_hot(y, 3).float())) if k == 0 else ff.Local(Net(), (x, y))

    strategy, _ = run(App(mixed, 4), "fedavg", rounds=1)
    assert strategy.state is not None
    assert len(strategy.state.uploads) == 3
    assert "node 100 takes no part: its samples are" in caplog.text


def broken() -> ArrayRecord:
    return ArrayRecord(Net().state_dict() | {"head.bias": torch.full([CLASSES], torch.nan)})


def test_too_few_nodes() -> None:
    with pytest.raises(ConfigError, match="1 suitable node is connected, but 2 are needed"):
        run(App(local, 1))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ff.Strategy("dito", Net()), "did you mean 'ditto'"),
        (lambda: ff.Strategy("ditto", Net(), lamda=1.0), "unknown key 'lamda'"),
        (
            lambda: ff.Strategy("ditto", Net(), fraction_train=0.5),
            "Use sampler=",
        ),
        (lambda: ff.Strategy("ditto", Net(), train_metrics_aggr_fn=len), "Use client_metrics"),
        (lambda: ff.Strategy("ditto", Net(), min_nodes="2"), "min_nodes must be a whole number of at least 1, got '2'"),
        (lambda: run(App(local, 2), rounds=0), "num_rounds must be a whole number of at least 1, got 0"),
        (lambda: ff.Strategy("ditto", Net(), lam=-1.0), "lam: input should be greater than"),
        (lambda: ff.Strategy("fedavg", Net(), local={"lr": 0}), "lr"),
        (lambda: ff.Strategy("fedavg", Net(), sampler={"kind": "os:getcwd"}), "names code"),
        (lambda: ff.Strategy("fedavg", Net(), local=object()), "a strategy accepts names, numbers, tables"),
        (lambda: run(App(lambda context: ff.Local(Net(), 3), 2)), "trainset must be a Dataset or DataLoader"),
        (lambda: run(App(lambda context: ff.Local(Net(), (torch.ones(3, 2), torch.ones(3))), 2)), "does not accept a"),
        (lambda: run(App(lambda context: Net(), 2)), "must return a Local, got Net"),
        (
            lambda: ff.Strategy("fedavg", Net()).start(App(local, 2).grid, ArrayRecord(Net(9).state_dict())),
            r"initial_arrays: 'body.0.weight' has the shape \[9, 5\], but in the model the shape is \[8, 5\]",
        ),
        (
            lambda: ff.Strategy("fedavg", Net()).start(App(local, 2).grid, broken()),
            "'head.bias' contains NaN or infinity. Initialize",
        ),
        (
            lambda: ff.Strategy("fedavg", Net()).start(App(local, 2).grid, ArrayRecord([np.ones(2)])),
            (
                r"the model contains 'body.0.weight', but initial_arrays does not. Pass "
                r"ArrayRecord\(model.state_dict\(\)\)"
            ),
        ),
        (lambda: ff.Strategy(Ditto(), Net()), r"algorithm must be a name, such as Strategy\('ditto', .* got Ditto\("),
        (lambda: ff.Strategy("ditto", Net(), lr=0.1), r"unknown key 'lr'; it belongs in local=\{'lr': 0.1\}"),
        (lambda: ff.Strategy("ditto", Net(), num_rounds=3), "num_rounds is an argument of start"),
        (lambda: ff.Strategy("ditto", Net(), min_fit_clients=3), "Use min_nodes"),
        (lambda: ff.Strategy("fedprox", Net(), proximal_mu=1.0), r"Use Strategy\('fedprox', Net\(\), mu=...\)"),
        (lambda: ff.Strategy("fedavg", Net(), on_evaluate_config_fn=dict), r"Use @app.evaluate\('mine'\)"),
        (
            lambda: ff.Strategy("fedavg", Net(), engine={"quorum": 0.9}),
            "engine: 'quorum' has no effect in an app: a round takes the replies that arrive",
        ),
        (
            lambda: ff.Strategy("fedavg", Net(), engine=Engine(device="cuda")),
            r"engine: 'device' has no effect in an app: the node names it: Local\(..., device='cuda'\)",
        ),
        (lambda: ff.Strategy("fedavg", Net(), evaluate={"every": 2}), "'every' has no effect .* use evaluate_every"),
        (
            lambda: ff.Strategy("fedavg", Net(), evaluate={"personal_on_common": True}),
            r"nodes score .* personal_model\(context\)",
        ),
        (lambda: ff.Strategy("ditto", Net(), folder=3), "folder must be a path"),
        (lambda: ff.Strategy("ditto", Net()).aggregate_train(1, []), "no round has started. Call configure_train"),
        (
            lambda: ff.Strategy("fedavg", Net()).start(
                App(local, 2).grid, ArrayRecord(Net().state_dict()), evaluate_fn=lambda t, arrays: (0.1, {})
            ),
            r"evaluate_fn must return a MetricRecord or None, got \(0.1, \{\}\)\. Return MetricRecord\(",
        ),
        (lambda: ff.Strategy("ditto", Net(), folder=""), "folder must be a path"),
        (lambda: ff.Strategy("ditto", Net(), wait="1"), "wait must be a number of seconds, got '1'"),
        (
            lambda: Server(client_manager=SimpleClientManager(), strategy=ff.Strategy("ditto", Net())).fit(1, None),
            "this server uses the older API with",
        ),
        (lambda: ff.client(local), r"client needs the app, as in @client\(app\)"),
        (
            lambda: ff.client(ClientApp())(ff.Local(Net(), samples(0))),
            "must decorate a function of Flower's context, got Local",
        ),
        (lambda: run(App(lambda context: ff.Local(Net, samples(0)), 2)), "model must be a module"),
        (lambda: run(App(lambda context: ff.Local(Net(), samples(0), nn.MSELoss), 2)), "loss must be a function"),
        (lambda: run(App(lambda context: ff.Local(Net(), samples(0), folder=3), 2)), "folder must be a path"),
        (
            lambda: run(App(lambda context: ff.Local(Net(), samples(0), testset=[]), 2)),
            "testset is empty; leave it out",
        ),
        (
            lambda: run(App(lambda context: context.node_config["nope"], 2)),
            r"KeyError: 'nope' \(test_faults.py, line \d+\)",
        ),
    ],
)
def test_bad_input_is_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


STRATEGIES = {
    name: inspect.signature(strategy.__init__).parameters.keys() - {"self", "args", "kwargs"}
    for name, strategy in vars(flower_strategies).items()
    if inspect.isclass(strategy)
    and "Xgb" not in name
    and not name.startswith(("DifferentialPrivacy", "Strategy", "Res"))
}
"""Flower's strategies for modules, with their options."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_of_flower_has_its_like(name: str) -> None:
    """Under its name or another, which the message has, as it has the place of every option."""
    with pytest.raises(
        ConfigError, match=rf"did you mean '{name.lower()}'|is one of Flower's own strategies. Use Strategy"
    ):
        ff.Strategy(name, Net())
    for option in STRATEGIES[name]:
        with pytest.raises(
            ConfigError, match=f"unknown key '{option}'; {option} is an option of Flower's own strategies. Use"
        ):
            ff.Strategy("fedavg", Net(), **{option: 1})


@pytest.mark.parametrize("cure", documents.REPLACEMENT_HINTS["strategies"].values())
def test_what_is_named_in_the_place_of_a_strategy_is_one(cure: str) -> None:
    call = ast.parse(cure.replace("...", "1.0"), mode="eval").body
    assert isinstance(call, ast.Call)
    ff.Strategy(ast.literal_eval(call.args[0]), Net(), **{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


def test_an_option_of_the_method_is_none_of_flowers() -> None:
    ff.Strategy("q-ffl", Net(), q=1.0)
    ff.Strategy("fedopt", Net(), tau=0.1)


def test_functions_of_a_subclass_get_the_model_of_every_round() -> None:
    """As apps save it, whether or not an ``evaluate_fn`` reads it too."""
    kept: list[ArrayRecord | None] = []

    class Saving(ff.Strategy):
        """Keeps what it aggregates."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            kept.append(arrays)
            return arrays, metrics

    app, net = App(local, 2), Net()
    result = Saving("fedavg", net, **CHOICES).start(app.grid, ArrayRecord(net.state_dict()), num_rounds=2)
    first, last = (one.to_torch_state_dict() for one in kept if one is not None)
    assert torch.equal(last["head.weight"], result.arrays.to_torch_state_dict()["head.weight"])
    assert not torch.equal(first["head.weight"], last["head.weight"])


def private(wrapper: Any, **options: float) -> Any:
    """Flower's privacy around the strategy, whose noise is added at the server."""
    strategy = ff.Strategy("fedavg", Net(), **CHOICES)
    around = wrapper(strategy, noise_multiplier=0.01, num_sampled_clients=2, **options)
    return around.start(App(local, 2).grid, ArrayRecord(Net().state_dict()), num_rounds=1)


def noisy(rounds: int) -> Any:
    class Noisy(ff.Strategy):
        """Changes what it aggregates."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            values = arrays.to_torch_state_dict() if arrays else {}
            return ArrayRecord({name: value + 1 for name, value in values.items()}), metrics

    strategy = Noisy("fedavg", Net(), **CHOICES)
    return strategy.start(App(local, 2).grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: private(DifferentialPrivacyClientSideFixedClipping, clipping_norm=1.0),
            "config contains 'clipping_norm', but fedloom nodes do not use it to clip; instead of",
        ),
        (
            lambda: private(DifferentialPrivacyClientSideAdaptiveClipping),
            "config contains 'clipping_norm', but fedloom nodes do not use it to clip; instead of",
        ),
        (
            lambda: private(DifferentialPrivacyServerSideFixedClipping, clipping_norm=1.0),
            r"ServerSideFixedClipping clips arrays of models, but fedloom nodes .*upload_transform=\{'kind'",
        ),
        (
            lambda: private(DifferentialPrivacyServerSideAdaptiveClipping),
            r"ServerSideAdaptiveClipping clips arrays of models, but fedloom nodes .*upload_transform=\{'kind'",
        ),
        (
            lambda: noisy(2),
            r"round 2: the arrays differ from those that aggregate_train returned.*upload_transform=\{'kind'",
        ),
    ],
    ids=["nodes clip", "nodes clip by adaptive bounds", "the server clips", "the server adapts", "another model"],
)
def test_a_strategy_around_one_of_fedlooms_that_no_node_would_notice_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_rounds_without_replies_and_a_model_read_anew_are_those_of_the_strategy() -> None:
    """The loop of an app may give the arrays as it wrote them, and the old ones where a round gave none."""
    fault = lambda _node, message, reply: None if _trains(message, 2) else reply  # noqa: E731
    app, net, config = App(local, 2, fault), Net(), ConfigRecord()
    strategy, arrays = ff.Strategy("fedavg", net, wait=0.1, **CHOICES), ArrayRecord(net.state_dict())
    for t in (1, 2, 3):
        replies = app.grid.send_and_receive(strategy.configure_train(t, arrays, config, app.grid))
        newest, _ = strategy.aggregate_train(t, replies)
        assert (newest is None) == (t == 2)
        arrays = ArrayRecord((newest or arrays).to_torch_state_dict())
    assert strategy.state.round == 3


@pytest.mark.parametrize("every", [0, 1, 2])
def test_the_loop_of_an_app_is_evaluated_as_often_as_start_does(every: int) -> None:
    """But for the last round, which only `start` knows."""
    app, net, config = App(local, 2), Net(), ConfigRecord()
    strategy, arrays = ff.Strategy("fedavg", net, evaluate_every=every, **CHOICES), ArrayRecord(net.state_dict())
    for t in range(1, 6):
        newest, _ = strategy.aggregate_train(
            t, app.grid.send_and_receive(strategy.configure_train(t, arrays, config, app.grid))
        )
        arrays = newest or arrays
        strategy.aggregate_evaluate(
            t, app.grid.send_and_receive(strategy.configure_evaluate(t, arrays, config, app.grid))
        )
    assert [*strategy.client_metrics] == ([*range(every, 6, every)] if every else [])


@pytest.mark.parametrize(
    ("options", "warned"),
    [({}, r"{'lam': .*Strategy\('ditto', ..., lam=...\)"), ({"lam": 1.0}, "")],
    ids=["derived", "set"],
)
def test_what_follows_from_the_number_of_rounds_is_named_in_a_loop_of_an_app(
    options: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`start` knows the number, and says nothing."""
    net, start = Net(), ArrayRecord(Net().state_dict())
    ff.Strategy("ditto", net, **options, **CHOICES).start(App(local, 2).grid, start, num_rounds=1)
    assert "number of rounds" not in caplog.text
    ff.Strategy("ditto", net, **options, **CHOICES).configure_train(1, start, ConfigRecord(), App(local, 2).grid)
    assert re.search(warned, caplog.text)
    assert ("number of rounds" in caplog.text) == bool(warned)


def test_a_model_in_a_type_that_numpy_lacks_is_that_of_float32() -> None:
    """The node and the server train in the run's own type."""
    half, start = Net().bfloat16(), Net().bfloat16().float().state_dict()
    net = Net()
    net.load_state_dict(start)
    rows = []
    for module in (net, half):
        app = App(lambda _context, module=module: ff.Local(module, samples(0), testset=samples(1)), 2)
        result = ff.Strategy("fedavg", module, seed=1, **CHOICES).start(app.grid, ArrayRecord(start), num_rounds=1)
        rows.append(result.arrays.to_torch_state_dict())
    assert rows[1]["head.weight"].dtype == torch.float32
    assert torch.equal(rows[1]["head.weight"], rows[0]["head.weight"].bfloat16().float())


def test_a_stranger_is_told_that_the_app_is_not_fedlooms() -> None:
    app = App(local, 2)
    message = Message(RecordDict({"x": ConfigRecord({"a": 1})}), dst_node_id=100, message_type="train")
    message.metadata.__dict__["_message_id"] = "m"
    reply = app.apps[100](message, app.contexts[100])
    assert "this node runs fedloom_sites.flower" in reply.error.reason


def answer(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_functions_of_an_apps_own_stay_under_a_name_and_are_refused_without_one(kind: str) -> None:
    app = ClientApp()
    getattr(app, kind)()(answer)
    with pytest.raises(ConfigError, match=r"already has a function under @app.*Remove it, or give it a name"):
        ff.client(app)(local)
    app = ClientApp()
    getattr(app, kind)("mine")(answer)
    ff.client(app)(local)
    with pytest.raises(ConfigError, match=r"already has a function under @app.*Remove it, or give it a name"):
        getattr(app, kind)()(answer)
    getattr(app, kind)("second", mods=[])(answer)
    outside_flower()
    message = Message(RecordDict(), dst_node_id=100, message_type=f"{kind}.mine")
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(run_id=1, node_id=100, node_config={}, state=RecordDict(), run_config={})
    assert not app(message, context).has_error()


def test_an_app_with_a_client_fn_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"or a client_fn, for messages that fedloom answers. Remove it"):
        ff.client(ClientApp(lambda _context: None))(local)


def with_mods(mods: list[Any]) -> App:
    app = App(local, 3)
    for node in app.apps:
        app.apps[node] = ClientApp(mods=mods)
        ff.client(app.apps[node])(local)
    return app


@pytest.mark.parametrize(
    ("mod", "sentence"),
    [
        (fixedclipping_mod, "clip or add noise with an upload transform of the strategy"),
        (adaptiveclipping_mod, "clip or add noise with an upload transform of the strategy"),
        (LocalDpMod(1.0, 1.0, 1.0, 1e-5), "clip or add noise with an upload transform of the strategy"),
        (secaggplus_mod, "secaggplus_mod needs the server workflow .* use fedloom deploy for secure sums"),
    ],
    ids=["fixed", "adaptive", "local privacy", "secure sums"],
)
def test_mods_that_change_a_record_of_the_model_are_refused_before_the_first_round(mod: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"0 suitable nodes are connected, but 2 are needed; node 100: .*{sentence}"):
        run(with_mods([mod]))


def test_mods_that_look_on_change_nothing() -> None:
    mods = pytest.importorskip("flwr.clientapp.mod.comms_mods", reason="older releases have no mods that look on")
    start, metrics = ArrayRecord(Net().state_dict()), []
    for app in (App(local, 3), with_mods([mods.message_size_mod, mods.arrays_size_mod])):
        strategy = ff.Strategy("scaffold", Net(), **CHOICES)
        strategy.start(app.grid, start, num_rounds=2)
        metrics.append(strategy.client_metrics)
    assert metrics[0] == metrics[1]


def test_a_channel_clips_what_a_node_sends() -> None:
    start = ArrayRecord(Net().state_dict())
    strategy = ff.Strategy(
        "fedavg", Net(), upload_transform={"kind": "clip", "bound": 0.01}, evaluate_every=0, **CHOICES
    )
    moved = strategy.start(App(local, 3).grid, start, num_rounds=1).arrays.to_torch_state_dict()
    before = start.to_torch_state_dict()
    changes = [(moved[name] - before[name]).flatten() for name, _ in Net().named_parameters()]
    assert 0 < float(torch.cat(changes).norm()) <= 0.01 * (1 + 1e-6)


def test_a_round_that_every_node_refuses_ends_the_run() -> None:
    """Asking again cannot help: the initial arrays are no result."""

    def fault(node: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.content[VALUES_RECORD]["round"] >= 2:
            reply.content[VALUES_RECORD] = ConfigRecord({**reply.content[VALUES_RECORD], "error": "the loss is a sum"})
        return reply

    strategy = ff.Strategy("fedavg", Net(), wait=0.1, **CHOICES)
    with pytest.raises(RunStopped, match=r"round 2: all 3 nodes rejected the request. Node 10\d: the loss is a sum"):
        strategy.start(App(local, 3, fault).grid, ArrayRecord(Net().state_dict()), num_rounds=5)
    assert strategy.state is not None
    assert strategy.state.round == 1


def test_a_loss_that_is_a_sum_ends_the_run_at_once() -> None:
    def summed(context: Context) -> ff.Local:
        k = int(context.node_config["partition-id"])
        return ff.Local(Net(), samples(k), nn.CrossEntropyLoss(reduction="sum"), testset=samples(10 + k))

    strategy = ff.Strategy("fedavg", Net(), wait=0.1, **CHOICES)
    with pytest.raises((RunStopped, ConfigError), match="sum"):
        strategy.start(App(summed, 3).grid, ArrayRecord(Net().state_dict()), num_rounds=3)


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (None, "any reply in 3 rounds, so no model was trained. The"),
        ("damaged", "any reply in 3 rounds, so no model was trained. The"),
        ("not finite", "round 1: 0 of 3 uploads were finite and within bounds"),
    ],
)
def test_a_run_in_which_no_reply_was_used_has_no_result(lost: str | None, reason: str) -> None:
    def fault(node: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train":
            if lost is None:
                return None
            BENT[lost](reply.content)
        return reply

    strategy = ff.Strategy("fedavg", Net(), wait=0.1, **CHOICES)
    with pytest.raises(RunStopped, match=reason):
        strategy.start(App(local, 3, fault).grid, ArrayRecord(Net().state_dict()), num_rounds=3)


@pytest.mark.parametrize("method", ["fedavg", "fedadmm"])
def test_a_run_that_left_its_model_as_it_was_has_no_result(method: str) -> None:
    strategy = ff.Strategy(method, Net(), wait=0.1, local={"lr": 1e-20})
    with pytest.raises(RunStopped, match="after 1 round the global model equals the initial model"):
        strategy.start(App(local, 3).grid, ArrayRecord(Net().state_dict()), num_rounds=1)
