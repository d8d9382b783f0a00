"""What virtual time costs: microseconds of an event of FedBuff beyond local work, and memory of what is in flight.

    python benchmarks/clock.py --clients 100000 --in-flight 1000 --buffer 10

Softmax regression on 8 features and 3 classes, 3 samples a client, FedAvg with one step of two samples. One line:
microseconds per event for the queue, the pool and the log, apart into what every event adds and what every step adds,
by a second buffer ten times as large; for local work; for the server's step, as in a round, with the rows that are
copied for it; and those of a client of a synchronous round of as many clients as the buffer has. Seconds are of the
processor, the least of five repetitions.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of, one_thread
from fedloom.engine.state import initial_state
from fedloom.engine.virtual import stream
from fedloom.engine.virtual.advance import advance
from fedloom.engine.virtual.clock import Flight
from fedloom.schedule import Buffered, LogNormal, Schedule, Synchronous

WARM, REPETITIONS = 20, 5


def timed(call: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    """The call, which adds its seconds of the processor to those spent."""

    def through(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        answer = call(*args, **options)
        spent[call.__name__] += time.process_time() - start
        return answer

    return through


def per_event(fed: Federation, schedule: Schedule, clients: int, size: int, steps: int) -> dict[str, float]:
    """Microseconds per upload: all together, and those of clients (``compute``) and of the server (``step_on``)."""
    setting = Setting.of(
        "fedavg", devices=LogNormal(), schedule=schedule, sampler={"kind": "uniform", "clients": clients},
        local={"steps": 1, "batch_size": 2}, rounds=10**6,
    )  # fmt: skip
    spent = {"compute": 0.0, "step_on": 0.0, "without": 0.0}
    compute, step_on, without = stream.compute, stream.step_on, Flight.without
    stream.compute, stream.step_on = timed(compute, spent), timed(step_on, spent)
    Flight.without = timed(without, spent)
    job, server = make_job(setting, fed)
    least: dict[str, float] = {}
    with one_thread(), clients_of(job) as those:
        state = initial_state(job, server)
        for _ in range(WARM):
            state, _ = advance(job, those, state)
        for _ in range(REPETITIONS):
            spent |= dict.fromkeys(spent, 0.0)
            start = time.process_time()
            for _ in range(steps):
                state, _ = advance(job, those, state)
            parts = {"all": time.process_time() - start, **spent}
            parts["rest"] = parts["all"] - sum(spent.values())
            least = {k: min(v / steps / size * 1e6, least.get(k, np.inf)) for k, v in parts.items()}
    stream.compute, stream.step_on, Flight.without = compute, step_on, without
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--buffer", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    g = np.random.default_rng(0)
    n = 4 * given.clients
    data = fl.Dataset.of((g.standard_normal((n, 8), dtype=np.float32), g.integers(0, 3, n)))
    fed = fl.partition.iid(clients=given.clients, validation=0.0, test=0.25)(data, 0)
    plain = per_event(fed, Synchronous(), given.buffer, given.buffer, given.steps)["all"]
    found = per_event(fed, Buffered(buffer=given.buffer), given.in_flight, given.buffer, given.steps)
    many = per_event(fed, Buffered(buffer=10 * given.buffer), given.in_flight, 10 * given.buffer, given.steps)
    of_step = (found["rest"] - many["rest"]) * given.buffer / 0.9
    of_event = found["rest"] - of_step / given.buffer
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{given.clients} clients, {given.in_flight} in flight, buffer {given.buffer}: microseconds per event: "
        f"queue, pool and log {found['rest']:.1f} ({of_event:.1f} and {of_step:.0f} a step), "
        f"local work {found['compute']:.1f}, "
        f"server and rows {found['step_on'] + found['without']:.1f}; "
        f"per client of a synchronous round {plain:.1f}; peak {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
