"""Measure what a deployed round costs in addition to Flower, with real processes on this machine.

    python benchmarks/deploy.py [--sites 5] [--rounds 10] [--hidden 1333]

The same SuperNodes run three apps over TLS: an app that does nothing, an app that sends back the bytes of a model, and
FedAvg. For each app, the program prints the time per round (median and fastest), the time from the start of the run to
the end of the first round, and the processor time of all sites up to that point and for each later message. FedAvg
trains a network with one hidden layer on the digits, which has 75 parameters per hidden unit. Wall-clock times are
valid only on an idle machine with one core per site. Processor times are also valid on a busy machine, except for the
cost of shared caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Self

from fedloom.lab.experiment import parse
from fedloom_sites.deploy.ops.commands import OPS_FOLDER, command_words, process_environment
from fedloom_sites.deploy.ops.directory import APP_FOLDER, Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcess, ManagedProcesses, ProcessError
from fedloom_sites.deploy.ops.status import read_entries, read_status

SERVER_APP_CODE = """
import json, time
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    given = json.loads(open(context.run_config["server"]).read())
    while len(list(grid.get_node_ids())) < given["sites"]:
        time.sleep(0.2)
    ends, seconds = [], []
    data = bytes(given["bytes"])
    arrays = ArrayRecord(array_dict={"0": Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)})
    for t in range(given["rounds"]):
        start = time.monotonic()
        more = {"arrays": arrays} if data else {}
        content = lambda: RecordDict({"head": ConfigRecord({"round": t}), **more})
        sent = [Message(content(), dst_node_id=node, message_type="train", ttl=600) for node in grid.get_node_ids()]
        waiting = set(grid.push_messages(sent))
        while waiting:
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(waiting))}
            time.sleep(0.2)
        seconds.append(time.monotonic() - start)
        ends.append(time.time())
    open(given["out"], "w").write(json.dumps({"ends": ends, "seconds": seconds}))
"""
CLIENT_APP_CODE = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    records = {name: value for name, value in message.content.items() if name == "arrays"}
    return Message(RecordDict(records), reply_to=message)
"""


class Cost(NamedTuple):
    """Cost of an app.

    Attributes:
        rounds: time of each round in seconds.
        first: time from the start of the run to the end of the first round, in seconds.
        begin: processor time of all sites up to the end of the first round, in seconds.
        message: processor time per message after the first round, in seconds.
    """

    rounds: Sequence[float]
    first: float
    begin: float
    message: float


class Meter:
    """Context manager that records the processor time of all sites during the block."""

    def __init__(self, sites: Sequence[ManagedProcess]) -> None:
        self._sites, self._ended = sites, threading.Event()
        self._points: list[tuple[float, float]] = []

    def seconds_at(self, when: float) -> float:
        """Return the processor seconds that all sites had used at a wall-clock time."""
        return max((spent for now, spent in self._points if now <= when), default=self._points[0][1])

    def cost(self, start: float, ends: Sequence[float], rounds: Sequence[float]) -> Cost:
        """Return the cost of an app whose rounds ended at the given times."""
        messages = len(self._sites) * max(1, len(ends) - 1)
        after = (self.seconds_at(ends[-1]) - self.seconds_at(ends[0])) / messages
        return Cost(rounds, ends[0] - start, self.seconds_at(ends[0]) - self._points[0][1], after)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._points.append((time.time(), processor_seconds(self._sites)))
            if self._ended.wait(0.25):
                return


def processor_seconds(sites: Sequence[ManagedProcess]) -> float:
    """Return the processor time that all processes of the sites have used so far, including ended processes."""
    groups, ticks = {site.pid for site in sites}, 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15])) if int(fields[2]) in groups else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def run_app(here: LoopbackDeployment, processes: ManagedProcesses, app: Path, file: Path) -> float:
    """Run an app until it ends, and return the wall-clock time at which it was started."""
    start = time.time()
    variables, log = process_environment(here.work / "cli"), here.work / f"{app.parent.name}.log"
    process = processes.start("run", command_words("run", app=app, file=file), variables, log)
    while process.alive():
        time.sleep(0.2)
    if process.reap() != 0 or here.status() != "finished:completed":
        raise ProcessError(f"the run ended as {here.status()}:\n{process.tail()}")
    return start


def measure_idle_app(
    here: LoopbackDeployment,
    processes: ManagedProcesses,
    folder: Path,
    rounds: int,
    sites: Sequence[ManagedProcess],
    size: int,
) -> Cost:
    """Measure an app that does nothing except send ``size`` bytes to each site and back."""
    app = folder / f"nothing-{size}" / APP_FOLDER
    (app / "fedloom_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text((OPS_FOLDER / APP_FOLDER / "pyproject.toml").read_text())
    for name, text in (("__init__", ""), ("server_app", SERVER_APP_CODE), ("client_app", CLIENT_APP_CODE)):
        (app / "fedloom_app" / f"{name}.py").write_text(text)
    config_file, out = folder / f"told-{size}.json", folder / f"out-{size}.json"
    config_file.write_text(json.dumps({"rounds": rounds, "sites": len(sites), "out": str(out), "bytes": size}))
    with Meter(sites) as meter:
        start = run_app(here, processes, app, config_file)
    found = json.loads(out.read_text())
    return meter.cost(start, found["ends"], found["seconds"])


def measure_training(here: LoopbackDeployment, processes: ManagedProcesses, sites: Sequence[ManagedProcess]) -> Cost:
    """Measure the deployed FedAvg run."""
    with Meter(sites) as meter:
        start = run_app(here, processes, here.folder / "server" / APP_FOLDER, here.folder / "server" / "server.toml")
    ends: dict[int, float] = {}
    for line in read_entries(here.server.audit):
        if line["what"] == "accepted" and line["kind"] == "train":
            ends[line["round"]] = datetime.fromisoformat(line["time"]).timestamp()
    assert read_status(here.server)["state"] == "done"
    rounds = json.loads(max(here.server.checkpoints.glob("*.json")).read_text())["body"]["meta"]["seconds"]
    return meter.cost(start, [ends[t] for t in sorted(ends)], rounds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=1333)
    given = parser.parse_args()
    experiment = parse(
        {
            "name": "cost",
            "rounds": given.rounds,
            "data": {"source": "digits"},
            "partition": {"kind": "iid", "clients": given.sites},
            "model": {"kind": "mlp", "hidden": [given.hidden]},
            "local": {"lr": 0.05, "batch_size": 50, "epochs": 1},
            "evaluate": {"every": 1},
            "method": [{"algorithm": "fedavg"}],
        }
    )
    with tempfile.TemporaryDirectory() as name, ManagedProcesses() as processes:
        folder = Path(name)
        write_directory(plan_deployment(experiment), folder / "cost", Location(quorum=given.sites))
        here = LoopbackDeployment(folder / "cost", processes)
        here.start_server()
        here.register_all()
        sites = [here.start_site(site) for site in here.sites]
        size = 4 * (75 * given.hidden + 10)
        idle, echo = (measure_idle_app(here, processes, folder, given.rounds, sites, n) for n in (0, size))
        ours = measure_training(here, processes, sites)
    print(f"{given.sites} sites, {given.rounds} rounds, {75 * given.hidden + 10:,} parameters, {os.cpu_count()} cores")
    print(f"{'app':>8} {'s a round':>10} {'fastest':>8} {'first':>7} {'processor s: begin':>19} {'a message':>10}")
    for what, cost in (("nothing", idle), ("echo", echo), ("fedavg", ours)):
        median, least = statistics.median(cost.rounds), min(cost.rounds)
        print(f"{what:>8} {median:10.2f} {least:8.2f} {cost.first:7.1f} {cost.begin:19.1f} {cost.message:10.2f}")


if __name__ == "__main__":
    main()
