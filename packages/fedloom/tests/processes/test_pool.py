"""The pool: results in the order of the tasks, whoever computes them and however large they are."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.errors import ConfigError, FedloomError
from fedloom.lab.tune import Tuning
from fedloom.processes import pool as pools
from fedloom.processes.buffers import MIN_SHARED_BYTES, pack_message, unpack_message
from fedloom.processes.pool import MAX_PIPE_BYTES, WorkerPool


class Task(NamedTuple):
    k: int
    rows: Tensor


def triple(shared: Tensor, task: Task) -> tuple[int, Tensor]:
    """The rows three times, and what all share."""
    return task.k, torch.cat([task.rows, task.rows * 2, shared + task.k])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "size", [3, MIN_SHARED_BYTES, 4 * MAX_PIPE_BYTES], ids=["small", "large", "larger than a pipe takes"]
)
def test_results_are_those_of_one_process(size: int, ahead: bool) -> None:
    """Also where the parent is slow to look: a buffer is not written again before it was read."""
    shared = torch.arange(float(MIN_SHARED_BYTES))
    tasks = [Task(k, torch.full((size,), float(k))) for k in range(17)]
    alone = [*WorkerPool([triple], 1).map(triple, shared, tasks)]
    with WorkerPool([triple], 3, 5 * MIN_SHARED_BYTES, 4 * (3 * size + MIN_SHARED_BYTES) + 1024, ahead=ahead) as pool:
        for _ in range(2):
            for (k, rows), (order, expected) in zip(pool.map(triple, shared, tasks), alone, strict=True):
                time.sleep(0.002)
                assert k == order
                assert torch.equal(rows, expected)


def test_a_tensor_lies_in_memory_of_another_process_as_torch_places_it() -> None:
    """The rounding of a product depends on where its factors begin."""
    tensors = [torch.ones(size) for size in range(1, 40)]
    assert {tensor.data_ptr() % 64 for tensor in unpack_message(pack_message(tensors))} == {0}


def federation() -> fl.Federation:
    y = torch.arange(12) % 2
    return fl.Federation.create([((torch.rand(12, 3), y), (torch.rand(4, 3), y[:4])) for _ in range(3)])


def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes every pool is asked for."""
    counts: list[int] = []
    make = pools.WorkerPool.__init__

    def counting(self: WorkerPool, handlers: Any, workers: int, *more: Any, **options: Any) -> None:
        counts.append(workers)
        make(self, handlers, 1, *more, **options)

    monkeypatch.setattr(pools.WorkerPool, "__init__", counting)
    monkeypatch.setattr(pools.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    return counts


@pytest.mark.parametrize(("wanted", "units", "want"), [(1000, 3, 3), (1000, 50, 4), (3, 50, 3), (1, 50, 1), (5, 0, 1)])
def test_only_processes_with_something_to_do_are_started(
    monkeypatch: pytest.MonkeyPatch, wanted: int, units: int, want: int
) -> None:
    monkeypatch.setattr(pools, "usable_cores", lambda: 2)
    assert pools.useful_processes(wanted, units) == want


def test_a_thousand_workers_are_a_few_processes_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = started(monkeypatch)
    result = fl.simulate("fedavg", federation(), rounds=1, engine={"workers": 1000})
    assert counts == [3]
    assert [n for n in result.notes if "engine.workers = 1000, but at most 4 processes start" in n]
    quiet = fl.simulate("fedavg", federation(), rounds=1, engine={"workers": 2})
    assert counts == [3, 2]
    assert not [n for n in quiet.notes if "engine.workers" in n]


def test_a_thousand_workers_of_a_comparison_and_of_a_search_are_a_few_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = started(monkeypatch)
    fl.compare(["fedavg", "local", "fedprox"], federation(), rounds=1, seeds=[0, 1], engine={"workers": 1000})
    assert max(counts) == 4
    counts.clear()
    document = {
        "name": "search", "rounds": 1, "data": {"source": "digits"}, "partition": {"kind": "iid", "clients": 3},
        "engine": {"workers": 1000}, "tune": {"trials": 1, "space": {"fedavg": {"local.lr": [0.1, 0.2]}}},
        "method": [{"algorithm": "fedavg"}],
    }  # fmt: skip
    search = Tuning(document, "search.toml", tmp_path / "search")
    assert [note for note in search.remarks if "at most 4 processes" in note]
    search.run()
    assert max(counts) <= 4


def test_a_process_that_may_have_no_others_refuses_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of multiprocessing.Pool, where runs that take all cores take one."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="2 workers cannot start, because this process may not start other processes"):
        WorkerPool([triple], 2)
    assert pools.usable_cores() == 1
    assert [*WorkerPool([triple], pools.usable_cores()).map(triple, torch.ones(1), [Task(0, torch.ones(1))])]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_worker_has_its_next_task_while_the_parent_is_busy(ahead: bool) -> None:
    """Of two workers each has two tasks; without ``ahead`` only those go on whose result was taken."""
    begun, gate = mmap.mmap(-1, 64), mmap.mmap(-1, 1)

    def mark(_: object, k: int) -> int:
        begun[k] = 1
        while k and not gate[0]:
            time.sleep(0.001)
        return k

    with WorkerPool([mark], 2, ahead=ahead) as pool:
        results = pool.map(mark, None, [*range(8)])
        assert next(results) == 0
        gate[0] = 1
        assert _soon(begun, 5, 600 if ahead else 0.3) == ahead
        assert [*results] == [*range(1, 8)]


def test_the_last_tasks_are_given_ahead_one_for_everybody() -> None:
    begun = mmap.mmap(-1, 64)

    def mark(_: object, k: int) -> int:
        begun[k] = 1
        return k

    with WorkerPool([mark], 2, ahead=True) as pool:
        results = pool.map(mark, None, [*range(4)])
        assert next(results) == 0
        assert _soon(begun, 4, 600)
        assert [*results] == [1, 2, 3]


def _soon(begun: mmap.mmap, count: int, seconds: float) -> bool:
    """Whether so many tasks begin before the time is over."""
    end = time.monotonic() + seconds
    while sum(begun[:]) < count and time.monotonic() < end:
        time.sleep(0.001)
    return sum(begun[:]) >= count


def test_a_worker_deletes_nothing_that_was_made_before_it() -> None:
    """A library's object may end threads of its own, which a fork has not, and wait for them."""
    deleted = mmap.mmap(-1, 64)

    class Session:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            deleted[0] = 1

    def collect(_: object, k: int) -> int:
        gc.collect()
        return deleted[0]

    gc.disable()
    try:
        Session()
        with WorkerPool([collect], 2) as pool:
            assert [*pool.map(collect, None, [0, 1])] == [0, 0]
    finally:
        gc.enable()
    gc.collect()
    assert deleted[0] == 1


def test_an_error_of_a_task_that_waited_is_raised() -> None:
    def fail(_: object, k: int) -> int:
        if k == 3:
            raise FedloomError("task 3")
        return k

    with WorkerPool([fail], 2, ahead=True) as pool, pytest.raises(FedloomError, match="task 3"):
        assert [*pool.map(fail, None, list(range(8)))] == []


@pytest.mark.parametrize("first", [False, True], ids=["after other answers", "before any answer"])
def test_a_worker_that_a_signal_has_stopped_is_reported_once(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_shared: object, k: int) -> int:
        if k == (0 if first else 5):
            os.kill(os.getpid(), signal.SIGSTOP)
        return k

    class Continue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            os.kill(record.args[0], signal.SIGCONT)  # type: ignore[index,arg-type]

    lines: list[str] = []
    monkeypatch.setattr(pools, "WATCH_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(pools, "MIN_SILENCE_SECONDS", 0.3)
    log = logging.getLogger("fedloom")
    handler = Continue()
    log.addHandler(handler)
    try:
        with WorkerPool([stop], 2) as pool:
            assert [*pool.map(stop, None, range(9))] == [*range(9)]
    finally:
        log.removeHandler(handler)
    assert sum("a signal has stopped it. 'kill -CONT" in line for line in lines) == 1  # others may be slow


def test_only_silence_far_longer_than_every_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Busy:
        pid = 1

        def is_stopped(self) -> bool:
            return False

    def pass_time(seconds: float, ends: int | None) -> None:
        """Workers are busy for some seconds, and then one of them answers."""
        silence.begin(workers)
        now[0] += seconds
        silence.look(workers)
        if ends is not None:
            silence.end(workers[ends])

    now, silence = [0.0], pools._SilenceWatch()
    workers: list[Any] = [Busy(), Busy()]
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds, ends in ((0.01, 0), (0.01, 0), (0.1, 0), (0.1, 1), (0.4, 0), (0.4, 1)):
        pass_time(seconds, ends)  # far longer, but not long
    monkeypatch.setattr(pools, "MIN_SILENCE_SECONDS", 0.1)
    pass_time(0.4, 0)
    pass_time(0.4, 1)  # long, but no longer than the other
    assert not caplog.records
    pass_time(10.0, None)
    assert len(caplog.records) == 2


def test_a_worker_that_takes_far_longer_than_the_others_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported, later = mmap.mmap(-1, 1), [0.0]

    class Reported(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            reported[0] = 1

    def wait(_shared: object, forever: bool) -> bool:
        while forever and not reported[0]:
            time.sleep(0.001)
        return forever

    lines: list[str] = []
    log, handler = logging.getLogger("fedloom"), Reported()
    log.addHandler(handler)
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))
    try:
        with WorkerPool([wait], 2) as pool:
            monkeypatch.setattr(pools, "WATCH_INTERVAL_SECONDS", 600.0)
            slow_parent = pool.map(wait, None, [False] * 4)
            next(slow_parent)
            later[0] = 3600.0  # of the parent, not of a worker
            list(slow_parent)
            assert not lines
            monkeypatch.setattr(pools, "WATCH_INTERVAL_SECONDS", 0.02)
            monkeypatch.setattr(pools, "MIN_SILENCE_SECONDS", 0.1)
            list(pool.map(wait, None, [False, False, True]))
    finally:
        log.removeHandler(handler)
    assert "the longest earlier answer took" in lines[-1]


def test_expensive_tasks_start_first() -> None:
    """The longest task ends with the shortest: one process computes it, and the other process all others in order."""
    context = multiprocessing.get_context("fork")
    begun, gate = context.SimpleQueue(), context.SimpleQueue()

    def begin(_shared: None, seconds: int) -> int:
        if seconds == 9:
            gate.get()
            return seconds
        begun.put(seconds)
        if seconds == 1:
            gate.put(None)
        return seconds

    tasks = [3, 9, 1, 7, 5]
    with WorkerPool([begin], 2) as pool:
        ended = dict(pool.map_unordered(begin, None, tasks, cost=float))
    assert [ended[k] for k in range(5)] == tasks
    assert [begun.get() for _ in tasks[1:]] == [7, 5, 3, 1]
