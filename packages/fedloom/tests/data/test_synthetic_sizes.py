"""Sizes and test parts of the synthetic users: FedProx's, and pFedMe's five times as large."""

from __future__ import annotations

import torch

from fedloom.data import load


def test_pfedme_has_five_times_the_samples_and_a_quarter_for_test() -> None:
    plain = load("synthetic", clients=6, features=4)
    large = load("synthetic", clients=6, features=4, factor=5, test=0.25)
    sizes = torch.bincount(plain.users)
    assert (sizes >= 50).all()
    assert torch.equal(torch.bincount(large.users), 5 * sizes)
    for data, share in ((plain, 0.9), (large, 0.75)):
        held = torch.bincount(data.users)
        kept = (share * held).long()
        assert torch.equal(torch.bincount(data.users[data.test]), held - kept)
        ends = held.cumsum(0)
        assert all(set(range(e - t, e)) <= set(data.test.tolist()) for e, t in zip(ends, held - kept, strict=True))
