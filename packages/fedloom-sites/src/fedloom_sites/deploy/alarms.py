"""A site's alarms about rejected and repeated messages from its server, in the site's log and status.

An honest server repeats a message only if an answer was lost or the site could not write to its disk, and it does not
keep sending messages that the site rejects. Many repeated and rejected messages suggest that a server is probing the
site. Alarms never leave the site.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import escape_line
from fedloom_sites.deploy.audit import SENT_FILE, Audit, read_entries
from fedloom_sites.deploy.settings import Site

MAX_REFUSALS = 2  # for a message that was sent before a change of the run, and for its repetition
"""Maximum number of rejected messages that do not raise an alarm."""
MAX_REPEATS = 4  # a server sends a message again after each deadline, until its patience ends
"""Maximum number of answers to the same message that do not raise an alarm."""
MAX_SESSIONS = 12  # in a small run, one new session for each site that drops out
"""Maximum number of secure aggregation sessions in one round that do not raise an alarm, in addition to those for
agreed questions."""
ALARM_ENTRY = "alarm"
"""Value of ``what`` in the log lines that contain alarms."""


class Alarms:
    """Counts of the messages that a site answered or rejected in one experiment, restored from its log.

    Args:
        folder: folder with the site's state in this experiment.
        questions: function that returns how many analysis questions the site has agreed to answer in a round.
    """

    def __init__(self, folder: Path, questions: Callable[[int], int] = lambda t: 0) -> None:
        self._path, self._questions = folder / SENT_FILE, questions
        self._loaded = False
        self._refused, self._answers, self._sessions = 0, Counter[str](), Counter[int]()

    def note(self, line: Mapping[str, Any], reason: str) -> list[str]:
        """Count a message, and return the alarms that it raises.

        An alarm is repeated whenever its count has doubled.

        Args:
            line: log entry for the message (see `Client`).
            reason: reason why the message was refused. Empty if the message was answered.
        """
        if not self._loaded:
            self._loaded = True
            for earlier in read_entries(self._path):
                self._count(earlier)
        self._count(line)
        kind, t, alarms = line.get("kind"), line.get("round"), list[str]()
        what = f"the newest message is of the kind {kind}, round {t}"
        if line.get("status") == "refused" and _is_due(self._refused, MAX_REFUSALS):
            alarms.append(f"this site rejected {self._refused} of the server's messages. {what}: {reason}")
        repeats = self._answers[str(line.get("asked"))]
        if kind not in ("hello", "relay") and _is_due(repeats, MAX_REPEATS):
            alarms.append(
                f"the server has sent the same message {repeats} times. It {what.removeprefix('the newest message ')}"
            )
        sessions = self._sessions[int(t or 0)]
        if (
            kind == "keys"
            and sessions > MAX_SESSIONS
            and _is_due(sessions, MAX_SESSIONS + self._questions(int(t or 0)))
        ):
            alarms.append(f"the server has started {sessions} sessions for round {t}")
        return [f"ALARM: {one}. Ask the coordinator, and keep the log {SENT_FILE}" for one in alarms]

    def _count(self, line: Mapping[str, Any]) -> None:
        if line.get("what") != "sent":
            return
        self._refused += line.get("status") == "refused"
        message = str(line.get("asked"))
        self._answers[message] += 1
        if line.get("kind") == "keys" and self._answers[message] == 1:
            self._sessions[int(line.get("round") or 0)] += 1


def message_digest(head: Mapping[str, Any]) -> str:
    """Return the digest of a message without its nonce, which does not change when the message is repeated."""
    message = {name: value for name, value in head.items() if name != "nonce"}
    return hashlib.sha256(repr(sorted(message.items())).encode()).hexdigest()


def site_status(site: Site) -> dict[str, Any]:
    """Return a summary of a site's log: messages, refused and repeated messages, and alarms.

    Raises:
        RunDirError: the log cannot be read.
    """
    lines = read_entries(site.folder / SENT_FILE)
    sent = [line for line in lines if line.get("what") == "sent"]
    message = Counter(line.get("asked") for line in sent if line.get("kind") != "hello")
    return {
        "site": site.site,
        "messages": len(sent),
        "refused": sum(line.get("status") == "refused" for line in sent),
        "repeated": sum(count - 1 for count in message.values()),
        "last": sent[-1].get("time") if sent else None,
        "alarms": [
            {"time": line.get("time"), "reason": str(line.get("reason"))}
            for line in lines
            if line.get("what") == ALARM_ENTRY
        ],
    }


def raise_alarm(log: Audit, reason: str) -> None:
    """Write an alarm to a site's log.

    Raises:
        CheckpointError: the disk is full, or the line cannot be written.
    """
    log.write(ALARM_ENTRY, reason=escape_line(reason))


def _is_due(count: int, most: int) -> bool:
    """Return True if a count exceeds the limit for the first time, or has doubled since the last alarm."""
    quotient, rest = divmod(count, most + 1)
    return count > most and rest == 0 and quotient & (quotient - 1) == 0
