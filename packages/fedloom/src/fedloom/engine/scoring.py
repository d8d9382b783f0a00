"""Evaluation after a round: all clients' scores, the method's diagnostics, and their records."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.choose.shares import uses_clusters
from fedloom.engine.clients.scores import WORK_KEY, hybrid_scores
from fedloom.engine.job import Job
from fedloom.engine.privacy import find_accounted_noise, largest_epsilon
from fedloom.engine.records import Record, score_records
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import (
    FATE_COLUMN,
    ROUND_COLUMN,
    VERSION_COLUMN,
    Clock,
    ReplyOutcome,
    divide_client_time,
    upload_counts,
)
from fedloom.errors import attribute_error
from fedloom.local import Ctx
from fedloom.local.oracles import chunk_count
from fedloom.local.rows import Fields, rebuild_rows, rows_of, to_device
from fedloom.metrics import mutual_information
from fedloom.processes.clients import CLIENT_COUNTS, Clients, ScoreRequest, Scores
from fedloom.rundir import UPLOADS_FIGURE
from fedloom.schedule import Fleet


def score_round(job: Job, clients: Clients, state: State) -> tuple[State, str]:
    """Evaluate every model after a round.

    Returns:
        The state with the scores added to its records, and a sentence if a loss is not finite. The check uses the
            models' training losses or, if training sets are not evaluated, their losses on any evaluated part.
    """
    job = job.replace_shares(state.shares)
    scores, t = score_models(job, clients, state), state.round
    records = [*make_records(job, state, scores)]
    if type(job.algorithm).diagnostics is not Algorithm.diagnostics:
        figures = clients.call_once(job.ctx(t).ids, lambda: compute_diagnostics(job, state))
        records += [Record.make_federation_record(t, "", "", name, figure) for name, figure in figures.items()]
    lost, notes = [*_find_lost_scores(job, scores)], list[str]()
    parts = job.setting.evaluate.parts
    scored_kinds = ("train",) if "train" in parts else parts
    unusable = next((f"round {t}: {loss} is not finite" for part, loss, _ in lost if part in scored_kinds), "")
    for part, loss, ids in lost:
        note = f"{loss} is not finite for {len(ids)} clients, which are excluded from means: {ids[:8]}"
        notes += [note] if part not in scored_kinds and note not in state.notes else []
    return state.with_(records=state.records.plus(records), notes=(*state.notes, *notes)), unusable


def _find_lost_scores(job: Job, scores: Scores) -> Iterator[tuple[str, str, list[int]]]:
    """Yield each part and model with the clients whose loss is not finite although they have samples."""
    names = {"train": "training"}
    for (model, part), values in scores.items():
        if part in job.setting.evaluate.parts:
            has_samples = job.eval_fed.sizes(part).cpu()[job.scored_ids] > 0
            ids = job.scored_ids[has_samples & ~values["loss"].isfinite().cpu()].tolist()
            if ids:
                yield part, f"the {names.get(part, part)} loss of the {model} model", ids


def score_request(job: Job, state: State) -> ScoreRequest | None:
    """Return a request for every model's scores after a round, or None if no model can be evaluated."""
    t = state.round
    with attribute_error("method", job.algorithm, f"round {t}"):
        model = job.algorithm.global_model(state.server)
        if model is not None and model.shape != (job.oracle.layout.d,):
            raise ValueError(
                f"`global_model` must return a tensor of shape [d] = [{job.oracle.layout.d}], got {[*model.shape]}"
            )
    if model is None and not job.has_personal:
        return None
    if job.has_personal and job.mixes:
        job.locations.replicate(torch.arange(job.n))
    down = job.down(state.server, t) if job.has_personal else None
    return ScoreRequest(t, job.scored_ids, state.cohort, down, model, state.shares)


def score_models(job: Job, clients: Clients, state: State) -> Scores:
    """Return every model's scores after a round, including the hybrid model's."""
    request = score_request(job, state)
    if request is None:
        return {}
    pieces = list(clients.score(request))
    scores: Scores = {
        key: {name: torch.cat([piece[key][name] for piece in pieces if key in piece]) for name in values}
        for key, values in pieces[0].items()
    }
    return scores | hybrid_scores(scores, job.setting.evaluate.select_on)


def make_records(job: Job, state: State, scores: Scores) -> Iterator[Record]:
    """Yield a round's records: scores, total work so far, times, privacy cost, and clusters.

    The total work covers the training in all rounds and the training of the personal models that are evaluated after
    this round. If only some clients are evaluated, the others are assumed to need as much work for their personal
    models.
    """
    t, scored = state.round, job.scored_ids
    cost, scores = scores.get(WORK_KEY, {}), {key: values for key, values in scores.items() if key != WORK_KEY}
    benign = torch.where(job.malicious[scored], torch.nan, 1.0).double().numpy() if len(job.attackers) else None
    parts = job.setting.evaluate.parts
    sizes: dict[str, NDArray[np.float64]] = {
        part: job.eval_fed.sizes(part).cpu()[scored].double().numpy() for part in parts
    }
    yield from score_records(t, scores, sizes, benign)
    share = job.n / len(scored)
    for name, value in zip((*CLIENT_COUNTS, "dropped"), state.totals.tolist(), strict=True):
        scoring = float(cost[name].nansum()) if name in cost else 0.0
        yield Record.make_federation_record(t, "", "", name, value + round(scoring * share))
    if state.clock is not None:
        yield from _upload_records(t, state.clock, job.n, scored)
        if job.fleet is not None:
            yield from _time_records(t, state.clock, job.fleet, scored)
    noise = find_accounted_noise(job.setting.upload_transform, job.setting.aggregator)
    if noise is not None:
        yield Record.make_federation_record(
            t, "", "", "epsilon", largest_epsilon(noise, job.setting.sampler, state.uploads, t)
        )
    if uses_clusters(job.setting.client_weights):
        yield Record.make_client_record(t, "", "", "share", job.alpha[scored, 0])
    labels = getattr(state.weigher, "labels", None)
    if labels is None or not bool((labels >= 0).any()):
        return
    yield Record.make_client_record(t, "", "", "cluster", labels.cpu()[scored])
    if job.eval_fed.groups is not None:
        ids = state.cohort[labels[state.cohort] >= 0].sort().values
        planted = job.eval_fed.groups[ids].cpu().numpy()
        if len(set(planted.tolist())) > 1:  # with a single planted group, the NMI is always 0
            yield Record.make_federation_record(
                t, "", "", "nmi", mutual_information(planted, labels[ids].cpu().numpy())
            )


def _time_records(t: int, clock: Clock, fleet: Fleet, scored: Tensor) -> Iterator[Record]:
    """Yield records of a round's virtual time, and of how long clients were busy, idle or absent."""
    use = divide_client_time(clock, fleet)
    present = float((clock.now - use.absent).sum())
    yield Record.make_federation_record(t, "", "", "simulated_seconds", clock.now)
    yield Record.make_federation_record(
        t, "", "", "idle_share", float(use.idle.sum()) / present if present > 0 else 0.0
    )
    for name in ("busy", "absent", "idle"):
        yield Record.make_client_record(t, "", "", f"{name}_seconds", getattr(use, name)[scored])
    yield Record.make_client_record(t, "", "", "device_class", fleet.member[scored])


def _upload_records(t: int, clock: Clock, n: int, scored: Tensor) -> Iterator[Record]:
    """Yield records of how many uploads each client has delivered by a round, and of their staleness."""
    log, counts = clock.history(), upload_counts(clock, n)
    yield Record.make_federation_record(t, "", "", "unheard", float(counts.unheard.sum()))
    used = log[log[:, FATE_COLUMN] == ReplyOutcome.USED]
    if len(used):
        staleness = used[:, ROUND_COLUMN] - used[:, VERSION_COLUMN] - 1
        yield Record.make_federation_record(t, "", "", "staleness/mean", float(staleness.mean()))
        yield Record.make_federation_record(t, "", "", "staleness/max", float(staleness.max()))
    yield Record.make_client_record(t, "", "", UPLOADS_FIGURE, counts.used[scored])
    yield Record.make_client_record(t, "", "", "staleness", counts.staleness[scored])


def compute_diagnostics(job: Job, state: State) -> dict[str, float]:
    """Compute the method's diagnostics after a round.

    Their computation does not count toward the method's recorded work.
    """
    ctx = job.ctx(state.round)
    down = job.down(state.server, state.round)
    with attribute_error("method", job.algorithm, f"the diagnostics of round {state.round}"):
        return _diagnostic_figures(job, state, ctx, down)


def _diagnostic_figures(job: Job, state: State, ctx: Ctx, down: Fields) -> dict[str, float]:
    total: Fields | None = None
    for ids in ctx.ids.tensor_split(chunk_count(ctx.m, job.chunk)):
        rows = to_device(job.clients.read(ids), job.oracle.device)
        work = job.work(max(state.round, 1), ids)
        part = job.algorithm.observe(to_device(rows_of(down, ids), job.oracle.device), rows, work)
        if part is not None:
            sums = [f.sum(0) for f in part]
            total = rebuild_rows(part, sums if total is None else [a + b for a, b in zip(total, sums, strict=True)])
    return job.algorithm.diagnostics(state.server, total, ctx)
