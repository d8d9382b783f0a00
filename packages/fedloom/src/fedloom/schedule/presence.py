"""Presence: the times when devices are available.

A device works only during the intervals in which it is available, and pauses between them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from fedloom.errors import ConfigError


class Presence:
    """Intervals during which each client is available.

    Args:
        intervals: intervals [start, end) of each client, in seconds within [0, period]. A client without intervals is
            always available.
        period: length in seconds of the period after which the intervals repeat. If the period is infinite, a client is
            no longer available after its last interval.

    Raises:
        ConfigError: intervals are empty, overlap or exceed the period.
    """

    def __init__(self, intervals: Mapping[int, Sequence[tuple[float, float]]], period: float = math.inf) -> None:
        self.period = period
        self._starts: dict[int, list[float]] = {}
        self._done: dict[int, list[float]] = {}
        for client, pairs in intervals.items():
            ordered = sorted(pairs)
            ends = [0.0, *(end for _, end in ordered)]
            for (start, end), before in zip(ordered, ends, strict=False):
                if not before <= start < end <= period:
                    raise ConfigError(
                        f"presence of client {client}: intervals [start, end) must be in order, must not overlap, and "
                        f"must lie within 0..{period:g} s, got [{start:g}, {end:g}) after {before:g}"
                    )
            done = [0.0]
            for start, end in ordered:
                done.append(done[-1] + end - start)
            self._starts[client], self._done[client] = [start for start, _ in ordered], done

    def presence_seconds(self, client: int, time: float) -> float:
        """Return the number of seconds that a client is available between 0 and a time."""
        if client not in self._starts:
            return time
        starts, done = self._starts[client], self._done[client]
        laps, rest = divmod(time, self.period) if math.isfinite(self.period) else (0.0, time)
        j = bisect_right(starts, rest)
        within = min(done[j - 1] + rest - starts[j - 1], done[j]) if j else 0.0
        return laps * done[-1] + within

    def end(self, client: int, start: float, busy: float) -> float:
        """Return when a client that starts at ``start`` has worked for ``busy`` seconds, or inf if it never does."""
        if client not in self._starts:
            return start + busy
        starts, done = self._starts[client], self._done[client]
        target, whole = self.presence_seconds(client, start) + busy, done[-1]
        if not math.isfinite(target) or (math.isinf(self.period) and target > whole):
            return math.inf
        laps = max(math.ceil(target / whole) - 1, 0) if math.isfinite(self.period) else 0
        rest = min(target - laps * whole, whole)
        j = max(bisect_left(done, rest), 1)
        before = laps * self.period if laps else 0.0
        return max(before + starts[j - 1] + rest - done[j - 1], start)

    def next(self, client: int, time: float) -> float:
        """Return the earliest time, not before ``time``, when a client is available, or inf if there is none."""
        if client not in self._starts:
            return time
        starts, done = self._starts[client], self._done[client]
        laps, rest = divmod(time, self.period) if math.isfinite(self.period) else (0.0, time)
        j = bisect_right(starts, rest)
        if j and rest < starts[j - 1] + done[j] - done[j - 1]:
            return time
        if j < len(starts):
            return time - rest + starts[j]
        return (laps + 1) * self.period + starts[0] if math.isfinite(self.period) else math.inf
