"""Partitions: ``partitions.mixed(clients=10, labels_per_client=2)(data, seed=0)`` returns a federation."""

from __future__ import annotations

from fedloom.data.partitions._base import Partition, Sized
from fedloom.data.partitions.deal import Dealt, group_by_owner
from fedloom.data.partitions.groups import ByColumn, Clusters, Natural
from fedloom.data.partitions.nested import PARTITIONS, FeatureNoise, LabelSwap, MixedSkew, Rotated
from fedloom.data.partitions.pools import Draw, Pool
from fedloom.data.partitions.skew import Dirichlet, FemnistFedProx, Iid, QuantitySkew, Shards
from fedloom.hints import RENAMED_VALUES

by_column, clusters, dirichlet, feature_noise = ByColumn, Clusters, Dirichlet, FeatureNoise
femnist_fedprox, iid, label_swap, mixed = FemnistFedProx, Iid, LabelSwap, MixedSkew
natural, quantity_skew, rotated, shards = Natural, QuantitySkew, Rotated, Shards

_RENAMED_FUNCTIONS = {old: new.replace("-", "_") for old, new in RENAMED_VALUES["partition", "kind"].items()}
"""Former names of functions, mapped to their current names."""


def __getattr__(name: str) -> object:
    if name in _RENAMED_FUNCTIONS:
        raise AttributeError(f"fedloom.partitions.{name} is now fedloom.partitions.{_RENAMED_FUNCTIONS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PARTITIONS", "ByColumn", "Clusters", "Dealt", "Dirichlet", "Draw", "FeatureNoise", "FemnistFedProx", "Iid",
    "LabelSwap", "MixedSkew", "Natural", "Partition", "Pool", "QuantitySkew", "Rotated", "Shards", "Sized", "by_column",
    "clusters", "dirichlet", "feature_noise", "femnist_fedprox", "group_by_owner", "iid", "label_swap", "mixed",
    "natural", "quantity_skew", "rotated", "shards",
]  # fmt: skip
