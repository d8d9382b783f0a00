"""Messages and states of methods in which each client receives a mixture of all clients' last models."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor

from fedloom.algorithms._base import Algorithm, Kept
from fedloom.choose.mixers import Mixer
from fedloom.local import Ctx, Work


class Server(NamedTuple):
    """Model start ``[d]``, which represents every client that has never participated."""

    start: Tensor


class Down(NamedTuple):
    """Mixture u ``[m, d]`` of models for every client."""

    u: Tensor


class Client(NamedTuple):
    """Personal model w ``[m, d]`` of every client."""

    w: Tensor


class Up(NamedTuple):
    """Personal model w ``[m, d]`` of every client, which the server stores."""

    w: Annotated[Tensor, Kept(primary=True)]


class Mixed(Algorithm):
    """Method that combines a local problem with a mixer. Its option ``among`` is a `fedloom.choose.mixers.Among`."""

    mixes: ClassVar[bool] = True
    family: ClassVar[str] = "personalised"

    @abstractmethod
    def mixer(self, round: int) -> Mixer:
        """Return the rule that computes the mixtures in a round."""

    @property
    def mixes_all(self) -> bool:
        return getattr(self, "among", "cohort") != "cohort"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, Up]:
        return Server(x0), Client(x0), Up(x0)

    def down(self, server: Server, kept: Up, ctx: Ctx) -> Down:
        return Down(self.mixer(ctx.round).mix(kept.w, server.start, ctx))

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        return server

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return rows.w
