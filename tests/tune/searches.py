"""A search for settings from the text of its file, and the files that it leaves."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedloom.tune import Tuning


def tuning(text: str, out: Path, **more: Any) -> Tuning:
    return Tuning(tomllib.loads(text), "small.toml", out, **more)


def contents(out: Path) -> dict[str, bytes]:
    names = [*sorted((out / "trials").glob("*.json")), out / "trials.csv", out / "tuned.toml", out / "tuning.md"]
    return {path.name: path.read_bytes() for path in names}
