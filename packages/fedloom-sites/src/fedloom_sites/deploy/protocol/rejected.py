"""Rejected replies, and the parts of their text that a log or a terminal may show."""

from __future__ import annotations

import re

from fedloom.errors import FedloomError
from fedloom_sites.deploy.protocol.envelope import MAX_REASON_CHARACTERS

GROWTH_HINT = "If the data grow, declare a snapshot at the site: fedloom deploy snapshot"
"""Advice for a site whose number of samples has changed."""


class RejectedReply(FedloomError):
    """Error: a reply is rejected.

    Args:
        step: number of the check.
        reason: sentence that states the reason.
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step, self.reason = step, make_printable(reason)
        super().__init__(f"step {step}: {self.reason}")


class LateReply(RejectedReply):
    """Error: a valid reply to a message for which the server is no longer waiting."""

    def __init__(self) -> None:
        super().__init__(1, "the reply is too late, and its round continues without it")


class UnableReply(RejectedReply):
    """Error: a site could not write to its disk. The same message may be answered later."""

    def __init__(self, reason: str) -> None:
        super().__init__(2, f"the site cannot answer now: {reason}")


class UnusableUpload(RejectedReply):
    """Error: an upload is not finite, or exceeds a bound of the experiment."""


def make_printable(text: str) -> str:
    """Return external text, made safe to print and log."""
    return re.sub(r"[^\x20-\x7e]+", " ", str(text))[:MAX_REASON_CHARACTERS]
