"""One plain and one masked deployment with real processes, over TLS, on every run of the tests.

The tests that are marked `deploy`, here and in other files, need minutes, and `make test-deploy` runs them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedloom.engine.simulate import simulate
from fedloom.errors import Stop
from fedloom.lab.experiment import read
from fedloom_sites.deploy.audit import SENT_FILE, read_entries, verify_log
from fedloom_sites.deploy.ops.amend import rotate
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment, run_all
from fedloom_sites.deploy.ops.members import accept_agreement
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses, ProcessError
from fedloom_sites.deploy.ops.status import read_status
from fedloom_sites.deploy.secure import integers
from fedloom_sites.deploy.server.run import finished_reason, serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site, settings_text
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.models import find_owned_models
from tests.commands import call
from tests.deploy.grid import FakeGrid, outside_flower
from tests.deploy.scene import FIRST
from tests.deploy.test_network import until

KINDS = {False: {"train"}, True: {"keys", "shares", "masked", "count", "unmask"}}
"""Kinds of messages of a round, plain and masked."""


@pytest.mark.timeout(1800)  # a minute on an idle machine
@pytest.mark.parametrize("masked", [False, True])
def test_a_deployment_gives_what_a_simulation_gives(masked: bool, experiment: Any, tmp_path: Path) -> None:
    tables = {"evaluate": {"every": 9}, "engine": {"dtype": "float64", "gradient_engine": "loop"}}
    folder = tmp_path / "try"
    sites = 3 if masked else 2  # fewest
    document = experiment(rounds=1, clients=sites, **tables)
    write_directory(plan_deployment(document, sites, secure_aggregation=masked), folder, Location())
    said = list[str]()
    here = run_all(folder, said.append)
    assert finished_reason(here.server) is Stop.DONE, said
    one = read(here.server.experiment)
    known = simulate(one.methods[0].setting, one.partition(one.source.load(), one.head.seeds[0]))
    model = load_file(here.server.results / "global.safetensors")["rows"]
    torch.testing.assert_close(model, known.models.rows("global"), rtol=0, atol=1e-8)
    assert verify_log(here.server.audit).lines == len(read_entries(here.server.audit))
    for site in here.sites.values():
        [log] = site.state.glob(f"*/{SENT_FILE}")
        assert verify_log(log).lines
        assert KINDS[masked] <= {line["kind"] for line in read_entries(log)}
        assert not (KINDS[not masked] - KINDS[masked]) & {line["kind"] for line in read_entries(log)}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # three minutes on an idle machine
@pytest.mark.parametrize("masked", [False, True])
def test_a_stop_new_keys_and_a_new_certificate_between_two_runs(masked: bool, experiment: Any, tmp_path: Path) -> None:
    """The command stops real processes, keys and certificate change, and the run goes on to the same model."""
    tables = {"evaluate": {"every": 9}, "engine": {"dtype": "float64", "gradient_engine": "loop"}}
    folder = tmp_path / "try"
    write_directory(
        plan_deployment(experiment(rounds=3, **tables), 3, own_data=True, secure_aggregation=masked), folder, Location()
    )
    said = list[str]()

    def show(line: str) -> None:
        said.append(line)
        if read_status(read_server(folder / "server" / "server.toml"))["rounds"] >= 1:
            call("deploy", "stop", folder)

    with pytest.raises(ProcessError):
        run_all(folder, show)
    server = read_server(folder / "server" / "server.toml")
    stopped = read_status(server)
    assert (stopped["state"], stopped["rounds"] < 3) == ("stopped", True), said
    call("deploy", "stop", folder, "--undo")
    change = rotate(folder, "site-1")
    shutil.copytree(change.folder / "server", folder / "server", dirs_exist_ok=True)
    for name in ("site-0", "site-1", "site-2"):
        accept_agreement(
            folder / "sites" / name, change.folder / ("site" if name == "site-1" else "approval"), change.digest
        )
    before = server.certificate.read_bytes()
    call("deploy", "renew", folder)
    assert server.certificate.read_bytes() != before
    here = run_all(folder, said.append)
    assert finished_reason(here.server) is Stop.DONE, said
    log = [x for x in read_entries(here.server.audit) if x["what"] == "accepted" and x["kind"] in ("train", "masked")]
    assert {x["site"]: [y["round"] for y in log if y["site"] == x["site"]] for x in log} == {
        name: [1, 2, 3] for name in ("site-0", "site-1", "site-2")
    }


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(1800)  # three minutes on an idle machine
def test_a_masked_run_without_a_site_that_was_killed(experiment: Any, tmp_path: Path) -> None:
    """A site is killed after the first round; the others end the run, with the model of a run without masks."""
    engine = {"dtype": "float64", "gradient_engine": "loop"}
    made = experiment("flame", rounds=2, clients=4, evaluate={"every": 2}, engine=engine)
    folder = tmp_path / "try"
    write_directory(plan_deployment(made, 4, secure_aggregation=True), folder, Location(quorum=3))
    file = folder / "server" / "server.toml"
    file.write_text(settings_text(read_server(file).with_(deadline=600.0, ttl=1200.0, patience=120.0)))
    said, killed = list[str](), list[int]()
    with ManagedProcesses() as processes:
        here = LoopbackDeployment(folder, processes)
        here.start_server()
        nodes = here.register_all()
        sites = {name: here.start_site(name) for name in here.sites}
        for node in nodes.values():
            until(here, node, "online")

        def tell(line: str) -> None:
            said.append(line)
            if "round 1/2" in line and not killed:
                killed.append(sites["site-3"].reap())

        here.run(tell)
    assert any("round 1/2: 4 of 4 accepted" in line for line in said), said
    assert any("round 2/2: 3 of 4 accepted" in line for line in said), said
    kinds = {x["kind"] for x in read_entries(here.server.audit) if x["what"] == "accepted"}
    assert kinds == {"hello", "keys", "shares", "masked", "count", "tally", "unmask"}
    [row] = [row for row in read_status(here.server)["means"] if row["model"] == "personal"]
    assert (row["round"], row["sites"]) == (2, 3)

    plain = tmp_path / "plain"
    write_directory(plan_deployment(made, 4), plain, Location(quorum=3))
    outside_flower()
    clients = [Client(read_site(plain / "sites" / f"site-{k}" / "site.toml")) for k in range(4)]

    def gone(node: int, message: Any, reply: Any) -> Any:
        head = message.content["head"]
        return None if node == FIRST + 3 and (head["kind"], head["round"]) == ("train", 2) else reply

    server = read_server(plain / "server" / "server.toml").with_(deadline=0.2, ttl=0.4, patience=0.4)
    grid = FakeGrid({FIRST + k: one.answer for k, one in enumerate(clients)}, gone)
    assert serve_run(grid, server, lambda _: None) is Stop.DONE
    close = {"rtol": 0, "atol": 1e4 * 2.0**-integers.RESOLUTION_BITS}
    theirs, mine = (load_file(s.results / "global.safetensors")["rows"] for s in (server, here.server))
    torch.testing.assert_close(mine, theirs, **close)
    for a, b in zip(find_owned_models(folder)[:3], find_owned_models(plain), strict=False):
        torch.testing.assert_close(load_file(a.model.path)["rows"], load_file(b.model.path)["rows"], **close)


@pytest.mark.slow
@pytest.mark.deploy
def test_interrupted_by_a_signal_nothing_is_left(experiment: Any, tmp_path: Path) -> None:
    """The launcher gets SIGTERM while it trains: exit code 130, and no process of its group is left."""
    folder = tmp_path / "try"
    write_directory(plan_deployment(experiment(rounds=50, evaluate={"every": 50}), 3), folder, Location())
    words = [sys.executable, "-m", "fedloom.lab.cli", "deploy", "local", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        for line in launcher.stdout:
            if line.startswith("round"):
                launcher.terminate()
                break
        rest = launcher.stdout.read()
        assert launcher.wait(300) == 130, rest
    assert "interrupted. Every process has ended. Run" in rest
    listing = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    left = [line for line in listing.splitlines() if str(folder) in line and not line.startswith("Z")]
    assert left == []
