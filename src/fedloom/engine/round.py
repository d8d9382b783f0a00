"""The round: sample, download, train in chunks, aggregate what was accepted, step the server; and its evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import metrics
from fedloom.algorithms import Algorithm
from fedloom.engine.chunk import attack
from fedloom.engine.hybrid import hybrid_scores
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted, spent
from fedloom.engine.scoring import Scores
from fedloom.engine.state import State
from fedloom.engine.uploads import Uploads, weights_of
from fedloom.errors import RunStopped, Stop, blamed
from fedloom.local import Ctx, Work
from fedloom.local.oracles import chunk_count
from fedloom.local.rows import rows_of, to_device
from fedloom.processes.chunks import COUNTS, AskTask, ScoreTask, TrainTask
from fedloom.processes.pool import Crew


def play(job: Job, pool: Crew, state: State) -> State:
    """One round.

    Raises:
        RunStopped: too few uploads are usable, or the server's state is not finite.
    """
    t = state.round + 1
    drawn, sampler, asked = _sample(job, pool, state, t)
    cohort = _longest_first(job, drawn.unique())
    ctx = job.ctx(t, cohort)
    shares = torch.bincount(drawn, minlength=job.n)[cohort, None].double()
    if not job.weigher.probes:
        shares = shares * weights_of(job, state.weigher, None, ctx)[0]
    for store in job.stores.values():
        store.touch(cohort)
    if job.algorithm.mixes:
        job.homes.everywhere(cohort)
    down = job.down(state.server, t, cohort)
    forges = job.forgers[cohort]
    places = (~forges).nonzero()[:, 0]
    uploads = Uploads(job, state.sums)
    if len(places):
        chunks = places.tensor_split(chunk_count(len(places), job.chunk))
        tasks = [TrainTask(t, place, cohort[place], shares[place]) for place in chunks]
        for task, trained in zip(tasks, pool.map("train", (down, state.server), tasks), strict=True):
            uploads.add(task, trained)
    if bool(forges.any()):
        place = forges.nonzero()[:, 0]
        task = TrainTask(t, place, cohort[place], shares[place])
        honest, m = uploads.answers("models"), len(cohort)
        uploads.add(task, pool.once(task.ids, lambda: attack(job, down, state.server, task, honest, m)))
    if uploads.dropped:
        state.notes.append(
            f"round {t}: dropped {len(uploads.dropped)} unusable uploads, of clients {uploads.dropped[:8]}"
        )
    accepted = job.ctx(t, torch.cat(uploads.ids))
    if accepted.m < max(1.0, job.engine.quorum * len(cohort)):
        reason = Stop.DIVERGED if accepted.m == 0 else Stop.TOO_FEW
        raise RunStopped(reason, f"round {t}: {accepted.m} of {len(cohort)} uploads were finite and within bounds")
    up, weigher, aggregator = uploads.aggregate(accepted, state.weigher, state.aggregator)
    with blamed("method", job.algorithm, f"round {t}"):
        server = job.algorithm.server(state.server, up, accepted)
        if getattr(server, "_fields", None) != state.server._fields:
            raise TypeError(f"server must return a {type(state.server).__name__}, got {type(server).__name__}")
    if not all(bool(f.isfinite().all()) for f in server):
        raise RunStopped(Stop.DIVERGED, f"round {t}: the server's state is not finite")
    if job.sampler.learns:
        with blamed("sampler", job.sampler, f"round {t}"):
            sampler = job.sampler.learn(sampler, uploads.answers("told"), accepted)
    counts = torch.cat([uploads.counts.sum(0) + asked, torch.tensor([len(uploads.dropped)])])
    return state.with_(
        round=t, server=server, sampler=sampler, weigher=weigher, aggregator=aggregator, sums=uploads.sums,
        totals=state.totals + counts, uploads=state.uploads.index_add(0, cohort, torch.ones_like(cohort)),
        cohort=accepted.ids,
    )  # fmt: skip


def _sample(job: Job, pool: Crew, state: State, t: int) -> tuple[Tensor, Any, Tensor]:
    """The cohort, the sampler's new state, and what asking the candidates cost, ``[7]``."""
    ctx = job.ctx(t)
    info, cost = None, torch.zeros(len(COUNTS), dtype=torch.long)
    if job.sampler.probes:
        with blamed("sampler", job.sampler, f"round {t}"):
            candidates = _ids(job.sampler.query(state.sampler, ctx), job.n)
        tasks = [AskTask(t, ids) for ids in candidates.tensor_split(chunk_count(len(candidates), job.chunk))]
        answers = list(pool.map("ask", job.algorithm.global_model(state.server), tasks))
        info, cost = torch.cat([a for a, _ in answers]), torch.cat([c for _, c in answers]).sum(0)
    with blamed("sampler", job.sampler, f"round {t}"):
        cohort, sampler = job.sampler.apply(state.sampler, info, ctx)
        return _ids(cohort, job.n), sampler, cost


def _ids(found: Tensor, n: int) -> Tensor:
    """Positions of clients, if that is what they are."""
    if found.dtype != torch.long or found.dim() != 1 or not len(found) or found.min() < 0 or found.max() >= n:
        raise ValueError(f"clients must be a tensor int64 [m] of numbers from 0 to {n - 1}, not empty, got {found}")
    return found


def _longest_first(job: Job, cohort: Tensor) -> Tensor:
    """The cohort by falling number of training samples, then by id."""
    return cohort[torch.argsort(job.train_sizes[cohort, 0], descending=True, stable=True)]


def evaluate(job: Job, pool: Crew, state: State) -> Scores:
    """Score every model after a round and record the figures.

    Raises:
        RunStopped: a model's training loss is not finite.
    """
    scores, t = scores_of(job, pool, state), state.round
    record(job, state, scores)
    if type(job.algorithm).diagnostics is not Algorithm.diagnostics:
        for name, figure in pool.once(job.ctx(t).ids, lambda: diagnose(job, state)).items():
            state.records.total(t, "", "", name, figure)
    for (model, part), values in scores.items():
        if part == "train" and not bool(values["loss"].isfinite().all()):
            raise RunStopped(Stop.DIVERGED, f"round {t}: the training loss of the {model} model is not finite")
    return scores


def scores_of(job: Job, pool: Crew, state: State) -> Scores:
    """Scores of every model that there is after a round."""
    t, n = state.round, job.judge.n
    with blamed("method", job.algorithm, f"round {t}"):
        shared = job.algorithm.global_model(state.server)
        if shared is not None and shared.shape != (job.oracle.layout.d,):
            raise ValueError(f"global_model must return [d] = [{job.oracle.layout.d}], got {[*shared.shape]}")
    if shared is not None or job.has_personal:
        if job.has_personal and job.algorithm.mixes:
            job.homes.everywhere(torch.arange(job.n))
        down = job.down(state.server, t) if job.has_personal else None
        places = torch.arange(n).tensor_split(chunk_count(n, max(job.chunk, 8)))
        tasks = [ScoreTask(t, ids, state.cohort, common=k == 0) for k, ids in enumerate(places)]
        found = list(pool.map("score", (down, shared), tasks))
        scores: Scores = {
            key: {name: torch.cat([f[key][name] for f in found if key in f]) for name in values}
            for key, values in found[0].items()
        }
        if ("personal", job.evaluate.select_on) in scores and ("global", job.evaluate.select_on) in scores:
            scores |= hybrid_scores(scores, job.evaluate.select_on)
    else:
        scores = {}
    return scores


def record(job: Job, state: State, scores: Scores) -> None:
    """Record the scores of a round, what the clients did so far, and what is left of privacy."""
    records, t = state.records, state.round
    with np.errstate(over="ignore", invalid="ignore"):
        _record_scores(job, state, scores)
    _record_extras(job, state)
    for name, value in zip((*COUNTS, "dropped"), state.totals.tolist(), strict=True):
        records.total(t, "", "", name, value)


def _record_scores(job: Job, state: State, scores: Scores) -> None:
    records, t = state.records, state.round
    benign = np.where(job.malicious.numpy(), np.nan, 1.0) if len(job.attackers) else None
    for (model, part), values in scores.items():
        if not part:
            for name, value in values.items():
                records.total(t, model, part, name, float(value.mean()))
            continue
        sizes = job.judge.sizes(part).double().cpu().numpy() if part != "common" else np.ones(1)
        for name, value in values.items():
            if part == "common" and len(value) == 1:
                records.total(t, model, part, name, float(value[0]))
                continue
            records.clients(t, model, part, name, value)
            v = value.numpy() if benign is None else value.numpy() * benign
            if part == "common":
                records.total(t, model, part, f"{name}/mean", metrics.mean(v))
                continue
            centre = scores.get(("global", "common"), {}).get(name)
            for figure, one in metrics.over_clients(
                name, v, sizes, None if centre is None else float(centre[0])
            ).items():
                records.total(t, model, part, figure, one)


def _record_extras(job: Job, state: State) -> None:
    """The privacy that is left, and how well planted groups are recovered."""
    noise = accounted(job.channel, job.aggregator)
    if noise is not None:
        state.records.total(state.round, "", "", "epsilon", spent(noise, job.sampler, state.uploads, state.round))
    labels = getattr(state.weigher, "labels", None)
    if labels is None or not bool((labels >= 0).any()):
        return
    state.records.clients(state.round, "", "", "cluster", labels.cpu())
    if job.judge.groups is not None:
        seen = (labels[state.cohort] >= 0).nonzero()[:, 0]
        ids = state.cohort[seen].sort().values
        nmi = metrics.mutual_information(job.judge.groups[ids].cpu().numpy(), labels[ids].cpu().numpy())
        state.records.total(state.round, "", "", "nmi", nmi)


def diagnose(job: Job, state: State) -> dict[str, float]:
    """The method's own figures after a round; not counted as its work."""
    ctx = job.ctx(state.round)
    down = job.down(state.server, state.round)
    with blamed("method", job.algorithm, f"the diagnostics of round {state.round}"):
        return _figures(job, state, ctx, down)


def _figures(job: Job, state: State, ctx: Ctx, down: Any) -> dict[str, float]:
    total: Any = None
    for ids in ctx.ids.tensor_split(chunk_count(ctx.m, job.chunk)):
        rows = to_device(job.clients.read(ids), job.oracle.device)
        work = Work(job.oracle, ids, job.alpha[ids], job.local, seed=job.seed, round=max(state.round, 1))
        part = job.algorithm.observe(to_device(rows_of(down, ids), job.oracle.device), rows, work)
        if part is not None:
            sums = [f.sum(0) for f in part]
            total = type(part)(*(sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]))
    return job.algorithm.diagnostics(state.server, total, ctx)
