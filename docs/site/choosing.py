"""Which method for which problem: advice from the cards, numbers from recorded comparisons only."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAPERS, MAP = "<!-- papers -->", "<!-- map -->"


def page() -> str:
    """The text of site/choosing.md with the numbers in their place."""
    text = re.sub(r"\]\(\.\./", "](", (DOCS / "site" / "choosing.md").read_text())
    made = {PAPERS: _papers(), MAP: _map()}
    for place, lines in made.items():
        text = text.replace(place, "\n".join(lines))
    return text


def _map() -> list[str]:
    """What the generated page finds over all setups."""
    found = re.search(r"^\*\*In .+?(?=\n\n!\[)", (DOCS / "map.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, "docs/map.md has no findings"
    return [found[0]]


def _papers() -> list[str]:
    """The table of the papers, from the generated page, but for those of which nothing was run."""
    text = (DOCS / "papers.md").read_text().replace("](#", "](papers.md#")
    table = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 5]
    head, *rows = dict.fromkeys(table)
    done = [row for row in rows if row.startswith("| [") and not re.search(r"\| (not run|needs [^|]+) \|$", row)]
    assert done, "docs/papers.md has no table of papers"
    return [head, "|---|---|---|---|", *done]
