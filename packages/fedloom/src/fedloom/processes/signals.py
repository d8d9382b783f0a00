"""Ctrl-C: the round at hand is finished and saved. A second one stops at once.

What starts several processes, torchrun for one, passes the signal on that they have had already from the terminal: two
within a second are one.
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
"""Seconds within which a signal counts once."""


class _StopRequest:
    """Handler of the signal, and since when the user has been asking."""

    since = math.inf

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if time.monotonic() > self.since + REPEAT_SECONDS:
            raise KeyboardInterrupt
        self.since = min(self.since, time.monotonic())


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that is true once the user has requested a stop. An enclosing `interruptible` receives it too.

    Outside the main thread signals cannot be caught, and it is always false.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handler = _StopRequest()
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: handler.since < math.inf
    finally:
        signal.signal(signal.SIGINT, before)
        if isinstance(before, _StopRequest):
            before.since = min(before.since, handler.since)
