"""Program that runs a site's installed app, regardless of what the server sends, and protects its tasks with a secret.

By default, Flower sends the app from the server to the sites and runs it there. Any user of the machine could then
fetch the site's tasks from the port that its processes use. The site's network process and the process that starts its
tasks share random bytes, which are generated anew at each start. This module is the program run by a task: Flower's
program, but with fedloom's app.

Neither process imports Flower's command-line programs where functions of Flower are sufficient. The process that starts
tasks is forked before the network process starts a thread, so that the two processes share Flower's modules in memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import secrets
import shlex
import sys
import traceback
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError

SECRET_OPTION = "--superexec-auth-secret-file"
CLIENT_PROGRAM = "flwr-clientapp"
"""Flower's name for the program of a task."""
REFUSED_CONNECTION_HINT = (
    "fedloom: the server has not accepted this site. Unless the line above names a TLS error, the server does not know "
    "the site's key, or a node with this key is already connected: another process of the site, a copy of its folder "
    "on another machine, or the site's last process, if that was killed less than a minute ago. Run 'fedloom deploy "
    "check' on the site's folder. If it says that the key is rejected, ask the coordinator. Otherwise end the other "
    "node, or wait a minute."
)
"""Line in a site's log that appears next to Flower's exit code, because the exit code does not explain the reason."""


def start_executor(words: Sequence[str], folder: Path) -> int:
    """Start the process that starts a site's tasks and ends together with this process, and return its ID.

    Args:
        words: command of the site's network process, which contains the port and the secret's file.
        folder: folder with the experiment's state at the site, where the tasks' program is written.

    Raises:
        ConfigError: the secret or the program cannot be written, for example because the disk is full.
    """
    from fedloom_sites.flwr_adapter import disable_process_dumping, run_superexec

    shared, port = secrets.token_bytes(32), words[words.index("--port") + 1]
    _write_file(Path(words[words.index(SECRET_OPTION) + 1]), shared, 0o600)
    programs = folder / "bin"
    interpreter = f"exec {shlex.quote(sys.executable)} -P -m {__name__}"
    _write_file(programs / CLIENT_PROGRAM, f'#!/bin/sh\n{interpreter} "$@"\n'.encode(), 0o700)
    parent = os.getpid()
    gc.freeze()  # keeps the garbage collector from writing to the shared pages
    if (child := os.fork()) > 0:
        return child
    try:
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        disable_process_dumping(strict=False)
        run_superexec(f"127.0.0.1:{port}", insecure=True, superexec_auth_secret=shared, parent_pid=parent)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the program never returns normally: it ends by a signal or with the network process


def run_network(words: Sequence[str], folder: Path) -> None:
    """Turn this process into a site's network process, and start the process that starts its tasks.

    The arguments and errors are the same as for `start_executor`.
    """
    from fedloom_sites.flwr_adapter import EXIT_CODE_HELP, ExitCode, flower_supernode

    EXIT_CODE_HELP[ExitCode.SUPERNODE_CONNECTION_ERROR] = REFUSED_CONNECTION_HINT
    explain_rejected_signatures()
    start_executor(words, folder)
    sys.argv = [*words]
    flower_supernode()


def explain_rejected_signatures() -> None:
    """Let the network process end with an explanation if the server rejects a signature.

    By default, Flower ends the process with exit code 0 and without a reason. Nothing is lost if the process ends at
    once, because another process has the site's state.
    """
    from fedloom_sites.deploy.clock import rejected_signature_reason
    from fedloom_sites.flwr_adapter import NodeAuthHttpInterceptor

    sign = NodeAuthHttpInterceptor.intercept

    def intercept(self: NodeAuthHttpInterceptor, context: Any, call_next: Any) -> Any:
        answer = sign(self, context, call_next)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            sys.stderr.write(f"fedloom: {rejected_signature_reason(answer.headers.get('Date'))}\n")
            sys.stderr.flush()
            os._exit(1)
        return answer

    NodeAuthHttpInterceptor.intercept = intercept  # type: ignore[method-assign]


def _write_file(path: Path, content: bytes, mode: int) -> None:
    """Rewrite a file of the state, and create its folder if necessary."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def main() -> None:
    """Run a Flower task with the app that is installed here.

    The app from the server is neither installed nor loaded.
    """
    from fedloom_sites.deploy.apps import client_app
    from fedloom_sites.flwr_adapter import add_args_flwr_app_common, task_program, try_obtain_flwr_app_token

    def nothing(*_arguments: object, **_options: object) -> None:
        """Do nothing. This function replaces Flower's functions that install the server's app."""

    instead = {
        "install_from_fab": nothing,
        "get_project_dir": nothing,
        "get_load_client_app_fn": lambda **_options: lambda *_names: client_app,
    }
    program = task_program()
    for name, function in instead.items():
        getattr(program, name)  # fails if a new release of Flower does not have this function
        setattr(program, name, function)
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runtime-api-address", required=True)
    add_args_flwr_app_common(parser)
    words = parser.parse_args()
    program.run_clientapp(
        words.runtime_api_address,
        token=try_obtain_flwr_app_token(words),
        insecure=True,  # loopback only, protected by the secret that the site's processes share
        parent_pid=words.parent_pid,
    )


if __name__ == "__main__":
    main()
