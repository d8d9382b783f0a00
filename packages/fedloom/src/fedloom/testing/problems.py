"""Problems for tests of algorithms: heterogeneous quadratics whose optima are known.

The loss of client i is f_i(w) = 1/2 (w - c_i)' A_i (w - c_i), where A_i is a symmetric positive definite matrix that
differs between clients. Each optimum in this module is given in closed form or computed by a reference solver that
shares no code with the algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.local.oracles.quadratic import Quadratic
from fedloom.rows.layout import Layout
from fedloom.seeds import generator

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.oracles.base import Oracle

TOY_LAYOUT = Layout.create_from_shapes({"body.weight": (2, 2), "head.weight": (1, 2), "head.bias": (1,)})
"""Layout of seven scalars in three named blocks, so that masks for a body or a head make sense."""

Penalty = Literal["l1", "nuclear"]


class MoreauSolution(NamedTuple):
    """Minimizer of sum_i alpha_i (f_i(theta_i) + lam/2 ||theta_i - w||^2), with w ``[d]`` and theta ``[n, d]``."""

    w: Tensor
    theta: Tensor


@dataclass(frozen=True)
class Problem:
    """Federation of quadratics.

    Attributes:
        hessian: matrices A_i, as ``[n, d, d]``.
        minimiser: minimizers c_i, as ``[n, d]``.
        sizes: simulated numbers of training samples ``[n]``.
        alpha: clients' shares ``[n, 1]``, which add up to 1.
        x0: initial model ``[d]``.
        layout: names and shapes of the parameters.
    """

    hessian: Tensor
    minimiser: Tensor
    sizes: Tensor
    alpha: Tensor
    x0: Tensor
    layout: Layout = TOY_LAYOUT

    @classmethod
    def random(
        cls,
        seed: int = 0,
        n: int = 5,
        *,
        layout: Layout = TOY_LAYOUT,
        weights: Literal["uniform", "samples"] = "uniform",
        same_curvature: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> Problem:
        """Return a random problem.

        The eigenvalues of A_i are in [0.5, 2], and all minimizers differ from each other and are nonzero.

        Args:
            seed: seed of the problem.
            n: number of clients.
            layout: layout whose number of parameters d is the dimension of the problem.
            weights: whether shares are uniform or proportional to the numbers of samples.
            same_curvature: True to make every A_i the same multiple of the identity.
            dtype: float64 or float32.
        """
        d, g = layout.d, generator(seed, purpose="quadratics")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        basis = torch.linalg.qr(draw(n, d, d)).Q
        spectrum = 0.5 + 1.5 * torch.rand(n, d, generator=g, dtype=torch.float64)
        hessian = basis @ (spectrum[:, :, None] * basis.mT)
        hessian = spectrum[0, 0] * torch.eye(d, dtype=torch.float64).expand(n, d, d) if same_curvature else hessian
        sizes = torch.randperm(8, generator=g)[torch.arange(n) % 8] + 1
        share = torch.ones(n, dtype=torch.float64) if weights == "uniform" else sizes.double()
        problem = cls(hessian, draw(n, d) + 2 * draw(d), sizes, (share / share.sum())[:, None], draw(d), layout)
        return problem.to(dtype)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.minimiser)

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.layout.d

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that a method must not change."""
        return self.x0, self.minimiser

    def altered(self, client: int) -> Problem:
        """Return the same problem with a different minimizer for one client."""
        moved = self.minimiser.clone()
        moved[client] += 10
        return replace(self, minimiser=moved)

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the same problem in another dtype."""
        fields = ("hessian", "minimiser", "alpha", "x0")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in fields})

    def shift(self, t: Tensor) -> Problem:
        """Return the problem with minimizers and initial model shifted by t ``[d]``, which changes only the origin."""
        return replace(self, minimiser=self.minimiser + t, x0=self.x0 + t)

    def pooled(self) -> Problem:
        """Return a problem whose single client has the weighted mean of all f_i (up to a constant) and all samples."""
        a = (self.alpha[:, :, None] * self.hessian).sum(0, keepdim=True)
        one = torch.ones(1, 1, dtype=self.alpha.dtype)
        return replace(self, hessian=a, minimiser=self.consensus()[None], sizes=self.sizes.sum()[None], alpha=one)

    def oracle(self, *, solve: bool = False, noise: float = 0.0) -> Oracle:
        """Return the oracle of the local problems for `Work`.

        Args:
            solve: True if `descend` returns the exact minimizer of its problem.
            noise: standard deviation of the samples' minimizers around c_i. With 0, every batch gives the same
                gradient.
        """
        if noise and not solve:
            return SampledQuadratic(self, noise)
        return Quadratic(self.hessian, self.minimiser, self.sizes, solve=solve, layout=self.layout)

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradients ``[n, d]`` of all f_i at w, which is ``[d]`` or ``[n, d]``."""
        return torch.einsum("nij,nj->ni", self.hessian, w - self.minimiser)

    def consensus(self, share: Tensor | None = None) -> Tensor:
        """Return the minimizer ``[d]`` of sum_i share_i f_i. ``share [n, 1]`` is alpha by default."""
        p = (self.alpha if share is None else share)[:, :, None]
        right = (p * self.hessian @ self.minimiser[:, :, None]).sum(0)
        return _solve((p * self.hessian).sum(0), right)[:, 0]

    def proximal(self, lam: float, w: Tensor) -> Tensor:
        """Return the minimizers v_i ``[n, d]`` of f_i(v_i) + lam/2 ||v_i - w_i||^2, for w ``[d]`` or ``[n, d]``."""
        eye = torch.eye(self.d, dtype=w.dtype)
        right = (self.hessian @ self.minimiser[:, :, None])[:, :, 0] + lam * w
        return _solve(self.hessian + lam * eye, right)

    def moreau(self, lam: float) -> MoreauSolution:
        """Return the minimizer of the sum of Moreau envelopes, sum_i alpha_i min_v (f_i(v) + lam/2 ||v - w||^2)."""
        eye = torch.eye(self.d, dtype=self.x0.dtype)
        envelope = lam * _solve(self.hessian + lam * eye, self.hessian)
        w = replace(self, hessian=envelope).consensus()
        return MoreauSolution(w, self.proximal(lam, w))

    def descent(self, w: Tensor, steps: Tensor, lr: float, mu: float = 0.0, x: Tensor | None = None) -> Tensor:
        """Return the points ``[n, d]`` after ``steps [n, 1]`` gradient steps on f_i + mu/2 ||w - x||^2 from w."""
        eye = torch.eye(self.d, dtype=w.dtype)
        end = self.proximal(mu, w if x is None else x)
        factor = eye - lr * (self.hessian + mu * eye)
        powers = [torch.linalg.matrix_power(f, int(k)) for f, k in zip(factor, steps[:, 0], strict=True)]
        return end + torch.einsum("nij,nj->ni", torch.stack(powers), w - end)

    def drifted(self, steps: Tensor, lr: float, mu: float = 0.0, share: Tensor | None = None) -> Tensor:
        """Return the fixed point of local descent: the x ``[d]`` that is the mean of `descent` from x, pulled to x.

        Args:
            steps: number of steps of each client ``[n, 1]``.
            lr: step size.
            mu: strength of the pull toward x, as in FedProx.
            share: weights ``[n, 1]`` of the clients in the mean. If None, alpha is used.
        """
        share = self.alpha if share is None else share
        eye = torch.eye(self.d, dtype=self.x0.dtype)
        columns = [(share * self.descent(x, steps, lr, mu)).sum(0) for x in (torch.zeros_like(self.x0), *eye)]
        matrix = torch.stack([column - columns[0] for column in columns[1:]], 1)
        return _solve(eye - matrix, columns[0])

    def composite(self, penalty: Penalty, strength: float) -> Tensor:
        """Return the minimizer ``[d]`` of sum_i alpha_i f_i(x) + strength ||x||, accurate to 1e-12.

        The norm is the l1 norm of all parameters, or the sum of the nuclear norms of the matrices in the layout.
        """
        a = (self.alpha[:, :, None] * self.hessian).sum(0)
        step, target = 1 / torch.linalg.eigvalsh(a)[-1], self.consensus()
        x = target
        for _ in range(10_000):
            new = proximal_point(x - step * (a @ (x - target)), penalty, step * strength, self.layout)
            if torch.linalg.vector_norm(new - x) < 1e-15 * (1 + torch.linalg.vector_norm(x)):
                return new
            x = new
        raise AssertionError(f"the reference solver did not converge on the {penalty} problem")


def proximal_point(x: Tensor, penalty: Penalty, t: Tensor | float, layout: Layout) -> Tensor:
    """Return the proximal point of t times the penalty at x ``[d]``, computed from the definition."""
    if penalty == "l1":
        return torch.where(x > t, x - t, torch.where(x < -t, x + t, torch.zeros_like(x)))
    matrices = {}
    for name, matrix in layout.matrices(x).items():
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        matrices[name] = u @ torch.diag(proximal_point(s, "l1", t, layout)) @ vh
    return layout.replace_matrices(x, matrices)


def _solve(a: Tensor, b: Tensor) -> Tensor:
    x: Tensor = torch.linalg.solve(a, b)
    return x


class SampledQuadratic(Quadratic):
    """Quadratics whose samples differ: sample s of client i has the minimizer c_i + o_is, where o_is has mean 0."""

    def __init__(self, problem: Problem, noise: float) -> None:
        super().__init__(problem.hessian, problem.minimiser, problem.sizes, layout=problem.layout)
        n, longest = problem.n, int(problem.sizes.max())
        g = generator(0, purpose="samples")
        offset = noise * torch.randn(n, longest, problem.d, generator=g, dtype=torch.float64).to(self.dtype)
        valid = (torch.arange(longest) < problem.sizes[:, None])[:, :, None]
        offset = torch.where(valid, offset, 0.0)
        self.offset = torch.where(valid, offset - offset.sum(1, keepdim=True) / problem.sizes[:, None, None], 0.0)

    def _offsets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        valid = (batch.position >= 0)[:, :, None]
        return torch.where(valid, self.offset[batch.ids[:, None], batch.position.clamp(min=0)], 0.0), valid

    def _compute_gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the mean of A_i (w - c_i - o_is) over the samples in the batch."""
        mean = self._offsets(batch)[0].sum(1) / batch.total
        share = batch.count.to(w) / batch.total
        return share * self._gradient(w, batch.ids) - torch.einsum("mij,mj->mi", self.hessian[batch.ids], mean)

    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the samples in the batch, ``[m, 1]``."""
        offset, valid = self._offsets(batch)
        gap = torch.where(valid, (w - self.minimiser[batch.ids])[:, None, :] - offset, 0.0)
        square = torch.einsum("mbi,mij,mbj->m", gap, self.hessian[batch.ids], gap)
        return 0.5 * square[:, None] / batch.total
