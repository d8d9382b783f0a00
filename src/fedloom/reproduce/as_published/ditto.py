"""Ditto as FLAME's public code (zsk66/FLAME) has it: the global branch of a client is never reset to the server's.

Its "global model" is then a mean of purely local runs, of which each takes one random batch per local epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedloom.algorithms import Delta, Ditto, Model
from fedloom.local import Ctx, Work, descend


class Client(NamedTuple):
    """v personal model, w the branch that is never reset; ``[m, d]``."""

    v: Tensor
    w: Tensor


class DittoAsPublished(Ditto):
    """Ditto whose global branch goes on from the client's own."""

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:  # type: ignore[override]
        return Model(x0), Client(x0, x0), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:  # type: ignore[override]
        w = descend(rows.w, work, steps=(work.steps > 0) * work.local.epochs)
        v = descend(rows.v, work, pull=((self.lam, down.x),), lr=self.personal_lr)
        return Delta(w - down.x), Client(v, w)
