"""The JSON schema of experiment files, for editors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import create_model

from fedloom.algorithms import REGISTRY
from fedloom.choose import SAMPLERS, WEIGHERS
from fedloom.data.partition import PARTITIONS
from fedloom.data.sources import SOURCES
from fedloom.engine.setting import Engine, Evaluate, Setting
from fedloom.experiment.schema import Head
from fedloom.experiment.tuning import Tune
from fedloom.imports import PATTERN
from fedloom.local import LocalSGD
from fedloom.models import MODELS, PAPERS, Augment
from fedloom.rows.aggregate import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channel import CHANNELS


def json_schema() -> str:
    """The JSON schema of experiment files, for editors."""
    shared: dict[str, Any] = {}

    def one(value: Any) -> dict[str, Any]:
        if hasattr(value, "model_json_schema"):
            schema: dict[str, Any] = value.model_json_schema()
            shared.update(schema.pop("$defs", {}))
            return schema
        properties = {k: v for part in value.parts for k, v in one(part).get("properties", {}).items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def kinds(registry: Mapping[str, Any], key: str = "kind", **more: Any) -> dict[str, Any]:
        choices = []
        for name, value in registry.items():
            schema = one(value)
            properties = {key: {"const": name}, **schema.get("properties", {}), **more}
            choices.append({**schema, "title": name, "properties": properties, "required": [key]})
        path = {"type": "string", "pattern": PATTERN, "description": "import path of a class of user code"}
        choices.append({"type": "object", "title": "user code", "properties": {key: path, **more}, "required": [key]})
        return {"type": "object", "anyOf": choices}

    overrides = {
        "local": one(LocalSGD),
        "sampler": kinds(SAMPLERS),
        "weigher": kinds(WEIGHERS),
        "aggregator": kinds(AGGREGATORS),
        "channel": kinds(CHANNELS),
    }
    fields: Any = {name: (f.annotation, f) for name, f in Setting.model_fields.items() if name in Setting.plain()}
    plain = create_model("Head", __base__=Head, **fields)
    head = one(plain)["properties"]
    words = {"enum": ["default", "paper"], "description": "constants of the options that are not given"}
    method = kinds(
        REGISTRY,
        "algorithm",
        **overrides,
        rounds=head["rounds"],
        label={"type": "string"},
        settings=words,
    )
    other_source = {
        "type": "object",
        "properties": {"source": {"type": "string", "pattern": "[/:.]"}},
        "required": ["source"],
    }
    data = kinds(SOURCES, "source")
    data["anyOf"].append({**other_source, "title": "a path or hub:owner/name"})
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fedloom experiment",
        "type": "object",
        "additionalProperties": False,
        "required": ["data", "method"],
        "properties": {
            **head,
            "data": data,
            "partition": kinds(PARTITIONS),
            "attack": kinds(ATTACKS),
            "model": kinds({**MODELS, **{name: type(spec) for name, spec in PAPERS.items()}}),
            "augment": one(Augment),
            "evaluate": one(Evaluate),
            "engine": one(Engine),
            "tune": one(Tune),
            "method": {"type": "array", "minItems": 1, "items": method},
            **overrides,
        },
        "$defs": shared,
    }
    return json.dumps(document, indent=1)
