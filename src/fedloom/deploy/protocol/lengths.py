"""Lengths of the fields of an upload, for which both ends have bounds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedloom.engine.job import Job


def lengths(job: Job, up: Any, down: Any) -> dict[str, Tensor]:
    """The lengths ``[m]`` of the fields of uploads, the model as a difference to what the client received.

    Fields of one number beside the model have ranges instead (`Algorithm.ranges`).
    """
    norms = {}
    for name, field in up._asdict().items():
        kind = job.fields[name]
        if kind.primary or field.shape[1] > 1:
            whole = absolute(kind, field.shape[1], down[0].shape[-1])
            change = field - job.algorithm.received(down, up) if whole else field
            norms[name] = change.double().square().sum(1).sqrt()
    return norms


def absolute(kind: Any, width: int, received: int) -> bool:
    """Whether a field of an upload is the model itself, whose difference to the ``received`` numbers is bounded."""
    return bool(kind.primary and kind.base == "zero" and width == received)
