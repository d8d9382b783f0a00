"""What a round of a method costs, found by playing one in memory."""

from __future__ import annotations

from typing import Any

from fedloom.running.parallel import Pool
from fedloom.running.rounds import play
from fedloom.running.setup import make_job
from fedloom.running.state import initial_state
from fedloom.running.training import COUNTS, ask, train


def samples_per_round(**arguments: Any) -> int:
    """Samples whose gradient the first round takes, over its cohort.

    Args:
        arguments: of `simulate`, without folder, progress and advance.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
        RunStopped: too few uploads of the round are usable.
        ClientError: code of the method failed.
    """
    job, server = make_job(**arguments)
    handlers = {
        "train": lambda shared, task: train(job, shared[0], shared[1], task),
        "ask": lambda shared, task: ask(job, shared, task),
    }
    with Pool(handlers, 1) as pool:
        state = play(job, pool, initial_state(job, server))
    return int(state.totals[COUNTS.index("samples_backward")])
