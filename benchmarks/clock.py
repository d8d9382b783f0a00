"""What virtual time costs: microseconds of an event of FedBuff beyond local work and arithmetic on rows.

    python benchmarks/clock.py --clients 100000 --in-flight 1000 --buffer 10

Softmax regression on 8 features and 3 classes, 3 samples a client, FedAvg with one step of two samples. One line:
microseconds per event of local work; of arithmetic on rows, which are copied from what is in flight, checked, summed up
and stepped on; and of the rest, which is everything else. The rest of two buffers, the second ten times as large, has
two parts: what one more event costs, and what a step of the server costs, whatever it takes. A synchronous round of as
many clients stands beside them. Seconds are of the processor, the least of twenty repetitions.
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

WARM, REPETITIONS = 20, 20

WORK = ((simulate, "compute_chunk"), (simulate, "train_chunk"))
"""What clients compute; in a round, their uploads are checked and summed up with it."""
ROWS = (
    (Flight, "without"), (dispatch, "combine_pieces"), (dispatch, "convert_stale_uploads"),
    (dispatch, "accept_uploads"), (Uploads, "add"), (Uploads, "aggregate"), (FedAvg, "server"),
)  # fmt: skip
"""Arithmetic on rows: they are copied, discounted, checked and summed up, and the model steps."""


@contextmanager
def timed(calls: Iterable[tuple[Any, str]]) -> Iterator[list[float]]:
    """Add up the seconds of the processor that calls, none within another, take meanwhile."""
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


def per_event(fed: Federation, schedule: Schedule, clients: int, size: int, steps: int) -> dict[str, float]:
    """Microseconds per upload: of local work, of arithmetic on rows, of the rest, and of all."""
    setting = Setting.create(
        "fedavg", devices=LogNormal(), schedule=schedule, sampler={"kind": "uniform", "clients": clients},
        local={"steps": 1, "batch_size": 2}, rounds=10**6,
    )  # fmt: skip
    job, server = make_job(setting, fed)
    least: dict[str, float] = {}
    with fix_arithmetic(job), timed(WORK) as work, timed(ROWS) as rows, clients_of(job) as those:
        state = initial_state(job, server)
        for _ in range(WARM):
            state, _ = advance_to_server_step(job, those, state)
        for _ in range(REPETITIONS):
            work[0], rows[0], start = 0.0, 0.0, time.process_time()
            for _ in range(steps):
                state, _ = advance_to_server_step(job, those, state)
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
    plain = per_event(fed, Synchronous(), given.buffer, given.buffer, given.steps)
    small, large = (
        per_event(fed, Buffered(buffer=size), given.in_flight, size, given.steps)
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
