"""Theorems: what papers prove of their methods' runs, and the parts beside the method for which it holds."""

from __future__ import annotations

from typing import NamedTuple


class Theorem(NamedTuple):
    """What a paper proves of a method's runs.

    Attributes:
        text: the theorem, with its conditions on options, as a sentence.
        covers: the kinds of parts with which it holds too: "sampler" where rounds may lack clients.
    """

    text: str
    covers: tuple[str, ...] = ()


THEOREMS = {
    "equitable-fl": Theorem(
        "Theorem 1: the mean squared gradient of the objective falls like 1/sqrt(rounds), where every cohort has a"
        " client of every cluster",
        ("sampler",),
    ),
    "fedacs": Theorem(
        "Theorem 2.1: the least gradient of F_lambda over the rounds vanishes, with lambda, bounded gradients and step"
        " sizes whose sum is infinite and whose squares' is not"
    ),
    "fedslr": Theorem(
        "Theorems 1 and 2: the common model comes to a stationary point of (P1), where local steps are exact and"
        " eta_g <= 1/(2L)"
    ),
    "fiaelt": Theorem(
        "Corollary 1, Theorems 1 and 2: the model comes to a stationary point of the problem, for beta >= 5 L,"
        " r <= 0.01 and tau in [1/2, 1), where (9) is met"
    ),
    "flame": Theorem(
        "Theorems 1 to 4: personal and global models come to a stationary point of the problem, where lam and rho meet"
        " their conditions and theta is found within eps",
        ("sampler",),
    ),
    "feddr": Theorem(
        "the model comes to a stationary point of the composite problem, with smooth local losses, a small enough eta,"
        " solves whose errors are bounded by a summable sequence, and every client drawn with positive probability",
        ("sampler",),
    ),
    "feddyn": Theorem(
        "the model comes to a stationary point of the objective, for convex losses to its minimum, at the rate"
        " 1/rounds, with exact local solves, a large enough alpha and cohorts drawn uniformly",
        ("sampler",),
    ),
    "fedsplit": Theorem(
        "the model comes linearly to the minimum of strongly convex smooth losses, up to the error of the local solves"
    ),
    "pfedme": Theorem(
        "Theorems 1 and 2: the model of the envelope comes near the minimum (strongly convex) or a stationary point"
        " (smooth, large enough lambda), up to the error of the local solves, with cohorts drawn uniformly",
        ("sampler",),
    ),
    "scaffold": Theorem(
        "Theorem III: the model comes to the minimum (convex) or a stationary point, however clients differ, with small"
        " enough local steps and cohorts drawn uniformly",
        ("sampler",),
    ),
}
"""By name of the method; of the others none is stated, and the project's tests hold fixed points and laws."""
