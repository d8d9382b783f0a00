"""Handling of Ctrl-C: the current round is completed and saved. A second Ctrl-C stops the program immediately.

Programs that start several processes, such as torchrun, forward a signal that the processes have already received from
the terminal. Two signals within a second therefore count as one.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_SECONDS = 1.0
"""Repeated signals within this number of seconds count as one signal."""


class _StopRequest:
    """Handler of the signal, together with the time of the first request to stop."""

    since = math.inf

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if time.monotonic() > self.since + REPEAT_SECONDS:
            raise KeyboardInterrupt
        self.since = min(self.since, time.monotonic())


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the user has requested a stop.

    Nested `interruptible` blocks share a request: outer blocks receive it too, and inner blocks that begin later start
    with it.

    Signals can only be received in the main thread. In any other thread, the function always returns False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handler = _StopRequest()
    before = signal.signal(signal.SIGINT, handler)
    if isinstance(before, _StopRequest):
        handler.since = min(handler.since, before.since)
    try:
        yield lambda: handler.since < math.inf
    finally:
        signal.signal(signal.SIGINT, before)
        if isinstance(before, _StopRequest):
            before.since = min(before.since, handler.since)
