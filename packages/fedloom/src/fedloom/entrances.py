"""Entrances: the ways to start a run, and how each of them writes the key that an error tells the user to change.

A fix names keys in braces, as an experiment file nests them: ``set {local.momentum = 0}``, ``leave {channel} out``.
Every entrance writes the same key in its own terms:

>>> worded("set {local.momentum = 0}")
'set local={"momentum": 0}'
>>> with entered("file"):
...     worded("set {local.momentum = 0}"), worded("leave {channel} out")
('set [local] momentum = 0', 'leave [channel] out')
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from fedloom.lazy import lister

Entrance = Literal["python", "file", "command", "estimator", "flower"]
"""`simulate` and `compare`; a deployment's file; ``fedloom run`` and ``tune``; scikit-learn; a Flower app."""

_current: ContextVar[Entrance | None] = ContextVar("entrance", default=None)

_KEY = re.compile(r"\{(?P<table>[a-z_]+)(?:\.(?P<key>[a-z_]+))?(?: = (?P<value>(?:[^{}]|\{[^{}]*\})+))?\}")

PLAIN_KEYS = ("rounds", "seed", "weights", "name")
"""Keys of an experiment file that are in no table."""
ESTIMATOR_KEYS = {"local.lr": "lr", "local.epochs": "epochs", "local.batch_size": "batch_size"}
"""Keys that are arguments of the scikit-learn estimators themselves, by their place in an experiment file."""
ESTIMATOR_ARGUMENTS = ("rounds", "model", "clients")
"""Other arguments of the estimators that have the name of a key."""
QUOTES = "'\""
COMMAND_FLAGS = {"rounds": "--rounds", "engine.workers": "--workers"}
"""Keys that have a flag on the command line, beside ``--set``."""


@contextmanager
def entered(entrance: Entrance) -> Iterator[bool]:
    """Word the errors inside for an entrance; the outermost one counts, as `compare` calls `simulate`.

    Yields:
        True if it is the outermost.
    """
    if _current.get() is not None:
        yield False
        return
    token = _current.set(entrance)
    try:
        yield True
    finally:
        _current.reset(token)


def worded(text: str) -> str:
    """Write the keys in braces as the current entrance has them; other text stays as it is."""
    write = _WRITERS[_current.get() or "python"]
    return _KEY.sub(lambda match: write(match["table"], match["key"], match["value"]), text)


def _python(table: str, key: str | None, value: str | None) -> str:
    if table == "method" and key:
        return f"{key} in the method" if value is None else f"{key}={value} in the method"
    if table == "partition" and key:
        return f"{key} in the partition" if value is None else f"{key}={value} in the partition"
    if key is None:
        return f"{table}={'' if value is None else value}"
    return f"{table}.{key}" if value is None else f'{table}={{"{key}": {value}}}'


def _file(table: str, key: str | None, value: str | None) -> str:
    place = "[[method]]" if table == "method" else f"[{table}]"
    if table in PLAIN_KEYS:
        return table if value is None else f"{table} = {_toml(value)}"
    if key is None:
        return place if value is None else f"{place} {_options(value)}"
    return f"{place} {key}" if value is None else f"{place} {key} = {_toml(value)}"


def _command(table: str, key: str | None, value: str | None) -> str:
    written = _file(table, key, value)
    dotted = f"{table}.{key}" if key else table if table in PLAIN_KEYS else f"{table}.kind"
    if value is None or table in ("method", "partition", "data"):
        return written
    if dotted in COMMAND_FLAGS:
        return f"{written} ({COMMAND_FLAGS[dotted]} {value})"
    return written if value.startswith(("{", "[")) else f"{written} (--set {dotted}={value.strip(QUOTES)})"


def _estimator(table: str, key: str | None, value: str | None) -> str:
    name = ESTIMATOR_KEYS.get(f"{table}.{key}") or (table if key is None and table in ESTIMATOR_ARGUMENTS else None)
    if name is not None:
        return f"{name}={'' if value is None else value}"
    if table == "partition" and key == "clients":
        return f"clients={'' if value is None else value}"
    if table in ("method", "partition"):
        return _python(table, key, value)
    if key is None:
        return f'settings["{table}"]' if value is None else f'settings={{"{table}": {value}}}'
    return f'settings["{table}"]["{key}"]' if value is None else f'settings={{"{table}": {{"{key}": {value}}}}}'


def _flower(table: str, key: str | None, value: str | None) -> str:
    if table == "method" and key:
        return f"{key}={'' if value is None else value}"
    if table == "rounds":
        return f"num_rounds={'' if value is None else value}"
    if table == "partition":
        return "the number of nodes" if value is None else f"{value} nodes"
    return _python(table, key, value)


def _toml(value: str) -> str:
    return {"True": "true", "False": "false"}.get(value, value)


def _options(value: str) -> str:
    """The lines of a table that a value, a name of a kind or a dictionary, stands for."""
    options = ast.literal_eval(value) if value.startswith("{") else {"kind": ast.literal_eval(value)}
    return ", ".join(f"{key} = {_toml(repr(option))}" for key, option in options.items())


_WRITERS: Mapping[Entrance, Callable[[str, str | None, str | None], str]] = {
    "python": _python,
    "file": _file,
    "command": _command,
    "estimator": _estimator,
    "flower": _flower,
}

__dir__ = lister(__name__)
