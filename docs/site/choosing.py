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
    """What the generated page says of the setups that were run."""
    said = [line for line in (DOCS / "map.md").read_text().splitlines() if line.startswith("**[")]
    return [f"- {line}" for line in said if "). Not run" not in line] or ["Nothing."]


def _papers() -> list[str]:
    """The tables of the papers that were run, from the generated page."""
    table = [line for line in (DOCS / "papers.md").read_text().splitlines() if line.startswith("| ")]
    head, *rows = dict.fromkeys(line for line in table if line.count("|") == 5)
    done = [row for row in rows if row.startswith("| [") and "| not run" not in row]
    return [head, "|---|---|---|---|", *done] if done else ["Nothing."]
