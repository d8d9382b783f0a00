"""For tests of your own parts: laws, problems with known optima, and a plain run to compare with."""

from fedloom.lazy import lister
from fedloom.local.rows import named
from fedloom.testing.aggregators import check_aggregator
from fedloom.testing.analyses import check_analysis
from fedloom.testing.attacks import check_attack
from fedloom.testing.federate import ReferenceFederation, ReferenceState, federate, personal_models
from fedloom.testing.laws import LAWS, check_algorithm, check_law, laws_of
from fedloom.testing.partitions import check_partition
from fedloom.testing.problems import LAYOUT, Problem
from fedloom.testing.timing import TIME_LAWS, check_timing
from fedloom.testing.trees import difference

__all__ = [
    "LAWS",
    "LAYOUT",
    "TIME_LAWS",
    "Problem",
    "ReferenceFederation",
    "ReferenceState",
    "check_aggregator",
    "check_algorithm",
    "check_analysis",
    "check_attack",
    "check_law",
    "check_partition",
    "check_timing",
    "difference",
    "federate",
    "laws_of",
    "named",
    "personal_models",
]

__dir__ = lister(__name__)
