"""Tests for user-written parts: laws that parts must satisfy, problems with known optima, and a reference run."""

from fedloom.lazy import make_dir
from fedloom.local.rows import name_tensors
from fedloom.testing.aggregators import check_aggregator
from fedloom.testing.analyses import check_analysis
from fedloom.testing.attacks import check_attack
from fedloom.testing.federate import ReferenceFederation, ReferenceState, federate, personal_models
from fedloom.testing.laws import METHOD_LAWS, check_algorithm, check_law, laws_of
from fedloom.testing.partitions import check_partition
from fedloom.testing.problems import TOY_LAYOUT, Problem
from fedloom.testing.timing import TIME_LAWS, check_timing
from fedloom.testing.trees import locate_difference

__all__ = [
    "METHOD_LAWS", "TIME_LAWS", "TOY_LAYOUT", "Problem", "ReferenceFederation", "ReferenceState", "check_aggregator",
    "check_algorithm", "check_analysis", "check_attack", "check_law", "check_partition", "check_timing", "federate",
    "laws_of", "locate_difference", "name_tensors", "personal_models",
]  # fmt: skip

__dir__ = make_dir(__name__)
