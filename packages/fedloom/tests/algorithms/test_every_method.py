"""Every method: a replay of its own draws has its bits; odd federations are trained on or refused with a sentence."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.algorithms import ALGORITHMS, REGISTRY, FedBN
from fedloom.data.federation import Federation
from fedloom.engine.replay import Replay
from fedloom.engine.result import Result
from fedloom.errors import ConfigError, Stop
from fedloom.local import work as asked
from fedloom.models import MLP, ModelSpec
from fedloom.rows.projection import projection

ROUNDS = 3
CHOOSES = ("clustered-sampling", "power-of-choice")
"""Methods that choose their cohorts themselves."""


@cache
def digits() -> Federation:
    return fl.partitions.dirichlet(clients=5, alpha=0.5, min_size=20, max_train_per_client=40)(
        fl.load("digits"), seed=3
    )


class Normed(ModelSpec):
    """A network for FedBN."""

    def module(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        layers = torch.nn.Linear(int(np.prod(shape)), 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, outputs)
        return torch.nn.Sequential(torch.nn.Flatten(), *layers)


def run(name: str, fed: Federation, **more: Any) -> Result:
    model = Normed() if REGISTRY[name] is FedBN else MLP(hidden=(6,))
    settings = {"rounds": ROUNDS, "local": {"lr": 0.1, "batch_size": 8}, "evaluate": {"every": ROUNDS}, **more}
    return fl.simulate(REGISTRY[name](), fed, model, **settings)


class Recorder:
    """What a run draws: its initial model, its cohorts and the batches of every client, round and stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initial: Any = None
        self.cohorts: list[list[int]] = []
        self.batches: dict[int, list[dict[Any, list[list[int]]]]] = {i: [{}, {}, {}] for i in range(5)}
        start, make_plan = Replay.start, asked.make_plan

        def started(replay: Replay, own: Any, layout: Any) -> Any:
            self.initial = start(replay, own, layout)
            return self.initial

        def planned(ids: Any, sizes: Any, steps: Any, size: Any, seed: int, round: int, stream: Any, *rest: Any) -> Any:
            plan = make_plan(ids, sizes, steps, size, seed, round, stream, *rest)
            for row, (i, count) in enumerate(zip(ids.tolist(), steps.tolist(), strict=True)):
                drawn = [p[p >= 0].tolist() for p in plan.position[:count, row]]
                if 1 <= round <= ROUNDS and len(drawn) > len(self.batches[i][round - 1].get(stream, ())):
                    self.batches[i][round - 1][stream] = drawn
            return plan

        monkeypatch.setattr(Replay, "start", started)
        monkeypatch.setattr(asked, "make_plan", planned)

    def hear(self, state: Any) -> None:
        self.cohorts.append(sorted(state.cohort.tolist()))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_replay_of_what_a_run_drew_has_its_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {} if name == "centralized" else {"sampler": {"kind": "uniform", "fraction": 0.6}}
    with monkeypatch.context() as patched:
        drawn = Recorder(patched)
        first = run(name, digits(), callbacks=[drawn.hear], **more)
    drawn.batches = {i: drawn.batches[i] for i in range(first.job.n)}
    given: dict[str, Any] = {"initial": drawn.initial, "batches": drawn.batches}
    if name in CHOOSES:
        given |= more
    else:
        given["cohorts"] = drawn.cohorts
    if getattr(first.job.algorithm, "projects", False):
        key, dim = first.state.server.key, first.job.algorithm.dim
        given["projection"] = projection(key, dim, drawn.initial)(torch.eye(len(drawn.initial))).T.contiguous()
    again = run(name, digits(), seed=9 if name not in (*CHOOSES, *DRAWS) else 0, **given)
    for a, b in zip(kept(first), kept(again), strict=True):
        assert torch.equal(a, b)


def kept(result: Result) -> list[torch.Tensor]:
    """The server's state without the key of a matrix, the rows of all clients, personal models of the trained."""
    server = [t for field, t in result.state.server._asdict().items() if field != "key"]
    rows, occupied = result.job.clients.read(torch.arange(result.job.n)), result.job.clients.occupied
    seen = occupied if rows else torch.ones_like(occupied)
    personal = [result.models.rows("personal")[seen]] if result.job.has_personal else []
    return [*server, *rows, *personal]


@pytest.mark.parametrize("name", REGISTRY)
def test_neither_scores_nor_workers_change_what_a_normalised_network_learns(name: str) -> None:
    """A loss or representation that a method reads does not depend on whose statistics were needed before."""
    results = list[Result]()

    def train(every: int, workers: int) -> None:
        evaluate, engine = {"every": every, "parts": ("train",)}, {"clients_per_batch": 2, "workers": workers}
        settings: dict[str, Any] = {"rounds": 2, "local": {"lr": 0.1, "batch_size": 8}}
        results.append(fl.simulate(REGISTRY[name](), digits(), Normed(), evaluate=evaluate, engine=engine, **settings))

    said = refusal(lambda: train(1, 1))
    if said:
        assert "normalization layers" in said
        return
    train(2, 2)
    for a, b in zip(*map(kept, results), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_run_that_stops_after_every_round_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Also where a product's rounding depends on where its factors begin in memory, as with five features."""
    more: dict[str, Any] = {"rounds": 4} | ({} if name == "centralized" else {"sampler": {"fraction": 0.5}})
    whole = run(name, five_features(), **more)
    for _ in range(4):
        stopped = run(name, five_features(), folder=tmp_path, callbacks=[interrupt], **more)
    assert (stopped.rounds, stopped.stop) == (4, Stop.DONE)
    for a, b in zip(kept(whole), kept(stopped), strict=True):
        assert torch.equal(a, b)


def interrupt(_state: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@cache
def five_features() -> Federation:
    """Three classes at seven clients of few samples, one of them without another part than its training part."""
    owner, rng = np.repeat(np.arange(7), [1, 13, 45, 4, 8, 9, 2]), np.random.default_rng(0)
    y = rng.integers(3, size=len(owner))
    return made(rng.normal(size=(len(owner), 5)) + 0.7 * y[:, None], y, owner)


DRAWS = ("ifca", "pfedfda", "fedfomo", "fedskip", "fedspa", "fedpd", "equitable-fl", "lp-proj", "admm-lp-proj")
"""Methods whose server draws more: models, where they wander to, means, peers, masks, silent rounds, clusters, keys."""


def refusal(do: Callable[[], object]) -> str:
    """The sentence by which something is refused; empty where it is not."""
    try:
        do()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CHOOSES)
def test_cohorts_beside_a_sampler_of_its_own_are_refused_with_both_names(name: str) -> None:
    with pytest.raises(ConfigError, match="cohorts and sampler '.*' both choose the clients"):
        run(name, digits(), cohorts=[[0, 1]] * ROUNDS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_batches_of_one_stream_do_or_a_sentence_names_the_missing_one(name: str) -> None:
    batches = [[[[0, 1], [2]]] * ROUNDS for _ in range(5)]
    said = refusal(lambda: run(name, digits(), batches=batches))
    assert not said or ("stream" in said and "the method requires" in said)


# --- odd federations


def made(x: Any, y: Any, owner: Any) -> Federation:
    data = fl.Dataset.create(np.asarray(x, np.float32), np.asarray(y), clients=np.asarray(owner))
    return fl.partitions.natural()(data, seed=0)


def one_sample_each() -> Federation:
    rng = np.random.default_rng(0)
    return made(rng.normal(size=(6, 4)), [0, 1, 2, 0, 1, 2], range(6))


def one_client() -> Federation:
    rng = np.random.default_rng(0)
    return made(rng.normal(size=(30, 4)), np.arange(30) % 3, np.zeros(30, int))


def constant_features() -> Federation:
    return made(np.zeros((40, 4)), np.arange(40) % 3, np.arange(40) // 10)


def one_class_each() -> Federation:
    rng = np.random.default_rng(0)
    return made(rng.normal(size=(40, 4)), np.arange(40) // 10, np.arange(40) // 10)


def two_clients() -> Federation:
    rng = np.random.default_rng(0)
    return made(rng.normal(size=(20, 4)), np.arange(20) % 3, np.arange(20) // 19)  # one has 19 samples, one has one


def two_classes() -> Federation:
    """Labels of which a network has one output."""
    rng = np.random.default_rng(0)
    return made(rng.normal(size=(40, 4)), np.arange(40) % 2, np.arange(40) // 10)


def numbers() -> Federation:
    rng = np.random.default_rng(0)
    return made(rng.normal(size=(40, 4)), rng.normal(size=40).astype(np.float32), np.arange(40) // 10)


def trains_or_names_the_cure(name: str, fed: Federation, **more: Any) -> None:
    results = []
    refused = refusal(lambda: results.append(run(name, fed, **more)))
    assert not refused or any(
        word in refused.lower() for word in ("give ", "pass ", "set ", "use ", "take ", "must be ")
    ), refused
    for result in results:
        assert result.stop is Stop.DONE, result.detail
        losses = [r.values for r in result.state.records.items if (r.part, r.metric) == ("train", "loss")]
        assert all(np.isfinite(values).all() for values in losses)


ODD = (one_sample_each, one_client, constant_features, one_class_each, two_clients, two_classes, numbers)


@pytest.mark.parametrize("fed", ODD)
@pytest.mark.parametrize("name", REGISTRY)
def test_an_odd_federation_is_trained_on_or_refused_with_what_to_do(name: str, fed: Callable[[], Federation]) -> None:
    trains_or_names_the_cure(name, fed(), client_weights="samples")


EDGES: dict[str, dict[str, Any]] = {
    "a cohort of one": {"sampler": {"kind": "uniform", "clients": 1}},
    "one round of a batch larger than the data": {"rounds": 1, "local": {"lr": 0.1, "batch_size": 1000}},
    "no epoch": {"local": {"lr": 0.1, "epochs": 0}},
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", REGISTRY)
def test_settings_at_their_edge_are_run_or_refused_with_what_to_do(name: str, edge: str) -> None:
    trains_or_names_the_cure(name, two_clients(), **EDGES[edge])


# --- work

BACKWARD: list[int] = []
"""Samples of every pass backward through a tallied layer."""


class Tally(torch.autograd.Function):
    """The identity, which notes how many samples a gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        BACKWARD.append(len(gradients[0]))
        return gradients[0]


class Tallied(torch.nn.Linear):
    """A layer whose outputs are tallied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tally.apply(super().forward(x))  # type: ignore[no-untyped-call,no-any-return]


class TalliedNetwork(ModelSpec):
    """A network of two layers that tallies the gradients of the last one's outputs, or of the representation."""

    of: Literal["logits", "representation"] = "logits"

    def module(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        first, last = (Tallied if self.of == of else torch.nn.Linear for of in ("representation", "logits"))
        return torch.nn.Sequential(torch.nn.Flatten(), first(int(np.prod(shape)), 4), torch.nn.Tanh(), last(4, outputs))


@pytest.mark.parametrize("name", REGISTRY)
def test_work_is_every_gradient_that_was_taken(name: str) -> None:
    """Samples backward in the records are those of autograd: in rounds, in `personal` and after the last round."""
    entry = REGISTRY[name]
    method = entry(layers=("1.bias",)) if entry is FedBN else entry()
    BACKWARD.clear()
    settings: dict[str, Any] = {"local": {"lr": 0.05, "batch_size": 8}, "engine": {"gradient_engine": "loop"}}
    evaluate = {"every": 2, "parts": ("train",)}
    model = TalliedNetwork(of="representation" if name == "fedas" else "logits")  # a term alone passes no logits
    result = fl.simulate(method, small(), model, rounds=2, evaluate=evaluate, **settings)
    work = {r.round: int(r.values[0]) for r in result.state.records.items if r.metric == "samples_backward"}
    figures = 2 * int(small().sizes("train").sum()) if name == "fiaelt" else 0  # the full gradients of its figures
    assert list(work) == [0, 2]
    assert sum(work.values()) + figures == sum(BACKWARD)  # round 0: what the personal models of the start take


@cache
def small() -> Federation:
    return fl.partitions.iid(clients=3, max_train_per_client=12)(fl.load("digits"), seed=0)
