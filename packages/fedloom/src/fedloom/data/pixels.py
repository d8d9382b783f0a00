"""Bytes and floats: which numbers a model accepts, depending on its training data."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.errors import DataError

FLOAT_TYPE_PREFIXES = ("float", "bfloat")
"""Name prefixes of types that can store fractions."""
ROUNDING_TOLERANCE = 1e-3
"""Largest excess of floats beyond the range 0 to 1 for which the error suggests clipping.

The excess is 1e-7 for a resized image. A quarter of a gray level is 1e-3. The excess is 1 for normalized samples.
"""


def came_as_bytes(data: Dataset) -> bool:
    """Return True if the features of a data set were given as bytes."""
    return data.x.dtype == torch.uint8 or data.original_dtype == "uint8"


def came_as_integers(data: Dataset) -> bool | None:
    """Return True if images were given as integers other than bytes, False if they were floats, None without images."""
    if data.prepare is not None or data.vocabulary or data.x.ndim != 4 or came_as_bytes(data):
        return None
    return not _dtype_name(data.x, data.original_dtype).startswith(FLOAT_TYPE_PREFIXES)


def refuse_other_numbers(
    x: Tensor, name: str, pixels: bool, original_dtype: str = "", integers: bool | None = None
) -> None:
    """Raise if samples differ in number type or range from the numbers that a model accepts.

    Args:
        x: samples ``[N, ...]``.
        name: name used in messages.
        pixels: True if the model was trained on bytes. Such a model accepts bytes, which are divided by 255, and floats
            from 0 to 1, which are used unchanged. All other models use floats unchanged. For a model trained on
            bytes, the meaning of integers and booleans is ambiguous.
        original_dtype: as `Dataset.original_dtype`.
        integers: False if the model was trained on images of floats. Such a model does not accept integers and
            booleans, which may have any scale. Any other model treats them as floats, as in training.

    Raises:
        DataError: the numbers differ in type or range, or are NaN or Inf. The message states the expected input.
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
            f"{name}: the model was trained on bytes. It accepts bytes (uint8), which it divides by "
            f"255, or floats from 0 to 1, but got {dtype} values from {low:.9g} to {high:.9g}; "
            f"{_cure_of_range(x, dtype, low, high)}"
        )


def _cure_of_range(x: Tensor, dtype: str, low: float, high: float) -> str:
    """Return advice for samples that are neither bytes nor floats from 0 to 1, for a model trained on bytes."""
    if dtype == "bool":
        return "pass x.astype('float32'), in which True is white, or bytes"
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
