"""Devices, which determine how fast clients compute and communicate, and when they are available.

``DEVICES`` lists them by kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.schedule.fleet import Fleet
from fedloom.schedule.presence import Presence
from fedloom.schedule.traces import read_trace
from fedloom.seeds import generator, numpy_generator
from fedloom.values import Value

Slow = Literal["drawn", "rare-labels"]
"""Rule that chooses which clients have slow devices."""


class Devices(Value, ABC):
    """Devices of all clients in a run, drawn from random streams that are not used for anything else."""

    kind: ClassVar[str]

    @abstractmethod
    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        """Draw the devices of ``n`` clients.

        Args:
            n: number of clients.
            seed: seed of the run.
            rarity: for each client, how rare its labels are among all clients ``[n]``.

        Raises:
            ConfigError: the devices cannot be used with n clients.
            DataError: the file of devices cannot be read.
        """


class Stated(Devices, ABC):
    """Devices whose speeds, rates and availability are set by options."""

    speed: float = Field(100.0, gt=0, description="typical device's speed, in training samples per second")
    up: float = Field(1e6, gt=0, description="upload rate from a client to the server, in bytes per second")
    down: float = Field(1e6, gt=0, description="download rate from the server to a client, in bytes per second")
    latency: float = Field(0.05, ge=0, description="delay of every message, in seconds")
    present: float = Field(1.0, gt=0, le=1, description="fraction of every period in which a client is available")
    period: float = Field(
        86400.0, gt=0, description="length of a period in seconds. Each client's period starts at a different time"
    )

    needs: ClassVar[Mapping[str, str]] = {"period": "present"}

    def _fleet(
        self, factor: Tensor, seed: int, names: tuple[str, ...] = ("all",), member: Tensor | None = None
    ) -> Fleet:
        """Return a fleet whose speeds are ``factor [n]`` times the typical speed."""
        n = len(factor)
        constant = torch.ones(n, dtype=torch.float64)
        member = torch.zeros(n, dtype=torch.long) if member is None else member
        presence = self._presence(n, seed)
        up, down, latency = self.up * constant, self.down * constant, self.latency * constant
        return Fleet(1 / (self.speed * factor), up, down, latency, names, member, presence)

    def _presence(self, n: int, seed: int) -> Presence | None:
        if self.present == 1:
            return None
        begins = numpy_generator(seed, purpose=("devices", "presence")).random(n) * self.period
        length = self.present * self.period
        intervals = dict[int, list[tuple[float, float]]]()
        for i, begin in enumerate(begins.tolist()):
            over = begin + length - self.period
            intervals[i] = [(begin, begin + length)] if over <= 0 else [(0.0, over), (begin, self.period)]
        return Presence(intervals, self.period)


class Equal(Stated):
    """Identical devices for all clients."""

    kind: ClassVar[str] = "equal"

    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        """Return identical devices for all clients."""
        return self._fleet(torch.ones(n, dtype=torch.float64), seed)


class LogNormal(Stated):
    """Devices with log-normally distributed speeds: the typical speed times exp(spread z) for a standard normal z."""

    kind: ClassVar[str] = "lognormal"
    spread: float = Field(1.0, ge=0, description="standard deviation of the logarithm of the clients' speeds")
    slow: Slow = Field(
        "drawn", description="clients with slow devices: random clients, or the clients with the rarest labels"
    )

    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        """Draw a speed for each client.

        Speeds are assigned at random, or in such a way that clients with rarer labels get slower devices.

        The device classes are the slowest, the middle and the fastest third of the speeds.
        """
        z = torch.from_numpy(numpy_generator(seed, purpose=("devices", "speed")).standard_normal(n))
        factor = torch.exp(self.spread * z)
        if self.slow == "rare-labels":
            factor = _assign_slow_to_rarest(factor.sort().values, rarity)
        place = torch.empty(n, dtype=torch.long)
        place[factor.argsort(stable=True)] = torch.arange(n)
        return self._fleet(factor, seed, ("slow", "middle", "fast"), place * 3 // n)


class DeviceClass(Value):
    """Options of a device class."""

    share: float = Field(
        gt=0, le=1, description="fraction of clients with this kind of device. The fractions of all kinds sum to 1"
    )
    speed: float = Field(100.0, gt=0, description="number of training samples per second")
    up: float = Field(1e6, gt=0, description="upload rate from a client to the server, in bytes per second")
    down: float = Field(1e6, gt=0, description="download rate from the server to a client, in bytes per second")
    latency: float = Field(0.05, ge=0, description="delay of every message, in seconds")


class Classes(Devices):
    """Named device classes, each with its fraction of the clients.

    Numbers of clients are rounded by the largest remainder method.
    """

    kind: ClassVar[str] = "classes"
    classes: dict[str, DeviceClass] = Field(
        min_length=1, description="device classes, each in a table [devices.classes.NAME]"
    )
    slow: Slow = Field(
        "drawn", description="clients with slow devices: random clients, or the clients with the rarest labels"
    )

    @field_validator("classes")
    @classmethod
    def _whole(cls, classes: dict[str, DeviceClass]) -> dict[str, DeviceClass]:
        total = sum(one.share for one in classes.values())
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(f"shares must sum to 1, got {total:g}")
        return classes

    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        """Draw the device classes of the clients.

        Classes are assigned to clients uniformly at random, or the slowest class is assigned to the clients with the
        rarest labels.
        """
        kinds = list(self.classes.values())
        exact = torch.tensor([one.share for one in kinds], dtype=torch.float64) * n
        counts = exact.floor().long()
        most = (exact - counts).argsort(descending=True, stable=True)
        counts[most[: n - int(counts.sum())]] += 1
        speed = torch.tensor([one.speed for one in kinds], dtype=torch.float64)
        slowest = speed.argsort(stable=True)
        member = slowest.repeat_interleave(counts[slowest])
        if self.slow == "rare-labels":
            member = _assign_slow_to_rarest(member, rarity)
        else:
            member = member[torch.randperm(n, generator=generator(seed, purpose=("devices", "classes")))]

        def read_numbers(name: str) -> Tensor:
            return torch.tensor([getattr(one, name) for one in kinds], dtype=torch.float64)[member]

        return Fleet(
            1 / read_numbers("speed"),
            read_numbers("up"),
            read_numbers("down"),
            read_numbers("latency"),
            tuple(self.classes),
            member,
        )


class Trace(Devices):
    """Devices from a Parquet or CSV file with the columns client, speed, up and down, and some optional columns.

    ``client`` is counted from 0. ``speed`` is in training samples per second, and a device with speed 0 never replies.
    ``up`` and ``down`` are in bytes per second. Optional columns are ``latency`` (in seconds, 0 by default), ``class``
    (a name), and ``start`` and ``end``, which give an interval in seconds during which the client is available. If a
    client has several intervals, there is a row for each of them. A client without any interval is always available.
    """

    kind: ClassVar[str] = "trace"
    file: str = Field(description="Parquet or CSV file (also .csv.gz) with the columns client, speed, up and down")
    period: float | None = Field(
        None,
        gt=0,
        description="length in seconds of the period after which the availability intervals repeat (default: never)",
    )
    draw: bool = Field(
        False,
        description="draw the clients' devices at random from a larger file. Otherwise, each client gets the device "
        "with its own number",
    )

    @model_validator(mode="after")
    def _resolve_names(self) -> Self:
        if not self.file.endswith((".parquet", ".csv", ".csv.gz")):
            raise ValueError(f"file must end in .parquet, .csv or .csv.gz, got {self.file!r}")
        return self

    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        """Assign a device from the file to each client."""
        period = math.inf if self.period is None else self.period
        rows = read_trace(Path(self.file).expanduser(), period)
        if len(rows) < n or (len(rows) > n and not self.draw):
            cure = (
                "add a row for each, or use fewer clients" if len(rows) < n else "set devices.draw = true to draw them"
            )
            raise ConfigError(f"devices.file {self.file} lists {len(rows)} devices for {n} clients; {cure}")
        chosen = list(rows)
        if self.draw:
            order = torch.randperm(len(rows), generator=generator(seed, purpose=("devices", "trace")))[:n]
            chosen = [chosen[k] for k in order.tolist()]
        elif chosen != list(range(n)):
            strange = next(client for k, client in enumerate(chosen) if client != k)
            raise ConfigError(
                f"devices.file {self.file}: client must be numbered from 0 to {n - 1}, got {strange} "
                f"instead of {chosen.index(strange)}. Renumber the clients, or set devices.draw = true"
            )
        devices = [rows[client] for client in chosen]
        names = tuple(sorted({device.name for device in devices}))
        speed, up, down, latency = torch.tensor([device[:4] for device in devices], dtype=torch.float64).T.contiguous()
        spans = {i: device.intervals for i, device in enumerate(devices) if device.intervals}
        member = torch.tensor([names.index(device.name) for device in devices])
        return Fleet(1 / speed, up, down, latency, names, member, Presence(spans, period) if spans else None)


def _assign_slow_to_rarest(slow_first: Tensor, rarity: Tensor) -> Tensor:
    """Return the devices, reordered so that the client with the rarest labels has the first device, and so on."""
    assigned = torch.empty_like(slow_first)
    assigned[rarity.argsort(descending=True, stable=True)] = slow_first
    return assigned


DEVICES: dict[str, type[Devices]] = {"equal": Equal, "lognormal": LogNormal, "classes": Classes, "trace": Trace}
"""Devices, keyed by kind."""
