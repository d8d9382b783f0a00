"""Scoring models on the clients' own parts, and on the common test set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.engine.job import Job
from fedloom.engine.sparsity import sizes_of
from fedloom.errors import ClientError, FedloomError, blamed, cause_of
from fedloom.local import Work
from fedloom.local.oracles import Network
from fedloom.local.rows import rows_of, to_device
from fedloom.processes.chunks import ScoreTask

Scores = dict[tuple[str, str], dict[str, Tensor]]
"""(model, part) -> metric -> float64 ``[m]``; part "" has figures of the models themselves."""


def score(job: Job, down: Any, global_model: Tensor | None, task: ScoreTask) -> Scores:
    """Scores of the global and the personal models of a chunk of clients."""
    with blamed("model", job.spec, f"round {task.round}"):
        return _scores(job, down, global_model, task)


def _scores(job: Job, down: Any, global_model: Tensor | None, task: ScoreTask) -> Scores:
    scores: Scores = {}
    if global_model is not None:
        row = global_model.to(job.oracle.device)
        job.oracle.set_statistics(row, task.cohort)
        for part in job.evaluate.parts:
            scores["global", part] = _score_shared(job, row, task.ids, part)
        if task.common:
            scores["global", "common"] = _score_common(job, row)
            scores["global", ""] = sizes_of(job.algorithm, job.oracle.layout, row[None])
    if job.has_personal:
        models = personal_models(job, down, task.round, task.ids)
        scores |= _score_personal(job, models, task.ids)
        scores["personal", ""] = sizes_of(job.algorithm, job.oracle.layout, models)
        if job.evaluate.personal_on_common:
            found = [_score_common(job, row) for row in models]
            scores["personal", "common"] = {name: torch.cat([f[name] for f in found]) for name in found[0]}
    return scores


def personal_models(job: Job, down: Any, round: int, ids: Tensor) -> Tensor:
    """Personal models ``[m, d]``; a client never seen makes one from the template first.

    Raises:
        ClientError: code of the method failed.
    """
    device = job.oracle.device
    rows = to_device(job.clients.read(ids), device)
    mine = to_device(rows_of(down, ids), device)
    work = Work(job.oracle, ids, job.alpha[ids].to(device), job.local, seed=job.seed, round=round)
    fresh = (~job.clients.seen[ids]).nonzero()[:, 0]
    try:
        if len(fresh):
            _, made = job.algorithm.client(
                rows_of(mine, fresh), type(rows)(*[r[fresh] for r in rows]), work.take(fresh)
            )
            rows = type(rows)(*[r.index_copy(0, fresh.to(device), f) for r, f in zip(rows, made, strict=True)])
        models = job.algorithm.personal(mine, rows, work)
        if models is None or models.shape != (len(ids), job.oracle.layout.d):
            got = None if models is None else [*models.shape]
            raise ValueError(f"personal must return [{len(ids)}, {job.oracle.layout.d}], got {got}")
    except FedloomError:
        raise
    except Exception as error:
        raise ClientError("personal model", round, ids.tolist(), cause_of(error)) from error
    return models


def _score_shared(job: Job, row: Tensor, ids: Tensor, part: str) -> dict[str, Tensor]:
    """One model on the parts of many clients, in one pass over their samples."""
    fed = job.judge
    pieces = [fed.indices(part, i) for i in ids.tolist()]
    owner = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(p) for p in pieces]))
    return _metrics(job.oracle, fed, [(row, torch.cat(pieces))], owner, len(ids))


def _score_personal(job: Job, models: Tensor, ids: Tensor) -> Scores:
    """Every client's model on its own parts."""
    oracle, fed = job.oracle, job.judge
    scores: Scores = {}
    for part in job.evaluate.parts:
        pairs = [(row, fed.indices(part, i)) for row, i in zip(models, ids.tolist(), strict=True)]
        owner = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(p) for _, p in pairs]))
        if not oracle.normalisers:
            scores["personal", part] = _metrics(oracle, fed, pairs, owner, len(ids))
            continue
        alone = []
        for (row, index), i in zip(pairs, ids, strict=True):
            oracle.set_statistics(row, i[None])
            alone.append(_metrics(oracle, fed, [(row, index)], torch.zeros(len(index), dtype=torch.long), 1))
        scores["personal", part] = {name: torch.cat([a[name] for a in alone]) for name in alone[0]}
    return scores


def _score_common(job: Job, row: Tensor) -> dict[str, Tensor]:
    index = common_test(job.judge)
    return _metrics(job.oracle, job.judge, [(row, index)], torch.zeros(len(index), dtype=torch.long), 1)


def common_test(fed: Federation) -> Tensor:
    """The source's test set if the federation keeps one, else the union of the clients' test parts."""
    return fed.parts["test"].index if fed.test is None else fed.test


def _metrics(
    oracle: Network, fed: Federation, pairs: list[tuple[Tensor, Tensor]], owner: Tensor, n: int
) -> dict[str, Tensor]:
    outputs = list(_outputs(oracle, pairs))
    index = torch.cat([index for _, index in pairs])
    if not outputs:
        outputs = [torch.empty(0, oracle.task.outputs, dtype=oracle.dtype, device=oracle.device)]
    return oracle.task.metrics(torch.cat(outputs), fed.targets(index), owner, n)


def _outputs(oracle: Network, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    for row, index in pairs:
        if len(index):
            yield from oracle.outputs(row, index)
