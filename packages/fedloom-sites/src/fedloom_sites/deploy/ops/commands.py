"""Filled-in templates from `ops/`: Flower's command lines and environment, units, proxy and instructions."""

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
"""Number of seconds that the server, or a command to it, may take to answer."""
OPS_FOLDER = files("fedloom_sites.deploy") / "ops"
PROGRAMS_FOLDER = Path(sys.executable).parent
"""Folder with the programs of this Python environment."""
FINAL_EXIT_CODE = 3
"""Exit code of a run that cannot be resumed by another start. The unit lists it, so that systemd does not restart the
run."""
RESTART_VARIABLE = "FEDLOOM_RESTARTS_ON_ANY_FAILURE"
"""Environment variable that is set where every exit code except 0 leads to a restart, as in a container."""


def fill_template(template: str, **values: object) -> str:
    """Return a template from `ops/` with its placeholders filled in."""
    return Template((OPS_FOLDER / template).read_text()).substitute(values)


def command_words(name: str, of: Value | None = None, programs: Path = PROGRAMS_FOLDER, **values: object) -> list[str]:
    """Return a command line from `ops/commands.toml` as a list of words.

    Args:
        name: the command's name.
        of: settings of either the server or a site. Their fields replace the placeholders.
        programs: folder of Flower's programs.
        values: values of the other placeholders. ``file`` is the absolute path of the TOML file that the app reads.

    Raises:
        ConfigError: the path contains characters that Flower does not accept.
    """
    path = str(values.get("file", ""))
    if set(path) & set("\"'\\\n"):
        raise ConfigError(f"Flower does not accept paths with quotes or backslashes, got {path!r}. Use another folder")
    places = {**(dict(of) if of else {}), **values, "programs": programs}
    return [Template(word).substitute(places) for word in _command_table("commands")[name]]


def process_environment(home: Path, programs: Path = PROGRAMS_FOLDER, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables of a Flower process.

    Args:
        home: folder where the process unpacks the app and (for the command line) finds the connection settings.
        programs: folder of Flower's programs.
        threads: number of threads of numerical libraries. If None, the libraries use their own default.
    """
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    values = {"home": home, "programs": programs}
    return {key: Template(text).substitute(values) for key, text in _command_table("environment").items()} | count


def ask_flower(question: str, home: Path, programs: Path = PROGRAMS_FOLDER, **values: object) -> dict[str, Any]:
    """Run a command from `ops/commands.toml` with Flower's command line, and return its answer.

    Args:
        question: name of the command.
        home: folder of Flower's command line, with the connection to the server.
        programs: folder of Flower's programs.
        values: see `command_words`.

    Raises:
        ProcessError: the command failed or took too long.
    """
    words, variables = (
        command_words(question, None, programs, **values),
        {**os.environ, **process_environment(home, programs)},
    )
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


def flower_profile(address: str, ca: Path) -> str:
    """Return the `config.toml` that lets Flower's command line reach the server."""
    connection = {"address": address, "root-certificates": str(ca)}
    return tomli_w.dumps({"superlink": {"default": "fedloom", "fedloom": connection}})


@cache
def _command_table(name: str) -> Mapping[str, str]:
    entries: Mapping[str, str] = tomllib.loads((OPS_FOLDER / "commands.toml").read_text())[name]
    return entries
