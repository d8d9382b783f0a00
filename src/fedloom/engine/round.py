"""The round: sample, download, train in chunks, aggregate what was accepted, step the server; and its evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import metrics
from fedloom.algorithms._base import Algorithm, Kept, Mean, Rows, primary_field
from fedloom.engine.chunk import attack
from fedloom.engine.hybrid import HIGHER, hybrid_scores
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted, spent
from fedloom.engine.scoring import Scores
from fedloom.engine.state import State
from fedloom.errors import ConfigError, RunStopped, Stop, blamed
from fedloom.local import Ctx, Work
from fedloom.local.oracles import chunk_count
from fedloom.local.rows import rows_of, to_device
from fedloom.processes.chunks import COUNTS, AskTask, ScoreTask, Trained, TrainTask
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
        shares = shares * _weights(job, state, None, ctx)[0]
    for store in job.stores.values():
        store.touch(cohort)
    if job.algorithm.mixes:
        job.homes.everywhere(cohort)
    down = job.down(state.server, t, cohort)
    forges = job.forgers[cohort]
    places = (~forges).nonzero()[:, 0]
    total = _Total(job, state.sums)
    if len(places):
        chunks = places.tensor_split(chunk_count(len(places), job.chunk))
        tasks = [TrainTask(t, place, cohort[place], shares[place]) for place in chunks]
        for task, trained in zip(tasks, pool.map("train", (down, state.server), tasks), strict=True):
            total.add(task, trained)
    if bool(forges.any()):
        place = forges.nonzero()[:, 0]
        task = TrainTask(t, place, cohort[place], shares[place])
        honest, m = total.models(), len(cohort)
        total.add(task, pool.once(task.ids, lambda: attack(job, down, state.server, task, honest, m)))
    if total.dropped:
        state.notes.append(f"round {t}: dropped {len(total.dropped)} unusable uploads, of clients {total.dropped[:8]}")
    accepted = job.ctx(t, torch.cat(total.ids))
    if accepted.m < max(1.0, job.engine.quorum * len(cohort)):
        reason = Stop.DIVERGED if accepted.m == 0 else Stop.TOO_FEW
        raise RunStopped(reason, f"round {t}: {accepted.m} of {len(cohort)} uploads were finite and within bounds")
    up, weigher, aggregator = total.aggregate(accepted, state)
    with blamed("method", job.algorithm, f"round {t}"):
        server = job.algorithm.server(state.server, up, accepted)
        if getattr(server, "_fields", None) != state.server._fields:
            raise TypeError(f"server must return a {type(state.server).__name__}, got {type(server).__name__}")
    if not all(bool(f.isfinite().all()) for f in server):
        raise RunStopped(Stop.DIVERGED, f"round {t}: the server's state is not finite")
    if job.sampler.learns:
        with blamed("sampler", job.sampler, f"round {t}"):
            sampler = job.sampler.learn(sampler, total.told(), accepted)
    counts = torch.cat([total.counts.sum(0) + asked, torch.tensor([len(total.dropped)])])
    return state.with_(
        round=t, server=server, sampler=sampler, weigher=weigher, aggregator=aggregator, sums=total.sums,
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


def _weights(job: Job, state: State, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Any]:
    """Weights ``[m, 1]`` of a cohort, and the weigher's new state."""
    with blamed("weigher", job.weigher, f"round {ctx.round}"):
        weights, weigher = job.weigher.apply(state.weigher, info, ctx)
        if weights.shape != (ctx.m, 1) or (bool((weights < 0).any()) and not job.weigher.signed):
            got = f"{[*weights.shape]}, at least {float(weights.min())}"
            raise ValueError(f"weights must be [m, 1] = [{ctx.m}, 1] and not negative, got {got}")
    return weights, weigher


def _longest_first(job: Job, cohort: Tensor) -> Tensor:
    """The cohort by falling number of training samples, then by id."""
    return cohort[torch.argsort(job.train_sizes[cohort, 0], descending=True, stable=True)]


class _Total:
    """What the chunks of a round add up to, in their order."""

    def __init__(self, job: Job, sums: dict[str, Tensor]) -> None:
        self.job = job
        self.sums = {name: value.clone() for name, value in sums.items()}
        self.ids: list[Tensor] = []
        self.dropped: list[int] = []
        self.counts = torch.zeros(0, len(COUNTS), dtype=torch.long)
        self._means: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._shares = 0.0
        self._share: list[Tensor] = []

    def add(self, task: TrainTask, trained: Trained) -> None:
        self.ids.append(task.ids[trained.accepted])
        self.dropped += task.ids[~trained.accepted].tolist()
        self.counts = torch.cat([self.counts, trained.counts])
        self._shares += trained.shares
        self._share.append(task.share[trained.accepted])
        for name, value in trained.tensors.items():
            group, _, field = name.partition("/")
            if group == "kept":
                self.sums[field].add_(value)
            elif group == "sum" and field in self._means:
                self._means[field].add_(value)
            elif group == "sum":
                self._means[field] = value.double()
            else:
                self._rows.setdefault(name, []).append(value)

    def models(self) -> Tensor | None:
        """Models of the honest clients, for attackers that see them."""
        return torch.cat(self._rows["models"]) if self._rows.get("models") else None

    def told(self) -> Tensor:
        """What a sampler learns from every accepted client."""
        return torch.cat(self._rows["told"])

    def aggregate(self, ctx: Ctx, state: State) -> tuple[Any, Any, dict[str, Tensor]]:
        """The upload as the server gets it, and the new states of the weigher and the aggregator."""
        job = self.job
        weigher, aggregator, combined = state.weigher, state.aggregator, dict[str, Tensor]()
        shares = torch.cat(self._share)
        if job.weigher.probes:
            weights, weigher = _weights(job, state, torch.cat(self._rows["info"]), ctx)
            shares = shares * weights
        if job.robust and job.aggregator is not None:
            rows, ids = self._robust_rows(ctx)
            primary = primary_field(type(job.algorithm))
            kind = job.fields[primary]
            weights = torch.ones(len(ids), 1, dtype=torch.float64) if job.kept_fields else shares
            if isinstance(kind, Kept) and kind.weight is not None:
                weights = rows[kind.weight]
            try:
                with blamed("aggregator", job.aggregator, f"round {ctx.round}"):
                    deciding = job.ctx(ctx.round, ids)
                    combined, aggregator = job.aggregator.apply(aggregator, rows, weights, primary, deciding)
                    _check_combined(combined, rows)
            except ConfigError as error:
                raise RunStopped(Stop.TOO_FEW, f"round {ctx.round}: {error}") from error
        values = []
        for name, kind in job.fields.items():
            if isinstance(kind, Rows):
                values.append(torch.cat(self._rows[f"rows/{name}"]))
                continue
            if name in combined:
                value = combined[name]
            elif isinstance(kind, Kept):
                value = self.sums[name] / (job.n if kind.weight is None else self.sums[kind.weight])
            elif f"rows/{name}" in self._rows:
                weights = torch.ones_like(shares) if kind.accumulates else shares
                value = _mean(torch.cat(self._rows[f"rows/{name}"]), weights)
            else:
                value = self._means[name] / (ctx.m if kind.accumulates else self._shares)
            values.append(value.to(job.oracle.device, job.oracle.dtype))
        return job.upload(*values), weigher, aggregator

    def _robust_rows(self, ctx: Ctx) -> tuple[dict[str, Tensor], Tensor]:
        """Rows that a robust rule decides among, and their clients: the cohort's, or all that the server has seen."""
        if self.job.kept_fields:
            self.job.homes.everywhere(torch.arange(self.job.n))
            ids = self.job.kept.seen.nonzero()[:, 0]
            return self.job.kept.read(ids)._asdict(), ids
        means = [name for name, kind in self.job.fields.items() if isinstance(kind, Mean)]
        return {name: torch.cat(self._rows[f"rows/{name}"]) for name in means}, ctx.ids


def _check_combined(combined: dict[str, Tensor], rows: dict[str, Tensor]) -> None:
    """That an aggregator gave one vector of every field."""
    wanted = {name: [*value.shape[1:]] for name, value in rows.items()}
    got = {name: [*value.shape] for name, value in combined.items()}
    if got != wanted:
        raise ValueError(f"it must give one vector of every field, of the shapes {wanted}, got {got}")


def _mean(rows: Tensor, weights: Tensor) -> Tensor:
    return ((weights / weights.sum()).T.to(rows.device, torch.float64) @ rows.double())[0]


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
            records.total(t, model, part, f"{name}/mean", metrics.mean(v))
            if part == "common":
                continue
            records.total(t, model, part, f"{name}/weighted", metrics.weighted(v, sizes))
            records.total(t, model, part, f"{name}/worst10", metrics.worst(v, low=name in GOOD))
            if name == "loss":
                records.total(t, model, part, "loss/variance", metrics.variance(v))
                records.total(t, model, part, "cd", metrics.disagreement(v))
            if name in HIGHER:
                records.total(t, model, part, f"{name}/variance", metrics.variance(v))
                records.total(t, model, part, f"{name}/jain", metrics.jain(v))
                centre = scores.get(("global", "common"), {}).get(name)
                if centre is not None:
                    records.total(t, model, part, f"{name}/sigma", metrics.spread(v, float(centre[0])))
                for k, decile in enumerate(metrics.deciles(v), 1):
                    records.total(t, model, part, f"{name}/decile{k}", float(decile))


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


GOOD = (*HIGHER, "macro_f1", "f1", "auprc")
"""Metrics of which more is better."""
