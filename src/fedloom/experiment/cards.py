"""Method cards for people: what every method is, and its options."""

from __future__ import annotations

import inspect
from typing import Any

from fedloom.algorithms import REGISTRY, Algorithm, Preset
from fedloom.values import choose, fields_of


def families() -> dict[str, list[tuple[str, str]]]:
    """Methods by family: (name, first line of the card)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, entry in REGISTRY.items():
        algorithm: Any = entry.algorithm if isinstance(entry, Preset) else entry
        family = "preset" if isinstance(entry, Preset) else algorithm.family
        line = text(entry).splitlines()[0].partition(": ")[2]
        found.setdefault(family, []).append((name, line))
    return found


def text(entry: type[Algorithm] | Preset) -> str:
    """The card of a registry entry."""
    if isinstance(entry, Preset):
        return inspect.cleandoc(entry.card)
    module = inspect.getmodule(entry)
    return inspect.cleandoc((module and module.__doc__) or entry.__doc__ or "")


def card(name: str) -> str:
    """The card of a method, or of a class of user code by its import path, with its options, defaults and ranges.

    Raises:
        ConfigError: there is no such method; the message has the nearest name.
    """
    entry = choose("algorithm", REGISTRY, name, base=Algorithm)
    options = [_option(key, field) for key, field in fields_of(entry).items()]
    return "\n".join([text(entry), "", "Options:", *(options or ["    none"])])


def cards() -> dict[str, str]:
    """The card of every method of the registry."""
    return {name: card(name) for name in REGISTRY}


def _option(name: str, field: Any) -> str:
    limits = [
        f"{sign} {getattr(m, attribute)}"
        for m in field.metadata
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if hasattr(m, attribute)
    ]
    allowed = f" ({', '.join(limits)})" if limits else ""
    return f"    {name} = {field.default!r}{allowed}: {field.description}"
