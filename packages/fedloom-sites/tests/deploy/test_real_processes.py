"""One plain and one masked deployment with real processes, over TLS, on every run of the tests.

`make test-deploy` plays many more.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedloom.engine.simulate import simulate
from fedloom.errors import Stop
from fedloom.lab.experiment import read
from fedloom_sites.deploy.audit import SENT_FILE, lines_of, verify_log
from fedloom_sites.deploy.ops.amend import rotate
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import run_all
from fedloom_sites.deploy.ops.members import accept_agreement
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ProcessError
from fedloom_sites.deploy.ops.status import status_of
from fedloom_sites.deploy.server.run import finished_reason
from fedloom_sites.deploy.setting_files import read_server
from tests.commands import call

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
    assert verify_log(here.server.audit).lines == len(lines_of(here.server.audit))
    for site in here.sites.values():
        [log] = site.state.glob(f"*/{SENT_FILE}")
        assert verify_log(log).lines
        assert KINDS[masked] <= {line["kind"] for line in lines_of(log)}
        assert not (KINDS[not masked] - KINDS[masked]) & {line["kind"] for line in lines_of(log)}


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
        if status_of(read_server(folder / "server" / "server.toml"))["rounds"] >= 1:
            call("deploy", "stop", folder)

    with pytest.raises(ProcessError):
        run_all(folder, show)
    server = read_server(folder / "server" / "server.toml")
    stopped = status_of(server)
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
    log = [x for x in lines_of(here.server.audit) if x["what"] == "accepted" and x["kind"] in ("train", "masked")]
    assert {x["site"]: [y["round"] for y in log if y["site"] == x["site"]] for x in log} == {
        name: [1, 2, 3] for name in ("site-0", "site-1", "site-2")
    }
