"""Messages and states of methods whose clients receive mixtures of the clients' last models."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor

from fedloom.algorithms._base import Algorithm, Kept
from fedloom.choose.mixers import Mixer
from fedloom.local import Ctx, Work


class Server(NamedTuple):
    """start ``[d]``: model that represents a client that has never participated."""

    start: Tensor


class Down(NamedTuple):
    """u ``[m, d]``."""

    u: Tensor


class Client(NamedTuple):
    """w ``[m, d]``."""

    w: Tensor


class Up(NamedTuple):
    """w ``[m, d]``."""

    w: Annotated[Tensor, Kept(primary=True)]


class Mixed(Algorithm):
    """Method that combines a local problem and a mixer, with an option ``among`` (`fedloom.choose.mixers.Among`)."""

    mixes: ClassVar[bool] = True
    family: ClassVar[str] = "personalised"

    @abstractmethod
    def mixer(self, round: int) -> Mixer:
        """Return the rule that determines the mixtures."""

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
