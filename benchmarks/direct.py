"""Rounds of an algorithm without the engine: they call `down`, `client` for each chunk, and `server` directly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from workloads import CLASSES, Workload

from fedloom.algorithms import ALGORITHMS
from fedloom.data.federation import Federation
from fedloom.local import Ctx, LocalSGD, Work
from fedloom.local.oracles import chunk_count, chunk_limit, make_oracle
from fedloom.local.rows import map_rows
from fedloom.tasks import Classification


class DirectRounds:
    """Rounds that divide the cohort into equal chunks for one oracle, and store client states as rows ``[n, d]``."""

    def __init__(self, workload: Workload, fed: Federation, method: str, oracle: str, chunk: int | None) -> None:
        self.workload, self.algorithm = workload, ALGORITHMS[method]()
        module = workload.model.build(workload.shape, CLASSES)
        self.oracle = make_oracle(module, Classification(classes=CLASSES), fed, oracle)
        m, n = workload.cohort, workload.clients
        self.chunks = math.ceil(m / chunk) if chunk else chunk_count(m, chunk_limit(self.oracle))
        layout = self.oracle.layout
        local = LocalSGD(lr=0.01, batch_size=workload.batch)
        weight, sizes = torch.full((n, 1), 1 / n), fed.sizes()[:, None]
        self.ctx = Ctx(0, n, m, workload.cohort_of(0), layout, weight, sizes, None, local, 0, workload.rounds)
        self.algorithm = self.algorithm.derive_options(self.ctx)
        self.server, template, _ = self.algorithm.init(layout.vector(module), self.ctx)
        self.rows = map_rows(lambda r: r.repeat(n, 1), template)

    def __call__(self, round: int) -> None:
        """Compute one round."""
        ctx = self.ctx._replace(round=round, ids=self.workload.cohort_of(0))
        down = self.algorithm.down(self.server, None, ctx)
        total: Any = None
        for ids in ctx.ids.tensor_split(self.chunks):
            work = Work(self.oracle, ids, ctx.weight[ids], ctx.local, round=round)
            rows = map_rows(lambda r, ids=ids: r[ids], self.rows)
            up, rows = self.algorithm.client(down, rows, work)
            self._write(ids, rows)
            part = [field.sum(0) if len(ids) > 1 else field[0] for field in up]
            total = part if total is None else [t.add_(p) for t, p in zip(total, part, strict=True)]
        self.server = self.algorithm.server(self.server, type(up)(*(t / ctx.m for t in total)), ctx)

    def _write(self, ids: Tensor, rows: Any) -> None:
        for kept, new in zip(self.rows, rows, strict=True):
            kept[ids] = new
