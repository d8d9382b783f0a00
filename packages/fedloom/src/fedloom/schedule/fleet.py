"""Fleet: the devices of a run's clients as numbers, and the time that computation and communication take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.schedule.presence import Presence

FORWARD_COST = 1 / 3
"""Cost of a forward pass relative to training on the same sample, because a backward pass takes twice as long as a
forward pass."""


@dataclass(frozen=True)
class Fleet:
    """Devices of n clients.

    Attributes:
        seconds: time per training sample in seconds ``[n]``. The time is infinite for a device that never replies.
        up: rate from the client to the server in bytes per second ``[n]``.
        down: rate from the server to the client in bytes per second ``[n]``.
        latency: delay of every message in seconds ``[n]``.
        names: names of the device classes.
        member: index of the device class of each client ``[n]``.
        presence: times when clients are available. If None, clients are always available.
    """

    seconds: Tensor
    up: Tensor
    down: Tensor
    latency: Tensor
    names: tuple[str, ...]
    member: Tensor
    presence: Presence | None = None

    @property
    def n(self) -> int:
        """Number of all clients."""
        return len(self.seconds)

    @cached_property
    def _columns(self) -> NDArray[np.float64]:
        """Seconds per sample, rates up and down, and latency of every client, ``[n, 4]``."""
        return torch.stack([self.seconds, self.up, self.down, self.latency], 1).numpy()

    @cached_property
    def _all_answer(self) -> bool:
        return bool(self.seconds.isfinite().all())

    def busy(self, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time in seconds that clients need for computation and communication, ``[m]``.

        Args:
            ids: clients ``[m]``.
            counts: numbers of backward samples, forward samples, steps, bytes up and bytes down, in this order, ``[m,
                .]``.
        """
        backward, forward, _, up, down = counts[:, :5].T.astype(np.float64)
        seconds, rate_up, rate_down, latency = self._columns.take(ids, 0).T
        samples = backward + FORWARD_COST * forward
        if self._all_answer:
            work = samples * seconds
        else:
            work = np.multiply(samples, seconds, out=np.zeros(len(samples)), where=samples > 0)  # 0 s for no samples
        messages = np.sign(up) + np.sign(down)
        seconds_busy: NDArray[np.float64] = work + up / rate_up + down / rate_down + latency * messages
        return seconds_busy

    def ends(self, ids: NDArray[np.int64], start: float, busy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when clients ``[m]`` that start at ``start`` have worked for ``busy [m]`` seconds."""
        if self.presence is None:
            return start + busy
        return np.array([self.presence.end(i, start, b) for i, b in zip(ids.tolist(), busy.tolist(), strict=True)])

    def presence_seconds(self, client: int, start: float, end: float) -> float:
        """Return the number of seconds that a client is available between two times."""
        if self.presence is None:
            return end - start
        return self.presence.presence_seconds(client, end) - self.presence.presence_seconds(client, start)

    def next(self, client: int, time: float) -> float:
        """Return the earliest time, not before ``time``, when a client is available."""
        return time if self.presence is None else self.presence.next(client, time)

    def absent(self, time: float) -> Tensor:
        """Return the number of seconds ``[n]`` that each client is unavailable between 0 and ``time``."""
        if self.presence is None:
            return torch.zeros(self.n, dtype=torch.float64)
        return torch.tensor([time - self.presence_seconds(i, 0.0, time) for i in range(self.n)], dtype=torch.float64)
