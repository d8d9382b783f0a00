"""FedSplit: Peaceman-Rachford splitting, whose fixed point is exact.

Problem: min over x of sum_i alpha_i f_i(x), where f_i is convex.

Reference: R. Pathak, M. J. Wainwright, "FedSplit: An Algorithmic Framework for Fast Federated Optimization", NeurIPS
2020, arXiv:2005.05238, Algorithm 1.

    paper        here    meaning
    x            x       server's model
    z_j^(t+1/2)  w       prox_{s f_j}(2 x - z_j)
    z_j          z       centered local variable
    s            step    step of the prox

Client state: d values (z). Traffic per round: d values down, d up. The server stores every client's last z.

Deviations: the local prox step is solved approximately by the run's local training, which starts at x. In the paper,
all clients participate. Here, an absent client is represented by its last z.

Public code: clients and server of wenh06/fl-sim (61b57ec9) produce the same z_j and x to within 1e-14, once local
training starts at x. In their code, local training starts from the client's last model.

Defaults: step = 2 reach, where reach is the distance covered in a round (lr times the mean number of steps). This value
equals FedDR's eta, and is chosen for the same reasons. With a constant step, local steps of about this size would
reduce the local prox to a single batch.

Use this method for convex problems whose local problems are solved well. The method then converges linearly. The method
is equal to FedDR with alpha = 2 and no regularizer. If the problem is not strongly convex, the method may not converge.
If most clients are absent, the model moves little, and a warning is issued.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Kept, Model, by_rule
from fedloom.local import Ctx, Work, descend


class Client(NamedTuple):
    """Local variable z ``[m, d]``."""

    z: Tensor


class Up(NamedTuple):
    """Local variable z ``[m, d]``, which the server stores for every client."""

    z: Annotated[Tensor, Kept(primary=True)]


class FedSplit(Algorithm):
    """FedSplit (Pathak and Wainwright 2020, Algorithm 1)."""

    step: Derived = by_rule(
        description="step size s of the proximal operator (default: 2 * reach, where reach is lr times the steps "
        "per round; Theorem 1 uses 1/sqrt(l * L), with the curvatures l and L)"
    )

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"step": 2 * ctx.reach}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, Up]:
        return Model(x0), Client(x0), Up(x0)

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Up, Client]:
        x, z = down.x, rows.z
        w = descend(x, work, pull=((1 / self.step, 2 * x - z),))  # local prox step
        z = z + 2 * (w - x)  # local centring step
        return Up(z), Client(z)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(up.z)  # x = mean of z_j
