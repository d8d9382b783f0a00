"""Search spaces: the defaults of `spaces.toml`, what an experiment changes, and how values reach a method."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fedloom.errors import ConfigError, unknown
from fedloom.experiment import Experiment, parse
from fedloom.experiment.schema import Method
from fedloom.experiment.tuning import Dimension, Range, Tune
from fedloom.local import LocalSGD
from fedloom.values import fields_of

Params = Mapping[str, Any]
"""Values by setting, ``mu`` or ``local.lr``."""
Read = Callable[[Mapping[str, Any], str], Experiment]
"""(document, its name for messages) -> experiment; raises ConfigError."""
ALL = "all"


@cache
def defaults() -> tuple[Mapping[str, Mapping[str, Dimension]], Mapping[str, str]]:
    """The default space of every method, and the sentence on where it comes from."""
    tables = tomllib.loads((files("fedloom.tune") / "spaces.toml").read_text(encoding="utf-8"))
    sources = {name: str(table.pop("source")) for name, table in tables.items()}
    return Tune(space=tables).space, sources


def space_of(method: Method, tune: Tune, where: str) -> dict[str, Dimension]:
    """Where the settings of a method are looked for; what is said last, and for the method alone, counts.

    Raises:
        ConfigError: a setting that the method has not.
    """
    known = defaults()[0] if tune.defaults else {}
    own = [*fields_of(method.entry), *(f"local.{name}" for name in LocalSGD.model_fields)]
    space: dict[str, Dimension] = {}
    for table in (known, tune.space):
        for name in dict.fromkeys((ALL, method.algorithm, method.label)):
            for key, dimension in table.get(name, {}).items():
                if key not in own:
                    raise unknown("setting", key, own, f"{where}: [tune.space.{name}]")
                space[key] = dimension
    return {key: dimension for key, dimension in sorted(space.items()) if dimension}


def check_names(experiment: Experiment, where: str) -> None:
    """Refuse a space for a method that the experiment does not compare.

    Raises:
        ConfigError: the message has the names that are there.
    """
    there = [ALL, *(name for m in experiment.methods for name in (m.label, m.algorithm))]
    for name in experiment.tune.space:
        if name not in there:
            raise unknown("method", name, dict.fromkeys(there), f"{where}: [tune.space]")


def check_values(
    document: Mapping[str, Any], place: int, space: Mapping[str, Dimension], where: str, read: Read = parse
) -> None:
    """Refuse a space with a value that the method does not take.

    Raises:
        ConfigError: the method's own sentence on that value.
    """
    for key, dimension in space.items():
        for value in (dimension.low, dimension.high) if isinstance(dimension, Range) else dimension:
            try:
                read(with_params(document, place, {key: value}), where)
            except ConfigError as error:
                raise ConfigError(f"{where}: [tune.space], {key} = {value!r} cannot be tried: {error}") from None


def with_params(document: Mapping[str, Any], place: int, params: Params, **more: Any) -> dict[str, Any]:
    """The document of an experiment with settings of its method number ``place`` replaced; nothing else changes."""
    method = {**document["method"][place], **more}
    for key, value in params.items():
        table, _, name = key.rpartition(".")
        if table:
            method[table] = {**method.get(table, {}), name: value}
        else:
            method[key] = value
    methods = [*document["method"][:place], method, *document["method"][place + 1 :]]
    return {**document, "method": methods}


def own_params(method: Method, space: Mapping[str, Dimension]) -> Params | None:
    """The file's own values of the settings that are looked for; None where the space does not hold them all."""
    known = fields_of(method.entry)
    table = {**{key: field.default for key, field in known.items()}, **method.settings()}
    found = {key: _at(table, key) for key in space}
    return found if all(_holds(space[key], value) for key, value in found.items()) else None


def _at(table: Mapping[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    return table[first].get(rest) if rest else table.get(first)


def _holds(dimension: Dimension, value: Any) -> bool:
    if isinstance(dimension, Range):
        return isinstance(value, int | float) and dimension.low <= value <= dimension.high
    return value in dimension
