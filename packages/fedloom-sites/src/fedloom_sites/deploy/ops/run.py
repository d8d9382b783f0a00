"""Run of an experiment as a service, which starts Flower runs until all rounds are done.

``python -m fedloom_sites.deploy.ops.run SERVER.TOML COMMAND...`` exits with 0 if nothing is left to do, otherwise with
1. systemd starts it again after exit code 1, after a crash, and after a reboot of the machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom_sites.deploy.server.run import STOP_HINT, finished_hint, finished_reason, stop_file
from fedloom_sites.deploy.setting_files import read_server


def main(words: Sequence[str]) -> int:
    """Run a Flower command, unless the experiment is already complete, and return the exit code.

    Args:
        words: the server's TOML file, and the command.

    Returns:
        0 if the experiment is complete or should stop, otherwise 1.
    """
    try:
        server = read_server(Path(words[0]))
    except FedloomError as error:
        print(f"fedloom: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if finished_reason(server) is None and not stop_file(server).exists():
        subprocess.run(words[1:], check=False)
        return 0 if finished_reason(server) is not None or stop_file(server).exists() else 1
    ended = finished_reason(server)
    print(f"fedloom: {STOP_HINT if ended is None else finished_hint(ended)}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
