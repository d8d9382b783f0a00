"""What is refused of an experiment file before anything of it is made: keys, kinds, types and ranges of all tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedloom.errors import ConfigError, homes_of, unknown
from fedloom.experiment.shapes import Shape
from fedloom.imports import is_path
from fedloom.rundir import label_of
from fedloom.values import choose, table


class Table(NamedTuple):
    """What a table may hold.

    Attributes:
        kinds: a class (or its shape as plain data) by kind.
        key: the key that chooses; empty where there is one kind.
        default: the kind where none is chosen; None: a table without kind must be empty.
        open: a path may stand in place of a kind, which is for the reading of data to judge.
    """

    kinds: Mapping[str, Any]
    key: str = "kind"
    default: str | None = None
    open: bool = False


class Grammar(NamedTuple):
    """What an experiment file may hold.

    Attributes:
        head: its plain keys.
        tables: its tables.
        method: the methods by name.
        own: the plain keys of a method.
        overrides: keys and tables that a method may have for itself.
    """

    head: Any
    tables: Mapping[str, Table]
    method: Mapping[str, Any]
    own: Any
    overrides: tuple[str, ...]

    def map(self, change: Callable[[Any], Any]) -> Grammar:
        """The same with other leaves, each made of a class, or of the shape in its place."""

        def all_of(kinds: Mapping[str, Any]) -> dict[str, Any]:
            return {name: change(kind) for name, kind in kinds.items()}

        tables = {name: t._replace(kinds=all_of(t.kinds)) for name, t in self.tables.items()}
        return Grammar(change(self.head), tables, all_of(self.method), change(self.own), self.overrides)


def check(document: Mapping[str, Any], grammar: Grammar, shape: Callable[[Any], Shape], where: str) -> None:
    """Refuse a document that holds what no experiment can.

    Args:
        document: of a TOML file.
        grammar: what it may hold.
        shape: makes the shape of a leaf of the grammar; asked for the kinds that the document chooses.
        where: the file, for messages.

    Raises:
        ConfigError: an unknown key or kind, a wrong type or a value out of range; the message names the file, the key,
            what was got and what is allowed.
    """
    head = shape(grammar.head)
    allowed = (*grammar.tables, *head.fields, "method")
    for key in document:
        if key not in allowed:
            raise unknown("key", key, allowed, where, _home(key, document[key], grammar, shape))
    tables = {name: table(document.get(name, {}), f"{where}: [{name}]") for name in grammar.tables}
    if "data" not in document:
        raise ConfigError(f'{where}: the table [data] is missing; for example source = "digits"')
    if not isinstance(tables["data"].get("source"), str):
        names = ", ".join(grammar.tables["data"].kinds)
        raise ConfigError(f"{where}: [data] needs source, a data set's name or a path; names: {names}")
    methods = document.get("method")
    if not isinstance(methods, list) or not methods:
        raise ConfigError(f'{where}: at least one [[method]] is needed; for example algorithm = "fedavg"')
    head.check({key: document[key] for key in head.fields if key in document}, where)
    for name, given in tables.items():
        _table(name, given, grammar, shape, f"{where}: [{name}]")
    labels: list[Any] = []
    for k, method in enumerate(methods, 1):
        place = f"{where}: [[method]] {k}"
        labels.append(_method(table(method, place), tables, grammar, shape, place))
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{where}: two methods have the label {label!r}; give one of them another label = ...")


def _table(name: str, given: Mapping[str, Any], grammar: Grammar, shape: Callable[[Any], Shape], where: str) -> None:
    may = grammar.tables[name]
    kind = given.get(may.key, may.default) if may.key else ""
    if may.default is None and may.key:
        if not given or kind == "none":
            return
        if may.key not in given:
            raise ConfigError(f"{where}: {may.key} is missing; allowed: {', '.join(may.kinds)}, none")
    if may.key and (is_path(kind) or (may.open and kind not in may.kinds and _may_be_read(kind))):
        return
    what = {"data": "data set"}.get(name, f"{name} kind")
    found = shape(choose(what, may.kinds, kind, where))
    for key in given:
        if key not in (may.key, *found.fields):
            raise unknown("key", key, found.fields, where, _home(key, given[key], grammar, shape, but=name))
    found.check({key: value for key, value in given.items() if key != may.key}, where)


def _home(key: str, value: Any, grammar: Grammar, shape: Callable[[Any], Shape], but: str = "") -> str:
    """Where a key of another table belongs, as the end of a sentence; empty if no table has it.

    Args:
        key: as it was given.
        value: as it was given.
        grammar: what a file may hold.
        shape: makes the shape of a leaf of the grammar.
        but: the table that it was given in, or "method".
    """
    homes = {
        name: {k for kind in may.kinds.values() for k in shape(kind).fields} for name, may in grammar.tables.items()
    }
    homes["head"] = set(shape(grammar.head).fields)
    name, found = homes_of(key, {home: keys for home, keys in homes.items() if home != but})
    line = f"{name} = {json.dumps(value, default=str)}"
    if "head" in found:
        return f"it belongs at the top of the file, before any table: {line}"
    if found:
        tables = " or ".join(f"[{home}]" for home in found)
        for_one = (
            f"; for this method alone, {found[0]} = {{ {line} }}"
            if but == "method" and found[0] in grammar.overrides
            else ""
        )
        return f"it belongs in {tables}: {line}{for_one}"
    methods = [method for method, kind in grammar.method.items() if key in shape(kind).fields]
    if methods:
        some = ", ".join(methods[:6]) + (", ..." if len(methods) > 6 else "")
        return f"it is an option of methods ({some}): {line} below algorithm in their [[method]]"
    return ""


def _may_be_read(name: str) -> bool:
    """Whether a name that no data set has may be a path or ``hub:owner/name``."""
    return any(c in name for c in "/\\.:") or os.path.exists(name)


def _method(
    given: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
    grammar: Grammar,
    shape: Callable[[Any], Shape],
    where: str,
) -> Any:
    """Refuse a method; its label otherwise."""
    name: Any = given.get("algorithm")
    if not is_path(name):
        found, more = shape(choose("algorithm", grammar.method, name, where)), ("label", "settings", *grammar.overrides)
        for key in given:
            if key not in ("algorithm", *more, *found.fields):
                cure = _home(key, given[key], grammar, shape, but="method")
                raise unknown("key", key, (*found.fields, *more), where, cure)
        found.check({k: v for k, v in given.items() if k != "algorithm"}, where, more)
    label = given.get("label", label_of(given))
    plain = {"label": label, **{k: v for k, v in given.items() if k in ("rounds", "weights", "settings")}}
    shape(grammar.own).check(plain, where)
    for what in grammar.overrides:
        if what in given and what in tables:
            own = table(given[what], f"{where}: {what}")
            whole = merged(tables[what], own) if what == "local" else own
            _table(what, whole, grammar, shape, f"{where}: {what}")
    return label


def merged(local: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The table [local] with a method's own keys; epochs take the place of steps, and the other way round."""
    pairs = (("steps", "epochs"), ("epochs", "steps"))
    gone = {other for one, other in pairs if one in own and other not in own}
    return {**{key: value for key, value in local.items() if key not in gone}, **own}
