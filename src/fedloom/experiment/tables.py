"""From values to the tables of an experiment file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def dump(value: BaseModel, **first: Any) -> dict[str, Any]:
    """A value as a TOML table: every field that is set to something."""
    return {**first, **{k: v for k, v in value.model_dump(mode="json").items() if v is not None}}
