"""Staleness: rules for uploads that were computed from an older model.

A change from the received model is scaled by a factor that depends on its staleness, and added to the current model. An
absolute model is first converted to such a change. Values that the server accumulates or stores per client are not
scaled, because the server's sums must match the sums of the clients' states. Values such as losses and counts are not
scaled either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, upload_fields
from fedloom.algorithms._messages import Kind, base_of
from fedloom.engine.job import Job
from fedloom.local.rows import Fields
from fedloom.schedule import Stream


def find_discountable_fields(algorithm: type[Algorithm]) -> dict[str, Kind]:
    """Return the upload fields that are changes from the received model or are converted to such changes."""
    kinds = upload_fields(algorithm).items()
    return {n: k for n, k in kinds if not (k.keeps or k.accumulates or k.label) and (k.primary or _is_change(k))}


def _is_change(kind: Kind) -> bool:
    return kind.averaged and kind.base.startswith("down.")


def convert_stale_uploads(
    job: Job, server: Fields, t: int, ids: Tensor, upload: Fields, received: Fields, staleness: Tensor
) -> Fields:
    """Return uploads after converting them for the server's current state.

    They are unchanged if they are not stale and the schedule has no mixing rate.

    Args:
        job: run with an asynchronous schedule (`Stream`).
        server: the server's current state.
        t: number of the round.
        ids: ids of the clients ``[m]``.
        upload: uploads as the clients sent them.
        received: downloads from which the clients started.
        staleness: number of server steps since the dispatch of each client ``[m]``.
    """
    schedule, fields = job.setting.schedule, find_discountable_fields(type(job.algorithm))
    assert isinstance(schedule, Stream)
    if not fields or (schedule.rate is None and not bool(staleness.any())):
        return upload
    staleness = staleness.to(upload[0].device)
    factor = (schedule.rate or 1.0) * schedule.factor(staleness)[:, None]
    now, changes = None, dict[str, Tensor]()
    for name, kind in fields.items():
        value: Tensor = getattr(upload, name)
        scale = factor.to(value)
        source = kind.base.partition(".")[0]
        if source == "rows" or (source == "down" and schedule.rate is None):
            changes[name] = value * scale
            continue
        now = job.down(server, t, ids) if now is None else now
        if source == "down":
            changes[name] = (value + base_of(kind, received, None) - base_of(kind, now, None)) * scale
            continue
        then, present = (job.algorithm.received(down, upload) for down in (received, now))
        if then.shape[-1] == value.shape[-1]:  # other fields are statistics, which are not converted
            origin = then if schedule.rate is None else present
            changes[name] = torch.where(
                (staleness[:, None] == 0) & (scale == 1), value, present + scale * (value - origin)
            )
    return upload._replace(**changes)
