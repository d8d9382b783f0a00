"""Read experiment files: all keys, types and ranges in a file are checked here and converted to values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.analyses import Analysis, resolve_analysis
from fedloom.analyses.registry import get_analysis_name
from fedloom.data.sources import Source
from fedloom.engine.checks.moved import update_document
from fedloom.engine.setting import Setting
from fedloom.engine.tables import NamedMethod
from fedloom.errors import ConfigError, FedloomError
from fedloom.hints import KeyPlaces, unknown_name_error
from fedloom.lab.experiment.overrides import apply_overrides
from fedloom.lab.experiment.schema import (
    SETTING_TABLES,
    Constants,
    Experiment,
    Head,
    Method,
    MethodKeys,
    TopLevelKeys,
    file_places,
)
from fedloom.lab.experiment.units.grid import expand_grid
from fedloom.models import Import
from fedloom.rundir import get_label
from fedloom.storage import read_toml
from fedloom.trust import check_document
from fedloom.values import check_is_table, dump_value, find_difference, flatten_document, make


def read(
    path: Path,
    values: Sequence[str] = (),
    methods: Sequence[str] = (),
    rounds: int | None = None,
    *,
    trust: bool = False,
    refit: bool = False,
    recorded: bool = False,
    trains: bool = True,
    document: Mapping[str, object] | None = None,
    **engine: object,
) -> Experiment:
    """Read a TOML file and return its experiment, changed as described in `fedloom.lab.experiment.overrides`.

    Args:
        path: path of the file. The file may be in a run directory. In this case, its table ``resolved`` records the
            versions that the run used.
        values: changes to individual values, such as ``local.lr=0.1``.
        methods: labels or algorithms of the methods to keep. If empty, all methods are kept.
        rounds: number of rounds for every method, which overrides the file.
        trust: True to run code that the file refers to by import path even if another user owns the file.
        refit: True to train on all samples with the first seed.
        recorded: True if an earlier version may have written the file, as in a run directory. Such a file may use the
            old names of keys.
        trains: False if the caller does not train, so the file needs no method.
        document: content of the file, if it has already been read.
        engine: values for keys in the table [engine]. Values other than None override the file.

    Raises:
        ConfigError: the file is missing, is not valid TOML, contains invalid values, or refers to code and belongs to a
            different user.
    """
    document = read_toml(path, "experiment file") if document is None else document
    content = {key: value for key, value in document.items() if key != "resolved"}
    content = update_document(content) if recorded or "resolved" in document else content
    check_document(content, path, trust=trust)
    document = apply_overrides(content, str(path), values, methods, rounds, refit=refit)
    replaced = {key: value for key, value in engine.items() if value is not None}
    if replaced:
        document["engine"] = {**check_is_table(document.get("engine", {}), f"{path}: [engine]"), **replaced}
    return parse(document, str(path), trains=trains)


def parse(
    document: Mapping[str, Any], where: str = "experiment", way: KeyPlaces | None = None, *, trains: bool = True
) -> Experiment:
    """Check the content of an experiment file and return its experiment.

    Args:
        document: content of an experiment file. In Python, tables may be replaced by values, and algorithm names by
            method objects.
        where: name of the file, for error messages.
        way: keys accepted for the document's origin. If None, the document comes from a file.
        trains: False to accept an experiment without methods.

    Raises:
        ConfigError: a key is unknown, a type is wrong, or a value is out of range. The message states the file, the
            key, the given value, and the allowed values.
        DataError: the path of the data is not a data set.
    """
    document = expand_grid(document, where)
    way = way or file_places()
    for key, value in document.items():
        if key not in way.keys:
            raise unknown_name_error("key", key, way.keys, where, way.hint(key, value))
    top = make(
        TopLevelKeys,
        {key: document[key] for key in TopLevelKeys.model_fields if key in document},
        where,
        TopLevelKeys.model_fields,
    )
    if questions := top.model_dump()["questions"]:
        more = f" (and {len(questions) - 1} more questions in the file)" if len(questions) > 1 else ""
        raise ConfigError(f"{where} is a draft with an open question: {questions[0]}{more}")
    if "data" not in document:
        raise ConfigError(
            f'{where}: the table [data] is missing. A minimal table contains, for example, source = "digits"'
        )
    methods = document.get("method", None if trains else [])
    if not isinstance(methods, list) or (trains and not methods):
        raise ConfigError(f"{where}: at least one [[method]] is needed; {way.form}")
    source, partition, tune = (
        SETTING_TABLES[name].read(document.get(name, {}), f"{where}: {way.name_table(name)}", name, way)
        for name in ("data", "partition", "tune")
    )
    base, model = Setting.create("fedavg", seed=top.seeds[0]), document.get("model", {})
    choices = {key: document[key] for key in Setting.model_fields if key in document}
    analyses = read_analyses(document.get("analysis", ()), where)
    common = add_groups(Setting.read(choices, where, way, base), analyses)
    kind = model.get("kind", "softmax") if isinstance(model, Mapping) else common.document()["model"]["kind"]
    compared = _read_methods(methods, document.get("local", {}), common, top.defaults, where, way)
    whole = Experiment(
        head=Head(**{key: getattr(top, key) for key in Head.model_fields}),
        source=source,
        source_options=dump_value(document["data"]) if isinstance(document["data"], Source) else document["data"],
        partition=partition,
        model_kind="import" if isinstance(common.model, Import) else kind,
        common=common,
        tune=tune,
        methods=tuple(replace(method, setting=add_groups(method.setting, analyses)) for method in compared),
        analyses=analyses,
    )
    check_fits(whole, where)
    return whole


def check_fits(experiment: Experiment, where: str) -> None:
    """Raise an error if a model fitted by an analysis cannot be a row of the comparison.

    Raises:
        ConfigError: a method has the same label, or clients are attacked.
    """
    labels = [method.label for method in experiment.methods]
    settings = [experiment.common, *(method.setting for method in experiment.methods)]
    for fit in experiment.compared[len(labels) :]:
        if fit.label in labels:
            raise ConfigError(
                f"{where}: the row of the analysis {fit.algorithm!r} would have the same label as the method "
                f"{fit.label!r}. Give the method another label"
            )
        if any(setting.attack is not None for setting in settings):
            raise ConfigError(
                f"{where}: the analysis {fit.algorithm!r} has compare = true, but attacks do not affect its sums, so "
                "a comparison with attacked methods would be unfair. Omit compare, or omit attack"
            )


def read_analyses(entries: object, where: str) -> tuple[Analysis, ...]:
    """Return the analyses given by a file's [[analysis]] tables, or by values, names and tables in Python.

    Raises:
        ConfigError: a kind or option is unknown, or two analyses have the same kind.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(
            f"{where}: an analysis must be a table in a list. Write [[analysis]], and on the next line kind = ..."
        )
    values = list[Analysis]()
    for number, entry in enumerate(entries, 1):
        place = f"{where}: [[analysis]] {number}"
        if not isinstance(entry, Analysis | str):
            entry = check_is_table(entry, place, "write [[analysis]] and below it kind = ...")
        values.append(resolve_analysis(entry, {}, place))
    kinds = [get_analysis_name(value) for value in values]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(
                f"{where}: two analyses are of the kind {kind!r} and would write the same table. Remove one of them"
            )
    return tuple(values)


def add_groups(setting: Setting, analyses: Iterable[Analysis]) -> Setting:
    """Return the setting, and add groups to it if its aggregation weights compare groups of rows.

    The groups are taken from the first analysis that defines groups.
    """
    columns = next((value.kept_columns for value in analyses if value.kept_columns), ())
    weigher = setting.aggregation_weights.with_groups(columns) if columns else setting.aggregation_weights
    return setting if weigher == setting.aggregation_weights else setting.with_(aggregation_weights=weigher)


def merge_local(local: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return the table [local] with the changes in a method's table.

    If the changes set epochs, steps are removed, and vice versa.
    """
    pairs = (("steps", "epochs"), ("epochs", "steps"))
    replaced = {other for key, other in pairs if key in changes and other not in changes}
    return {**{key: value for key, value in local.items() if key not in replaced}, **changes}


def difference_to_recorded(recorded: Mapping[str, Any], now: Mapping[str, Any], free: str) -> str:
    """Return a message about the first key whose recorded and current values differ, or "" if all values match.

    Methods and analyses can be added or removed. If an option did not exist when the settings were recorded, its
    default applies.

    Args:
        recorded: settings stored in a run directory.
        now: current settings, from `Experiment.settings`.
        free: regular expression for the dotted keys that may differ.

    Raises:
        KeyError, TypeError: ``recorded`` does not have the structure of recorded settings.
    """
    now, recorded = (
        {k: v for k, v in document.items() if k != "analysis"} for document in (now, update_document(recorded))
    )
    try:
        recorded, complete = parse(recorded).settings(), True
    except FedloomError:  # the settings were written by an earlier version with other options
        complete = False
    both = {m["label"] for m in recorded["method"]} & {m["label"] for m in now["method"]}

    def keys_of(document: Mapping[str, Any]) -> dict[str, object]:
        shared = {**document, "method": [m for m in document["method"] if m["label"] in both]}
        dotted = flatten_document(tomllib.loads(tomli_w.dumps(shared)))
        return {key: value for key, value in dotted.items() if not re.fullmatch(free, key)}

    before, after = keys_of(recorded), keys_of(now)
    if not complete:
        before, after = ({key: side[key] for key in before.keys() & after.keys()} for side in (before, after))
    return find_difference(before, after)


def _read_methods(
    entries: Sequence[object], local: object, common: Setting, defaults: Constants, where: str, way: KeyPlaces
) -> tuple[Method, ...]:
    way, methods = way.select_method("label", "defaults", *Setting.per_method), []
    for number, entry in enumerate(entries, 1):
        declared = check_is_table(entry, f"{where}: [[method]] {number}", way.form)
        place = f"[[method]] {number}" if way.file else str(declared.get("label"))
        methods.append(_read_method(declared, local, common, defaults, f"{where}: {place}", way))
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{where}: two methods have the label {label!r}. Set label = ... in one of them")
    return tuple(methods)


def _read_method(
    declared: Mapping[str, Any], local: object, common: Setting, defaults: Constants, where: str, way: KeyPlaces
) -> Method:
    """Return the method that a table describes.

    The experiment's choice of defaults applies unless the table specifies its own.
    """
    if "algorithm" not in declared or (way.file and not isinstance(declared["algorithm"], str)):
        got = f"must be a name, got {declared['algorithm']!r:.80}" if "algorithm" in declared else "is missing"
        raise ConfigError(f"{where}: algorithm {got}; {way.form}")
    keys = {"label": get_label(declared), **{key: declared[key] for key in MethodKeys.model_fields if key in declared}}
    label = make(MethodKeys, keys, where, MethodKeys.model_fields).label
    choices = {key: declared[key] for key in Setting.per_method if key in declared}
    options = {key: value for key, value in declared.items() if key not in ("algorithm", "label", *choices)}
    constants = {} if defaults == "default" else {"defaults": defaults}
    method = NamedMethod.read(declared["algorithm"], {**constants, **options}, where, way)
    if isinstance(choices.get("local"), Mapping):
        choices["local"] = merge_local(
            local if isinstance(local, Mapping) else dump_value(common.local), choices["local"]
        )
    setting = common.read({**choices, "algorithm": method.value}, where, way, common)
    return Method(label, method.name, {**constants, **options}, setting, method.entry)
