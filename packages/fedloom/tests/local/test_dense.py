"""Masks of images and labels of time steps: a stranger's U-Net and LSTM train as by hand, with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score
from torch import Tensor, nn
from torch.nn import functional

import fedloom as fl
from fedloom.errors import ConfigError, DataError, Refused

SAMPLES, SIDE, STEPS = 48, 8, 6


class UNet(nn.Module):
    """A small U-Net as it is usually written: logits [b, outputs, height, width]."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.up(self.low(first))], 1))


class LSTM(nn.Module):
    """A recurrent network on [b, time, features], with one output per sample or per time step."""

    def __init__(self, outputs: int = 1, each: bool = False) -> None:
        super().__init__()
        self.each, self.body, self.head = each, nn.LSTM(3, 5, batch_first=True), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)[0]
        return self.head(h if self.each else h[:, -1])


def soft_dice(output: Tensor, target: Tensor) -> Tensor:
    p, y = output.squeeze(-1).sigmoid(), target.to(output.dtype)
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def images() -> tuple[Any, Any]:
    """Noisy images, and masks that lack a label at some pixels."""
    rng = np.random.default_rng(0)
    mask = np.zeros((SAMPLES, SIDE, SIDE), int)
    for k, (row, column) in enumerate(rng.integers(0, 5, (SAMPLES, 2))):
        mask[k, row : row + 3, column : column + 3] = 1
    x = (mask + rng.normal(0, 0.3, mask.shape)).astype(np.float32)[:, None]
    mask[rng.random(mask.shape) < 0.1] = -1
    return x, mask


def sites(data: fl.Dataset) -> Any:
    return fl.partitions.natural(validation=0.2)(data, seed=0)


OWNERS = np.arange(SAMPLES) % 3


@pytest.mark.parametrize("task", ["binary", "classification"])
@pytest.mark.parametrize("shape", ["[N, H, W]", "[N, 1, H, W]"])
def test_a_step_is_that_of_the_mean_loss_over_the_labeled_pixels(task: str, shape: str) -> None:
    x, mask = images()
    data = fl.Dataset.create((x, mask if shape == "[N, H, W]" else mask[:, None]), task=task, clients=OWNERS)
    fed, net = sites(data), UNet(data.outputs)
    local = {"lr": 0.3, "batch_size": "full", "steps": 1}
    got = fl.simulate("fedavg", fed, net, rounds=1, local=local, engine={"dtype": "float64"})
    size = fed.sizes("train").double()
    mean = [torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()]
    for i in range(3):
        own, index = UNet(data.outputs).double(), fed.indices("train", i)
        own.load_state_dict(net.state_dict())
        y = torch.from_numpy(mask)[index].reshape(-1)
        logits = own(torch.from_numpy(x)[index].double()).permute(0, 2, 3, 1).flatten(0, 2)[y >= 0]
        y = y[y >= 0]
        loss = functional.cross_entropy(logits, y) if task == "classification" else None
        loss = functional.binary_cross_entropy_with_logits(logits[:, 0], y.double()) if loss is None else loss
        loss.backward()
        for total, p in zip(mean, own.parameters(), strict=True):
            total += size[i] / size.sum() * (p.detach() - 0.3 * p.grad)
    model = got.models.module("global")
    for p, q in zip(model.parameters(), mean, strict=True):
        torch.testing.assert_close(p.detach().double(), q, rtol=0, atol=1e-6)


def test_a_strangers_unet_learns_with_its_own_loss_and_dice_and_iou_are_those_of_sklearn() -> None:
    x, mask = images()
    data = fl.Dataset.create((x, mask), task="binary", clients=OWNERS)
    fed = sites(data)
    task = {"loss": soft_dice, "metrics": ["dice", "iou", "mean_iou"]}
    options: Any = {"rounds": 12, "task": task, "local": {"lr": 0.02, "optimizer": "adam", "batch_size": 8}}
    one, two = (fl.simulate("fedavg", fed, UNet, engine={"workers": k}, **options) for k in (1, 2))
    assert torch.equal(one.models.rows("global"), two.models.rows("global"))
    assert one.table().equals(two.table())
    assert float(one.final("global", "dice[1]").mean()) > 0.8
    for i in range(3):
        index = fed.indices("test", i)
        guess = one.models.predict(x[index]).reshape(-1).astype(int)
        true = mask[index].reshape(-1)
        guess, true = guess[true >= 0], true[true >= 0]
        assert float(one.final("global", "dice[1]")[i]) == pytest.approx(f1_score(true, guess))
        assert float(one.final("global", "iou[1]")[i]) == pytest.approx(jaccard_score(true, guess))
        assert float(one.final("global", "mean_iou")[i]) == pytest.approx(jaccard_score(true, guess, average="macro"))
    again = one.models.model("global").score(fl.Dataset.create((x, mask), task="binary"))
    assert 0.8 < again["dice[1]"] <= 1


def test_single_metrics_of_classes_come_from_any_number_of_workers() -> None:
    """A column of a chunk with one client has one number and any stride."""
    fed = fl.partitions.iid(clients=3)(fl.load("digits"), seed=0)
    options: Any = {"rounds": 1, "task": {"metrics": ["recall"]}, "engine": {"workers": 3, "clients_per_batch": 1}}
    assert fl.simulate("fedavg", fed, UNetOfDigits, **options).rounds == 1


class UNetOfDigits(nn.Module):
    """A network that is trained client by client."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("each", [False, True])
def test_a_strangers_lstm_takes_sequences_that_are_declared(each: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, STEPS, 3)).astype(np.float32)
    y = (x[:, :, 0].cumsum(1) > 0).astype(int)
    y = y if each else y[:, -1]
    np.savez(tmp_path / "s.npz", x=x, y=y, users=OWNERS)
    data = fl.Dataset.create((x, y), layout="sequence", clients=OWNERS)
    loaded = fl.load(tmp_path / "s.npz", layout="sequence")
    assert data.shape == loaded.shape == (STEPS, 3)
    assert torch.equal(data.y, loaded.y)
    net = LSTM(2, each)
    options: Any = {"rounds": 3, "local": {"lr": 0.02, "optimizer": "adam"}}
    one, two = (fl.simulate("fedavg", sites(data), net, engine={"workers": k}, **options) for k in (1, 2))
    assert torch.equal(one.models.rows("global"), two.models.rows("global"))
    module = one.models.module("global").eval()
    with torch.no_grad():
        guess = module(torch.from_numpy(x[:5])).argmax(-1)
    assert one.models.predict(x[:5]).astype(int).tolist() == guess.tolist()
    assert "accuracy" in one.models.model("global").score(data)


def test_what_cannot_be_is_a_sentence_with_a_way_on() -> None:
    x, mask = images()
    rows = np.zeros((SAMPLES, STEPS, 3), np.float32)
    with pytest.raises(DataError, match=r"y \(48, 4, 8\) does not fit images of x \(48, 1, 8, 8\). Masks are"):
        fl.Dataset.create((x, mask[:, :4]))
    with pytest.raises(ConfigError, match="unknown layout 'sequences'; did you mean 'sequence'"):
        fl.Dataset.create((rows, OWNERS), layout="sequences")
    with pytest.raises(DataError, match="needs x"):
        fl.Dataset.create((x[:, 0, 0], OWNERS), layout="sequence")
    fed = sites(fl.Dataset.create((x, mask), clients=OWNERS))
    with pytest.raises(Refused, match="these images have a label per pixel"):
        fl.simulate("fedavg", fed, UNet(2), rounds=1, augment={"flip": 0.5})
    with pytest.raises(ConfigError, match="returns one output per sample"):
        fl.simulate("fedavg", fed, "softmax", rounds=1)
    with pytest.raises(ConfigError, match="Use layout = 'sequence' for the data"):
        fl.simulate("fedavg", sites(fl.Dataset.create((rows, OWNERS % 2), clients=OWNERS)), LSTM(2), rounds=1)
