"""FLAME as its public code (zsk66/FLAME) has it: theta is pulled to the received w, not to the client's w_i (Eq. 11).

From the second round on the two differ. With one local epoch nothing else does; with more, the code also moves the dual
after every epoch, which is not done here.
"""

from __future__ import annotations

from fedloom.algorithms import Model, Point
from fedloom.algorithms.flame import FLAME, Client
from fedloom.local import Work


class FLAMEAsPublished(FLAME):
    """FLAME whose prox centre is the received model."""

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Point, Client]:
        return super().client(down, rows._replace(w=down.x.expand_as(rows.w)), work)
