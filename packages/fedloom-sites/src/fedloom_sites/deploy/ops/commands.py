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

ANSWER_SECONDS = 90.0
"""Seconds that the server, or a command to it, may take to answer."""
OPS_FOLDER = files("fedloom_sites.deploy") / "ops"
PROGRAMS_FOLDER = Path(sys.executable).parent
"""Folder of this environment's programs."""


def fill_template(template: str, **values: object) -> str:
    """Fill the placeholders of a file in `ops/`."""
    return Template((OPS_FOLDER / template).read_text()).substitute(values)


def command(name: str, of: Value | None = None, programs: Path = PROGRAMS_FOLDER, **values: object) -> list[str]:
    """Build a command line of `ops/commands.toml`, as a list of words.

    Args:
        name: of the command.
        of: settings of the server or of a site. Its fields fill the places.
        programs: folder of Flower's programs.
        values: what fills the other places. ``file`` is the absolute path of the TOML file that the app reads.

    Raises:
        ConfigError: Flower cannot be given that path.
    """
    path = str(values.get("file", ""))
    if set(path) & set("\"'\\\n"):
        raise ConfigError(f"Flower takes no path with quotes or backslashes, got {path!r}; use another folder")
    places = {**(dict(of) if of else {}), **values, "programs": programs}
    return [Template(word).substitute(places) for word in _table("commands")[name]]


def environment(home: Path, programs: Path = PROGRAMS_FOLDER, threads: int | None = None) -> dict[str, str]:
    """Build the environment of a Flower process.

    Args:
        home: its own folder, for the app it unpacks and, for the command line, the connection.
        programs: folder of Flower's programs.
        threads: threads of numerical libraries. None: theirs to decide.
    """
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    values = {"home": home, "programs": programs}
    return {key: Template(text).substitute(values) for key, text in _table("environment").items()} | count


def ask(question: str, home: Path, programs: Path = PROGRAMS_FOLDER, **values: object) -> dict[str, Any]:
    """Run a command of `ops/commands.toml` with Flower's command line and return its answer.

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
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ProcessError(f"no answer within {ANSWER_SECONDS:.0f} s: {' '.join(words)}") from None
    start = done.stdout.find("{")
    answer: dict[str, Any] = json.loads(done.stdout[start:]) if start >= 0 else {}
    if done.returncode != 0 or not answer.get("success", True):
        why = answer.get("error-message") or (done.stdout + done.stderr).strip()
        raise ProcessError(f"{' '.join(words[1:4])}: {why}")
    return answer


def profile(address: str, ca: Path) -> str:
    """Render the `config.toml` with which Flower's command line reaches the server."""
    connection = {"address": address, "root-certificates": str(ca)}
    return tomli_w.dumps({"superlink": {"default": "fedloom", "fedloom": connection}})


@cache
def _table(name: str) -> Mapping[str, str]:
    entries: Mapping[str, str] = tomllib.loads((OPS_FOLDER / "commands.toml").read_text())[name]
    return entries
