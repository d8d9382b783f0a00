"""Neutral uploads, which a site sends under masks instead of a result that must not leave the site.

The server can compute every site's neutral upload itself, from the model that it sent. A sum therefore reveals nothing
about a site that sends a neutral upload. A counter shows how many sites send a neutral upload (see
`fedloom_sites.deploy.secure.counters`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.engine.clients.chunk import get_chunk_inputs, run_client_step
from fedloom.engine.job import Job
from fedloom.local.rows import Fields, rebuild_rows
from fedloom.processes.clients import TrainTask


def neutral_upload(blank: Job, job: Job, down: Any, t: int, ids: Tensor, idle: Fields) -> Fields:
    """Return the upload of a client that takes no steps, computed without samples or a state.

    Args:
        blank: the same run on blank samples.
        job: the site's run. Only its shares of the objective, which are public, are used.
        down: message that the site received.
        t: round.
        ids: the site's number ``[1]``.
        idle: upload that determines the shapes of the arrays.

    Returns:
        The upload, with zeros in place of non-finite numbers. If the method needs samples to compute
        its upload, all numbers are zero.
    """
    task = TrainTask(t, torch.tensor([0]), ids, torch.ones(1, 1))
    try:
        inputs = get_chunk_inputs(blank.replace_shares(job.alpha), down, task)
        upload: Fields = run_client_step(blank, inputs, inputs.work.idle())[0]
    except Exception:  # no sample was read, so the error depends only on the message
        upload = rebuild_rows(idle, [torch.zeros_like(field) for field in idle])
    return rebuild_rows(upload, [field.nan_to_num(0.0, 0.0, 0.0) for field in upload])
