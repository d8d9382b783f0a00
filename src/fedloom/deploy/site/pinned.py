"""Pinned: a site runs the app that is installed there, whatever the server sends, and its tasks ask for a secret.

Flower carries the app from the server to the sites and runs it there, and the port on which a site's own processes talk
gives its tasks to every user of the machine. Here the site's network process and the one that starts its tasks share
random bytes that are made anew at each start, and the program that a task runs is this one: Flower's, but for the app,
which is fedloom's own.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

SECRET = "--superexec-auth-secret-file"
PROGRAM = "flwr-clientapp"
"""Name under which Flower starts the program of a task."""


def start_executor(words: Sequence[str], folder: Path) -> int:
    """Start the process that starts a site's tasks, which ends with this one; its id.

    Args:
        words: command of the site's network process, which names the port and the file of the secret.
        folder: of the experiment's state at the site, for the program of a task.
    """
    secret, port = Path(words[words.index(SECRET) + 1]), words[words.index("--port") + 1]
    _write(secret, secrets.token_bytes(32), 0o600)
    programs = folder / "bin"
    programs.mkdir(mode=0o700, exist_ok=True)
    interpreter = f"exec {shlex.quote(sys.executable)} -P -m {__name__}"
    _write(programs / PROGRAM, f'#!/bin/sh\n{interpreter} "$@"\n'.encode(), 0o700)
    command = [
        *(
            str(Path(words[0]).with_name("flower-superexec")),
            "--insecure",
            "--runtime-api-address",
            f"127.0.0.1:{port}",
        ),
        *(SECRET, str(secret), "--parent-pid", str(os.getpid())),
    ]
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.posix_spawn(command[0], command, {**os.environ, "PATH": path})


def _write(path: Path, content: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def main() -> None:
    """Run a task of Flower with the app that is installed here; what the server sent is not installed, nor loaded."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    from fedloom.deploy.apps import client_app

    def nothing(*_arguments: object, **_options: object) -> None:
        """Take the place of what installs the app that the server sent."""

    instead = {
        "install_from_fab": nothing,
        "get_project_dir": nothing,
        "get_load_client_app_fn": lambda **_options: lambda *_names: client_app,
    }
    for name, function in instead.items():
        getattr(run_clientapp, name)  # a release of Flower without it is not the one that this was written for
        setattr(run_clientapp, name, function)
    flwr_clientapp()


if __name__ == "__main__":
    main()
