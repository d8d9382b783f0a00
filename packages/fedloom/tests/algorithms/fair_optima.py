"""Where the fair methods end on heterogeneous quadratics, by Newton's method; shares no code with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.testing import Problem


def losses(p: Problem, x: Tensor) -> Tensor:
    """f_i(x), ``[n]``."""
    gap = x - p.minimiser
    return 0.5 * torch.einsum("ni,nij,nj->n", gap, p.hessian, gap)


def root(equations: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where the equations are zero, by Newton's method with halved steps."""
    z, r = start, equations(start)
    for _ in range(100):
        step = torch.linalg.solve(torch.autograd.functional.jacobian(equations, z), r)
        t = 1.0
        while torch.linalg.vector_norm(equations(z - t * step)) > torch.linalg.vector_norm(r) and t > 1e-6:
            t /= 2
        z = z - t * step
        r = equations(z)
        if torch.linalg.vector_norm(t * step) < 1e-14 * (1 + torch.linalg.vector_norm(z)):
            break
    assert torch.linalg.vector_norm(r) < 1e-10 * (1 + torch.linalg.vector_norm(z))
    return z


def q_fair(p: Problem, q: float) -> Tensor:
    """Argmin of sum_i alpha_i f_i^(q+1) / (q+1): sum_i alpha_i f_i^q grad f_i = 0."""
    return root(lambda x: (p.alpha * losses(p, x)[:, None] ** q * p.gradient(x)).sum(0), p.consensus())


def agnostic(p: Problem) -> tuple[Tensor, Tensor]:
    """Argmin over x of max_i f_i(x), and the mixture: f_i equal where l_i > 0, and sum_i l_i grad f_i = 0.

    Sets of active clients are tried until one is optimal.
    """
    for bits in range(1, 2**p.n):
        active = [i for i in range(p.n) if bits >> i & 1]

        def kkt(z: Tensor, active: list[int] = active) -> Tensor:
            x, lam, t = z[: p.d], z[p.d : -1], z[-1:]
            return torch.cat([lam @ p.gradient(x)[active], losses(p, x)[active] - t, lam.sum()[None] - 1])

        x0 = p.minimiser[active].mean(0)
        lam0 = torch.full((len(active),), 1 / len(active), dtype=x0.dtype)
        try:
            z = root(kkt, torch.cat([x0, lam0, losses(p, x0)[active].mean()[None]]))
        except (AssertionError, torch.linalg.LinAlgError):
            continue
        x, lam = z[: p.d], torch.zeros(p.n, dtype=x0.dtype)
        lam[active] = z[p.d : -1]
        if bool((lam >= -1e-12).all()) and float(losses(p, x).max()) <= float(z[-1]) + 1e-9:
            return x, lam
    raise AssertionError("no set of active clients is optimal")


def penalised(p: Problem, lam: float, groups: Tensor) -> Tensor:
    """Argmin of sum_k p_k f_k + lam sum_{a<b} |L_a - L_b|, where no two L tie: every order of the groups is tried."""
    from itertools import permutations

    size = torch.bincount(groups)
    member = (groups[None] == torch.arange(len(size))[:, None]).to(p.alpha)
    for order in permutations(range(len(size))):
        r = torch.empty(len(size), dtype=p.alpha.dtype)
        r[list(order)] = torch.arange(len(size), dtype=r.dtype) * 2 - (len(size) - 1)
        x = p.consensus(p.alpha + lam * (r / size)[groups][:, None])
        mean = member @ losses(p, x) / size
        if bool((mean[list(order)].diff() > 1e-6).all()):
            return x
    raise AssertionError("groups tie at the optimum")
