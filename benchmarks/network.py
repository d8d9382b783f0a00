"""Measure the time and the bytes of a round if the ranks are on two machines that are connected by a slow link.

    python benchmarks/network.py                          # as root; 1 Gb/s, round-trip time 50 ms
    python benchmarks/network.py --rate 100 --trip 10 --method fedavg --workload W1

Two network namespaces represent the machines. The link is a pair of TUN devices and a process between them. This
process delays every packet until its bits would have arrived, and counts the bytes. The kernel therefore does not need
`netem`. Packets have up to 64 KiB, so that the Python process is fast enough. All ranks share the cores of this
machine. If there are fewer cores than ranks, the ranks slow each other down.

The output has a row for each method and each placement of the ranks. It shows the median time of a round without the
first round, the quartiles, the bytes that crossed the link in both directions in a round, and the time that
`fedloom bench` would calculate from one process, for ranks that share the cores of this machine. A row ends with
`disturbed` if other processes used more than 0.1 core during its measurement. The calculated time has the same mark if
its constants were measured under such conditions.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import mmap
import os
import selectors
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedloom.engine.setting import Setting
    from fedloom.processes.costs import MachineLink, MethodCosts

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

MTU = 65_000
MACHINES = (f"fedloom-{os.getpid()}a", f"fedloom-{os.getpid()}b")
ADDRESS = "10.77.0.{}"
METHODS = ("fedavg", "scaffold", "flame", "fedacs")
PLACEMENTS = ((1,), (2,), (1, 1), (4,), (2, 2))
"""Number of ranks on each machine."""


def open_tun_device(name: str) -> int:
    """Create a TUN device, and return the file from which its packets are read and to which they are written."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, 0x400454CA, struct.pack("16sH22s", name.encode(), 0x0001 | 0x1000, b""))  # TUNSETIFF: TUN, NO_PI
    return file


def forward_packets(ends: tuple[int, int], rate: float, delay: float, counts: mmap.mmap) -> None:
    """Forward packets between both ends, with `rate` bytes per second in each direction and a delay in seconds."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    waiting: tuple[deque[tuple[float, bytes]], deque[tuple[float, bytes]]] = (deque(), deque())
    free, carried = [0.0, 0.0], [0, 0]
    with selectors.DefaultSelector() as ready:
        for k, end in enumerate(ends):
            ready.register(end, selectors.EVENT_READ, k)
        while True:
            now = time.monotonic()
            due = min((queue[0][0] for queue in waiting if queue), default=now + 1)
            for key, _ in ready.select(max(0.0, due - now)):
                k = key.data
                packet = os.read(ends[k], MTU + 100)
                free[k] = max(time.monotonic(), free[k]) + len(packet) / rate
                waiting[k].append((free[k] + delay, packet))
            now = time.monotonic()
            for k, queue in enumerate(waiting):
                while queue and queue[0][0] <= now:
                    packet = queue.popleft()[1]
                    os.write(ends[1 - k], packet)
                    carried[k] += len(packet)
                    struct.pack_into("Q", counts, 8 * k, carried[k])


@contextmanager
def connect_machines(rate: float, delay: float, counts: Path) -> Iterator[None]:
    """Create two machines and the link between them, and remove them at the end of the block."""
    counts.write_bytes(bytes(16))
    with counts.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 16)
    ends = (open_tun_device("fedloom0"), open_tun_device("fedloom1"))
    try:
        for k, machine in enumerate(MACHINES):
            for command in (
                f"ip netns add {machine}",
                f"ip link set fedloom{k} netns {machine}",
                f"ip -n {machine} addr add {ADDRESS.format(k + 1)}/24 dev fedloom{k}",
                f"ip -n {machine} link set fedloom{k} mtu {MTU} txqueuelen 10000 up",
                f"ip -n {machine} link set lo up",
            ):
                subprocess.run(command.split(), check=True)
        carrier = os.fork()
        if carrier == 0:
            forward_packets(ends, rate, delay, shared)
        try:
            yield
        finally:
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)
    finally:
        for machine in MACHINES:
            subprocess.run(["ip", "netns", "del", machine], check=False)


def measure(method: str, workload: str, rounds: int, place: tuple[int, ...], counts: Path) -> dict[str, list[float]]:
    """Run a method with ranks on one or two machines, and return the measurements of rank 0."""
    started = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        for k, ranks in enumerate(place):
            torchrun = f"-m torch.distributed.run --nnodes {len(place)} --node-rank {k} --nproc-per-node {ranks}"
            meet = f"--master-addr {ADDRESS.format(1)} --master-port 29511"
            program = f"--rank-of {method} --workload {workload} --rounds {rounds} --out {out}"
            inside = ["ip", "netns", "exec", MACHINES[k], sys.executable]
            command = [*inside, *torchrun.split(), *meet.split(), __file__, *program.split()]
            own = {"GLOO_SOCKET_IFNAME": f"fedloom{k}", "COUNTS": str(counts)}
            started.append(subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True))
        try:
            for process in started:
                errors = process.communicate(timeout=900)[1]
                if process.returncode:
                    sys.exit(errors)
        finally:
            for process in started:
                process.terminate()
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def make_setting(method: str, workload: str, rounds: int) -> Setting:
    """Return the setting of a run in which nothing is evaluated, because the clients have no validation parts."""
    from workloads import WORKLOADS

    from fedloom.algorithms import REGISTRY
    from fedloom.choose import Uniform
    from fedloom.engine.setting import Evaluate, Setting
    from fedloom.local import LocalSGD

    work = WORKLOADS[workload]
    return Setting(
        algorithm=REGISTRY[method](),
        model=work.model,
        rounds=rounds + 1,
        local=LocalSGD(lr=0.01, batch_size=work.batch),
        sampler=Uniform(fraction=0.2),
        evaluate=Evaluate(every=rounds + 1, parts=("validation",)),
    )


def calculate_seconds(costs: MethodCosts, workload: str, place: tuple[int, ...], link: MachineLink) -> float:
    """Return the calculated time of a round in seconds, if all ranks share the cores of this machine."""
    from workloads import WORKLOADS

    from fedloom.processes.costs import ClusterShape

    parts = costs.round(WORKLOADS[workload].clients, costs.cohort, ClusterShape(place[0], len(place), link))
    work = parts.work * costs.slowed(sum(place)) / costs.slowed(place[0])
    results = parts.results * max(1.0, sum(place) / costs.cores)
    return parts._replace(work=work, results=results).seconds


def run_rank(method: str, workload: str, rounds: int, out: Path) -> None:
    """Run one rank. Rank 0 writes the time of every round, and the bytes on the link by the end of the round."""
    from workloads import WORKLOADS

    from fedloom.engine.simulate import simulate
    from fedloom.processes.distributed import join_ranks

    carried = []

    def record_bytes(_state: object) -> None:
        carried.append(struct.unpack("QQ", Path(os.environ["COUNTS"]).read_bytes()))

    with join_ranks() as ranks:
        result = simulate(
            make_setting(method, workload, rounds),
            WORKLOADS[workload].federation(),
            callbacks=[record_bytes],
            ranks=ranks,
        )
        if ranks.rank == 0:
            out.write_text(json.dumps({"seconds": list(result.seconds), "carried": carried}))


def main() -> int:
    """Print the table, or run one rank if the command line says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000, help="megabits per second")
    parser.add_argument("--trip", type=float, default=50, help="round-trip time in milliseconds")
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--workload", default="W2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        run_rank(given.rank_of, given.workload, given.rounds, given.out)
        return 0
    from workloads import WORKLOADS

    from fedloom.lab.experiment.measure.bench import measure_costs
    from fedloom.processes.costs import MachineLink
    from fedloom.processes.machine_load import MAX_FOREIGN_CORES, watch_others

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts")
        connection = MachineLink(given.rate * 1e6 / 8, given.trip / 1000)
        for method in given.method or METHODS:
            with watch_others() as before:
                costs = measure_costs(
                    make_setting(method, given.workload, 1), WORKLOADS[given.workload].federation(), 10
                )
            for place in PLACEMENTS:
                with (
                    watch_others() as others,
                    connect_machines(connection.bytes_per_second, connection.seconds_per_trip / 2, counts),
                ):  # the process of the link does not count as another process
                    found = measure(method, given.workload, given.rounds, place, counts)
                seconds = found["seconds"][1:]
                both = [sum(c) for c in found["carried"]]
                crossed = statistics.median(b - a for a, b in pairwise(both)) / 1e6
                low, middle, high = statistics.quantiles(seconds, n=4)
                where = " + ".join(map(str, place))
                model = calculate_seconds(costs, given.workload, place, connection)
                marks = ["  disturbed" if w.cores > MAX_FOREIGN_CORES else "" for w in (before, others)]
                row = f"{method:9} {where:6} {middle:7.3f} s ({low:.3f} to {high:.3f}) {crossed:8.3f} MB{marks[1]}"
                print(f"{row} {model:7.3f} s calculated{marks[0]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
