"""What every rank of a test runs: python rank_program.py FILE.toml OUT [RANK LABEL ROUND: who dies, and when]."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom.lab.experiment import Plan, read
from fedloom.lab.experiment.events import Event
from fedloom.processes.distributed import join_ranks


def main(file: str, out: str, *victim: str) -> None:
    with join_ranks() as ranks:

        def hear(event: Event) -> None:
            if (str(ranks.rank), event.label, str(event.round)) == victim:
                os.kill(os.getpid(), getattr(signal, os.environ.get("VICTIM_GETS", "SIGKILL")))

        Plan(read(Path(file)), Path(out), ranks=ranks).run(hear, page=False)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FedloomError as error:
        sys.exit(f"error: {error}")
