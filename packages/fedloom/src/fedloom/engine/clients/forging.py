"""Attackers: uploads that are forged after the honest clients of a cohort have trained."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedloom.algorithms._messages import with_model
from fedloom.engine.clients.chunk import ClientOutput, Inputs, accept, client_step, decoded, inputs_of, output_of
from fedloom.engine.job import Job
from fedloom.errors import attribute_error
from fedloom.local.rows import Fields, rows_of, to_device
from fedloom.processes.clients import ChunkResult, TrainTask
from fedloom.rows.attacks import Forgery


def forge(job: Job, down: Fields, server: Fields, task: TrainTask, honest: Tensor | None, m: int) -> ChunkResult:
    """Return a cohort's uploads, including the forged uploads of its attackers (see `forged`)."""
    received, output = forged(job, down, task, honest, m)
    return accept(job, server, task, received, output)


def forged(job: Job, down: Fields, task: TrainTask, honest: Tensor | None, m: int) -> tuple[Fields, ClientOutput]:
    """Return the forged uploads of a cohort's attackers, computed from their downloads.

    The attack produces models, and the method encodes them (`Algorithm.encode`), so that a model has the same effect on
    the server in whatever form a method sends it.

    Args:
        job: run of the server.
        down: download of the cohort.
        task: what the attackers do in this round.
        honest: models ``[h, d]`` of the honest clients, for attackers that see them. None if h is 0.
        m: number of clients in the cohort.
    """
    assert isinstance(job.setting.attack, Forgery)
    inputs = inputs_of(job, to_device(rows_of(down, task.place), job.oracle.device), task)
    idle = client_step(job, inputs, inputs.work.idle())
    trained = idle[0]
    if job.setting.attack.reads_own:
        work = job.work(task.round, task.ids, trains=True, steps=task.steps)  # of its own: an optimiser keeps no state
        work.counts = inputs.work.counts
        trained, _ = client_step(job, inputs, work)
    absolute = decoded(job, inputs, trained)
    received = job.algorithm.received(inputs.down, trained).expand_as(absolute)
    honest = honest if honest is not None and len(honest) else None
    with attribute_error("attack", job.setting.attack, f"round {task.round}"):
        models: Any = job.setting.attack.forge(honest, received, absolute, m, inputs.work.rng("attack"))
        if not isinstance(models, Tensor) or models.shape != absolute.shape or not models.is_floating_point():
            got = f"{models.dtype} {[*models.shape]}" if hasattr(models, "dtype") else type(models).__name__
            raise ValueError(f"forge must return models {[*absolute.shape]} as a tensor of floats, got {got}")
    upload, rows = encoded(job, inputs, models, idle)
    return inputs.down, output_of(job, inputs, upload, rows)


def encoded(job: Job, inputs: Inputs, models: Tensor, idle: tuple[Fields, Fields]) -> tuple[Fields, Fields]:
    """Return the upload and the rows of clients whose training ended at ``models [m, .]``.

    ``idle`` is the upload of these clients if they take no step.
    """
    down, rows, work = inputs
    with attribute_error("method", job.algorithm, f"round {work.round}"):
        message = job.algorithm.encode(models, down, rows, work.uncounted())
    return with_model(type(job.algorithm), idle, models, down, rows) if message is None else message
