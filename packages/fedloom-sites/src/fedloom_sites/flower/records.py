"""Records: the data that server and nodes exchange, as Flower's records."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor, nn

from fedloom.errors import ConfigError, Refused, WireError
from fedloom.trained.model import running_statistics
from fedloom.version import __version__

VALUES_RECORD = "fedloom"
"""Name of the record with the plain values of a message or a reply."""
NUMPY_STYPE = "numpy.ndarray"
"""Format of an array's bytes: a numpy file."""
FROZEN_TOLERANCE = 1e-3
"""Largest difference of means and spreads at which values that are not trained count as the same."""
log = logging.getLogger("flwr").log
"""Function that writes to Flower's log. Releases of Flower differ in the module that exports it."""


def array_of(tensor: Tensor) -> Array:
    """Return a tensor as Flower writes it, in one pass over its values."""
    values, header = tensor.detach().cpu().contiguous().numpy(), io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
    return Array(str(values.dtype), values.shape, NUMPY_STYPE, b"".join([header.getvalue(), values.data]))


def arrays_of(tensors: Mapping[str, Tensor], encoded: Mapping[str, Array] = MappingProxyType({})) -> ArrayRecord:
    """Return tensors as a record.

    Args:
        tensors: tensors by name.
        encoded: tensors that are already encoded.
    """
    return ArrayRecord({name: encoded.get(name) or array_of(tensor) for name, tensor in tensors.items()})


def array_of_each(down: Any) -> dict[str, Array]:
    """Return the encoded fields ``[d]`` of a download, which are the same for every client.

    The dict is empty if the download is None.
    """
    fields = {} if down is None else down._asdict()
    return {name: array_of(field) for name, field in fields.items() if field.dim() == 1}


def tensor_of(array: Array) -> Tensor:
    """Return an array as a tensor, which shares its bytes and must not be modified."""
    stream = io.BytesIO(array.data)
    if array.stype != NUMPY_STYPE or npy.read_magic(stream) != (1, 0):
        return torch.from_numpy(array.numpy())
    shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    values = np.frombuffer(array.data, dtype, math.prod(shape), stream.tell())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(values.reshape(shape, order="F" if is_fortran else "C"))


def tensors_of(records: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of a record, which must not be modified. The dict is empty if the record does not exist.

    Raises:
        WireError: an array is damaged.
    """
    record = records.get(name)
    if not isinstance(record, ArrayRecord):
        return {}
    try:
        return {key: tensor_of(array) for key, array in record.items()}
    except Exception as error:  # of bytes from elsewhere
        raise WireError(f"the arrays {name!r} cannot be read: {type(error).__name__}") from error


def fields_like(template: Any, tensors: Mapping[str, Tensor], what: str) -> Any:
    """Return a named tuple of tensors after a check of their shapes and types against a template.

    Args:
        template: a named tuple of tensors.
        tensors: tensors by name.
        what: short name of the tuple, for errors.

    Raises:
        WireError: the names or shapes differ, or the tensors are not floating-point.
    """
    wanted = {name: tuple(value.shape) for name, value in template._asdict().items()}
    got = {name: tuple(value.shape) for name, value in tensors.items()}
    if got != wanted:
        raise WireError(f"the {what} has the arrays {got}, expected {wanted}")
    for name, value in tensors.items():
        if value.is_floating_point() != getattr(template, name).is_floating_point():
            raise WireError(f"the {what} {name!r} contains numbers of type {value.dtype}")
    return type(template)(*[tensors[name].to(like) for name, like in template._asdict().items()])


def head_of(records: RecordDict) -> dict[str, Any]:
    """Return the plain values of a message.

    Raises:
        WireError: the message is not a message of fedloom.
        Refused: another release wrote the message.
    """
    record = records.get(VALUES_RECORD)
    if not isinstance(record, ConfigRecord) or "release" not in record:
        raise WireError(
            f"the message contains no record {VALUES_RECORD!r}, so the other side does not run fedloom_sites.flower"
        )
    if record["release"] != __version__:
        raise Refused(f"the other side runs fedloom {record['release']!s}, but this is {__version__}")
    return dict(record)


def write_values(**values: Any) -> ConfigRecord:
    """Return the plain values of a message as a record.

    Returns:
        A record with the values and the release.
    """
    return ConfigRecord({"release": __version__, **values})


def state_dict_of(arrays: Any, module: nn.Module) -> dict[str, Tensor]:
    """Return the values of a module from a record.

    Raises:
        ConfigError: the values belong to another module.
    """
    if not isinstance(arrays, ArrayRecord):
        got = type(arrays).__name__
        raise ConfigError(f"initial_arrays must be an ArrayRecord, got {got}. Give ArrayRecord(model.state_dict())")
    try:
        values, expected = dict(arrays.to_torch_state_dict()), module.state_dict()
    except Exception as error:
        raise ConfigError(
            f"initial_arrays: not readable as torch values ({error}). Give ArrayRecord(model.state_dict())"
        ) from error
    for name in [*expected, *values]:
        if name not in values or name not in expected:
            has, lacks = ("the model", "initial_arrays") if name in expected else ("initial_arrays", "the model")
            raise ConfigError(f"{has} contains {name!r}, but {lacks} does not. Give ArrayRecord(model.state_dict())")
        shape, expected_shape = [*values[name].shape], [*expected[name].shape]
        if shape != expected_shape:
            raise ConfigError(f"initial_arrays: {name!r} has the shape {shape}, but in the model {expected_shape}")
        if not values[name].isfinite().all():
            raise ConfigError(f"initial_arrays: {name!r} contains NaN or infinity. Give a model with finite values")
    return values


def shapes_of(module: nn.Module) -> str:
    """Return the shapes of a module's parameters, and shape, mean and spread of values that are not trained, as text.

    Statistics of normalization layers are left out, since a node computes them from its samples.
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
    """Raise if a model differs from the server's model.

    Raises:
        Refused: the first parameter that differs, on both sides.
    """
    facts, expected = json.loads(node), json.loads(server)
    for name in [*facts, *expected]:
        got, want = facts.get(name, ["none"]), expected.get(name, ["none"])
        if (got[0], len(got)) != (want[0], len(want)):
            raise Refused(
                f"parameter {name!r} has the shape {_described(got)} in the node's model, but "
                f"{_described(want)} at the server"
            )
        if any(
            not math.isclose(a, b, rel_tol=FROZEN_TOLERANCE, abs_tol=FROZEN_TOLERANCE)
            for a, b in zip(got[1:], want[1:], strict=True)
        ):
            raise Refused(
                f"{name!r} is not trained, and its values at the node differ from those at the server "
                f"(mean and spread {got[1]:.6g} and {got[2]:.6g}, at the server {want[1]:.6g} and "
                f"{want[2]:.6g}). Load the same values at every node"
            )


def _described(facts: list[Any]) -> str:
    return str(facts[0]) + (" and does not train" if len(facts) > 1 else "")
