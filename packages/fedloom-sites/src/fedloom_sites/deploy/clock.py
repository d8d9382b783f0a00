"""Comparison of a site's clock with the server's clock, because connection signatures contain the time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

MAX_CLOCK_LEAD, MAX_CLOCK_LAG = timedelta(seconds=5), timedelta(seconds=300)
"""Maximum differences between a site's clock and the server's clock accepted by Flower."""


def clock_fault(date: str | None) -> str | None:
    """Return a clause about an error in this machine's clock, or None if the server accepts the clock.

    Args:
        date: header ``Date`` of the server's answer. If it is missing, the clocks cannot be compared.
    """
    if date is None:
        return None
    ahead = datetime.now(UTC) - parsedate_to_datetime(date)
    if ahead > MAX_CLOCK_LEAD + timedelta(seconds=1):  # the header has whole seconds
        return (
            f"the clock is {ahead.total_seconds():.0f} s ahead of the server's clock, but at most "
            f"{MAX_CLOCK_LEAD.total_seconds():.0f} s are allowed"
        )
    if ahead < -MAX_CLOCK_LAG:
        return (
            f"the clock is {-ahead.total_seconds():.0f} s behind the server's clock, but at most "
            f"{MAX_CLOCK_LAG.total_seconds():.0f} s are allowed"
        )
    return None


def rejected_signature_reason(date: str | None) -> str:
    """Return one line with the reason for a rejected signature of this site, and the fix.

    Args:
        date: header ``Date`` of the server's answer.
    """
    fault = clock_fault(date)
    if fault is not None:
        return (
            f"the server rejects this site's signature, because {fault}. A signature from the future or the distant "
            "past is not valid. Synchronize the clock with NTP, then start the site again"
        )
    return (
        "the server rejects this site's signature although the clocks agree. The key is no longer known to the server "
        "because it was revoked or replaced. Ask the coordinator"
    )
