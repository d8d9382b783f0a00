"""Protects a run from code that only observes it: callbacks, listeners and trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fedloom.errors import RunStopped, cause_of

GUARD_LOG = logging.getLogger("fedloom")


class Guard:
    """Calls functions whose failure does not end the run. The first failure of each function is logged as a warning.

    `RunStopped` ends the run. An error that is not an `Exception`, such as KeyboardInterrupt, ends it too.

    Attributes:
        warnings: the sentences.
    """

    def __init__(self) -> None:
        self.warnings = list[str]()
        self._failed = set[int]()

    def call(self, what: str, function: Callable[..., object], *arguments: Any) -> object:
        """Return the result of a function, or None if it fails.

        Args:
            what: role of the function, e.g. ``"callback"``.
            function: function to call.
            arguments: its arguments.

        Raises:
            RunStopped: the function requests that the run end.
        """
        try:
            return function(*arguments)
        except RunStopped:
            raise
        except Exception as error:
            if id(function) not in self._failed:
                self._failed.add(id(function))
                name = getattr(function, "__name__", type(function).__name__)
                self.warn(f"{what} {name} failed: {cause_of(error)}. The run continues and will call it again")
            return None

    def warn(self, sentence: str) -> None:
        """Log a sentence and store it."""
        self.warnings.append(sentence)
        GUARD_LOG.warning("%s", sentence)
