from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import Dataset, Federation, Split, plan_batches
from fedloom.data.order import matches_torch, plan_many_batches
from fedloom.errors import ConfigError, DataError, PartitionError
from fedloom.local.batches import MIN_COMPILED_CLIENTS, make_plan
from fedloom.seeds import generator


def images(n: int = 12, channels: int = 1, **fields: object) -> Dataset:
    gen = torch.Generator().manual_seed(n)
    x = torch.randint(0, 256, (n, channels, 4, 5), dtype=torch.uint8, generator=gen)
    return Dataset("toy", x, torch.arange(n) % 3, classes=("a", "b", "c"), **fields)  # type: ignore[arg-type]


def federation(data: Dataset, sizes: list[int]) -> Federation:
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    none = Split(torch.empty(0, dtype=torch.int64), torch.zeros(len(sizes) + 1, dtype=torch.int64))
    train = Split(torch.arange(sum(sizes)), offsets)
    names = tuple(str(i) for i in range(len(sizes)))
    return Federation(data, {"train": train, "validation": none, "test": none}, names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": torch.zeros(11, dtype=torch.int64)}, "12 samples but 11 targets"),
        ({"y": torch.full((12,), 3)}, "from 0 to 2, got 3 to 3"),
        ({"y": torch.full((12,), -1)}, "got -1 to -1"),
        ({"x": torch.zeros(12, 2, dtype=torch.int32)}, "uint8 or float"),
        ({"x": torch.zeros(12, 2).index_fill_(0, torch.tensor([7]), math.nan)}, "first: sample 7"),
        ({"x": torch.zeros(12, 2).index_fill_(0, torch.tensor([4]), math.inf)}, "first: sample 4"),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0, dtype=torch.int64)}, "no samples"),
        ({"std": torch.zeros(1)}, "std must be > 0"),
        ({"mean": torch.zeros(2)}, "1 or 1 value"),
        ({"test": torch.tensor([12])}, "test set must be from 0 to 11"),
        ({"users": torch.arange(12), "user_names": ("one",)}, "users must be from 0 to 0"),
        ({"columns": {"w": torch.zeros(3, dtype=torch.int64)}, "levels": {"w": ("l",)}}, "3 codes for 12"),
        ({"task": "binary"}, "2 classes"),
        ({"task": "regression"}, "float"),
    ],
)
def test_bad_data_is_refused_with_place_and_value(change: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        replace(images(), **change)


def test_a_large_finite_array_is_not_mistaken_for_infinite() -> None:
    x = torch.full((12, 2), torch.finfo(torch.float32).max)
    assert len(replace(images(), x=x)) == 12


def test_checksum_depends_on_every_value_type_and_shape() -> None:
    data = images()
    other = data.x.clone()
    other[3, 0, 1, 1] ^= 1
    changed = [replace(data, x=other), replace(data, x=data.x.view(12, 1, 5, 4)), replace(data, y=data.y.flip(0))]
    assert len({data.checksum(), *(d.checksum() for d in changed)}) == 4
    assert replace(data, name="other").checksum() == data.checksum()


def test_describe_counts_classes() -> None:
    facts = images(10).describe()
    assert facts["classes"] == {"a": 4, "b": 3, "c": 3}
    assert facts["shape"] == (1, 4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [(1, None, None), (1, [0.2], [0.3]), (3, [0.5], [0.4]), (3, [0.1, 0.2, 0.3], [1, 2, 3])],
)
def test_fetch_is_the_plain_formula(
    channels: int, mean: list[float] | None, std: list[float] | None, dtype: torch.dtype
) -> None:
    tensors = {
        k: None if v is None else torch.tensor(v, dtype=torch.float64) for k, v in (("mean", mean), ("std", std))
    }
    data = images(12, channels, **tensors)
    index = torch.tensor([[0, 5, 5], [11, 3, 0]])
    got = federation(data, [12]).to(dtype=dtype).fetch(index)
    m = torch.tensor(mean or [0.0], dtype=torch.float64).view(-1, 1, 1)
    s = torch.tensor(std or [1.0], dtype=torch.float64).view(-1, 1, 1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), (data.x[index].double() / 255 - m) / s, rtol=1e-5, atol=1e-6)


def test_fetch_of_floats_copies_and_leaves_the_data_alone() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    data = Dataset("toy", x, torch.zeros(6, 1), "regression")
    fed = federation(data, [6])
    got = fed.fetch(torch.arange(6))
    got.add_(1)
    torch.testing.assert_close(fed.fetch(torch.arange(6)), x)
    assert fed.to(dtype=torch.float64).targets(torch.tensor([[0, 1]])).shape == (1, 2, 1)
    assert fed.to(dtype=torch.float64).targets(torch.tensor([0])).dtype == torch.float64


def test_sizes_indices_counts_and_pooling_agree() -> None:
    fed = federation(images(12), [2, 7, 3])
    assert fed.sizes("train").tolist() == [2, 7, 3]
    assert fed.indices("train", 1).tolist() == list(range(2, 9))
    assert fed.class_counts().sum(1).tolist() == [2, 7, 3]
    pooled = fed.pooled()
    assert pooled.n == 1
    assert pooled.class_counts().tolist() == [fed.class_counts().sum(0).tolist()]
    assert pooled.sizes("test").tolist() == [0]


def test_skew_of_known_distributions() -> None:
    data = replace(images(4), y=torch.tensor([0, 0, 1, 1]))
    skew = federation(data, [2, 2]).skew()
    assert skew["emd"] == pytest.approx([1.0, 1.0])  # |1 - 1/2| + |0 - 1/2|
    assert skew["effective_classes"] == pytest.approx([1.0, 1.0])
    # JS of (1, 0) and (1/2, 1/2): H(3/4, 1/4) - 1/2 bits
    expected = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)) - 0.5
    assert skew["js"] == pytest.approx([expected, expected], abs=1e-6)
    alike = replace(images(4), y=torch.tensor([0, 1, 0, 1]))
    assert federation(alike, [2, 2]).skew()["js"] == pytest.approx([0, 0], abs=1e-9)


def test_a_federation_refuses_what_does_not_fit() -> None:
    data = images(12)
    with pytest.raises(PartitionError, match="clients \\[1\\] have no training sample"):
        federation(data, [3, 0])
    with pytest.raises(PartitionError, match="no clients"):
        federation(data, [])
    with pytest.raises(DataError, match="from 0 to 11"):
        federation(data, [13])
    fed = federation(data, [12])
    with pytest.raises(ConfigError, match="unknown part 'tran'; did you mean 'train'"):
        fed.sizes("tran")
    with pytest.raises(DataError, match="offsets"):
        replace(fed, names=("a", "b"))


@given(size=st.integers(1, 40), batch=st.integers(1, 50), steps=st.integers(0, 30), seed=st.integers(0, 5))
def test_every_epoch_takes_every_sample_once_and_more_steps_change_nothing(
    size: int, batch: int, steps: int, seed: int
) -> None:
    got = plan_batches(size, batch, steps, torch.Generator().manual_seed(seed))
    assert got.shape == (steps, batch)
    per_epoch = math.ceil(size / batch)
    for epoch in range(steps // per_epoch):
        taken = got[epoch * per_epoch : (epoch + 1) * per_epoch].flatten()
        assert sorted(taken[taken >= 0].tolist()) == list(range(size))
    assert (got >= 0).sum(1).tolist() == [
        min(batch, size - (step % per_epoch) * batch) for step in range(steps)
    ]  # only the last batch of an epoch is short
    longer = plan_batches(size, batch, steps + 7, torch.Generator().manual_seed(seed))
    assert torch.equal(longer[:steps], got)


@pytest.mark.parametrize("clients", [3, MIN_COMPILED_CLIENTS])
def test_a_batch_larger_than_every_client_takes_no_more_room_than_the_largest(clients: int) -> None:
    ids, sizes = torch.arange(clients), torch.arange(clients) + 7
    largest = int(sizes.max())
    of_size = [
        make_plan(ids, sizes, sizes, batch, 1, 1, "local", lambda _, position: position).position
        for batch in (largest, largest + 5, 10**15)
    ]
    for position in of_size:
        assert position.shape == (largest, clients, largest)
        assert torch.equal(position, of_size[0])
    alone = [
        plan_batches(size, largest + 5, size, generator(1, 1, i, "local")) for i, size in enumerate(sizes.tolist())
    ]
    for i, position in enumerate(alone):
        assert torch.equal(of_size[0][: len(position), i], position[:, :largest])


def test_orders_of_another_pytorch_are_drawn_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches_torch()
    sizes = torch.full((MIN_COMPILED_CLIENTS,), 9)
    arguments = (torch.arange(MIN_COMPILED_CLIENTS), sizes, sizes, 4, 1, 1, "local", lambda _, position: position)
    compiled = make_plan(*arguments).position
    with monkeypatch.context() as patch:
        patch.setattr("fedloom.local.batches.plan_many_batches", lambda *_: pytest.fail("drawn by the loop"))
        patch.setattr("fedloom.local.batches.matches_torch", lambda: False)
        assert torch.equal(make_plan(*arguments).position, compiled)
    matches_torch.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randperm", lambda size, **_: torch.arange(size))
        assert not matches_torch()
    matches_torch.cache_clear()


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    batch=st.integers(1, 60),
    steps=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    seed=st.integers(0, 2**40),
)
def test_batches_of_many_clients_are_those_of_each(sizes: list[int], batch: int, steps: list[int], seed: int) -> None:
    """The compiled loop draws what `torch.randperm` draws, beyond the first words of a state too."""
    m, clients = len(sizes), [3 + 1000 * c for c in range(len(sizes))]
    got = plan_many_batches(torch.tensor(sizes), batch, torch.tensor(steps[:m]), seed, 7, clients, ("local", 1))
    assert got.shape == (max(steps[:m]), m, min(batch, max(sizes)))
    for c, (size, count) in enumerate(zip(sizes, steps, strict=False)):
        alone = plan_batches(size, batch, count, generator(seed, 7, clients[c], ("local", 1)))
        width = got.shape[2]
        assert torch.equal(got[:count, c], alone[:, :width])
        assert bool((got[count:, c] == -1).all())
        assert bool((alone[:, width:] == -1).all())


def test_epochs_differ_and_the_full_batch_is_in_order() -> None:
    got = plan_batches(30, 30, 2, torch.Generator().manual_seed(0))
    assert not torch.equal(got[0], got[1])
    assert plan_batches(3, None, 2, torch.Generator()).tolist() == [[0, 1, 2], [0, 1, 2]]
