"""Attackers that forge their uploads after the honest clients of the cohort have trained."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedloom.algorithms._messages import replace_model
from fedloom.engine.clients.chunk import (
    ChunkInputs,
    ClientOutput,
    accept_uploads,
    decode_local_models,
    get_chunk_inputs,
    make_client_output,
    run_client_step,
)
from fedloom.engine.job import Job
from fedloom.errors import attribute_error
from fedloom.local.rows import Fields, rows_of, to_device
from fedloom.processes.clients import ChunkResult, TrainTask
from fedloom.rows.attacks import Forgery


def forge(job: Job, down: Fields, server: Fields, task: TrainTask, honest: Tensor | None, m: int) -> ChunkResult:
    """Forge the uploads of a cohort's attackers (see `forge_models`), and have the server process them."""
    received, output = forge_models(job, down, task, honest, m)
    return accept_uploads(job, server, task, received, output)


def forge_models(job: Job, down: Fields, task: TrainTask, honest: Tensor | None, m: int) -> tuple[Fields, ClientOutput]:
    """Return the attackers' downloads and forged uploads.

    The attack produces models, and the method encodes them (`Algorithm.encode`). A forged model therefore has the same
    effect on the server regardless of how the method represents models.

    Args:
        job: the run from the server's point of view.
        down: download of the cohort.
        task: the cohort's attackers, and their training in this round.
        honest: the honest clients' models ``[h, d]``, for attacks that can read them. None if there are no such models
            or the attack does not read them.
        m: number of clients in the cohort, including attackers.
    """
    assert isinstance(job.setting.attack, Forgery)
    inputs = get_chunk_inputs(job, to_device(rows_of(down, task.place), job.oracle.device), task)
    idle = run_client_step(job, inputs, inputs.work.idle())
    trained = idle[0]
    if job.setting.attack.reads_own:
        work = job.work(task.round, task.ids, trains=True, steps=task.steps)  # without optimizer states
        work.counts = inputs.work.counts
        trained, _ = run_client_step(job, inputs, work)
    absolute = decode_local_models(job, inputs, trained)
    received = job.algorithm.received(inputs.down, trained).expand_as(absolute)
    honest = honest if honest is not None and len(honest) else None
    with attribute_error("attack", job.setting.attack, f"round {task.round}"):
        models: Any = job.setting.attack.forge(honest, received, absolute, m, inputs.work.rng("attack"))
        if not isinstance(models, Tensor) or models.shape != absolute.shape or not models.is_floating_point():
            got = f"{models.dtype} {[*models.shape]}" if hasattr(models, "dtype") else type(models).__name__
            raise ValueError(
                f"`forge` must return models of shape {[*absolute.shape]} and floating-point dtype, got {got}"
            )
    upload, rows = encode_models(job, inputs, models, idle)
    return inputs.down, make_client_output(job, inputs, upload, rows)


def encode_models(job: Job, inputs: ChunkInputs, models: Tensor, idle: tuple[Fields, Fields]) -> tuple[Fields, Fields]:
    """Return the uploads and new states of clients whose training ended at the models ``models [m, .]``.

    ``idle`` contains the uploads and states of these clients if they take no step.
    """
    down, rows, work = inputs
    with attribute_error("method", job.algorithm, f"round {work.round}"):
        message = job.algorithm.encode(models, down, rows, work.uncounted())
    return replace_model(type(job.algorithm), idle, models, down, rows) if message is None else message
