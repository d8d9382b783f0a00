"""Which method for which problem: advice from the cards, numbers from recorded comparisons only."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
NUMBERS, PAPERS, MAP = "<!-- numbers -->", "<!-- papers -->", "<!-- map -->"


def page() -> str:
    """The text of site/choosing.md with the numbers in their place."""
    text = (DOCS / "site" / "choosing.md").read_text()
    made = {NUMBERS: _setups(), PAPERS: _papers(), MAP: _map()}
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


def _setups() -> list[str]:
    lines: list[str] = []
    order = ("labels", "dirichlet", "iid", "hybrid", "little", "groups", "attack")
    for name in order:
        file = DOCS / "digits" / f"{name}.json"
        if not file.exists():
            title = tomllib.loads((DOCS / "digits" / "setups.toml").read_text())["setup"][name]["title"]
            lines += [f"### {title}", "", f"Not run: `scripts/digits {name}`.", ""]
            continue
        lines += _setup(json.loads(file.read_text()))
    return lines


def _setup(found: dict[str, Any]) -> list[str]:
    best: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        if row["model"] != "hybrid" and row["accuracy"] is not None:
            kept = best.get(row["method"])
            if kept is None or _preferred(row) > _preferred(kept):
                best[row["method"]] = row
    rows = sorted(best.values(), key=lambda r: -r["accuracy"])
    lines = [
        f"### {found['title']}",
        "",
        "| method | model | test accuracy (%) | worst 10 % (%) | MB sent | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        megabytes = (row["bytes_up"] + row["bytes_down"]) / 1e6
        lines.append(
            f"| {row['method']} | {row['model']} | {_figure(row, 'accuracy')} | {_figure(row, 'accuracy_worst10')} | "
            f"{megabytes:.1f} | {row['rounds']} |"
        )
    seeds, trials = len(found["seeds"]), found["trials"]
    return [*lines, "", f"{seeds} seeds, {trials} trials each, `{found['command']}`, {found['date']}.", ""]


def _preferred(row: dict[str, Any]) -> int:
    """The personal model is what a method that has one is for, and what was tuned."""
    return int(row["model"] == "personal")


def _figure(row: dict[str, Any], name: str) -> str:
    around = row[f"{name}_ci95"]
    return f"{100 * row[name]:.1f}" + (f" ± {100 * around:.1f}" if around is not None else "")
