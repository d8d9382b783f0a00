"""Ctrl-C: the round at hand is finished and saved; a second one stops at once.

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

SAME = 1.0
"""Seconds within which a signal counts once."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether the user has asked to stop.

    Outside the main thread signals cannot be caught, and it always says no.
    """
    asked = math.inf

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if time.monotonic() > asked + SAME:
            raise KeyboardInterrupt
        asked = min(asked, time.monotonic())

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked < math.inf
    finally:
        signal.signal(signal.SIGINT, before)
