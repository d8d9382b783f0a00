"""Methods over a real server and three real sites on loopback, with TLS and node keys: what a simulation gives."""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedloom.deploy.ops.directory import Place, write
from fedloom.deploy.ops.loopback import run_all
from fedloom.deploy.plan import plan
from fedloom.deploy.site.models import export, figures, module_of, owned
from fedloom.engine.simulate import simulate
from fedloom.experiment import read

pytestmark = [pytest.mark.slow, pytest.mark.deploy, pytest.mark.timeout(900)]

METHODS = ("fedavg", "flame", "fedslr", "fiaelt", "fedacs", "scaffold")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def deployment(experiment, method, folder, rounds=2):
    tables = {"evaluate": {"every": rounds}, "engine": {"dtype": "float64", "oracle": "looped"}}
    made = experiment(
        method, rounds=rounds, partition={"kind": "dirichlet", "clients": 3, "beta": 0.5, "keep": 60}, **tables
    )
    write(plan(made, 3), folder, Place(quorum=3))
    return folder


def simulated(folder):
    experiment = read(folder / "server" / "experiment.toml")
    seed = experiment.head.seeds[0]
    fed = experiment.partition(experiment.source.load(), seed)
    return simulate(experiment.methods[0].setting, fed)


@pytest.mark.parametrize("method", METHODS)
def test_a_real_network_gives_what_a_simulation_gives(experiment, method, tmp_path):
    folder = deployment(experiment, method, tmp_path / "try")
    lines = []
    here = run_all(folder, lines.append)
    assert not here._processes.started
    assert any(line.startswith("round 2/2: 3 of 3 accepted") for line in lines), lines
    expected = simulated(folder)
    kinds = expected.models.kinds()
    kind = "personal" if "personal" in kinds else "global"
    rows = expected.models.rows(kind)
    found = owned(folder)
    assert [(one.site.client, one.model.kind, one.model.round) for one in found] == [(k, kind, 2) for k in range(3)]
    for k, one in enumerate(found):
        row = load_file(one.model.path)["rows"][0]
        torch.testing.assert_close(row, rows[k] if kind == "personal" else rows, **CLOSE)
    known = {
        (r["round"], r["client"], r["model"], r["part"], r["metric"]): r["value"] for r in expected.table().to_pylist()
    }
    same = 0
    for r in pq.read_table(here.server.results / "metrics.parquet").to_pylist():
        key = (r["round"], r["client"], r["model"], r["part"], r["metric"])
        if r["metric"] in ("accuracy", "loss") and r["client"] >= 0:
            assert r["value"] == pytest.approx(known[key], rel=1e-8, nan_ok=True), key
            same += 1
    assert same >= 12
    table = here.table()
    assert {row["site"] for row in table} == {"site-0", "site-1", "site-2"}
    for one in found:
        row = next(r for r in table if (r["site"], r["model"]) == (one.site.site, kind))
        assert figures(one)["accuracy"] == pytest.approx(row["accuracy"], abs=1e-6)


def test_a_run_that_ended_is_run_again_without_training(experiment, tmp_path):
    """The second time every round is there already; models and figures stay as they are, byte for byte."""
    folder = deployment(experiment, "fedavg", tmp_path / "try", rounds=1)
    run_all(folder, lambda _: None)
    before = {one.site.site: one.model.path.read_bytes() for one in owned(folder)}
    metrics = (folder / "server" / "results" / "metrics.parquet").read_bytes()
    run_all(folder, lambda _: None)
    assert {one.site.site: one.model.path.read_bytes() for one in owned(folder)} == before
    assert (folder / "server" / "results" / "metrics.parquet").read_bytes() == metrics
    audit = [json.loads(line) for line in (folder / "server" / "state" / "audit.jsonl").read_text().splitlines()]
    assert sum(entry.get("kind") == "train" for entry in audit) == 3


def test_export_is_a_state_dict_that_plain_torch_takes(experiment, tmp_path):
    folder = deployment(experiment, "fedavg", tmp_path / "try", rounds=1)
    run_all(folder, lambda _: None)
    one = owned(folder)[0]
    path = export(one, tmp_path / "models")
    module = read(one.site.experiment).model.build(one.site.samples.shape, one.site.samples.outputs, 1)
    module.load_state_dict(load_file(path))
    x = torch.rand(4, *one.site.samples.shape)
    assert torch.equal(module.eval()(x), module_of(one)(x))


def test_interrupted_by_a_signal_nothing_is_left(experiment, tmp_path):
    """The launcher gets SIGTERM while it trains: exit code 130, and no process of its group is left."""
    folder = deployment(experiment, "fedavg", tmp_path / "try", rounds=50)
    words = [sys.executable, "-m", "fedloom.cli", "deploy", "local", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        for line in launcher.stdout:
            if line.startswith("round"):
                launcher.terminate()
                break
        rest = launcher.stdout.read()
        assert launcher.wait(60) == 130, rest
    assert "every process has ended" in rest
    listing = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    left = [line for line in listing.splitlines() if str(folder) in line and not line.startswith("Z")]
    assert left == []
