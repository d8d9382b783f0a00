"""Processes that are killed at any write to the disk: what was saved is whole, the models are the same in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.errors import Stop
from fedloom_sites.deploy.site.state import latest_models
from tests.deploy.scene import scene
from tests.deploy.test_faults_in_runs import SMALL, personal, same

RUN = """
import sys
from pathlib import Path
from tests.deploy.scene import scene
from tests.deploy.test_faults_in_runs import SMALL
sys.exit(0 if scene(Path(sys.argv[1]), "flame", **SMALL).serve(ttl=20.0, deadline=20.0).name == "DONE" else 1)
"""


def run(folder: Path, crash_at: int = 0) -> int:
    """The server and its sites in a process of their own; it ends as if killed at a step of its work on the disk."""
    here = Path(__file__).parents[4]
    environment = os.environ | {"FEDLOOM_CRASH_AT": str(crash_at), "PYTHONPATH": f"{here}:{here / 'src'}"}
    command = [sys.executable, "-c", RUN, str(folder)]
    return subprocess.run(
        command, env=environment, cwd=folder, timeout=200, check=False, capture_output=True
    ).returncode


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_any_write(tmp_path: Path) -> None:
    """Some places among the creates, writes (torn in two), syncs, renames and deletes of server and sites."""
    whole = scene(tmp_path / "whole", "flame", **SMALL)
    assert whole.serve() is Stop.DONE
    for place in sorted(np.random.default_rng(0).choice(np.arange(5, 800), 8, replace=False).tolist()):
        folder = tmp_path / str(place)
        folder.mkdir()
        first = run(folder, place)
        assert first in (0, 137), first
        assert first == 0 or run(folder) == 0, place
        same(scene(folder, "flame", **SMALL), whole)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_again_and_again(tmp_path: Path) -> None:
    """Killed after every 250 of 800 steps, more than a round has, until it is done: it gets on every time."""
    whole = scene(tmp_path / "whole", "flame", **SMALL)
    assert whole.serve() is Stop.DONE
    folder = tmp_path / "again"
    folder.mkdir()
    ends = []
    while not ends or ends[-1] != 0:
        ends.append(run(folder, 250))
        assert len(ends) < 10
        assert ends[-1] in (0, 137)
    assert len(ends) > 2
    here = scene(folder, "flame", **SMALL)
    same(here, whole)
    for site in here.sites:
        assert [m.round for m in latest_models(site.state)] == [4]
        assert bool(torch.isfinite(personal(here, site.client)).all())
