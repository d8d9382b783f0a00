"""Bytes and floats: which numbers a model takes, by the numbers that it was trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.errors import DataError

FLOAT_TYPE_PREFIXES = ("float", "bfloat")
"""Beginnings of the names of types with a fraction."""
ROUNDING_TOLERANCE = 1e-3
"""How far floats may exceed 0 to 1 for the error to suggest clipping.

A resized image exceeds it by 1e-7. A quarter of a grey level is 1e-3. Samples that were normalised exceed it by 1.
"""


def came_as_bytes(data: Dataset) -> bool:
    """Return whether the features of a data set were given as bytes."""
    return data.x.dtype == torch.uint8 or data.original_dtype == "uint8"


def refuse_other_numbers(x: Tensor, name: str, pixels: bool, original_dtype: str = "") -> None:
    """Refuse samples whose numbers are of another type or range than a model takes.

    Args:
        x: samples ``[N, ...]``.
        name: for messages.
        pixels: whether the model was trained on bytes. It then takes bytes, which are divided by 255, and floats from 0
            to 1 as they are. Else floats as they are. Whole numbers and booleans are floats for a model trained on
            floats, as in its training, for a model trained on bytes it is not known which of the two they are.
        original_dtype: as `Dataset.original_dtype`.

    Raises:
        DataError: other numbers, NaN or Inf. The message names what to give.
    """
    dtype = original_dtype or str(x.dtype).removeprefix("torch.")
    odd = ~x.isfinite().flatten(1).all(1)
    if bool(odd.any()):
        raise DataError(
            f"{name}: NaN or Inf in {int(odd.sum())} samples (first: {int(odd.int().argmax())}); repair them"
        )
    if not len(x) or (dtype == "uint8" and pixels):
        return
    low, high = float(x.min()), float(x.max())
    if dtype == "uint8":
        raise DataError(
            f"{name}: samples are bytes (uint8), the model was trained on floats, taken as they are; give what "
            "training got: x / 255 if its floats went from 0 to 1, x.astype('float32') if they went from 0 to 255"
        )
    if pixels and (not dtype.startswith(FLOAT_TYPE_PREFIXES) or low < 0 or high > 1):
        raise DataError(
            f"{name}: the model was trained on bytes: it takes bytes (uint8), which are divided by 255, or floats "
            f"from 0 to 1; got {dtype} values from {low:.9g} to {high:.9g}; {_cure_of_range(x, dtype, low, high)}"
        )


def _cure_of_range(x: Tensor, dtype: str, low: float, high: float) -> str:
    """Say what to give to a model trained on bytes instead of samples outside bytes and floats from 0 to 1."""
    if dtype == "bool":
        return "give x.astype('float32'), in which True is white, or bytes"
    if low >= 0 and high <= 255 and bool((x == x.floor()).all()):
        return "give bytes: x.astype('uint8')"
    if low >= -ROUNDING_TOLERANCE and high <= 1 + ROUNDING_TOLERANCE:
        return "they exceed it by rounding: give x.clip(0, 1)"
    if low >= 0 and high <= 255:
        return "if they go from 0 to 255, give x / 255"
    if low >= 0 and not dtype.startswith(FLOAT_TYPE_PREFIXES):
        return "give floats: x divided by the largest number that a pixel can have, such as x / 65535"
    return "give the samples before they were normalised, as bytes or as floats from 0 to 1: the model scales them"
