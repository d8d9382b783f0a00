"""Repeated clustering of clients between rounds, and the resulting client weights."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence

import torch

from fedloom.algorithms import upload_fields
from fedloom.choose.shares import clusters_of, equal_clusters, period_of, uses_clusters
from fedloom.engine.clients.uploads import server_sums, share_change_sums
from fedloom.engine.job import Job
from fedloom.engine.privacy import find_accounted_noise
from fedloom.engine.setting import Setting
from fedloom.engine.state import State
from fedloom.errors import Refused, attribute_error
from fedloom.local import Ctx
from fedloom.local.rows import Fields
from fedloom.processes.clients import Answers, AskRequest, Clients
from fedloom.schedule import Synchronous
from fedloom.values import get_kind


def recluster_if_due(job: Job, clients: Clients, state: State) -> tuple[Job, State]:
    """Cluster the clients again if this is due before the next round.

    As before round 1, clients send their activations under the global model. The new clusters may change the client
    weights. The server then recomputes its weighted sums over stored or accumulated uploads. The new weights affect the
    server's model from the next step on.

    Returns:
        The run with the current client weights, and the state to continue from.

    Raises:
        RunStopped: some activations are not finite.
    """
    period, t = period_of(job.setting.client_weights), state.round + 1
    job = job.replace_shares(state.shares)
    if state.shares is None or period is None or t == 1 or (t - 1) % period:
        return job, state
    model = job.algorithm.global_model(state.server)
    assert model is not None  # check_shares rejects other cases
    answers: Sequence[Answers] = list(clients.ask(AskRequest(t, job.everyone, model, asks_activations=True)))
    activations, counts = torch.cat([a.values for a in answers]), torch.cat([a.counts for a in answers]).sum(0)
    shares = equal_clusters(clusters_of(job.setting.client_weights), activations, job.ctx(t)).to(job.alpha)
    totals = state.totals.clone()
    totals[: len(counts)] += counts
    state = state.with_(totals=totals)
    if torch.equal(shares, job.alpha):
        return job, state
    before, job = job, job.replace_shares(shares)
    job.locations.replicate(job.everyone)
    server = state.server
    if job.summed_fields and not job.robust:
        with attribute_error("method", job.algorithm, f"round {t}"):
            reshared = job.algorithm.reshared(server, share_change_sums(job, before), job.ctx(t))
        assert reshared is not None  # check_shares rejects other cases
        server = reshared
    return job, state.with_(server=server, sums=server_sums(job), shares=shares)


def check_shares(setting: Setting, server: Fields, ctx: Ctx) -> None:
    """Raise an error if the method, the schedule or the privacy accounting does not support weights by clusters.

    Args:
        setting: setting of the run, with presets resolved.
        server: the server's state before the first round.
        ctx: context of all clients.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    method, schedule, aggregator, weights = (
        setting.method,
        setting.schedule,
        setting.aggregator,
        str(setting.client_weights),
    )
    name, what, period = type(method).__name__, f"client_weights = {weights!r}", period_of(weights)
    if uses_clusters(weights) and find_accounted_noise(setting.upload_transform, aggregator) is not None:
        raise Refused(
            f"delta requires epsilon, but with {what} clients send activations without noise, so epsilon would be "
            f"infinite",
            rule="epsilon-misses-clusters",
            fix="set {client_weights = 'samples'}",
        )
    if period is None:
        return
    model, cure = method.global_model(server), f"find clusters once: set {{client_weights = {weights.split()[0]!r}}}"
    if model is None:
        raise Refused(
            f"{what} describes clients by their activations under the global model, but {name} has no global model",
            rule="clusters-need-a-global-model",
            fix=cure,
        )
    if not isinstance(schedule, Synchronous):
        raise Refused(
            f"{what} requires all clients' activations between two rounds, but schedule "
            f"{schedule.kind!r} does not wait for all clients",
            rule="clusters-need-rounds",
            fix=cure,
        )
    adds = {field: kind for field, kind in upload_fields(type(method)).items() if kind.accumulates}
    if aggregator is not None and not aggregator.linear:
        if any(not kind.base.startswith("rows.") for kind in adds.values()):
            raise Refused(
                f"{what} changes the clients' shares in the server's sum over all rounds, but with "
                f"aggregator {get_kind(aggregator)!r} the server of {name} sums the results of this rule, which does "
                f"not use client shares",
                rule="clusters-under-a-rule",
                fix=cure,
            )
    elif adds and method.reshared(server, namedtuple("Moved", adds)(*[model.new_zeros(1)] * len(adds)), ctx) is None:
        raise Refused(
            f"{what} cannot be used with {name}: its server accumulates uploads weighted by the shares of their "
            f"round, and later changes of the shares do not affect this sum",
            rule="clusters-in-sums",
            fix=cure,
        )
