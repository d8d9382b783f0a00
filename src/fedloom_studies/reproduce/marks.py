"""Marks of verdicts, a shape and a colour each, always beside their word; and how many claims came out each way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fedloom_studies.reproduce import looks
from fedloom_studies.reproduce.reasons import FOLDER

GPU, UNASKED = "needs a GPU", "not asked"
"""In place of a verdict: where more seeds of what was run change nothing, and where no recipe tests it."""

_DISC = '<circle cx="8" cy="8" r="7" fill="{colour}"/>'
_STROKE = '<path d="{path}" fill="none" stroke="#fff" stroke-width="2.2" stroke-linecap="round"/>'
SHAPES = {
    "holds": ("#1a7f37", "M4.5 8.3l2.4 2.4 4.6-5"),
    "partly": ("#9a6700", "M4.5 8h7"),
    "fails": ("#cf222e", "M5.2 5.2l5.6 5.6M10.8 5.2l-5.6 5.6"),
    "open": ("#6e7781", "M8 4.6v4M8 11.2v.2"),
}
"""By name: the colour of the disc, and the line on it."""


def of(word: str) -> str:
    """The name of a verdict's mark."""
    names = {looks.HOLDS: "holds", looks.PARTLY: "partly", "partly": "partly", looks.FAILS: "fails"}
    return f"mark-{names.get(word, 'open')}"


def drawn() -> dict[str, str]:
    """The SVG of every mark, by file name."""
    return {
        f"mark-{name}.svg": '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 16 16">'
        f"{_DISC.format(colour=colour)}{_STROKE.format(path=path)}</svg>\n"
        for name, (colour, path) in SHAPES.items()
    }


def counted(count: int, word: str) -> str:
    """Some claims and what became of them, as in "2 do not hold".

    >>> counted(1, "holds in part"), counted(3, "needs a GPU"), counted(2, "undecided")
    ('1 holds in part', '3 need a GPU', '2 are undecided')
    """
    plural = {"holds": "hold", "does": "do", "needs": "need"}
    verb, _, rest = word.partition(" ")
    if verb not in plural:
        return f"{count} {'is' if count == 1 else 'are'} {word}"
    return f"{count} {verb if count == 1 else plural[verb]} {rest}".rstrip()


class ClaimCell(NamedTuple):
    """A row's entry for a protocol: a word, the difference behind it, and the recipe that has it."""

    word: str
    number: str = ""
    recipe: str = ""


def shown(cell: ClaimCell) -> str:
    """A mark and a word, with the number behind it, linked to the recipe's page."""
    text = f"{cell.word}: {cell.number}" if cell.number else cell.word
    linked = f"[{text}]({FOLDER}/{cell.recipe}.md)" if cell.recipe else text
    return f"![]({FOLDER}/{of(cell.word)}.svg) {linked}"


def together(cells: Iterable[ClaimCell]) -> str:
    """The verdict on all claims of a paper in one protocol, with how many hold of those that are asked."""
    words = [cell.word for cell in cells if cell.word != UNASKED]
    decided = [word for word in words if word in (looks.HOLDS, looks.PARTLY, looks.FAILS)]
    waiting = words.count(looks.UNMEASURED)
    if not decided:
        word = next((word for word in (looks.UNMEASURED, looks.LOST, looks.OPEN, GPU) if word in words), UNASKED)
        return f"![]({FOLDER}/{of(word)}.svg) {word}"
    if 2 * waiting > len(words):
        return f"![]({FOLDER}/{of(looks.UNMEASURED)}.svg) {looks.UNMEASURED}: {waiting} of {len(words)} claims"
    kinds = set(decided)
    word = looks.HOLDS if kinds == {looks.HOLDS} else looks.FAILS if kinds == {looks.FAILS} else "partly"
    so_far, held = " so far" if waiting else "", decided.count(looks.HOLDS)
    count = f"{held} of {len(words)} {'holds' if held == 1 else 'hold'}"
    return f"![]({FOLDER}/{of(word)}.svg) {word}{so_far}: {count}"


def counts(cells: list[tuple[ClaimCell, ClaimCell]]) -> str:
    """How many claims were asked, and how many came out each way."""
    lines = []
    for mode, side in zip(("As published", "In a fair test"), zip(*cells, strict=True), strict=True):
        words = [cell.word for cell in side if cell.word != UNASKED]
        shown = ", ".join(counted(words.count(word), word) for word in dict.fromkeys(words))
        verb = "is" if len(words) == 1 else "are"
        lines.append(f"{mode}, {len(words)} of {len(side)} claims {verb} asked{f': {shown}' if shown else ''}.")
    return " ".join(lines)
