"""Choices of the server: who takes part in a round, and who counts how much."""

from fedloom.choose.samplers import (
    SAMPLERS,
    Availability,
    Bernoulli,
    Clustered,
    PowerOfChoice,
    RoundRobin,
    Sampler,
    SizeWeighted,
    Uniform,
)
from fedloom.choose.weighers import (
    WEIGHERS,
    EquitableWeigher,
    FairFedWeigher,
    SamplesWeigher,
    SharesWeigher,
    UniformWeigher,
    Weigher,
)

__all__ = [
    "SAMPLERS",
    "WEIGHERS",
    "Availability",
    "Bernoulli",
    "Clustered",
    "EquitableWeigher",
    "FairFedWeigher",
    "PowerOfChoice",
    "RoundRobin",
    "Sampler",
    "SamplesWeigher",
    "SharesWeigher",
    "SizeWeighted",
    "Uniform",
    "UniformWeigher",
    "Weigher",
]
