"""Partitions: ``partition.hybrid(clients=10, labels_per_client=2)(data, seed=0)`` is a federation."""

from __future__ import annotations

from fedloom.data.partitions._base import Draw, Partition, Pool, Sized
from fedloom.data.partitions.deal import Dealt, group_by_owner
from fedloom.data.partitions.groups import Clusters, Column, Writers
from fedloom.data.partitions.nested import PARTITIONS, Concept, Hybrid, Quality, Rotated
from fedloom.data.partitions.skew import Dirichlet, Few, Iid, Quantity, Shards

clusters, column, concept, dirichlet, few, hybrid = Clusters, Column, Concept, Dirichlet, Few, Hybrid
iid, quality, quantity, rotated, shards, writers = Iid, Quality, Quantity, Rotated, Shards, Writers

__all__ = [
    "PARTITIONS",
    "Clusters",
    "Column",
    "Concept",
    "Dealt",
    "Dirichlet",
    "Draw",
    "Few",
    "Hybrid",
    "Iid",
    "Partition",
    "Pool",
    "Quality",
    "Quantity",
    "Rotated",
    "Shards",
    "Sized",
    "Writers",
    "clusters",
    "column",
    "concept",
    "dirichlet",
    "few",
    "group_by_owner",
    "hybrid",
    "iid",
    "quality",
    "quantity",
    "rotated",
    "shards",
    "writers",
]
