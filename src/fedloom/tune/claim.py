"""The directory of a search, and whose it is: ``search.toml`` says what its trials depend on."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.errors import RunDirError
from fedloom.storage.files import is_unused, make_folder, write_atomic


def claim(out: Path, search: Mapping[str, Any], *, force: bool) -> None:
    """Make a directory a search's own.

    Args:
        out: the directory, created if need be.
        search: what its trials depend on.
        force: forget what is there.

    Raises:
        RunDirError: it is another's.
    """
    now = tomllib.loads(tomli_w.dumps(search))
    path = out / "search.toml"
    there = not is_unused(out)
    if there and not path.exists():
        raise RunDirError(f"{out} is not empty and holds no search (no search.toml); choose another --out")
    if there and not force:
        _compare(out, tomllib.loads(path.read_text()), now)
    make_folder(out / "trials")
    if force:
        for old in (out / "trials").glob("*.json"):
            old.unlink()
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    write_atomic(path, tomli_w.dumps(now).encode())


def _compare(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another search; more trials, methods and a longer final run may be asked for."""
    old, new = _flat(before), _flat(now)
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key] and key not in ("rounds", "tune.trials"):
            raise RunDirError(
                f"{out} holds another search: {key} was {old[key]!r}, now it is {new[key]!r}; choose another --out, or "
                "start anew with --force"
            )


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if key == "method" and isinstance(value, list):  # FedSLR has an option of that name
            for m in value:
                own = {k: v for k, v in m.items() if k != "rounds"}
                flat |= {f"method {m['label']}: {inner}": v for inner, v in _flat(own).items()}
        elif isinstance(value, dict):
            flat |= {f"{key}.{inner}": v for inner, v in _flat(value).items()}
        else:
            flat[key] = value
    return flat
