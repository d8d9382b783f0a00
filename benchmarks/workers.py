"""Measure the speed of two workers relative to one worker, and check that both compute the same bits.

    python benchmarks/workers.py                      # forked workers: must be at least 1.7 times as fast
    torchrun --nproc-per-node 2 benchmarks/workers.py # the ranks of torchrun, compared with one process
    python benchmarks/workers.py --units readme       # README's comparison: must take at most 0.56 of the time
    python benchmarks/workers.py --units map          # 24 cells of the map: must take at most 0.55 of the time

The method is FedAvg on the MLP workload of the engine benchmark (W2). Blocks with one process and blocks with several
processes alternate, so that noise of the machine affects both. Blocks during which other processes used more than 0.1
core are ignored unless all blocks are affected. In that case, the last line ends with `disturbed`.

With ``--units``, two workers share whole runs or cells. Runs with one worker and with two workers alternate. The first
pair is not counted, because it includes imports and compilation. The files of both runs must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
from engine import Block
from plain import RATE
from typer.testing import CliRunner
from workloads import WORKLOADS

import fedloom as fl
from fedloom.algorithms import FedAvg
from fedloom.choose import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.lab.cli import app
from fedloom.local import LocalSGD
from fedloom.processes.distributed import join_ranks
from fedloom.processes.machine_load import MAX_FOREIGN_CORES, machine_seconds, process_seconds, wait_for_quiet
from fedloom.processes.ranks import SINGLE_RANK, Ranks

MIN_SPEEDUP = 1.7
"""Minimum speed of two workers, relative to one worker."""


def run_block(fed: Federation, name: str, rounds: int, workers: int, ranks: Ranks) -> tuple[Block, torch.Tensor]:
    """Run a block, and return the median seconds per round without the first round, and the trained model."""
    workload = WORKLOADS[name]
    before, mine = machine_seconds(), process_seconds()
    result = simulate(
        FedAvg(),
        fed,
        workload.model,
        rounds=rounds + 1,
        local=LocalSGD(lr=RATE, batch_size=workload.batch),
        sampler=Uniform(fraction=workload.cohort / workload.clients),
        evaluate=Evaluate(every=rounds + 1, parts=("validation",)),  # no client has such a part
        engine=Engine(workers=workers),
        ranks=ranks,
    )
    used, all_ranks = machine_seconds() - before, sum(ranks.gather(process_seconds() - mine))
    others = max(0.0, used - all_ranks) / sum(result.seconds)
    return Block(statistics.median(result.seconds[1:]), others), result.models.rows("global")


def compare_readme(workers: int, folder: Path) -> None:
    """Run the comparison in the README."""
    clients = fl.partitions.label_swap(clients=10, groups=2, max_train_per_client=60)
    methods = ["local", "fedavg", "fedavg-ft", "pfedme", "fedslr"]
    choices = {"rounds": 30, "local": {"lr": 0.4}, "compare_model": "personal", "engine": {"workers": workers}}
    fl.compare(
        methods, "digits", "mlp", partition=clients, seeds=range(10), folder=folder, progress_bar=False, **choices
    )


def measure_cells(workers: int, folder: Path) -> None:
    """Measure the cells of `CELL_METHODS` in the two setups of the map's smoke scale."""
    methods = [part for name in CELL_METHODS for part in ("--method", name)]
    places = ("--out", str(folder / "runs"), "--results", str(folder / "records"))
    result = CliRunner().invoke(app, ["map", "--scale", "smoke", "--workers", str(workers), *methods, *places])
    if result.exit_code:
        raise SystemExit(result.output)


CELL_METHODS = [
    "local", "fedavg", "fedavg-ft", "fedprox", "ditto", "fedopt", "scaffold", "fednova", "apfl", "fedslr", "pfedme",
    "cfl",
]  # fmt: skip
"""Methods that are measured in two setups, which gives 24 cells."""
UNITS: dict[str, tuple[Callable[[int, Path], None], float]] = {
    "readme": (compare_readme, 0.56),
    "map": (measure_cells, 0.55),
}
"""Function that does the work, and maximum time with two workers relative to one worker."""


def measure_units(name: str, pairs: int) -> int:
    """Measure pairs of runs with one and with two workers, and return 1 if two workers take too long."""
    play, wanted = UNITS[name]
    ratios, least = list[float](), list[list[float]]()
    for pair in range(pairs + 1):
        seconds = list[float]()
        digests = list[dict[str, str]]()
        for workers in (1, 2):
            with tempfile.TemporaryDirectory(prefix="fedloom-workers-") as folder:
                start = time.perf_counter()
                play(workers, Path(folder) / "out")
                seconds.append(time.perf_counter() - start)
                digests.append(digest_models(Path(folder)))
        if digests[0] != digests[1] or not digests[0]:
            raise SystemExit(
                f"two workers give other models than one: {digests[0].keys() ^ digests[1].keys() or 'bytes'}"
            )
        if pair:  # the first pair includes imports and compilation
            ratios.append(seconds[1] / seconds[0])
            least.append(seconds)
            print(f"pair {pair}: {seconds[0]:.2f} s, {seconds[1]:.2f} s, ratio {ratios[-1]:.3f}", flush=True)
    best = min(two for _, two in least) / min(one for one, _ in least)
    ratio = statistics.median(ratios)
    print(
        f"{name}: median ratio {ratio:.3f} of {pairs} pairs (of the fastest {best:.3f}), wanted {wanted}; same models"
    )
    return int(ratio > wanted)


def digest_models(folder: Path) -> dict[str, str]:
    """Return the digest of every checkpoint in a folder, by path. Checkpoints contain no times."""
    files = sorted(path for path in folder.rglob("*.safetensors") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> int:
    """Print the comparison, and return 1 if two workers are too slow on an idle machine or their results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="W2", choices=[*WORKLOADS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="rounds per block")
    parser.add_argument("--patience", type=float, default=0, help="maximum wait for an idle machine, in seconds")
    parser.add_argument("--units", choices=[*UNITS], help="compute runs or cells in parallel instead")
    parser.add_argument("--pairs", type=int, default=7, help="with --units: number of counted pairs")
    given = parser.parse_args()
    if given.units:
        return measure_units(given.units, given.pairs)
    fed = WORKLOADS[given.workload].federation()
    with join_ranks() as ranks:
        several = 1 if ranks.size > 1 else given.workers
        count = max(ranks.size, several)
        found: dict[int, list[Block]] = {1: [], count: []}
        same = True
        for _ in range(given.blocks):
            wait_for_quiet(given.patience if ranks.size == 1 else 0)
            alone, model = (
                run_block(fed, given.workload, given.rounds, 1, SINGLE_RANK) if ranks.rank == 0 else (None, None)
            )
            ranks.combine_flags()
            together, other = run_block(fed, given.workload, given.rounds, several, ranks)
            if alone is not None and model is not None:
                found[1].append(alone)
                found[count].append(together)
                same &= torch.equal(model, other)
        return report(given.workload, found, same) if ranks.rank == 0 else 0


def report(name: str, found: dict[int, list[Block]], same: bool) -> int:
    """Print the speeds and their ratio, and return 1 if the results differ or two workers are too slow."""
    one, several = found.values()
    quiet = [k for k in range(len(one)) if max(one[k].others, several[k].others) <= MAX_FOREIGN_CORES]
    used = quiet or range(len(one))
    print(f"{name} {WORKLOADS[name].title}; FedAvg; {len(one)} blocks, {len(quiet)} quiet")
    for workers, blocks in found.items():
        seconds = statistics.median(blocks[k].seconds for k in used)
        print(f"{workers} workers {1 / seconds:8.2f} rounds/s {seconds:8.4f} s/round")
    ratio = statistics.median(one[k].seconds / several[k].seconds for k in used)
    best = min(b.seconds for b in one) / min(b.seconds for b in several)
    mark = "" if quiet else "  disturbed"
    print(f"ratio {ratio:.2f} (of the fastest blocks {best:.2f}), wanted {MIN_SPEEDUP}; same bits: {same}{mark}")
    return int(not same or bool(quiet and ratio < MIN_SPEEDUP))


if __name__ == "__main__":
    sys.exit(main())
