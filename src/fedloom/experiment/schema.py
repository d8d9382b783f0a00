"""Experiment: a comparison as a value, read from a TOML file; one federation, one model, several methods."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, field_validator

from fedloom.algorithms import REGISTRY, Algorithm, Composition, Preset
from fedloom.choose import SAMPLERS, WEIGHERS, Sampler, Weigher
from fedloom.data.federation import Federation
from fedloom.data.partition import PARTITIONS, Partition
from fedloom.data.sources import SOURCES, Source
from fedloom.data.sources import source as source_of
from fedloom.engine.settings import Engine, Evaluate
from fedloom.errors import ConfigError, DataError
from fedloom.experiment.check import OVERRIDES, Grammar, Table, check, merged
from fedloom.experiment.shapes import Shape
from fedloom.experiment.tables import dump
from fedloom.experiment.tuning import Tune
from fedloom.imports import find, is_path
from fedloom.local import Local
from fedloom.models import MODELS, PAPERS, Augment, Import, ModelSpec, spec_of
from fedloom.rows.aggregate import AGGREGATORS, Aggregator
from fedloom.rows.attacks import ATTACKS, Attack
from fedloom.rows.channel import CHANNELS, Channel
from fedloom.values import Value, choose, fields_of, make, make_kind


@dataclass(frozen=True)
class Method:
    """One method of the comparison, with everything that it has for itself."""

    label: str
    algorithm: str
    options: dict[str, Any]
    composition: Composition
    local: Local
    sampler: Sampler
    weigher: Weigher
    aggregator: Aggregator | None
    channel: Channel | None
    rounds: int

    @property
    def entry(self) -> type[Algorithm] | Preset:
        """What `algorithm` names: an entry of the registry, or a class of user code."""
        return choose("algorithm", REGISTRY, self.algorithm, base=Algorithm)

    def settings(self) -> dict[str, Any]:
        """The method as a TOML table, defaults filled in."""
        known = fields_of(self.entry)
        algorithm = {k: v for k, v in dump(self.composition.algorithm).items() if k in known}
        local = {k: v for k, v in dump(self.local).items() if k != "epochs" or self.local.steps is None}
        return {
            "algorithm": self.algorithm,
            "label": self.label,
            "rounds": self.rounds,
            **algorithm,
            **self.options,
            "local": local,
            "sampler": dump(self.sampler, kind=self.sampler.kind),
            "weigher": dump(self.weigher, kind=self.weigher.kind),
            **{k: dump(v) for k, v in (("aggregator", self.aggregator), ("channel", self.channel)) if v is not None},
        }


def _printable(text: str) -> str:
    if not text.strip() or any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError(f"must be text that can be printed, got {text!r}")
    return text


Title = Annotated[str, AfterValidator(_printable)]
"""What tables and charts call something."""
Rounds = Annotated[int, Field(ge=1, description="communication rounds")]


class Head(Value):
    """The plain keys of an experiment file."""

    name: Title = Field("experiment", description="name of the experiment")
    rounds: Rounds = 100
    seeds: tuple[NonNegativeInt, ...] = Field((0,), min_length=1, description="one run of every method per seed")
    weights: Literal["uniform", "samples"] = Field(
        "uniform", description="clients' shares alpha_i of the objective, where a method reads them: 1/n, or by samples"
    )

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"every seed once, got {list(seeds)}")
        return seeds


class _MethodHead(Value):
    label: Title = Field(description="what the method is called in tables and charts")
    rounds: Rounds | None = Field(None, description="communication rounds, if not the experiment's")


GRAMMAR = Grammar(
    head=Head,
    tables={
        "data": Table(SOURCES, key="source", open=True),
        "partition": Table(PARTITIONS, default="iid"),
        "model": Table({**MODELS, **{name: type(spec) for name, spec in PAPERS.items()}}, default="softmax"),
        "augment": Table({"": Augment}, key=""),
        "local": Table({"": Local}, key=""),
        "sampler": Table(SAMPLERS, default="uniform"),
        "weigher": Table(WEIGHERS, default="uniform"),
        "aggregator": Table(AGGREGATORS),
        "channel": Table(CHANNELS),
        "attack": Table(ATTACKS),
        "evaluate": Table({"": Evaluate}, key=""),
        "engine": Table({"": Engine}, key=""),
        "tune": Table({"": Tune}, key=""),
    },
    method=REGISTRY,
    own=_MethodHead,
)
"""What an experiment file may hold."""


@dataclass(frozen=True)
class Experiment:
    """A comparison of methods on the same federation, over seeds."""

    head: Head
    source: Source
    source_options: dict[str, Any]
    partition: Partition
    model: ModelSpec
    model_kind: str
    augment: Augment
    attack: Attack | None
    evaluate: Evaluate
    engine: Engine
    tune: Tune
    methods: tuple[Method, ...]

    def arguments(self, method: Method, fed: Federation, seed: int) -> dict[str, Any]:
        """What `simulate` takes for one run of a method."""
        return {
            "algorithm": method.composition,
            "fed": fed,
            "model": self.model,
            "rounds": method.rounds,
            "seed": seed,
            "local": method.local,
            "sampler": method.sampler,
            "weigher": method.weigher,
            "aggregator": method.aggregator,
            "augment": self.augment,
            "attack": self.attack,
            "channel": method.channel,
            "weights": self.head.weights,
            "evaluate": self.evaluate,
            "engine": self.engine,
        }

    def settings(self) -> dict[str, Any]:
        """The whole experiment as a TOML document, defaults filled in."""
        return {
            **dump(self.head),
            "data": self.source_options,
            "partition": dump(self.partition, kind=self.partition.kind),
            "model": dump(self.model, kind=self.model_kind),
            **({} if self.attack is None else {"attack": dump(self.attack)}),
            "augment": dump(self.augment),
            "evaluate": dump(self.evaluate),
            "engine": dump(self.engine),
            "method": [m.settings() for m in self.methods],
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
    plain = {key: document[key] for key in Head.model_fields if key in document}
    head = make(Head, plain, where, Head.model_fields)
    model = _model(tables["model"], f"{where}: [model]")
    return Experiment(
        head=head,
        source=_source(data, f"{where}: [data]"),
        source_options=data,
        partition=make_kind(
            "partition", PARTITIONS, tables["partition"], f"{where}: [partition]", "iid", base=Partition
        ),
        model=model,
        model_kind="import" if isinstance(model, Import) else tables["model"].get("kind", "softmax"),
        augment=make(Augment, tables["augment"], f"{where}: [augment]", Augment.model_fields),
        attack=_optional("attack", ATTACKS, tables["attack"], f"{where}: [attack]", Attack),
        evaluate=make(Evaluate, tables["evaluate"], f"{where}: [evaluate]", Evaluate.model_fields),
        engine=make(Engine, tables["engine"], f"{where}: [engine]", Engine.model_fields),
        tune=make(Tune, tables["tune"], f"{where}: [tune]", Tune.model_fields),
        methods=tuple(
            _method(m, tables, head.rounds, where, f"{where}: [[method]] {k}") for k, m in enumerate(methods, 1)
        ),
    )


def _source(data: Mapping[str, Any], where: str) -> Source:
    options = {k: v for k, v in data.items() if k != "source"}
    name = data["source"]
    if name in SOURCES or is_path(name):
        kind = choose("data set", SOURCES, name, where, Source)
        return make(kind, options, where, fields_of(kind))
    try:
        found = source_of(name)
    except (ConfigError, DataError) as error:
        raise type(error)(f"{where}: {error}") from None
    return make(lambda **o: source_of(name, **o), options, where, fields_of(type(found)))


def _model(options: Mapping[str, Any], where: str) -> ModelSpec:
    kind = options.get("kind", "softmax")
    rest = {k: v for k, v in options.items() if k != "kind"}
    if is_path(kind):
        found = find(kind, "model", where)
        if not (isinstance(found, type) and issubclass(found, ModelSpec)):
            return Import(path=kind, options=rest)
        return make_kind("model", {}, options, where, base=ModelSpec)  # type: ignore[no-any-return]
    value = type(PAPERS[kind]) if kind in PAPERS else MODELS[kind]
    return make(lambda **given: spec_of(kind, **given), rest, where, fields_of(value))


def _optional(what: str, registry: Mapping[str, Any], options: Mapping[str, Any], where: str, base: type) -> Any:
    """The value of a table that may be left out; with ``kind = "none"`` it is as if it was."""
    if not options or options.get("kind") == "none":
        return None
    return make_kind(what, registry, options, where, base=base)


def _method(
    options: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], rounds: int, file: str, where: str
) -> Method:
    name: Any = options.get("algorithm")
    entry = choose("algorithm", REGISTRY, name, where, Algorithm)
    own = {k: v for k, v in options.items() if k not in ("algorithm", "label", *OVERRIDES)}
    made: Any = make(entry, own, where, {**fields_of(entry), **dict.fromkeys(("label", *OVERRIDES))})
    local = merged(tables["local"], options.get("local", {}))

    def own_kind(what: str, registry: Mapping[str, Any], base: type, *, optional: bool = False) -> Any:
        place = f"{where}: {what}" if what in options else f"{file}: [{what}]"
        given = options.get(what, tables[what])
        if optional:
            return _optional(what, registry, given, place, base)
        return make_kind(what, registry, given, place, "uniform", base=base)

    head = {"label": options.get("label", name.rpartition(":")[2]), "rounds": options.get("rounds")}
    plain = make(_MethodHead, head, where, _MethodHead.model_fields)
    return Method(
        label=plain.label,
        algorithm=name,
        options=own,
        composition=made if isinstance(made, Composition) else Composition(made),
        local=make(Local, local, f"{where}: local" if "local" in options else f"{file}: [local]", Local.model_fields),
        sampler=own_kind("sampler", SAMPLERS, Sampler),
        weigher=own_kind("weigher", WEIGHERS, Weigher),
        aggregator=own_kind("aggregator", AGGREGATORS, Aggregator, optional=True),
        channel=own_kind("channel", CHANNELS, Channel, optional=True),
        rounds=plain.rounds or rounds,
    )
