"""Lengths of the fields of an upload, for which both ends have bounds, and ranges of its single numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.engine.job import Job

ABSOLUTE_SLACK = 1e-6
"""Absolute error allowed beside a number's relative error."""
RELATIVE_SLACK = 1 + 1e-4
"""Relative error allowed in a number."""


def lengths(job: Job, up: Any, down: Any) -> dict[str, Tensor]:
    """Compute the lengths ``[m]`` of the fields of uploads, the model as a difference from the download.

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


def shortened(job: Job, up: Any, down: Any, bounds: Mapping[str, float]) -> tuple[Any, bool]:
    """Project the fields of one client's upload onto their bounds.

    Two bounds hold: the agreed length of a field's difference, and ``engine.norm_bound`` for the field itself.

    Args:
        job: the run.
        up: the upload, finite fields ``[1, .]``.
        down: what the client received.
        bounds: the longest difference of fields, by name. Fields without one have none.

    Returns:
        The upload, and whether any field was too long.
    """
    fields, is_cut = up._asdict(), False
    for name, norm in lengths(job, up, down).items():
        most = bounds.get(name, math.inf)
        if float(norm) <= most:
            continue
        field, is_cut = fields[name], True
        whole = absolute(job.fields[name], field.shape[1], down[0].shape[-1])
        start = job.algorithm.received(down, up).expand_as(field) if whole else torch.zeros_like(field)
        fields[name] = start + _cut(field - start, most)
    longest = math.inf if job.setting.engine.norm_bound is None else job.setting.engine.norm_bound
    for name, field in fields.items():
        if float(torch.linalg.vector_norm(field.double())) > longest:
            fields[name], is_cut = _cut(field, longest), True
    return type(up)(**fields), is_cut


def _cut(row: Tensor, most: float) -> Tensor:
    """Shorten a finite row to a maximal length. Dividing by its largest number first prevents overflow."""
    largest = row.abs().max().double()
    unit = row.double() / largest
    return (unit * (most / float(unit.square().sum().sqrt()))).to(row)


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
            if (
                low - ABSOLUTE_SLACK > number * (RELATIVE_SLACK if number >= 0 else 1 / RELATIVE_SLACK)
                or number > high * RELATIVE_SLACK + ABSOLUTE_SLACK
            ):
                yield name, number, low, high


def absolute(kind: Any, width: int, received: int) -> bool:
    """Whether a field of an upload is the model itself, whose difference to the ``received`` numbers is bounded."""
    return bool(kind.primary and kind.base == "zero" and width == received)
