"""Marks of verdicts: a shape and a colour each, always beside their word."""

from __future__ import annotations

from fedloom_studies.reproduce import looks

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
