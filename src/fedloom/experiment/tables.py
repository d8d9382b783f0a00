"""Between the tables of an experiment file and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from fedloom.errors import unknown
from fedloom.values import fields_of, make

T = TypeVar("T")


def make_kind(what: str, registry: Mapping[str, type[T]], options: Mapping[str, Any], where: str, default: str) -> T:
    """The value of a table whose ``kind`` chooses the class."""
    kind = options.get("kind", default)
    if kind not in registry:
        raise unknown(f"{what} kind", kind, registry, where)
    value = registry[kind]
    rest = {key: v for key, v in options.items() if key != "kind"}
    return make(value, rest, where, fields_of(value))


def dump(value: BaseModel, **first: Any) -> dict[str, Any]:
    """A value as a TOML table: every field that is set to something."""
    return {**first, **{k: v for k, v in value.model_dump(mode="json").items() if v is not None}}
