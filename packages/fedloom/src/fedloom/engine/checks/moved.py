"""Keys that analyses replaced: the error for new files that use them, and the conversion of old documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.hints import EARLIER_DEFAULTS, RENAMED_KEYS, RENAMED_VALUES, unknown_name_error

_MOVED_KEYS = {
    "confusion": "confusion", "tsne": "tsne", "groups": "groups", "group_least": "groups", "predictions": "predictions",
    "importance": "importance", "references": "references", "cox": "cox",
}  # fmt: skip
MOVED_KEYS = {("partition", "leave"): "left-out", **{("evaluate", key): kind for key, kind in _MOVED_KEYS.items()}}
"""Kinds of analyses, keyed by the table and key that requested them in earlier versions."""
_MOVED_OPTIONS = {"tsne": "clients", "groups": "by", "group_least": "min_rows"}
"""Names of analysis options that differ from the key they replace."""


def find_moved_key(table: str, key: str, value: object) -> str:
    """Return the last part of an error message, which explains how to replace a key by an analysis.

    It is empty if no analysis replaced the key.
    """
    kind = MOVED_KEYS.get((table, key))
    if kind is None:
        return ""
    options = ", ".join(f"{name} = {_toml_literal(option)}" for name, option in _option_lines(key, value).items())
    return (
        f"this is now an analysis: write [[analysis]] and below it kind = {kind!r}{options and ' and '}{options}, or "
        f"in Python pass analyses=[{ {'kind': kind, **_option_lines(key, value)}!r}] to fl.compare"
    )


def check_moved(table: str, options: object) -> None:
    """Raise an error if a table contains a key that an analysis replaced.

    Raises:
        ConfigError: the table contains such a key. The message shows how to write the analysis instead.
    """
    for key, value in options.items() if isinstance(options, Mapping) else ():
        if cure := find_moved_key(table, str(key), value):
            raise unknown_name_error("key", key, (), table, cure)


def move_analyses(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded experiment document with analyses in place of the old keys.

    Documents recorded in runs, records and studies are converted. Old keys in new files are rejected.
    """
    tables = {name: document.get(name) for name in ("evaluate", "partition")}
    old = {(name, key): value for name, table in tables.items() if isinstance(table, Mapping)
           for key, value in table.items() if (name, key) in MOVED_KEYS}  # fmt: skip
    if not old:
        return {**document}
    by_kind = dict[str, dict[str, Any]]()
    for place, value in old.items():
        if value and place[1] != "group_least":
            by_kind[MOVED_KEYS[place]] = {"kind": MOVED_KEYS[place], **_option_lines(place[1], value)}
    if "groups" in by_kind and ("evaluate", "group_least") in old:
        by_kind["groups"]["min_rows"] = old["evaluate", "group_least"]
    cleaned = {
        name: {key: value for key, value in table.items() if (name, key) not in old}
        for name, table in tables.items()
        if isinstance(table, Mapping)
    }
    analyses = [*document.get("analysis", ()), *by_kind.values()]
    return {**document, **cleaned, **({"analysis": analyses} if analyses else {})}


def _option_lines(key: str, value: object) -> dict[str, Any]:
    if key in _MOVED_OPTIONS:
        return {_MOVED_OPTIONS[key]: list(value) if isinstance(value, tuple) else value}
    return dict(value) if isinstance(value, Mapping) else {}


def _toml_literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def update_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded experiment document with the current names of its keys, values and analyses.

    Documents recorded in run directories, records and held-out federations are converted. Old names in new files are
    rejected.
    """
    return _translate_table(move_analyses(document), "", back=False)


def restore_document(document: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return a document, or its table called ``place``, with the original names of its keys and values.

    Digests of records and fingerprints of checkpoints are computed from this form, so they remain valid if a key is
    renamed.
    """
    return _translate_table(document, place, back=True)


def restore_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys and their values under the original names (see `restore_document`)."""
    return _translate_dotted(numbers, back=True)


def update_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded dotted keys under their current names, with their values."""
    return _translate_dotted(numbers, back=False)


def _translate_table(table: Mapping[str, Any], place: str, *, back: bool) -> dict[str, Any]:
    """Translate a table and its subtables to the current names, or to the original names if ``back`` is set."""
    kind = table.get("kind", table.get("source"))
    kinds = RENAMED_VALUES.get((place, "kind"), {})
    names = {**RENAMED_KEYS.get(place, {}), **RENAMED_KEYS.get(f"{place} {kinds.get(str(kind), kind)}", {})}
    first_names = {new: old for old, new in names.items()}
    translated = dict[str, Any]()
    for key, value in table.items():
        name = names.get(key, key)
        value = _translate_value(value, place, name, back=back)
        translated[first_names.get(name, name) if back else name] = value
    earlier = EARLIER_DEFAULTS.get(str(table.get("algorithm")), {}) if place == "method" else {}
    if back:
        return {key: value for key, value in translated.items() if key not in earlier or earlier[key] != value}
    return {**translated, **{key: value for key, value in earlier.items() if key not in translated}}


def _translate_value(value: Any, place: str, name: str, *, back: bool) -> Any:
    """Translate a key's value, which is a table, a list of tables, a dict of dotted keys, or a renamed value."""
    inner = _place_of(place, name)
    if isinstance(value, Mapping):
        if (place, name) == ("method", "choose"):
            return _translate_dotted(value, back=back)
        if (place, name) == ("tune", "space"):
            return {k: _translate_dotted(v, back=back) if isinstance(v, Mapping) else v for k, v in value.items()}
        if (place, name) == ("grid", "method"):
            return {
                k: _translate_table(v, "method", back=back) if isinstance(v, Mapping) else v for k, v in value.items()
            }
        return value if inner is None else _translate_table(value, inner, back=back)
    if isinstance(value, list | tuple) and inner in ("method", "analysis"):
        return [_translate_table(one, inner, back=back) if isinstance(one, Mapping) else one for one in value]
    return _translate_choice(value, place, name, back=back)


def _translate_choice(value: Any, place: str, name: str, *, back: bool) -> Any:
    choices = RENAMED_VALUES.get((place, name), {})
    if not choices:
        return value
    if isinstance(value, list):  # in a grid or a search
        return [_translate_choice(one, place, name, back=back) for one in value]
    if back and isinstance(value, str):
        return {new: old for old, new in choices.items()}.get(value, value)
    return choices.get(value, value) if isinstance(value, str) else value


def _translate_dotted(keys: Mapping[str, Any], *, back: bool) -> dict[str, Any]:
    translated = dict[str, Any]()
    for key, value in keys.items():
        head, dot, rest = key.partition(".")
        ((head, inner),) = _translate_table({head: {rest: value} if dot else value}, "", back=back).items()
        if dot:
            ((rest, value),) = inner.items()
        translated[f"{head}{dot}{rest}"] = value if dot else inner
    return translated


def _place_of(place: str, name: str) -> str | None:
    """Return the entry of `RENAMED_KEYS` that applies to the tables under a key.

    Return None if no key in these tables was renamed.
    """
    if place in ("", "method", "grid") and name in _TABLE_NAMES:
        return name
    if (place, name) == ("analysis", "rules"):
        return "rules"
    return place if place == "partition" and name in ("base", "first_partition", "second_partition") else None


_TABLE_NAMES = {"grid", "method", *(place.partition(" ")[0] for place in RENAMED_KEYS)} - {""}
"""Tables of an experiment document that contain renamed keys."""
