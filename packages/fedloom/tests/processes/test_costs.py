"""What is calculated of rounds on many ranks: limits of the formula, and what it is measured from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.algorithms import FedAvg
from fedloom.choose import SAMPLERS, Uniform
from fedloom.data import load
from fedloom.data.partitions import Iid
from fedloom.engine.round import run_round
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of
from fedloom.engine.state import initial_state
from fedloom.lab.experiment.measure.bench import measure_costs
from fedloom.local import LocalSGD
from fedloom.local.oracles import chunk_count
from fedloom.models import MLP
from fedloom.processes import rank_messages as parcel
from fedloom.processes.costs import ClusterShape, MachineLink, MeasuredWorkers, MethodCosts
from fedloom.processes.pool import usable_cores

NEAR, FAR = MachineLink(math.inf, 0.0), MachineLink(1e8, 0.05)
SETTING = Setting(
    algorithm=FedAvg(), model=MLP(hidden=(8,)), rounds=3, local=LocalSGD(lr=0.1, steps=2), sampler=Uniform(clients=20)
)

costs = st.builds(
    MethodCosts,
    share=st.floats(1e-6, 1), result=st.floats(0, 1), client=st.floats(0, 1e-6), fixed=st.floats(0, 1),
    message=st.floats(0, 1e9), row=st.floats(0, 1e9), chunk=st.integers(1, 50), cohort=st.integers(1, 100),
    crowd=st.floats(1, 3), cores=st.integers(1, 64),
)  # fmt: skip
sizes = st.integers(1, 300)


@given(costs, sizes, st.integers(0, 10**7))
def test_one_rank_does_all_of_the_work_and_sends_nothing(one: MethodCosts, cohort: int, others: int) -> None:
    parts = one.round(cohort + others, cohort, ClusterShape(1, 1, FAR))
    assert parts.work == pytest.approx(one.share * cohort)
    assert parts.results == parts.link == parts.bytes == parts.idle == 0
    assert parts.seconds == pytest.approx(one.share * cohort + one.client * (cohort + others) + one.fixed)


@given(costs, sizes, st.integers(1, 64), st.integers(1, 8))
def test_ranks_share_the_chunks_and_those_beyond_them_have_none(
    one: MethodCosts, cohort: int, ranks: int, machines: int
) -> None:
    parts = one.round(cohort, cohort, ClusterShape(ranks, machines, NEAR))
    count, size = chunk_count(cohort, one.chunk), ranks * machines
    assert parts.idle == max(0, size - count)
    assert one.share * cohort / min(size, count) <= parts.work * (1 + 1e-9)
    most = one.share * math.ceil(count / size) * math.ceil(cohort / count)
    assert parts.work <= most * one.slowed(ranks) * (1 + 1e-9)


@given(costs, st.integers(2, 64))
def test_work_is_slowed_by_the_work_beside_it(one: MethodCosts, busy: int) -> None:
    assert one.slowed(1) == 1
    assert one.slowed(busy - 1) <= one.slowed(busy) * (1 + 1e-9)
    assert one.slowed(one.cores) == pytest.approx(one.crowd if one.cores > 1 else 1)
    assert one._replace(crowd=1.0).slowed(busy) == max(1, busy / one.cores)


@given(costs, sizes, st.integers(2, 8))
def test_rows_travel_where_clients_are_drawn_anew(one: MethodCosts, cohort: int, machines: int) -> None:
    place = ClusterShape(2, machines, FAR)
    all_of_them, drawn = one.round(cohort, cohort, place), one.round(10 * cohort, cohort, place)
    assert all_of_them.bytes == pytest.approx(chunk_count(cohort, one.chunk) * one.message * (1 - 1 / machines))
    assert drawn.bytes - all_of_them.bytes == pytest.approx(
        cohort * one.row * (1 - 1 / machines) / machines, abs=1e-6 * all_of_them.bytes
    )
    assert drawn.link >= all_of_them.link >= FAR.seconds_per_trip


def states(watch: bool) -> tuple[Any, list[MeasuredWorkers]]:
    fed = Iid(clients=30)(load("digits"), seed=0)
    job, server = make_job(SETTING, fed)
    seen = []
    with clients_of(job) as clients:
        state = initial_state(job, server)
        for _ in range(3):
            through = clients.wrap_workers(lambda workers: seen.append(MeasuredWorkers(workers)) or seen[-1])
            state, _ = run_round(job, through if watch else clients, state)
    return state.server, seen


def test_who_is_watched_does_the_same() -> None:
    (plain, _), (watched, seen) = states(False), states(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [w.clients for w in seen] == [20] * 3
    assert all(w.work > 0 and w.passing_seconds > 0 for w in seen)


def test_clients_that_are_asked_only_are_not_of_the_cohort() -> None:
    setting = SETTING.with_(sampler=SAMPLERS["power-of-choice"](clients=5, candidates=12))
    found = measure_costs(setting, Iid(clients=30)(load("digits"), seed=0), 1)
    assert found.cohort == 5
    assert found.crowd >= 1
    assert found.cores == usable_cores()


def test_bytes_of_a_message_are_those_that_ranks_send(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    pack = parcel.pack_tensors

    def noted(*given: Any) -> torch.Tensor:
        sent.append(len(pack(*given)))
        return pack(*given)

    monkeypatch.setattr(parcel, "pack_tensors", noted)
    found = measure_costs(SETTING, Iid(clients=30)(load("digits"), seed=0), 2)
    assert found.cohort == 20
    assert found.message == pytest.approx(sent[0], rel=0.01)
    d = 64 * 8 + 8 + 8 * 10 + 10
    assert 4 * d <= found.message <= 4 * d + 4096
    assert found.row == 0
