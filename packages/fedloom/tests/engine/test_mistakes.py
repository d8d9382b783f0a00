"""The mistakes of a first day in Python: each gets one sentence that names the cure, before any work."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedloom as fl
from fedloom.errors import FedloomError

RNG = np.random.default_rng(0)
CALLS = count()
X, Y = RNG.normal(size=(60, 6)).astype("float32"), np.arange(60) % 3
FED = fl.partitions.iid(clients=3)((X, Y), seed=0)
HOLES = np.where(X > 2, np.nan, X)
IMAGES = RNG.random((24, 8, 8, 3)).astype("float32")
LOADER = DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)))

OLD_TARGET = {"label": "ill"}
"""The target of a table by the first name of its option."""
FRAME = pd.DataFrame({"a": X[:, 0], "ill": Y % 2, "site": Y})


class Odd(nn.Linear):
    """A layer with something odd after it."""

    def __init__(self, odd: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(6, 3)
        self.odd = odd
        self.hidden = [nn.Linear(3, 3)] if odd is torch.sigmoid else [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(super().forward(x))


class Unseeded(fl.samplers.Uniform):
    """A sampler that draws other clients in each call."""

    def apply(self, state: Any, info: Any, ctx: Any) -> Any:
        return torch.tensor([next(CALLS) % 3]), None


class Restless(fl.partitions.Iid):
    """A partition that draws from its own generator."""

    def draw(self, pool: Any, seed: int) -> Any:
        return super().draw(pool, int(RNG.integers(10**6)))


class Numpy(fl.partitions.Iid):
    """A partition that draws from numpy's global generator."""

    def draw(self, pool: Any, seed: int) -> Any:
        return super().draw(pool, np.random.randint(10**6))  # noqa: NPY002


class Thrown(fl.algorithms.FedAvg):
    """A method whose server draws from torch's global generator before round 1."""

    def init(self, x0: Any, ctx: Any) -> Any:
        return super().init(x0 + torch.rand(()), ctx)


def noisy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that draws from its own generator."""
    return nn.functional.cross_entropy(outputs, y) * RNG.uniform(1, 2)


def luck(outputs: torch.Tensor, y: torch.Tensor) -> float:
    """A metric that draws from its own generator."""
    return float(RNG.random())


def run(method: Any = "fedavg", fed: Any = FED, **choices: Any) -> fl.simulate:
    return fl.simulate(method, fed, **{"rounds": 1, **choices})


def split(data: Any) -> fl.Federation:
    return fl.partitions.iid(clients=2)(data, seed=0)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "lr": (lambda: run(lr=0.1), "it belongs in local={'lr': 0.1}"),
    "learning rate of others": (lambda: run(learning_rate=0.1), "local={'lr': 0.1}"),
    "epochs": (lambda: run(epochs=2), "it belongs in local={'epochs': 2}"),
    "batch size": (lambda: run(batch_size=10), "it belongs in local={'batch_size': 10}"),
    "optimizer": (lambda: run(optimizer="adam"), "it belongs in local={'optimizer': 'adam'}"),
    "mu": (lambda: run("fedprox", mu=0.1), "Pass fl.algorithms.FedProx(mu=0.1)"),
    "lam": (lambda: run("ditto", lam=1.0), "Pass fl.algorithms.Ditto(lam=1.0)"),
    "an option of another method": (lambda: run(mu=0.1), "it is an option of other methods"),
    "fraction": (lambda: run(fraction=0.5), "it belongs in sampler={'fraction': 0.5}"),
    "device": (lambda: run(device="cuda"), "it belongs in engine={'device': 'cuda'}"),
    "loss": (lambda: run(loss=nn.CrossEntropyLoss()), "it belongs in task={'loss': CrossEntropyLoss()}"),
    "a loss that is no function": (lambda: run(task={"loss": 0}), "loss must be an import path"),
    "a loss of two numbers": (lambda: run(task={"loss": torch.tensor([1, 2])}), "loss must be an import path"),
    "seed as text": (lambda: run(seed="1"), "seed: input should be a valid integer, got '1'"),
    "seed of a split": (lambda: fl.partitions.iid(clients=2)((X, Y), seed=True), "seed must be a whole number"),
    "seeds": (lambda: run(seeds=[0, 1]), "several runs, use fl.compare("),
    "seed as a list": (lambda: run(seed=[0, 1, 2]), "several runs, use fl.compare("),
    "several methods": (lambda: run(["fedavg", "ditto"]), "several runs, use fl.compare("),
    "callback": (lambda: run(callback=[print]), "did you mean 'callbacks'?"),
    "checkpoint": (lambda: run(checkpoint="runs/a"), "did you mean 'folder'?"),
    "rounds of others": (lambda: run(num_rounds=3), "did you mean 'rounds'?"),
    "no round": (lambda: run(rounds=0), "rounds: input should be greater than or equal to 1, got 0"),
    "rounds as text": (lambda: run(rounds="10"), "rounds: input should be a valid integer, got '10'"),
    "negative rate": (lambda: run(local={"lr": -1}), "lr: input should be greater than 0, got -1"),
    "unknown method": (lambda: run("fedavgg"), "did you mean 'fedavg'?"),
    "federation first": (lambda: run(FED, "fedavg"), "the method must be the first argument: fl.simulate(method, fed)"),
    "arrays for a federation": (lambda: run(fed=(X, Y)), "Split the data among clients first, as in fl.partitions.iid"),
    "a name for a federation": (
        lambda: run(fed="digits"),
        "Split the data among clients first, as in fl.partitions.iid",
    ),
    "loaders": (
        lambda: run(fed=[LOADER, LOADER]),
        "client 0: DataLoader is not a known form of data; pass its .dataset",
    ),
    "two data sets": (lambda: split((LOADER.dataset, LOADER.dataset)), "y). Pass {'train': one, 'test': other}"),
    "two loaders": (lambda: split((LOADER, LOADER)), "y). Pass {'train': one, 'test': other}"),
    "the iterator of a loader": (lambda: split(iter(LOADER)), "such as the .dataset of a DataLoader"),
    "frames of clients": (lambda: run(fed=[FRAME, FRAME]), "with a column that names the client"),
    "the label of a table": (lambda: run(label="ill"), "pass fl.Dataset.create(data, target='ill')"),
    "target and label": (lambda: fl.Dataset.create(FRAME, "ill", **OLD_TARGET), "its name is now 'target'"),
    "a partition that has split": (
        lambda: fl.compare(["fedavg"], (X, Y), partition=FED),
        "that are already split. Pass it as the data",
    ),
    "the class of a partition": (
        lambda: fl.compare(["fedavg"], (X, Y), partition=fl.partitions.Iid),
        "class. Instantiate it with its options",
    ),
    "positions for a partition": (
        lambda: fl.compare(["fedavg"], (X, Y), partition=[range(30), range(30, 60)]),
        "pass a list of (x, y) as the data",
    ),
    "positions by client for a partition": (
        lambda: fl.compare(["fedavg"], (X, Y), partition={0: range(30), 1: range(30, 60)}),
        "the data. If you have lists of indices, pass (x[list], y[list])",
    ),
    "aggregator": (lambda: run(aggregator="krumm"), "did you mean 'krum'?"),
    "sampler as a number": (lambda: run(sampler=2), "sampler: must be a Sampler or a table, got 2"),
    "client_weights": (
        lambda: run(client_weights="size"),
        "should be 'samples', 'uniform' or 'groups', or a list, got 'size'",
    ),
    "no such device": (lambda: run(engine={"device": "cuda:9"}), "engine.device is 'cuda:9', but "),
    "metrics": (lambda: run(evaluate={"metrics": ["auroc"]}), "it belongs in task={'metrics': ['auroc']}"),
    "lazy module": (
        lambda: run(model=nn.LazyLinear(3)),
        "has lazy parameters (weight, bias). Call the model on a sample",
    ),
    "too few outputs": (lambda: run(model=nn.Linear(6, 2)), "must return [b, 3] for this data, got [2, 2]"),
    "squeezed outputs": (
        lambda: run(model=Odd(lambda x: x.squeeze())),
        "must return [1, 3] for a single sample, got [3]",
    ),
    "wrong inputs": (lambda: run(model=nn.Linear(5, 3)), "fails on samples of shape (6,)"),
    "a state dict": (
        lambda: run(model=nn.Linear(6, 3).state_dict()),
        "dict. Load the state dict into a module, and pass the module",
    ),
    "a file of weights": (
        lambda: run(model="net.pt"),
        "this file contains weights. Load them into a module, and pass the module",
    ),
    "channels last of a run": (lambda: run(channels_last=True), "pass fl.Dataset.create(data, channels_last=True)"),
    "a class for a module": (lambda: run(model=nn.Linear), "missing 2 required positional arguments"),
    "alpha": (lambda: fl.partitions.dirichlet(clients=3, alfa=0.1), "did you mean 'alpha'?"),
    "n_clients": (lambda: fl.partitions.iid(n_clients=3), "did you mean 'clients'?"),
    "alpha of 0": (lambda: fl.partitions.dirichlet(clients=3, alpha=0), "alpha: input should be greater than 0, got 0"),
    "too many clients": (
        lambda: fl.partitions.iid(clients=99)((X, Y), seed=0),
        "Use fewer clients or a smaller min_size",
    ),
    "one-hot": (lambda: split((X, np.eye(3)[Y])), "Pass y.argmax(1), or task = 'regression'"),
    "channels last": (lambda: split((IMAGES, Y[:24])), "last. Set channels_last = True or False"),
    "holes": (lambda: split((HOLES, Y)), "NaN or Inf in the features of "),
    "lengths": (lambda: split((X, Y[:-1])), "60 samples but 59 targets. Every sample needs one target"),
    "one feature": (lambda: split((X[:, 0], Y)), "For a single feature, pass x[:, None]"),
    "no file": (lambda: fl.load("my.csv"), "my.csv: no such file or folder. Check the path"),
    "an option of a method": (lambda: fl.algorithms.Ditto(mu=1), "Ditto: unknown key 'mu'; allowed: "),
    "a model that is not there": (lambda: run("local").final("global"), "this method: personal"),
    "a name for the laws": (lambda: fl.testing.check_algorithm("fedavg"), "must be a method such as fl.algorithms"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_a_sentence_that_names_the_cure(case: str) -> None:
    call, cure = MISTAKES[case]
    with pytest.raises(FedloomError) as refused:
        call()
    assert cure in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "cure"), [("simulat", "did you mean 'simulate'?"), ("FedAvg", "are in fl.algorithms")]
)
def test_a_name_that_is_elsewhere_is_shown_there(name: str, cure: str) -> None:
    with pytest.raises(AttributeError, match=cure):
        getattr(fl, name)


def test_whole_numbers_of_numpy_are_seeds_and_sizes() -> None:
    runs = [run(seed=seed, local={"batch_size": size}).table() for seed, size in ((3, 5), (np.int64(3), np.int32(5)))]
    assert runs[0].equals(runs[1])


def test_what_works_and_is_seldom_meant_has_a_note() -> None:
    assert "no sample of 1 of their 4 classes ('0')" in str(split((X, Y + 1)).notes)
    twice = nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1))
    assert "the model ends with a softmax" in str(run(model=twice).notes)
    assert "softmax" not in str(run(model=nn.Linear(6, 3)).notes)
    assert "softmax" not in str(run(model=twice, task={"loss": nn.functional.nll_loss}).notes)
    hidden = nn.Sequential(twice, nn.Flatten())  # as by torch.softmax in `forward`
    assert "the model ends with a softmax" in str(run(model=hidden, task={"metrics": ["macro_f1"]}).notes)
    assert "softmax" not in str(run(model=nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(-1))).notes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: run(task={"loss": noisy}), "noisy' returns different values in two identical calls"),
        (lambda: run(task={"metrics": [luck]}), "luck' returns different values in two identical calls"),
        (lambda: run(sampler=Unseeded(clients=1)), "sampler Unseeded draws different clients in two identical calls"),
        (lambda: run(Thrown()), "server code draws from a global generator"),
        (lambda: Restless(clients=3)((X, Y), seed=0), "partition Restless gives different results in two calls"),
        (lambda: run(model=Odd(lambda x: x.softmax(0))), "depend on the other samples in its batch"),
        (lambda: run(model=Odd(lambda x: x.flip(0))), "depend on the other samples in its batch"),
        (lambda: run(model=Odd(torch.sigmoid)), "in plain lists or dicts (hidden[0])"),
    ],
)
def test_code_whose_result_depends_on_what_it_should_not_has_a_note(make: Callable[[], Any], words: str) -> None:
    assert words in str(make().notes)


@pytest.mark.parametrize("odd", [lambda x: x * RNG.uniform(1, 2), lambda x: x * (1 + next(CALLS))])
def test_a_model_that_draws_or_counts_by_itself_mixes_no_samples(odd: Callable[[torch.Tensor], torch.Tensor]) -> None:
    notes = str(run(model=Odd(odd)).notes)
    assert "draws random numbers that do not depend on the seed" in notes
    assert "other samples in its batch" not in notes


def test_code_that_draws_from_global_generators_alone_is_seeded() -> None:
    assert run(model=Odd(torch.relu)).notes == []
    splits = [Numpy(clients=3)((X, Y), seed=0) for _ in range(2)]
    assert splits[0].notes == splits[1].notes == ()
    assert torch.equal(splits[0].parts["train"].index, splits[1].parts["train"].index)
