"""One plain and one masked deployment with real processes, over TLS, on every run of the tests.

`make test-deploy` plays many more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedloom.engine.simulate import simulate
from fedloom.errors import Stop
from fedloom.lab.experiment import read
from fedloom_sites.deploy.audit import SENT_FILE, lines_of, verify_log
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import run_all
from fedloom_sites.deploy.ops.plan import plan
from fedloom_sites.deploy.server.run import finished

KINDS = {False: {"train"}, True: {"keys", "shares", "masked", "count", "unmask"}}
"""Kinds of messages of a round, plain and masked."""


@pytest.mark.timeout(600)  # a minute on an idle machine
@pytest.mark.parametrize("masked", [False, True])
def test_a_deployment_gives_what_a_simulation_gives(masked: bool, experiment: Any, tmp_path: Path) -> None:
    tables = {"evaluate": {"every": 9}, "engine": {"dtype": "float64", "gradient_engine": "loop"}}
    folder = tmp_path / "try"
    write_directory(plan(experiment(rounds=1, **tables), 3, secure_aggregation=masked), folder, Location())
    said = list[str]()
    here = run_all(folder, said.append)
    assert finished(here.server) is Stop.DONE, said
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
