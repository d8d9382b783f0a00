"""An experiment of values that Python holds: data in memory, methods, modules, a partition or a ready federation.

It is the same `Experiment` that a file gives, so it is tuned, run, resumed and reported by the same code. Its settings
name what is held in memory by class and digest; a folder is continued by the same call with the same values.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import tomli_w
from pydantic import Field, model_serializer

from fedloom.algorithms import REGISTRY, Algorithm, Composition, Preset
from fedloom.data import partition as partitions
from fedloom.data.dataset import Dataset
from fedloom.data.federation import PARTS, Federation
from fedloom.data.partition import PARTITIONS, Partition
from fedloom.data.sources import Source
from fedloom.data.sources import source as source_of
from fedloom.engine.setting import Setting
from fedloom.engine.tables import home_of
from fedloom.errors import ConfigError, unknown
from fedloom.imports import importable
from fedloom.lab.experiment.file import grouped, merged, read_analyses
from fedloom.lab.experiment.schema import Experiment, Head, Method
from fedloom.lab.experiment.tuning import Tune
from fedloom.local import LocalSGD
from fedloom.rundir import label_of
from fedloom.values import choose, dump, fields_of, make, make_kind

PLAIN = ("weigher", "mixer", "aggregator", "channel")
"""What plain local training is measured without."""
SETS = {"x", "train"}
"""Keys of a mapping that is a data set; other mappings are clients by name."""
BESIDE = ("label", "settings")
"""Keys of a method that are neither its options nor choices of its run."""
SHARED = ("seeds", "partition", "tune", "evaluate", "engine", "attack")
"""What all methods of a comparison have in common."""


class InMemory(Source):
    """A data set that Python holds."""

    held: Any = Field(exclude=True, repr=False, description="the data set")

    def load(self, data_dir: object = None) -> Dataset:
        data: Dataset = self.held
        return data


class Ready(Partition):
    """Clients that are there already; every seed has the same."""

    kind: ClassVar[str] = "ready"
    held: Any = Field(exclude=True, repr=False, description="the federation")

    @model_serializer
    def _named(self) -> dict[str, Any]:
        fed: Federation = self.held
        digest = hashlib.blake2b(fed.data.checksum().encode(), digest_size=8)
        for part in PARTS:
            for tensor in fed.parts[part]:
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return {"clients": fed.n, "digest": digest.hexdigest()}

    def draw(self, pool: object, seed: int) -> Any:
        raise NotImplementedError("the clients are there already")

    def __call__(self, data: object, seed: int = 0) -> Federation:
        fed: Federation = self.held
        return fed


class ComparedMethod(NamedTuple):
    """One method as Python has it.

    Attributes:
        label: what it is called.
        name: what files call it: a name of the registry, an import path, or the class's name if no path leads to it.
        entry: its class or preset; None of what a preset has made, whose options are fixed.
        value: the method.
        choices: its own choices of a run.
    """

    label: str
    name: str
    entry: type[Algorithm] | Preset | None
    value: Algorithm | Composition
    choices: dict[str, Any]


class GivenExperiment:
    """An experiment of values, as documents that a search may change.

    Args:
        methods: by label, or several that are called by their names.
        data: a federation; or a data set, its name, or what `Dataset.of` makes one of.
        partition: how a data set is split.
        seeds: one run of every method per seed.
        tune: how settings are looked for.
        name: of the comparison.
        choices: the fields of `Setting` that all methods share.
        analyses: as values, names or tables.
        keywords: further ones that the caller takes, for messages.

    Raises:
        ConfigError: values that cannot work; the message names the method or choice.
        DataError: no data set can be made of the data.
    """

    def __init__(
        self,
        methods: Mapping[str, Any] | Sequence[Any],
        data: Any,
        partition: Any,
        seeds: Any,
        tune: Mapping[str, Any],
        name: str,
        choices: Mapping[str, Any],
        analyses: Sequence[Any] = (),
        keywords: Iterable[str] = (),
    ) -> None:
        numbers = None if isinstance(seeds, str) or not isinstance(seeds, Iterable) else tuple(seeds)
        if not numbers:
            raise ConfigError(f"compare: seeds must be several whole numbers, as range(5), got {seeds!r:.80}")
        self._head = make(Head, {"name": name, "seeds": numbers}, "compare", Head.model_fields)
        self._source, self._options, self._partition = _federation(data, partition)
        self._methods = {method.label: method for method in _methods(methods)}
        _refuse_options(choices, self._methods.values(), keywords)
        self._analyses = read_analyses(analyses, "compare: analyses")
        self._common = grouped(Setting.of("fedavg", **{**choices, "seed": self._head.seeds[0]}), self._analyses)
        self._tune = make(Tune, tune, "compare: tune", Tune.model_fields)

    @property
    def references(self) -> list[str]:
        """What the methods may be compared with: each of them, and the better of training alone and FedAvg."""
        labels = {name: [g.label for g in self._methods.values() if g.name == name] for name in ("local", "fedavg")}
        rival = [f"{labels['local'][0]} or {labels['fedavg'][0]}"] if all(labels.values()) else []
        return [*self._methods, *rival]

    def document(self) -> dict[str, Any]:
        """The experiment as a file would have it, as far as a search changes it."""
        settings = self._experiment(self._common, [{"label": label} for label in self._methods]).settings()
        tables = [{key: method[key] for key in ("label", "algorithm")} for method in settings["method"]]
        for table in tables:
            choices = self._methods[table["label"]].choices
            table |= {"rounds": choices["rounds"]} if "rounds" in choices else {}
        document = {**settings, "weigher": dump(self._common.weigher), "method": tables, "tune": dump(self._tune)}
        return tomllib.loads(tomli_w.dumps(document))

    def read(self, document: Mapping[str, Any], where: str = "compare") -> Experiment:
        """The experiment of `document`, in which a search has changed options, local training and rounds of methods.

        Without a weigher it is that of plain local training, which every method's work is compared with.
        """
        common = self._common
        if "weigher" not in document:
            fields = {name: Setting.model_fields[name] for name in PLAIN}
            common = common.with_(**{k: f.get_default(call_default_factory=True) for k, f in fields.items()})
        return self._experiment(common, document["method"], where)

    def _experiment(
        self, common: Setting, methods: Sequence[Mapping[str, object]], where: str = "compare"
    ) -> Experiment:
        return Experiment(
            head=self._head,
            source=self._source,
            source_options=self._options,
            partition=self._partition,
            model_kind=common.document()["model"]["kind"],
            common=common,
            tune=self._tune,
            methods=tuple(self._method(table, common, where) for table in methods),
            analyses=self._analyses,
        )

    def _method(self, table: Mapping[str, Any], common: Setting, where: str) -> Method:
        declared = self._methods.get(table.get("label", ""))
        if declared is None:  # plain local training, which others are measured by
            entry = REGISTRY["fedavg"]
            return Method("fedavg", "fedavg", {}, common.with_(algorithm="fedavg"), entry)
        options = {k: v for k, v in table.items() if k not in ("algorithm", *BESIDE, *Setting.per_method)}
        value = declared.value
        if options:
            value = _with(declared, options, f"{where}: {declared.label}")
        choices = dict(declared.choices)
        if "local" in table:
            local = merged(dump(choices.get("local", common.local)), table["local"])
            choices["local"] = make(LocalSGD, local, f"{where}: {declared.label}: local", LocalSGD.model_fields)
        if "rounds" in table:
            choices["rounds"] = table["rounds"]
        setting = make(
            common.with_, {**choices, "algorithm": value}, f"{where}: {declared.label}", Setting.model_fields
        )
        return Method(declared.label, declared.name, options, grouped(setting, self._analyses), declared.entry)


def _with(declared: ComparedMethod, options: Mapping[str, object], where: str) -> Algorithm | Composition:
    """A method with some of its options replaced."""
    _check_keys(options, declared.entry, where)
    if isinstance(declared.value, Algorithm):
        changed: Algorithm = make(declared.value.with_, options, where, fields_of(type(declared.value)))
        return changed
    if declared.entry is None:
        raise ConfigError(f"{where}: the options of what a preset has made are fixed; give the preset by its name")
    method: Any = declared.entry
    return make(method, options, where, fields_of(method))  # type: ignore[no-any-return]


def _federation(data: object, partition: object) -> tuple[Source, dict[str, Any], Partition]:
    """Where the data come from, what settings say of them, and how they are split."""
    if data is None:
        raise ConfigError("compare: data is missing: give a federation, a list of clients, a data set, or its name")
    if (
        partition is None
        and isinstance(data, list | Mapping)
        and not (isinstance(data, Mapping) and SETS & data.keys())
    ):
        data = Federation.of(data)
    if isinstance(data, Federation):
        if partition is not None:
            raise ConfigError("compare: the data are split already; leave partition out, or give a data set")
        name = {"source": "memory", "name": data.data.name, "checksum": data.data.checksum()}
        return InMemory(held=data.data), name, Ready(held=data)
    if partition is None:
        raise ConfigError(
            "compare: say how the data are split among clients, as in partition=fl.partition.dirichlet(clients=10, "
            "beta=0.5); or give a federation"
        )
    if isinstance(partition, str) or (
        isinstance(partition, Mapping) and all(isinstance(key, str) for key in partition)
    ):
        table = {"kind": partition} if isinstance(partition, str) else partition
        partition = make_kind("partition", PARTITIONS, table, "compare: partition", "iid", base=Partition)
    if isinstance(partition, Federation):
        raise ConfigError("compare: partition has split data already: give it in the place of the data")
    if isinstance(partition, type) and issubclass(partition, Partition):
        raise ConfigError("compare: partition is a class: call it with its options")
    if not isinstance(partition, Partition):
        kinds = ", ".join(f"fl.partition.{kind}" for kind in PARTITIONS if hasattr(partitions, kind))
        raise ConfigError(
            f"compare: partition must be one of {kinds}, got {partition!r:.80}; clients that "
            "are there already are given as the data, in a list of (x, y): of lists of positions, (x[list], y[list])"
        )
    if isinstance(data, str | PathLike):
        return source_of(str(data)), {"source": str(data)}, partition
    data_set = Dataset.of(data)
    return (
        InMemory(held=data_set),
        {"source": "memory", "name": data_set.name, "checksum": data_set.checksum()},
        partition,
    )


def _methods(methods: Mapping[str, object] | Sequence[object]) -> list[ComparedMethod]:
    if isinstance(methods, str) or not methods:
        raise ConfigError(
            f"compare: methods must be a table by label, as {{'fedavg': 'fedavg', 'mine': Mine()}}, got {methods!r:.80}"
        )
    labelled = methods.items() if isinstance(methods, Mapping) else [(None, one) for one in methods]
    declared = [_compared_method(label, spec) for label, spec in labelled]
    labels = [one.label for one in declared]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(f"compare: two methods have the label {twice[0]!r}; give a table with a label for each")
    return declared


def _compared_method(label: object, spec: object) -> ComparedMethod:
    where = f"compare: {label}" if label else "compare"
    if label is not None and not (isinstance(label, str) and label.strip() and label.isprintable()):
        raise ConfigError(f"compare: a label must be text that can be printed, got {label!r:.80}")
    table = dict(spec) if isinstance(spec, Mapping) else {"algorithm": spec}
    if "algorithm" not in table:
        raise ConfigError(f"{where}: algorithm is missing; give a method, as fl.algorithms.Ditto(lam=1.0), or its name")
    algorithm = table.pop("algorithm")
    choices = {key: table.pop(key) for key in Setting.per_method if key in table}
    choices = {
        key: Setting.tables()[key].read(v, f"{where}: {key}") if key in Setting.tables() else v
        for key, v in choices.items()
    }
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = make(algorithm, {}, where, fields_of(algorithm))
    if isinstance(algorithm, str):
        entry: Any = choose("algorithm", REGISTRY, algorithm, where, Algorithm)
        _check_keys(table, entry, where)
        value = make(entry, table, where, {**fields_of(entry), "settings": None})
        return ComparedMethod(label or label_of({"algorithm": algorithm}), algorithm, entry, value, choices)
    if not isinstance(algorithm, Algorithm | Composition):
        raise ConfigError(
            f"{where}: must be a method such as fl.algorithms.FedAvg(), or its name, got {algorithm!r:.80}"
        )
    kind = type(algorithm.algorithm if isinstance(algorithm, Composition) else algorithm)
    if isinstance(algorithm, Composition):
        named = next(
            (
                name
                for name, entry_known in REGISTRY.items()
                if isinstance(entry_known, Preset) and _made_by(entry_known, algorithm)
            ),
            None,
        )
        declared = ComparedMethod(
            label or named or kind.__name__, named or f"a composition of {kind.__name__}", None, algorithm, choices
        )
    else:
        named = next((name for name, entry_known in REGISTRY.items() if entry_known is kind), None)
        name = named or importable(kind) or kind.__qualname__
        declared = ComparedMethod(label or named or kind.__name__, name, kind, algorithm, choices)
    return declared._replace(value=_with(declared, table, where)) if table else declared


def _check_keys(options: Mapping[str, object], entry: type[Algorithm] | Preset | None, where: str) -> None:
    """Refuse keys that are no options of a method, with the place where they belong."""
    allowed = [*(fields_of(entry) if entry is not None else ()), "settings"]
    for key, value in options.items():
        if key not in allowed:
            shared = f"all methods share it: give compare(..., {key}={value!r})"
            cure = shared if key in SHARED else home_of(Setting.tables(), key, value, None)
            raise unknown("key", key, [*allowed, *Setting.per_method], where, cure=cure)


def _refuse_options(choices: Mapping[str, object], methods: Iterable[ComparedMethod], keywords: Iterable[str]) -> None:
    """Refuse options of a method, and what is nothing, among the choices that all methods share."""
    allowed = [*keywords, *(name for name in Setting.model_fields if name not in ("algorithm", "seed"))]
    if "seed" in choices:
        raise ConfigError(f"compare: seed is the choice of one run: give seeds=[{choices['seed']!r}]")
    for key, value in choices.items():
        having = [one for one in methods if one.entry is not None and key in fields_of(one.entry)]
        if having and key not in Setting.model_fields:
            table = {having[0].label: {"algorithm": having[0].name, key: value}}
            raise ConfigError(f"compare: {key!r} is an option of {having[0].label}: give it there, as {table}")
        if key not in allowed:
            raise unknown("key", key, allowed, "compare", home_of(Setting.tables(), key, value, None))


def _made_by(preset: Preset, composition: Composition) -> bool:
    """Whether a preset makes compositions of these parts."""
    parts = [composition.sampler, composition.weigher]
    kinds = [None if part is None else type(part) for part in parts]
    same = type(composition.algorithm) is preset.algorithm and composition.pooled == preset.pooled
    return same and kinds == [preset.sampler, preset.weigher]
