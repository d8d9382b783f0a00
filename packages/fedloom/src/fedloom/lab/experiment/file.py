"""Read experiment files: every key, kind, type and range is checked here once, and a value made of it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.algorithms import REGISTRY, Algorithm
from fedloom.analyses import Analysis, analysis_of
from fedloom.data.sources import SOURCES, Source
from fedloom.data.sources import source as source_of
from fedloom.engine.checks.moved import moved_key, with_analyses
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, DataError, FedloomError, homes_of, nearest, unknown
from fedloom.imports import is_path
from fedloom.lab.experiment.overrides import with_overrides
from fedloom.lab.experiment.schema import TABLES, Constants, Experiment, Head, Method, MethodKeys, Top
from fedloom.models import Import
from fedloom.rundir import label_of
from fedloom.storage import read_toml
from fedloom.trust import check_document
from fedloom.values import choose, difference, fields_of, flat, kind_of, make, table

METHOD = 'for example [[method]] and below it algorithm = "fedavg"'
"""How an experiment file names a method."""


def read(
    path: Path,
    values: Sequence[str] = (),
    methods: Sequence[str] = (),
    rounds: int | None = None,
    *,
    trust: bool = False,
    refit: bool = False,
    document: Mapping[str, object] | None = None,
    **engine: object,
) -> Experiment:
    """Read the experiment of a TOML file, with the changes of `fedloom.lab.experiment.overrides.with_overrides`.

    Args:
        path: the file; that of a run directory too, whose table ``resolved`` records with what it was made.
        values: other values, as ``local.lr=0.1``.
        methods: the methods that stay; all when empty.
        rounds: of every method.
        trust: run the code that it names by import path, though it is another user's.
        refit: train on all samples with the first seed.
        document: of the file, where it has been read already; the file is not read again then.
        engine: replaces keys of its [engine], where it is not None.

    Raises:
        ConfigError: the file is missing, not TOML, holds what cannot be, or is another user's and names code.
    """
    document = read_toml(path, "experiment file") if document is None else document
    content = {key: value for key, value in document.items() if key != "resolved"}
    content = with_analyses(content) if "resolved" in document else content
    check_document(content, path, trust=trust)
    document = with_overrides(content, str(path), values, methods, rounds, refit=refit)
    replaced = {key: value for key, value in engine.items() if value is not None}
    if replaced:
        document["engine"] = {**_table("engine", document.get("engine", {}), f"{path}: [engine]"), **replaced}
    return parse(document, str(path))


def parse(document: Mapping[str, object], where: str = "experiment") -> Experiment:
    """Make the experiment of a TOML document.

    Args:
        document: of an experiment file.
        where: the file, for messages.

    Raises:
        ConfigError: unknown keys, wrong types, values out of range; the message names the file, the key, what was got
            and what is allowed.
        DataError: the path of its data leads to no data set.
    """
    _refuse_unknown(document, (*TABLES, *Top.model_fields, "method", "analysis"), where, "")
    tables = {name: _table(name, document.get(name, {}), f"{where}: [{name}]") for name in TABLES}
    top = make(Top, {key: document[key] for key in Top.model_fields if key in document}, where, Top.model_fields)
    if questions := top.model_dump()["questions"]:
        more = f" (and {len(questions) - 1} questions more in the file)" if len(questions) > 1 else ""
        raise ConfigError(f"{where}: is a draft with an open question: {questions[0]}{more}")
    if "data" not in document:
        raise ConfigError(f'{where}: the table [data] is missing; for example source = "digits"')
    if not isinstance(tables["data"].get("source"), str):
        names = ", ".join(SOURCES)
        raise ConfigError(f"{where}: [data] needs source, a data set's name or a path; names: {names}")
    methods = document.get("method")
    if not isinstance(methods, list) or not methods:
        raise ConfigError(f"{where}: at least one [[method]] is needed; {METHOD}")
    values = {name: _read_table(name, options, f"{where}: [{name}]") for name, options in tables.items()}
    source, partition, tune = (values.pop(name) for name in ("data", "partition", "tune"))
    plain = {key: getattr(top, key) for key in Setting.plain() if key in document}
    choices = {"algorithm": "fedavg", **plain, **values, "seed": top.seeds[0]}
    analyses = read_analyses(document.get("analysis", ()), where)
    common = grouped(make(Setting, choices, where, Setting.model_fields), analyses)
    return Experiment(
        head=Head(**{key: getattr(top, key) for key in Head.model_fields}),
        source=source,
        source_options=tables["data"],
        partition=partition,
        model_kind="import" if isinstance(common.model, Import) else tables["model"].get("kind", "softmax"),
        common=common,
        tune=tune,
        methods=_methods(methods, tables["local"], common, top.settings, where, analyses),
        analyses=analyses,
    )


def read_analyses(entries: object, where: str) -> tuple[Analysis, ...]:
    """Return the analyses of a file's [[analysis]], or of values, names and tables in Python.

    Raises:
        ConfigError: an unknown kind or option, or two analyses of one kind.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"{where}: an analysis is a table of its own: write [[analysis]] and below it kind = ...")
    values = list[Analysis]()
    for number, entry in enumerate(entries, 1):
        place = f"{where}: [[analysis]] {number}"
        if not isinstance(entry, Analysis | str):
            entry = table(entry, place, "write [[analysis]] and below it kind = ...")
        values.append(analysis_of(entry, {}, place))
    kinds = [kind_of(value) for value in values]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(
                f"{where}: two analyses are of the kind {kind!r}, and their tables have one name; keep one"
            )
    return tuple(values)


def grouped(setting: Setting, analyses: Iterable[Analysis]) -> Setting:
    """Return the setting with the groups of the first analysis that names some in a weigher that compares groups."""
    columns = next((value.kept_columns for value in analyses if value.kept_columns), ())
    weigher = setting.weigher.with_groups(columns) if columns else setting.weigher
    return setting if weigher == setting.weigher else setting.with_(weigher=weigher)


def merged(local: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Merge the table [local] with a method's own; epochs take the place of steps, and the other way round."""
    pairs = (("steps", "epochs"), ("epochs", "steps"))
    replaced = {other for key, other in pairs if key in changes and other not in changes}
    return {**{key: value for key, value in local.items() if key not in replaced}, **changes}


def difference_to_recorded(recorded: Mapping[str, Any], now: Mapping[str, Any], free: str) -> str:
    """Name the first key in which recorded settings differ from those of now, for a message; empty where none does.

    Methods and analyses may be added or left out. What was recorded before an option existed has its default.

    Args:
        recorded: settings as a run directory has them.
        now: `Experiment.settings`.
        free: pattern of dotted keys that may differ.

    Raises:
        KeyError, TypeError: ``recorded`` is no document of settings.
    """
    now, recorded = (
        {k: v for k, v in document.items() if k != "analysis"} for document in (now, with_analyses(recorded))
    )
    try:
        recorded, complete = parse(recorded).settings(), True
    except FedloomError:  # of a version that had other options
        complete = False
    both = {m["label"] for m in recorded["method"]} & {m["label"] for m in now["method"]}

    def keys_of(document: Mapping[str, Any]) -> dict[str, object]:
        shared = {**document, "method": [m for m in document["method"] if m["label"] in both]}
        dotted = flat(tomllib.loads(tomli_w.dumps(shared)))
        return {key: value for key, value in dotted.items() if not re.fullmatch(free, key)}

    before, after = keys_of(recorded), keys_of(now)
    if not complete:
        before, after = ({key: side[key] for key in before.keys() & after.keys()} for side in (before, after))
    return difference(before, after)


def _methods(
    entries: Sequence[object],
    local: Mapping[str, object],
    common: Setting,
    settings: Constants,
    where: str,
    analyses: Sequence[Analysis],
) -> tuple[Method, ...]:
    places = [f"{where}: [[method]] {number}" for number in range(1, len(entries) + 1)]
    methods = tuple(
        _method(table(entry, place, METHOD), local, common, settings, place)
        for entry, place in zip(entries, places, strict=True)
    )
    methods = tuple(replace(method, setting=grouped(method.setting, analyses)) for method in methods)
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{where}: two methods have the label {label!r}; give one of them another label = ...")
    return methods


def _method(
    options: Mapping[str, object], local: Mapping[str, object], common: Setting, settings: Constants, where: str
) -> Method:
    """Make the method of a table; the experiment's choice of constants holds where it has none."""
    name = str(options.get("algorithm"))
    entry = choose("algorithm", REGISTRY, name, where, Algorithm)
    beside = ("label", "settings", *Setting.per_method)
    fields = {**fields_of(entry), **dict.fromkeys(beside)}
    _refuse_unknown({key: value for key, value in options.items() if key != "algorithm"}, fields, where, "method")
    plain = {"label": label_of(options), **{key: options[key] for key in MethodKeys.model_fields if key in options}}
    constants = {} if settings == "default" else {"settings": settings}
    parameters = {
        **constants,
        **{k: v for k, v in options.items() if k not in ("algorithm", "label", *Setting.per_method)},
    }
    label = make(MethodKeys, plain, where, MethodKeys.model_fields).label
    algorithm = make(entry, parameters, where, fields)
    choices: dict[str, object] = {"algorithm": algorithm}
    for key in Setting.per_method:
        if key in options and key in TABLES:
            changes = _table(key, options[key], f"{where}: {key}")
            choices[key] = _read_table(key, merged(local, changes) if key == "local" else changes, f"{where}: {key}")
        elif key in options:
            choices[key] = options[key]
    return Method(label, name, parameters, make(common.with_, choices, where, Setting.model_fields))


def _table(name: str, options: object, where: str) -> dict[str, Any]:
    """The table of a name; the refusal of anything else writes it as a table."""
    may = TABLES[name]
    if not may.kinds:
        return table(options, where, f"write {name} = {{ KEY = VALUE }}; keys: {', '.join(may.base.model_fields)}")
    is_kind = isinstance(options, str) and (options in may.kinds or is_path(options))
    kind = json.dumps(options) if is_kind else "KIND"
    kinds = "" if is_kind else f"; {nearest(options, may.kinds)}"
    return table(options, where, f"write {name} = {{ {may.key} = {kind} }}{kinds}")


def _read_table(name: str, options: Mapping[str, object], where: str) -> Any:
    """Make the value of a table."""
    if name == "data":
        return _source(options, where)
    may = TABLES[name]
    chosen = may.class_of(options)
    if chosen is not None:
        keys = {key: value for key, value in options.items() if not may.kinds or key != may.key}
        _refuse_unknown(keys, fields_of(chosen), where, name)
    return may.read(options, where)


def _source(section: Mapping[str, object], where: str) -> Source:
    """Make the source of the table [data]; a path is looked at, so that its reader is known."""
    options = {key: value for key, value in section.items() if key != "source"}
    name = str(section["source"])
    if name in SOURCES or is_path(name):
        kind = choose("data set", SOURCES, name, where, Source)
        _refuse_unknown(options, fields_of(kind), where, "data")
        return make(kind, options, where, fields_of(kind))
    agreement = {"agreement": options["agreement"]} if options.get("agreement") is not None else {}
    try:
        fields = fields_of(type(source_of(name, **agreement)))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{where}: {error}") from None
    _refuse_unknown(options, fields, where, "data")
    return make(lambda **o: source_of(name, **o), options, where, fields)


def _refuse_unknown(options: Mapping[str, object], allowed: Iterable[str], where: str, place: str) -> None:
    for key, value in options.items():
        if key not in allowed:
            raise unknown("key", key, allowed, where, _home(key, value, place))


def _home(key: str, value: object, place: str) -> str:
    """Name the table that a misplaced key belongs in, as the end of a sentence; empty if no table has it.

    Args:
        key: the key.
        value: its value.
        place: the table that holds it, "method", or empty for the top of the file.
    """
    if cure := moved_key(place, key, value):
        return cure
    kinds = TABLES[place].classes() if place in TABLES else {}
    if able := [repr(kind) for kind, owner in kinds.items() if key in fields_of(owner)]:
        return f"it is an option of kind {' or '.join(able)}"
    homes = {name: {k for kind in may.classes().values() for k in fields_of(kind)} for name, may in TABLES.items()}
    homes["head"] = set(Top.model_fields)
    name, owners = homes_of(key, {home: keys for home, keys in homes.items() if home != place})
    line = f"{name} = {json.dumps(value, default=str)}"
    if "head" in owners:
        return f"it belongs at the top of the file, before any table: {line}"
    if owners:
        tables = " or ".join(f"[{home}]" for home in owners)
        alone = place == "method" and owners[0] in Setting.per_method
        return f"it belongs in {tables}: {line}" + (
            f"; for this method alone, {owners[0]} = {{ {line} }}" if alone else ""
        )
    methods = [method for method, entry in REGISTRY.items() if key in fields_of(entry)]
    if methods:
        some = ", ".join(methods[:6]) + (", ..." if len(methods) > 6 else "")
        return f"it is an option of methods ({some}): {line} below algorithm in their [[method]]"
    return ""
