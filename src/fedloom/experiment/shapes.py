"""Shapes: of every class that a table of an experiment file chooses, keys, types and ranges as plain data.

A shape refuses with pydantic's own checks what these can tell from the table alone. It needs no class, so a file can be
checked before torch is imported; what relates several values, or is code, is for the class to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic_core import SchemaValidator, core_schema

from fedloom.values import exact_number, fields_of, make, or_derived

Plain = dict[str, Any]
"""What JSON can hold."""
KEPT = {
    "any": (),
    "bool": ("strict",),
    "int": ("gt", "ge", "lt", "le", "multiple_of", "strict"),
    "float": ("gt", "ge", "lt", "le", "multiple_of", "strict", "allow_inf_nan"),
    "str": ("min_length", "max_length", "pattern", "strict"),
    "literal": ("expected",),
    "nullable": (),
    "tuple": ("min_length", "max_length", "variadic_item_index"),
    "list": ("min_length", "max_length"),
    "dict": ("min_length", "max_length"),
    "union": ("mode",),
    "tagged-union": ("discriminator",),
    "model-fields": ("extra_behavior",),
}
"""Kinds of pydantic's schemas that a shape keeps, with what it keeps of them; others allow anything."""


class Hint(NamedTuple):
    """What a message says about a key."""

    description: str | None


class Shape:
    """Keys, types and ranges of a table.

    Args:
        plain: what `plain` gives, or JSON made of it.
    """

    def __init__(self, plain: Plain) -> None:
        self.fields = {name: Hint(text) for name, text in plain["fields"].items()}
        self._parts = [(part["keys"], SchemaValidator(_core(part["schema"]))) for part in plain["parts"]]

    @classmethod
    def of(cls, value: Any) -> Shape:
        """The shape of a class of values, or of a preset."""
        return _of_class(value) if isinstance(value, type) else cls(plain(value))

    def check(self, options: Mapping[str, Any], where: str, more: tuple[str, ...] = ()) -> None:
        """Refuse a table.

        Args:
            options: its keys.
            where: file and table, for the message.
            more: keys that are allowed beside those of the shape, and not looked at.

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range.
        """
        make(self._validate, options, where, {**self.fields, **dict.fromkeys(more)})

    def _validate(self, **options: Any) -> None:
        for keys, validator in self._parts:
            validator.validate_python({k: v for k, v in options.items() if k in keys})


@cache
def _of_class(value: type) -> Shape:
    return Shape(plain(value))


def plain(value: Any) -> Plain:
    """A class of values, or a preset, as plain data."""
    fields = {name: field.description for name, field in fields_of(value).items()}
    parts = []
    for part in getattr(value, "parts", [value]):
        part.model_rebuild()
        keys = [k for k in part.model_fields if k in fields]
        parts.append({"keys": keys, "schema": _plain(part.__pydantic_core_schema__)})
    return {"fields": fields, "parts": parts}


def _plain(schema: Any) -> Plain:
    """A schema of pydantic without code; numbers keep the rule of `fedloom.values`."""
    kind = schema["type"]
    if kind == "function-before" and getattr(schema["function"]["function"], "func", None) is exact_number:
        return {"type": "number", "refusal": schema["function"]["function"].args[0], "schema": _plain(schema["schema"])}
    if kind in ("function-after", "default", "definitions"):
        return _plain(schema["schema"])
    if kind == "function-before" and schema["schema"]["type"] in ("model", "model-fields", "function-after"):
        return _plain(schema["schema"])  # code that takes away a key of its own
    if kind == "function-wrap" and getattr(schema["function"]["function"], "__name__", "") == "or_derived":
        return {"type": "derived", "schema": _plain(schema["schema"])}
    if kind == "model":
        config = {k: v for k, v in schema["config"].items() if k in ("extra_fields_behavior", "allow_inf_nan", "title")}
        return {"type": kind, "cls": schema["cls"].__name__, "config": config, "schema": _plain(schema["schema"])}
    if kind not in KEPT:
        return {"type": "any"}
    kept = {k: schema[k] for k in KEPT[kind] if k in schema}
    for key in ("schema", "keys_schema", "values_schema"):
        if key in schema:
            kept[key] = _plain(schema[key])
    if kind == "model-fields":
        kept["fields"] = {name: _field(field["schema"]) for name, field in schema["fields"].items()}
    elif kind in ("tuple", "list") and "items_schema" in schema:
        items = schema["items_schema"]
        kept["items_schema"] = [_plain(item) for item in items] if kind == "tuple" else _plain(items)
    elif kind == "union":
        kept["choices"] = [_choice(choice) for choice in schema["choices"]]
    elif kind == "tagged-union":
        kept["choices"] = {tag: _plain(choice) for tag, choice in schema["choices"].items()}
    return {"type": kind, **kept}


def _choice(schema: Any) -> Plain | list[Any]:
    """A choice of a union, with its name in messages where code belongs to it: that of code, which no sentence has."""
    return [_plain(schema), schema["type"]] if schema["type"] == "function-after" else _plain(schema)


def _field(schema: Any) -> Plain:
    """A field of a model: what it holds, and whether it may be left out."""
    while schema["type"] == "function-after":
        schema = schema["schema"]
    return {"type": "model-field", "schema": _plain(schema), "optional": schema["type"] == "default"}


def _core(plain: Any) -> Any:
    """The schema of pydantic of plain data."""
    if isinstance(plain, list):
        return [_core(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    inner = {key: _core(value) for key, value in plain.items()}
    match plain.get("type"):
        case "number":
            rule = partial(exact_number, plain["refusal"])
            return core_schema.no_info_before_validator_function(rule, inner["schema"])
        case "derived":
            return core_schema.no_info_wrap_validator_function(or_derived, inner["schema"])
        case "union":
            return {**inner, "choices": [tuple(c) if isinstance(c, list) else c for c in inner["choices"]]}
        case "model":
            return {**inner, "cls": type(plain["cls"], (), {})}
        case "model-field" if inner.pop("optional"):
            return {**inner, "schema": core_schema.with_default_schema(inner["schema"], default=None)}
    return inner
