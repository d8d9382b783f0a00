"""Changes: which sites sums are of, and how often each has left or returned.

Models of neighboring rounds hardly differ, and a server can make them differ by nothing. So two sums of which one lacks
a site reveal what this site sends. Sums are therefore of the same sites. If one stays away, the others sign a sum
without it (`protocol.statement`), and later a sum with it again. Each such change exposes one difference of that site,
and each site counts the changes of all others: beyond the agreed number it signs no sum of these sites, and with fewer
signatures than the threshold no site opens one. What sites have sent that have changed is taken to be known, so every
sum has enough sites that never have: whatever combination of sums a server makes, it is of all of these or of none. A
site whose weight changes against the weights of the others counts as
changed too: two sums of the same sites with different weights are as revealing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom_sites.deploy.secure.protocol import Broken

MAX_CHANGES = 4
"""Changes of one site: it may be away twice in the sums over its data. A difference of rows of one site is what secure
aggregation hides, so the number is small. A site that is away more often has to be waited for."""
SAME_WEIGHT = 1e-6
"""Relative difference below which two weights are the same number, computed for other sites in float32."""

LOST_RECORD: Mapping[str, Any] = {"lost": True}
"""The record of a site that does not know the sites of its newest sum any more."""

Weights = Mapping[str, Mapping[str, Sequence[float]]]
"""What each site counts in a sum, by what is summed and by site."""


class Changes(NamedTuple):
    """The sites of the newest sum, and the changes before.

    Attributes:
        record: plain values: `sites`, their `weights` by what is summed, and the number of `changes` by site. Empty
            before the first sum.
        limit: most changes of a site.
        steady: fewest sites of a sum that have never changed.
    """

    record: Mapping[str, Any]
    limit: int
    steady: int = 0

    @property
    def sites(self) -> list[str]:
        """Sites of the newest sum. None before the first."""
        return [*self.record.get("sites", ())]

    def changed(self, sites: Collection[str], weights: Weights) -> set[str]:
        """Return the sites in which a sum differs from the newest one.

        Args:
            sites: of the sum.
            weights: of these.
        """
        if "sites" not in self.record:
            return set()
        changed = {*self.sites} ^ {*sites}
        for what, now in weights.items():
            before = self.record["weights"].get(what)
            changed |= set() if before is None else reweighted(before, now)
        return changed

    def exhausted(self, sites: Collection[str]) -> list[str]:
        """Those of some sites that may neither leave nor return any more."""
        used = self.record.get("changes", {})
        return sorted(c for c in sites if self.record.get("lost") or used.get(c, 0) >= self.limit)

    def after(self, sites: Collection[str], weights: Weights) -> Changes:
        """Return the record after a sum.

        Args:
            sites: of the sum.
            weights: of these.

        Raises:
            Broken: it differs in a site that has changed as often as was agreed on, or too few have never changed.
        """
        changed = self.changed(sites, weights)
        if over := self.exhausted(changed):
            why = (
                "the list of opened sums at this site was damaged, so no site leaves the sums or returns any more"
                if self.record.get("lost")
                else f"a site leaves the sums over the same data, or returns, {self.limit} times at most (changes in "
                "the table secure)"
            )
            raise Broken(f"the sum is of other sites than the sum before, it differs in {', '.join(over)}; {why}")
        used = self.record.get("changes", {})
        counts = {**used, **{c: used.get(c, 0) + 1 for c in changed}}
        steady = [c for c in sites if c not in counts]
        if changed and len(steady) < self.steady:
            raise Broken(
                f"the sum differs from the sum before in {', '.join(sorted(changed))}; {len(steady)} of its sites have "
                f"never left the sums over the same data, {self.steady} must have (steady in the table secure)"
            )
        return self._replace(
            record={
                **(LOST_RECORD if self.record.get("lost") else {}),
                "sites": sorted(sites),
                "weights": {
                    **self.record.get("weights", {}),
                    **{what: {c: [*values] for c, values in one.items()} for what, one in weights.items()},
                },
                "changes": counts,
            }
        )


def reweighted(before: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> set[str]:
    """Find the sites of two sums whose weight changed, unlike the weights of most of the others.

    Args:
        before: weights of each site in the first sum, one for every kind of field.
        now: the same in the second.
    """
    common, changed = sorted({*before} & {*now}), set[str]()
    for k in range(min((len(now[c]) for c in common), default=0)):
        pairs = {c: (float(before[c][k]), float(now[c][k])) for c in common if len(before[c]) > k}
        ratios = {c: pair for c, pair in pairs.items() if any(pair)}
        groups = dict[str, list[str]]()
        for c, (old, new) in ratios.items():
            reference = next((r for r in groups if _scale_weights(ratios[r], (old, new))), c)
            groups.setdefault(reference, []).append(c)
        changed |= {*ratios} - {*max(groups.values(), key=len, default=[])}
    return changed


def _scale_weights(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two pairs of numbers have the same ratio."""
    a, b = one[0] * other[1], one[1] * other[0]
    return abs(a - b) <= SAME_WEIGHT * max(abs(a), abs(b))
