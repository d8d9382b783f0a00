"""Measure what virtual time costs: the time per FedBuff event, without local work and arithmetic on rows.

    python benchmarks/clock.py --clients 100000 --in-flight 1000 --buffer 10

The method is FedAvg with one step on two samples. The model is a softmax regression with 8 features and 3 classes, and
every client has 3 samples. The program prints a sentence with the microseconds per event that are spent on local work,
on arithmetic on rows (copying, checking and summing uploads, and the server's step) and on everything else (the rest).
The rest is measured with two buffers, the second ten times as large as the first. From both measurements, the program
calculates the cost of one more event and the fixed cost of a server step. For comparison, it prints the rest of a
synchronous round with as many clients. Times are processor times, the minimum over twenty repetitions.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np

import fedloom as fl
from fedloom.algorithms.fedavg import FedAvg
from fedloom.data.federation import Federation
from fedloom.engine import simulate
from fedloom.engine.clients.uploads import Uploads
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of, fix_arithmetic
from fedloom.engine.state import initial_state
from fedloom.engine.virtual import dispatch
from fedloom.engine.virtual.advance import advance_to_server_step
from fedloom.engine.virtual.clock import Flight
from fedloom.schedule import Buffered, LogNormal, Schedule, Synchronous

WARM_UP_STEPS, REPETITIONS = 20, 20

LOCAL_WORK = ((simulate, "compute_chunk"), (simulate, "train_chunk"))
"""Functions for the local work of clients. In a synchronous round, they also check and sum the uploads."""
ROW_ARITHMETIC = (
    (Flight, "drop_landed"), (dispatch, "combine_pieces"), (dispatch, "convert_stale_uploads"),
    (dispatch, "accept_uploads"), (Uploads, "add"), (Uploads, "aggregate"), (FedAvg, "server"),
)  # fmt: skip
"""Functions for arithmetic on rows: they copy, discount, check and sum uploads, and update the model."""


@contextmanager
def time_calls(calls: Iterable[tuple[Any, str]]) -> Iterator[list[float]]:
    """Measure the processor time that some functions take during the block. None of them may call another."""
    spent, before = [0.0], [(owner, name, getattr(owner, name)) for owner, name in calls]

    def through(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_timed(*args: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **options)
            finally:
                spent[0] += time.process_time() - start

        return call_timed

    for owner, name, call in before:
        setattr(owner, name, through(call))
    try:
        yield spent
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)


def microseconds_per_event(
    fed: Federation, schedule: Schedule, clients: int, size: int, steps: int
) -> dict[str, float]:
    """Return the microseconds per upload for local work, for arithmetic on rows, for the rest, and in total."""
    setting = Setting.create(
        "fedavg", devices=LogNormal(), schedule=schedule, sampler={"kind": "uniform", "clients": clients},
        local={"steps": 1, "batch_size": 2}, rounds=10**6,
    )  # fmt: skip
    job, server = make_job(setting, fed)
    least: dict[str, float] = {}
    with (
        fix_arithmetic(job),
        time_calls(LOCAL_WORK) as work,
        time_calls(ROW_ARITHMETIC) as rows,
        clients_of(job) as pool,
    ):
        state = initial_state(job, server)
        for _ in range(WARM_UP_STEPS):
            state, _ = advance_to_server_step(job, pool, state)
        for _ in range(REPETITIONS):
            work[0], rows[0], start = 0.0, 0.0, time.process_time()
            for _ in range(steps):
                state, _ = advance_to_server_step(job, pool, state)
            whole = time.process_time() - start
            parts = {"work": work[0], "rows": rows[0], "rest": whole - work[0] - rows[0], "all": whole}
            least = {k: min(v / steps / size * 1e6, least.get(k, np.inf)) for k, v in parts.items()}
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--buffer", type=int, default=10)
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    g = np.random.default_rng(0)
    n = 4 * given.clients
    data = fl.Dataset.create((g.standard_normal((n, 8), dtype=np.float32), g.integers(0, 3, n)))
    fed = fl.partitions.iid(clients=given.clients, validation=0.0, test=0.25)(data, 0)
    plain = microseconds_per_event(fed, Synchronous(), given.buffer, given.buffer, given.steps)
    small, large = (
        microseconds_per_event(fed, Buffered(buffer=size), given.in_flight, size, given.steps)
        for size in (given.buffer, 10 * given.buffer)
    )
    each = (10 * large["rest"] - small["rest"]) / 9
    step = given.buffer * (small["rest"] - each)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{given.clients} clients, {given.in_flight} in flight, buffer {given.buffer}: microseconds per event: "
        f"local work {small['work']:.1f}, arithmetic on rows {small['rows']:.1f}, "
        f"the rest {small['rest']:.1f}, of a buffer of {10 * given.buffer} {large['rest']:.1f}; "
        f"so {each:.1f} for an event and {step:.0f} for a step of the server, "
        f"for which a synchronous round of {given.buffer} clients takes {given.buffer * plain['rest']:.0f}; "
        f"peak {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
