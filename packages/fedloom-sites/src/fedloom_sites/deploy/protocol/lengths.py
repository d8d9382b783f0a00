"""Bounds on the norms of an upload's fields (at the server and at the sites), and ranges of its individual numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.engine.job import Job

ABSOLUTE_SLACK = 1e-6
"""Absolute tolerance for a number, which is added to the relative tolerance."""
RELATIVE_SLACK = 1 + 1e-4
"""Allowed excess of a number over its range, as a factor."""


def upload_norms(job: Job, up: Any, down: Any) -> dict[str, Tensor]:
    """Compute the norms ``[m]`` of uploads' fields, with the model represented by its change from the download.

    Fields with a single number, except the model, have ranges instead (`Algorithm.ranges`).
    """
    norms = {}
    for name, field in up._asdict().items():
        kind = job.fields[name]
        if kind.primary or field.shape[1] > 1:
            whole = is_absolute_model(kind, field.shape[1], down[0].shape[-1])
            change = field - job.algorithm.received(down, up) if whole else field
            norms[name] = change.double().square().sum(1).sqrt()
    return norms


def clip_upload(job: Job, up: Any, down: Any, bounds: Mapping[str, float]) -> tuple[Any, bool]:
    """Project the fields of one client's upload onto their bounds.

    Two bounds apply: the agreed norm of a field's difference, and ``engine.norm_bound`` for the field itself.

    Args:
        job: run.
        up: upload of one client, with finite fields ``[1, .]``.
        down: message received by the client.
        bounds: maximum norm of a field's difference, keyed by the field's name. A field that is not listed has no
            bound.

    Returns:
        The upload, and whether the norm of any field was too large.
    """
    fields, is_cut = up._asdict(), False
    for name, norm in upload_norms(job, up, down).items():
        most = bounds.get(name, math.inf)
        if float(norm) <= most:
            continue
        field, is_cut = fields[name], True
        whole = is_absolute_model(job.fields[name], field.shape[1], down[0].shape[-1])
        start = job.algorithm.received(down, up).expand_as(field) if whole else torch.zeros_like(field)
        fields[name] = start + _scale_to_max_norm(field - start, most)
    longest = math.inf if job.setting.engine.norm_bound is None else job.setting.engine.norm_bound
    for name, field in fields.items():
        if float(torch.linalg.vector_norm(field.double())) > longest:
            fields[name], is_cut = _scale_to_max_norm(field, longest), True
    return type(up)(**fields), is_cut


def _scale_to_max_norm(row: Tensor, most: float) -> Tensor:
    """Scale a finite row down to a maximum norm.

    The row is first divided by its largest absolute value to prevent overflow.
    """
    largest = row.abs().max().double()
    unit = row.double() / largest
    return (unit * (most / float(unit.square().sum().sqrt()))).to(row)


def values_out_of_range(
    up: object, ranges: Mapping[str, tuple[object, object]]
) -> Iterator[tuple[str, float, float, float]]:
    """Yield the field, the value, and the minimum and maximum of the range, for every number that is outside its range.

    Args:
        up: upload of one client, with fields ``[1, .]``.
        ranges: minimum and maximum of fields, each given as one number or as one number per entry of the field.
    """
    for name, limits in ranges.items():
        numbers = getattr(up, name).double().flatten()
        bounds = [torch.as_tensor(limit).double().flatten().expand(len(numbers)).tolist() for limit in limits]
        for number, low, high in zip(numbers.tolist(), *bounds, strict=True):
            if (
                low - ABSOLUTE_SLACK > number * (RELATIVE_SLACK if number >= 0 else 1 / RELATIVE_SLACK)
                or number > high * RELATIVE_SLACK + ABSOLUTE_SLACK
            ):
                yield name, number, low, high


def is_absolute_model(kind: Any, width: int, received: int) -> bool:
    """Return True if a field is the model itself, so that its difference from the received model is bounded."""
    return bool(kind.primary and kind.base == "zero" and width == received)
