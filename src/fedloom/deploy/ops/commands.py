"""The files of `ops/`, filled: command lines and environment of Flower's programs, units, gate and directions."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

import tomli_w

from fedloom.errors import ConfigError
from fedloom.values import Value

OPS = files("fedloom.deploy") / "ops"
PROGRAMS = Path(sys.executable).parent
"""Where the programs of this environment are."""


def filled(template: str, **values: object) -> str:
    """A file of `ops/` with its places filled."""
    return Template((OPS / template).read_text()).substitute(values)


def command(name: str, of: Value | None = None, programs: Path = PROGRAMS, **values: object) -> list[str]:
    """A command line of `ops/commands.toml`, word by word.

    Args:
        name: of the command.
        of: settings of the server or of a site; its fields fill the places.
        programs: folder of Flower's programs.
        values: what fills the other places; ``file`` is the absolute path of the TOML file that the app reads.

    Raises:
        ConfigError: Flower cannot be given that path.
    """
    path = str(values.get("file", ""))
    if set(path) & set("\"'\\\n"):
        raise ConfigError(f"Flower takes no path with quotes or backslashes, got {path!r}; use another folder")
    given = {**(dict(of) if of else {}), **values, "programs": programs}
    return [Template(word).substitute(given) for word in _table("commands")[name]]


def environment(home: Path, programs: Path = PROGRAMS, threads: int | None = None) -> dict[str, str]:
    """What a Flower process needs in its environment.

    Args:
        home: its own folder, for the app it unpacks and, for the command line, the connection.
        programs: folder of Flower's programs.
        threads: threads of numerical libraries; None: theirs to decide.
    """
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    values = {"home": home, "programs": programs}
    return {key: Template(text).substitute(values) for key, text in _table("environment").items()} | count


def profile(address: str, ca: Path) -> str:
    """The file `config.toml` in the home of Flower's command line: how it reaches the server."""
    connection = {"address": address, "root-certificates": str(ca)}
    return tomli_w.dumps({"superlink": {"default": "fedloom", "fedloom": connection}})


@cache
def _table(name: str) -> Mapping[str, str]:
    found: Mapping[str, str] = tomllib.loads((OPS / "commands.toml").read_text())[name]
    return found
