"""Functions that read a setting's method and tables from values, names and tables of options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from torch import Tensor, nn

from fedloom.algorithms import REGISTRY, Algorithm, Preset, PresetMethod
from fedloom.engine.checks.moved import find_moved_key
from fedloom.errors import ConfigError
from fedloom.hints import METHOD_FORM, Hint, KeyPlaces, suggest_nearest, unknown_name_error
from fedloom.imports import find_import_path, find_maker, is_path
from fedloom.models import MODEL_CLASSES, MODELS, Import, ModelSpec, make_spec
from fedloom.models.imported import InProcessModel, wrap_model
from fedloom.values import choose, fields_of, make, make_kind


class NamedMethod(NamedTuple):
    """A method with its name in files.

    Attributes:
        name: name in the registry, import path, or the name of the class if it cannot be imported.
        entry: class or preset of the method. For a composition of parts that is not a known preset, the class of its
            algorithm.
        value: the method, or the composition that the preset returned.
    """

    name: str
    entry: type[Algorithm] | Preset
    value: Algorithm | PresetMethod

    @classmethod
    def read(
        cls, method: object, options: Mapping[str, Any], where: str = "", places: KeyPlaces | None = None
    ) -> NamedMethod:
        """Read a method with its options.

        Args:
            method: name in the registry, import path, class, method, or value returned by a preset.
            options: options of the method, and ``defaults``, which selects the values of all other options.
            where: file and table, for messages.
            places: description of where other keys belong.

        Raises:
            ConfigError: the method is unknown, an option is unknown, or a value is out of range.
        """
        name, entry, built = name_method(method, where)
        fields = {**fields_of(entry), **({"defaults": None} if built is None else {})}
        allowed = [*fields, *(places.keys if places and places.method else ())]
        for key, value in options.items():
            if key not in fields:
                raise unknown_name_error("key", key, allowed, where, places.hint(key, value) if places else "")
        if built is None:
            maker: Any = entry
            return cls(name, entry, make(maker, options, where, fields))
        if options and isinstance(built, PresetMethod):
            fixed = "the options of a method created by a preset are fixed"
            raise ConfigError(f"{_value_prefix(where)}{fixed}. Use the preset's name")
        return cls(name, entry, make(built.with_, options, where, fields) if options else built)


def name_method(method: Any, where: str = "") -> tuple[str, Any, Any]:
    """Return the name of a method, its class or preset, and the method itself if it was passed as a value.

    Raises:
        ConfigError: the method is unknown.
    """
    if isinstance(method, str):
        return method, choose("algorithm", REGISTRY, method, where, Algorithm), None
    if isinstance(method, PresetMethod):
        kind, presets = type(method.algorithm), {n: e for n, e in REGISTRY.items() if isinstance(e, Preset)}
        name = next((name for name, preset in presets.items() if preset.makes(method)), None)
        return name or f"a composition of {kind.__name__}", presets.get(name or "", kind), method
    kind, built = (method, None) if isinstance(method, type) else (type(method), method)
    if not issubclass(kind, Algorithm):
        raise ConfigError(f"{_value_prefix(where)}must be {METHOD_FORM}, got {method!r:.80}")
    name = next((name for name, entry in REGISTRY.items() if entry is kind), None)
    return name or find_import_path(kind) or kind.__qualname__, kind, built


@dataclass(frozen=True)
class SettingTable:
    """Describes the forms of a field of `Setting`: a value, a name, or a table of options.

    Attributes:
        base: base class of the values.
        kinds: classes, keyed by the ``kind`` in the table. If there is only one class, its key is empty.
        default: kind of a table without ``kind``. If None, every table must contain ``kind``, and the field is optional
            (kind "none").
        key: name of the key for the kind.
    """

    base: type[Any]
    kinds: Mapping[str, Any] = field(default_factory=dict)
    default: str | None = None
    key: str = "kind"

    def classes(self) -> dict[str, type[Any]]:
        """Return the class of each kind.

        The class of a table without kinds is listed under an empty name.
        """
        return dict(self.kinds) or {"": self.base}

    def keys(self) -> dict[str, Iterable[str]]:
        """Return each kind's allowed keys except `key`.

        The keys of a table without kinds are listed under an empty name.
        """
        kinds: dict[str, Iterable[str]] = {
            kind: (fields_of(entry).keys() | getattr(entry, "aliases", {}).keys()) - {self.key}
            for kind, entry in self.classes().items()
        }
        return {"": kinds[self.default], **kinds} if self.default else kinds

    def read(self, choice: object, where: str = "", name: str = "", places: KeyPlaces | None = None) -> Any:
        """Read the value that a name or table describes.

        Args:
            choice: value, name of a kind, table of options, or None. In a file, only a table is allowed.
            where: file and table, for messages.
            name: name of the table, for messages.
            places: description of where other keys belong.

        Raises:
            ConfigError: a kind or key is unknown, or a value has the wrong type or is out of range.
        """
        if choice is None or isinstance(choice, self.base):
            return choice
        in_file = places is not None and places.file
        if self.base is ModelSpec and not in_file and not isinstance(choice, str | Mapping):
            try:
                return wrap_model(choice)
            except ConfigError as error:
                raise type(error)(f"{_value_prefix(where)}{error}") from None
        options = {self.key: choice} if isinstance(choice, str) and self.kinds and not in_file else choice
        if not isinstance(options, Mapping):
            what = "a table" if in_file else f"a {self.base.__name__} or a table"
            raise ConfigError(
                f"{_value_prefix(where)}must be {what}, got {choice!r}"
                f"{f'; {self._form(choice, name)}' if in_file else ''}"
            )

        def hint(key: str, value: object) -> str:
            return find_moved_key(name, key, value) or (places.hint(key, value, name) if places else "")

        if not self.kinds:
            return make(self.base, options, where, self.base.model_fields, hint)
        if self.default is None and (not options or options.get("kind") == "none"):
            return None
        if self.base is ModelSpec:
            return _read_model_table(options, where, hint)
        if self.default is None and "kind" not in options:
            raise ConfigError(f"{_value_prefix(where)}kind is missing. Allowed: {', '.join(self.kinds)}, none")
        what = self.base.__name__.lower()
        return make_kind(what, self.kinds, options, where, self.default or "", base=self.base, hint=hint)

    def _form(self, choice: object, name: str) -> str:
        """Return advice on how to write a table in place of the given value."""
        if not self.kinds:
            return f"write {name} = {{ KEY = VALUE }}; keys: {', '.join(self.base.model_fields)}"
        is_kind = isinstance(choice, str) and (choice in self.kinds or is_path(choice))
        kind, kinds = (json.dumps(choice), "") if is_kind else ("KIND", f"; {suggest_nearest(choice, self.kinds)}")
        return f"write {name} = {{ {self.key} = {kind} }}{kinds}"

    def kind(self, value: object) -> dict[str, str]:
        """Return the entry ``kind`` for a value's table, or an empty dict if there is only one kind."""
        named = {getattr(value, "kind", None), *(name for name, kind in self.kinds.items() if type(value) is kind)}
        return {"kind": str(next(name for name in named if name))} if self.kinds else {}

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)


def _value_prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _read_model_table(options: Mapping[str, Any], where: str, hint: Hint) -> ModelSpec:
    """Return the model specification that a table defines by a kind, a name from a paper, or a path to user code."""
    if options and all(isinstance(value, Tensor) for value in options.values()):
        raise ConfigError(
            f"{_value_prefix(where)}this is a state dict. Load the state dict into a module, and pass the module"
        )
    kind = options.get("kind", "softmax")
    rest = {k: v for k, v in options.items() if k != "kind"}
    if is_path(kind):
        maker = find_maker(kind, "model", (nn.Module, ModelSpec), where)
        if not (isinstance(maker, type) and issubclass(maker, ModelSpec)):
            common = {k: v for k, v in rest.items() if k in ModelSpec.model_fields}
            import_options = {"path": kind, "options": {k: v for k, v in rest.items() if k not in common}}
            return make(Import, {**import_options, **common}, where, fields_of(Import), hint)
        return make_kind("model", MODELS, options, where, base=ModelSpec, hint=hint)
    if kind == InProcessModel.kind and callable(rest.get("held")):
        return make(InProcessModel, rest, where, fields_of(InProcessModel))
    if kind == InProcessModel.kind and "digest" in rest:
        raise ConfigError(
            f"{_value_prefix(where)}the model {rest.get('name')!r} was passed as a Python object, which is not stored "
            f"in any file. Pass the model again in Python, as in fl.open_run(FOLDER, MODEL) or in the same call of "
            f"fl.compare"
        )
    if kind not in MODEL_CLASSES:
        saved = isinstance(kind, str) and kind.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors"))
        cure = "this file contains weights. Load them into a module, and pass the module" if saved else ""
        raise unknown_name_error("model kind", kind, MODEL_CLASSES, where, cure=cure)
    return make(
        lambda **options_of_kind: make_spec(kind, **options_of_kind), rest, where, fields_of(MODEL_CLASSES[kind]), hint
    )
