"""Seconds and bytes of a round when the ranks are on two machines with a slow link between them.

    python benchmarks/network.py                          # as root; 1 Gb/s, 50 ms there and back
    python benchmarks/network.py --rate 100 --trip 10 --method fedavg --workload W1

The machines are two network namespaces of this one. The link is a pair of TUN devices and a process between them that
holds every packet until its bits would have arrived: it needs no `netem` in the kernel, and counts the bytes. Packets
have up to 64 KiB, so that Python keeps up. All ranks share the cores of this machine: with fewer cores than ranks,
seconds contain what they take from each other.

A row per method and place of the ranks: median seconds of a round without the first, quartiles, the bytes that crossed
the link in a round, both directions together, and the seconds that `fedloom bench` calculates from one process (ranks
beyond the cores of this machine share them). A row during which other processes used more than 0.1 core ends with
`disturbed`; so does the calculation if its constants were measured then.
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
PLACES = ((1,), (2,), (1, 1), (4,), (2, 2))
"""Ranks of each machine."""


def tun(name: str) -> int:
    """A file that gives and takes the packets of a new device."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, 0x400454CA, struct.pack("16sH22s", name.encode(), 0x0001 | 0x1000, b""))  # TUNSETIFF: TUN, NO_PI
    return file


def relay(ends: tuple[int, int], rate: float, delay: float, counts: mmap.mmap) -> None:
    """Carry packets from each end to the other: `rate` bytes a second in each direction, `delay` seconds on the way."""
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
def link(rate: float, delay: float, counts: Path) -> Iterator[None]:
    """Two machines and what connects them, until the block ends."""
    counts.write_bytes(bytes(16))
    with counts.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 16)
    ends = (tun("fedloom0"), tun("fedloom1"))
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
            relay(ends, rate, delay, shared)
        try:
            yield
        finally:
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)
    finally:
        for machine in MACHINES:
            subprocess.run(["ip", "netns", "del", machine], check=False)


def measure(method: str, workload: str, rounds: int, place: tuple[int, ...], counts: Path) -> dict[str, list[float]]:
    """What rank 0 found, the ranks placed on one machine or two."""
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
                said = process.communicate(timeout=900)[1]
                if process.returncode:
                    sys.exit(said)
        finally:
            for process in started:
                process.terminate()
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def setting(method: str, workload: str, rounds: int) -> Setting:
    """A run without evaluation: the clients have no validation parts."""
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


def calculated(costs: MethodCosts, workload: str, place: tuple[int, ...], link: MachineLink) -> float:
    """Seconds of a round on this machine."""
    from workloads import WORKLOADS

    from fedloom.processes.costs import ClusterShape

    parts = costs.round(WORKLOADS[workload].clients, costs.cohort, ClusterShape(place[0], len(place), link))
    work = parts.work * costs.slowed(sum(place)) / costs.slowed(place[0])
    results = parts.results * max(1.0, sum(place) / costs.cores)
    return parts._replace(work=work, results=results).seconds


def rank(method: str, workload: str, rounds: int, out: Path) -> None:
    """One rank: when rounds ended, and what the link had carried then."""
    from workloads import WORKLOADS

    from fedloom.engine.simulate import simulate
    from fedloom.processes.distributed import join_ranks

    carried = []

    def look(_state: object) -> None:
        carried.append(struct.unpack("QQ", Path(os.environ["COUNTS"]).read_bytes()))

    with join_ranks() as ranks:
        result = simulate(
            setting(method, workload, rounds), WORKLOADS[workload].federation(), callbacks=[look], ranks=ranks
        )
        if ranks.rank == 0:
            out.write_text(json.dumps({"seconds": list(result.seconds), "carried": carried}))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000, help="megabits per second")
    parser.add_argument("--trip", type=float, default=50, help="milliseconds there and back")
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--workload", default="W2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        rank(given.rank_of, given.workload, given.rounds, given.out)
        return 0
    from workloads import WORKLOADS

    from fedloom.lab.experiment.measure.bench import costs_of
    from fedloom.processes.costs import MachineLink
    from fedloom.processes.machine_load import MAX_FOREIGN_CORES, watch_others

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts")
        connection = MachineLink(given.rate * 1e6 / 8, given.trip / 1000)
        for method in given.method or METHODS:
            with watch_others() as before:
                costs = costs_of(setting(method, given.workload, 1), WORKLOADS[given.workload].federation(), 10)
            for place in PLACES:
                with (
                    watch_others() as others,
                    link(connection.rate, connection.trip / 2, counts),
                ):  # its process is not one
                    found = measure(method, given.workload, given.rounds, place, counts)
                seconds = found["seconds"][1:]
                both = [sum(c) for c in found["carried"]]
                crossed = statistics.median(b - a for a, b in pairwise(both)) / 1e6
                low, middle, high = statistics.quantiles(seconds, n=4)
                where = " + ".join(map(str, place))
                model = calculated(costs, given.workload, place, connection)
                marks = ["  disturbed" if w.cores > MAX_FOREIGN_CORES else "" for w in (before, others)]
                row = f"{method:9} {where:6} {middle:7.3f} s ({low:.3f} to {high:.3f}) {crossed:8.3f} MB{marks[1]}"
                print(f"{row} {model:7.3f} s calculated{marks[0]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
