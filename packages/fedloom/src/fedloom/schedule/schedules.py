"""Schedules, which determine which uploads the server uses in each step. ``SCHEDULES`` lists them by kind."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from fedloom.values import Value


class Schedule(Value, ABC):
    """Rule that determines which uploads the server uses in each step."""

    kind: ClassVar[str]

    def adapted(self, n: int) -> Self:
        """Return the schedule with defaults that are valid for n clients."""
        return self


class Synchronous(Schedule):
    """Schedule in which a round ends when all of its clients have replied."""

    kind: ClassVar[str] = "synchronous"


class Deadline(Schedule):
    """Schedule in which a round ends after a number of seconds, or as soon as all clients have replied.

    Late uploads are discarded.
    """

    kind: ClassVar[str] = "deadline"
    seconds: float = Field(gt=0, description="maximum duration of a round, in simulated seconds")
    partial: bool = Field(
        False,
        description="let each client take as many steps as time allows. Works only with methods that can weight "
        "partial work",
    )


class OverSelection(Schedule):
    """Schedule in which a round ends as soon as enough of its clients have replied.

    The remaining clients stop training (Bonawitz et al., MLSys 2019).
    """

    kind: ClassVar[str] = "over-selection"
    factor: float = Field(1.3, ge=1, description="oversampling factor: clients drawn per upload used")

    def enough(self, m: int) -> int:
        """Return the number of uploads that are used if ``m`` clients are drawn."""
        return max(round(m / self.factor), 1)


class Stream(Schedule, ABC):
    """Schedule in which clients train continuously.

    As soon as a client has replied, it is replaced by a client that receives the newest model.

    A step of the server uses the uploads that arrive first. The staleness of an upload is the number of steps that the
    server took while the client trained. The change in an upload is multiplied by a factor that decreases with the
    staleness.
    """

    concurrency: int | None = Field(
        None, ge=1, description="number of clients that train concurrently (default: as many as the sampler draws)"
    )
    discount: Literal["polynomial", "hinge", "none"] = Field(
        "polynomial",
        description="discount of an upload with staleness s. polynomial: (1 + s)^-power. hinge: 1 if s is at "
        "most hinge, otherwise 1 / (power (s - hinge) + 1)",
    )
    power: float = Field(0.5, ge=0, description="decay rate of the discount")
    hinge: int = Field(4, ge=0, description="largest staleness without a discount, for discount = 'hinge'")
    timeout: float | None = Field(
        None,
        gt=0,
        description="number of seconds after which fedloom stops waiting for an unresponsive client (default: never)",
    )

    needs: ClassVar[Mapping[str, str]] = {"hinge": "discount hinge"}

    @property
    def size(self) -> int:
        """Number of uploads that are used in a step."""
        return 1

    @property
    def rate(self) -> float | None:
        """Weight of a client's model when it is mixed into the server's model.

        If None, the client's update is added to the server's model instead.
        """
        return None

    def factor(self, staleness: Tensor) -> Tensor:
        """Return the factors in (0, 1] for uploads with the given staleness."""
        s = staleness.double()
        if self.discount == "polynomial":
            return (1 + s) ** -self.power
        if self.discount == "hinge":
            return 1 / (self.power * (s - self.hinge).clamp(min=0) + 1)
        return s * 0 + 1


class Buffered(Stream):
    """FedBuff: a step uses the first K uploads (Nguyen et al., AISTATS 2022, arXiv:2106.06639, Algorithm 1)."""

    kind: ClassVar[str] = "buffered"
    buffer: int = Field(
        10, ge=1, description="K, number of uploads per server step (if not set: at most the number of clients)"
    )

    @property
    def size(self) -> int:
        """Number K of uploads in a step."""
        return self.buffer

    def adapted(self, n: int) -> Self:
        """If the user has not set the size of the buffer, limit it to the number of clients."""
        default = "buffer" not in self.model_fields_set
        return self.with_(buffer=n) if default and self.buffer > n else self


class Asynchronous(Stream):
    """FedAsync schedule, in which each upload is mixed into the server's model (Xie et al., arXiv:1903.03934).

    A step is x <- (1 - a) x + a w, where a is the rate times the staleness factor. In the paper, the local problem also
    contains the proximal term of FedProx.
    """

    kind: ClassVar[str] = "asynchronous"
    mix: float = Field(0.6, gt=0, le=1, description="alpha, mixing weight of a newly received client model")

    @property
    def rate(self) -> float | None:
        """Weight alpha of a newly received model."""
        return self.mix


SCHEDULES: dict[str, type[Schedule]] = {
    "synchronous": Synchronous,
    "deadline": Deadline,
    "over-selection": OverSelection,
    "buffered": Buffered,
    "asynchronous": Asynchronous,
}
"""Schedules, keyed by kind."""
