"""Track the sites in the sums, and the number of times that each site has left or returned.

Models of consecutive rounds hardly differ, and a malicious server can even send identical models. Two sums that differ
by only one site therefore reveal that site's upload. For this reason, all sums cover the same sites. If a site is
absent, the other sites sign a sum without it (`protocol.statement`), and later a sum that includes it again. Each such
change reveals one difference between that site's uploads. Every site therefore counts the changes of every other site.
Once a site has used up the agreed number of changes, the other sites refuse to sign any sum that would count as another
change of this site, and no site opens a sum with too few signatures. The uploads of sites that have changed are assumed
to be known to the server. Every sum must therefore contain enough sites that have never changed: any combination of
sums that a server computes contains either all of these sites or none. A site is also recorded as changed if its weight
changes relative to the other sites' weights, because two sums of the same sites with different weights reveal just as
much. The same holds for a site that answers from a different state than the other sites: if uploads are differences
from the state, as in SCAFFOLD, only this site's upload is then large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom_sites.deploy.secure.protocol import ProtocolBroken

MAX_CHANGES = 4
"""Maximum number of changes per site, which allows a site to be absent twice from the sums over its data.

The number is small because every change reveals a difference between uploads of a site, which secure aggregation is
meant to hide. If a site is absent more often, the run has to wait for it.
"""
MAX_REMEMBERED_EXPERIMENTS = 32
"""Number of recent experiments whose summed models and states a site stores.

The sites in the latest sum are remembered across all experiments.
"""
WEIGHT_TOLERANCE = 1e-6
"""Relative tolerance for comparing two weights, because the other sites compute them in float32."""

LOST_RECORD: Mapping[str, Any] = {"lost": True}
"""Record of a site that no longer knows which sites its latest sum covered."""

Weights = Mapping[str, Mapping[str, Sequence[float]]]
"""Weights of each site in a sum, keyed by "uploads", "scores" or the name of an analysis, and then by site."""


class AnswerStates(NamedTuple):
    """States used by the sites for their answers in a sum.

    Attributes:
        experiment: name of the experiment that the rounds belong to.
        trained: round whose uploads are summed. None if the sum is not a sum of uploads.
        bases: last accepted round of each site, keyed by name.
    """

    experiment: str
    trained: int | None
    bases: Mapping[str, int]


class CohortChanges(NamedTuple):
    """Sites in the latest sum, and the number of changes so far.

    Attributes:
        record: JSON-compatible values: the `sites` in the latest sum, their `weights` (see `Weights`), the number of
            `changes` keyed by site, and the `states` of each experiment: those of its latest sum of uploads (`bases`),
            its `round`, and the sites that answered its latest sum from a different state than most sites (`moved`).
            Empty before the first sum.
        limit: maximum number of changes per site.
        steady: minimum number of sites in a sum that have never changed.
    """

    record: Mapping[str, Any]
    limit: int
    steady: int = 0

    @property
    def sites(self) -> list[str]:
        """The sites in the latest sum. Empty before the first sum."""
        return [*self.record.get("sites", ())]

    def changed(self, sites: Collection[str], weights: Weights, states: AnswerStates) -> set[str]:
        """Return the sites whose presence, weight or state differs between a new sum and the latest sum.

        A site that answers from a different state than most sites differs from the previous sum and from the next.

        Args:
            sites: the sites in the new sum.
            weights: weights of these sites.
            states: states of these sites.
        """
        if "sites" not in self.record:
            return set()
        changed = {*self.sites} ^ {*sites}
        for what, now in weights.items():
            before = self.record["weights"].get(what)
            changed |= set() if before is None else find_reweighted_sites(before, now)
        moved = self._find_moved_sites(states) | {*self._states.get(states.experiment, {}).get("moved", ())}
        return changed | (moved & {*sites})

    def exhausted(self, sites: Collection[str]) -> list[str]:
        """Return the given sites that may not leave or return again."""
        used = self.record.get("changes", {})
        return sorted(c for c in sites if self.record.get("lost") or used.get(c, 0) >= self.limit)

    def add_sum(self, sites: Collection[str], weights: Weights, states: AnswerStates) -> CohortChanges:
        """Return the updated record after a sum.

        Repeating the latest sum of uploads, for example without scores, has no effect.

        Args:
            sites: the sites in the new sum.
            weights: weights of these sites.
            states: states of these sites.

        Raises:
            ProtocolBroken: the sum would be one change too many for a site, or contains too few sites that have never
                changed.
        """
        if self._is_latest_sum(sites, weights, states):
            return self
        changed = self.changed(sites, weights, states)
        if over := self.exhausted(changed):
            why = (
                "the list of decrypted sums at this site was damaged, so sites can no longer leave the sums or return"
                if self.record.get("lost")
                else f"a site may leave the sums over the same data, or return, at most {self.limit} times "
                "(changes in the table secure)"
            )
            raise ProtocolBroken(
                "the sites of the sum, or their weights or states, differ from the previous sum in "
                f"{', '.join(over)}; {why}"
            )
        used = self.record.get("changes", {})
        counts = {**used, **{c: used.get(c, 0) + 1 for c in changed}}
        steady = [c for c in sites if c not in counts]
        if changed and len(steady) < self.steady:
            raise ProtocolBroken(
                f"the sum differs from the previous sum in {', '.join(sorted(changed))}. Only "
                f"{len(steady)} of its sites were in all sums over the same data, but {self.steady} "
                "are required (key `steady` in the table `secure`)"
            )
        newest = {**self._states.get(states.experiment, {}), "moved": sorted(self._find_moved_sites(states))}
        newest |= {} if states.trained is None else {"bases": {**states.bases}, "round": states.trained}
        rest = {e: one for e, one in self._states.items() if e != states.experiment}
        return self._replace(
            record={
                **(LOST_RECORD if self.record.get("lost") else {}),
                "states": dict([*rest.items(), (states.experiment, newest)][-MAX_REMEMBERED_EXPERIMENTS:]),
                "sites": sorted(sites),
                "weights": {
                    **self.record.get("weights", {}),
                    **{what: {c: [*values] for c, values in one.items()} for what, one in weights.items()},
                },
                "changes": counts,
            }
        )

    @property
    def _states(self) -> Mapping[str, Mapping[str, Any]]:
        """States of each experiment (see `record`)."""
        states: Mapping[str, Any] = self.record.get("states", {})
        if "bases" in states:  # written by an earlier version
            return {states["experiment"]: {"bases": states["bases"], "moved": self.record.get("moved", ())}}
        return states

    def _is_latest_sum(self, sites: Collection[str], weights: Weights, states: AnswerStates) -> bool:
        """Return True if a sum of uploads repeats the round, sites, weights and states of the latest sum."""
        newest = self._states.get(states.experiment, {})
        return (
            states.trained is not None
            and (newest.get("round"), newest.get("bases")) == (states.trained, {**states.bases})
            and self.sites == sorted(sites)
            and all(self.record["weights"].get(w) == {c: [*v] for c, v in one.items()} for w, one in weights.items())
        )

    def _find_moved_sites(self, states: AnswerStates) -> set[str]:
        """Return the sites that answer from a different state than most sites in the newest sum of uploads.

        If the server accepted the newest sum of the experiment, all its sites answer from the state of its round,
        otherwise from the state before. In the first sum of an experiment, the sites of the newest sum answer from the
        same round.
        """
        before = self._states.get(states.experiment, {}).get("bases", dict.fromkeys(self.sites))
        groups = dict[object, list[str]]()
        for c in sorted({*states.bases} & {*before}):
            base = states.bases[c]
            groups.setdefault("earlier" if base == before[c] else base, []).append(c)
        return {c for group in groups.values() for c in group} - {*max(groups.values(), key=len, default=[])}


def find_reweighted_sites(before: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> set[str]:
    """Return the sites whose weight changed by a different factor than the weights of the largest group of sites.

    Args:
        before: weights of each site in the first sum, one for each kind of field.
        now: weights of each site in the second sum.
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
    """Return True if the numbers in two pairs have the same ratio."""
    a, b = one[0] * other[1], one[1] * other[0]
    return abs(a - b) <= WEIGHT_TOLERANCE * max(abs(a), abs(b))
