"""Protection of a run from errors in code that only observes it, such as callbacks, listeners and trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fedloom.errors import RunStopped, describe_cause

GUARD_LOG = logging.getLogger("fedloom")


class Guard:
    """Wrapper for calls whose errors must not end a run. Each function's first failure is logged as a warning.

    Only `RunStopped` and errors that are not an `Exception` (such as KeyboardInterrupt) end a run. All other errors are
    caught.

    Attributes:
        warnings: all warnings so far, in order.
    """

    def __init__(self) -> None:
        self.warnings = list[str]()
        self._failed = set[int]()

    def call(self, what: str, function: Callable[..., object], *arguments: Any) -> object:
        """Call a function and return its result, or None if it raises an error.

        Args:
            what: the function's role in a warning, e.g. ``"callback"``.
            function: function to call.
            arguments: arguments of the function.

        Raises:
            RunStopped: the function ends the run.
        """
        try:
            return function(*arguments)
        except RunStopped:
            raise
        except Exception as error:
            if id(function) not in self._failed:
                self._failed.add(id(function))
                name = getattr(function, "__name__", type(function).__name__)
                self.warn(f"{what} {name} failed: {describe_cause(error)}. The run continues and will call it again")
            return None

    def warn(self, sentence: str) -> None:
        """Log a warning and add it to `warnings`."""
        self.warnings.append(sentence)
        GUARD_LOG.warning("%s", sentence)
