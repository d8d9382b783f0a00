"""The server's choices: the clients of a round, their weights, and the mixture of models that each client receives."""

from fedloom.choose.mixers import MIXERS, Angles, Attention, ClusterMeans, Mixer, Proximity
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
    "MIXERS", "SAMPLERS", "WEIGHERS", "Angles", "Attention", "Availability", "Bernoulli", "ClusterMeans", "Clustered",
    "EquitableWeigher", "FairFedWeigher", "Mixer", "PowerOfChoice", "Proximity", "RoundRobin", "Sampler",
    "SamplesWeigher", "SharesWeigher", "SizeWeighted", "Uniform", "UniformWeigher", "Weigher",
]  # fmt: skip
