"""JSON schema of experiment files, for editors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedloom.algorithms import REGISTRY, Preset
from fedloom.algorithms._base import DEFAULT_KINDS
from fedloom.analyses import ANALYSES
from fedloom.engine.setting import Setting
from fedloom.imports import IMPORT_PATH_PATTERN
from fedloom.lab.experiment.schema import SETTING_TABLES, TopLevelKeys
from fedloom.values import Value

Schema = dict[str, Any]
"""A JSON schema, as a dictionary."""


def json_schema() -> str:
    """Return the JSON schema of experiment files, for editors."""
    shared: Schema = {}

    def one(value: type[Value] | Preset) -> Schema:
        if hasattr(value, "model_json_schema"):
            schema: Schema = value.model_json_schema()
            shared.update(schema.pop("$defs", {}))
            for field in schema.get("properties", {}).values():
                field.pop("title", None)  # the title only repeats the key
            return schema
        properties = {k: v for part in value.parts for k, v in one(part).get("properties", {}).items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def kinds(registry: Mapping[str, type[Value] | Preset], key: str = "kind", **more: object) -> Schema:
        choices = []
        for name, value in registry.items():
            schema = one(value)
            properties = {key: {"const": name}, **schema.get("properties", {}), **more}
            choices.append({**schema, "title": name, "properties": properties, "required": [key]})
        for name, field in choices[0]["properties"].items() if len(choices) > 2 else ():
            if all(c["properties"].get(name) == field for c in choices) and shared.setdefault(name, field) == field:
                for c in choices:
                    c["properties"][name] = {"$ref": f"#/$defs/{name}"}  # all kinds share one definition
        path = {"type": "string", "pattern": IMPORT_PATH_PATTERN, "description": "import path of a class of user code"}
        choices.append({"type": "object", "title": "user code", "properties": {key: path, **more}, "required": [key]})
        return {"type": "object", "anyOf": choices}

    head = one(TopLevelKeys)["properties"]
    tables = {name: kinds(t.classes(), t.key) if t.kinds else one(t.base) for name, t in SETTING_TABLES.items()}
    other = {"type": "object", "properties": {"source": {"type": "string", "pattern": "[/:.]"}}, "required": ["source"]}
    tables["data"]["anyOf"].append({**other, "title": "a path or hub:owner/name"})
    overridable = {name: tables.pop(name) for name in Setting.per_method if name in tables}
    links = {name: {"$ref": f"#/$defs/{name}"} for name in overridable}
    words = {
        "enum": list(DEFAULT_KINDS),
        "description": "source of default values for options that the file does not set",
    }
    label = {"type": "string"}
    method = kinds(REGISTRY, "algorithm", **links, rounds=head["rounds"], label=label, defaults=words)
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fedloom experiment",
        "type": "object",
        "additionalProperties": False,
        "required": ["data", "method"],
        "properties": {
            **head,
            **tables,
            "grid": {"type": "object"},
            "method": {"type": "array", "minItems": 1, "items": method},
            "analysis": {"type": "array", "items": kinds(ANALYSES)},
            **links,
        },
        "$defs": {**shared, **overridable},
    }
    return json.dumps(document, separators=(",", ":"))
