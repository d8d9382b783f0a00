"""A method in a Flower app, whose nodes are in this process, is the method of a simulation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import Tensor, nn

import fedloom as fl
import fedloom_sites.flower as ff
from fedloom import models
from fedloom.algorithms import REGISTRY
from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, Refused
from fedloom.rows.wire import WIRE_MAGIC
from fedloom_sites.deploy.protocol.envelope import ARRAYS_RECORD, unpack_arrays
from fedloom_sites.flower.records import VALUES_RECORD
from tests.flower.app import App

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CHOICES: dict[str, Any] = {
    "local": {"lr": 0.05, "batch_size": 20, "epochs": 1}, "engine": {"dtype": "float64", "gradient_engine": "loop"},
    "seed": 3,
}  # fmt: skip
QUICK = {"afl", "clustered-sampling", "fedavg", "fedrep", "fiaelt", "flame", "power-of-choice", "scaffold"}
"""One of every kind."""
NEEDED: dict[str, dict[str, Any]] = {"fedbn": {"layers": ["1.bias"]}}  # the model has no normalisation layer


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.dirichlet(clients=3, alpha=0.5, max_train_per_client=30)(fl.load("digits"), seed=0)


def net() -> nn.Module:
    """Another one each time, as at nodes that start on their own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


def local_of(fed: Federation, net: Callable[[], nn.Module] = net) -> Any:
    def part(client: int, name: str) -> tuple[Tensor, Tensor]:
        index = fed.indices(name, client)
        return fed.fetch(index).double(), fed.targets(index)

    def local(context: Context) -> ff.Local:
        k = int(context.node_config["partition-id"])
        return ff.Local(
            net(), part(k, "train"), nn.CrossEntropyLoss(), testset=part(k, "test"), valset=part(k, "validation")
        )

    return local


def check(fed: Federation, name: str, rounds: int = 3, net: Callable[[], nn.Module] = net, **choices: Any) -> None:
    options = {**NEEDED.get(name, {}), **{k: v for k, v in choices.items() if k not in fl.Setting.model_fields}}
    choices = {**CHOICES, **{k: v for k, v in choices.items() if k in fl.Setting.model_fields}}
    module, app = net(), App(local_of(fed, net), 3)
    strategy = ff.Strategy(name, net(), **options, **choices)
    result = strategy.start(app.grid, ArrayRecord(module.state_dict()), num_rounds=rounds)
    known = fl.simulate(REGISTRY[name](**options), fed, model=module, rounds=rounds, evaluate={"every": 1}, **choices)
    assert strategy.state is not None
    assert strategy.state.round == rounds
    assert torch.equal(strategy.state.totals[:3], known.state.totals[:3])
    for field in known.state.server._fields:
        torch.testing.assert_close(getattr(strategy.state.server, field), getattr(known.state.server, field), **CLOSE)
    if "global" in known.models.kinds():
        row = torch.cat([value.flatten() for value in result.arrays.to_torch_state_dict().values()])
        torch.testing.assert_close(row, known.models.rows("global"), **CLOSE)
    if "personal" in known.models.kinds():
        rows = known.models.rows("personal")
        for k, context in enumerate(app.contexts.values()):
            own = torch.cat([value.flatten() for value in ff.personal_model(context).values()])
            torch.testing.assert_close(own, rows[k], **CLOSE)
    model = known.models.kinds()[-1] if known.models.kinds()[-1] != "hybrid" else "personal"
    for k, figures in strategy.client_metrics[rounds].items():
        assert figures[f"{model}/test/loss"] == pytest.approx(float(known.final(model, "loss")[k]), rel=1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REGISTRY if n != "centralized"]
)
def test_every_method_in_an_app_is_simulated(fed: Federation, name: str) -> None:
    check(fed, name)


@pytest.mark.parametrize(
    "choices",
    [
        {"sampler": {"kind": "uniform", "fraction": 0.7}},
        {"sampler": {"kind": "power-of-choice", "clients": 2, "candidates": 3}},
        {"aggregator": {"kind": "median"}},
        {"upload_transform": {"kind": "top-k", "fraction": 0.3}},
        {"client_weights": "uniform"},
        {"personalized_aggregation": {"kind": "attention", "quantile": 0.3}},
        {"local": {"lr": 0.01, "batch_size": 20, "optimizer": "adam", "optimizer_state": "persistent"}},
    ],
    ids=lambda choices: next(iter(choices)),
)
def test_parts_by_name_are_those_of_an_experiment_file(fed: Federation, choices: dict[str, Any]) -> None:
    check(fed, "fedavg", **choices)


def deep() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpfl": lambda: models.Guided(deep()).double(),
    "knn-per": lambda: models.WithMemory(deep(), 12).double(),
    "fedem": lambda: models.Mixture([deep(), deep()]).double(),
}
"""Of the methods that need a network of their own form."""


@pytest.mark.parametrize("name", NETWORKS)
def test_a_method_with_a_network_of_its_own_form_is_simulated(fed: Federation, name: str) -> None:
    check(fed, name, net=NETWORKS[name])


def test_what_is_set_in_torch_changes_no_bit(fed: Federation, set_in_torch: Callable[[], Any]) -> None:
    """At the server as at the nodes, whose function gives what the app made before."""
    nets, local = [deep_single() for _ in range(4)], local_of(fed)

    def run(setting: Callable[[], Any]) -> list[Tensor]:
        made = [replace(local(Context(1, k, {"partition-id": k}, RecordDict(), {})), model=nets[k]) for k in range(3)]
        app = App(lambda context: made[int(context.node_config["partition-id"])], 3)

        def answering(answer: Callable[[Message], Message]) -> Callable[[Message], Message]:
            def answered(message: Message) -> Message:
                with setting():
                    return answer(message)

            return answered

        app.grid.nodes = {node: answering(answer) for node, answer in app.grid.nodes.items()}
        with setting():
            strategy = ff.Strategy("ditto", nets[3], seed=3, local={"lr": 0.05, "batch_size": 20, "optimizer": "adam"})
            strategy.start(app.grid, ArrayRecord(nets[3].state_dict()), num_rounds=2)
        assert strategy.state is not None
        figures = [v for by in strategy.client_metrics.values() for client in by.values() for v in client.values()]
        personal = [value for context in app.contexts.values() for value in ff.personal_model(context).values()]
        return [*strategy.state.server, *personal, torch.tensor(figures)]

    want, got = run(nullcontext), run(set_in_torch)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def deep_single() -> nn.Module:
    """A network in float32 with statistics and randomness of its own."""
    inside = (nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(nn.Flatten(), *inside, nn.Linear(16, 10))


def test_nodes_score_the_global_model_by_their_own_statistics(
    fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the choice of `fl.simulate` that gives the same figures."""
    logging.getLogger("flwr").setLevel(logging.INFO)
    modules = [normalised() for _ in range(5)]
    app = App(local_of(fed, modules.pop), 3)
    strategy = ff.Strategy("fedavg", modules[0], **CHOICES)
    strategy.start(app.grid, ArrayRecord(modules[0].state_dict()), num_rounds=2)
    assert "the client's own (evaluate.batchnorm_stats)" in caplog.text
    assert "average over the round's clients" not in caplog.text
    scored = {"every": 1, "batchnorm_stats": "own"}
    known = fl.simulate("fedavg", fed, model=modules[0], rounds=2, evaluate=scored, **CHOICES)
    for k, figures in strategy.client_metrics[2].items():
        assert figures["global/test/loss"] == pytest.approx(float(known.final("global", "loss")[k]), rel=1e-9)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)).double()


def test_pooling_is_refused() -> None:
    with pytest.raises(Refused, match="pools the data of all clients"):
        ff.Strategy("centralized", net())


def floored(fed: Federation, **floor: Any) -> Any:
    """The nodes, with a floor of their own."""
    local = local_of(fed)

    def with_floor(context: Context) -> ff.Local:
        return replace(local(context), **floor)

    return with_floor


def lengths_sent(fed: Federation, floor: dict[str, Any], **choices: Any) -> list[float]:
    """The lengths of the differences that the nodes send in one round."""
    sent = list[float]()

    def look(_node: int, _message: Message, reply: Message) -> Message:
        if ARRAYS_RECORD in reply.content:
            message = unpack_arrays(reply.content[ARRAYS_RECORD], 1e9)[0]
            sent.append(float(torch.frombuffer(bytearray(message[-8 * 650 :]), dtype=torch.float64).norm()))
        return reply

    module, app = net(), App(floored(fed, **floor), 3, look)
    strategy = ff.Strategy("fedavg", net(), **{**CHOICES, **choices})
    strategy.start(app.grid, ArrayRecord(module.state_dict()), num_rounds=1)
    return sent


@pytest.mark.parametrize("name", ["ditto", "power-of-choice"])
def test_every_number_of_a_method_travels_in_the_codec_of_deployments(name: str, fed: Federation) -> None:
    """Downloads, uploads, models and answers are messages of `fedloom.rows.wire`, with the checksum of every reader."""
    seen = dict[str, int]()

    def look(_node: int, message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        for content in (message.content, reply.content):
            arrays = unpack_arrays(content[ARRAYS_RECORD], 1e9) if ARRAYS_RECORD in content else []
            assert all(array[:4] == WIRE_MAGIC for array in arrays)
            seen[kind] = seen.get(kind, 0) + len(arrays)
        assert {*reply.content} <= {VALUES_RECORD, ARRAYS_RECORD, "metrics"}
        return reply

    strategy = ff.Strategy(name, net(), **CHOICES)
    strategy.start(App(local_of(fed), 3, look).grid, ArrayRecord(net().state_dict()), num_rounds=1)
    assert seen["train"] >= 2
    assert ("query.ask" in seen) == (name == "power-of-choice")


def test_no_document_of_the_server_lowers_a_nodes_own_noise(fed: Federation) -> None:
    """R11: a strategy without a channel, or with weaker noise, gets noise all the same; it may ask for more."""
    own = {"clip": 1e-6, "sigma": 1e6}  # 650 numbers of standard deviation 1
    plain = lengths_sent(fed, {})
    assert max(plain) < 5
    for choices in ({}, {"upload_transform": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 1e-9}}):
        assert all(20 < length < 31 for length in lengths_sent(fed, {"upload_transform": own}, **choices))
    strong = {"kind": "gaussian-noise", "clip": 1e-6, "sigma": 1e8}
    assert all(length > 2000 for length in lengths_sent(fed, {"upload_transform": own}, upload_transform=strong))


def test_no_document_of_the_server_lowers_a_nodes_own_bound(fed: Federation) -> None:
    bound = 0.01
    assert all(length <= bound * (1 + 1e-9) for length in lengths_sent(fed, {"norm_bound": bound}))
    assert all(length > bound for length in lengths_sent(fed, {}))


@pytest.mark.parametrize(
    ("floor", "sentence"),
    [
        ({"norm_bound": 0}, "norm_bound must be a number greater than 0, got 0"),
        ({"norm_bound": "1"}, "norm_bound must be a number greater than 0, got '1'"),
        ({"upload_transform": {"clip": -1}}, "upload_transform.clip: Input should be greater than 0, got -1"),
        ({"upload_transform": {"kind": "sign"}}, "upload_transform.kind"),
        ({"upload_transform": "noise"}, "Pass the node's noise as fl.channels.GaussianNoise"),
    ],
)
def test_a_floor_that_cannot_be_is_refused(floor: dict[str, Any], sentence: str, fed: Federation) -> None:
    context = App(local_of(fed), 1).contexts[100]
    with pytest.raises(ConfigError, match=sentence):
        floored(fed, **floor)(context).read()


def test_another_channel_beside_a_nodes_own_noise_is_refused(fed: Federation) -> None:
    local = replace(local_of(fed)(App(local_of(fed), 1).contexts[100]), upload_transform={"clip": 1.0})
    setting = fl.Setting(algorithm=REGISTRY["fedavg"](), upload_transform=fl.channels.Sign())
    with pytest.raises(
        Refused, match="an upload can have only one transform. Remove upload_transform Sign from the strategy"
    ):
        local.add_noise_floor(setting)
