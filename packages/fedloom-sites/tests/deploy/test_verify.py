"""Sites that verify the server: every site opens the sums, replays the server's steps, and detects what is not their result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedloom.errors import Stop
from fedloom_sites.deploy.site.state import models
from tests.deploy.scene import Scene
from tests.deploy.sessions import losing, secured

VERIFIED = {"verify": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def check_equal(one: Scene, other: Scene) -> None:
    """Two runs have the same models at the server and at every site, bit for bit."""
    if (one.server.results / "global.safetensors").exists():
        torch.testing.assert_close(one.model(), other.model(), rtol=0, atol=0)
    for mine, theirs in zip(one.sites, other.sites, strict=True):
        for a, b in zip(models(mine.state), models(theirs.state), strict=True):
            torch.testing.assert_close(load_file(a.path)["rows"], load_file(b.path)["rows"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "flame", "ditto", "feddyn", "fedadam"])
def test_an_honest_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    plain, verified = secured(tmp_path / "plain", name), secured(tmp_path / "verified", name, agreed=VERIFIED)
    assert plain.serve() is Stop.DONE
    assert verified.serve() is Stop.DONE
    check_equal(plain, verified)
    assert not verified.audit("rejected")
