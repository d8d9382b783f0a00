"""Clients' shares in the objective, determined by numbers of samples, groups, or clusters of activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.choose.weighers import EquitableWeigher
from fedloom.data.dataset import MISSING_LEVEL
from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, Refused, RunStopped, Stop
from fedloom.hints import unknown_name_error
from fedloom.local import Ctx, Work, descend
from fedloom.local.oracles import Network, chunk_count, chunk_limit
from fedloom.rows.attacks import Attack


def uses_clusters(weights: object) -> bool:
    """Return True if the shares depend on clusters that the run computes."""
    return isinstance(weights, str) and weights.startswith("clusters")


def clusters_of(weights: object) -> int | None:
    """Return the number of clusters in `Setting.client_weights`, or None if the number is estimated."""
    number = str(weights).partition(" ")[0].partition("-")[2]
    return int(number) if number else None


def period_of(weights: Any) -> int | None:
    """Return the number of rounds after which clusters are recomputed, or None if they stay the same."""
    return int(str(weights).rpartition(" ")[2]) if uses_clusters(weights) and " every " in weights else None


def column_of_shares(weights: Any) -> str | None:
    """Return the column in `Setting.client_weights` whose levels define the groups, or None if there is none."""
    return weights.removeprefix("groups by ") if isinstance(weights, str) and weights.startswith("groups by ") else None


def shares_of(weights: Any, fed: Federation) -> Tensor:
    """Return the clients' shares alpha_i in the objective, ``[n, 1]`` float64, which sum to 1.

    Args:
        weights: value of `Setting.client_weights`.
        fed: federation with the clients. If shares are proportional to numbers of samples, clients without training
            samples have a share of 0.

    Raises:
        ConfigError: the length of the list differs from the number of clients, no number is positive, the column does
            not exist, or a client is in no group or has several levels of the column.
    """
    column = column_of_shares(weights)
    if weights == "samples":
        masses = fed.sizes("train").cpu().double()
    elif weights == "groups":
        if fed.groups is None:
            raise Refused(
                "client_weights = 'groups' requires groups of clients, but this partition defines no groups",
                rule="shares-need-groups",
                fix="set {client_weights = 'samples'}",
            )
        masses = _equal_group_masses(fed.groups.cpu())
    elif column is not None:
        masses = _equal_group_masses(_client_levels(column, fed))
    elif weights == "uniform" or uses_clusters(weights):
        masses = torch.ones(fed.n, dtype=torch.float64)
    else:
        masses = torch.tensor(weights, dtype=torch.float64)
        if len(masses) != fed.n or not bool(masses.sum() > 0):
            raise ConfigError(
                f"weights must contain one number for each of the {fed.n} clients, and at least one "
                f"of them must be positive, got {list(weights)}",
                rule="shares-of-other-clients",
                fix="set {client_weights = 'samples'}, or list the numbers",
            )
    return (masses / masses.sum())[:, None]


def _equal_group_masses(groups: Tensor) -> Tensor:
    """Return client weights ``[n]`` that are equal within each group and sum to the same total for every group."""
    return 1 / torch.bincount(groups)[groups].double()


def _client_levels(column: str, fed: Federation) -> Tensor:
    """Return each client's level ``[n]`` of a column. All of a client's training samples must have the same level.

    Raises:
        ConfigError: the column does not exist, a client has several levels, or a row has no level.
    """
    data, what = fed.data, f"client_weights = 'groups by {column}'"
    if column not in data.columns:
        cure = (
            f"{data.name} has {', '.join(data.columns) or 'no columns'}. Name the columns of a table in "
            "data.group_columns"
        )
        raise unknown_name_error("column", column, data.columns, what, cure)
    levels = list[int]()
    for client in range(fed.n):
        codes = data.columns[column].cpu()[fed.indices("train", client).cpu()].unique().tolist()
        names = [data.levels[column][code] or "none" for code in codes]
        if len(codes) != 1 or data.levels[column][codes[0]] == MISSING_LEVEL:
            raise Refused(
                f"{what} requires the same level in all rows of a client, but client "
                f"{fed.names[client]!r} has {', '.join(names[:4])}",
                rule="shares-need-one-level",
                fix="set {client_weights = 'uniform'}, or partition by that column",
            )
        levels += codes
    return torch.tensor(levels)


def describing_activations(model: Tensor, work: Work, attack: Attack | None, attackers: Tensor) -> Tensor:
    """Return the mean activations ``[m, k]`` that clients send after training a model ``[d]`` for one round."""
    activations = EquitableWeigher().probe(None, descend(model, work, stream="clusters"), work).cpu()
    return activations if attack is None else attack.disguised(activations, work.ids, attackers)


def equal_clusters(clusters: int | None, activations: Tensor, ctx: Ctx) -> Tensor:
    """Return the shares p_i = 1/(C |cluster of i|) of Equitable-FL, ``[n, 1]`` float64.

    Args:
        clusters: number of clusters C. If None, it is estimated.
        activations: activations of all clients ``[n, k]`` (`describing_activations`).
        ctx: context of all clients before round 1 or in the round that starts with these shares.

    Raises:
        RunStopped: some activations are not finite.
    """
    finite = activations.isfinite().all(1)
    if not bool(finite.all()):
        when = f"round {ctx.round}" if ctx.round else "before round 1"
        raise RunStopped(
            Stop.DIVERGED,
            f"{when}: {int((~finite).sum())} of {ctx.n} clients have non-finite activations, so no clusters can be "
            f"found. Lower local.lr",
        )
    weigher = EquitableWeigher(clusters=clusters)
    shares, _ = weigher.apply(weigher.init(ctx), activations, ctx)
    return shares / shares.sum()


def check_clusters(clusters: int | None, ctx: Ctx) -> None:
    """Raise an error if the clients cannot form the required number of clusters.

    Raises:
        ConfigError: there are more clusters than clients, or a client has no training samples and therefore no
            activations.
    """
    if clusters is not None and clusters > ctx.n:
        raise ConfigError(
            f"client_weights = 'clusters-{clusters}' requires at least as many clients as clusters, but the "
            f"federation has {ctx.n} clients",
            rule="shares-clusters",
            fix="set {client_weights = 'uniform'}, or use fewer clusters",
        )
    if not bool((ctx.sizes > 0).all()):
        raise Refused(
            "weights by clusters require training samples at every client",
            rule="shares-of-empty-clients",
            fix="set {client_weights = 'uniform'}",
        )


def cluster_shares(
    clusters: int | None, oracle: Network, x0: Tensor, ctx: Ctx, attack: Attack | None, attackers: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute Equitable-FL's shares p_i = 1/(C |cluster of i|), ``[n, 1]`` float64, and the cost ``[7]``.

    Every client trains the initial model for one round, as in the run, and sends its mean activations under the trained
    model (Equitable-FL, Algorithm 1, lines 5-10). In the paper, the cohort does this in every round.

    Args:
        clusters: number of clusters C. If None, it is estimated.
        oracle: local problems.
        x0: initial model ``[d]``.
        ctx: context of all clients, before round 1.
        attack: attack, which may forge the attackers' activations.
        attackers: ids ``[b]`` of the attackers.

    Returns:
        Shares, and the total cost over all clients: backward and forward samples, steps, bytes up and down, and bytes
            up and down by the papers' convention.

    Raises:
        RunStopped: some activations are not finite.
    """
    answers, counts = list[Tensor](), torch.zeros(7).long()
    for ids in ctx.ids.tensor_split(chunk_count(ctx.n, chunk_limit(oracle))):
        work = Work(oracle, ids, ctx.weight[ids].to(x0), ctx.local, seed=ctx.seed, round=1)
        answers.append(describing_activations(x0, work, attack, attackers))
        counts[:3] += torch.stack([work.counts.backward, work.counts.forward, work.counts.steps]).sum(1)
    vectors = torch.cat(answers)
    k, d, item = vectors.shape[1], len(x0), x0.element_size()
    counts[3:] += ctx.n * torch.tensor([k * item, d * item, 4 * k, 4 * d])
    return equal_clusters(clusters, vectors, ctx), counts
