"""Experiment: a comparison of methods, represented as a value.

An experiment describes one federation, one model and one or more methods.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, create_model, field_validator

from fedloom.algorithms import REGISTRY, Algorithm, Preset
from fedloom.analyses import Analysis, ModelAnalysis
from fedloom.analyses.fitted import Fitted
from fedloom.analyses.registry import get_analysis_name
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.data.sources import SOURCES, Source
from fedloom.data.sources import source as source_of
from fedloom.engine.setting import Setting
from fedloom.engine.tables import SettingTable
from fedloom.errors import ConfigError, DataError, direction_in
from fedloom.hints import KeyPlaces, give_no_hint
from fedloom.imports import is_path
from fedloom.lab.experiment.tuning import Tune
from fedloom.values import Value, choose, dump_value, fields_of, make


@dataclass(frozen=True)
class Method:
    """One of the methods that an experiment compares.

    Attributes:
        label: name of the method in tables and charts.
        algorithm: name of the method in the file, which is a registered name or the import path of a user's class.
        options: options of the method itself.
        setting: setting of the method's first-seed run.
        kind: class or preset of the method, if no name refers to it.
    """

    label: str
    algorithm: str
    options: dict[str, Any]
    setting: Setting
    kind: type[Algorithm] | Preset | None = None

    @property
    def entry(self) -> type[Algorithm] | Preset:
        """Algorithm or preset with the name `algorithm`."""
        return self.kind or choose("algorithm", REGISTRY, self.algorithm, base=Algorithm)

    def settings(self) -> dict[str, Any]:
        """Return the method as a TOML table that includes defaults."""
        fields, algorithm = fields_of(self.entry), dump_value(self.setting.method)
        choices = {k: v for k, v in self.setting.document().items() if k in Setting.per_method}
        named = {"algorithm": self.algorithm, "label": self.label}
        return {**named, **{k: v for k, v in algorithm.items() if k in fields}, **self.options, **choices}


def _check_printable(text: str) -> str:
    if not text.strip() or any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError(f"must be printable text, got {text!r}")
    if disguised := direction_in(text):
        raise ValueError(disguised)
    return text


Title = Annotated[str, AfterValidator(_check_printable)]
"""Name that is shown in tables and charts."""


Constants = Literal["default", "paper", "released"]
"""Source of default values for options that are not given: fedloom, the paper, or the paper's released code."""


def _check_no_path(text: str) -> str:
    if "/" in text or "\\" in text or text in (".", ".."):
        raise ValueError(f"must be a valid file name that contains no / or \\, got {text!r}")
    return text


class Head(Value):
    """Top-level keys of an experiment file that are not options of a run.

    All other top-level keys are defined by `Setting`.
    """

    name: Annotated[Title, AfterValidator(_check_no_path)] = Field("experiment", description="name of the experiment")
    seeds: tuple[NonNegativeInt, ...] = Field(
        (0,), min_length=1, description="random seeds. Every method runs once per seed"
    )
    defaults: Constants = Field(
        "default", description="source of the methods' default values: default, paper or released"
    )

    @field_validator("seeds")
    @classmethod
    def _check_distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"every seed may occur only once, got {list(seeds)}")
        return seeds


class MethodKeys(Value):
    """Keys of a method that are not options of a run."""

    label: Title = Field(description="name of the method in tables and charts")
    defaults: Constants = Field(
        "default", description="source of this method's default values, for options that the file does not set"
    )


_plain: Any = {name: (field.annotation, field) for name, field in Setting.model_fields.items()}
_questions: Any = (
    tuple[str, ...],
    Field((), description="open questions in a draft. Answer and delete them before you run the draft"),
)
TopLevelKeys = create_model(
    "Top", __base__=Head, questions=_questions, **{name: _plain[name] for name in Setting.plain()}
)
"""All top-level keys of an experiment file, except tables."""


class DataTable(SettingTable):
    """Table [data].

    The key ``source`` is the name of a data set, or a path. The path's content determines how the data are read.
    """

    def read(self, choice: object, where: str = "", name: str = "", places: KeyPlaces | None = None) -> Any:
        """Return the data source that a table describes.

        The content of a file or folder determines how it is read.

        Raises:
            ConfigError: the source does not exist, or does not support a given option.
            DataError: the path is not a data set.
        """
        if not isinstance(choice, Mapping):
            return super().read(choice, where, name, places)
        options, source = {key: value for key, value in choice.items() if key != "source"}, choice.get("source")
        if not isinstance(source, str):
            raise ConfigError(f"{where} needs source: the name of a data set, or a path. Names: {', '.join(SOURCES)}")
        if source in SOURCES or is_path(source):
            maker: Any = choose("data set", SOURCES, source, where, Source)
            fields = fields_of(maker)
        else:
            maker, fields = partial(source_of, source), _options_of_path(source, options, where)
        return make(maker, options, where, fields, *([places.within(name)] if places else ()))


def _options_of_path(path: str, options: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the options for reading a file or folder."""
    agreement = {"agreement": options["agreement"]} if options.get("agreement") is not None else {}
    try:
        return fields_of(type(source_of(path, **agreement)))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{where}: {error}") from None


SETTING_TABLES: dict[str, SettingTable] = {
    "data": DataTable(Source, SOURCES, key="source"),
    "partition": SettingTable(Partition, PARTITIONS, "iid"),
    **Setting.tables(),
    "tune": SettingTable(Tune),
}
"""Tables of an experiment file, apart from its methods."""


def file_places() -> KeyPlaces:
    """Return the keys that an experiment file accepts, and each key's table."""
    tables = {name: table.keys() for name, table in SETTING_TABLES.items()}
    tables = {"partition": tables.pop("partition"), **tables}
    keys = (*SETTING_TABLES, *TopLevelKeys.model_fields, "method", "analysis")
    return Setting.places(
        tables=tables, plain=TopLevelKeys.model_fields, keys=keys, method=False, file=True, special=give_no_hint
    )


SHARED_TABLES = ("model", "task", "attack")
"""Tables that a method inherits from the experiment unless it defines them itself. In a written file, other tables that
methods may define appear only in the methods."""


@dataclass(frozen=True)
class Experiment:
    """Comparison of methods on the same federation with several seeds.

    Attributes:
        head: name and seeds of the experiment.
        source: source of the data.
        source_options: content of the table [data].
        partition: rule that splits the data across clients.
        model_kind: kind given in the table [model].
        common: setting that applies to all methods unless they override it.
        tune: content of the table [tune].
        methods: methods to compare.
        analyses: analyses to compute after the rounds, at most one of each kind.
    """

    head: Head
    source: Source
    source_options: dict[str, Any]
    partition: Partition
    model_kind: str
    common: Setting
    tune: Tune
    methods: tuple[Method, ...]
    analyses: tuple[Analysis, ...] = ()

    @property
    def compared(self) -> tuple[Method, ...]:
        """The methods, followed by the models that analyses with ``compare`` fit from sums."""
        fits = (value for value in self.analyses if isinstance(value, ModelAnalysis) and value.compare)
        fitted = (
            Method(value.find_name(), get_analysis_name(value), {}, Fitted.setting(value, self.common), Fitted)
            for value in fits
        )
        return (*self.methods, *fitted)

    @property
    def kept_columns(self) -> list[str]:
        """Table columns, or thresholds on columns, that are kept for analyses or aggregation weights."""
        weighers = [self.common.aggregation_weights, *(method.setting.aggregation_weights for method in self.methods)]
        groups = [group for weigher in weighers if (group := getattr(weigher, "group", None)) is not None]
        return list(dict.fromkeys([*(column for value in self.analyses for column in value.kept_columns), *groups]))

    def find(self, kind: str) -> Any:
        """Return the analysis of the given kind, or None if the experiment does not include one."""
        return next((value for value in self.analyses if get_analysis_name(value) == kind), None)

    @property
    def rounds(self) -> dict[str, int]:
        """Number of rounds of every method, summed over all seeds and keyed by label."""
        return {method.label: method.setting.rounds * len(self.head.seeds) for method in self.compared}

    def with_(self, **choices: object) -> Experiment:
        """Return a copy of the experiment in which the given settings are changed for every method."""
        methods = tuple(replace(m, setting=m.setting.with_(**choices)) for m in self.methods)
        return replace(self, common=self.common.with_(**choices), methods=methods)

    def settings(self) -> dict[str, Any]:
        """Return the whole experiment as a TOML document that includes defaults."""
        whole = self.common.document()
        shared = (*Setting.plain(), *SHARED_TABLES)
        common = {k: v for k, v in whole.items() if k in shared or k not in Setting.per_method}
        unattacked = {"attack": {"kind": "none"}} if "attack" in whole else {}
        methods = [{**unattacked, **m.settings()} for m in self.methods]
        return {
            **dump_value(self.head),
            **{k: common.pop(k) for k in Setting.plain()},
            "data": self.source_options,
            "partition": dump_value(self.partition, kind=self.partition.kind),
            **common,
            "model": {**common["model"], "kind": self.model_kind},
            "method": [{k: v for k, v in m.items() if k not in SHARED_TABLES or v != whole.get(k)} for m in methods],
            **(
                {"analysis": [dump_value(value, kind=get_analysis_name(value)) for value in self.analyses]}
                if self.analyses
                else {}
            ),
        }
