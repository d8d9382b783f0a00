"""The page on Flower has every method with what its card says of a node, and the example as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedloom.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "flower.md").read_text()
TABLE = (ROOT / "docs" / "traffic.md").read_text()


def row(name: str) -> str:
    """The line of the table for a method, from its card."""
    card = " ".join((sys.modules[ALGORITHMS[name].__module__].__doc__ or "").split())
    found = re.search(r"Client state: (.+?)\. Traffic(?: per round)?: (.+?)[.;](?= |$)", card)
    assert found is not None, name
    return f"| `{name}` | {found[1]} | {found[2]} |"


def test_the_table_is_what_the_cards_say() -> None:
    table = re.findall(r"^\| `[a-z0-9-]+` \|.*$", TABLE.partition("## What a method keeps")[2], re.MULTILINE)
    rows = [row(name) for name in ALGORITHMS]
    missing = [line for line in rows if line not in table]
    assert not missing, "put into docs/traffic.md, in the order of the registry:\n" + "\n".join(missing)
    assert table == rows


def test_the_page_shows_the_lines_of_the_example() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    folder = ROOT / "examples" / "flower" / "quickstart"
    text = "".join((folder / name).read_text() for name in ("client_app.py", "server_app.py"))
    lines = [line.strip() for line in text.splitlines() if re.match(r"from fedloom|@client| +return", line)]
    assert len(lines) == 4
    assert [line for line in lines if line not in code] == []
