"""Measure how much of a round each method spends on its own arithmetic, outside gradients and batch plans.

    OMP_NUM_THREADS=1 python benchmarks/algebra.py --rounds 5
    OMP_NUM_THREADS=1 python benchmarks/algebra.py --method fedavg --method flame

Each method trains the MLP 784-200-200-10 on one thread. All 100 clients take part in every round, with one epoch of
200 samples in batches of 20. The column `own` is the time that the method spends in `down`, `client` and `server`,
including `descend` and `iterate`. It excludes the time spent in the oracle's functions (gradients, losses, activations)
and in the batch plans. The engine uses the rest of the round, for the client store, for checking and summing the
uploads, and for counting bytes. The rounds of all methods are interleaved, the first round of each method is dropped,
and medians over the other rounds are printed.

A method is marked if its own arithmetic takes more than 15 % of a round. The mark is `svd`, `cluster`, `pairs`,
`project` (onto a random subspace in every step) or `top-k` (a selection in every layer and a mask in every step) if
the method's paper requires this operation, and `*` otherwise. If a method is marked with `*`, the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import torch
from workloads import WORKLOADS, Workload

from fedloom.algorithms import ALGORITHMS, REGISTRY, Algorithm, PresetMethod
from fedloom.engine import simulate as running
from fedloom.engine.round import run_round
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.state import initial_state
from fedloom.local import LocalSGD, Work

MAX_SHARE = 0.15
PAPER_MARKS = {
    "fedslr": "svd",
    "lpgd": "svd",
    "equitable-fl": "cluster",
    "clustered-sampling": "cluster",
    "fedacs": "pairs",
    "fedamp": "pairs",
    "heurfedamp": "pairs",
    "lp-proj": "project",
    "admm-lp-proj": "project",
    "fedspa": "top-k",
}
"""Mark of each method whose paper requires expensive arithmetic, such as clustering or the distances of all pairs."""
REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {"fedbn": {"layers": ("fc2.bias",)}}  # no normalization layer
ORACLE_FUNCTIONS = ("addgrad_", "batch_loss", "activations", "accuracy")
METHOD_FUNCTIONS = ("down", "client", "server")


class CallTimer:
    """Timer that adds up the processor time spent in some functions of an object. Nested calls are counted once."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self.seconds, self.depth = 0.0, 0
        for name in names:
            setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.process_time() - start

        return call


def own_functions(method: type[Algorithm]) -> tuple[str, ...]:
    """Return the names of the functions that a method does not inherit from `Algorithm`, which only pass models on."""
    return tuple(name for name in METHOD_FUNCTIONS if getattr(method, name) is not getattr(Algorithm, name))


METHOD_TIMERS = {method: CallTimer(method, own_functions(method)) for method in {*ALGORITHMS.values()}}
PLAN_TIMER = CallTimer(Work, ("plan", "pieces"))


class MethodRun:
    """Run of one method, which computes one round per call."""

    def __init__(self, name: str, workload: Workload, stack: ExitStack) -> None:
        method: Any = REGISTRY[name](**REQUIRED_OPTIONS.get(name, {}))
        local = LocalSGD(lr=0.01, epochs=1, batch_size=workload.batch)
        composition = method if isinstance(method, PresetMethod) else PresetMethod(method)
        self.job, server = make_job(
            Setting.create(composition, model=workload.model, local=local), workload.federation()
        )
        self.state = initial_state(self.job, server)
        self.pool = stack.enter_context(running.clients_of(self.job))
        oracle, loop_for = self.job.oracle, self.job.oracle.loop_for
        self.oracle_timer = CallTimer(oracle, ORACLE_FUNCTIONS)

        def timed_loop_for(w: torch.Tensor) -> Any:
            loop = loop_for(w)
            return None if loop is None else self.oracle_timer.timed(loop)

        oracle.loop_for = timed_loop_for  # type: ignore[method-assign]

    def round(self) -> tuple[float, float, float]:
        """Compute a round, and return its time, the time in the method's own arithmetic, and the time in the engine."""
        own, plan = METHOD_TIMERS[type(self.job.algorithm)], PLAN_TIMER
        before = (own.seconds, plan.seconds, self.oracle_timer.seconds)
        start = time.process_time()
        self.state, _ = run_round(self.job, self.pool, self.state)
        whole = time.process_time() - start
        functions, plans, oracle = (
            now - then for now, then in zip((own.seconds, plan.seconds, self.oracle_timer.seconds), before, strict=True)
        )
        return whole, functions - plans - oracle, whole - functions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=sorted(REGISTRY), help="method (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured rounds (default: 5)")
    parser.add_argument("--samples", type=int, default=200, help="number of samples per client (default: 200)")
    parser.add_argument("--together", type=int, default=8, help="number of methods interleaved (default: 8)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workload = replace(WORKLOADS["W2"], samples=options.samples)
    names = options.method or [name for name in REGISTRY if name != "centralized"]
    groups = [names[i : i + options.together] for i in range(0, len(names), options.together)]
    missed = []
    print(f"{'method':20s} {'seconds':>8s} {'own':>8s} {'share':>7s} {'engine':>7s}")
    for group in groups:
        with ExitStack() as stack:
            runs = {name: MethodRun(name, workload, stack) for name in group}
            rounds = [{name: run.round() for name, run in runs.items()} for _ in range(1 + options.rounds)][1:]
        for name in group:
            whole = statistics.median(r[name][0] for r in rounds)
            own = statistics.median(r[name][1] for r in rounds)
            share = statistics.median(r[name][1] / r[name][0] for r in rounds)
            engine = statistics.median(r[name][2] / r[name][0] for r in rounds)
            mark = PAPER_MARKS.get(name, "*") if share > MAX_SHARE else ""
            missed += [name] if mark == "*" else []
            print(f"{name:20s} {whole:8.3f} {own:8.3f} {share:7.1%} {engine:7.1%} {mark}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
