"""Shares by clusters: clusters of all clients, recovered from activations before round 1, count the same."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.choose.weighers import EquitableWeigher
from fedloom.errors import ConfigError, Refused
from fedloom.local import Ctx, Work, descend
from fedloom.local.oracles import Network, chunk_count, chunk_limit


def cluster_shares(clusters: int | None, oracle: Network, x0: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Find Equitable-FL's p_i = 1/(C |cluster of i|) over all clients, ``[n, 1]`` float64, and its cost ``[7]``.

    Every client trains the initial model for a round, as the run's clients do, and sends its mean activations under
    that model (Equitable-FL, Algorithm 1, lines 5-10, where it is so in every round and over the cohort).

    Args:
        clusters: C; None where it is sought.
        oracle: the local problems.
        x0: ``[d]`` the initial model.
        ctx: all clients, before round 1.

    Returns:
        The shares, and of all clients: samples backward and forward, steps, bytes up and down, and those of the paper.

    Raises:
        ConfigError: more clusters than clients.
        Refused: a client has no training samples, of which there are no activations.
    """
    if clusters is not None and clusters > ctx.n:
        raise ConfigError(f"weights = 'clusters-{clusters}' needs as many clients, the federation has {ctx.n}")
    if not bool((ctx.sizes > 0).all()):
        raise Refused("weights by clusters needs training samples of every client; use weights = 'uniform'")
    weigher, answers, counts = EquitableWeigher(clusters=clusters), list[Tensor](), torch.zeros(7).long()
    for ids in ctx.ids.tensor_split(chunk_count(ctx.n, chunk_limit(oracle))):
        work = Work(oracle, ids, ctx.weight[ids].to(x0), ctx.local, seed=ctx.seed, round=1)
        answers.append(weigher.probe(None, descend(x0, work, stream="clusters"), work).cpu())
        counts[:3] += torch.stack([work.counts.backward, work.counts.forward, work.counts.steps]).sum(1)
    vectors = torch.cat(answers)
    k, d, item = vectors.shape[1], len(x0), x0.element_size()
    counts[3:] += ctx.n * torch.tensor([k * item, d * item, 4 * k, 4 * d])
    shares, _ = weigher.apply(weigher.init(ctx), vectors, ctx)
    return shares / shares.sum(), counts
