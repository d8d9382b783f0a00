"""Events: progress reports of runs for terminals, trackers and callbacks. Runs in other processes also send events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import NamedTuple

from fedloom.engine.checks.guard import Guard
from fedloom.engine.records import Divergence
from fedloom.engine.setting import Setting
from fedloom.engine.state import State

EVENT_INTERVAL_SECONDS = 0.2
"""Minimum number of seconds between two events of a run in another process if there are no new measurements."""

ERROR_GRACE_SECONDS = 2.0
"""Number of seconds for delivering queued events after an error."""

Figures = dict[str, float]
"""Metrics of the whole federation, keyed by ``model/part/metric``."""


class Event(NamedTuple):
    """State of a run after a round, or at the end of the run.

    Attributes:
        label: label of the method.
        seed: seed of the run.
        rounds: total number of rounds of the run.
        round: number of rounds completed so far.
        figures: metrics measured since the last event, keyed by round. The first event of a run contains all metrics
            that have been measured so far.
        pace: recent time per round in seconds, including a proportional share of the evaluation time. None while the
            time is unknown.
        diverged: sentence that describes the divergence, if this event is the first to report it. Empty otherwise. The
            run continues.
        status: word that states how the run ended, such as "failed". Empty while the run is in progress.
    """

    label: str
    seed: int
    rounds: int
    round: int
    figures: Mapping[int, Figures] = {}
    pace: float | None = None
    diverged: str = ""
    status: str = ""


Listener = Callable[[Event], object]
"""Function that is called with every event.

Its return value is ignored. If it raises an exception, the exception is reported as a warning and does not end the run.
"""


class EventEmitter:
    """Callback for `simulate` that converts a run's states to events.

    Args:
        listeners: functions that are called with every event.
        label: label of the method.
        setting: setting of the run.
        pause: minimum time in seconds between events that contain no new metrics.
    """

    def __init__(self, listeners: tuple[Listener, ...], label: str, setting: Setting, pause: float = 0.0) -> None:
        self._listeners, self._label, self._setting, self._pause = listeners, label, setting, pause
        self._records_read, self._last, self._divergence, self._guard = 0, 0.0, Divergence(), Guard()

    def __call__(self, state: State) -> None:
        """Send an event after a round, unless there are no new metrics and the last event was sent too recently."""
        if len(state.records.items) > self._records_read or time.monotonic() - self._last >= self._pause:
            self._emit(state, "")

    def end(self, state: State | None, status: str) -> None:
        """Send the event at the end of a run. The state is None if user code failed."""
        if state is not None:
            self._emit(state, status)
            return
        self._tell(Event(self._label, self._setting.seed, self._setting.rounds, 0, status=status))

    def _emit(self, state: State, status: str) -> None:
        figures: dict[int, Figures] = {}
        for r in state.records.items[self._records_read :]:
            if r.total:
                name = "/".join(part for part in (r.model, r.part, r.metric) if part)
                figures.setdefault(r.round, {})[name] = float(r.values[0])
        self._records_read, self._last = len(state.records.items), time.monotonic()
        setting, pace = self._setting, state.times.pace(self._setting.evaluate.every)
        diverged = self._divergence.read(state.records)
        self._tell(Event(self._label, setting.seed, setting.rounds, state.round, figures, pace, diverged, status))

    def _tell(self, event: Event) -> None:
        for hear in self._listeners:
            self._guard.call("listener", hear, event)


class EventQueue:
    """Queue that carries events from forked processes to this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event | None] = get_context("fork").SimpleQueue()

    def send(self, event: Event) -> None:
        """Send an event to the process that listens."""
        self._queue.put(event)

    @contextmanager
    def listening(self, *listeners: Listener) -> Iterator[None]:
        """Deliver all events from a thread during the block, and for up to `ERROR_GRACE_SECONDS` after an error."""
        guard = Guard()

        def listen() -> None:
            while (event := self._queue.get()) is not None:
                for hear in listeners:
                    guard.call("listener", hear, event)

        def end() -> None:
            self._queue.put(None)
            thread.join()

        thread, patience = threading.Thread(target=listen, daemon=True), None
        thread.start()
        try:
            yield
        except BaseException:
            patience = ERROR_GRACE_SECONDS  # a killed process may hold the queue, or may have sent half an event
            raise
        finally:
            ending = threading.Thread(target=end, daemon=True)
            ending.start()
            ending.join(patience)
