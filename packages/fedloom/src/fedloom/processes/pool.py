"""Worker pool, which computes the chunks of a round in this process or in forked processes on this machine.

In both cases, the results are bitwise identical.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedloom.errors import ConfigError, FedloomError
from fedloom.processes.buffers import SharedBuffer, pack_message, unpack_message

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

Handler = Callable[[Any, Any], Any]
"""Function that computes a result from ``(shared, task)``."""

WATCH_INTERVAL_SECONDS = 1.0
"""Number of seconds between two checks for unresponsive workers."""
MIN_SILENCE_SECONDS, SILENCE_MULTIPLE = 10.0, 10
"""Minimum number of seconds, and multiple of the longest response time, before a silent worker is reported."""
POOL_LOG = logging.getLogger("fedloom")

MAX_PIPE_BYTES = 1 << 14
"""Maximum number of bytes of a message that a pipe can hold while the other process is also sending and not reading."""


def usable_cores() -> int:
    """Return the number of processor cores that this process may use.

    It is 1 if this process may not start other processes.
    """
    if multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


PROCESSES_PER_CORE = 2
"""Maximum number of single-threaded processes per core, since one process may wait while another one computes."""


def useful_processes(wanted: int, units: int) -> int:
    """Return the useful number of processes: at most `PROCESSES_PER_CORE` per core and one per unit of work."""
    return max(1, min(wanted, units, PROCESSES_PER_CORE * usable_cores()))


class Workers(Protocol):
    """Processes that compute tasks, which may be this process, forks of it, or ranks."""

    def map(self, handler: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[R]:
        """Yield a handler's result for each task, in the order of the tasks."""
        ...

    def call_once(self, ids: Tensor, call: Callable[[], R]) -> R:
        """Return the result of a function that is called in only one process and can access rows of some clients."""
        ...


class WorkerPool:
    """Processes that apply handlers to chunks.

    Args:
        handlers: functions ``handler(shared, task)`` that may be passed to `map`. Forked processes know no other
            functions.
        workers: number of forked processes. If it is 1, this process performs all computations itself.
        down_bytes: space in bytes for the data that all chunks share.
        up_bytes: space in bytes for the result of one chunk.
        ahead: True if a worker receives its next task while it computes the current one, so that it does not have to
            wait for this process. This option is intended for short tasks that have similar lengths and are not
            interrupted.
        nested: True if the workers themselves are allowed to start workers.

    Raises:
        ConfigError: this process is not allowed to start other processes.
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        workers: int,
        down_bytes: int = 0,
        up_bytes: int = 0,
        ahead: bool = False,
        nested: bool = False,
    ) -> None:
        if workers > 1 and multiprocessing.current_process().daemon:
            raise ConfigError(
                f"{workers} workers cannot start, because this process may not start other processes, "
                "like the processes of multiprocessing.Pool. Use workers = 1, or "
                "concurrent.futures.ProcessPoolExecutor instead of multiprocessing.Pool"
            )
        self._handlers = handlers
        self._down = SharedBuffer(down_bytes if workers > 1 else 0)
        self._depth = 2 if ahead else 1
        make = range(workers if workers > 1 else 0)
        self._workers = [_Worker(handlers, self._down, up_bytes, self._depth, nested) for _ in make]

    def map(
        self, handler: Callable[[S, T], R], shared: S, tasks: Sequence[T], interrupted: Callable[[], bool] | None = None
    ) -> Iterator[R]:
        """Yield a handler's result for each task, in the order of the tasks. Tasks are also started in this order.

        The arguments and errors are the same as for `map_unordered`.
        """
        done: dict[int, R] = {}
        turn = 0
        for k, result in self.map_unordered(handler, shared, tasks, interrupted):
            done[k] = result
            while turn in done:
                turn += 1
                yield done.pop(turn - 1)

    def map_unordered(
        self,
        handler: Callable[[S, T], R],
        shared: S,
        tasks: Sequence[T],
        interrupted: Callable[[], bool] | None = None,
        cost: Callable[[T], float] | None = None,
    ) -> Iterator[tuple[int, R]]:
        """Yield the number and the result of each task as soon as the task ends.

        Args:
            handler: one of the handlers of the pool.
            shared: first argument of all calls.
            tasks: second argument of each call. Tasks are started in this order, or in the order of their cost.
            interrupted: function that is called every second. Once it returns True, no more tasks are started, and the
                running tasks receive an interrupt signal.
            cost: function that returns the expected time of a task. If it is given, a free process always starts the
                remaining task with the highest cost, so that a long task is not the last one.

        Raises:
            FedloomError: a handler has raised an error, or a worker has died.
        """
        if not self._workers:
            for k, task in enumerate(tasks):
                yield k, handler(shared, task)
            return
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Connection, tuple[list[int], _Worker]] = {worker.pipe: ([], worker) for worker in self._workers}
        first = [("share", self._handlers.index(handler), self._down.pack(shared))]
        silence = _SilenceWatch()
        while True:
            if interrupted is not None and interrupted():
                waiting.clear()
                for sent, worker in busy.values():
                    if sent:
                        worker.interrupt()
                interrupted = None
            if not waiting and not any(sent for sent, _ in busy.values()):
                return
            if cost is not None:
                waiting.sort(key=lambda task: (cost(task[1]), -task[0]))
            self._send_tasks(waiting, list(busy.values()), *first)
            first = []
            silence.begin(worker for sent, worker in busy.values() if sent)
            ready = wait([pipe for pipe, (sent, _) in busy.items() if sent], WATCH_INTERVAL_SECONDS)
            if not ready:
                silence.look(worker for sent, worker in busy.values() if sent)
            done = list[tuple[int, R]]()
            for pipe in ready:
                sent, worker = busy[pipe]  # type: ignore[index]
                done.append((sent.pop(0), worker.receive()))
                silence.end(worker)
                self._send_tasks(waiting, [(sent, worker)])
            yield from done

    def _send_tasks(
        self, waiting: list[tuple[int, T]], places: list[tuple[list[int], _Worker]], *first: tuple[str, object, object]
    ) -> None:
        """Send waiting tasks to workers, starting from the end of the list, with one message for each worker.

        Each message begins with ``first``.

        A worker receives an additional task only if every worker receives one, or if more tasks than workers remain.
        All workers then finish at about the same time.
        """
        batches: list[list[tuple[Any, ...]]] = [[*first] for _ in places]
        for depth in range(self._depth):
            everybody = sum(len(sent) == depth for sent, _ in places) == len(self._workers) <= len(waiting)
            for batch, (sent, _) in zip(batches, places, strict=True):
                if len(sent) == depth and (everybody or len(waiting) > depth * len(self._workers)):
                    task = ("task", waiting[-1][1])
                    if depth == 0 or len(pack_message(task)) <= MAX_PIPE_BYTES:
                        batch.append(task)
                        sent.append(waiting.pop()[0])
        for batch, (_, worker) in zip(batches, places, strict=True):
            if len(batch) > len(first):
                worker.send(batch)

    def call_once(self, ids: Tensor, call: Callable[[], R]) -> R:
        """Return the result of a function that is called in this process."""
        return call()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SilenceWatch:
    """Logs the workers that have not answered for much longer than the longest response time so far."""

    def __init__(self) -> None:
        self._since: dict[_Worker, float] = {}
        self._longest = 0.0
        self._reported: set[_Worker] = set()

    def begin(self, workers: Iterable[_Worker]) -> None:
        """Record that workers have received a task."""
        now = time.monotonic()
        for worker in workers:
            self._since.setdefault(worker, now)

    def look(self, workers: Iterable[_Worker]) -> None:
        """Log the workers that should have answered by now."""
        for worker in workers:
            silent = time.monotonic() - self._since[worker]
            if worker in self._reported or silent < max(MIN_SILENCE_SECONDS, SILENCE_MULTIPLE * self._longest):
                continue
            if worker.is_stopped():
                why = f"a signal has stopped it. 'kill -CONT {worker.pid}' continues it"
            elif self._longest:
                why = f"the longest earlier answer took {self._longest:.1f} s. It may lack memory, or wait for a disk"
            else:
                continue
            self._reported.add(worker)
            POOL_LOG.warning("worker process %d has been silent for %.0f s: %s", worker.pid, silent, why)

    def end(self, worker: _Worker) -> None:
        """Record that a worker has answered."""
        now = time.monotonic()
        if worker not in self._reported:
            self._longest = max(self._longest, now - self._since[worker])
        del self._since[worker]
        self._reported.discard(worker)


class _Worker:
    def __init__(
        self, handlers: Sequence[Handler], down: SharedBuffer, up_bytes: int, depth: int, nested: bool
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, child_pipe = context.Pipe()
        ups = [SharedBuffer(up_bytes) for _ in range(depth)]
        self._turn = cycle(ups)
        self._process = context.Process(target=_serve_worker, args=(child_pipe, handlers, down, ups), daemon=not nested)
        self._process.start()
        child_pipe.close()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid or 0

    def is_stopped(self) -> bool:
        """Return True if the worker's process was stopped by a signal or a debugger."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in "Tt"

    def send(self, orders: list[tuple[Any, ...]]) -> None:
        """Send tasks to the worker."""
        try:
            self.pipe.send_bytes(pack_message(orders))
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        """Return the worker's answer. If a handler has raised an error in the worker, the same error is raised here."""
        try:
            message = self.pipe.recv_bytes()
        except (OSError, EOFError) as error:
            raise self._died() from error
        ok, result = next(self._turn).unpack(message, copy=True)
        if not ok:
            raise result
        return result

    def interrupt(self) -> None:
        """Send an interrupt signal to the worker, so that it stops its current task."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)

    def _died(self) -> FedloomError:
        self._process.join(1)
        return FedloomError(
            f"a worker process died (exit code {self._process.exitcode}; out of memory?). Run again to resume, "
            "with fewer workers or a smaller chunk if it happens again"
        )

    def close(self) -> None:
        """End the process of the worker."""
        with suppress(OSError):
            self.pipe.send_bytes(pack_message([("stop",)]))
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve_worker(pipe: Connection, handlers: Sequence[Handler], down: SharedBuffer, ups: list[SharedBuffer]) -> None:
    _end_with_parent()
    gc.freeze()  # deleting the parent's objects could wait for missing threads
    os.setpgrp()  # only the parent receives Ctrl-C
    torch.set_num_threads(1)
    handler: Handler | None = None
    shared: Any = None
    turn = cycle(ups)
    with suppress(EOFError, OSError):
        while True:
            for kind, *content in unpack_message(pipe.recv_bytes()):
                if kind == "stop":
                    return
                if kind == "share":
                    handler, shared = handlers[content[0]], down.unpack(content[1], copy=False)
                    continue
                assert handler is not None
                try:
                    answer = (True, handler(shared, content[0]))
                except Exception as error:
                    answer = (False, error)
                pipe.send_bytes(next(turn).pack(answer))


def _end_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies for any reason (only on Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
