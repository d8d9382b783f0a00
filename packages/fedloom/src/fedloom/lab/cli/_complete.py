"""Tab completion without importing torch: names are read from source files and run directories."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CompletionFunction = Callable[[str], list[str]]
"""Function that returns the words with a given prefix."""

PACKAGE_FOLDER = Path(__file__).parents[2]


def complete_from(words: Callable[[], Iterable[str]]) -> CompletionFunction:
    """Return a function that completes a prefix with the words that ``words()`` yields."""

    def offered(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return offered


def complete_one_of(*words: str) -> CompletionFunction:
    """Return a function that completes a prefix with the given words."""
    return complete_from(lambda: words)


def _dictionary_keys(module: str, name: str) -> Iterator[str]:
    """Parse the source of a module and yield the keys of the dictionary called ``name``."""
    for node in ast.parse((PACKAGE_FOLDER / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.target) == name:
            yield from (
                key.value for key in node.value.keys if isinstance(key, ast.Constant) and type(key.value) is str
            )


def _algorithm_names() -> Iterator[str]:
    yield from _dictionary_keys("algorithms/__init__.py", "ALGORITHMS")
    yield from _dictionary_keys("algorithms/presets.py", "PRESETS")


def _first_run_summary() -> dict[str, Any]:
    """Return the content of ``summary.json`` in the first run directory on the command line, or {} if there is none.

    The command line is read from the shell, because the arguments have not yet been parsed when an option is completed.
    """
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    for word in line.split():
        try:
            summary = json.loads((Path(word).expanduser() / "summary.json").read_text(encoding="utf-8"))
        except (OSError, RuntimeError, ValueError):
            continue
        return summary if isinstance(summary, dict) else {}
    return {}


def _complete_runs(key: str) -> CompletionFunction:
    return complete_from(
        lambda: dict.fromkeys(str(run[key]) for run in _first_run_summary().get("runs", ()) if key in run)
    )


algorithms = complete_from(_algorithm_names)
"""Names that complete an argument of ``fedloom describe``."""
sources = complete_from(lambda: _dictionary_keys("data/sources/__init__.py", "SOURCES"))
"""Names that complete an argument of ``fedloom data``."""
methods, seeds = _complete_runs("method"), _complete_runs("seed")
"""Labels and seeds of the runs in a run directory."""
clients = complete_from(lambda: map(str, range(min(int(_first_run_summary().get("clients", 0)), MAX_OFFERED_CLIENTS))))
"""Client numbers in a run directory, up to a maximum."""
MAX_OFFERED_CLIENTS = 1000
"""Maximum number of clients offered as completions."""
