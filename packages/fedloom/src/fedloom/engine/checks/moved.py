"""Keys that have become analyses: the sentence on a new file that has one, and recorded documents with the new form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.hints import unknown

_MOVED_KEYS = {
    "confusion": "confusion", "tsne": "tsne", "groups": "groups", "group_least": "groups", "predictions": "predictions",
    "importance": "importance", "references": "references", "cox": "cox",
}  # fmt: skip
MOVED_KEYS = {("partition", "leave"): "left-out", **{("evaluate", key): kind for key, kind in _MOVED_KEYS.items()}}
"""Kinds of analyses by the table and the key that chose them before."""
_MOVED_OPTIONS = {"tsne": "clients", "groups": "by", "group_least": "least"}
"""Options of the analysis that hold the value of a key."""


def find_moved_key(table: str, key: str, value: object) -> str:
    """Return the end of a sentence on a key that has become an analysis. Empty for any other key."""
    kind = MOVED_KEYS.get((table, key))
    if kind is None:
        return ""
    options = ", ".join(f"{name} = {_literal(option)}" for name, option in _options(key, value).items())
    return (
        f"it is an analysis: write [[analysis]] and below it kind = {kind!r}{options and ' and '}{options}, or in "
        f"Python give analyses=[{ {'kind': kind, **_options(key, value)}!r}] to fl.compare"
    )


def check_moved(table: str, options: object) -> None:
    """Refuse a table with a key that has become an analysis.

    Raises:
        ConfigError: there is one. The message has the new form.
    """
    for key, value in options.items() if isinstance(options, Mapping) else ():
        if cure := find_moved_key(table, str(key), value):
            raise unknown("key", key, (), table, cure)


def move_analyses(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded document of an experiment with its analyses in their present form.

    Documents of runs, records and studies are read so. A new file with an old key is refused.
    """
    tables = {name: document.get(name) for name in ("evaluate", "partition")}
    old = {(name, key): value for name, table in tables.items() if isinstance(table, Mapping)
           for key, value in table.items() if (name, key) in MOVED_KEYS}  # fmt: skip
    if not old:
        return {**document}
    by_kind = dict[str, dict[str, Any]]()
    for place, value in old.items():
        if value and place[1] != "group_least":
            by_kind[MOVED_KEYS[place]] = {"kind": MOVED_KEYS[place], **_options(place[1], value)}
    if "groups" in by_kind and ("evaluate", "group_least") in old:
        by_kind["groups"]["least"] = old["evaluate", "group_least"]
    cleaned = {
        name: {key: value for key, value in table.items() if (name, key) not in old}
        for name, table in tables.items()
        if isinstance(table, Mapping)
    }
    analyses = [*document.get("analysis", ()), *by_kind.values()]
    return {**document, **cleaned, **({"analysis": analyses} if analyses else {})}


def _options(key: str, value: object) -> dict[str, Any]:
    if key in _MOVED_OPTIONS:
        return {_MOVED_OPTIONS[key]: list(value) if isinstance(value, tuple) else value}
    return dict(value) if isinstance(value, Mapping) else {}


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
