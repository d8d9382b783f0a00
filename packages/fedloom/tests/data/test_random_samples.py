"""Data sets whose samples are random: read anew in every step, or refused, and cured as the error says."""

# ruff: noqa: NPY002, TID251  (the global generators, as the code of users has them)

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

import fedloom as fl
from fedloom.data import Dataset, partitions
from fedloom.data.sources.rereading import REREAD_NOTE
from fedloom.errors import DataError
from tests.cures import applied
from tests.data.test_memory import HubSplit, HubTable, Pairs, X, Y


def noisy(i: int) -> Any:
    return (torch.from_numpy(X[i]) + torch.randint(0, 3, X[i].shape)).to(torch.uint8), int(Y[i])


def crop(i: int) -> Any:
    left = random.randrange(3)
    return X[i][:, left : left + 3], int(Y[i])


OWN = np.random.default_rng(3)
REREAD: dict[str, Any] = {
    "noise that keeps the type": Pairs(noisy),
    "a crop by Python's generator": Pairs(crop),
    "noise of numpy's global generator": Pairs(lambda i: (X[i] + np.random.normal(size=X[i].shape), Y[i])),
    "a flip of one in twenty": Pairs(lambda i: (X[i][::-1].copy() if torch.rand(()) < 0.05 else X[i], Y[i])),
    "pictures": Pairs(lambda i: (Image.fromarray(X[i]).rotate(random.randrange(360)), Y[i])),
    "dictionaries": Pairs(lambda i: {"image": noisy(i)[0], "label": Y[i]}),
    "a part of one": torch.utils.data.Subset(Pairs(noisy), range(9)),
    "several": torch.utils.data.ConcatDataset([Pairs(lambda i: (torch.from_numpy(X[i]), int(Y[i]))), Pairs(noisy)]),
}
REDRAWN: dict[str, Any] = {
    "noise of a generator of its own": Pairs(lambda i: (X[i] + OWN.normal(size=X[i].shape), Y[i])),
    "a target at random": Pairs(lambda i: (X[i], random.randrange(3))),
    "a flip of one in ten, of its own": Pairs(lambda i: (X[i][::-1].copy() if OWN.random() < 0.1 else X[i], Y[i])),
}


@pytest.mark.parametrize("case", REREAD)
def test_random_samples_act_in_every_step_and_are_the_same_in_every_run(case: str) -> None:
    d = REREAD[case]

    def run(state: int, data: Any = None, **engine: int) -> torch.Tensor:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(state)
        fed = partitions.iid(clients=3, test=0.25)(Dataset.create(d if data is None else data), seed=0)
        assert (REREAD_NOTE in fed.remarks) is (data is None)
        local = {"lr": 0.01, "batch_size": 2, "epochs": 8}
        return fl.simulate("fedavg", fed, "softmax", rounds=2, local=local, engine=engine).models.rows("global")

    known = run(1)
    assert torch.equal(known, run(2)), "the state of the global generators decides nothing"
    assert torch.equal(known, run(3, workers=2))
    data = Dataset.create(d)
    frozen = [(x.numpy(), y) for x, y in zip(data.x, data.y.tolist(), strict=True)]
    assert not torch.equal(known, run(1, frozen))


def test_clients_have_random_samples_and_steady_test_sets() -> None:
    read = [0]

    def give(i: int) -> Any:
        read[0] += 1
        return noisy(i)

    steady = Pairs(lambda i: (torch.from_numpy(X[i]), int(Y[i])))
    fed = fl.Federation.create({"north": (Pairs(give), steady), "south": (steady, steady)})
    at, count = (fed.data.x == 0).sum(), read[0]
    for rng in (torch.Generator().manual_seed(k) for k in (1, 1, 2)):
        for client in (0, 1):
            index = fed.indices("train", client)
            anew = fed.fetch_anew(index, rng)
            assert torch.equal(anew, fed.fetch(index)) is (client == 1)
        assert torch.equal(fed.fetch_anew(fed.indices("test", 0), rng), fed.fetch(fed.indices("test", 0)))
    assert read[0] == count + 3 * len(fed.indices("train", 0)), "only the north's training samples are read again"
    one, two = (fed.fetch_anew(fed.indices("train", 0), torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert (fed.data.x == 0).sum() == at, "the stored samples stay"


def test_random_samples_are_refused_where_stored_samples_change() -> None:
    data = Dataset.create(Pairs(noisy))
    moved = {"attack": {"kind": "backdoor", "target": 0}}
    with pytest.raises(DataError, match="so a backdoor cannot use them"):
        fl.simulate("fedavg", partitions.iid(clients=3)(data, seed=0), "softmax", rounds=1, **moved)
    result = fl.simulate("fedavg", partitions.iid(clients=3)(data, seed=0), "softmax", rounds=1)
    with pytest.raises(DataError, match="so a trained model cannot use them"):
        result.models.model("global").recipe.facts.take(data)
    with pytest.raises(DataError, match="NaN or Inf in the features"):
        Dataset.create(Pairs(lambda i: (np.where(X[i] > 9, np.nan, np.random.random(X[i].shape)), Y[i])))


@pytest.mark.parametrize("case", REDRAWN)
def test_a_data_set_of_random_samples_is_refused_with_two_cures_that_work(case: str) -> None:
    """No stream decides these samples, or the target changes."""
    d = REDRAWN[case]
    for make in (Dataset.create, partitions.iid(clients=2), lambda d: fl.Federation.create([d, d])):
        with pytest.raises(
            DataError, match=r"sample \d+ differs when it is read again|but do not use the global"
        ) as error:
            make(d)
    said = str(error.value)
    frozen = said.split(", pass ")[-1]
    if case != "a target at random":
        assert len(Dataset.create(applied(frozen, d=d))) == len(d)
    augment = applied(f"dict({said.split('to the run, as ')[1].split('. Or')[0]})")
    fed = partitions.iid(clients=2)((X, Y), seed=0)
    plain, changed = (fl.simulate("fedavg", fed, "softmax", rounds=2, **more) for more in ({}, augment))
    assert not torch.equal(plain.models.rows("global"), changed.models.rows("global"))


def test_rows_of_the_hub_under_a_random_transform_are_refused() -> None:
    class Moving(HubSplit):
        def __iter__(self) -> Iterator[Any]:
            return (self[k] for k in range(len(self)))

        def __getitem__(self, k: Any) -> Any:
            return {**super().__getitem__(k), "image": noisy(k)[0]}

    d = Moving({"image": image, "label": int(label)} for image, label in zip(X, Y, strict=True))
    with pytest.raises(DataError, match="sample 0 differs when it is read again.*augment=") as error:
        Dataset.create(d)
    frozen = applied(str(error.value).split(", pass ")[-1], d=d)
    assert Dataset.create(frozen).shape == (1, 4, 5)


def test_a_stream_is_refused_where_its_samples_are_new_and_not_where_its_order_is() -> None:
    class Flow(IterableDataset[Any]):
        def __init__(self, give: Callable[[], Iterator[Any]]) -> None:
            self._give = give

        def __iter__(self) -> Iterator[Any]:
            return self._give()

    pairs = list(zip(X, Y.tolist(), strict=True))
    for steady in (lambda: iter(pairs), lambda: iter(random.sample(pairs, 12)), iter(pairs).__iter__):
        assert len(Dataset.create(Flow(steady))) == 12
    drawn = Flow(lambda: ((torch.rand(3), k) for k in Y))
    with pytest.raises(DataError, match=r"a sample differs .* of the data set d, pass list\(d\)"):
        Dataset.create(drawn)
    assert len(Dataset.create(list(drawn))) == 12


def test_reading_twice_leaves_the_generators_as_reading_once_does() -> None:
    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    def draws_in_vain(i: int) -> Any:
        random.random()
        np.random.random()
        torch.rand(())
        return torch.from_numpy(X[i]), int(Y[i])

    before = states()
    Dataset.create(Pairs(lambda i: (torch.from_numpy(X[i]), int(Y[i]))))
    assert states() == before, "samples that draw nothing"
    for i in range(12):
        draws_in_vain(i)
    once = states()
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    random.setstate(before[1])
    np.random.set_state(("MT19937", before[2], *np.random.get_state()[2:]))
    position = np.random.get_state()[2]
    Dataset.create(Pairs(draws_in_vain))
    assert states()[:2] == once[:2]
    assert np.random.get_state()[2] != position, "what the first reading drew was drawn"


def test_steady_samples_are_read_a_few_times_more() -> None:
    """Gaps are equal to gaps, and a data set that sets its own seed is steady."""
    count = [0]

    def give(i: int) -> Any:
        count[0] += 1
        return torch.from_numpy(X[i % 12]), int(Y[i % 12])

    class Many(Pairs):
        def __len__(self) -> int:
            return 5000

    assert len(Dataset.create(Many(give))) == 5000
    assert 5000 < count[0] <= 5000 + 64

    def seeded(i: int) -> Any:
        torch.manual_seed(i)
        return torch.rand(3), int(Y[i])

    state = torch.get_rng_state()
    assert len(Dataset.create(Pairs(seeded))) == 12
    torch.set_rng_state(state)
    with pytest.raises(DataError, match="NaN or Inf in the features of 12 samples"):
        Dataset.create(Pairs(lambda i: (np.full(3, np.nan), int(Y[i]))))


def test_a_table_of_the_hub_under_a_random_transform_is_refused() -> None:
    class Table(HubTable):
        def __getitem__(self, k: Any) -> Any:
            rows = super().__getitem__(k)
            return {**rows, "age": rows["age"] + random.random()} if isinstance(k, int) else rows

    with pytest.raises(DataError, match="sample 0 differs when it is read again.*Remove the random change from"):
        Dataset.create(Table({"age": 30.0 + k, "ward": k % 2, "label": k // 2 % 2} for k in range(4)))
