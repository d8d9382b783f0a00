"""A site whose own rows cannot change a model takes part in a run, as such a client does in a simulation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.errors import ConfigError, Stop
from fedloom_sites.deploy.ops.plan import plan_deployment
from tests.deploy.scene import Scene, scene
from tests.deploy.sessions import secured

WITHOUT_EVENTS = "c"
"""Site whose rows are all censored."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def choices(folder: Path, *, events: bool = True) -> dict[str, Any]:
    """An experiment on a table of survival times at five sites."""
    rng = np.random.default_rng(0)
    rows = [
        f"{site},{rng.normal():.4f},{rng.normal():.4f},{rng.integers(1, 40)},{int(events and site != WITHOUT_EVENTS)}"
        for site in "abcde"
        for _ in range(20)
    ]
    folder.mkdir()
    (folder / "times.csv").write_text("\n".join(["site,x,z,time,event", *rows]) + "\n")
    return {
        "data": {"source": str(folder / "times.csv"), "target": "time", "event": "event", "client_column": "site"},
        "partition": {"kind": "natural", "test": 0, "validation": 0},
        "evaluate": {"every": 1, "parts": ["train"]},
        "rounds": 2,
    }


@pytest.mark.parametrize("make", [scene, secured])
def test_a_site_without_events_takes_part(make: Any, tmp_path: Path) -> None:
    here: Scene = make(tmp_path / "run", "fedavg", **choices(tmp_path / "data"))
    assert here.serve() is Stop.DONE, here.summary()
    assert not here.audit("neutral uploads")
    known = here.simulate().models.rows("global")
    torch.testing.assert_close(here.model(), known, rtol=1e-6, atol=1e-3)


def test_a_deployment_without_any_event_is_refused_where_its_rows_are_planned(tmp_path: Path) -> None:
    given = choices(tmp_path / "data", events=False)
    experiment = scene(tmp_path / "run", "fedavg", **given).experiment
    with pytest.raises(ConfigError, match="no training row has an event"):
        plan_deployment(experiment)


@pytest.mark.parametrize("make", [scene, secured])
def test_sites_without_any_event_end_after_the_first_scores(make: Any, tmp_path: Path) -> None:
    """No site refuses, because that would reveal something about its rows; the losses show it to the server."""
    given = choices(tmp_path / "data", events=False) | {"rounds": 40}
    here: Scene = make(tmp_path / "run", "fedavg", **given)
    assert here.serve() is Stop.UNCHANGED, here.summary()
    assert here.summary()["detail"].startswith("after 2 rounds, every loss is unchanged")
    assert "they probably have no events to learn from" in here.summary()["detail"]
