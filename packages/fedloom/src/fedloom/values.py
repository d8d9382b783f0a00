"""Value: the frozen, validated base class of all choices that users make.

Tables of a TOML file are converted to values.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticKnownError, core_schema

from fedloom.errors import ConfigError, InvalidValue
from fedloom.hints import Hint, find_new_name, give_no_hint, unknown_name_error
from fedloom.imports import find_class, get_import_path, is_path
from fedloom.options import ARGS_HEADING, OptionsMeta

T = TypeVar("T")
NUMBER_ERRORS: dict[str, Literal["int_type", "float_type"]] = {"int": "int_type", "float": "float_type"}
"""Kinds of numbers in a pydantic schema, with the error that is raised if an input is not such a number."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that can be stored both in a tensor and in a TOML file."""
FACTOR_PATTERN = r"(\d+\.?\d*|\.\d+)x"
"""Pattern that matches a multiple of a derived default, such as 2x or 0.5x."""
VALIDATOR_PATTERN = r"function-|constrained-|(literal|tuple|list|dict)\[|(float|int|str|bool)$"
"""Pattern of the parts of an error's location that are not keys."""
IGNORED_SCHEMA_KEYS = ("metadata", "default", "expected", "serialization", "keys_schema")
"""Keys of a pydantic schema that do not contain schemas of values.

``keys_schema`` is one of them, because keys are text in every file.
"""


class Value(BaseModel, metaclass=OptionsMeta):
    """Frozen set of options. Unknown fields, wrong types and values out of range are rejected when a value is created.

    Raises:
        InvalidValue: an option is invalid. The message lists every invalid option with its name, expected value and
            given value.

    A user-defined class is identified by its import path, which is its ``kind`` in every file.
    """

    free: ClassVar[tuple[str, ...]] = ()
    """Fields that never affect the numeric results of a run."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Fields that have an effect only together with another field. Each field is mapped to the name of the other field
    and the values that it must have.

    If no values are listed, the other field may have any value except its default. Values after "not" are the values
    that it must not have. The other field can be a key of another table, such as "local.weight_decay". If such a field
    is set but has no effect, a note is added to the result of the run or to the federation."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names that papers use for the fields, mapped to the names of the fields. A caller may also use these
    names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    def __init__(self, /, *values: object, **options: object) -> None:
        __tracebackhide__ = True
        name, fields = type(self).__name__, type(self).model_fields
        if values:
            raise ConfigError(
                f"{name} needs its options as keyword arguments, got {_show_value(values[0])}. "
                f"Allowed: {', '.join(fields)}"
            )
        try:
            super().__init__(**_replace_aliases(options, type(self)))
        except ValidationError as error:
            raise _refusal_sentences(error, name, fields) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # a value within another is not made by it
    __init__.__signature__ = inspect.signature(BaseModel.__init__)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except ValueError:
            raise self._frozen_error(name) from None

    def __delattr__(self, name: str) -> None:
        raise self._frozen_error(name)

    def _frozen_error(self, name: str) -> ConfigError:
        what = f"{type(self).__name__}.{name}"
        return ConfigError(f"{what} cannot be changed: values are frozen. Make a changed copy with with_({name}=...)")

    def is_set(self, name: str) -> bool:
        """Return True if a field differs from its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True))

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """Return a copy of the value, which is validated if any fields change. `copy.replace` calls this method."""
        return self.with_(**update) if update else super().model_copy(deep=deep)

    def with_(self, **changes: object) -> Self:
        """Return a validated copy with some fields changed."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**fields, **changes})

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        path = get_import_path(cls)
        if path is not None and "kind" not in {*vars(cls), *cls.model_fields}:
            cls.kind = path  # type: ignore[attr-defined]

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        if "description" in schema:  # options have their own descriptions
            schema["description"] = schema["description"].partition(f"\n\n{ARGS_HEADING}")[0]
        return schema

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _disable_conversions(handler(source), cls)
        return schema

    @model_serializer(mode="wrap")
    def _replace_path(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        path, options = get_import_path(type(self)), fields(self)
        return options if path is None else {"kind": path, **{k: v for k, v in options.items() if k != "kind"}}


def choose(what: str, registry: Mapping[str, T], name: object, where: str = "", base: type | None = None) -> T:
    """Return an entry of a registry by its name, or a user-defined class by its import path.

    Args:
        what: kind of choice, such as a sampler, which is named in the message.
        registry: entries, keyed by name.
        name: key in the registry, or ``package.module:Class`` if a base class is given.
        where: file and table that contain the name, which are named in the message.
        base: required base class of a user-defined class. If None, only names in the registry are
            allowed.

    Raises:
        ConfigError: the name is not registered (the message suggests the closest valid name), or the path does not
            refer to a suitable class.
    """
    if isinstance(name, str) and name in registry:
        return registry[name]
    if base is not None and isinstance(name, str) and is_path(name):
        entry: T = find_class(name, what, base, where)
        return entry
    raise unknown_name_error(what, name, registry, where)


TYPE_NAMES: Mapping[type, str] = {bool: "True or False", str: "text", type(None): "None"}
"""Names of types as messages show them."""


def has_type(value: object, *kinds: type) -> bool:
    """Return True if the value that a caller passed is an instance of one of these types.

    Annotations by themselves do not guarantee this.
    """
    return isinstance(value, kinds)


def check_type(what: str, value: object, *kinds: type) -> None:
    """Raise an error if the value that a caller passed is not an instance of one of these types.

    Raises:
        ConfigError: the value has a different type. The message names the accepted types.
    """
    if not isinstance(value, kinds):
        names = " or ".join(TYPE_NAMES.get(kind, kind.__name__) for kind in kinds)
        raise ConfigError(f"{what} must be {names}, got {value!r:.60}")


def list_functions(value: object, rule: str) -> list[Any]:
    """Return the functions that a caller passed as a list.

    Raises:
        ConfigError: the value is not a list of functions. The message begins with ``rule``.
    """
    try:
        functions = [None] if callable(value) else [*cast("Iterable[Any]", value)]
    except TypeError:  # not iterable, or a tensor without axes
        functions = [None]
    if not all(map(callable, functions)):
        raise ConfigError(f"{rule}, as [print], got {value!r:.200}")
    if idle := [f for f in functions if inspect.iscoroutinefunction(f) or inspect.isgeneratorfunction(f)]:
        raise ConfigError(f"{rule}, but a call of {idle[0].__name__} runs no code. Use def without async and yield")
    return functions


def make_kind(
    what: str, registry: Mapping[str, type[T]], options: Mapping[str, object], where: str, default: str = "", *,
    base: type, hint: Hint = give_no_hint,
) -> T:  # fmt: skip
    """Return the value that a table in a file describes.

    The class is selected by the table's ``kind``, which is a name in the registry or an import path.

    Raises:
        ConfigError: `choose` or `make` rejects the table.
    """
    entry = choose(f"{what} kind", registry, options.get("kind", default), where, base)
    return make(entry, {key: v for key, v in options.items() if key != "kind"}, where, fields_of(entry), hint)


def make(
    make_value: Callable[..., T],
    options: Mapping[str, object],
    where: str,
    fields: Mapping[str, object],
    hint: Hint = give_no_hint,
) -> T:
    """Return ``make_value(**options)``, and convert pydantic's errors to sentences.

    Args:
        make_value: class of the value, or function that returns a preset.
        options: keys and values of the table.
        where: file and table that contain the options, which are named in the message.
        fields: keys that are allowed.
        hint: function that states where a key belongs if the key is not allowed here.

    Raises:
        ConfigError: a key is unknown, a type is wrong or a value is out of range.
    """
    options = _replace_aliases(options, make_value)
    for alias, name in getattr(make_value, "aliases", {}).items():
        if alias in options:
            raise ConfigError(f"{where}: {alias} and {name} are the same option. Omit {alias}")
    for key in options:
        if key not in fields:
            raise unknown_name_error("key", key, fields, where, hint(key, options[key]))
    try:
        return make_value(**options)
    except (ValidationError, InvalidValue) as error:
        raise _refusal_sentences(error, where, fields) from None


def _replace_aliases(options: Mapping[str, object], kind: object) -> dict[str, object]:
    """Return options under the names of their fields, after replacing other names.

    If an option is given both under its field's name and under a different name, both are kept, and the value is
    rejected later.
    """
    aliases: Mapping[str, str] = getattr(kind, "aliases", {})
    return {key if aliases.get(key, key) in options else aliases.get(key, key): value for key, value in options.items()}


def note_idle_fields(value: Value, tables: Mapping[str, Value] = {}) -> list[str]:  # never changed
    """Return a note for each field that is set but has no effect because of the value of another field (see `needs`).

    Args:
        value: value whose fields are checked.
        tables: other tables that `needs` may name, such as ``{"local": ...}``.
    """
    notes = list[str]()
    for key, beside in value.needs.items():
        other, *values = beside.split()
        table, _, field = other.rpartition(".")
        owner = tables[table] if table else value
        now = getattr(owner, field)
        is_excluded = not values or values[0] == "not"
        acts = owner.is_set(field) if not values else (str(now) in values) != is_excluded
        if value.is_set(key) and not acts:
            where = f"not {now!r}" if is_excluded else " or ".join(v if v == "None" else repr(v) for v in values)
            notes.append(f"{idle_sentence(value, key)} with {other} = {now!r}. It has an effect if {other} is {where}")
    return notes


def idle_sentence(value: Value, key: str) -> str:
    """Return the beginning of a sentence that states that a value's field has no effect. The caller adds the reason."""
    return f"{type(value).__name__}: {key} = {getattr(value, key)!r} has no effect"


def get_kind(value: Value) -> str:
    """Return the name of a value's class in files."""
    return str(getattr(value, "kind", type(value).__name__))


def fields_of(value: Any) -> Mapping[str, Any]:
    """Return the fields of a value's class, or the options of a preset."""
    fields: Mapping[str, Any] = value.model_fields if hasattr(value, "model_fields") else value.options
    return fields


def check_is_table(options: object, where: str, cure: str = "") -> dict[str, Any]:
    """If a value is a table in the sense of TOML, return it unchanged.

    Raises:
        ConfigError: the value is not a table. ``cure`` is the end of the message, which states what to do.
    """
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: must be a table, got {options!r}{cure and '; '}{cure}")
    return options


def dump_value(value: BaseModel, **first: object) -> dict[str, Any]:
    """Return a value as a TOML table that contains every field that is set."""
    return {**first, **value.model_dump(mode="json", exclude_none=True)}


def flatten_document(document: Mapping[str, object]) -> dict[str, Any]:
    """Return a document as a dictionary without nesting, whose keys are dotted.

    The label of a method is the name of the method's table.
    """
    entries: dict[str, Any] = {}
    for key, value in document.items():
        inner = {}
        if isinstance(value, Mapping):
            inner = {f"{key}.{k}": v for k, v in flatten_document(value).items()}
        elif key == "method" and isinstance(value, list):  # FedSLR has an option of that name
            inner = {f"method {m['label']}: {k}": v for m in value for k, v in flatten_document(m).items()}
        entries |= inner or {key: list(value) if isinstance(value, tuple) else value}
    return entries


def find_difference(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the first key whose values differ in two documents with dotted keys, or "" if the documents are equal."""
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            old, new = (json.dumps(d[key], default=str) if key in d else "not set" for d in (before, now))
            return f"{key} was {old}, now it is {new}"
    return ""


def _disable_conversions(schema: object, owner: type) -> Any:
    """Return the schema of ``owner`` without conversions between text, booleans and numbers."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(_disable_conversions(item, owner) for item in schema)
    if not isinstance(schema, dict) or schema.get("cls", owner) is not owner:
        return schema
    kind = schema.get("type")
    if kind == "bool":
        return {**schema, "strict": True}
    if kind == "function-before" and getattr(schema["function"]["function"], "func", None) is exact_number:
        return schema  # the schema of this class was built before
    if isinstance(kind, str) and kind in NUMBER_ERRORS:
        return core_schema.no_info_before_validator_function(partial(exact_number, NUMBER_ERRORS[kind]), schema)
    return {
        key: value if key in IGNORED_SCHEMA_KEYS else _disable_conversions(value, owner)
        for key, value in schema.items()
    }


def exact_number(refusal: Literal["int_type", "float_type"], value: object) -> Any:
    """Return a number unchanged, and reject any other value.

    Raises:
        PydanticKnownError: the value is text or a boolean (from Python or an array), or is too large for a tensor.
    """
    if isinstance(value, (bool, str, bytes)) or str(getattr(value, "dtype", "")).rpartition(".")[2] == "bool":
        raise PydanticKnownError(refusal)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise PydanticKnownError("less_than_equal", {"le": MAX_INTEGER})
    return value


def or_derived(value: object, check: ValidatorFunctionWrapHandler) -> Any:
    """Return the validated value of an option with a derived default. "2x" is kept, and "1x" becomes None."""
    factor = 1.0 if value is None else factor_of(value)
    if factor:
        return None if factor == 1 else value
    try:
        return check(value)
    except ValidationError:
        if not isinstance(value, str):
            raise
        raise ValueError(f"must be a number, or a multiple of the derived value such as '2x', got {value!r}") from None


def factor_of(value: object) -> float | None:
    """Return the number in a text such as "2x", or None if the value is anything else."""
    return float(value[:-1]) if isinstance(value, str) and re.fullmatch(FACTOR_PATTERN, value) else None


MAX_DESCRIPTION_CHARS = 120
"""Maximum length of a description that is repeated in full in a message."""


def _show_value(value: object) -> str:
    return " ".join(repr(value).split())[:200]


def _refusal_sentences(error: ValidationError | InvalidValue, where: str, fields: Mapping[str, object]) -> InvalidValue:
    by_place: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for details in error.errors():
        by_place.setdefault(_error_location(details["loc"]), []).append(details)
    lists = {place[:depth] for place in by_place for depth in range(1, len(place))}  # lists with a wrong item
    sentences = [
        _describe_expected_value(choices, place, where, fields)
        for place, choices in by_place.items()
        if place not in lists
    ]
    return InvalidValue("\n".join(sentences), error.errors())


def _error_location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the location of an error, omitting pydantic's validators and union types."""
    return tuple(part for at, part in enumerate(location) if not at or not re.match(VALIDATOR_PATTERN, str(part)))


def _describe_expected_value(
    choices: Sequence[ErrorDetails], place: tuple[int | str, ...], where: str, fields: Mapping[str, object]
) -> str:
    """Return a description of the value that is expected at a location and of the value that was given there.

    For a union type, pydantic reports one error for each alternative.
    """
    error, key = choices[0], str(place[0]) if place else ""
    name = ".".join(map(str, place))
    description = getattr(fields.get(key), "description", None)
    hint = f" ({key}: {_shorten_description(description)})" if description and key != "algorithm" else ""
    if error["type"] == "extra_forbidden":
        return str(unknown_name_error("key", name, fields, where))
    where = f"{where}: " if where else ""
    named = [choice for choice in choices if choice["type"] != "string_pattern_mismatch"]  # the hint describes patterns
    first, *alternatives = dict.fromkeys(_describe_expected(choice) for choice in named or choices)
    message = ", or ".join([first, *(other.removeprefix("input should be ") for other in alternatives)])
    got = "" if error["type"] in ("missing", "value_error") else f", got {_show_value(error['input'])}"
    expected = [word for choice in named if choice["type"] == "literal_error" for word in _list_allowed_texts(choice)]
    if new := find_new_name(error["input"], expected):
        return f"{where}{name}: unknown value {error['input']!r}; its name is now {new!r}"
    return f"{where}{name + ': ' if name else ''}{message}{got}{hint}"


def _list_allowed_texts(error: ErrorDetails) -> list[str]:
    """Return the texts that an option allows as values."""
    return re.findall("'([^']*)'", str(error.get("ctx", {}).get("expected", "")))


def _shorten_description(description: str) -> str:
    """Return the part of an option's long description that precedes the first colon or semicolon."""
    return description if len(description) <= MAX_DESCRIPTION_CHARS else re.split("[:;]", description)[0]


def _describe_expected(error: ErrorDetails) -> str:
    if error["type"] == "model_type":
        return "must be a table"
    message = error["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    message = message.replace("String should match pattern", "Input should be text that matches the pattern")
    return f"{message[:1].lower()}{message[1:]}"
