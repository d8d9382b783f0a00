"""The style of the pages: plain sentences, short paragraphs and pages, and code that fits the column of the site.

CONTRIBUTING.md explains the eight rules with examples. ``prose.toml`` lists the pages that still break them, and its
counts may only decrease.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = {
    "1 a concrete noun is the subject (not what, who, whatever)": (
        r"(?:(?<=[.;:] )|^)(?:What|Whatever|Who|Whoever)\b(?![^.]*\?)"
        r"|\b(?:of|by|to|from|with|for|than|as|and) (?:what|whatever|who|whoever)\b"
    ),
    "2 things show, list or contain; they do not 'have'": (
        r"\b(?:page|file|table|log|journal|report|card|setup|column|row|section|recipe|docstring|message|directory|folder|run"
        r"|entry|map|answer)s? (?:has|have)\b(?! (?:been|to|not|no \w+ed|\w+ed)\b)"
    ),
    "3 repeat the noun (no 'that of', 'those of', 'none')": (
        r"\b(?:that|those) of\b|\b(?:that|which|who) (?:is|are) there\b|\bwhere (?:there is )?none\b"
        r"|\b(?:none|nothing) of\b"
    ),
    "4 'its own X', not 'X of its own'": r"\bof (?:its|his|her|their|your|one's) own\b|\bof yours\b",
    "5 no 'of which', 'in whose'": r"\b(?:of|in|from|by|to|for|on|with) (?:which|whose|whom)\b",
    "6 say what happens, not 'refused'": r"\brefus(?:e|es|ed|al|als|ing)\b",
    "7 no literal verbs (go on, come to, stand, lie, let in)": (
        r"\b(?:go|goes|went|gone|going) on\b|\bcom(?:e|es) to\b|\bstands?\b|\blies?\b|\blet in\b|\bin the place of\b"
        r"|\ball the same\b|\bin silence\b|\bin vain\b"
    ),
    "8 one idea per sentence (no semicolon)": r";",
}
FINDINGS_PER_1000_WORDS = 3.0
PAGE_WORDS = 2500
PARAGRAPH_WORDS = 80
CODE_COLUMNS = 84
GENERATED = {
    "experiment-file.md",
    "map.md",
    "papers.md",
    "others.md",
    "gallery.md",
    "combinations.md",
    "architecture.md",
}
"""Pages that a program writes from records, and the page for contributors. Their length has no limit."""
ROOT_PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
PLAIN_PAGES = [*sorted((ROOT / "docs").glob("*.md")), *ROOT_PAGES]
PAGES = [page for page in PLAIN_PAGES if page.name not in GENERATED]
RECORDED_PAGES = [
    page for page in sorted((ROOT / "studies" / "pages").rglob("*.md")) if page.parent.name in ("map", "papers")
]
"""Pages of federations and experiments, which one template writes. They are judged together."""
STILL_ALLOWED = tomllib.loads((Path(__file__).parent / "prose.toml").read_text())


def prose(text: str) -> str:
    """Return the sentences of a page: no code, no tables, no headings; code in a line is an X."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^<>\n]{1,120}>|`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\||#)", line))


def findings(text: str) -> list[str]:
    """Return every place that breaks a rule, with the rule."""
    flat = " ".join(prose(text).split())
    return [f"{rule}: ...{flat[max(0, m.start() - 40) : m.end() + 40]}..." for rule, pattern in RULES.items()
            for m in re.finditer(pattern, flat)]  # fmt: skip


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=lambda page: page.name)
def test_a_page_breaks_few_rules_of_style(page: Path) -> None:
    found = findings(page.read_text())
    words = len(prose(page.read_text()).split())
    target = int(FINDINGS_PER_1000_WORDS * words / 1000)
    assert len(found) <= max(target, STILL_ALLOWED.get(page.name, 0)), "\n".join(found)


def test_pages_from_records_break_few_rules_of_style() -> None:
    texts = [page.read_text() for page in RECORDED_PAGES]
    found, words = [f for text in texts for f in findings(text)], sum(len(prose(text).split()) for text in texts)
    assert len(texts) > 100
    assert 1000 * len(found) / words <= FINDINGS_PER_1000_WORDS, "\n".join(found)


def test_the_list_of_exceptions_only_falls() -> None:
    """A page that got better leaves the list, or its number falls with it."""
    loose = {}
    for page in PLAIN_PAGES:
        found, words = len(findings(page.read_text())), len(prose(page.read_text()).split())
        allowed = STILL_ALLOWED.get(page.name, 0)
        if allowed and (found < allowed or found <= FINDINGS_PER_1000_WORDS * words / 1000):
            loose[page.name] = found
    assert not loose, f"write these numbers into tests/docs/prose.toml, or remove the lines: {loose}"
    assert STILL_ALLOWED.keys() <= {page.name for page in PLAIN_PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_paragraphs_are_short(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= PAGE_WORDS
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    long = [b for b in blocks if not b.lstrip().startswith(("|", "#")) and len(b.split()) > PARAGRAPH_WORDS]
    assert not long, long[0]


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent != ROOT], ids=lambda page: page.name)
def test_code_fits_the_column_of_the_site(page: Path) -> None:
    blocks = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > CODE_COLUMNS]
    assert not wide, "\n".join(wide)


def test_the_rules_find_what_they_are_for() -> None:
    bad = "What a file declares is read. The page has a table. It is that of its own, in which it is refused; go on."
    assert len({finding[0] for finding in findings(bad)}) >= 7
    good = "fedloom checks the declared size before it reads the file. The page contains a table. The command stops."
    assert findings(good) == []
