"""Conversion of the data exchanged between the server and the nodes to and from Flower's records."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from fedloom.errors import ConfigError, Refused, WireError, escape_line
from fedloom.trained.model import running_statistics
from fedloom.version import __version__
from fedloom_sites.deploy.protocol.envelope import ARRAYS_RECORD, unpack_arrays

VALUES_RECORD = "fedloom"
"""Name of the record with the plain values of a message or a reply."""
FROZEN_TOLERANCE = 1e-3
"""Maximum difference between the means, or the standard deviations, of equal untrained values."""


def log(level: int, text: str, *values: object) -> None:
    """Write one line to Flower's log. Text from other machines cannot start a new line in it.

    Flower's releases export this log from different modules.
    """
    logging.getLogger("flwr").log(level, text, *(escape_line(v) if isinstance(v, str) else v for v in values))


def make_array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert tensors to a record in Flower's format."""
    return ArrayRecord({name: tensor.detach().cpu() for name, tensor in tensors.items()})


def read_messages(records: RecordDict) -> list[bytes]:
    """Return the encoded arrays that a message or a reply contains.

    Raises:
        WireError: the arrays do not exist.
    """
    record = records.get(ARRAYS_RECORD)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"it has no record {ARRAYS_RECORD!r}")
    return unpack_arrays(record, math.inf)


def read_tensors(records: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of a record. If there is no record, the dict is empty.

    Raises:
        WireError: an array is damaged.
    """
    record = records.get(name)
    if not isinstance(record, ArrayRecord):
        return {}
    try:
        return dict(record.to_torch_state_dict())
    except Exception as error:  # bytes from another machine can raise any error
        raise WireError(f"the arrays {name!r} cannot be read: {type(error).__name__}") from error


def head_of(records: RecordDict) -> dict[str, Any]:
    """Return a message's plain values.

    Raises:
        WireError: the message was not written by fedloom.
        Refused: the message was written by a different release.
    """
    record = records.get(VALUES_RECORD)
    if not isinstance(record, ConfigRecord) or "release" not in record:
        raise WireError(
            f"the message contains no record {VALUES_RECORD!r}, so the other side does not run fedloom_sites.flower"
        )
    if record["release"] != __version__:
        raise Refused(f"the other side runs fedloom {record['release']!s}, but this side runs {__version__}")
    return dict(record)


def write_values(**values: Any) -> ConfigRecord:
    """Write a message's plain values to a record.

    Returns:
        A record with the values and the release.
    """
    return ConfigRecord({"release": __version__, **values})


def read_state_dict(arrays: object, module: nn.Module) -> dict[str, Tensor]:
    """Read a module's values from a record.

    Raises:
        ConfigError: the values belong to a different module.
    """
    if not isinstance(arrays, ArrayRecord):
        got = type(arrays).__name__
        raise ConfigError(f"initial_arrays must be an ArrayRecord, got {got}. Pass ArrayRecord(model.state_dict())")
    try:
        values, expected = dict(arrays.to_torch_state_dict()), module.state_dict()
    except Exception as error:
        raise ConfigError(
            f"initial_arrays cannot be read as torch values ({error}). Pass ArrayRecord(model.state_dict())"
        ) from error
    for name in [*expected, *values]:
        if name not in values or name not in expected:
            has, lacks = ("the model", "initial_arrays") if name in expected else ("initial_arrays", "the model")
            raise ConfigError(f"{has} contains {name!r}, but {lacks} does not. Pass ArrayRecord(model.state_dict())")
        shape, expected_shape = [*values[name].shape], [*expected[name].shape]
        if shape != expected_shape:
            raise ConfigError(
                f"initial_arrays: {name!r} has the shape {shape}, but in the model the shape is {expected_shape}"
            )
        if not values[name].isfinite().all():
            raise Refused(
                f"initial_arrays: {name!r} contains NaN or infinity",
                rule="initial-model-not-finite",
                fix="initialize all parameters with finite values",
            )
    return values


def describe_shapes(module: nn.Module) -> str:
    """Describe the shapes of a module's parameters, and the shapes, means and spreads of its untrained values, as text.

    Statistics of normalization layers are omitted, since a node computes them from its own samples.
    """
    statistics = {id(value) for value in running_statistics(module)}
    facts: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.requires_grad:
            facts[name] = [[*value.shape]]
        elif isinstance(value, Tensor) and id(value) not in statistics and not name.endswith("num_batches_tracked"):
            numbers = torch.view_as_real(value) if value.is_complex() else value
            values = numbers.detach().double() if value.numel() else torch.zeros(1)
            facts[name] = [[*value.shape], float(values.mean()), float(values.std(correction=0))]
    return json.dumps(facts)


def check_alike(node: str, server: str) -> None:
    """Raise an error if a model differs from the server's model.

    Raises:
        Refused: the two models differ. The message names the first parameter that differs, with its shape, or its mean
            and standard deviation, in both models.
    """
    facts, expected = json.loads(node), json.loads(server)
    for name in [*facts, *expected]:
        got, want = facts.get(name, ["none"]), expected.get(name, ["none"])
        if (got[0], len(got)) != (want[0], len(want)):
            raise Refused(
                f"parameter {name!r} has the shape {_shape_text(got)} in the node's model, but "
                f"{_shape_text(want)} in the server's model"
            )
        if any(
            not math.isclose(a, b, rel_tol=FROZEN_TOLERANCE, abs_tol=FROZEN_TOLERANCE)
            for a, b in zip(got[1:], want[1:], strict=True)
        ):
            raise Refused(
                f"{name!r} is not trained, but its values on the node (mean {got[1]:.6g}, standard "
                f"deviation {got[2]:.6g}) differ from its values on the server (mean {want[1]:.6g}, "
                f"standard deviation {want[2]:.6g}). Load the same values on every node"
            )


def _shape_text(facts: list[Any]) -> str:
    return str(facts[0]) + (" and does not train" if len(facts) > 1 else "")
