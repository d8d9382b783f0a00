"""Detection of samples that change at random: some of a user's samples are read twice.

If the samples of a torch data set change at random, they are read again for each training step (see `Rereading`), since
a stored sample would contain a single random version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.data.sources.array_data import as_array
from fedloom.errors import DataError, capitalize
from fedloom.seeds import as_global, generator, preserve_rng, rng_states

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

T = TypeVar("T")

REREAD_SAMPLES = 64
"""Number of samples, spread over the data set, that are read twice to detect random transforms.

A change that occurs with probability 0.1 makes two readings differ with probability 0.18, so it is missed in 64 pairs
with probability 0.82^64 < 1e-5.
"""
RANDOM_REREAD_SAMPLES = 256
"""Minimum number of samples that are read twice if the data set draws from a global random generator.

If one sample in a hundred changes, the change is missed with probability 0.98^256 < 1 %.
"""
REREAD_NOTE = (
    "samples change at random when they are read. Every training step reads them again, but all scores use one random "
    "version of each sample"
)
AUGMENT_HINT = (
    "remove random transforms from the data set, and pass augment to the run, as augment={'flip': 0.5, 'crop': 4}"
)


Reader = Callable[[Sequence[int]], np.ndarray]
"""Function that reads the features ``[k, ...]`` at given positions in a user's data set, in the layout of the stored
samples."""


class ChangedSamples(DataError):
    """Error for a sample that was different when it was read again."""


@dataclass(frozen=True, eq=False)
class Rereading:
    """Samples in a user's data sets that change at random and are read again for each training step.

    Random transforms draw from the global random generators of torch, NumPy and Python. While a client's batch is read,
    these generators are seeded by the client's own stream for the step, so that samples do not depend on the cohort or
    the number of workers.

    Attributes:
        sets: length and reader of each of the joined data sets, in order. The reader is None if the samples of a data
            set never change.
    """

    sets: tuple[tuple[int, Reader | None], ...]

    @classmethod
    def attach(cls, data: Dataset, sets: Iterable[tuple[int, Reader | None]]) -> Dataset:
        """Let several joined data sets be read again as one data set, and add a note if samples change at random."""
        joined = tuple(sets)
        if all(reader is None for _, reader in joined):
            return data
        return replace(data, rereading=cls(joined), notes=(*data.notes, REREAD_NOTE))

    def read_into(self, x: Tensor, index: Tensor, rng: torch.Generator) -> None:
        """Replace stored samples ``x [k, ...]`` at positions ``index [k]`` with new versions drawn with ``rng``.

        Raises:
            DataError: the user's data set fails, or returns samples of a different shape or type.
        """
        ends = list(accumulate(size for size, _ in self.sets))
        with as_global(rng, torch.device("cpu")):
            for (size, reader), end in zip(self.sets, ends, strict=True):
                places = index - (end - size)
                here = ((places >= 0) & (places < size)).nonzero().flatten()
                if reader is not None and len(here):
                    x[here] = torch.from_numpy(reader(places[here].tolist())).view(-1, *x.shape[1:]).to(x)


def read_at_random(read: Callable[[Sequence[int] | None], T], key: Callable[[T], Any], count: int, name: str) -> T:
    """Read samples with a fixed seed, after checking that the seed determines all random changes.

    Args:
        read: function that reads the samples at given positions, or all samples if the argument is None.
        key: function that returns the values to compare for each sample.
        count: number of samples.
        name: name of the data set, which is used in messages.

    Raises:
        DataError: samples differ even though the global random generators were in the same state.
    """
    places = np.unique(np.linspace(0, count - 1, min(count, REREAD_SAMPLES)).round().astype(int)).tolist()

    def draw(places: Sequence[int] | None) -> T:
        with as_global(generator(0, purpose="samples"), torch.device("cpu")):
            return read(places)

    if key(draw(places)) != key(draw(places)):
        raise DataError(
            f"{name}: samples change at random, but do not use the global generators of torch, numpy or Python, so no "
            "run could be repeated. In __getitem__, draw from torch.rand, numpy.random or random. Or "
            f"{AUGMENT_HINT}. Or, to keep one random version of each sample of the data set d, pass "
            "[d[i] for i in range(len(d))]"
        )
    return draw(None)


def is_picture(value: object) -> bool:
    """Return True if a sample is a Pillow image, whose channels are the last axis."""
    return hasattr(value, "getbands") and hasattr(value, "mode")


def check_reread_samples(
    first: Iterable[T],
    again: Callable[[Sequence[int]], Iterable[T]] | None,
    stream: Callable[[], Iterable[T]],
    name: str,
    cure: str = AUGMENT_HINT,
    frozen: str = "",
) -> Iterator[T]:
    """Yield samples. After the last sample, some samples are read again, and an error is raised if they are different.

    This is necessary because each sample is read once and stored, so a random change would be drawn only once. The
    global random generators are restored after the second reading. If samples come as a stream, whose order may change,
    it is sufficient that a sample equals any sample of the first reading. If a stream can be read only once, it is not
    checked.

    Args:
        first: samples of the first reading.
        again: function that reads the samples at given positions again. None if the samples are a stream.
        stream: function that restarts the stream.
        name: name of the data set, which is used in messages.
        cure: advice to include in messages about random changes of images.
        frozen: code that is shown in messages. It stores one random version of each sample of a data set `d`. If empty,
            this is the usual code for a torch data set or a stream.

    Raises:
        ChangedSamples: a sample was different when it was read again.
    """
    before, prints, shape = rng_states(), list[int](), ()
    for sample in first:
        if not prints:
            shape = np.shape(_get_image(sample))
        prints.append(_fingerprint(sample))
        yield sample
    if not prints:
        return
    count = REREAD_SAMPLES if rng_states() == before else max(RANDOM_REREAD_SAMPLES, len(prints))
    with preserve_rng():
        if again is None:
            first_prints, strange = set(prints), "a sample"
            differs = any(_fingerprint(sample) not in first_prints for sample in _reread_first_samples(stream, count))
        else:
            order = np.linspace(0, len(prints) - 1, count).round().astype(int).tolist()
            pairs = zip(order, again(order), strict=True)
            odd = next((place for place, sample in pairs if _fingerprint(sample) != prints[place]), None)
            differs, strange = odd is not None, f"sample {odd}"
    if differs:
        frozen = frozen or ("list(d)" if again is None else "[d[i] for i in range(len(d))]")
        cure = cure if len(shape) in (2, 3) else "remove the random change from the data set"
        raise ChangedSamples(
            f"{name}: {strange} differs when it is read again, for example because of a random transform or a random "
            f"target. Samples are read only once, so every round would use the same values. {capitalize(cure)}. Or, to "
            f"keep one random version of each sample of the data set d, pass {frozen}"
        )


def gives_random_samples(make: Callable[[], Any], times: int) -> bool:
    """Return True if user code returns different samples each time it is called.

    The global random generators are restored afterwards.
    """
    with preserve_rng():
        return len({_fingerprint(make()) for _ in range(times)}) > 1


def _reread_first_samples(stream: Callable[[], Iterable[T]], count: int) -> list[T]:
    """Restart a stream and return its first samples, or [] if the stream cannot be restarted."""
    try:
        return list(islice(stream(), count))
    except Exception:  # a stream that can be read only once may raise any error
        return []


def _get_image(sample: Any) -> Any:
    """Return the first entry of a sample, which may be an image, or an empty tuple if it has no shape."""
    first = next(iter(sample.values()), ()) if isinstance(sample, Mapping) else sample
    first = first[0] if isinstance(first, tuple) and first else first
    return np.empty((1, 1, 1)) if is_picture(first) else first if hasattr(first, "shape") else ()


def _fingerprint(sample: Any) -> int:
    """Return a hash that is equal for equal samples. NaN is treated as equal to NaN.

    For objects of all other types, only the type is hashed.
    """
    if isinstance(sample, Mapping):
        return hash(tuple((str(key), _fingerprint(value)) for key, value in sample.items()))
    if isinstance(sample, tuple | list):
        return hash(tuple(map(_fingerprint, sample)))
    if is_picture(sample):
        return hash((sample.mode, sample.size, sample.tobytes()))
    if isinstance(sample, torch.Tensor | np.ndarray | np.generic):
        array = as_array(sample)
        return hash((array.shape, array.dtype.str, repr(array.tolist()) if array.dtype.hasobject else array.tobytes()))
    return hash(repr(sample)) if isinstance(sample, str | bytes | int | float | None) else hash(type(sample).__name__)
