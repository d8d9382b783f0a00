"""What is told of runs while they go on, to a terminal or a tracker, also by runs in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

from fedloom.engine.state import State

PAUSE = 0.2
"""Seconds between two messages of a run in another process that has nothing newly measured to tell."""

Figures = dict[str, float]
"""Figures of the whole federation by ``model/part/metric``."""


class Now(NamedTuple):
    """A run after a round.

    Attributes:
        round: rounds done.
        figures: what was measured since the last message, by round; in a run's first message everything so far.
    """

    round: int
    figures: dict[int, Figures]


Tell = Callable[[str, int, int, Now | None], None]
"""(label, seed, rounds in all, now): called after every round; now is None when a run has ended elsewhere."""


class Teller:
    """A callback of `simulate` that tells what is new.

    Args:
        send: gets every message.
        pause: seconds for which messages without figures are left out.
    """

    def __init__(self, send: Callable[[Now], None], pause: float = 0.0) -> None:
        self._send, self._pause, self._seen, self._last = send, pause, 0, 0.0

    def __call__(self, state: State) -> None:
        """Sends a message after a round."""
        fresh, now = state.records.items[self._seen :], time.monotonic()
        if not fresh and now - self._last < self._pause:
            return
        self._seen, self._last = len(state.records.items), now
        figures: dict[int, Figures] = {}
        for r in fresh:
            if r.total:
                name = "/".join(part for part in (r.model, r.part, r.metric) if part)
                figures.setdefault(r.round, {})[name] = float(r.values[0])
        self._send(Now(state.round, figures))


class Line:
    """Carries messages of forked processes to this one."""

    def __init__(self) -> None:
        self._queue: Any = get_context("fork").SimpleQueue()

    def sender(self, run: Any) -> Callable[[Now | None], None]:
        """What a process sends by that does the run of this number or name; None is the end of the run."""
        return lambda now: self._queue.put((run, now))

    @contextmanager
    def heard(self, hear: Callable[[Any, Now | None], None]) -> Iterator[None]:
        """While it is open, a thread passes on every message."""

        def listen() -> None:
            while (message := self._queue.get()) is not None:
                hear(*message)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._queue.put(None)
            thread.join()
