"""What one masked sum reveals of samples where the server chooses the model: most of them, and not whose they are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.data.partitions import Iid
from fedloom_sites.deploy.rehearsal.rogue import RogueServer, RogueSession
from fedloom_sites.deploy.rehearsal.samples import (
    compute_change,
    count_recovered,
    craft_bins,
    find_first_layer,
    read_bins,
    site_training_rows,
)
from fedloom_sites.deploy.secure.vectors import UploadVector
from tests.deploy.sessions import secured, sum_honestly
from tests.deploy.test_dishonest import Rogue

pytestmark = pytest.mark.attack("also for scores. A dishonest server")

SITES, UNITS = 5, 500
FULL_BATCH = {"local": {"lr": 0.05, "epochs": 1, "batch_size": 1000}}
NOISE = {"aggregator": {"kind": "private-mean", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}}
FIVE_STEPS = {"local": {"lr": 0.05, "steps": 5, "batch_size": 20}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def read_from_one_sum(folder: Path, agreed: dict[str, Any], **changes: Any) -> tuple[int, int]:
    """Samples of five sites that one sum on a crafted model shows to 1 %, and how many there are."""
    cut = {"partition": {"kind": "iid", "clients": SITES, "max_train_per_client": 40}}
    here = secured(folder, "fedavg", 3, agreed=agreed, model={"kind": "mlp", "hidden": [UNITS]}, **{**cut, **changes})
    rogue = Rogue(here)
    rows = torch.cat([site_training_rows(c, site.trainer.fed) for c, site in enumerate(rogue.sites)])
    job = rogue.trainer.job
    layer = find_first_layer(job, rows.shape[1])
    every = site_training_rows(0, Iid(clients=1)(here.experiment.source.load(), 1))
    public = every[(torch.cdist(every, rows) > 0).all(1)]  # the server has digits like those of the sites
    assert len(public) > 3 * len(rows)
    change = change_of_sum(rogue, *ask(rogue, craft_bins(rogue, layer, public)))
    return count_recovered(read_bins(layer, job, change), rows), len(rows)


def ask(rogue: RogueServer, download: bytes) -> tuple[RogueSession, Any]:
    session = sum_honestly(rogue, 1, download)
    assert session.is_open
    assert not rogue.refused
    return session, rogue.terms(1, download)


def change_of_sum(rogue: RogueServer, session: RogueSession, terms: Any) -> Tensor:
    vector = UploadVector(rogue.trainer.job, rogue.trainer.forms.idle)
    sums, _, _ = vector.decode(session.total(terms)[: vector.length], SITES, 1.0)
    return compute_change(rogue.trainer.job, sums)


def test_one_sum_on_a_crafted_model_shows_most_samples(tmp_path: Path, record_property: Any) -> None:
    """An ordinary session of all five sites: no site refuses anything. The security model states these figures."""
    full, count = read_from_one_sum(tmp_path / "full", {}, **FULL_BATCH)
    bounded, _ = read_from_one_sum(tmp_path / "bounded", {"norm_bound": 1.0}, **FULL_BATCH)
    steps, _ = read_from_one_sum(tmp_path / "steps", {}, **FIVE_STEPS)
    noisy, _ = read_from_one_sum(tmp_path / "noisy", {}, **FULL_BATCH, **NOISE)
    page = " ".join((Path(__file__).parents[4] / "docs" / "security-model.md").read_text().split())
    stated = re.search(r"five sites with (\d+) training samples.*?revealed (\d+) samples.*?and (\d+) after five", page)
    assert stated is not None
    assert [count, full, steps] == pytest.approx([*map(int, stated.groups())], abs=5)  # other processors round
    assert bounded == pytest.approx(full, abs=5)
    assert noisy == 0
    record_property("tries", 4)
