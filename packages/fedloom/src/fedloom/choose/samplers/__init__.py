"""Samplers, which choose the clients that participate in each round."""

from fedloom.choose.samplers._base import Sampler, SizedSampler
from fedloom.choose.samplers.availability import Availability
from fedloom.choose.samplers.clustered import Clustered
from fedloom.choose.samplers.power import PowerOfChoice
from fedloom.choose.samplers.simple import Bernoulli, RoundRobin, SizeWeighted, Uniform

SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": Uniform,
    "bernoulli": Bernoulli,
    "size-weighted": SizeWeighted,
    "round-robin": RoundRobin,
    "clustered": Clustered,
    "power-of-choice": PowerOfChoice,
    "availability": Availability,
}

__all__ = [
    "SAMPLERS", "Availability", "Bernoulli", "Clustered", "PowerOfChoice", "RoundRobin", "Sampler", "SizeWeighted",
    "SizedSampler", "Uniform",
]  # fmt: skip
