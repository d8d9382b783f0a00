"""Rejected replies, and the text that a log or a terminal may show of them."""

from __future__ import annotations

import re

from fedloom.errors import FedloomError
from fedloom_sites.deploy.protocol.envelope import MAX_REASON_CHARACTERS


class Rejected(FedloomError):
    """A reply that does not count.

    Args:
        step: number of the check.
        reason: a sentence.
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step, self.reason = step, plain(reason)
        super().__init__(f"step {step}: {self.reason}")


class LateReply(Rejected):
    """A sound reply to a message that is not waited for any more."""

    def __init__(self) -> None:
        super().__init__(1, "too late, its round continues without it")


def plain(text: str) -> str:
    """Make a foreign sentence safe to print and to log."""
    return re.sub(r"[^\x20-\x7e]+", " ", str(text))[:MAX_REASON_CHARACTERS]
