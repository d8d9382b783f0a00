"""Neutral uploads: what a site sends under masks in place of a result that must not leave it.

The server can compute the neutral upload of every site itself, from the model that it sent. So a sum shows nothing of a
site that sends one. A counter shows how many sites do (`fedloom_sites.deploy.secure.counters`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.engine.clients.chunk import client_step, inputs_of
from fedloom.engine.job import Job
from fedloom.local.rows import Fields, remade
from fedloom.processes.clients import TrainTask


def neutral_upload(blank: Job, job: Job, down: Any, t: int, ids: Tensor, idle: Fields) -> Fields:
    """Return the upload of a client that takes no step, without samples or a state.

    Args:
        blank: the run on blank samples.
        job: the run of the site, for its shares of the objective, which are public.
        down: what the site received.
        t: round.
        ids: number of the site ``[1]``.
        idle: an upload, for the shapes.

    Returns:
        The upload, with zeros in place of numbers that are not finite. All zeros if the method needs samples for it.
    """
    task = TrainTask(t, torch.tensor([0]), ids, torch.ones(1, 1))
    try:
        inputs = inputs_of(blank.replace_shares(job.alpha), down, task)
        upload: Fields = client_step(blank, inputs, inputs.work.idle())[0]
    except Exception:  # the message alone decides: no sample was read
        upload = remade(idle, [torch.zeros_like(field) for field in idle])
    return remade(upload, [field.nan_to_num(0.0, 0.0, 0.0) for field in upload])
