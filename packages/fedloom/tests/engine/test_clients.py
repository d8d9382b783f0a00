"""The seam between a round and its clients: chunks, single clients and one sum lead to the same state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine.clients.chunk import ClientOutput, run_clients
from fedloom.engine.clients.remote import RemoteClients
from fedloom.engine.job import Job
from fedloom.engine.round import run_round
from fedloom.engine.scoring import score_request
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of
from fedloom.engine.state import State, initial_state
from fedloom.errors import RunStopped, Stop
from fedloom.processes.clients import (
    AskRequest,
    ChunkResult,
    Clients,
    ScoreRequest,
    SumResult,
    TrainRequest,
    TrainResult,
    TrainTask,
)

METHODS = ["fedavg", "flame", "scaffold", "feddyn", "fednova", "ditto"]
"""Means, kept rows, sums that accumulate, and a client state."""


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.dirichlet(clients=9, alpha=0.5)(fl.load("digits"), seed=0)


class Through:
    """Clients whose results pass `results`; all else is theirs."""

    def __init__(self, clients: Clients, _job: Job) -> None:
        self.clients = clients
        self.ask, self.score, self.call_once = clients.ask, clients.score, clients.call_once

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self.clients.train(request)


class Single(Through):
    """Every client is asked on its own, as an application that knows one client at a time does."""

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        for k in range(len(request.ids)):
            one = slice(k, k + 1)
            place, ids, share = request.place[one], request.ids[one], request.share[one]
            yield from self.clients.train(request._replace(place=place, ids=ids, share=share))


class Summed(Through):
    """The sum over the clients is all that is known, as under secure aggregation."""

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        results = [r for r in self.clients.train(request) if isinstance(r, ChunkResult)]
        parts: dict[str, Tensor] = {}
        for result in results:
            for name, part in result.parts.items():
                parts[name] = parts[name] + part.double() if name in parts else part.double()
        ids = torch.cat([r.ids[r.accepted] for r in results])
        missing = torch.cat([r.ids[~r.accepted] for r in results])
        counts = torch.cat([r.counts for r in results]).sum(0)
        yield SumResult(ids, missing, parts, sum(r.total for r in results), counts)


class Remote(RemoteClients):
    """Every client answers messages of its own; those of ``mute`` do not."""

    def __init__(self, clients: Clients, job: Job, mute: Sequence[int] = ()) -> None:
        super().__init__(job, torch.stack([job.fed.sizes(part) for part in ("train", "validation", "test")], 1))
        self.clients, self.mute = clients, mute

    def train_each(self, request: TrainRequest, downloads: Mapping[int, Any]) -> dict[int, ClientOutput]:
        places = {c: k for k, c in enumerate(request.ids.tolist())}
        outputs = {}
        for c, down in downloads.items():
            one = slice(places[c], places[c] + 1)
            task = TrainTask(request.round, request.place[one], request.ids[one], request.share[one])
            outputs[c] = run_clients(self._job, down, task)._replace(model=None)
        return {c: output for c, output in outputs.items() if c not in self.mute}

    def ask_each(self, request: AskRequest, clients: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        answers = {c: next(iter(self.clients.ask(request._replace(ids=torch.tensor([c]))))) for c in clients}
        return {c: (values, counts[:, :3]) for c, (values, counts) in answers.items() if c not in self.mute}

    def score_each(self, request: ScoreRequest) -> dict[int, dict[str, float]]:
        figures: dict[int, dict[str, float]] = {}
        for c in set(request.ids.tolist()) - set(self.mute):
            for (model, part), row in next(iter(self.clients.score(request._replace(ids=torch.tensor([c]))))).items():
                named = {f"{model}/{part}/{name}": float(values) for name, values in row.items() if part}
                figures.setdefault(c, {}).update(named)
        return figures


Kind = type[Through] | type[Remote]


def states(fed: Federation, method: str, kind: Kind, **choices: Any) -> State:
    setting = fl.Setting.create(
        method, model="softmax", rounds=3, local={"lr": 0.1}, client_weights="samples", sampler={"fraction": 0.7},
        engine={"dtype": "float64", "clients_per_batch": 2}, **choices,
    )  # fmt: skip
    job, server = make_job(setting, fed)
    with clients_of(job) as clients:
        state = initial_state(job, server)
        for _ in range(3):
            state, _ = run_round(job, kind(clients, job), state)
    return state


@pytest.mark.parametrize("kind", [Single, Summed, Remote])
@pytest.mark.parametrize("method", METHODS)
def test_who_computes_changes_no_state(fed: Federation, method: str, kind: Kind) -> None:
    whole, other = states(fed, method, Through), states(fed, method, kind)
    assert torch.equal(whole.cohort, other.cohort)
    assert torch.equal(whole.totals, other.totals)
    assert torch.equal(whole.uploads, other.uploads)
    for field, value in zip(whole.server._fields, whole.server, strict=True):
        torch.testing.assert_close(getattr(other.server, field), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Single, Summed, Remote])
def test_clients_that_are_dropped_are_dropped_from_any_result(fed: Federation, kind: Kind) -> None:
    choices = {"model": "softmax", "rounds": 1, "local": {"lr": 0.1}}
    engine = {"dtype": "float64", "clients_per_batch": 2}
    job, server = make_job(fl.Setting.create("fedavg", engine=engine, **choices), fed)
    everyone = TrainTask(1, torch.arange(fed.n), torch.arange(fed.n), torch.ones(fed.n, 1))
    norms = run_clients(job, job.down(server, 1), everyone).upload.dw.norm(dim=1)
    setting = fl.Setting.create("fedavg", engine={**engine, "norm_bound": float(norms.median())}, **choices)
    job, server = make_job(setting, fed)
    with clients_of(job) as clients:
        whole, notes = run_round(job, clients, initial_state(job, server))
        other, same_notes = run_round(job, kind(clients, job), initial_state(job, server))
    assert 0 < int(whole.totals[-1]) < fed.n
    assert notes == same_notes
    assert torch.equal(whole.totals, other.totals)
    torch.testing.assert_close(other.server.x, whole.server.x, rtol=1e-12, atol=1e-12)


def test_a_client_without_a_reply_is_left_out_of_a_round_and_of_its_scores(fed: Federation) -> None:
    job, server = make_job(fl.Setting.create("ditto", model="softmax", rounds=1, local={"lr": 0.1}), fed)
    with clients_of(job) as clients:
        state, _ = run_round(job, Remote(clients, job, mute=[4, 7]), initial_state(job, server))
        request = score_request(job, state)
        assert request is not None
        everyone, some = (
            {key: row for scores in kind.score(request) for key, row in scores.items()}
            for kind in (Remote(clients, job), Remote(clients, job, mute=[4, 7]))
        )
    assert sorted(state.cohort.tolist()) == [c for c in range(fed.n) if c not in (4, 7)]
    assert everyone.keys() == some.keys()
    for key, row in everyone.items():
        for name, values in row.items():
            left = torch.ones(len(values), dtype=torch.bool).index_fill(0, torch.tensor([4, 7]), value=False)
            torch.testing.assert_close(some[key][name][left], values[left], equal_nan=True)
            assert bool(some[key][name][~left].isnan().all())


def test_a_candidate_without_an_answer_is_worth_less_than_any_other(fed: Federation) -> None:
    sampler = {"kind": "power-of-choice", "fraction": 0.5}
    job, server = make_job(
        fl.Setting.create("fedavg", model="softmax", rounds=1, sampler=sampler, local={"lr": 0.1}), fed
    )
    request = AskRequest(1, torch.arange(fed.n), server.x)
    with clients_of(job) as clients:
        values, _ = next(iter(Remote(clients, job, mute=[3]).ask(request)))
        asked = torch.cat([answers.values for answers in clients.ask(request)])
    assert values[3].tolist() == [-torch.inf]
    present = torch.arange(fed.n) != 3
    assert torch.equal(values[present], asked[present])


def test_fewer_replies_than_a_robust_rule_needs_stop_the_round(fed: Federation) -> None:
    rule = {"kind": "trimmed-mean", "f": 3}
    job, server = make_job(
        fl.Setting.create("fedavg", model="softmax", rounds=1, aggregator=rule, local={"lr": 0.1}), fed
    )
    with clients_of(job) as clients, pytest.raises(RunStopped) as caught:
        run_round(job, Remote(clients, job, mute=[0, 1, 2]), initial_state(job, server))
    assert caught.value.reason is Stop.TOO_FEW
