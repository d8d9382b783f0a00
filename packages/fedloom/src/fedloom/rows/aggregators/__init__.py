"""Aggregators, which combine a cohort's rows into a single vector. ``AGGREGATORS`` lists the aggregators by kind."""

from __future__ import annotations

from fedloom.rows.aggregators._base import NNM, Aggregator, Bucketing, ClipRows, Rows, State, mixture
from fedloom.rows.aggregators.private import PrivateMean
from fedloom.rows.aggregators.selection import MDA, Bulyan, FLTrust, Krum, MultiKrum
from fedloom.rows.aggregators.vectors import CenteredClipping, GeometricMedian, Median, TrimmedMean, WeightedMean
from fedloom.rows.context import Cohort

AGGREGATORS: dict[str, type[Aggregator]] = {
    "mean": WeightedMean,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "geometric-median": GeometricMedian,
    "centered-clipping": CenteredClipping,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "bulyan": Bulyan,
    "mda": MDA,
    "fltrust": FLTrust,
    "private-mean": PrivateMean,
}
"""Aggregators, keyed by kind."""

__all__ = [
    "AGGREGATORS", "MDA", "NNM", "Aggregator", "Bucketing", "Bulyan", "CenteredClipping", "ClipRows", "Cohort",
    "FLTrust", "GeometricMedian", "Krum", "Median", "MultiKrum", "PrivateMean", "Rows", "State", "TrimmedMean",
    "WeightedMean", "mixture",
]  # fmt: skip
