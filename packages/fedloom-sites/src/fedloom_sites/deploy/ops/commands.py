"""The files of `ops/`, filled: command lines and environment of Flower's programs, units, gate and directions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedloom.errors import ConfigError
from fedloom.values import Value
from fedloom_sites.deploy.ops.processes import ProcessError

ANSWER = 90.0
"""Seconds that the server, or a command to it, may take to answer."""
OPS = files("fedloom_sites.deploy") / "ops"
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
    places = {**(dict(of) if of else {}), **values, "programs": programs}
    return [Template(word).substitute(places) for word in _table("commands")[name]]


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


def ask(question: str, home: Path, programs: Path = PROGRAMS, **values: object) -> dict[str, Any]:
    """The answer of Flower's command line to a command of `ops/commands.toml`.

    Args:
        question: name of the command.
        home: folder of the command line, with the connection to the server.
        programs: folder of Flower's programs.
        values: see `command`.

    Raises:
        ProcessError: it failed or took too long.
    """
    words, variables = command(question, None, programs, **values), {**os.environ, **environment(home, programs)}
    try:
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=ANSWER, check=False)
    except subprocess.TimeoutExpired:
        raise ProcessError(f"no answer within {ANSWER:.0f} s: {' '.join(words)}") from None
    start = done.stdout.find("{")
    answer: dict[str, Any] = json.loads(done.stdout[start:]) if start >= 0 else {}
    if done.returncode != 0 or not answer.get("success", True):
        why = answer.get("error-message") or (done.stdout + done.stderr).strip()
        raise ProcessError(f"{' '.join(words[1:4])}: {why}")
    return answer


def profile(address: str, ca: Path) -> str:
    """The file `config.toml` in the home of Flower's command line: how it reaches the server."""
    connection = {"address": address, "root-certificates": str(ca)}
    return tomli_w.dumps({"superlink": {"default": "fedloom", "fedloom": connection}})


@cache
def _table(name: str) -> Mapping[str, str]:
    entries: Mapping[str, str] = tomllib.loads((OPS / "commands.toml").read_text())[name]
    return entries
