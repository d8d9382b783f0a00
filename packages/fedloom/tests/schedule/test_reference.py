"""Buffered and asynchronous runs against an event loop written by itself from the papers, on linear regression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine.result import Result
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import END_COLUMN, LOG_COLUMNS, Clock
from fedloom.schedule import Asynchronous, Buffered, Schedule
from fedloom.seeds import derive, generator
from fedloom.testing.timing import Speeds

N, LR, STEPS, ROUNDS = 7, 0.05, 3, 25
SIZES = (4, 9, 6, 12, 5, 8, 7)
SPEEDS = (30.0, 90.0, 20.0, 55.0, 70.0, 10.0, 41.0)
BYTES = 1e6


def data(i: int) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(100 + i)
    x = (8 * g.standard_normal((SIZES[i], 2))).round() / 8  # in single precision the same numbers
    return x, x @ np.array([1.0 + i, -0.5 * i]) + 0.25 * i


def engine(schedule: Schedule, clients: int, **more: object) -> Result:
    fed = Federation.create([(data(i), data(i)) for i in range(N)], validation=0.0)
    given = {"local": {"lr": LR, "batch_size": "full", "steps": STEPS}, "evaluate": {"every": 100}, **more}
    devices = Speeds(speeds=SPEEDS)
    sampler = {"kind": "uniform", "clients": clients}
    return fl.simulate(
        "fedavg", fed, rounds=ROUNDS, devices=devices, schedule=schedule, sampler=sampler, client_weights="uniform",
        engine={"dtype": "float64"}, initial=torch.zeros(3, dtype=torch.float64), **given,
    )  # fmt: skip


def trained(i: int, w: np.ndarray) -> np.ndarray:
    """Gradient descent on the mean squared error of client i."""
    x, y = data(i)
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    for _ in range(STEPS):
        w = w - LR * 2 * x.T @ (x @ w - y) / len(y)
    return w


def drawn(t: int, k: int, clients: int) -> list[int]:
    """The k-th cohort that is drawn for step t, in the order in which it waits."""
    seed = derive(0, t, purpose=("cohort", k)) if k else 0
    ids = torch.randperm(N, generator=generator(seed, t, purpose=("server", "cohort")))[:clients].sort().values
    order = torch.randperm(clients, generator=generator(0, t, purpose=("dispatch", k)))
    return [int(i) for i in ids[order]]


def event_loop(buffer: int, clients: int, mix: float | None, length: int) -> tuple[np.ndarray, list[tuple[float, ...]]]:
    """FedBuff's Algorithm 1, or FedAsync's with ``mix``: one event at a time; the run's streams draw."""
    w, step, now, log = np.zeros(3), 0, 0.0, []
    flying: list[tuple[float, int, int, int, float, np.ndarray, np.ndarray]] = []
    waiting: list[tuple[float, int, int, int, float, np.ndarray, np.ndarray]] = []
    serial, queue = 0, list[int]()
    while step < ROUNDS:
        draws = 0
        while len(waiting) < buffer:
            away = {f[2] for f in (*flying, *waiting)}
            while len(flying) < clients and len(away) < N:
                if not queue and draws == 16:
                    break
                if not queue:
                    queue, draws = drawn(step + 1, draws, clients), draws + 1
                    continue
                i = queue.pop(0)
                if i in away:
                    continue
                away.add(i)
                seconds = SIZES[i] * STEPS / SPEEDS[i] + length / BYTES
                flying.append((now + seconds, serial, i, step, now, w, trained(i, w)))
                serial += 1
            flying.sort(key=lambda f: f[:2])
            waiting.append(flying.pop(0))
            now = waiting[-1][0]
        changes = []
        for end, _, i, version, start, before, after in waiting:
            stale = step - version
            log.append((i, version, step + 1, start, end))
            factor = (1 + stale) ** -0.5
            changes.append(factor * (after - before) if mix is None else mix * factor * (after - w))
        w, step, waiting = w + np.mean(changes, 0), step + 1, []
    return w, log


@pytest.mark.parametrize(("buffer", "clients", "mix"), [(2, 4, None), (3, N, None), (1, 3, 0.6)])
def test_an_independent_event_loop(buffer: int, clients: int, mix: float | None) -> None:
    schedule = Buffered(buffer=buffer) if mix is None else Asynchronous(mix=mix)
    result = engine(schedule, clients)
    clock = result.state.clock
    assert clock is not None
    length = int(result.state.totals[3:5].sum()) // (ROUNDS * buffer)  # bytes of an upload and a download
    w, log = event_loop(buffer, clients, mix, length)
    mine = clock.history()[:, : END_COLUMN + 1]
    theirs = np.array(log)
    for rows in (mine, theirs):
        rows[:] = rows[np.lexsort((rows[:, 0], rows[:, 2]))]
    np.testing.assert_allclose(mine, theirs, rtol=1e-10)
    assert np.abs(result.state.server.x.numpy() - w).max() < 1e-10
    assert (mine[:, 2] - mine[:, 1] > 1).any(), "nothing was stale"


def test_a_kill_in_flight_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    whole = engine(Buffered(buffer=2, timeout=1.5), 5)

    def kill(state: State) -> None:
        if state.round == 11:
            raise KeyboardInterrupt

    at_once = {"dtype": "float64", "checkpoint_every": 1e-9}
    fed = Federation.create([(data(i), data(i)) for i in range(N)], validation=0.0)
    setting = whole.job.setting.with_(engine=at_once)
    initial = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(KeyboardInterrupt):
        fl.simulate(setting, fed, folder=tmp_path, callbacks=[kill], initial=initial)
    resumed: list[int] = []
    again = fl.simulate(setting, fed, folder=tmp_path, callbacks=[lambda s: resumed.append(s.round)], initial=initial)
    assert resumed[0] == 11
    assert torch.equal(again.state.server.x, whole.state.server.x)
    clocks = [result.state.clock for result in (again, whole)]
    assert all(isinstance(clock, Clock) for clock in clocks)
    assert len({clock.now for clock in clocks if clock}) == 1
    one, two = (clock.history() for clock in clocks if clock)
    assert one.shape[1] == len(LOG_COLUMNS)
    np.testing.assert_array_equal(one, two)
