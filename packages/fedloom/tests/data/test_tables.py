from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.data import PARTITIONS, Dataset, load
from fedloom.data.tables import Table, TableColumn
from fedloom.errors import DataError, Refused

NAN = math.nan
TABLE = Table(
    columns=(TableColumn(name="a", flag=True), TableColumn(name="k", levels=3), TableColumn(name="r", scale=False)),
    min_observed=2,
)


def hospital(n: int = 40, seed: int = 0) -> Dataset:
    gen = torch.Generator().manual_seed(seed)
    x = torch.stack(
        [
            torch.randn(n, generator=gen, dtype=torch.float64) * 5 + 3,
            torch.randint(0, 3, (n,), generator=gen).double(),
            torch.rand(n, generator=gen, dtype=torch.float64),
        ],
        1,
    )
    x[::7, 0] = NAN
    x[::9, 1] = NAN
    users = torch.arange(n) % 2
    y = torch.randint(0, 2, (n,), generator=gen)
    return Dataset(
        "h", x, y, "binary", ("n", "y"), users=users, user_names=("one", "two"), prepare=TABLE, columns={}, levels={}
    )


def test_a_small_table_by_hand() -> None:
    x = torch.tensor([[1, 0, 9], [3, NAN, 8], [NAN, 2, 7], [100, 1, 6], [7, 0, 5]], dtype=torch.float64)
    owner = torch.tensor([0, 0, 0, 0, -1])
    train = torch.tensor([True, True, True, False, False])
    got = TABLE(x, owner, train)
    std = math.sqrt(((1 - 5 / 3) ** 2 * 2 + (3 - 5 / 3) ** 2) / 3)  # median of 1, 3 is 1 (the lower one)
    a = [(v - 5 / 3) / std for v in (1, 3, 1, 100)]
    expected = [
        [a[0], 0, 1, 0, 0, 9],
        [a[1], 0, 1, 0, 0, 8],  # the most frequent training level, ties to the lower
        [a[2], 1, 0, 0, 1, 7],
        [a[3], 0, 0, 1, 0, 6],
        [NAN] * 6,  # belongs to no client
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


def test_a_column_hardly_observed_is_zero_and_flagged() -> None:
    x = torch.tensor([[1.0, 0, 0], [NAN, 1, 0], [5.0, 2, 0]], dtype=torch.float64)
    got = TABLE(x, torch.zeros(3, dtype=torch.int64), torch.tensor([True, True, False]))
    assert got[:, :2].tolist() == [[0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize("part", ["validation", "test"])
def test_nothing_but_a_clients_own_training_part_matters(part: str) -> None:
    data = hospital()
    partition = PARTITIONS["natural"](validation=0.2)
    before = partition(data, 1)
    spoiled = data.x.clone()
    spoiled[before.indices(part, 0), 0] = 1e6
    spoiled[before.parts["train"].index[before.owner("train") == 1], 0] += 1e5
    after = partition(replace(data, x=spoiled), 1)
    assert torch.equal(before.parts["train"].index, after.parts["train"].index)
    own = before.indices("train", 0)
    assert torch.equal(before.data.x[own], after.data.x[own])


def test_the_federation_is_finite_and_the_raw_data_is_not() -> None:
    data = hospital()
    assert data.x.isnan().any()
    fed = PARTITIONS["iid"](clients=4)(data, 0)
    assert fed.data.x.isfinite().all()
    assert fed.data.prepare is None
    assert fed.data.shape == (TABLE.width,)
    assert torch.equal(data.x.isnan(), hospital().x.isnan())


def test_a_common_test_set_is_scaled_as_a_new_client_is() -> None:
    """Identity: its rows are what the medians of the clients' statistics make of them; other scalings have none."""
    data = replace(hospital(), test=torch.arange(5))
    fed = PARTITIONS["iid"](clients=3)(data, 0)
    new = TABLE.encoder(TABLE.typical(fed.data.fitted.values))(data.x[:5])
    assert torch.equal(fed.fetch(fed.test), new)
    assert fed.data.x.isfinite().all()
    assert PARTITIONS["iid"](clients=3, pool=True)(data, 0).test is None
    with pytest.raises(Refused, match="cannot be scaled. Set pool = true"):
        PARTITIONS["iid"](clients=3)(replace(data, prepare=lambda x, owner, train: TABLE(x, owner, train)), 0)
    with pytest.raises(DataError, match="3 columns"):
        TABLE(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool))


HEART = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"


def hearts(folder: Path, **rows: str) -> Path:
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        (folder / f"processed.{name}.data").write_text(rows.get(name, HEART * 6))
    return folder


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            HEART.replace("1.0,1.0,145", "1.0,7.0,145"),
            "row 1, column 'cp': unknown level '7.0'; the schema has 1, 2, 3, 4",
        ),
        (HEART.replace(",6.0,0", ",6.0,5"), "row 1, column 'num': unknown label '5'"),
        (HEART.replace("233.0", "high"), "row 1, column 'chol': expected a finite number, got 'high'"),
        (HEART[:30] + "\n", "cells, expected 14"),
    ],
)
def test_a_spoiled_heart_file_is_refused(row: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        load(hearts(tmp_path, va=row))


def test_heart_zeros_are_missing_and_all_hospitals_are_needed(tmp_path: Path) -> None:
    data = load(hearts(tmp_path, va=HEART.replace("145.0,233.0", "0,0")))
    assert data.x[-1].isnan().tolist() == [i in (3, 4) for i in range(13)]
    (tmp_path / "processed.va.data").unlink()
    with pytest.raises(DataError, match=r"lacks processed\.va\.data"):
        load(tmp_path)


def test_a_spoiled_adult_file_is_refused(tmp_path: Path) -> None:
    row = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
        "United-States, <=50K\n"
    )
    file = tmp_path / "adult.data"
    file.write_text(row)
    assert load(tmp_path).y.tolist() == [0]
    for old, new, words in (
        ("State-gov", "Nobody", "column 'workclass': unknown level 'Nobody'"),
        ("<=50K", "a lot", "unknown label 'a lot'"),
        (", 40", "", "14 cells, expected 15"),
    ):
        file.write_text(row.replace(old, new))
        with pytest.raises(DataError, match=words):
            load(tmp_path)
