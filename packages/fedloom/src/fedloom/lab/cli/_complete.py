"""Completion with the Tab key, without torch: names are read from the sources and from run directories."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Offer = Callable[[str], list[str]]
"""Function that maps the start of a word to the words that complete it."""

PACKAGE_FOLDER = Path(__file__).parents[2]


def offer(words: Callable[[], Iterable[str]]) -> Offer:
    """Return a function that completes a word from ``words()``."""

    def offered(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return offered


def one_of(*words: str) -> Offer:
    """Return a function that completes a word from fixed words."""
    return offer(lambda: words)


def _keys(module: str, name: str) -> Iterator[str]:
    """Return the keys of the dictionary called ``name`` in a module, read from the text of the module."""
    for node in ast.parse((PACKAGE_FOLDER / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.target) == name:
            yield from (
                key.value for key in node.value.keys if isinstance(key, ast.Constant) and type(key.value) is str
            )


def _algorithms() -> Iterator[str]:
    yield from _keys("algorithms/__init__.py", "ALGORITHMS")
    yield from _keys("algorithms/presets.py", "PRESETS")


def _summary() -> dict[str, Any]:
    """Return ``summary.json`` of the first run directory on the command line, or {} if there is no run directory.

    The command line comes from the shell, and nothing in it is parsed while an option waits for its value.
    """
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    for word in line.split():
        try:
            summary = json.loads((Path(word).expanduser() / "summary.json").read_text(encoding="utf-8"))
        except (OSError, RuntimeError, ValueError):
            continue
        return summary if isinstance(summary, dict) else {}
    return {}


def _complete_runs(key: str) -> Offer:
    return offer(lambda: dict.fromkeys(str(run[key]) for run in _summary().get("runs", ()) if key in run))


algorithms = offer(_algorithms)
"""Names for ``fedloom describe``."""
sources = offer(lambda: _keys("data/sources/__init__.py", "SOURCES"))
"""Names for ``fedloom data``."""
methods, seeds = _complete_runs("method"), _complete_runs("seed")
"""Labels and seeds of the runs in a run directory."""
clients = offer(lambda: map(str, range(min(int(_summary().get("clients", 0)), MAX_OFFERED_CLIENTS))))
"""Numbers of the clients in a run directory."""
MAX_OFFERED_CLIENTS = 1000
"""Largest number of clients that the completion offers."""
