"""Uploads that are not finite end or change a run in the same way in a simulation, a deployment and a Flower app.

Two differences are intended. The quorum of sites without masks is a setting of the server, which may be lowered, so
that such a run may continue. Under masks, the server does not learn why uploads are neutral; the reason may be a bound
or a protection that can be changed, so that such a run may continue, too.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord

import fedloom as fl
import fedloom_sites.flower as ff
from fedloom.engine.clients import chunk
from fedloom.errors import RunStopped, Stop
from fedloom.local.rows import rebuild_rows
from fedloom_sites.deploy.ops.status import read_status
from fedloom_sites.deploy.secure import integers
from fedloom_sites.deploy.site.trainer import Trainer
from fedloom_sites.transport import node as node_module
from tests.deploy.scene import Scene, scene
from tests.deploy.sessions import SMALL, losing, secured
from tests.flower.app import App
from tests.flower.test_parity import CHOICES, local_of, net

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e4 * 2.0**-integers.RESOLUTION_BITS}
ROUND, ROUNDS = 2, 3
FEW, HALF, ALL = (1,), (0, 1, 3), (0, 1, 2, 3, 4)
NONE_LEFT = f"round {ROUND}: 0 of 5 uploads were finite and within bounds"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def spoil(monkeypatch: pytest.MonkeyPatch, spoilt: Collection[int], *, neutral: bool = False) -> None:
    """Let the uploads of clients be infinite in one round, in all ways to run.

    Args:
        monkeypatch: undone after the test.
        spoilt: numbers of the clients.
        neutral: True for uploads that change nothing instead, as masked sites send them.
    """
    make = chunk.run_clients

    def run_clients(job: Any, down: Any, task: Any) -> Any:
        before = job.clients.read(task.ids)
        output = make(job, down, task)
        bad = torch.tensor([[int(c) in spoilt and task.round == ROUND] for c in task.ids.tolist()])
        upload = [field.masked_fill(bad, 0.0 if neutral else torch.inf) for field in output.upload]
        rows = [torch.where(bad & neutral, old, new) for old, new in zip(before, output.state.rows, strict=True)]
        state = output.state._replace(rows=rebuild_rows(output.state.rows, rows))
        return output._replace(upload=rebuild_rows(output.upload, upload), state=state)

    for module in (chunk, node_module):
        monkeypatch.setattr(module, "run_clients", run_clients)


def plain(folder: Path, method: str) -> Scene:
    here = scene(folder, method, **SMALL, rounds=ROUNDS)
    return here._replace(server=here.server.with_(quorum=3))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("spoilt", [FEW, HALF, ALL], ids=["few", "half", "all"])
def test_a_round_without_finite_uploads_ends_everywhere_alike(
    spoilt: tuple[int, ...], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, masked = plain(tmp_path / "plain", method), secured(tmp_path / "masked", method, rounds=ROUNDS)
    with monkeypatch.context() as patch:
        spoil(patch, spoilt)
        known, stops = here.simulate(), (here.serve(), masked.serve())
    if spoilt == FEW:
        assert (known.stop, *stops) == (Stop.DONE, Stop.DONE, Stop.DONE)
        torch.testing.assert_close(here.model(), known.models.rows("global"), rtol=1e-10, atol=1e-10)
        with monkeypatch.context() as patch:
            spoil(patch, spoilt, neutral=True)
            torch.testing.assert_close(masked.model(), masked.simulate().models.rows("global"), **CLOSE)
    elif spoilt == HALF:
        assert (known.stop, *stops) == (Stop.UNUSABLE, Stop.TOO_FEW, Stop.NEUTRAL)
        assert here.serve(quorum=2) is Stop.DONE  # the reason why such a run may continue
    else:
        assert (known.stop, *stops) == (Stop.DIVERGED, Stop.DIVERGED, Stop.NEUTRAL)
        assert known.detail == here.summary()["detail"] == NONE_LEFT
        assert f"round {ROUND}: 5 of 5 sites with samples sent a neutral upload" in masked.summary()["detail"]
        assert here.summary()["runs"][0]["rounds"] == ROUND - 1
        assert here.serve() is Stop.DIVERGED  # nothing is asked again
        assert masked.serve() is Stop.DONE  # without the round whose sum stays closed
        [given_up] = masked.audit("given up")
        assert given_up["round"] == ROUND
        assert [s["accepted"] for s in read_status(masked.server)["sites"]] == [ROUNDS - 1] * 5


def test_sites_that_are_missing_may_still_have_finite_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = plain(tmp_path, "fedavg")
    with monkeypatch.context() as patch:
        spoil(patch, ALL)
        assert here.serve(here.grid(losing({(ROUND, "train"): [4]}))) is Stop.TOO_FEW
    assert "Rejected answers: 4" in here.summary()["detail"]
    assert here.serve() is Stop.DONE


def test_a_norm_bound_of_the_experiment_ends_a_run_everywhere_alike(tmp_path: Path) -> None:
    """Also if only the client's own state exceeds it, which no server sees."""
    engine = {"dtype": "float64", "gradient_engine": "loop", "norm_bound": 1e-9}
    for method in ("fedavg", "local"):
        here = scene(tmp_path / method, method, **SMALL, rounds=ROUNDS, engine=engine)
        known, stop = here.simulate(), here.serve()
        assert (known.stop, known.detail) == (stop, here.summary()["detail"])
        assert stop is Stop.DIVERGED, method


def test_infinite_arrays_of_sites_that_do_not_check_them_end_the_run_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_check_result", lambda *_args: None)
    here = plain(tmp_path, "fedavg")
    with monkeypatch.context() as patch:
        spoil(patch, ALL)
        assert here.serve() is Stop.DIVERGED
    assert here.summary()["detail"] == NONE_LEFT


@pytest.mark.parametrize("spoilt", [FEW, HALF, ALL], ids=["few", "half", "all"])
def test_a_flower_app_ends_as_a_simulation(spoilt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    fed = fl.partitions.iid(clients=5, max_train_per_client=30)(fl.load("digits"), seed=0)
    strategy, module = ff.Strategy("fedavg", net(), **CHOICES), net()
    begin = ArrayRecord(module.state_dict())
    choices = CHOICES | {"engine": CHOICES["engine"] | {"quorum": 0.1}}  # an app takes all replies that arrive
    spoil(monkeypatch, spoilt)
    known = fl.simulate("fedavg", fed, model=module, rounds=ROUNDS, **choices)
    app = App(local_of(fed), 5)
    if spoilt != ALL:
        result = strategy.start(app.grid, begin, num_rounds=ROUNDS)
        row = torch.cat([value.flatten() for value in result.arrays.to_torch_state_dict().values()])
        torch.testing.assert_close(row, known.models.rows("global"), rtol=1e-10, atol=1e-10)
        return
    with pytest.raises(RunStopped) as stopped:
        strategy.start(app.grid, begin, num_rounds=ROUNDS)
    assert (stopped.value.reason, stopped.value.detail) == (known.stop, known.detail) == (Stop.DIVERGED, NONE_LEFT)
    assert strategy.state is not None
    assert strategy.state.round == ROUND - 1
