"""Lengths of the fields of an upload, for which both ends have bounds, and ranges of its single numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.engine.job import Job

TINY = 1e-6
"""What a number may be off beside its relative error."""
SLACK = 1 + 1e-4
"""What a number may be off, relative to it."""


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


def out_of_range(up: object, ranges: Mapping[str, tuple[object, object]]) -> Iterator[tuple[str, float, float, float]]:
    """Field, number, least and largest of every number of an upload that is not within its range.

    Args:
        up: the upload of one client, fields ``[1, .]``.
        ranges: least and largest number of fields, each one number or as many as the field has.
    """
    for name, limits in ranges.items():
        numbers = getattr(up, name).double().flatten()
        bounds = [torch.as_tensor(limit).double().flatten().expand(len(numbers)).tolist() for limit in limits]
        for number, low, high in zip(numbers.tolist(), *bounds, strict=True):
            if low - TINY > number * (SLACK if number >= 0 else 1 / SLACK) or number > high * SLACK + TINY:
                yield name, number, low, high


def absolute(kind: Any, width: int, received: int) -> bool:
    """Whether a field of an upload is the model itself, whose difference to the ``received`` numbers is bounded."""
    return bool(kind.primary and kind.base == "zero" and width == received)
