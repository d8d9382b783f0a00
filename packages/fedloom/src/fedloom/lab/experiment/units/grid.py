"""Grid: replace each method of an experiment file with one method per combination of values in its table [grid]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from fedloom.algorithms import REGISTRY, Algorithm
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError
from fedloom.formats import format_options
from fedloom.hints import unknown_name_error
from fedloom.rundir import get_label
from fedloom.values import check_is_table, choose, fields_of

MAX_METHODS = 10_000
"""Maximum number of methods that a grid may produce."""


def expand_grid(document: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return a document in which each method is replaced with one method per combination of values in ``[grid]``.

    Keys have the same form as for ``--set``: an option of methods, such as ``lam``, or a key of a table that a method
    may define, such as ``local.lr``. A key that starts with ``method.LABEL.`` applies only to the method with this
    label. Methods without the option remain unchanged.

    Args:
        document: content of an experiment file.
        where: name of the file, for error messages.

    Raises:
        ConfigError: no method accepts a key, a key applies to the whole experiment, or the values are not a list.
    """
    changed = {key: value for key, value in document.items() if key != "grid"}
    methods = document.get("method")
    if "grid" not in document or not isinstance(methods, list):
        return changed
    entries = [check_is_table(method, f"{where}: [[method]]") for method in methods]
    dimensions = dict(_grid_dimensions(check_is_table(document["grid"], f"{where}: [grid]"), where))
    labels = [get_label(entry) for entry in entries]
    names = {label: _option_names(entry, where) for label, entry in zip(labels, entries, strict=True)}
    for key in dimensions:
        _check_grid_key(key, names, where)
    varied = [
        _vary_method(entry, dict(zip(chosen, values, strict=True)))
        for label, entry in zip(labels, entries, strict=True)
        for chosen in [_method_values(dimensions, label, names[label])]
        for values in product(*chosen.values())
    ]
    if len(varied) > MAX_METHODS:
        raise ConfigError(
            f"{where}: [grid] defines {len(varied)} methods, but at most {MAX_METHODS} are allowed. Use fewer values"
        )
    return {**changed, "method": varied}


def _grid_dimensions(values: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each dotted key of the grid with its list of values."""
    for name, choices in values.items():
        key = f"{prefix}{name}"
        if isinstance(choices, Mapping):
            yield from _grid_dimensions(choices, where, f"{key}.")
        elif not isinstance(choices, list) or not choices:
            raise ConfigError(
                f"{where}: [grid] {key} must be a list of values, such as [0.1, 0.3], got {choices!r:.80}"
            )
        else:
            distinct = [value for k, value in enumerate(choices) if value not in choices[:k]]
            if len(distinct) < len(choices):
                raise ConfigError(f"{where}: [grid] {key} must contain every value only once, got {choices!r:.80}")
            yield key, choices


def _option_names(entry: Mapping[str, Any], where: str) -> list[str]:
    name = str(entry.get("algorithm"))
    return list(fields_of(choose("algorithm", REGISTRY, name, f"{where}: [[method]]", Algorithm)))


def _check_grid_key(key: str, names: Mapping[str, list[str]], where: str) -> None:
    """Raise an error for a key that no method accepts."""
    of_method = key.startswith("method.")
    label = next((label for label in names if key.startswith(f"method.{label}.")), None) if of_method else None
    if of_method and label is None:
        raise unknown_name_error("method", key.split(".")[1], names, f"{where}: [grid]")
    name = key.removeprefix(f"method.{label}.") if label is not None else key
    allowed = {*(names[label] if label is not None else (n for some in names.values() for n in some))}
    if name.partition(".")[0] in (*Setting.per_method, *allowed):
        return
    if name.partition(".")[0] in (*Setting.tables(), "data", "partition", "seeds", "seed"):
        raise ConfigError(
            f"{where}: [grid] cannot vary {key}, because all methods of an experiment share this key. "
            f"A grid can vary only method options and {', '.join(Setting.per_method)}. Write a "
            "separate file for each value, or use --set and --out"
        )
    raise unknown_name_error("key", name, sorted(allowed), f"{where}: [grid]")


def _method_values(dimensions: Mapping[str, list[Any]], label: str, names: list[str]) -> dict[str, list[Any]]:
    """Return the values that apply to a method, keyed by option.

    Values for this method override values for all methods.
    """
    shared = {
        key: values for key, values in dimensions.items() if key.partition(".")[0] in (*Setting.per_method, *names)
    }
    prefix = f"method.{label}."
    return shared | {key.removeprefix(prefix): v for key, v in dimensions.items() if key.startswith(prefix)}


def _vary_method(entry: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a method with the given values, and with a label that states them."""
    varied = {**entry}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        varied[name] = {**check_is_table(varied.get(name, {}), name), rest: value} if rest else value
    return {**varied, "label": f"{get_label(entry)}, {format_options(values, 12)}"} if values else varied
