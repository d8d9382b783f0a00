"""The real data sets, where FEDLOOM_DATA has them: counts, shapes, checksums, statistics, speed, memory."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data import PARTITIONS, Dataset, load
from fedloom.data.tables import Table

ROOT = os.environ.get("FEDLOOM_DATA")
pytestmark = pytest.mark.skipif(
    ROOT is None or not Path(ROOT).is_dir(), reason="FEDLOOM_DATA does not name a folder of data sets"
)


@pytest.fixture(scope="module")
def root() -> Path:
    assert ROOT is not None
    return Path(ROOT)


MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def counts(data: Dataset) -> tuple[list[int], list[int]]:
    """Class counts of the training and of the official test samples."""
    held = torch.zeros(len(data), dtype=torch.bool)
    if data.test is not None:
        held[data.test] = True
    classes = len(data.classes)
    sides = (data.y[~held], data.y[held])
    train, test = (torch.bincount(side, minlength=classes).tolist() for side in sides)
    return train, test


@pytest.mark.parametrize(
    ("name", "train", "test", "mean"),
    [("mnist", MNIST_TRAIN, MNIST_TEST, 0.1307), ("fashion-mnist", [6000] * 10, [1000] * 10, 0.2860)],
)
def test_idx_sets(name: str, train: list[int], test: list[int], mean: float, root: Path) -> None:
    data = load(name, root)
    assert data.x.shape == (70_000, 1, 28, 28)
    assert counts(data) == (train, test)
    assert float(data.x[:60_000].float().mean() / 255) == pytest.approx(mean, abs=5e-5)


PUBLISHED = {  # SHA-256 of the uncompressed training images, header included, as published with the files
    "mnist": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "fashion-mnist": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
}


def test_every_file_has_its_checksum(root: Path) -> None:
    lines = (root / "SHA256SUMS").read_text().splitlines()
    assert len(lines) > 20
    for line in lines:
        digest, name = line.split(maxsplit=1)
        with (root / name.lstrip("*")).open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest, name


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_training_images_are_the_published_bytes(name: str, root: Path) -> None:
    data = load(name, root)
    header = struct.pack(">4I", 0x803, 60_000, 28, 28)
    assert hashlib.sha256(header + data.x[:60_000].numpy().tobytes()).hexdigest() == PUBLISHED[name]


@pytest.mark.slow
def test_cifar10(root: Path) -> None:
    data = load("cifar-10", root)
    assert data.x.shape == (60_000, 3, 32, 32)
    assert counts(data) == ([5000] * 10, [1000] * 10)
    means = data.x[:50_000].float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4913998, 0.4821581, 0.4465305]), atol=2e-5, rtol=0)


def test_cifar100(root: Path) -> None:
    data = load("cifar-100", root)
    assert data.x.shape == (6000, 3, 32, 32)
    assert counts(data) == ([50] * 100, [10] * 100)
    assert (data.classes[0], data.classes[99]) == ("apple", "worm")


def test_medical_mnist(root: Path) -> None:
    data = load("medical-mnist", root)
    assert data.x.shape == (6000, 1, 64, 64)
    assert data.classes == ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")
    assert counts(data) == ([1000] * 6, [0] * 6)
    assert load("medical-mnist", root, rgb=True).shape == (3, 64, 64)


def test_femnist(root: Path) -> None:
    data = load("femnist", root)
    assert data.x.shape == (16_393, 1, 28, 28)
    assert data.x.dtype == torch.uint8
    assert len(data.classes) == 62
    train, test = counts(data)
    assert (sum(train), sum(test)) == (14_708, 1_685)
    assert all(1000 <= n <= 1124 for n in train[:10])
    assert all(50 <= n <= 128 for n in train[10:])
    fed = PARTITIONS["natural"](test_from="clients", test=0, validation=0)(data, 0)
    sizes = fed.sizes("train")
    assert (fed.n, int(sizes.min()), int(sizes.median()), int(sizes.max())) == (105, 4, 152, 165)
    assert int(fed.sizes("test").min()) >= 1
    letters = load("femnist", root, subset="letters")
    assert letters.classes == tuple("abcdefghij")
    every = torch.bincount(data.y, minlength=62)[36:46]
    assert torch.equal(torch.bincount(letters.y, minlength=10), every)


def test_heart_is_four_hospitals_scaled_by_themselves(root: Path) -> None:
    data = load("heart", root)
    assert data.user_names == ("cleveland", "hungarian", "switzerland", "va")
    assert data.users is not None
    assert torch.bincount(data.users).tolist() == [303, 294, 123, 200]
    disease = [int(data.y[data.users == i].sum()) for i in range(4)]
    assert disease == [303 - 164, 106, 123 - 8, 200 - 51]
    zeros = 123 + 49 + 1  # cholesterol and blood pressure recorded as 0, beyond the cells marked missing
    assert int(data.x.isnan().sum()) == 6 + 782 + 273 + 698 + zeros
    fed = PARTITIONS["natural"]()(data, 3)
    assert fed.n == 4
    assert isinstance(data.prepare, Table)
    assert fed.data.shape == (data.prepare.width,)
    for i in range(4):  # fitted on the training part: its numbers have mean 0 and variance 1 (or are 0)
        own = fed.data.x[fed.indices("train", i)].double()
        age = own[:, 0]
        assert float(age.mean()) == pytest.approx(0, abs=1e-6)
        assert float(age.var(correction=0)) == pytest.approx(1, abs=1e-5)
    swiss = fed.data.x[fed.indices("train", 2)]
    column = [c.name for c in data.prepare.columns].index("chol")
    start = sum(max(c.levels, 1) + c.flag for c in data.prepare.columns[:column])
    assert (swiss[:, start] == 0).all()  # no cholesterol was observed there
    assert (swiss[:, start + 1] == 1).all()


def test_adult(root: Path) -> None:
    data = load("adult", root)
    assert counts(data) == ([24_720, 7_841], [12_435, 3_846])
    assert float(data.x.min()) >= 0
    assert float(data.x.max()) <= 1
    one_hot = data.x[:, : sum(len(levels) for levels in data.levels.values())]
    assert (one_hot.sum(1) == len(data.levels)).all()
    for column, clients in (("education", 16), ("occupation", 15)):
        assert PARTITIONS["by-column"](column=column)(data, 0).n == clients


@pytest.mark.parametrize(("name", "samples"), [("0_0", 897), ("0.5_0.5", 912), ("1_1", 1084)])
def test_the_synthetic_generator_has_the_statistics_of_the_authors_files(name: str, samples: int, root: Path) -> None:
    file = root / "synthetic" / "synthetic_fedprox_test.tar.xz"
    theirs = load("leaf", path=str(file), inside=f"synthetic_{name}")
    assert (len(theirs), len(theirs.user_names)) == (samples, 30)
    alpha, beta = (float(part) for part in name.split("_"))
    ours = load("synthetic", alpha=alpha, beta=beta, clients=300)
    assert ours.test is not None
    assert ours.users is not None
    variance = torch.arange(1, 61, dtype=torch.float64) ** -1.2
    for data, rows in ((theirs, torch.arange(len(theirs))), (ours, ours.test)):
        ratio = _within(data, rows) / variance
        assert float(ratio.mean()) == pytest.approx(1, abs=0.05)
    sizes = torch.bincount(ours.users)
    logs = (sizes - 50).clamp_min(1).double().log()
    assert float(logs.median()) == pytest.approx(4, abs=0.5)  # n = int(lognormal(4, 2)) + 50
    assert int(sizes.min()) >= 50
    assert torch.equal(torch.bincount(ours.users[ours.test]), sizes - (0.9 * sizes).long())
    a, b = _classes_per_user(theirs, torch.arange(len(theirs))), _classes_per_user(ours, ours.test)
    error = (a.var() / len(a) + b.var() / len(b)).sqrt()
    assert abs(float(a.mean() - b.mean())) < 4 * float(error)


def _within(data: Dataset, rows: torch.Tensor) -> torch.Tensor:
    """Variance of each feature within users, pooled."""
    assert data.users is not None
    x, user = data.x[rows].double(), data.users[rows]
    n = torch.bincount(user, minlength=len(data.user_names)).double()
    mean = torch.zeros(len(n), x.shape[1], dtype=torch.float64).index_add_(0, user, x) / n.clamp_min(1)[:, None]
    return (x - mean[user]).square().sum(0) / (n - 1).clamp_min(0).sum()


def _classes_per_user(data: Dataset, rows: torch.Tensor) -> torch.Tensor:
    assert data.users is not None
    pairs = torch.unique(torch.stack([data.users[rows], data.y[rows]]), dim=1)
    return torch.bincount(pairs[0]).double()


@pytest.mark.slow
def test_mnist_is_read_in_little_time(root: Path) -> None:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        load("mnist", root)
        best = min(best, time.process_time() - start)
    assert best < 0.6


PEAK = """
import resource, sys
from fedloom.data import load
name, root = sys.argv[1:]
if name == "warm":
    sys.exit()
load("digits")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = load(name, root)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / data.x.untyped_storage().nbytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10"])
def test_a_source_needs_little_more_memory_than_its_array(name: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, name, str(root)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert float(done.stdout) < 1.3


def test_labels_of_a_federation_are_those_of_the_source(root: Path) -> None:
    data = load("mnist", root)
    fed = PARTITIONS["mixed"](clients=10)(data, 0)
    assert fed.test is not None
    assert np.array_equal(fed.test.numpy(), np.arange(60_000, 70_000))
    assert int((fed.class_counts() > 0).sum(1)[:5].max()) == 2
