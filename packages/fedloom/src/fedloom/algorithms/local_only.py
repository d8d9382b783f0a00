"""Local: every client trains alone.

Problem: min over v_i of f_i(v_i), for every client separately.

Reference: the baseline "LocalOnly" or "Standalone" of all papers on personalized federated learning.

    here    meaning
    v       the client's own model

Client state: d values (its model). Traffic: none.

Deviations: none. A client trains only in the rounds for which it is sampled, so the amount of work is the same as with
other methods.

Use this method to find out whether federation has any benefit. If clients have enough data and labels are strongly
skewed, this baseline is hard to beat.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from fedloom.algorithms._base import Algorithm
from fedloom.local import Ctx, Nothing, Work, descend


class Client(NamedTuple):
    """The client's own model v ``[m, d]``."""

    v: Tensor


class LocalOnly(Algorithm):
    """Every client trains without the others."""

    family: ClassVar[str] = "reference"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Nothing, Client, None]:
        return Nothing(), Client(x0), None

    def down(self, server: Nothing, kept: None, ctx: Ctx) -> Nothing:
        return Nothing()

    def client(self, down: Nothing, rows: Client, work: Work) -> tuple[Nothing, Client]:
        return Nothing(), Client(descend(rows.v, work))

    def server(self, server: Nothing, up: Nothing, ctx: Ctx) -> Nothing:
        return server

    def personal(self, down: Nothing, rows: Client, work: Work) -> Tensor:
        return rows.v
