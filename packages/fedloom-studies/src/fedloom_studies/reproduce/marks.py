"""Marks for verdicts. Each mark has its own shape and color, and always appears next to a word.

The module also counts the claims with each verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedloom_studies.reproduce.looks import (
    FAILS,
    HOLDS,
    PARTLY,
    UNDECIDED,
    UNTESTED,
    ClaimVerdict,
    UntestedReason,
    claim_words,
)
from fedloom_studies.reproduce.reasons import PAPERS_FOLDER

_DISC_SVG = '<circle cx="8" cy="8" r="7" fill="{colour}"/>'
_STROKE_SVG = '<path d="{path}" fill="none" stroke="#fff" stroke-width="2.2" stroke-linecap="round"/>'
MARK_SHAPES = {
    "holds": ("#1a7f37", "M4.5 8.3l2.4 2.4 4.6-5"),
    "partly": ("#9a6700", "M4.5 8h7"),
    "fails": ("#cf222e", "M5.2 5.2l5.6 5.6M10.8 5.2l-5.6 5.6"),
    "open": ("#6e7781", "M8 4.6v4M8 11.2v.2"),
}
"""Color of the disc, and path of the line drawn on it, for each mark."""


def mark_name(verdict: ClaimVerdict) -> str:
    """Return the name of the mark that represents a verdict."""
    names = {HOLDS: "holds", PARTLY: "partly", FAILS: "fails"}
    return f"mark-{names.get(verdict, 'open')}"


def draw_marks() -> dict[str, str]:
    """Draw all marks as SVG, keyed by file name."""
    return {
        f"mark-{name}.svg": '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 16 16">'
        f"{_DISC_SVG.format(colour=colour)}{_STROKE_SVG.format(path=path)}</svg>\n"
        for name, (colour, path) in MARK_SHAPES.items()
    }


def count_claims(count: int, word: str) -> str:
    """Return a phrase with the number of claims that have the given verdict, such as "2 do not hold".

    >>> count_claims(1, "holds in part"), count_claims(3, "not tested (needs a GPU)"), count_claims(2, "undecided")
    ('1 holds in part', '3 are not tested (needs a GPU)', '2 are undecided')
    """
    plural = {"holds": "hold", "does": "do"}
    verb, _, rest = word.partition(" ")
    if verb not in plural:
        return f"{count} {'is' if count == 1 else 'are'} {word}"
    return f"{count} {verb if count == 1 else plural[verb]} {rest}".rstrip()


def join_counts(phrases: Sequence[str]) -> str:
    """Join phrases with commas, but the last two with "and".

    >>> join_counts(["5 hold", "1 is undecided"]), join_counts(["5 hold", "1 is undecided", "2 do not hold"])
    ('5 hold and 1 is undecided', '5 hold, 1 is undecided, and 2 do not hold')
    """
    if len(phrases) < 3:
        return " and ".join(phrases)
    return f"{', '.join(phrases[:-1])}, and {phrases[-1]}"


class ClaimCell(NamedTuple):
    """Cell of a table of claims: a verdict under one protocol, the difference behind it, and its source recipe."""

    verdict: ClaimVerdict
    reason: UntestedReason | None = None
    number: str = ""
    recipe: str = ""

    @property
    def word(self) -> str:
        """Text of a verdict, as shown to readers."""
        return claim_words(self.verdict, self.reason)

    @property
    def is_asked(self) -> bool:
        """True if a recipe tests the claim, or will test it."""
        return self.reason != UntestedReason.UNASKED


def show_mark(cell: ClaimCell) -> str:
    """Render a cell with its mark, word and number, as a link to the recipe's page."""
    text = f"{cell.word}: {cell.number}" if cell.number else cell.word
    linked = f"[{text}]({PAPERS_FOLDER}/{cell.recipe}.md)" if cell.recipe else text
    return f"![]({PAPERS_FOLDER}/{mark_name(cell.verdict)}.svg) {linked}"


def combine_verdicts(cells: Iterable[ClaimCell]) -> str:
    """Render the verdict on all claims of a paper under one protocol, with the number of claims that hold."""
    candidates = [cell for cell in cells if cell.is_asked]
    decided = [cell.verdict for cell in candidates if cell.verdict in (HOLDS, PARTLY, FAILS)]
    waiting = sum(cell.reason == UntestedReason.NOT_RUN for cell in candidates)
    if not decided:
        reasons = [cell.reason for cell in candidates]
        first = next(
            (r for r in (UntestedReason.NOT_RUN, UntestedReason.LOST, None, *UntestedReason) if r in reasons),
            UntestedReason.UNASKED,
        )
        verdict = UNDECIDED if first is None else UNTESTED
        return f"![]({PAPERS_FOLDER}/{mark_name(verdict)}.svg) {claim_words(verdict, first)}"
    if 2 * waiting > len(candidates):
        word = claim_words(UNTESTED, UntestedReason.NOT_RUN)
        return f"![]({PAPERS_FOLDER}/{mark_name(UNTESTED)}.svg) {word}: {waiting} of {len(candidates)} claims"
    kinds = set(decided)
    verdict = HOLDS if kinds == {HOLDS} else FAILS if kinds == {FAILS} else PARTLY
    so_far, held = " so far" if waiting else "", decided.count(HOLDS)
    count = f"{held} of {len(candidates)} {'holds' if held == 1 else 'hold'}"
    return f"![]({PAPERS_FOLDER}/{mark_name(verdict)}.svg) {verdict}{so_far}: {count}"


def count_sentences(cells: list[tuple[ClaimCell, ClaimCell]]) -> str:
    """Return sentences with the number of claims that are covered, and with the number for each verdict."""
    lines = []
    for mode, side in zip(("As published", "In a fair test"), zip(*cells, strict=True), strict=True):
        words = [cell.word for cell in side if cell.is_asked]
        shown = join_counts([count_claims(words.count(word), word) for word in dict.fromkeys(words)])
        lines.append(f"{mode}, {len(words)} of {len(side)} claims are covered{f': {shown}' if shown else ''}.")
    return " ".join(lines)
