"""The single rule for randomness: every draw comes from a generator that depends on (seed, round, client, purpose).

fedloom does not use any global generator, so draws do not depend on cohort size, chunks, workers or restarts.

A hash of these four values determines the complete state of the generator: all 19,968 bits of PyTorch's Mersenne
Twister come from SHAKE-128, and numpy's generators receive 128 bits of BLAKE2b. PyTorch's own seeding would use only 32
bits of a seed. Among q streams, the probability that at least two are equal is at most q^2 / 2^129 (birthday bound for
128 bits). For a run with 10^10 < 2^34 streams (10^5 rounds with 10^3 clients and 100 draws each), the probability is
below 2^-61. If a module draws directly on a GPU, it receives the 124 bits of state that CUDA's generator can store. For
up to 2^32 such streams, the probability that two are equal is below 2^-60.

These generators are intended for simulation. The generators are not cryptographically secure: for real data, noise
comes from `fedloom_sites.deploy.noise`.
"""

from __future__ import annotations

import hashlib
import os
import random  # noqa: TID251  (to keep and seed the user's)
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.lazy import make_dir

SERVER_CLIENT = -1
"""Client id used for draws that belong to no client."""

Purpose = str | tuple[str | int, ...]

_STATE_WORDS = 624
"""Number of 32-bit words in the state of a Mersenne Twister."""

_TWISTER_DISTANCE = 397
"""Distance to the second state word that each draw of a Mersenne Twister reads."""

_STATE_HEADER_BYTES = 24
"""Number of bytes that precede the state words in a state of PyTorch's CPU generator. Each word takes 8 bytes."""


class _Blank(threading.local):
    """State of a new CPU generator.

    Each thread overwrites the words in its copy with the words of its current generator.
    """

    def __init__(self) -> None:
        self.state = torch.Generator().get_state()
        self.words = self.state.numpy()[_STATE_HEADER_BYTES : _STATE_HEADER_BYTES + 8 * _STATE_WORDS].view(np.uint64)


_blank = _Blank()
_swapping = threading.RLock()
"""Lock held while the global generators are replaced, because all threads of a process share these generators."""
os.register_at_fork(before=_swapping.acquire, after_in_parent=_swapping.release, after_in_child=_swapping.release)


def derive(seed: int, round: int = 0, client: int = SERVER_CLIENT, purpose: Purpose = "") -> int:
    """Return a 128-bit integer that depends only on the four arguments.

    Args:
        seed: seed of the run.
        round: round number, counted from 1, or 0 before the first round.
        client: client id in 0..n-1, or `SERVER_CLIENT`.
        purpose: purpose of the draw, e.g. ``"cohort"`` or ``("local", 3)``.

    >>> derive(0, 1, 2, "local") == derive(0, 1, 2, "local") != derive(0, 1, 2, "other")
    True
    """
    before, after = _around(seed, round, purpose)
    return int.from_bytes(hashlib.blake2b(b"%b%d%b" % (before, client, after), digest_size=16).digest(), "little")


def generator(seed: int, round: int = 0, client: int = SERVER_CLIENT, purpose: Purpose = "") -> torch.Generator:
    """Return a CPU `torch.Generator` for (seed, round, client, purpose)."""
    before, after = _around(seed, round, purpose)
    drawn = hashlib.shake_128(b"%b%d%b" % (before, client, after)).digest(4 * _STATE_WORDS)
    _blank.words[:] = np.frombuffer(drawn, "<u4")
    rng = torch.Generator()
    rng.set_state(_blank.state)
    return rng


def states(seed: int, round: int, clients: Sequence[int], purpose: Purpose, draws: int) -> NDArray[np.uint32]:
    """Return the generator states of many clients ``[m, s]``, with as many words as the 32-bit draws consume."""
    before, after = _around(seed, round, purpose)
    count = min(_STATE_WORDS, _TWISTER_DISTANCE + draws)
    drawn = [hashlib.shake_128(b"%b%d%b" % (before, client, after)).digest(4 * count) for client in clients]
    return np.frombuffer(bytearray().join(drawn), "<u4").reshape(len(clients), count)


def numpy_generator(
    seed: int, round: int = 0, client: int = SERVER_CLIENT, purpose: Purpose = ""
) -> np.random.Generator:
    """Return a `numpy.random.Generator` for (seed, round, client, purpose)."""
    return np.random.Generator(np.random.PCG64(derive(seed, round, client, purpose)))


def random_state(gen: torch.Generator) -> np.random.RandomState:
    """Return a `numpy.random.RandomState` seeded with 128 bits of ``gen``, for libraries that require this class."""
    return np.random.RandomState(words(gen))


def words(gen: torch.Generator) -> list[int]:
    """Return four 32-bit integers from ``gen``, as a seed for libraries that create a `numpy.random.RandomState`."""
    return torch.randint(2**32, (4,), generator=gen).tolist()


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """After the block, restore the global generators of the CPU and of a device.

    Other threads wait until the block has ended.
    """
    with _swapping, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def rng_states() -> tuple[object, ...]:
    """Return the states of the global generators of torch, numpy and Python, to detect whether code draws from them."""
    name, key, *rest = np.random.get_state()  # noqa: NPY002  # read, to see whether a user's code draws from it
    return torch.get_rng_state().numpy().tobytes(), name, np.asarray(key).tobytes(), tuple(rest), random.getstate()


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the global generators of torch, numpy and Python after the block, regardless of the draws in it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the user's, kept as it is
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with _swapping, torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def as_global(gen: torch.Generator, device: torch.device) -> Iterator[None]:
    """Within the block, make code that uses only the global generators draw from the random stream of ``gen``.

    The global generators are restored after the block.

    The generators of numpy and Python are seeded with a hash of the state that ``gen`` has.

    Args:
        gen: a CPU generator. If ``device`` is the CPU, the state of the generator does not advance.
        device: device whose generator is set in addition to the CPU's.
    """
    with forked(device):
        state = gen.get_state()
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the user's, kept as it is
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
        torch.set_rng_state(state)
        if device.type == "cuda":
            torch.cuda.set_rng_state(cuda_state(gen), device)
        random.seed(digest)
        np.random.seed(np.frombuffer(digest, "<u4"))  # noqa: NPY002  # for the user's code
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def cuda_state(gen: torch.Generator) -> Tensor:
    """Return the state of a CUDA generator, uint8 ``[16]``, drawn from ``gen``: a 64-bit key and a 62-bit offset.

    The offset is a multiple of 4, as PyTorch requires, so 60 of its bits are random.
    """
    state = torch.randint(256, (16,), generator=gen, dtype=torch.uint8)
    state[8] &= 0b11111100
    state[15] &= 0b00111111
    return state


def _around(seed: int, round: int, purpose: Purpose) -> tuple[bytes, bytes]:
    """Return the bytes before and after the client id in the byte string that names a random stream."""
    return f"{seed}|{round}|".encode(), f"|{purpose!r}".encode()


__dir__ = make_dir(__name__)
