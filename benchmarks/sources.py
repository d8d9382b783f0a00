"""Measure the memory and the time for reading every data source, and the time for computing every partition.

    python benchmarks/sources.py --data-dir ~/data

Every source is read in separate processes. The column `peak` is the largest growth of the process while it reads the
data, and `peak / raw` is its ratio to the size of the features. A second process only unpacks the same files and
discards the bytes. Its growth is the memory that the decompressor needs (xz keeps as many unpacked bytes as the
dictionary of the file is long). Times are medians of processor times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
import torch
from PIL import Image

from fedloom.data import PARTITIONS, Dataset, Partition, load
from fedloom.data.sources.archive import iterate_entries

FILES = {  # path of each source's files in the data folder
    "mnist": "mnist",
    "fashion-mnist": "fashion-mnist",
    "cifar-10": "cifar-10-batches-bin",
    "cifar-100": "cifar-100-binary",
    "medical-mnist": "medical-mnist",
    "femnist": "femnist",
    "adult": "tabular/adult.tar.xz",
}
TEST_FILES = ("made.npz", "made.csv", "made.parquet")
SAMPLES, CLIENTS = 60_000, 1_000
SPLITS: dict[str, dict[str, object]] = {
    "iid": {},
    "shards": {},
    "shards, mcmahan": {"variant": "mcmahan"},
    "shards, flame": {"variant": "flame"},
    "dirichlet": {"min_size": 1},
    "dirichlet, balanced": {"balanced": True},
    "dirichlet, client": {"by": "client", "beta": 0.1},
    "dirichlet, prior": {"by": "prior"},
    "dirichlet, overlap": {"overlap": True},
    "quantity-skew": {"alpha": 2.0},
    "quantity, overlap": {"beta": 2.0, "overlap": True},
    "feature-noise": {},
    "mixed": {"alpha": 2.0},
    "label-swap": {},
    "femnist-fedprox": {"mean": 3.0},
    "natural": {"clients": CLIENTS},
    "by-column": {"column": "writer", "clients": CLIENTS},
    "clusters": {"classes": (4, 6), "sizes": (400, 600)},
    "iid, keep": {"max_train_per_client": 20},
    "iid, ratio": {"test_from": "ratio"},
    "iid, folds": {"folds": 5},
}


def memory_mib(key: str) -> float:
    """Return the memory of this process in MiB: VmRSS is the current value, VmHWM the peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def measure_growth(work: Callable[[], object]) -> tuple[float, object]:
    """Call a function, and return the peak growth of this process in MiB, and the result of the function."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mib("VmHWM")
    made = work()
    return memory_mib("VmHWM") - before, made


def unpack(place: Path) -> None:
    """Unpack every file block by block, and discard the bytes."""
    for entry in iterate_entries(place):
        while entry.stream.read(2**18):
            pass


def measure_here(what: str, name: str, root: Path) -> None:
    """Print the peak growth, the size of the features and the time. The function must run in a new process."""
    Image.init()
    import pyarrow.parquet  # noqa: F401  (imports are not counted)

    load("digits")
    place = root / FILES.get(name, name)
    if what == "unpack":
        print(measure_growth(lambda: unpack(place))[0])
        return
    start = time.process_time()
    grown, data = measure_growth(lambda: load(place) if name in TEST_FILES else load(name, root))
    seconds = time.process_time() - start
    assert isinstance(data, Dataset)
    print(grown, data.x.untyped_storage().nbytes() / 2**20, seconds)


def measure_in_new_process(what: str, name: str, root: Path) -> list[float]:
    """Run the measurement in a new process, and return the numbers that it prints."""
    command = [sys.executable, __file__, "--child", what, name, "--data-dir", str(root)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(value) for value in done.stdout.split()]


def write_test_files(folder: Path) -> None:
    """Write files with random numbers: an archive of arrays, a CSV table and a Parquet table."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400_000, 20)), rng.integers(0, 10, 400_000)
    np.savez_compressed(folder / TEST_FILES[0], x=x, y=y)
    columns = {f"c{k}": x[:, k] for k in range(20)} | {"y": y}
    parquet.write_table(pa.table(columns), folder / TEST_FILES[2])
    header = ",".join(columns)
    np.savetxt(folder / TEST_FILES[1], np.column_stack([x, y]), "%.6f," * 20 + "%d", header=header, comments="")


def print_sources(root: Path, repeats: int) -> None:
    """Print a table with one row for each source."""
    print("| source | raw MiB | peak MiB | of it unpacking | peak / raw | without unpacking | seconds |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_test_files(Path(folder))
        for name in (*FILES, *TEST_FILES):
            place = Path(folder) if name in TEST_FILES else root
            runs = [measure_in_new_process("load", name, place) for _ in range(repeats)]
            grown, raw, seconds = (statistics.median(column) for column in zip(*runs, strict=True))
            packed = (
                0.0 if name.endswith(("npz", "csv", "parquet")) else measure_in_new_process("unpack", name, place)[0]
            )
            rest = (grown - packed) / raw
            print(
                f"| {name} | {raw:.1f} | {grown:.1f} | {packed:.1f} | {grown / raw:.2f} | {rest:.2f} | {seconds:.2f} |",
                flush=True,
            )


def print_partitions(repeats: int) -> None:
    """Print the time of each way to split 60,000 samples and 10,000 official test samples among 1,000 clients."""
    rng = np.random.default_rng(0)
    total = SAMPLES + 10_000
    writer = torch.from_numpy(rng.permutation(np.arange(total) % 3_500))
    data = Dataset(
        "noise",
        torch.zeros(total, 8, dtype=torch.uint8),
        torch.from_numpy(np.arange(total) % 10),
        classes=tuple("0123456789"),
        test=torch.arange(SAMPLES, total),
        columns={"writer": writer},
        levels={"writer": tuple(str(k) for k in range(3_500))},
        users=writer,
        user_names=tuple(str(k) for k in range(3_500)),
    )
    print("\n| partition | seconds |\n|---|---|")
    for name, options in SPLITS.items():
        kind = PARTITIONS[name.partition(",")[0]]
        sized = {} if "clients" not in kind.model_fields or "clients" in options else {"clients": CLIENTS}
        part: Partition = kind(**{**sized, **options})
        times = []
        for seed in range(repeats):
            start = time.process_time()
            part(data, seed)
            times.append(time.process_time() - start)
        print(f"| {name} | {statistics.median(times):.2f} |", flush=True)


def main() -> None:
    """Print the tables, or measure one source if this is a new process."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data-dir", type=Path, default=os.environ.get("FEDLOOM_DATA", "."))
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.child:
        measure_here(*given.child, given.data_dir)
        return
    print_sources(given.data_dir, given.repeats)
    print_partitions(given.repeats)


if __name__ == "__main__":
    main()
