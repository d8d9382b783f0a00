"""Models that a stranger brings, a U-Net on masks, an LSTM on sequences and several labels, train at sites."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedloom.engine.simulate import simulate
from fedloom.errors import Stop
from fedloom.lab.experiment import parse
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import run_all
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.server.run import finished_reason
from tests.deploy.scene import scene

NETS = '''
import torch
from torch import nn


def double_conv(inside, out):
    return nn.Sequential(
        nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) of two levels, with padded convolutions."""

    def __init__(self, outputs=1, width=4):
        super().__init__()
        self.first, self.second = double_conv(1, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.back_second = double_conv(4 * width, 2 * width)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.back_first = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x):
        first = self.first(x)
        second = self.second(self.pool(first))
        bottom = self.bottom(self.pool(second))
        up = self.back_second(torch.cat([second, self.up_second(bottom)], dim=1))
        return self.head(self.back_first(torch.cat([first, self.up_first(up)], dim=1)))


class LSTM(nn.Module):
    """Two recurrent layers, of which the last step is classified."""

    def __init__(self, shape, outputs, hidden=8):
        super().__init__()
        self.lstm = nn.LSTM(shape[-1], hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x):
        steps, _ = self.lstm(x)
        return self.head(steps[:, -1])


def soft_dice(output, target):
    p, y = output.squeeze(-1).sigmoid(), target.float()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
'''


def save_cells(path: Path) -> None:
    """Images of noisy rectangles, with their masks."""
    rng = np.random.default_rng(0)
    masks = np.zeros((36, 8, 8), np.int64)
    for mask in masks:
        top, left = rng.integers(0, 4, 2)
        mask[top : top + 4, left : left + 3] = 1
    masks[:, 0, 0] = -1
    np.savez(path, x=(masks.clip(0) + rng.normal(0, 0.3, masks.shape)).astype(np.float32)[:, None], y=masks)


def save_series(path: Path) -> None:
    """Measurements over time, with a class that depends on their trend."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 90)
    trend = (2 * y - 1)[:, None, None] * np.linspace(0, 1, 12)[:, None]
    np.savez(path, x=(trend + rng.normal(0, 0.5, (90, 12, 3))).astype(np.float32), y=y)


def save_labels(path: Path) -> None:
    """Three labels of a sample, of which several may be present."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    y = (x @ rng.normal(size=(6, 3)) + rng.normal(size=(120, 3)) > 0).astype(np.int64)
    lines = [",".join(map(str, [*row, *labels])) for row, labels in zip(x.tolist(), y.tolist(), strict=True)]
    path.write_text("\n".join(["a,b,c,d,e,f,sepsis,stroke,aki", *lines]) + "\n")


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "unet": (
        "cells.npz",
        save_cells,
        {
            "data": {"task": "binary"},
            "model": {"kind": "nets_of_a_stranger:UNet"},
            "local": {"lr": 0.02, "optimizer": "adam", "batch_size": 4, "epochs": 1},
            "task": {"loss": "nets_of_a_stranger:soft_dice", "metrics": ["dice", "iou"]},
        },
    ),
    "lstm": (
        "series.npz",
        save_series,
        {
            "data": {"layout": "sequence", "task": "binary"},
            "model": {"kind": "nets_of_a_stranger:LSTM"},
            "local": {"lr": 0.02, "optimizer": "adam", "batch_size": 10, "epochs": 1},
        },
    ),
    "labels": (
        "labels.csv",
        save_labels,
        {
            "data": {"task": "multilabel", "target": ["sepsis", "stroke", "aki"]},
            "model": {"kind": "mlp", "hidden": [8]},
            "local": {"lr": 0.2, "batch_size": 10, "epochs": 2},
            "task": {"metrics": ["recall", "label_f1"]},
        },
    ),
}
MEASURED = {
    "unet": {"dice[1]", "iou[0]"},
    "lstm": {"accuracy", "auroc"},
    "labels": {"micro_f1", "macro_f1", "macro_auroc", "recall[sepsis]", "label_f1[aki]"},
}


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the stranger's code, in which the commands run."""
    place = tmp_path / "stranger"
    place.mkdir()
    (place / "nets_of_a_stranger.py").write_text(NETS)
    monkeypatch.chdir(place)
    path, finders = list(sys.path), list(sys.meta_path)
    yield place
    sys.path[:], sys.meta_path[:] = path, finders
    sys.modules.pop("nets_of_a_stranger", None)


def tables_of(case: str, folder: Path) -> dict[str, Any]:
    """The tables of an experiment file."""
    name, save, tables = CASES[case]
    save(folder / name)
    return {
        **tables,
        "rounds": 4,
        "data": {"source": str(folder / name), **tables["data"]},
        "partition": {"kind": "iid", "clients": 3, "test": 0.25},
        "engine": {"dtype": "float64", "gradient_engine": "loop"},
        "evaluate": {"every": 2, "batchnorm_stats": "own"},  # as sites have no other
    }


@pytest.mark.parametrize("case", CASES)
def test_three_sites_give_the_bits_of_the_simulation(case: str, nets: Path) -> None:
    one = scene(nets / "sites", "fedavg", **tables_of(case, nets))
    assert one.serve() is Stop.DONE
    known = one.simulate()
    assert torch.equal(one.model(), known.models.rows("global").flatten())
    assert not torch.equal(one.model(), one.simulate(rounds=1).models.rows("global").flatten())
    here = pq.read_table(one.server.results / "metrics.parquet").to_pylist()
    measured = {row["metric"] for row in here if row["client"] >= 0 and row["part"] == "test"}
    assert measured >= MEASURED[case]
    for name in MEASURED[case]:
        [at_site] = [
            row["value"]
            for row in here
            if (row["round"], row["client"], row["part"], row["metric"]) == (4, 1, "test", name)
        ]
        assert at_site == pytest.approx(float(known.final("global", name)[1]), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unet", "lstm"])
def test_real_processes_give_the_bits_of_the_simulation(case: str, nets: Path, tmp_path: Path) -> None:
    document = {"name": "stranger", "seeds": [0], "method": [{"algorithm": "fedavg"}], **tables_of(case, nets)}
    one = parse({**document, "rounds": 2})
    folder, said = tmp_path / "try", list[str]()
    write_directory(plan_deployment(one, 3), folder, Location())
    here = run_all(folder, said.append)
    assert finished_reason(here.server) is Stop.DONE, said
    known = simulate(one.methods[0].setting, one.partition(one.source.load(), one.head.seeds[0]))
    assert torch.equal(
        load_file(here.server.results / "global.safetensors")["rows"].flatten(), known.models.rows("global").flatten()
    )
