"""Detect signs that a model was crafted to make an upload reveal samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.engine.job import Job
from fedloom.errors import RunDirError
from fedloom.local import decay_of


class RefusedModel(RunDirError):
    """Error: a site refuses to train from the received model."""


def layer_norms(job: Job, down: Any) -> list[float]:
    """Return the norms of the received model's layers and of the entire model.

    The list is empty if the received message does not begin with a complete model.
    """
    layout = job.oracle.layout
    model = down[0].reshape(-1) if len(down) else torch.zeros(0)
    if len(model) != layout.d:
        return []
    return [float(part.norm()) for part in (*layout.tree(model[None]).values(), model)]


def check_change(most: float | None, norms: Sequence[float], before: Sequence[float], where: str) -> None:
    """Raise an error if a model's norms differ too much from the norms of the previous model.

    The check reads no samples.

    Args:
        most: maximum factor between the old and the new norm. None for no limit.
        norms: norms of the received model.
        before: norms of the previous model. Empty if there is no previous model.
        where: site and round, which are named in the message.

    Raises:
        RefusedModel: a norm has changed by more than the permitted factor.
    """
    if most is None:
        return
    for new, old in zip(norms, before, strict=False):
        if old > 0 and not old / most <= new <= old * most:
            raise RefusedModel(
                f"{where}: a norm of the model is {new:.4g}, but it was {old:.4g} in the previous "
                f"model, and the site accepts changes only up to a factor of {most:g}"
            )


def check_units(most: float | None, job: Job, down: Any, t: int, ids: Tensor, tokens: int) -> None:
    """Raise an error if a model contains many units that receive no gradient from any sample of the site.

    The message does not state the share of such units: for a crafted layer, this share would equal the largest pixel
    value at this site.

    Args:
        most: maximum allowed share of such units in a layer. None for no limit.
        job: the site's run.
        down: message that the site received.
        t: round.
        ids: the site's number ``[1]``.
        tokens: number of tokens in the vocabulary. A layer that has one column for each token is not checked.

    Raises:
        RefusedModel: a layer contains too many such units.
    """
    row = down[0].reshape(1, -1) if most is not None and len(down) else torch.zeros(1, 0)
    if most is None or row.shape[1] != job.oracle.layout.d:
        return
    work = job.work(t, ids)
    for part in job.oracle.layout.tree(work.full_grad(row) - decay_of(work, row)).values():
        if part.dim() < 3 or part.shape[1] == tokens:  # not a matrix, or a matrix with one column per token
            continue
        if float((part[0].flatten(1) == 0).all(1).double().mean()) > most:
            raise RefusedModel(
                f"round {t}: in one layer, more units receive no gradient from any of the site's "
                f"samples than dead_units = {most:g} allows. Check whether the server crafts models, "
                "or raise dead_units in site.toml"
            )
