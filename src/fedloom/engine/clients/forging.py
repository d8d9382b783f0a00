"""Attackers: uploads forged after the honest clients of a cohort have trained, and poisoned labels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedloom.algorithms._messages import base_of, primary_field
from fedloom.data.federation import Federation
from fedloom.engine.clients.chunk import ClientOutput, accept, client_step, inputs_of, output_of
from fedloom.engine.job import Job
from fedloom.errors import attribute_error
from fedloom.local.rows import Fields, rows_of, to_device
from fedloom.processes.clients import ChunkResult, TrainTask
from fedloom.rows.attacks import Forgery, Poison
from fedloom.seeds import generator


def forge(job: Job, down: Fields, server: Fields, task: TrainTask, honest: Tensor | None, m: int) -> ChunkResult:
    """Forge the uploads of a cohort's attackers, and accept them; see `forged`."""
    received, output = forged(job, down, task, honest, m)
    return accept(job, server, task, received, output)


def forged(job: Job, down: Fields, task: TrainTask, honest: Tensor | None, m: int) -> tuple[Fields, ClientOutput]:
    """Forge the uploads of a cohort's attackers; what they received, and what they send.

    The primary field is forged in absolute form; all else is what a client sends and keeps that takes no step. If the
    primary field is a difference to a state field, that field takes the forged value.

    Args:
        job: the run.
        down: the cohort's download.
        task: the attackers.
        honest: ``[h, d]`` models of the honest clients, for attackers that see them; none when h is 0.
        m: clients of the cohort.
    """
    assert isinstance(job.setting.attack, Forgery)
    inputs = inputs_of(job, to_device(rows_of(down, task.place), job.oracle.device), task)
    upload, rows = client_step(job, inputs, inputs.work.idle())
    trained = upload
    if job.setting.attack.reads_own:
        work = job.work(task.round, task.ids, trains=True)  # of its own: an optimiser keeps no state of this training
        work.counts = inputs.work.counts
        trained, _ = client_step(job, inputs, work)
    name = primary_field(type(job.algorithm))
    base = base_of(job.fields[name], inputs.down, inputs.rows)
    absolute = getattr(trained, name) + base
    received = job.algorithm.received(inputs.down, trained).expand_as(absolute)
    honest = honest if honest is not None and len(honest) else None
    with attribute_error("attack", job.setting.attack, f"round {task.round}"):
        models = job.setting.attack.forge(honest, received, absolute, m, inputs.work.rng("attack"))
        if models.shape != absolute.shape:
            raise ValueError(f"forge must return models {[*absolute.shape]}, got {[*models.shape]}")
    source, _, field = job.fields[name].base.partition(".")
    if source == "rows":
        rows = rows._replace(**{field: models})
    return inputs.down, output_of(job, inputs, upload._replace(**{name: models - base}), rows)


def poisoned(fed: Federation, attack: Poison, attackers: Tensor, seed: int) -> Federation:
    """The federation whose attackers train on other labels; what models are evaluated on is left alone."""
    y, classes = fed.data.y.clone(), len(fed.data.classes)
    for i in attackers.tolist():
        index = fed.indices("train", i)
        labels = y[index].cpu()
        wrong = attack.poison(labels.clamp(min=0), classes, generator(seed, 0, i, "poison"))
        y[index] = torch.where(labels < 0, labels, wrong).to(y.device)
    return replace(fed, data=replace(fed.data, y=y))
