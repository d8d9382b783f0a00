"""Stages of a session of secure aggregation, and the messages that lead from one stage to the next.

The server and the sites follow the same stages.

    kind             answered from    leads to    carries to the site, and back
    keys             (any)            ADVERTISED  nothing. Public keys and a commitment
    shares           ADVERTISED       SHARED      all keys. Sealed shares of this site's secrets
    masked, tally    SHARED           MASKED      terms and the others' shares. A masked vector, or accusations
    open             SHARED           (same)      accusations. The one-time keys of the shares they are about
    agree            MASKED           AGREED      the sites whose vector arrived. A signature
    count            MASKED           COUNTED     signatures of the sum's sites, digest of their counters. Shares
    unmask           MASKED           REVEALED    signatures of the sum's sites, counters of all. Shares of secrets

Between SHARED and MASKED, a site is at stage RECEIVED as soon as it has read the shares of the other sites. If a
message is repeated, the answer is the same. At REVEALED, a site's secrets have been deleted, and it answers only
`unmask`.

If sites verify the sums, a message of the kind `relay` carries all messages of an earlier session (see
`fedloom_sites.deploy.relay`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from fedloom_sites.deploy.protocol.envelope import Kind
from fedloom_sites.deploy.secure.protocol import ProtocolBroken


class Stage(IntEnum):
    """Stage of a session at the server or at a site."""

    NEW = 0
    ADVERTISED = 1
    SHARED = 2
    RECEIVED = 3
    MASKED = 4
    AGREED = 5
    COUNTED = 6
    REVEALED = 7


STAGE_MOVES: Mapping[Kind, tuple[Stage, Stage]] = {
    "keys": (Stage.NEW, Stage.ADVERTISED),
    "shares": (Stage.ADVERTISED, Stage.SHARED),
    "masked": (Stage.SHARED, Stage.MASKED),
    "tally": (Stage.SHARED, Stage.MASKED),
    "open": (Stage.SHARED, Stage.SHARED),
    "agree": (Stage.MASKED, Stage.AGREED),
    "count": (Stage.MASKED, Stage.COUNTED),
    "unmask": (Stage.MASKED, Stage.REVEALED),
}
"""Earliest stage for answering each kind of message, and the stage that the message leads to."""

REVEALED_ENTRY = "told"
"""Key of the shares that the site revealed, in a site's record of a session."""
ENTRY_STAGES = {
    "advert": Stage.ADVERTISED, "shares": Stage.SHARED, "held": Stage.RECEIVED, "vector": Stage.MASKED,
    "arrived": Stage.AGREED, "counted": Stage.COUNTED, REVEALED_ENTRY: Stage.REVEALED,
}  # fmt: skip
"""Stage that each entry of a site's session record indicates."""


class SessionProgress(NamedTuple):
    """Current stage of a session."""

    stage: Stage = Stage.NEW

    def require_stage(self, stage: Stage) -> SessionProgress:
        """Check that the session is at the given stage and still stores its secrets, and return its progress.

        Raises:
            ProtocolBroken: the session has not yet reached the stage, or has ended.
        """
        if self.stage < stage or self.stage is Stage.REVEALED:
            raise ProtocolBroken(
                "the message belongs to a different session, or this session has ended or has not reached this step"
            )
        return self

    def advance(self, kind: Kind) -> SessionProgress:
        """Return the stage that follows a message of the given kind.

        Raises:
            ProtocolBroken: the session has not yet reached the stage for this message, or has ended.
        """
        earliest, stage = STAGE_MOVES[kind]
        if kind == "unmask" and self.stage is Stage.REVEALED:
            return self
        return SessionProgress(max(self.require_stage(earliest).stage, stage))


def read_progress(record: Mapping[str, object]) -> SessionProgress:
    """Return the stage of a session according to the site's record."""
    return SessionProgress(max((stage for entry, stage in ENTRY_STAGES.items() if entry in record), default=Stage.NEW))
