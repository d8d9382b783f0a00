"""A search for settings from the text of its file, and what it leaves."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from fedloom.lab.tune import Tuning


def tuning(text: str, out: Path, **more: Any) -> Tuning:
    return Tuning(tomllib.loads(text), "small.toml", out, **more)


def kept(path: Path) -> list[tuple[Any, ...]]:
    """The trials of a method's journal, as Optuna reads them by itself."""
    study = optuna.load_study(study_name=None, storage=JournalStorage(JournalFileBackend(str(path))))
    return [(t.number, t.state, t.values, t.params, t.intermediate_values, t.user_attrs) for t in study.trials]


def contents(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {path.name: kept(path) for path in sorted((out / "trials").iterdir())}
    return found | {name: (out / name).read_bytes() for name in ("trials.csv", "tuned.toml", "tuning.md", "trials.svg")}
