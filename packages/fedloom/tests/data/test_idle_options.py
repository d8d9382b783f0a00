"""Two options of a partition, set together: each changes the federation, is refused, or is noted as without effect."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data.partitions import PARTITIONS
from fedloom.errors import FedloomError

GIVEN: dict[str, list[Any]] = {
    "test": [0.4, 0.0], "validation": [0.3], "test_from": ["ratio", "clients"], "test_count": [7], "folds": [3],
    "max_train_per_client": [6], "min_size": [11], "pool": [True], "clients": [3], "per_client": [2],
    "shuffle": [False], "alpha": [3.0], "overlap": [True], "labels_per_client": [1], "assignment": ["mcmahan", "flame"],
    "by": ["client", "prior"], "balanced": [True], "size_std": [0.8], "mean": [2.0], "std": [0.3], "extra": [9],
    "ratio": [0.25], "first_partition": [{"kind": "iid"}], "second_partition": [{"kind": "iid"}], "groups": [3],
    "turns": [2], "inverted": [True], "sigma": [0.5], "sigma_unit": ["std"], "noise_draws": ["per-batch"],
    "classes": [(1, 3)], "sizes": [(1, 2)], "per_class": [4],
}  # fmt: skip
"""Values of options other than their defaults."""
BASE: dict[str, dict[str, Any]] = {
    "by-column": {"column": "ward"},
    "clusters": {"classes": (2, 2), "sizes": (2, 2)},
    "femnist-fedprox": {"clients": 4, "labels_per_client": 2, "mean": 1.0},
    "label-swap": {"base": {"kind": "iid"}, "clients": 4},
    "feature-noise": {"base": {"kind": "iid"}, "clients": 4},
    "rotated": {"base": {"kind": "iid"}, "clients": 4},
    "natural": {},
}
"""Options without which a partition of the rows below fails, or is too slow."""


@cache
def rows(official: bool) -> fl.Dataset:
    rng = np.random.default_rng(0)
    n = 160
    y, ward, user = np.arange(n) % 4, np.arange(n) // 4 % 6, np.arange(n) // 2 % 12
    return fl.Dataset(
        "rows",
        torch.from_numpy(rng.integers(0, 255, (n, 1, 4, 4)).astype("uint8")),
        torch.from_numpy(y),
        "classification",
        ("a", "b", "c", "d"),
        columns={"ward": torch.from_numpy(ward)},
        levels={"ward": tuple("uvwxyz")},
        users=torch.from_numpy(user),
        user_names=tuple(f"u{k}" for k in range(12)),
        test=torch.arange(112, n) if official else None,
    )


def facts(kind: str, official: bool, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]] | None:
    """What a federation consists of, and its notes; None where the options are refused."""
    try:
        fed = PARTITIONS[kind](**{**BASE.get(kind, {"clients": 4}), **options})(rows(official), seed=1)
    except (FedloomError, ValueError):
        return None
    tensors = [fed.test, fed.noise, fed.groups, fed.data.x, fed.data.y, *(t for p in fed.parts.values() for t in p)]
    return (fed.names, [None if t is None else (t.shape, t.numpy().tobytes()) for t in tensors]), fed.notes


def said(notes: tuple[str, ...], option: str) -> bool:
    return any(re.search(rf"\b{option} = .*\b(no effect|keeps fewer)", note) for note in notes)


LIMITS = {"min_size", "max_train_per_client"}
"""Options that act only where a client has too few or too many samples."""
EQUAL_HERE = {
    ("per_client", "clients"), ("clients", "per_client"),  # two of six wards per client make three clients
    ("turns", "inverted"),  # with inverted images, the default is two turns, too
    ("balanced", "clients"),  # none of three clients exceeds its share early
    ("alpha", "clients"),  # of three clients, one has quantity skew
}  # fmt: skip
"""Options that act in general, but ask here for what the default gives."""


@pytest.mark.parametrize(("kind", "official"), [*((kind, True) for kind in PARTITIONS), ("iid", False)])
def test_no_option_loses_silently_beside_another(kind: str, official: bool) -> None:
    fields = [name for name in PARTITIONS[kind].model_fields if name in GIVEN]
    silent = list[str]()
    for one in fields:
        for first in GIVEN[one]:
            beside = facts(kind, official, {one: first})
            for other in fields if beside is not None else ():
                if other == one or other in LIMITS or (other, one) in EQUAL_HERE:
                    continue
                for second in GIVEN[other]:
                    both = facts(kind, official, {one: first, other: second})
                    if both is not None and beside is not None and both[0] == beside[0] and not said(both[1], other):
                        silent.append(f"{other} = {second!r} beside {one} = {first!r}")
    assert not silent


def test_a_limit_below_another_is_noted() -> None:
    notes = fl.partitions.iid(clients=4, min_size=20, max_train_per_client=5)(rows(False)).notes
    assert any("max_train_per_client = 5 keeps fewer training samples than min_size = 20" in note for note in notes)


@pytest.mark.parametrize("options", [{}, {"folds": 3}, {"test": 0.3}, {"min_size": 9, "max_train_per_client": 9}])
def test_options_that_act_are_not_noted(options: dict[str, Any]) -> None:
    for kind in ("iid", "dirichlet", "shards"):
        assert not any("effect" in note or "fewer" in note for note in facts(kind, False, options)[1])  # type: ignore[index]
