"""Outcomes of attacks, as a table that an administrator can read."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["stopped", "remains", "OPEN", "not tried"]
"""Verdict on an attack.

- stopped: a rule of the site stopped the attack.
- remains: the attack reveals what the agreement is documented to reveal.
- OPEN: the server learned something about this site that it should not learn.
- not tried: the attack does not apply to this site.
"""


class InapplicableAttack(Exception):
    """Error: an attack cannot be applied to a site. The message states the reason."""


class AttackOutcome(NamedTuple):
    """Outcome of an attack.

    Attributes:
        verdict: see `Verdict`.
        tried: description of what was tried.
        learned: information that the server learned about the site.
        rule: rule that stopped the attack, or a description of the remaining risk.
    """

    verdict: Verdict
    tried: str
    learned: str
    rule: str


class AttackRow(NamedTuple):
    """A row of the table.

    Attributes:
        attack: name of the attack.
        outcome: outcome of the attack.
    """

    attack: str
    outcome: AttackOutcome

    def as_record(self) -> dict[str, str]:
        """Return the row as plain values, keyed by column."""
        return {"attack": self.attack, **self.outcome._asdict()}


def judge_attack(is_open: bool, tried: str, rule: str, learned: str, nothing: str = "nothing") -> AttackOutcome:
    """Return the outcome of an attack that a rule either stops or does not stop.

    Args:
        is_open: True if the attack succeeded.
        tried: description of what the attack tries.
        rule: rule that stops the attack.
        learned: information that the server learned if the attack succeeded.
        nothing: information that the server learned if the attack failed.
    """
    if is_open:
        return AttackOutcome("OPEN", tried, learned, f"not stopped. The rule would be: {rule}")
    return AttackOutcome("stopped", tried, nothing, rule)
