"""Experiment: a comparison as a value, read from a TOML file; one federation, one model, several methods."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, NonNegativeInt, create_model, field_validator

from fedloom.algorithms import REGISTRY, Algorithm, Preset
from fedloom.data.partition import PARTITIONS, Partition
from fedloom.data.sources import SOURCES, Source
from fedloom.data.sources import source as source_of
from fedloom.engine.setting import Rounds, Setting, Shares
from fedloom.errors import ConfigError, DataError, FedloomError
from fedloom.experiment.check import Grammar, Table, check, merged
from fedloom.experiment.shapes import Shape
from fedloom.experiment.tuning import Tune
from fedloom.imports import is_path
from fedloom.models import Import
from fedloom.rundir import label_of
from fedloom.values import Value, choose, difference, dump, fields_of, flat, make, make_kind


@dataclass(frozen=True)
class Method:
    """One method of the comparison.

    Attributes:
        label: what it is called.
        algorithm: what the file names: an entry of the registry, or a class of user code.
        options: its own keys.
        setting: its run, with the first seed.
        kind: its class or preset, where no name leads to it.
    """

    label: str
    algorithm: str
    options: dict[str, Any]
    setting: Setting
    kind: type[Algorithm] | Preset | None = None

    @property
    def entry(self) -> type[Algorithm] | Preset:
        """What `algorithm` names."""
        return self.kind or choose("algorithm", REGISTRY, self.algorithm, base=Algorithm)

    def settings(self) -> dict[str, Any]:
        """The method as a TOML table, defaults filled in."""
        known, algorithm = fields_of(self.entry), dump(self.setting.method)
        own = {k: v for k, v in self.setting.document().items() if k in Setting.own}
        named = {"algorithm": self.algorithm, "label": self.label}
        return {**named, **{k: v for k, v in algorithm.items() if k in known}, **self.options, **own}


def _printable(text: str) -> str:
    if not text.strip() or any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError(f"must be text that can be printed, got {text!r}")
    return text


Title = Annotated[str, AfterValidator(_printable)]
"""What tables and charts call something."""


Constants = Literal["default", "paper"]
"""The constants of options that are not given: fedloom's defaults, or the paper's own."""


def _no_path(text: str) -> str:
    if "/" in text or "\\" in text or text in (".", ".."):
        raise ValueError(f"must be a name, which a file can have, without / and \\, got {text!r}")
    return text


class Head(Value):
    """The plain keys of an experiment file that are no choices of a run; the others are those of `Setting`."""

    name: Annotated[Title, AfterValidator(_no_path)] = Field("experiment", description="name of the experiment")
    seeds: tuple[NonNegativeInt, ...] = Field((0,), min_length=1, description="one run of every method per seed")
    settings: Constants = Field("default", description="of every method that does not say its own: default or paper")

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"every seed once, got {list(seeds)}")
        return seeds


class _Own(Value):
    label: Title = Field(description="what the method is called in tables and charts")
    rounds: Rounds | None = Field(None, description="communication rounds, if not the experiment's")
    weights: Shares | None = Field(None, description="clients' shares of the objective, if not the experiment's")
    settings: Constants = Field("default", description="constants of the options that are not given")


def _grammar() -> Grammar:
    """What an experiment file may hold: the choices of `Setting`, and what only a comparison has."""
    plain: Any = {name: (field.annotation, field) for name, field in Setting.model_fields.items()}
    plain = {name: plain[name] for name in Setting.plain()}
    tables = {
        "data": Table(SOURCES, key="source", open=True),
        "partition": Table(PARTITIONS, default="iid"),
    }
    for name, may in Setting.tables().items():
        kinds = {k: kind if isinstance(kind, type) else type(kind) for k, kind in may.kinds.items()}
        tables[name] = Table(kinds, default=may.default) if kinds else Table({"": may.base}, key="")
    tables["tune"] = Table({"": Tune}, key="")
    return Grammar(create_model("Head", __base__=Head, **plain), tables, REGISTRY, _Own, Setting.own)


SHARED = ("model", "task")
"""What a method has from the experiment unless it has its own; settings name it there alone."""
GRAMMAR = _grammar()
"""What an experiment file may hold."""


@dataclass(frozen=True)
class Experiment:
    """A comparison of methods on the same federation, over seeds.

    Attributes:
        head: its name and seeds.
        source: where the data come from.
        source_options: the table [data].
        partition: how they are split.
        model_kind: kind of the table [model].
        common: what methods have that choose nothing for themselves.
        tune: the table [tune].
        methods: what is compared.
    """

    head: Head
    source: Source
    source_options: dict[str, Any]
    partition: Partition
    model_kind: str
    common: Setting
    tune: Tune
    methods: tuple[Method, ...]

    def with_(self, **choices: Any) -> Experiment:
        """The same experiment with other choices, in every method."""
        methods = tuple(replace(m, setting=m.setting.with_(**choices)) for m in self.methods)
        return replace(self, common=self.common.with_(**choices), methods=methods)

    def settings(self) -> dict[str, Any]:
        """The whole experiment as a TOML document, defaults filled in."""
        whole = self.common.document()
        shared = (*Setting.plain(), *SHARED)
        common = {k: v for k, v in whole.items() if k in shared or k not in Setting.own}
        methods = [m.settings() for m in self.methods]
        return {
            **dump(self.head),
            **{k: common.pop(k) for k in Setting.plain()},
            "data": self.source_options,
            "partition": dump(self.partition, kind=self.partition.kind),
            **common,
            "model": {**common["model"], "kind": self.model_kind},
            "method": [{k: v for k, v in m.items() if k not in SHARED or v != whole[k]} for m in methods],
        }


def parse(document: Mapping[str, Any], where: str = "experiment") -> Experiment:
    """The experiment of a TOML document.

    Raises:
        ConfigError: unknown keys, wrong types, values out of range; the message names the file, the key, what was got
            and what is allowed.
    """
    check(document, GRAMMAR, Shape.of, where)
    tables = {name: document.get(name, {}) for name in GRAMMAR.tables}
    data, methods = tables["data"], document["method"]
    head = make(Head, {k: document[k] for k in Head.model_fields if k in document}, where, Head.model_fields)
    plain = {key: document[key] for key in Setting.plain() if key in document}
    read = {name: kind.read(tables[name], f"{where}: [{name}]") for name, kind in Setting.tables().items()}
    common = make(Setting, {"algorithm": "fedavg", **plain, **read, "seed": head.seeds[0]}, where, Setting.model_fields)
    return Experiment(
        head=head,
        source=_source(data, f"{where}: [data]"),
        source_options=data,
        partition=make_kind(
            "partition", PARTITIONS, tables["partition"], f"{where}: [partition]", "iid", base=Partition
        ),
        model_kind="import" if isinstance(common.model, Import) else tables["model"].get("kind", "softmax"),
        common=common,
        tune=make(Tune, tables["tune"], f"{where}: [tune]", Tune.model_fields),
        methods=tuple(
            _method(_constants(m, head.settings), tables["local"], common, f"{where}: [[method]] {k}")
            for k, m in enumerate(methods, 1)
        ),
    )


def changed(before: Mapping[str, Any], now: Mapping[str, Any], free: str) -> str:
    """The first key in which recorded settings differ from those of now, for a message; empty where none does.

    Methods may be added or left out. What was recorded before an option existed has the option's default.

    Args:
        before: settings as a run directory has them.
        now: `Experiment.settings`.
        free: pattern of dotted keys that may differ.

    Raises:
        KeyError, TypeError: ``before`` is no document of settings.
    """
    try:
        before, known = parse(before).settings(), True
    except FedloomError:  # of a version that had other options
        known = False
    both = {m["label"] for m in before["method"]} & {m["label"] for m in now["method"]}

    def keys_of(document: Mapping[str, Any]) -> dict[str, Any]:
        shared = {**document, "method": [m for m in document["method"] if m["label"] in both]}
        found = flat(tomllib.loads(tomli_w.dumps(shared)))
        return {key: value for key, value in found.items() if not re.fullmatch(free, key)}

    was, new = keys_of(before), keys_of(now)
    if not known:
        was, new = ({key: some[key] for key in was.keys() & new.keys()} for some in (was, new))
    return difference(was, new)


def _source(data: Mapping[str, Any], where: str) -> Source:
    options = {k: v for k, v in data.items() if k != "source"}
    name = data["source"]
    if name in SOURCES or is_path(name):
        kind = choose("data set", SOURCES, name, where, Source)
        return make(kind, options, where, fields_of(kind))
    try:
        found = source_of(name, **({"agreement": agreed} if (agreed := options.get("agreement")) is not None else {}))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{where}: {error}") from None
    return make(lambda **o: source_of(name, **o), options, where, fields_of(type(found)))


def _constants(options: Mapping[str, Any], settings: Constants) -> Mapping[str, Any]:
    """The keys of a method with the experiment's choice of constants, where the method does not say its own."""
    return options if settings == "default" else {"settings": settings, **options}


def _method(options: Mapping[str, Any], local: Mapping[str, Any], common: Setting, where: str) -> Method:
    name: Any = options.get("algorithm")
    entry = choose("algorithm", REGISTRY, name, where, Algorithm)
    own = {k: v for k, v in options.items() if k not in ("algorithm", "label", *Setting.own)}
    made: Any = make(entry, own, where, {**fields_of(entry), **dict.fromkeys(("label", "settings", *Setting.own))})
    label = make(_Own, {"label": options.get("label", label_of(options))}, where, _Own.model_fields).label
    given = {k: v for k, v in options.items() if k in Setting.own}
    for what, kind in Setting.tables().items():
        if what in given:
            mine = merged(local, given[what]) if what == "local" else given[what]
            given[what] = kind.read(mine, f"{where}: {what}")
    setting = make(common.with_, {**given, "algorithm": made}, where, Setting.model_fields)
    return Method(label, name, own, setting)
