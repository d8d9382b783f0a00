"""Privacy guarantee of the noise: epsilon for a given delta, computed by dp-accounting (extra ``privacy``).

The channel's noise is local, because each client adds it before its upload leaves the device. In this case, epsilon
measures the client-level local differential privacy of everything that a client has sent, and it holds against every
recipient, including the server. The noise of the aggregator ``private-mean`` is central, because the server adds it to
the sum. In this case, epsilon holds against recipients of the models, but not against the server. In both cases,
Gaussian mechanisms are composed over the rounds of the client that participated most often. Together, they are
equivalent to a single Gaussian mechanism with the multiplier divided by sqrt(rounds), whose epsilon ``pld`` computes
exactly. Privacy amplification by sampling is not used.

A simulation draws continuous noise from seeded generators, which does not protect any client. The epsilon is the one
that the same run would have with ideal Gaussian noise. A deployment adds discrete Gaussian noise on a grid
(`fedloom_sites.deploy.noise`) and always accounts by ``rdp``: the discrete Gaussian in any dimension is
rho-concentrated with the rho of the continuous one (Canonne, Kamath, Steinke, NeurIPS 2020, Theorem 14), so its Renyi
divergence of every order alpha > 1 is at most alpha * rho, which ``rdp`` composes and converts (Proposition 12). The
exact epsilon of ``pld`` is proven only for continuous noise.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from fedloom.algorithms import Algorithm, exact_fields, upload_fields
from fedloom.choose import Sampler, Weigher
from fedloom.errors import ConfigError, Refused
from fedloom.rows.aggregators import Aggregator, PrivateMean
from fedloom.rows.channels import Channel, GaussianNoise

Accountant = Literal["rdp", "pld"]


Noise = GaussianNoise | PrivateMean
"""Source of Gaussian noise: clients add it before sending, or the server adds it to the sum."""


def find_accounted_noise(channel: Channel | None, aggregator: Aggregator | None = None) -> Noise | None:
    """Return the Gaussian noise with a delta whose epsilon is recorded (preferably the clients' noise), or None."""
    noises = [v for v in (channel, aggregator) if isinstance(v, Noise) and v.delta is not None]
    return noises[0] if noises else None


def check_privacy(
    algorithm: Algorithm, channel: Channel | None, aggregator: Aggregator | None, sampler: Sampler, weigher: Weigher
) -> None:
    """Raise an error if the privacy accounting does not cover everything that clients send.

    Raises:
        ConfigError: dp-accounting is not installed, clients also send answers, fields or individual uploads without
        noise, or the clipped values are not differences.
    """
    fields, name = upload_fields(type(algorithm)).values(), type(algorithm).__name__
    if isinstance(aggregator, PrivateMean):
        if any(k.primary and k.base == "zero" for k in fields):
            raise Refused(
                f"aggregator 'private-mean' clips differences, but clients of {name} upload models",
                rule="noise-needs-differences",
                fix="omit {aggregator} and set {upload_transform = 'gaussian-noise'}, which adds noise "
                "to the changes of the models",
            )
        if any(k.single for k in fields):
            raise Refused(
                f"aggregator 'private-mean' protects only means, but the server of {name} also receives individual "
                f"clients' uploads",
                rule="noise-misses-single-uploads",
                fix="omit {aggregator} and set {upload_transform = 'gaussian-noise'}",
            )
    noise = find_accounted_noise(channel, aggregator)
    if noise is None:
        return
    if find_spec("dp_accounting") is None:
        raise ConfigError("`delta` needs the `privacy` extra. Run: pip install 'fedloom[privacy]'")
    table = "upload_transform" if isinstance(noise, GaussianNoise) else "aggregator"
    if exact := exact_fields(type(algorithm)):
        raise Refused(
            f"delta requires epsilon, but clients of {name} also upload {' and '.join(exact)} without "
            "noise, so epsilon would be infinite",
            rule="epsilon-misses-fields",
            fix=f"omit {{{table}.delta}}",
        )
    reports = type(sampler).report is not Sampler.report and sampler.learns
    for what, kind, asks in (
        ("aggregation_weights", weigher.kind, weigher.probes),
        ("sampler", sampler.kind, sampler.probes or reports),
    ):
        if asks:
            raise Refused(
                f"delta requires epsilon, but with {what} {kind!r} clients answer without noise, so "
                "epsilon would be infinite",
                rule="epsilon-misses-answers",
                fix=f"omit {{{table}.delta}} or {{{what}}}",
            )


def epsilon(channel: Noise, uploads: int) -> float:
    """Return a client's epsilon (at ``channel.delta``) after ``uploads`` uploads.

    The sensitivity is 2 clip if any two uploads are compared (``replace``, local differential privacy), and clip if an
    upload is compared to its absence (``zero``). The noise multiplier is therefore sigma / 2 or sigma.
    """
    assert channel.delta is not None
    multiplier = channel.sigma / (2 if channel.neighbours == "replace" else 1)
    return composed_epsilon(multiplier, uploads, channel.delta, channel.accountant)


def largest_epsilon(channel: Noise, sampler: Sampler, uploads: Tensor, round: int) -> float:
    """Return the largest epsilon of any client after a round.

    Args:
        channel: channel that adds noise and has a delta.
        sampler: sampler of the run. The choices of a sampler that learns from uploads could reveal information, so
            every round then counts for all clients.
        uploads: number of rounds in which each client participated ``[n]``.
        round: number of completed rounds.
    """
    return epsilon(channel, round if sampler.learns else int(uploads.max()))


@cache
def composed_epsilon(multiplier: float, times: int, delta: float, accountant: Accountant) -> float:
    """Return the epsilon of ``times`` composed Gaussian mechanisms, i.e., of one with multiplier/sqrt(times)."""
    if not times:
        return 0.0
    from dp_accounting import dp_event, get_epsilon_gaussian, rdp

    together = multiplier / math.sqrt(times)
    if accountant == "pld":
        return float(get_epsilon_gaussian(together, delta))
    book = rdp.RdpAccountant()
    book.compose(dp_event.GaussianDpEvent(together))
    return float(book.get_epsilon(delta))
