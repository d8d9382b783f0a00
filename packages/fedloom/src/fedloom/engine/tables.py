"""Tables of an experiment file: how a field of a setting is written, read, and found when a key is misplaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from torch import Tensor, nn

from fedloom.algorithms import REGISTRY, Preset
from fedloom.data.partition import PARTITIONS
from fedloom.errors import ConfigError, homes_of, unknown
from fedloom.imports import find_maker, is_path
from fedloom.models import KINDS, MODELS, Import, ModelSpec, spec_of
from fedloom.models.imported import Held, own_model
from fedloom.values import fields_of, make, make_kind

OF_DATA = (
    "target",
    "label",
    "users",
    "categorical",
    "drop",
    "columns",
    "missing",
    "impute",
    "classes",
    "channels_last",
)
"""Options of `fedloom.Dataset.of` that are taken for choices of a run."""


@dataclass(frozen=True)
class SettingTable:
    """How a field of `Setting` is given: as a value, or as in an experiment file, by a name or a table of options.

    Attributes:
        base: class of the values.
        kinds: classes by the table's ``kind``; empty where there is one.
        default: the kind of a table that names none; None: a table without kind is no choice, and neither is "none".
        key: the key that names the kind.
    """

    base: type[Any]
    kinds: Mapping[str, Any] = field(default_factory=dict)
    default: str | None = None
    key: str = "kind"

    def classes(self) -> dict[str, type[Any]]:
        """Return the class of every kind; of a table without kinds, its own, with an empty name."""
        return dict(self.kinds) or {"": self.base}

    def class_of(self, options: Mapping[str, Any]) -> type[Any] | None:
        """Return the class that a table of options chooses; None for user code, an unknown kind or none."""
        kind = options.get(self.key, self.default) if self.kinds else ""
        return self.classes().get(kind) if isinstance(kind, str) else None

    def read(self, choice: Any, where: str = "") -> Any:
        """The value of a table.

        Args:
            choice: a value, a kind, a table of options, or None.
            where: file and table, for the message.

        Raises:
            ConfigError: an unknown kind or key, a wrong type or a value out of range.
        """
        if choice is None or isinstance(choice, self.base):
            return choice
        if self.base is ModelSpec and not isinstance(choice, str | Mapping):
            return own_model(choice)
        options = {"kind": choice} if isinstance(choice, str) and self.kinds else choice
        if not isinstance(options, Mapping):
            raise ConfigError(f"{where}{where and ': '}must be a {self.base.__name__} or a table, got {choice!r}")
        if not self.kinds:
            for key, value in options.items():
                if key not in self.base.model_fields and (cure := _option_of_methods(key, value)):
                    raise unknown("key", key, self.base.model_fields, where or self.base.__name__, cure)
            return make(self.base, options, where, self.base.model_fields)
        if self.default is None and (not options or options.get("kind") == "none"):
            return None
        what = self.base.__name__.lower()
        if self.base is ModelSpec:
            return _model(options, where)
        if self.default is None and "kind" not in options:
            raise ConfigError(f"{where}: kind is missing; allowed: {', '.join(self.kinds)}, none")
        return make_kind(what, self.kinds, options, where, self.default or "", base=self.base)

    def kind(self, value: Any) -> dict[str, str]:
        """The key ``kind`` of a value's table, where there are several."""
        named = {getattr(value, "kind", None), *(name for name, kind in self.kinds.items() if type(value) is kind)}
        return {"kind": str(next(name for name in named if name))} if self.kinds else {}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)


def _model(options: Mapping[str, Any], where: str) -> ModelSpec:
    """The specification of a table: of a kind, of a paper's name, or of user code."""
    if options and all(isinstance(value, Tensor) for value in options.values()):
        raise ConfigError(f"{where}: this is a state dict: load it into a module, and give the module")
    kind = options.get("kind", "softmax")
    rest = {k: v for k, v in options.items() if k != "kind"}
    if is_path(kind):
        maker = find_maker(kind, "model", (nn.Module, ModelSpec), where)
        if not (isinstance(maker, type) and issubclass(maker, ModelSpec)):
            common = {k: v for k, v in rest.items() if k in ModelSpec.model_fields}
            import_options = {"path": kind, "options": {k: v for k, v in rest.items() if k not in common}}
            return make(Import, {**import_options, **common}, where, fields_of(Import))
        return make_kind("model", MODELS, options, where, base=ModelSpec)
    if kind == Held.kind and callable(rest.get("held")):
        return make(Held, rest, where, fields_of(Held))
    if kind == Held.kind and "digest" in rest:
        raise ConfigError(
            f"{where}: the model {rest.get('name')!r} was an object in Python, and no file names it; in Python, give "
            "it again, as fl.open_run(FOLDER, MODEL) or in the same call of fl.compare"
        )
    if kind not in KINDS:
        saved = isinstance(kind, str) and kind.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors"))
        cure = "weights are in that file: load them into a module, and give the module" if saved else ""
        raise unknown("model kind", kind, KINDS, where, cure=cure)
    return make(lambda **options_of_kind: spec_of(kind, **options_of_kind), rest, where, fields_of(KINDS[kind]))


def _places(tables: Mapping[str, SettingTable], key: str, value: Any) -> list[str]:
    """The tables and partitions that have a key, each as it is written with this value."""
    places = list[str]()
    for table, may in tables.items():
        classes = may.classes()
        fields = {kind: fields_of(classes[kind]) for kind in sorted(classes, key=lambda kind: kind != may.default)}
        field_name, having = homes_of(key, fields)
        if having:
            kind = {} if having[0] in ("", may.default) else {"kind": having[0]}
            places.append(f"{table}={ {**kind, field_name: value}!r}")
    field_name, having = homes_of(key, {kind: fields_of(partition) for kind, partition in PARTITIONS.items()})
    if having:
        first = "iid" if "iid" in having else having[0]
        places.append(f"the partition, as fl.partition.{first.replace('-', '_')}({field_name}={value!r})")
    return places


def home_of(tables: Mapping[str, SettingTable], key: str, value: Any, algorithm: Any) -> str:
    """Where a keyword of something else belongs, as the end of a sentence; empty if nothing has it."""
    entry: Any = REGISTRY.get(algorithm) if isinstance(algorithm, str) else type(algorithm)
    if key in (fields_of(entry) if isinstance(entry, Preset) or hasattr(entry, "model_fields") else ()):
        named = (
            f"fl.algorithms.{entry.__name__}" if isinstance(entry, type) else f"fl.algorithms.REGISTRY[{algorithm!r}]"
        )
        return f"it is an option of the method: give {named}({key}={value!r}) in its place"
    if places := _places(tables, key, value):
        return f"it belongs in {' or '.join(places)}"
    if key in OF_DATA:
        return f"it belongs to the data: give fl.Dataset.of(data, {key}={value!r})"
    return _option_of_methods(key, value, "other ")


def _option_of_methods(key: str, value: Any, other: str = "") -> str:
    """The methods that have an option, as the end of a sentence; empty if none has it."""
    methods = [method for method, entry in REGISTRY.items() if key in fields_of(entry)]
    if not methods:
        return ""
    some = ", ".join(methods[:6]) + (", ..." if len(methods) > 6 else "")
    one = f"fl.algorithms.REGISTRY[{methods[0]!r}]({key}={value!r})"
    return f"it is an option of {other}methods ({some}): give one, as {one}"
