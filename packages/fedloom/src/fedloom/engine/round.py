"""A round: sample clients, send the download, train in chunks, aggregate accepted uploads, update the server."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.clients.forging import forge
from fedloom.engine.clients.regroup import recluster_if_due
from fedloom.engine.clients.uploads import Uploads, compute_weights, describe_usable
from fedloom.engine.job import Job
from fedloom.engine.state import State
from fedloom.errors import RunStopped, Stop, attribute_error
from fedloom.local.rows import Fields
from fedloom.processes.clients import CLIENT_COUNTS, AskRequest, Clients, TrainRequest, TrainTask


def run_round(job: Job, clients: Clients, state: State) -> tuple[State, tuple[str, ...]]:
    """Run one round.

    Returns:
        The state after the round, and sentences about events in the round.

    Raises:
        RunStopped: too few uploads are usable, or the server state is not finite.
    """
    t = state.round + 1
    job, state = recluster_if_due(job, clients, state)
    drawn, sampler, query_counts = draw_cohort(job, clients, state, t)
    cohort, times = drawn.unique(return_counts=True)
    order = sort_by_samples(job, cohort)
    cohort, shares = cohort[order], times[order, None].double()
    if not job.setting.aggregation_weights.probes:
        shares = shares * compute_weights(job, state.weigher, None, job.ctx(t, cohort))[0]
    for store in job.stores.values():
        store.touch(cohort)
    if job.mixes:
        job.locations.replicate(job.mixed(cohort))
    down = job.down(state.server, t, cohort)
    places, forging = job.places_by_honesty(cohort)
    uploads = Uploads(job, state.sums)
    if len(places):
        request = TrainRequest(t, places, cohort[places], shares[places], down, state.server, alpha=state.shares)
        for result in clients.train(request):
            uploads.add(result)
    if len(forging):
        task = TrainTask(t, forging, cohort[forging], shares[forging])
        honest, m = uploads.answers("models"), len(cohort)
        uploads.add(clients.call_once(task.ids, lambda: forge(job, down, state.server, task, honest, m)))
    return update_server(job, state, t, cohort, sampler, query_counts, uploads)


def update_server(
    job: Job, state: State, t: int, cohort: Tensor, sampler: Fields, query_counts: Tensor, uploads: Uploads
) -> tuple[State, tuple[str, ...]]:
    """Update the server with the uploads of a cohort ``[m]``, which ``sampler`` drew at the cost ``query_counts [7]``.

    Raises:
        RunStopped: too few uploads are usable, or the server state is not finite.
    """
    events, accepted = uploads.events(t), job.ctx(t, torch.cat(uploads.ids))
    if accepted.m < max(1.0, job.setting.engine.quorum * len(cohort)):
        reason = Stop.DIVERGED if accepted.m == 0 else Stop.UNUSABLE
        raise RunStopped(reason, describe_usable(t, accepted.m, len(cohort)), events)
    up, weigher, aggregator = uploads.aggregate(accepted, state.weigher, state.aggregator)
    with attribute_error("method", job.algorithm, f"round {t}"):
        server = job.algorithm.server(state.server, up, accepted)
        if getattr(server, "_fields", None) != state.server._fields:
            raise TypeError(f"server must return a {type(state.server).__name__}, got {type(server).__name__}")
        events += tuple(note for note in job.algorithm.remarks(server) if note not in state.notes)
    if not all(_is_finite(field) for field in server):
        raise RunStopped(Stop.DIVERGED, f"round {t}: the server's state is not finite", events)
    if (report := uploads.answers("sampler")) is not None:
        with attribute_error("sampler", job.setting.sampler, f"round {t}"):
            sampler = job.setting.sampler.learn(sampler, report, accepted)
    counts = torch.cat([uploads.counts + query_counts, torch.tensor([len(uploads.dropped)])])
    return state.with_(
        round=t, server=server, sampler=sampler, weigher=weigher, aggregator=aggregator, sums=uploads.sums,
        totals=state.totals + counts, tally=state.tally.plus(cohort),
        cohort=accepted.ids, trained=t,
    ), events  # fmt: skip


def _is_finite(values: Tensor) -> bool:
    """Return True if all values are finite. The values are read only once."""
    return not values.numel() or all(math.isfinite(extreme) for extreme in values.detach().aminmax())


def draw_cohort(job: Job, clients: Clients, state: State, t: int) -> tuple[Tensor, Fields, Tensor]:
    """Draw a round's cohort. Return the clients, the sampler's new state, and the cost ``[7]`` of its queries."""
    if (replayed := job.replay.cohort(t)) is not None:
        return replayed, state.sampler, torch.zeros(len(CLIENT_COUNTS), dtype=torch.long)
    ctx = job.ctx(t)
    info, cost = None, torch.zeros(len(CLIENT_COUNTS), dtype=torch.long)
    if job.setting.sampler.probes:
        with attribute_error("sampler", job.setting.sampler, f"round {t}"):
            candidates = check_client_ids(job.setting.sampler.query(state.sampler, ctx), job.n)
        model = job.algorithm.global_model(state.server)
        assert model is not None  # otherwise the sampler is rejected
        answers = list(clients.ask(AskRequest(t, candidates, model)))
        info, cost = torch.cat([a.values for a in answers]), torch.cat([a.counts for a in answers]).sum(0)
    with attribute_error("sampler", job.setting.sampler, f"round {t}"):
        cohort, sampler = job.setting.sampler.apply(state.sampler, info, ctx)
        return check_client_ids(cohort, job.n), sampler, cost


def check_client_ids(ids: Tensor, n: int) -> Tensor:
    """Check that client ids are valid, and return them."""
    if ids.dtype != torch.long or ids.dim() != 1 or not len(ids) or ids.min() < 0 or ids.max() >= n:
        raise ValueError(f"clients must be a nonempty int64 tensor [m] of numbers from 0 to {n - 1}, got {ids}")
    return ids


def sort_by_samples(job: Job, cohort: Tensor) -> Tensor:
    """Return the cohort's order by decreasing number of training samples (ties keep their order)."""
    return torch.from_numpy(np.argsort(-job.train_sizes.numpy()[cohort.numpy(), 0], kind="stable"))
