"""Clients that come with their samples, in the forms that other libraries have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedloom as fl
from fedloom.errors import FedloomError


def samples(n: int, shift: float, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(seed).normal(size=(n, 5)).astype(np.float32)
    return x, (x[:, 0] + shift > 0).astype(np.int64) + (x[:, 1] > 1)


CLIENTS = [(samples(20 + k, k / 9, k), samples(7 + k % 3, k / 9, 100 + k)) for k in range(12)]


def as_sets(side: Any) -> TensorDataset:
    return TensorDataset(*map(torch.from_numpy, side))


@pytest.mark.parametrize(
    "clients",
    [
        CLIENTS,
        tuple(CLIENTS),
        [{"train": train, "test": test} for train, test in CLIENTS],
        [(as_sets(train), as_sets(test)) for train, test in CLIENTS],
        [({"x": train[0], "y": train[1]}, {"x": test[0], "y": test[1]}) for train, test in CLIENTS],
    ],
)
def test_every_client_has_its_own_samples(clients: Any) -> None:
    fed = fl.Federation.create(clients, validation=0.0)
    assert fed.names == tuple(map(str, range(12)))
    for i, sides in enumerate(CLIENTS):
        for part, (x, y) in zip(("train", "test"), sides, strict=True):
            index = fed.indices(part, i)
            order = np.lexsort(x.T), np.lexsort(fed.fetch(index).numpy().T)
            np.testing.assert_allclose(fed.fetch(index).numpy()[order[1]], x[order[0]], rtol=1e-6)
            assert fed.data.y[index].numpy()[order[1]].tolist() == y[order[0]].tolist()


def test_simulate_takes_clients_as_they_are() -> None:
    named = {f"site {k}": client for k, client in enumerate(CLIENTS)}
    one, two = (fl.simulate("fedavg", clients, rounds=2) for clients in (CLIENTS, named))
    assert one.final("global", "accuracy").tolist() == two.final("global", "accuracy").tolist()
    assert fl.Federation.create(named).names == tuple(named)


def test_clients_by_number_are_named_by_text() -> None:
    fed = fl.Federation.create({7: (X, Y), 3: (X, Y)})
    assert fed.names == ("7", "3")
    assert "fedavg" in str(fl.compare(["fedavg"], {7: (X, Y), 3: (X, Y)}, rounds=1, seeds=[0]))


def test_parts_are_cut_from_one_set() -> None:
    fed = fl.Federation.create([train for train, _ in CLIENTS], test=0.25, validation=0.0)
    assert fed.sizes("test").tolist() == [round(0.25 * (20 + k)) for k in range(12)]
    assert (fed.sizes("train") + fed.sizes("test")).tolist() == [20 + k for k in range(12)]


X, Y = samples(20, 0, 0)


class Named(TensorDataset):
    """A data set whose folder named its classes."""

    def __init__(self, *classes: str) -> None:
        super().__init__(torch.from_numpy(X), torch.from_numpy(Y))
        self.classes = classes


def test_clients_keep_the_names_of_their_classes() -> None:
    """The numbers of a set with fewer classes mean the same; a set without names takes them."""
    clients = [Named("cat", "dog", "eel"), Named("cat", "dog", "eel", "fox"), (X, Y)]
    assert fl.Federation.create(clients).data.classes == ("cat", "dog", "eel", "fox")
    assert fl.Federation.create(clients, classes=["a", "b", "c"]).data.classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("clients", "notes"),
    [
        (
            [{"x": X, "y": Y, "weight": Y, "names": ["a"]}] * 2,
            ["fedloom reads 'x' and 'y' of the dictionary, and ignores 'weight'"],
        ),
        ([((X, Y), (X, Y))] * 2, []),
        ([{"x": X, "y": Y, "names": ["a"]}] * 2, []),
        ([(X, Y), (X[:0], Y[:0]), (X, Y)], ["1 of 3 clients have no samples and are omitted: 1"]),
    ],
)
def test_what_a_reader_may_not_expect_is_noted(clients: Any, notes: list[str]) -> None:
    result = fl.simulate("fedavg", clients, rounds=1)
    assert [note for note in result.notes if note.startswith("data: clients: ")] == [
        f"data: clients: {note}" for note in notes
    ]


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([], "contains no clients"),
        ([CLIENTS[0], CLIENTS[1][0]], r"\['1'\] have no test set, but other clients have one. Pass a test set for"),
        ([CLIENTS[0], (samples(5, 0, 0), (np.zeros((2, 4)), [0, 1]))], r"client 1 has samples of shape \[4\]"),
        ([1, 2], "client 0: int is not a known form of data"),
        ({1: (X, Y), "1": (X, Y)}, "two clients have the same name as text, such as 1 and '1'. Rename one"),
        ([(X, Y), (X[:9], Y[:8]), (X[:8], Y[:9])], "client 1: 9 samples but 8 targets"),
        (
            [(X, Y), (X.astype(np.uint8), Y)],
            "client 1: features are bytes, .* but the features of client 0 are float32",
        ),
        (
            [(X, Y), (X, Y.astype(str))],
            "client 1: targets are text, but targets of client 0 are numbers. Use the same type",
        ),
        ([((X, Y), (X.astype(np.uint8), Y))] * 2, "client 0, test set: features are bytes"),
        (
            [(X, Y), (np.where(np.arange(100).reshape(20, 5) == 11, np.inf, X), Y)],
            "client 1: NaN or Inf in the features of 1 sample .first: sample 2",
        ),
        ([(X, Y), [(X[:8], Y[:8]), (X[8:], Y[8:])] * 2], "client 1 is a list of 4 batches. Pass the data set"),
        ([list(DataLoader(as_sets((X, Y)), 5))] * 2, "client 0 is a list of 4 batches"),
        (
            [(pd.DataFrame(X), Y), (pd.DataFrame(X)[[4, 3, 2, 1, 0]], Y)],
            "client 1: columns are 4, 3, 2, 1, 0, but for",
        ),
        (
            [Named("cat", "dog", "eel"), Named("bird", "cat", "dog")],
            "client 1: classes are bird, cat, dog, but for",
        ),
        ([{"train": Named("cat", "dog"), "test": Named("dog", "cat")}], "client 0, test set: classes are dog, cat"),
        ([{"x": X, "y": Y, "x_test": X, "y_test": Y}], "client 0: fedloom would ignore 'x_test' beside 'x' and 'y'"),
        ([[(X, Y), (X, Y)]] * 2, r"client 0 is a list of two sets, .*. Pass the tuple \(training set, test set\), or"),
        ([[as_sets((X, Y)), as_sets((X, Y))]] * 2, "client 0 is a list of two sets"),
        ([[X, Y], [X, Y]], "client 0: a list contains samples, but"),
        ([([X, Y], (X, Y))] * 2, "client 0: a list contains samples"),
        (
            [X, Y],
            (
                r"targets. Pass a tuple \(x, y\) for each client. To split one data set among clients, use a "
                r"partition"
            ),
        ),
        ({"a": X, "b": Y}, "a list contains clients, but these are arrays without targets. Pass a"),
    ],
)
def test_clients_that_cannot_be(clients: Any, sentence: str) -> None:
    with pytest.raises(FedloomError, match=sentence):
        fl.simulate("fedavg", clients, rounds=1)


def test_a_list_is_samples_or_clients_whatever_its_length() -> None:
    """Two were a pair before, and three were not."""
    assert fl.Federation.create(CLIENTS[:2]).n == 2
    for count in (2, 3):
        some = [(x, int(y)) for x, y in zip(X[:count], (0, 1, 1), strict=False)]
        as_tensors = [(torch.from_numpy(x), torch.tensor(y)) for x, y in some]
        for client in (some, as_tensors, [{"x": x, "y": y} for x, y in some]):
            fed = fl.Federation.create([client, (X, Y % 2)], test=0.0, validation=0.0)
            assert fed.sizes().tolist() == [count, 20]
    for pair in ((X, Y), (CLIENTS[0][0], CLIENTS[1][0])):
        with pytest.raises(
            FedloomError,
            match=r"a tuple of two elements is either one data set \(x, y\), .* For several clients, pass a list",
        ):
            fl.Federation.create(pair)


def test_clients_are_no_samples() -> None:
    with pytest.raises(FedloomError, match="look like the data of clients. Pass them to fl.Federation.create"):
        fl.Dataset.create([samples(9, 0, 0), samples(5, 0, 1)])
    with pytest.raises(FedloomError, match="or pass a list of clients"):
        fl.simulate("fedavg", samples(9, 0, 0), rounds=1)  # type: ignore[arg-type]


def test_an_empty_class_is_noted() -> None:
    x, y = samples(60, 0, 0)
    [note] = [n for n in fl.partitions.iid(clients=3)((x, y + 1), 0).notes if "no sample of" in n]
    assert "1 of their 4 classes ('0')" in note
    assert not [n for n in fl.partitions.iid(clients=3)((x, y), 0).notes if "no sample of" in n]
