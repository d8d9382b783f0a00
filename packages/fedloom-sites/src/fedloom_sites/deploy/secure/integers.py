"""Integer representation of the numbers in masked sums: multiples of a resolution, modulo 2^64."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom_sites.deploy.secure.protocol import Integers, ProtocolBroken

RESOLUTION_BITS = 36
"""Each number is sent as an integer multiple of 2^-36."""
MAX_NUMBER = 2.0**14
"""A number is clipped to the range -2^14..2^14. A change, which is the difference of two numbers, has twice this range.

The sum of 100 numbers or changes stays below 2^58 steps, so no sum wraps around.
"""


def encode_integers(values: np.ndarray[Any, Any]) -> tuple[Integers, int]:
    """Convert numbers ``[D]`` to integer multiples of the resolution, and return how many were clipped.

    Numbers outside the range are clipped to its ends.

    A NaN becomes zero and is counted as clipped, because an error would tell the server that a NaN occurred.
    """
    numbers = np.nan_to_num(values.astype(np.float64, copy=False), nan=0.0, posinf=MAX_NUMBER, neginf=-MAX_NUMBER)
    clipped = np.clip(numbers, -MAX_NUMBER, MAX_NUMBER)
    count = int((clipped != values).sum())
    steps = np.rint(np.ldexp(clipped, RESOLUTION_BITS, out=clipped), out=clipped).astype(np.int64)
    return steps.view(np.uint64), count


def decode_integers(total: Integers, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Convert the integer sum of ``count`` uploads to float64 ``[D]``.

    Raises:
        ProtocolBroken: the sum is outside the range that is possible for ``count`` uploads.
    """
    steps = total.view(np.int64)
    limit = int(2 * count * MAX_NUMBER) << RESOLUTION_BITS
    if bool(((steps > limit) | (steps < -limit)).any()):
        raise ProtocolBroken(
            f"the sum of {count} sites is out of range: a site sent a wrong vector, or a mask was not removed"
        )
    return np.ldexp(steps.astype(np.float64), -RESOLUTION_BITS)
