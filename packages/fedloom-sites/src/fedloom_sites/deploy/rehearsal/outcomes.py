"""Outcomes of attacks, as a table that an administrator can read."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["stopped", "remains", "OPEN", "not tried"]
"""stopped: a rule of the site stopped the attack. remains: what is agreed on reveals this much, as the pages say.
OPEN: the server learned something of this site that it should not. not tried: the attack does not apply here."""


class Inapplicable(Exception):
    """An attack that does not apply to a site. The text says why."""


class AttackOutcome(NamedTuple):
    """What became of an attack.

    Attributes:
        verdict: see `Verdict`.
        tried: what the server tried.
        learned: what it learned of the site.
        rule: the rule that stopped it, or what remains.
    """

    verdict: Verdict
    tried: str
    learned: str
    rule: str


class AttackRow(NamedTuple):
    """A row of the table.

    Attributes:
        attack: name of the attack.
        outcome: what became of it.
    """

    attack: str
    outcome: AttackOutcome

    def as_record(self) -> dict[str, str]:
        """Return the row as plain values by column."""
        return {"attack": self.attack, **self.outcome._asdict()}


def judge(is_open: bool, tried: str, rule: str, learned: str, nothing: str = "nothing") -> AttackOutcome:
    """Make the outcome of an attack that a rule stops or does not.

    Args:
        is_open: whether the server got what it tried to get.
        tried: what it tried.
        rule: that stops it.
        learned: what it then knows.
        nothing: what it learned otherwise.
    """
    if is_open:
        return AttackOutcome("OPEN", tried, learned, f"not stopped; the rule would be: {rule}")
    return AttackOutcome("stopped", tried, nothing, rule)
