"""The sampler of FedProx's FEMNIST: classes in turn, log-normal sizes, disjoint users, or a refusal with numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.data import Dataset, partitions
from fedloom.errors import PartitionError


def letters(per_class: int, classes: int = 10) -> Dataset:
    y = torch.arange(classes).repeat(per_class)
    return Dataset("letters", torch.zeros(len(y), 1, dtype=torch.uint8), y, classes=tuple("abcdefghij"[:classes]))


def test_users_hold_three_classes_in_turn_evenly_and_share_no_sample() -> None:
    fed = partitions.femnist_fedprox(test=0, validation=0)(letters(4000), seed=1)
    counts = fed.class_counts().numpy()
    assert counts.shape == (200, 10)
    for i, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == {i % 10, (i + 1) % 10, (i + 2) % 10}
        assert len(set(row[row > 0])) == 1
        assert row.max() >= 2
    index = fed.parts["train"].index
    assert len(index.unique()) == len(index)


def test_sizes_are_log_normal() -> None:
    fed = partitions.femnist_fedprox(clients=2000, test=0, validation=0)(letters(40_000), seed=0)
    logs = np.log(fed.sizes("train").numpy() - 4.0)  # 5 are added, 1 is lost by rounding
    assert np.median(logs) == pytest.approx(4.0, abs=4 * 1.2533 / np.sqrt(2000))
    assert np.subtract(*np.quantile(logs, [0.75, 0.25])) == pytest.approx(1.349, abs=0.15)


def test_fixed_sizes_are_exact() -> None:
    fed = partitions.femnist_fedprox(clients=5, mean=2.0, std=0.0, test=0, validation=0)(letters(20), seed=0)
    assert fed.sizes("train").tolist() == [3 * int((np.exp(2) + 5) / 3)] * 5


def test_too_little_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        PartitionError, match=r"200 clients need \d+ samples, \d+ of them of class '.', but letters has only 100."
    ):
        partitions.femnist_fedprox()(letters(100), seed=0)
    with pytest.raises(PartitionError, match="labels_per_client = 3, but letters has 2 classes"):
        partitions.femnist_fedprox()(letters(100, classes=2), seed=0)
