"""Checks of pixel types: a model trained on bytes accepts other numbers than a model trained on floats."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.errors import DataError

FLOAT_TYPE_PREFIXES = ("float", "bfloat")
"""Prefixes of the names of data types that can represent fractions."""
ROUNDING_TOLERANCE = 1e-3
"""The message suggests clipping if floats exceed the range from 0 to 1 by at most this amount.

The values of a resized image exceed the range by about 1e-7, and the values of normalized samples by about 1. The limit
is a quarter of a gray level.
"""


def is_from_bytes(data: Dataset) -> bool:
    """Return True if the features of a data set were originally bytes."""
    return data.x.dtype == torch.uint8 or data.original_dtype == "uint8"


def is_from_integers(data: Dataset) -> bool | None:
    """Return True for images of integers other than bytes, False for images of floats, and None for other data."""
    if data.prepare is not None or data.vocabulary or data.x.ndim != 4 or is_from_bytes(data):
        return None
    return not _dtype_name(data.x, data.original_dtype).startswith(FLOAT_TYPE_PREFIXES)


def find_value_range(data: Dataset) -> tuple[float, float] | None:
    """Return the smallest and the largest value of float samples, or None if they are tables, bytes or tokens."""
    if data.prepare is not None or data.fitted is not None or data.vocabulary or is_from_bytes(data) or not len(data):
        return None
    return float(data.x.min()), float(data.x.max())


def check_number_type(
    x: Tensor, name: str, pixels: bool, original_dtype: str = "", integers: bool | None = None
) -> None:
    """Raise an error if the type or value range of samples is not what a model accepts.

    Args:
        x: samples ``[N, ...]``.
        name: name of the data in messages.
        pixels: True if the model was trained on bytes. Such a model accepts bytes, which are divided by 255, and floats
            from 0 to 1, which are used unchanged. All other models accept floats, which are used unchanged. A model
            that was trained on bytes does not accept integers or booleans, because their meaning would be ambiguous.
        original_dtype: original type, as in `Dataset.original_dtype`.
        integers: False if the model was trained on images of floats. Such a model does not accept integers or booleans
            either, because they may have any scale. For other models, they are converted to floats as in training.

    Raises:
        DataError: the type or the value range is not as expected, or values are NaN or Inf. The message states what is
            expected instead.
    """
    dtype = _dtype_name(x, original_dtype)
    odd = ~x.isfinite().flatten(1).all(1)
    if bool(odd.any()):
        raise DataError(
            f"{name}: NaN or Inf in {int(odd.sum())} samples (first: {int(odd.int().argmax())}). Repair them"
        )
    if not len(x) or (dtype == "uint8" and pixels):
        return
    low, high = float(x.min()), float(x.max())
    if dtype == "uint8" or (integers is False and not dtype.startswith(FLOAT_TYPE_PREFIXES)):
        shown, one, large = {
            "uint8": ("bytes (uint8)", "x / 255", "x.astype('float32') if they were from 0 to 255"),
            "bool": ("bool", "x.astype('float32')", "x.astype('float32') * 255 if they were from 0 to 255"),
        }.get(dtype, (dtype, "x divided by its largest possible value", "x.astype('float32') if they were as large"))
        raise DataError(
            f"{name}: samples are {shown}, but the model was trained on {'integers' if integers else 'floats'} without "
            f"scaling. Convert the samples as for training: {one} if the floats were from 0 to 1, {large}"
        )
    if pixels and (not dtype.startswith(FLOAT_TYPE_PREFIXES) or low < 0 or high > 1):
        raise DataError(
            f"{name}: the model was trained on bytes. It accepts bytes (uint8), which it divides by 255, or floats "
            f"from 0 to 1, but got {dtype} values from {low:.9g} to {high:.9g}; {_range_advice(x, dtype, low, high)}"
        )


def _range_advice(x: Tensor, dtype: str, low: float, high: float) -> str:
    """Return advice on samples that are neither bytes nor floats from 0 to 1, if the model was trained on bytes."""
    if dtype == "bool":
        return "pass x.astype('float32') (True is white) or bytes"
    if low >= 0 and high <= 255 and bool((x == x.floor()).all()):
        return "pass bytes: x.astype('uint8')"
    if low >= -ROUNDING_TOLERANCE and high <= 1 + ROUNDING_TOLERANCE:
        return "they exceed the range by rounding. Pass x.clip(0, 1)"
    if low >= 0 and high <= 255:
        return "if they are from 0 to 255, pass x / 255"
    if low >= 0 and not dtype.startswith(FLOAT_TYPE_PREFIXES):
        return "pass floats: x divided by the largest possible value of a pixel, such as x / 65535"
    return "pass the samples before normalization, as bytes or as floats from 0 to 1. The model scales the samples"


def _dtype_name(x: Tensor, original_dtype: str) -> str:
    return original_dtype or str(x.dtype).removeprefix("torch.")
