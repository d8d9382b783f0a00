"""Noise of a deployment: the discrete Gaussian of Canonne, Kamath and Steinke (NeurIPS 2020), sampled by OpenDP.

Real numbers are rounded to a grid before noise from the same grid is added in integers, so the floating-point form of
the result reveals nothing about the noise-free numbers (Mironov, CCS 2012). OpenDP samples the discrete Gaussian
exactly, in integer arithmetic, from random bytes of OpenSSL, whose generator the operating system seeds with 256 bits.
No random generator of PyTorch or numpy is involved.

The noise multiplier sigma is exactly the one in the settings: rows are clipped, then rounded toward zero, and the
Euclidean norm of the integers is at most t / sigma, compared in exact arithmetic, where t is the noise scale that is
passed to OpenDP. Adding or removing a row therefore changes the sum of integers by at most t / sigma, and replacing a
row by at most 2 t / sigma. The mechanism is rho-concentrated with rho = sensitivity^2 / (2 t^2) (Theorem 14), which is
1 / (2 sigma^2) for adding or removing a row and 2 / sigma^2 for replacing one, in any dimension. Everything that is
computed from the integers is post-processing.

Under secure aggregation, no single party adds the noise of a sum: each site adds a share with scale s = t (1 + 2^-20) /
sqrt(T), where T is the smallest number of sites whose sum is ever unmasked (`SharedMean`). The sum of T discrete
Gaussians is close to a discrete Gaussian, but not equal: it is rho-concentrated with rho = sensitivity^2 / (2 T s^2) +
tau D / 4, tau = 10 sum_{k<T} exp(-2 pi^2 s^2 k / (k + 1)) (Kairouz, Liu, Steinke, ICML 2021, Theorem 1). Because s is
at least 2^6, tau D is below 10^-17000, which the factor 1 + 2^-20 covers: rho is at most the rho of the central noise.
If more than T sites remain, more noise is added. A party that knows the shares of c sites still faces the noise of the
other T - c sites. Epsilon is recorded for c = 0 and for c = T - 1 (`remaining_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor

from fedloom.engine import Setting
from fedloom.engine.privacy import Noise, find_accounted_noise
from fedloom.errors import Refused
from fedloom.rows.aggregators import PrivateMean, Rows, State
from fedloom.rows.channels import GaussianNoise
from fedloom.rows.context import Cohort

MIN_NOISE_STEPS = 2.0**6
"""The bound on the sum of several sites' noise holds if the scale of a site's noise is at least this many grid
steps."""
_CLIP_BITS, _SUM_BITS = 30, 52
"""Maximum exponents of two for the clip and for the noise scale, in steps of the grid. Sums then remain well within 64
bits."""


def noisy_sum(rows: Tensor, clip: float, sigma: float) -> Tensor:
    """Return the sum of clipped rows plus discrete Gaussian noise with standard deviation ``sigma * clip``.

    Args:
        rows: ``[m, D]``. A row that is not finite is treated as zero, so that a result always exists.
        clip: maximum norm of a row, above 0.
        sigma: noise multiplier, above 0.

    Returns:
        ``[D]`` float64 on the CPU, in multiples of the grid.
    """
    exponent, scale, bound = _noise_grid(clip, sigma)
    total = np.zeros(rows.shape[1], dtype=np.int64)
    for row in rows.detach().to("cpu", torch.float64).numpy():
        total += _round_to_grid(row, clip, exponent, bound)
    noised = np.asarray(_noise_measurement(scale)(total), dtype=np.float64)
    return torch.from_numpy(np.ldexp(noised, exponent))


def _noise_grid(clip: float, sigma: float) -> tuple[int, float, int]:
    """Return the exponent e of the grid 2^e, the noise scale t, and the maximum squared norm of a row.

    The scale and the norm are given in steps of the grid.
    """
    exponent = max(math.frexp(clip)[1] - _CLIP_BITS, math.frexp(clip)[1] + math.frexp(sigma)[1] - _SUM_BITS)
    step = Fraction(2) ** exponent
    scale = float(Fraction(clip) * Fraction(sigma) / step)
    return exponent, scale, math.floor(min(Fraction(scale) / Fraction(sigma), Fraction(clip) / step) ** 2)


def _round_to_grid(row: np.ndarray[Any, Any], clip: float, exponent: int, bound: int) -> np.ndarray[Any, Any]:
    """Clip a row, round it toward zero to the grid, and return its steps, ``[D]`` int64.

    The squared norm of the result is at most ``bound``.
    """
    largest = float(np.abs(row).max(initial=0.0))
    if not math.isfinite(largest) or largest == 0:
        return np.zeros(len(row), dtype=np.int64)
    unit = row / largest  # prevents overflow of the squares, and underflow of the largest one
    length = math.fsum(unit * unit) ** 0.5
    factor = min(largest, clip / length)
    while True:
        steps: np.ndarray[Any, Any] = np.trunc(np.ldexp(unit * factor, -exponent)).astype(np.int64)
        if int(np.dot(steps, steps)) <= bound:
            return steps
        factor *= 1 - 2.0**-40  # the computed length has rounding errors


@lru_cache(maxsize=8)
def _noise_measurement(scale: float) -> Any:
    from opendp import domains, measurements, metrics, mod  # slow to import; `prelude` would also import scikit-learn

    mod.enable_features("contrib")
    domain = domains.vector_domain(domains.atom_domain(T="i64"))
    return measurements.make_gaussian(domain, metrics.l2_distance(T="f64"), scale=scale)


class SharedMean(PrivateMean):
    """`PrivateMean` under secure aggregation: the sites clip their rows and add noise, and the server sums the rows."""

    survivors: int = Field(
        ge=1,
        description="minimum number of sites in a sum. The noise of this many sites adds up to the noise of the mean",
    )

    @property
    def linear(self) -> bool:
        return True

    @property
    def scale(self) -> float:
        """Standard deviation of a site's noise, in steps of the grid.

        Below `MIN_NOISE_STEPS`, the bound on a sum of several sites' noise does not hold.
        """
        return _noise_grid(self.clip, self.sigma)[1] * (1 + 2.0**-20) / math.sqrt(self.survivors)

    def share(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a site's share of the sum in grid steps: its clipped differences ``[D]`` plus its noise."""
        exponent, _, bound = _noise_grid(self.clip, self.sigma)
        return np.asarray(
            _noise_measurement(self.scale)(_round_to_grid(row, self.clip, exponent, bound)), dtype=np.int64
        )

    def total(self, steps: np.ndarray[Any, np.dtype[np.uint64]], count: int) -> np.ndarray[Any, Any]:
        """Convert steps modulo 2^64 to the noisy sum ``[D]`` of ``count`` sites' differences.

        Raises:
            Refused: the sum is farther from zero than clipped differences and 40 standard deviations of the noise
                permit.
        """
        exponent, _, bound = _noise_grid(self.clip, self.sigma)
        totals = steps.view(np.int64)
        limit = int(count * math.isqrt(bound + 1) + 40 * self.scale * math.sqrt(count)) + count
        if bool(((totals > limit) | (totals < -limit)).any()):
            raise Refused(
                f"the sum of {count} sites is out of range: a site sent a wrong vector, or a mask was not removed"
            )
        total: np.ndarray[Any, Any] = np.ldexp(totals.astype(np.float64), exponent)
        return total


def remaining_noise(noise: object) -> SharedMean | None:
    """Return the noise that remains after T - 1 of the T sites subtract their own noise: the last site's share.

    The result is None if sites do not add shares of a common noise.
    """
    if not isinstance(noise, SharedMean):
        return None
    alone: SharedMean = noise.with_(sigma=noise.sigma / math.sqrt(noise.survivors))
    return alone


class ReleasedNoise(GaussianNoise):
    """`GaussianNoise` channel of a deployed site.

    Its privacy accounting uses Renyi divergences, which hold for this noise.
    """

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        """C(x). The run's own random generators are not used."""
        if not self.sigma:
            return super().send(x, gens)
        return torch.stack([noisy_sum(row[None], self.clip, self.sigma) for row in x]).to(x)


class ReleasedMean(PrivateMean):
    """`PrivateMean` aggregator of a deployed server.

    Its privacy accounting uses Renyi divergences, which hold for this noise.
    """

    def combine(
        self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort
    ) -> tuple[dict[str, Tensor], State]:
        """Return the mean of the clipped rows, with noise added. The generators of ``ctx`` are not used."""
        if not self.sigma:
            return super().combine(state, rows, weights, primary, ctx)
        total = noisy_sum(torch.cat([*rows.values()], 1), self.clip, self.sigma) / len(weights)
        parts = total.split([r.shape[1] for r in rows.values()])
        return {name: part.to(r) for (name, r), part in zip(rows.items(), parts, strict=True)}, state


def deployed_setting(setting: Setting, survivors: int | None = None) -> Setting:
    """Return a run's setting with the deployed forms of its channel and aggregator (see `deployed_part`)."""
    return setting.with_(
        upload_transform=deployed_part(setting.upload_transform),
        aggregator=deployed_part(setting.aggregator, survivors),
    )


def get_site_noise(setting: Setting) -> Noise | None:
    """Return the noise that provides a site's epsilon, or None if there is no such noise.

    Noise that is added by the server does not protect a site from the server.
    """
    return find_accounted_noise(
        setting.upload_transform, setting.aggregator if isinstance(setting.aggregator, SharedMean) else None
    )


def deployed_part(part: Any, survivors: int | None = None) -> Any:
    """Return a channel or aggregator in its deployed form. Its random bytes are seeded by the operating system.

    Args:
        part: channel or aggregator of a run. All parts other than the two noise mechanisms are returned unchanged.
        survivors: minimum number of sites in a sum under secure aggregation. None without it.
    """
    rdp = {} if getattr(part, "delta", None) is None else {"accountant": "rdp"}
    if isinstance(part, PrivateMean) and survivors is not None:
        return SharedMean(**part.model_dump() | rdp | {"survivors": survivors})
    kinds: Mapping[type, type] = {GaussianNoise: ReleasedNoise, PrivateMean: ReleasedMean}
    kind = kinds.get(type(part))
    return part if kind is None else kind(**part.model_dump() | rdp)
