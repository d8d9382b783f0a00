"""Methods over a real server and three real sites on loopback, with TLS and node keys: what a simulation gives."""

import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedloom.engine.simulate import simulate
from fedloom.errors import Stop
from fedloom.lab.experiment import read
from fedloom_sites.deploy.audit import lines_of
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment, run_all
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses
from fedloom_sites.deploy.ops.status import status_of
from fedloom_sites.deploy.secure import integers
from fedloom_sites.deploy.server.run import FINISHED_HINT, serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site, settings_text
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.models import find_owned_models, score_site_model
from tests.deploy.grid import FakeGrid, outside_flower
from tests.deploy.scene import FIRST
from tests.deploy.test_network import until

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

METHODS = ("fedavg", "flame", "fedslr", "fiaelt", "fedacs", "scaffold")
SECRET = "runtime.secret"
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def deployment(experiment, method, folder, rounds=2):
    tables = {"evaluate": {"every": rounds}, "engine": {"dtype": "float64", "gradient_engine": "loop"}}
    made = experiment(
        method,
        rounds=rounds,
        partition={"kind": "dirichlet", "clients": 3, "alpha": 0.5, "max_train_per_client": 60},
        **tables,
    )
    write_directory(plan_deployment(made, 3), folder, Location(quorum=3))
    return folder


@pytest.fixture(scope="module")
def network(experiment, tmp_path_factory):
    """A server and three sites that stay for all tests. A site that is still starting needs its state, which the tests
    replace."""
    folder = deployment(experiment, "fedavg", tmp_path_factory.mktemp("network") / "try")
    with ManagedProcesses() as processes:
        here = LoopbackDeployment(folder, processes)
        here.start_server()
        nodes = here.register_all()
        for name in here.sites:
            here.start_site(name)
        for node in nodes.values():
            until(here, node, "online")
        yield here


def trained(network, experiment, method, folder, rounds=2):
    """An experiment that takes the place of the one before on the same server and sites, with nothing left of that."""
    made = deployment(experiment, method, folder, rounds)
    for side in ("server", *(f"sites/{name}" for name in network.sites)):
        for left in (*(network.folder / side / "state").glob("*"), network.folder / side / "results"):
            if left.name != SECRET:  # a site that is starting reads it
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        for file in ("experiment.toml", "server.toml", "site.toml", "signing-key"):
            if (made / side / file).exists():
                shutil.copy2(made / side / file, network.folder / side / file)
    lines = []
    network.run(lines.append)
    return network.folder, lines


def simulated(folder):
    experiment = read(folder / "server" / "experiment.toml")
    seed = experiment.head.seeds[0]
    fed = experiment.partition(experiment.source.load(), seed)
    return simulate(experiment.methods[0].setting, fed)


@pytest.mark.parametrize("method", METHODS)
def test_a_real_network_gives_what_a_simulation_gives(network, experiment, method, tmp_path):
    folder, lines = trained(network, experiment, method, tmp_path)
    assert any(line.startswith("fedloom: round 2/2: 3 of 3 accepted") for line in lines), lines
    expected = simulated(folder)
    kinds = expected.models.kinds()
    kind = "personal" if "personal" in kinds else "global"
    rows = expected.models.rows(kind)
    found = find_owned_models(folder)
    assert [(one.site.client, one.model.kind, one.model.round) for one in found] == [(k, kind, 2) for k in range(3)]
    for k, one in enumerate(found):
        row = load_file(one.model.path)["rows"][0]
        torch.testing.assert_close(row, rows[k] if kind == "personal" else rows, **CLOSE)
    known = {
        (r["round"], r["client"], r["model"], r["part"], r["metric"]): r["value"] for r in expected.table().to_pylist()
    }
    same = 0
    for r in pq.read_table(network.server.results / "metrics.parquet").to_pylist():
        key = (r["round"], r["client"], r["model"], r["part"], r["metric"])
        if r["metric"] in ("accuracy", "loss") and r["client"] >= 0:
            assert r["value"] == pytest.approx(known[key], rel=1e-8, nan_ok=True), key
            same += 1
    assert same >= 12
    table = network.table()
    assert {row["site"] for row in table} == {"site-0", "site-1", "site-2"}
    for one in found:
        row = next(r for r in table if (r["site"], r["model"]) == (one.site.site, kind))
        assert score_site_model(one)["accuracy"] == pytest.approx(row["accuracy"], abs=1e-6)
    files = [network.server.results / "metrics.parquet", network.server.audit, *(one.model.path for one in found)]
    before = [file.read_bytes() for file in files]
    run_all(folder, lines.append)  # every round is there already: nothing starts, and nothing is written
    assert lines[-1] == FINISHED_HINT
    assert [file.read_bytes() for file in files] == before


def test_secure_aggregation_over_a_real_network(experiment, tmp_path):
    """A site is killed after the first round; the others end the run, with the model of a run without masks."""
    engine = {"dtype": "float64", "gradient_engine": "loop"}
    made = experiment("flame", rounds=2, clients=4, evaluate={"every": 2}, engine=engine)
    folder = tmp_path / "try"
    write_directory(plan_deployment(made, 4, secure_aggregation=True), folder, Location(quorum=3))
    file = folder / "server" / "server.toml"
    file.write_text(settings_text(read_server(file).with_(deadline=90.0, ttl=600.0, patience=300.0)))
    said, killed = [], []
    with ManagedProcesses() as processes:
        here = LoopbackDeployment(folder, processes)
        here.start_server()
        here.register_all()
        sites = {name: here.start_site(name) for name in here.sites}

        def tell(line):
            said.append(line)
            if "round 1/2" in line and not killed:
                killed.append(sites["site-3"].reap())

        here.run(tell)
    assert any("round 1/2: 4 of 4 accepted" in line for line in said), said
    assert any("round 2/2: 3 of 4 accepted" in line for line in said), said
    kinds = {x["kind"] for x in lines_of(here.server.audit) if x["what"] == "accepted"}
    assert kinds == {"hello", "keys", "shares", "masked", "tally", "unmask"}
    [row] = [row for row in status_of(here.server)["means"] if row["model"] == "personal"]
    assert (row["round"], row["sites"]) == (2, 3)

    plain = tmp_path / "plain"
    write_directory(plan_deployment(made, 4), plain, Location(quorum=3))
    outside_flower()
    clients = [Client(read_site(plain / "sites" / f"site-{k}" / "site.toml")) for k in range(4)]

    def gone(node, message, reply):
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


def test_interrupted_by_a_signal_nothing_is_left(experiment, tmp_path):
    """The launcher gets SIGTERM while it trains: exit code 130, and no process of its group is left."""
    folder = deployment(experiment, "fedavg", tmp_path / "try", rounds=50)
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
