"""Small runs of every command that writes: what they do, what they leave, and where their disk is."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from flwr.app import Error, Message

from fedloom.errors import Stop
from fedloom.lab.experiment import Plan, parse
from fedloom.storage import disk
from fedloom_sites.deploy.server import bounded, presence, transport
from fedloom_sites.deploy.site.client import Client
from fedloom_studies.reproduce import reproduce
from fedloom_studies.reproduce.recipe import make_recipe
from tests.deploy.grid import Clock, Delay, FakeGrid
from tests.deploy.scene import FIRST, Scene, scene
from tests.deploy.sessions import secured
from tests.faults.disks import Faulty, PowerCut
from tests.tune.searches import contents as contents_of_search
from tests.tune.searches import tuning

RUN: dict[str, Any] = {
    "rounds": 2,
    "seeds": [0],
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 12},
    "model": {"kind": "softmax"},
    "local": {"steps": 1},
    "engine": {"workers": 1, "checkpoint_every": 1e-9},
    "method": [{"algorithm": "ditto"}],
}
SEARCH = """
rounds = 1
[data]
source = "digits"
[partition]
kind = "iid"
clients = 3
max_train_per_client = 12
[model]
kind = "softmax"
[local]
steps = 1
[tune]
trials = 2
[tune.space.all]
"local.lr" = [0.05, 0.1]
[[method]]
algorithm = "fedavg"
"""
RECIPE: dict[str, Any] = {
    **{key: value for key, value in RUN.items() if key not in ("engine", "method")},
    "client_weights": "uniform",
    "method": [{"algorithm": "fedavg"}],
    "paper": {
        "title": "A test", "protocol": "none", "order": 1, "columns": {"a": "fedavg: global"}, "cells": {},
        "claims": [],
    },
    "variant": {"few": {"local": {"lr": 0.1}}},
    "scale": {"laptop": {}, "full": {}},
}  # fmt: skip
SITES: dict[str, Any] = {
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 12}, "rounds": 2, "evaluate": {"every": 2},
    "local": {"steps": 1},
}  # fmt: skip


class Command(NamedTuple):
    """A command as a campaign plays it.

    Attributes:
        folder: whose disk fails.
        act: what the command does. It raises a `FedloomError`, or returns a sentence, if it cannot finish.
        found: what it has left, for comparison, by name.
        excused: what may be missing or old, since the command's own log says that it is.
    """

    folder: Path
    act: Callable[[], str | None]
    found: Callable[[], dict[str, Any]]
    excused: Callable[[], set[str]] = set


def files(out: Path) -> dict[str, bytes]:
    """Every file but those with times in them, checkpoints, and the lock."""
    paths = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    timed = ("timings.parquet", ".lock", "summary.json", "report.html")
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if Path(name).name not in timed and "checkpoints" not in Path(name).parts
    }


def run_command(folder: Path) -> Command:
    out = folder / "out"

    def act() -> None:
        Plan(parse(RUN, "small"), out).run(page=False)

    return Command(folder, act, lambda: files(out))


def tune_command(folder: Path) -> Command:
    out = folder / "out"

    def act() -> None:
        tuning(SEARCH, out).run()

    return Command(folder, act, lambda: contents_of_search(out))


def reproduce_command(folder: Path) -> Command:
    out = folder / "out"

    def act() -> None:
        reproduce(make_recipe("small", RECIPE), "full", out, results=out / "results", seeds=[0])

    def found() -> Any:
        """Its run directory, and the lines of its record, without the times in them."""
        lines = [json.loads(line) for line in (out / "results" / "papers.jsonl").read_text().splitlines()]
        kept = {name: data for name, data in files(out).items() if "report" not in name and name != "spent.json"}
        return {**kept, "results/papers.jsonl": [(line["protocol"], line["says"]) for line in lines]}

    return Command(folder, act, found)


def serve_with(here: Scene, clients: dict[int, Callable[[Message], Message]], delay: Delay | None = None) -> str | None:
    """Run the server in time that passes only where it sleeps."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (bounded, transport, presence):
            patch.setattr(module, "time", clock)
        stop = here.serve(FakeGrid(clients, None, clock, delay))
    return None if stop is Stop.DONE else str(here.summary().get("detail") or stop)


def found_at(here: Scene) -> dict[str, Any]:
    """The model, the sites' own models, and the scores, of each site and of all."""
    found: dict[str, Any] = {"model": (here.server.results / "global.safetensors").read_bytes()}
    for site in here.sites:
        path = site.folder / "model.safetensors"
        found |= {f"own model of {site.site}": path.read_bytes()} if path.exists() else {}
    for row in pq.read_table(here.server.results / "metrics.parquet").to_pylist():
        whose = "all" if row["client"] is None or row["client"] < 0 else here.sites[row["client"]].site
        found.setdefault(f"scores of {whose}", []).append(row)
    return found


def unscored(here: Scene) -> set[str]:
    """What is missing of sites whose last scores did not arrive, as the server's log says.

    The newest model of such a site is missing as well if its disk was still full.
    """
    last: dict[str, Any] = {"round": SITES["rounds"]}
    refused = {line["client"] for line in here.audit("rejected", kind="score", **last)}
    named = refused | {line["client"] for line in here.audit("missed", **last)}
    missing = named - {line["client"] for line in here.audit("accepted", kind="score", **last)}
    names = {f"scores of {here.sites[c].site}" for c in missing} | ({"scores of all"} if missing else set())
    return names | {f"own model of {here.sites[c].site}" for c in missing & refused}


def make_scene(folder: Path, masked: bool) -> Scene:
    """Three sites, which the quorum needs all."""
    return secured(folder, "ditto", **SITES) if masked else scene(folder, "ditto", **SITES)


def server_command(folder: Path, *, masked: bool = False) -> Command:
    here = make_scene(folder, masked)
    side = here.folder / "server"
    here = here._replace(
        server=here.server.with_(checkpoints=side / "checkpoints", audit=side / "audit.jsonl", results=side / "results")
    )

    def act() -> str | None:
        return serve_with(here, {FIRST + c.site.client: c.answer for c in here.clients()})

    return Command(side, act, lambda: found_at(here), lambda: set() if masked else unscored(here))


def site_command(folder: Path, *, masked: bool = False) -> Command:
    """The disk of one site fails. A site whose process ends is started again, and its answer is lost."""
    here = make_scene(folder, masked)
    first = here.sites[0]

    def act() -> str | None:
        clients = {c.site.client: c for c in here.clients()}

        def answer(message: Message) -> Message:
            try:
                return clients[0].answer(message)
            except PowerCut:
                assert isinstance(disk.hook, Faulty)
                disk.hook.start_again()
                clients[0] = Client(first)
                return Message(Error(0, "the process is gone"), reply_to=message)

        nodes = {FIRST + c: client.answer for c, client in clients.items()} | {FIRST: answer}
        return serve_with(here, nodes)

    return Command(first.state, act, lambda: found_at(here), lambda: set() if masked else unscored(here))


COMMANDS: dict[str, Callable[[Path], Command]] = {
    "run": run_command,
    "tune": tune_command,
    "reproduce": reproduce_command,
    "server": server_command,
    "site": site_command,
    "server, secure sums": partial(server_command, masked=True),
    "site, secure sums": partial(site_command, masked=True),
}
"""Every command, in a folder of its own."""
