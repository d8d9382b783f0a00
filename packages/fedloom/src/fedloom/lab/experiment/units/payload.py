"""Payloads: in-memory data encoded as bytes, to be sent to another machine.

Tensors are stored as safetensors, and everything else is stored as JSON, never as code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load, save
from torch import Tensor

from fedloom.errors import ConfigError

KIND_KEY, FORM_KEY = "kind of value", "form"


def encode(value: object) -> bytes:
    """Encode a data set or a federation as bytes. Equal values produce equal bytes.

    Raises:
        ConfigError: part of the value cannot be encoded.
    """
    tensors = dict[str, Tensor]()
    form = json.dumps(_encode_form(value, tensors, "data"), sort_keys=True)
    return save(tensors or {"none": torch.zeros(0)}, {FORM_KEY: form})


def decode(content: bytes) -> Any:
    """Decode bytes that `encode` returned."""
    length = int.from_bytes(content[:8], "little")
    form = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][FORM_KEY])
    return _decode_form(form, load(content))


def _encode_form(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """Return a value as JSON with tensors replaced by names, and store the tensors under these names in ``tensors``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[place] = value.detach().cpu().clone().contiguous()
        return {KIND_KEY: "tensor", "name": place}
    if isinstance(value, torch.dtype):
        return {KIND_KEY: "dtype", "name": str(value).removeprefix("torch.")}
    if is_dataclass(value):
        pairs = [(f.name, getattr(value, f.name)) for f in fields(value) if f.init]
    elif isinstance(value, BaseModel):
        pairs = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = [(name, getattr(value, name)) for name in value._fields]
    elif isinstance(value, tuple | list):
        return {
            KIND_KEY: type(value).__name__,
            "items": [_encode_form(v, tensors, f"{place}.{k}") for k, v in enumerate(value)],
        }
    elif isinstance(value, Mapping):
        items = [[key, _encode_form(v, tensors, f"{place}.{k}")] for k, (key, v) in enumerate(value.items())]
        return {KIND_KEY: "dict", "items": items}
    else:
        raise ConfigError(
            f"{place} is a {type(value).__name__}, which cannot be sent to a worker. Save the data to a file"
        )
    module, name = type(value).__module__, type(value).__qualname__
    if module.partition(".")[0] != "fedloom":
        raise ConfigError(f"{place} is a {module}.{name}, which cannot be sent to a worker. Save the data to a file")
    return {
        KIND_KEY: f"{module}:{name}",
        "fields": {key: _encode_form(v, tensors, f"{place}.{key}") for key, v in pairs},
    }


def _decode_form(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(form, dict):
        return form
    kind = form[KIND_KEY]
    if kind == "tensor":
        return tensors[form["name"]]
    if kind == "dtype":
        return getattr(torch, form["name"])
    if kind in ("tuple", "list"):
        items = [_decode_form(v, tensors) for v in form["items"]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _decode_form(v, tensors) for key, v in form["items"]}
    module, _, name = kind.partition(":")
    if module.partition(".")[0] != "fedloom":
        raise ConfigError(f"{kind} is not a known type of data")
    return getattr(import_module(module), name)(**{key: _decode_form(v, tensors) for key, v in form["fields"].items()})
