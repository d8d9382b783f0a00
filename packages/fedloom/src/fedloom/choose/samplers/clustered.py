"""Clustered sampling: one client is drawn from each of m distributions, so the cohort's mean is unbiased."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.choose.samplers._base import Masses, SizedSampler, masses
from fedloom.local import Ctx, Nothing
from fedloom.rows import algebra

Distance = Literal["arccos", "l1", "l2"]


class Gradients(NamedTuple):
    """Representative gradients g ``[n, d]``, which are G_i = w_i - w_t, or zero before a client's first round."""

    g: Tensor


class Clustered(SizedSampler):
    """Sampler that draws one client from each of m distributions W_k with sum_k W_k(i) = m p_i.

    All drawn clients have equal weights.

    Reference: Y. Fraboni, R. Vidal, L. Kameni, M. Lorenzi, "Clustered Sampling: Low-Variance and Improved
    Representativity for Clients Selection in Federated Learning", ICML 2021, arXiv:2105.05883, Algorithm 1 (by sample
    size) and Algorithm 2 (by similarity of the representative gradients, with Ward's method applied to the rows of the
    distance matrix).

    A client that is drawn from two distributions trains once, and its weight in the mean is doubled. If m p_i exceeds
    1, client i first fills one or more distributions on its own. The tree is cut into the largest subtrees whose mass
    is at most 1/m. All masses are numbers of samples, so the probabilities are exact. The server stores n d numbers.
    """

    kind: ClassVar[str] = "clustered"
    by: Literal["similarity", "size"] = Field(
        "similarity",
        description="group clients by similarity (Algorithm 2) or in descending order of size (Algorithm 1)",
    )
    distance: Distance = Field(
        "arccos", description="distance between gradients: the angle (as in the paper) or a norm"
    )
    masses: Masses = Field(
        "samples", description="client probabilities p_i: n_i / n by samples (as in the paper), or 1 / n for all"
    )

    needs: ClassVar[Mapping[str, str]] = {"distance": "by similarity"}

    @property
    def learns(self) -> bool:
        """True for Algorithm 2, which uses the clients' updates."""
        return self.by == "similarity"

    @property
    def repeats(self) -> bool:
        """Always True, because a client may be drawn from two distributions."""
        return True

    @property
    def by_samples(self) -> bool:
        """True unless ``masses`` is uniform."""
        return self.masses == "samples"

    def remarks(self, ctx: Ctx) -> list[str]:
        """Return a note that sampling has no effect if every client participates with the same mass."""
        if self.size(ctx.n) < ctx.n or len(masses(ctx, self.masses).unique()) > 1:
            return []
        reason = f"because all {ctx.n} clients take part with equal masses. Lower fraction or clients"
        return [f"sampler {self.kind!r} has no effect, {reason}"]

    def smallest(self, n: int) -> int | None:
        """Return None, because a client may be drawn from several distributions."""
        return None

    def init(self, ctx: Ctx) -> Gradients | Nothing:
        """Return zero representative gradients, because no client has participated yet."""
        return Gradients(torch.zeros(ctx.n, ctx.layout.d)) if self.learns else Nothing()

    def distributions(self, state: Gradients | Nothing, ctx: Ctx) -> Tensor:
        """Return m W_k(i) in samples, int64 ``[m, n]``.

        The sum of a row is sum_i n_i, and the sum of a column is m n_i.
        """
        size, m = masses(ctx, self.masses), self.size(ctx.n)
        if not isinstance(state, Gradients):
            return filled(size, m, [[i] for i in size.argsort(descending=True, stable=True).tolist()], separate=False)
        groups = subtrees(distances(state.g, self.distance), m * size % size.sum(), int(size.sum()))
        order = torch.randperm(ctx.n, generator=ctx.rng("leftover")).argsort()
        return filled(size, m, [sorted(group, key=order.tolist().__getitem__) for group in groups], separate=True)

    def apply(self, state: Gradients | Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Gradients | Nothing]:
        """Draw one client from each distribution."""
        w = self.distributions(state, ctx).double()
        return torch.multinomial(w, 1, generator=ctx.rng("cohort"))[:, 0].sort().values, state

    def learn(self, state: Gradients | Nothing, replies: Tensor, ctx: Ctx) -> Gradients | Nothing:
        """Return the state with the new representative gradients of the cohort."""
        if not isinstance(state, Gradients):
            return state
        g = state.g.clone()
        g[ctx.ids] = replies.to(g)
        return Gradients(g)


def distances(g: Tensor, distance: Distance) -> Tensor:
    """Return the pairwise distances between the rows of ``g [n, d]``, as float64 ``[n, n]``.

    The angle between a row of zeros and any other row is set to 0.
    """
    g = g.double().cpu()
    if distance == "l1":
        return torch.cdist(g, g, p=1.0)
    if distance == "l2":
        return algebra.distances(g)
    nonzero = algebra.norm(g) > 0
    unit = torch.nn.functional.normalize(g, eps=0.0).nan_to_num()
    angle = (unit @ unit.T).clamp(-1, 1).arccos()
    return torch.where(nonzero & nonzero.T, angle, 0.0).fill_diagonal_(0.0)


def subtrees(distance: Tensor, mass: Tensor, limit: int) -> list[list[int]]:
    """Return the largest subtrees, with a mass up to the limit, of Ward's tree on the rows of ``distance [n, n]``.

    Args:
        distance: matrix whose rows are used as points, as in the paper's code.
        mass: clients' masses, integers ``[n]``, each at most the limit.
        limit: maximum mass of a subtree.

    Returns:
        Groups of ids, sorted by decreasing mass.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import pdist

    n = len(distance)
    groups: dict[int, list[int]] = {i: [i] for i in range(n)}
    weight: list[int] = mass.tolist()
    merges = linkage(pdist(distance.numpy()), "ward")[:, :2].astype(np.int64).tolist() if n > 1 else []
    for node, (a, b) in enumerate(merges, n):
        weight.append(weight[a] + weight[b])
        if weight[node] <= limit:
            groups[node] = groups.pop(a) + groups.pop(b)
    return [groups[node] for node in sorted(groups, key=lambda node: (-weight[node], node))]


def filled(size: Tensor, m: int, groups: list[list[int]], *, separate: bool) -> Tensor:
    """Fill m distributions of mass sum(size) with m n_i samples of each client i, int64 ``[m, n]``.

    Args:
        size: integers n_i, ``[n]``.
        m: number of distributions.
        groups: ids of clients, in the order in which they fill the distributions.
        separate: True to give each of the first groups its own distribution, as long as distributions are left.
    """
    full, total = int(size.sum()), m * size
    w = torch.zeros(m, len(size), dtype=torch.long)
    k = 0
    rest: list[int] = (total % full).tolist()
    for i, whole in enumerate((total // full).tolist()):
        w[k : k + whole, i] = full
        k += whole
    room = [0] * k + [full] * (m - k)
    if separate:
        first, groups = groups[: m - k], groups[m - k :]
        for row, group in enumerate(first, k):
            for i in group:
                w[row, i] = rest[i]
                room[row] -= rest[i]
    for i in (i for group in groups for i in group):
        while rest[i]:
            if not room[k]:
                k += 1
                continue
            part = min(rest[i], room[k])
            w[k, i] += part
            rest[i] -= part
            room[k] -= part
    return w
