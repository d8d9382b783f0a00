"""The answers of `fedloom.data.problems`: FLAME's propositions in closed form, optima computed to 1e-10.

The task's squared error has no factor 1/2; the formulas of `LinearRegression` are the paper's, whose losses are half of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.problems import LinearRegression, LowRank, SparseLogistic

Floats = NDArray[np.float64]
Attack = Literal["none", "same-value", "sign-flip", "gaussian"]


class Pair(NamedTuple):
    """A number for the global model and one for the personal models."""

    shared: float
    personal: float


def q(problem: LinearRegression, lam: float, rho: float) -> float:
    """The shrinkage q = 2 lam a/(lam a + rho) * b/(b + lam), a = 1/m (Proposition 2)."""
    a = 1 / problem.clients
    return 2 * lam * a / (lam * a + rho) * problem.b / (problem.b + lam)


def _moments(problem: LinearRegression, attack: Attack) -> tuple[Floats, Floats, float, float]:
    """Benign theta; mean of w / q; trace of the variance of w as v q^2 + v0."""
    theta, m, d = problem.truth()[0], problem.clients, problem.features
    s = problem.sigma**2 / (problem.b * problem.samples)
    good, bad = theta[: m - problem.malicious], theta[m - problem.malicious :]
    if attack == "none" and problem.malicious:
        raise ValueError("malicious clients need an attack")
    mean, v, v0 = good.sum(0) / m, len(good) * d * s / m**2, 0.0
    if attack == "sign-flip":
        mean = mean - np.sqrt(2 / np.pi) * problem.gamma * bad.sum(0) / m  # Eq. 158
        traces = (1 - 2 / np.pi) * problem.gamma**2 * (bad**2).sum(1) + problem.gamma**2 * d * s  # Eq. 157
        v += float(traces.sum()) / m**2
    else:
        v0 = len(bad) * d * problem.gamma**2 / m**2
    return good, mean, v, v0


def losses(problem: LinearRegression, q: float, lam: float, attack: Attack = "none") -> Pair:
    """Expected test loss, mean over benign clients (Proposition 2; Eq. 147-153 and 160-165)."""
    good, mean, v, v0 = _moments(problem, attack)
    return _expected(problem, good, mean, v, v0, q, lam)


def thresholds(problem: LinearRegression, lam: float, attack: Attack = "none") -> Pair:
    """The q above which a smaller q is the better one: where q >= this, FLAME beats q = 1 (Proposition 2)."""
    good, mean, v, _ = _moments(problem, attack)
    s = problem.sigma**2 / (problem.b * problem.samples)
    along, curvature = float(mean @ good.mean(0)), v + float(mean @ mean)
    shift = problem.b * problem.features * s / (lam * problem.clients)
    return Pair(along / curvature, (along - shift) / curvature)


def _expected(problem: LinearRegression, good: Floats, mean: Floats, v: float, v0: float, q: float, lam: float) -> Pair:
    b, d, m = problem.b, problem.features, problem.clients
    s = problem.sigma**2 / (b * problem.samples)
    variance = v * q**2 + v0
    bias = float(((q * mean - good) ** 2).sum(1).mean())
    mixed = (d * s * (b**2 + 2 * b * q * lam / m) + lam**2 * variance) / (b + lam) ** 2  # Eq. 149, 163
    noise = problem.sigma**2 / 2
    return Pair(noise + b / 2 * (variance + bias), noise + b / 2 * (mixed + lam**2 / (b + lam) ** 2 * bias))


def variances(problem: LinearRegression, q: float, lam: float) -> Pair:
    """Variance over clients of the expected test losses without attack (Proposition 3; Eq. 172, 173)."""
    theta = problem.truth()[0]
    spread = float(((q * theta.mean(0) - theta) ** 2).sum(1).var())
    b = problem.b
    return Pair(b**2 / 4 * spread, b**2 * lam**4 / (4 * (b + lam) ** 4) * spread)


def sparse_optimum(problem: SparseLogistic) -> tuple[Floats, float]:
    """The minimiser w [d] (no bias) and the least value, to 1e-10."""
    data = problem.load()
    x, y = data.x.numpy(), data.y.numpy().astype(np.float64)

    def gradient(w: Floats) -> Floats:
        return np.asarray(x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(x))

    def shrink(w: Floats, t: float) -> Floats:
        return np.asarray(np.sign(w) * np.maximum(np.abs(w) - t * problem.penalty, 0))

    w = minimise(gradient, shrink, float(np.linalg.norm(x, 2)) ** 2 / (4 * len(x)), np.zeros(x.shape[1]))
    z = x @ w
    return w, float((np.logaddexp(0, z) - y * z).mean() + problem.penalty * np.abs(w).sum())


def low_rank_optimum(problem: LowRank) -> tuple[Floats, float]:
    """The minimiser W [k, features] (no bias) and the least value, to 1e-10."""
    data = problem.load()
    x, y = data.x.numpy(), data.y.numpy()
    scale = 2 / (len(x) * problem.outputs)

    def gradient(w: Floats) -> Floats:
        return np.asarray(scale * (x @ w.T - y).T @ x)

    def shrink(w: Floats, t: float) -> Floats:
        u, s, v = np.linalg.svd(w, full_matrices=False)
        return np.asarray((u * np.maximum(s - t * problem.penalty, 0)) @ v)

    start = np.zeros((problem.outputs, problem.features))
    w = minimise(gradient, shrink, scale * float(np.linalg.norm(x, 2)) ** 2, start)
    value = float(((x @ w.T - y) ** 2).mean() + problem.penalty * np.linalg.svd(w, compute_uv=False).sum())
    return w, value


def minimise(
    gradient: Callable[[Floats], Floats],
    prox: Callable[[Floats, float], Floats],
    lipschitz: float,
    start: Floats,
    tolerance: float = 1e-12,
    steps: int = 100_000,
) -> Floats:
    """Minimiser of a smooth convex function plus one with a prox, by accelerated proximal gradient with restarts.

    O'Donoghue, Candes 2015, Adaptive restart for accelerated gradient schemes, gradient scheme. Stops when a step of
    length 1/L moves by at most tolerance/L, i.e. the composite gradient is at most `tolerance`.

    Raises:
        ArithmeticError: `steps` were not enough.
    """
    x = y = start
    momentum = 1.0
    for _ in range(steps):
        new = prox(y - gradient(y) / lipschitz, 1 / lipschitz)
        if lipschitz * float(np.abs(new - y).max()) <= tolerance:
            return new
        if float(((y - new) * (new - x)).sum()) > 0:
            momentum = 1.0
        after = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        x, y, momentum = new, new + (momentum - 1) / after * (new - x), after
    raise ArithmeticError(f"no minimum to {tolerance} in {steps} steps; the problem is too ill-conditioned")
