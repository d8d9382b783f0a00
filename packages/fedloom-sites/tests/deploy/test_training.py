"""Methods over a real server and three real sites on loopback, with TLS and node keys: what a simulation gives."""

import shutil

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedloom.engine.simulate import simulate
from fedloom.lab.experiment import read
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment, run_all
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses
from fedloom_sites.deploy.server.run import FINISHED_HINT
from fedloom_sites.deploy.site.models import find_owned_models, score_site_model
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
        for file in ("experiment.toml", "server.toml", "site.toml", "signing-key", "signing-key.pub"):
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
