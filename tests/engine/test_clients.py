"""The seam between a round and its clients: chunks, single clients and one sum lead to the same state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine.chunk import run_clients
from fedloom.engine.round import run_round
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of
from fedloom.engine.state import State, initial_state
from fedloom.processes.clients import ChunkResult, Clients, SumResult, TrainRequest, TrainResult, TrainTask

METHODS = ["fedavg", "flame", "scaffold", "feddyn", "fednova", "ditto"]
"""Means, kept rows, sums that accumulate, and a client state."""


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partition.dirichlet(clients=9, beta=0.5)(fl.load("digits"), seed=0)


class Through:
    """Clients whose results pass `results`; all else is theirs."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.ask, self.score, self.on_one = clients.ask, clients.score, clients.on_one

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


def states(fed: Federation, method: str, kind: type[Through], **choices: Any) -> State:
    setting = fl.Setting.of(
        method, model="softmax", rounds=3, local={"lr": 0.1}, weights="samples", sampler={"fraction": 0.7},
        engine={"dtype": "float64", "chunk": 2}, **choices,
    )  # fmt: skip
    job, server = make_job(setting, fed)
    with clients_of(job) as clients:
        state = initial_state(job, server)
        for _ in range(3):
            state, _ = run_round(job, kind(clients), state)
    return state


@pytest.mark.parametrize("kind", [Single, Summed])
@pytest.mark.parametrize("method", METHODS)
def test_who_computes_changes_no_state(fed: Federation, method: str, kind: type[Through]) -> None:
    whole, other = states(fed, method, Through), states(fed, method, kind)
    assert torch.equal(whole.cohort, other.cohort)
    assert torch.equal(whole.totals, other.totals)
    assert torch.equal(whole.uploads, other.uploads)
    for field, value in zip(whole.server._fields, whole.server, strict=True):
        torch.testing.assert_close(getattr(other.server, field), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Single, Summed])
def test_clients_that_are_dropped_are_dropped_from_any_result(fed: Federation, kind: type[Through]) -> None:
    choices = {"model": "softmax", "rounds": 1, "local": {"lr": 0.1}}
    engine = {"dtype": "float64", "chunk": 2}
    job, server = make_job(fl.Setting.of("fedavg", engine=engine, **choices), fed)
    everyone = TrainTask(1, torch.arange(fed.n), torch.arange(fed.n), torch.ones(fed.n, 1))
    norms = run_clients(job, job.down(server, 1), everyone).upload.dw.norm(dim=1)
    setting = fl.Setting.of("fedavg", engine={**engine, "norm_bound": float(norms.median())}, **choices)
    job, server = make_job(setting, fed)
    with clients_of(job) as clients:
        whole, notes = run_round(job, clients, initial_state(job, server))
        other, same_notes = run_round(job, kind(clients), initial_state(job, server))
    assert 0 < int(whole.totals[-1]) < fed.n
    assert notes == same_notes
    assert torch.equal(whole.totals, other.totals)
    torch.testing.assert_close(other.server.x, whole.server.x, rtol=1e-12, atol=1e-12)
