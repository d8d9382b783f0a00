"""Experiment built from Python values: in-memory data, methods, modules, and a partition or an existing federation.

The result is the same `Experiment` that a file would define, so the same code can tune, run, resume and report it.
The settings of this experiment identify in-memory objects by their class and digest. If the same call is repeated with
the same values, it resumes from the folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar

from pydantic import Field, model_serializer

from fedloom.data import partitions
from fedloom.data.dataset import Dataset
from fedloom.data.federation import DATA_PARTS, Federation
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.data.sources import Source
from fedloom.engine.setting import Choices, Setting
from fedloom.engine.tables import name_method
from fedloom.errors import ConfigError
from fedloom.hints import KeyPlaces, unknown_name_error
from fedloom.lab.experiment.file import parse, read_analyses
from fedloom.lab.experiment.schema import SETTING_TABLES, Experiment
from fedloom.local import LocalSGD
from fedloom.values import dump_value, fields_of, has_type

DATA_SET_KEYS = {"x", "train"}
"""Keys that identify a mapping as a data set. Any other mapping is interpreted as clients keyed by name."""


class InMemory(Source):
    """Data set passed as an in-memory object."""

    held: Any = Field(exclude=True, repr=False, description="the data set")

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        data: Dataset = self.held
        facts = {"source": "memory", "name": data.name, "checksum": data.checksum()}
        return facts if data.design is None else {**facts, "design": data.design.digest()}

    def load(self, data_dir: object = None) -> Dataset:
        data: Dataset = self.held
        return data


class Ready(Partition):
    """Partition with existing clients. Every seed uses the same clients."""

    kind: ClassVar[str] = "ready"
    held: Any = Field(exclude=True, repr=False, description="the federation")

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        fed: Federation = self.held
        digest = hashlib.blake2b(fed.data.checksum().encode(), digest_size=8)
        for part in DATA_PARTS:
            for tensor in fed.parts[part]:
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return {"clients": fed.n, "digest": digest.hexdigest()}

    def draw(self, pool: object, seed: int) -> Any:
        raise NotImplementedError("the data already contain clients")

    def __call__(self, data: object, seed: int = 0) -> Federation:
        fed: Federation = self.held
        if isinstance(data, Dataset) and data.columns.keys() > fed.data.columns.keys():  # adds columns of groups
            return replace(fed, data=data)
        return fed


class GivenExperiment:
    """Experiment that is built from Python values, with a document that a search for settings can change.

    Args:
        methods: methods keyed by label, or a sequence of methods that are labeled by their names.
        data: a federation, which is already split across clients. A data set, the name of a data set, or any input of
            `Dataset.create` is also accepted.
        partition: rule that splits a data set across clients.
        seeds: seeds of the runs. Every method is run once with each seed.
        tune: options of the search for settings.
        name: name of the comparison, shown in titles.
        choices: fields of `Setting` that all methods share.
        analyses: analyses as values, names or tables.
        keywords: other keywords that the caller accepts, which are listed in error messages.
        call: name of the function that the user called, for error messages.

    Attributes:
        document: content of the equivalent experiment file, with values instead of tables.
        experiment: experiment that was built from the document.

    Raises:
        ConfigError: a value is invalid. The message names the invalid method or option.
        DataError: the data cannot be converted to a data set.
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
        call: str = "compare",
    ) -> None:
        odd = isinstance(seeds, str) or not isinstance(seeds, Iterable) or getattr(seeds, "ndim", 1) == 0
        numbers = None if odd else tuple(seeds)
        if not numbers:
            raise ConfigError(
                f"compare: seeds must be a sequence of whole numbers, such as range(5), got {seeds!r:.80}"
            )
        if "seed" in choices:
            raise ConfigError(f"compare: `seed` sets the seed of a single run. Pass seeds=[{choices['seed']!r}]")
        source, partition = _read_data_and_partition(data, partition, call)
        tables = _method_tables(methods)
        way = _call_keys(tables, keywords)
        for key, value in choices.items():
            if key not in way.keys:
                raise unknown_name_error("key", key, way.keys, call, way.hint(key, value))
        self._call, self._way = call, replace(way, keys=(*way.keys, "method", "analysis"))
        chosen = {"analysis": read_analyses(analyses, "compare: analyses")}
        chosen |= {key: value for key, value in choices.items() if value is not None}
        head = {"name": name, "seeds": numbers, "data": source, "partition": partition, "tune": tune}
        self.document: dict[str, Any] = {**head, **chosen, "method": tables}
        self.experiment = self.read(self.document)
        self.document |= {"model": self.experiment.common.model} if "model" in chosen else {}  # created only once
        for table, method in zip(tables, self.experiment.methods, strict=True):
            table |= {"model": method.setting.model} if "model" in table else {}

    @property
    def references(self) -> list[str]:
        """Labels that can serve as the baseline: every method, and the better of local training and FedAvg."""
        compared = self.experiment.compared
        alone, average = ([m.label for m in compared if m.setting.role == role] for role in ("alone", "average"))
        rival = [f"{alone[0]} or {average[0]}"] if alone and average else []
        return [*(method.label for method in compared), *rival]

    def read(self, document: Mapping[str, Any], where: str = "") -> Experiment:
        """Parse `document` into an experiment. A search may have changed the tables of the methods in it."""
        return parse(document, where or self._call, self._way)


def _call_keys(methods: Sequence[Mapping[str, Any]], keywords: Iterable[str]) -> KeyPlaces:
    """Return the keys that a call from Python accepts: its keywords and the options that all methods share."""

    def special(key: str, value: object) -> str:
        for table in methods:
            name, entry, _ = name_method(table.get("algorithm"), f"compare: {table['label']}")
            if key in fields_of(entry):
                example = {table["label"]: {"algorithm": name, key: value}}
                return f"it is an option of {table['label']}. Set it there, as in {example}"
        return ""

    way = Setting.places(method=False, special=special)
    keys = (*keywords, *(key for key in Choices.__annotations__ if key != "seed"))
    tables = {**way.tables, "tune": SETTING_TABLES["tune"].keys()}
    return replace(way, tables=tables, plain=keys, keys=keys)


def _read_data_and_partition(data: object, partition: object, call: str) -> tuple[Source | dict[str, str], Partition]:
    """Return the source of the data, as a value or a table, together with the partition."""
    if data is None:
        raise ConfigError(
            f"{call}: data is missing. Pass a federation, a list of clients, a data set, or the name of a data set"
        )
    if (
        partition is None
        and isinstance(data, list | Mapping)
        and not (isinstance(data, Mapping) and DATA_SET_KEYS & data.keys())
    ):
        data = Federation.create(data)
    if isinstance(data, Federation):
        if partition is not None:
            raise ConfigError(f"{call}: the data are already split. Omit `partition`, or pass a data set")
        return InMemory(held=data.data), Ready(held=data)
    if partition is None:
        raise ConfigError(
            f"{call}: the data are not split across clients. Pass a partition, as in "
            "partition=fl.partitions.dirichlet(clients=10, alpha=0.5), or a federation"
        )
    if isinstance(partition, str) or (
        isinstance(partition, Mapping) and all(isinstance(key, str) for key in partition)
    ):
        partition = SETTING_TABLES["partition"].read(partition, f"{call}: partition", "partition", Setting.places())
    if isinstance(partition, Federation):
        raise ConfigError(f"{call}: partition contains data that are already split. Pass it as the data")
    if isinstance(partition, type) and issubclass(partition, Partition):
        raise ConfigError(f"{call}: partition is a class. Instantiate it with its options")
    if not isinstance(partition, Partition):
        kinds = ", ".join(f"fl.partitions.{kind}" for kind in PARTITIONS if hasattr(partitions, kind))
        raise ConfigError(
            f"{call}: partition must be one of {kinds}, got {partition!r:.80}. If the data are already split across "
            "clients, pass a list of (x, y) as the data. If you have lists of indices, pass (x[list], y[list])"
        )
    source = {"source": str(data)} if isinstance(data, str | PathLike) else InMemory(held=Dataset.create(data))
    return source, partition


def _method_tables(methods: Mapping[str, object] | Sequence[object]) -> list[dict[str, Any]]:
    """Return the tables that describe the methods, together with a label for each."""
    if not has_type(methods, Mapping, Sequence) or has_type(methods, str, bytes) or not methods:
        raise ConfigError(
            "compare: methods must be a dict that maps labels to methods, such as {'fedavg': "
            f"'fedavg', 'mine': Mine()}}, got {methods!r:.80}"
        )
    tables = []
    for label, spec in methods.items() if isinstance(methods, Mapping) else [(None, one) for one in methods]:
        table = dict(spec) if isinstance(spec, Mapping) else {"algorithm": spec}
        if label is not None and "label" in table:
            raise ConfigError(
                f"compare: {label}: label = {table['label']!r} gives the method a second label. Omit `label`"
            )
        if label is None and "label" not in table:
            name = name_method(table.get("algorithm"), "compare")[0]
            label = re.split("[:. ]", name)[-1]
        table = {"label": label, **table}
        if not (isinstance(table["label"], str) and table["label"].strip() and table["label"].isprintable()):
            raise ConfigError(f"compare: a label must be printable text, got {table['label']!r:.80}")
        if isinstance(local := table.get("local"), LocalSGD):
            table["local"] = dump_value(local)  # so that a search can change single keys
        tables.append(table)
    return tables
