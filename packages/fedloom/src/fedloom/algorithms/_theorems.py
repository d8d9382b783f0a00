"""Theorems that papers prove about their methods, and the conditions that other parts of a run must satisfy."""

from __future__ import annotations

from typing import NamedTuple


class Theorem(NamedTuple):
    """Theorem that a paper proves about the runs of a method.

    Attributes:
        proves: statement of the theorem, worded to follow a colon.
        needs: conditions of the theorem, worded to follow "It needs".
        defaults: sentence about a condition that the default settings violate. If the default settings satisfy all
            conditions, the sentence is empty.
        covers: kinds of other parts with which the theorem still holds, such as "sampler" if clients may be absent from
            rounds.
    """

    proves: str
    needs: str
    defaults: str = ""
    covers: tuple[str, ...] = ()


_EVERY_CLIENT_DRAWN = "every client drawn with positive probability"

THEOREM_TABLE = {
    "ditto": Theorem(
        "the personal models converge to the minima of their problems at the rate of the global model",
        "among other conditions, strongly convex smooth losses, a global model that converges, and personal step sizes"
        " that decrease at its rate",
        "The default step size is constant.",
        ("sampler",),
    ),
    "equitable-fl": Theorem(
        "Theorem 1: the expected squared gradient of the objective at a random round decreases at the rate"
        " 1/sqrt(rounds)",
        "smooth losses that are at least 0, gradients of bounded variance, mu < 1, a step size of the order"
        " 1/sqrt(rounds), small enough for the local steps, and a client of every cluster in every cohort",
        "A sampled cohort may contain no client of some cluster.",
        ("sampler",),
    ),
    "fedacs": Theorem(
        "Theorem 2.1: the smallest squared gradient of F_lambda over the rounds decreases at the rate 1/sqrt(rounds)",
        "`lam`, one gradient step of size 1/sqrt(rounds) per round, and bounded Lipschitz gradients",
        "By default `lam` is not set.",
    ),
    "fedadmm": Theorem(
        "the squared distance from stationarity, averaged over the rounds, decreases at the rate 1/rounds, up to the"
        " errors of the local solves",
        "smooth losses that are bounded below, a large enough rho, `server_lr = 'fraction'`, equal shares, and"
        f" {_EVERY_CLIENT_DRAWN}",
        covers=("sampler",),
    ),
    "fedadmm-composite": Theorem(
        "the squared gradient mapping, averaged over the rounds, decreases at the rate 1/rounds",
        "smooth losses, a convex g, an objective bounded below, a small enough eta, local errors with a bounded"
        f" sum, equal shares, and {_EVERY_CLIENT_DRAWN}",
        covers=("sampler",),
    ),
    "fedadmm-inexact": Theorem(
        "every accumulation point of the models is stationary, and the smallest squared gradient decreases at the rate"
        " 1/rounds",
        "among other conditions, smooth losses, a large enough `rho`, local solves that meet their tolerance, equal"
        " shares, and every client at least once in a fixed number of rounds",
        "By default `rho` is not set, and the penalty changes during the run.",
        ("sampler",),
    ),
    "fedavg": Theorem(
        "the expected objective converges to its minimum at the rate 1/rounds (Li et al., ICLR 2020)",
        "strongly convex smooth losses, bounded gradients, equal steps, step sizes that decrease at the rate 1/rounds,"
        " and either all clients, cohorts of sampler 'size-weighted', or uniform cohorts and equal shares",
        "No `local.schedule` decreases at the rate 1/rounds. With a constant step size and several local steps, the"
        " limit can have a bias of the order of the step size.",
        ("sampler",),
    ),
    "feddr": Theorem(
        "the squared gradient mapping, averaged over the rounds, decreases at the rate 1/rounds",
        "smooth losses, a convex g, an objective bounded below, alpha and eta within the paper's bounds,"
        f" local errors with a bounded sum, equal shares, and {_EVERY_CLIENT_DRAWN}",
        covers=("sampler",),
    ),
    "feddualavg": Theorem(
        "the objective at an average of the rounds' models converges to its minimum at the rate 1/sqrt(rounds)",
        "among other conditions, smooth convex losses, a small enough local step size, bounded gradients, equal shares,"
        " and equal steps",
        "A run returns the last model, not the average.",
    ),
    "feddyn": Theorem(
        "the loss (convex) or the squared gradient (nonconvex) of the cohorts' mean models, averaged over the rounds,"
        " converges to its smallest value at the rate 1/rounds",
        "smooth losses, exact local solves, a suitable alpha, equal shares, and uniform cohorts",
        "The server's model differs from the cohort's mean.",
        ("sampler",),
    ),
    "fednova": Theorem(
        "the smallest squared gradient of the objective decreases at the rate 1/sqrt(rounds), with any numbers of local"
        " steps",
        "smooth losses, gradients of bounded variance, clients of bounded dissimilarity, and a step size of the order"
        " 1/sqrt(rounds)",
        "The default step size does not depend on the number of rounds.",
    ),
    "fedopt": Theorem(
        "with optimiser 'adagrad' or 'adam', the smallest squared gradient decreases at the rate 1/sqrt(rounds)",
        "among other conditions, smooth losses, bounded gradients and variances, `beta1 = 0`, small enough step sizes"
        " that depend on the number of rounds, equal shares, and equal steps",
        "The default beta1 of 'adam' is 0.9.",
    ),
    "fedpd": Theorem(
        "the squared gradient, averaged over the rounds, decreases at the rate 1/rounds, up to the errors of the local"
        " solves",
        "smooth losses that are bounded below, a small enough eta, `skip = 0`, and equal shares",
    ),
    "fedprox": Theorem(
        "in every round, the expected objective decreases by a multiple of its squared gradient, as long as this "
        "squared gradient is at least 1/B^2 of the clients' mean squared gradient",
        "smooth losses with Hessians bounded below, a mu that is large enough for these bounds and B, accurate enough"
        " local solves, and sampler 'size-weighted'",
        "The default mu is chosen for speed and may be too small.",
        ("sampler",),
    ),
    "fedslr": Theorem(
        "Theorems 1 and 2: the common model converges to a stationary point of (P1)",
        "smooth losses of bounded gradient, a proper closed objective, exact local solves, eta_g <= 1/(2L), equal"
        " shares, a cluster point, and for Theorem 2 the Kurdyka-Lojasiewicz property",
    ),
    "fedsplit": Theorem(
        "Theorem 1: the model converges linearly to the minimum, up to the errors of the local solves",
        "smooth strongly convex losses, equal shares, and `step` = 1/sqrt(l L) of the curvatures l and L",
        "The default step is chosen for speed and has a different value.",
    ),
    "fiaelt": Theorem(
        "Corollary 2: the squared distance from stationarity, averaged over the rounds, decreases at the rate 1/rounds",
        "smooth losses, a convex g, an objective bounded below, beta = 5 L, r = 0.005, tau = 1/2, equal shares, and"
        " criterion (9) in every local solve",
        "With solver 'sgd', the default beta depends on the step size instead of L.",
    ),
    "flame": Theorem(
        "Theorems 1 to 3: personal and global models converge to stationary points, and the mean squared gradient of"
        " the Lagrangian decreases at the rate 1/rounds, up to the tolerance",
        "smooth coercive losses, g = 0, theta within its tolerance (`eps0`), and lam and rho within the bounds of"
        " Theorem 1",
        "The default rho = lam/n is outside the bounds for every lam.",
        ("sampler",),
    ),
    "pfedme": Theorem(
        "the global model converges to the minimum (strongly convex) or a stationary point (nonconvex) of the"
        " envelopes, up to the errors of the personal models",
        "among other conditions, smooth losses, gradients of bounded variance, a large enough lam if nonconvex, an eta"
        " much smaller than 1/lam, beta >= 1, equal shares, equal steps, and uniform cohorts",
        "The default eta is 1/lam.",
        ("sampler",),
    ),
    "scaffold": Theorem(
        "the expected loss (convex) or squared gradient (nonconvex) of an average or random model of the"
        " rounds converges to its smallest value, however much the clients differ",
        "smooth losses, gradients of bounded variance, server_lr >= 1, small enough local step sizes that depend on the"
        " number of rounds, equal shares, equal steps, and uniform cohorts",
        covers=("sampler",),
    ),
}
"""Theorems, keyed by the name of the method. Methods without a theorem have no entry. The tests of fedloom check the
fixed points and laws that these theorems state."""
