"""Run of an experiment as a service, which starts Flower runs until all rounds are done.

``python -m fedloom_sites.deploy.ops.run SERVER.TOML COMMAND...`` exits with 0 if nothing is left to do, with
`FINAL_EXIT_CODE` if the run needs a person, and otherwise with 1. systemd starts it again after exit code 1, after a
crash, and after a reboot of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import FedloomError, Stop
from fedloom.rundir import SUMMARY_FILE
from fedloom_sites.deploy.ops.commands import FINAL_EXIT_CODE, RESTART_VARIABLE
from fedloom_sites.deploy.server.run import STOP_HINT, finished_hint, finished_reason, recorded_stop, stop_file
from fedloom_sites.deploy.setting_files import read_server
from fedloom_sites.deploy.settings import Server


def main(words: Sequence[str]) -> int:
    """Run a Flower command, unless the experiment is already complete, and return the exit code.

    Args:
        words: the server's TOML file, and the command.

    Returns:
        0 if the experiment is complete or should stop, `FINAL_EXIT_CODE` if it has ended without a result or waits for
        a person, otherwise 1.
    """
    try:
        server = read_server(Path(words[0]))
    except FedloomError as error:
        print(f"fedloom: {error}", file=sys.stderr)  # noqa: T201
        return 1
    ended = finished_reason(server)
    if ended is None and not stop_file(server).exists():
        before = _summary_time(server)
        subprocess.run(words[1:], check=False)
        ended = finished_reason(server)
        waits = recorded_stop(server) in (Stop.NEUTRAL, Stop.BUDGET) and _summary_time(server) != before
        if ended is None and not stop_file(server).exists():
            return _final_code() if waits else 1
    else:
        print(f"fedloom: {STOP_HINT if ended is None else finished_hint(ended)}", flush=True)  # noqa: T201
    return 0 if ended is None or ended.status == "done" else _final_code()


def _final_code() -> int:
    return 0 if RESTART_VARIABLE in os.environ else FINAL_EXIT_CODE


def _summary_time(server: Server) -> int:
    """Return the time in nanoseconds at which the summary was written, or 0 if there is none."""
    path = server.results / SUMMARY_FILE
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
