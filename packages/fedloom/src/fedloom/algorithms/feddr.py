"""FedDR: randomized Douglas-Rachford splitting for composite problems.

Problem: min over x of sum_i alpha_i f_i(x) + g(x).

Reference: Q. Tran-Dinh, N. H. Pham, D. T. Phan, L. M. Nguyen, "FedDR - Randomized Douglas-Rachford Splitting Algorithms
for Nonconvex Federated Composite Optimization", NeurIPS 2021, arXiv:2103.03452, Algorithm 1.

    paper      here          meaning
    xbar       x             server's model
    x_i        w             local model, prox_{eta f_i}(y_i)
    y_i        y             center of the local problem
    xhat_i     u             reflected model 2 x_i - y_i
    alpha      alpha         relaxation
    eta        eta           step of the proxes
    g          regulariser   nonsmooth term of the objective

Client state: 2d values (w, y). Traffic per round: d values down (sparse or of low rank, depending on the prox), d up.
The server stores every client's last u.

Deviations: clients start with x_i = y_i = x^0. A client's first round corresponds to the step that the paper takes
before round one (x_i = prox of x^0). Clients send u itself instead of the difference from the last u. The server's mean
over all clients is the same in both cases. In the public code, y starts at zero, and clients are weighted by samples.
Local training starts at xbar. With an exact prox, the starting point would make no difference. With ``start = "own"``,
it starts at the client's x_i, as in the public code.

Public code: the TensorFlow clients and server of unc-optimization/FedDR (4097eb44) produce the same x_i, y_i and xbar
to within 1e-15, with and without L1 and with absent clients, once their y_i and xhat_i start at x^0.

Defaults: eta = 2 reach, where reach is the distance covered in a round (lr times the mean number of steps). Local
training starts at xbar. Let c_i be the fraction of the distance to the prox that the steps of client i cover, and let m
be the mean of 1/c_i. If the gradient is constant, the server's model moves by eta/((1 - 1/alpha) m + 2/alpha - 1). This
distance is 1.6 reach if clients have equal sizes (c = 0.39). The distance still equals FedAvg's reach if m is 4, for
instance if some clients take a tenth of the steps. If local training starts from the client's own x_i, the server's
model moves by eta/(m - 1 + 1/alpha), so that a single small client slows down all other clients. There is no default
regularizer, because the regularizer is part of the problem. Without a regularizer, no parameters of the models are
zero, and a warning is issued. The paper's experiments use L1 with c = 0.01.

Use this method for composite problems with partial participation. If most clients are absent, the model moves little,
and a warning is issued. If eta is large and there are few local steps, the method behaves like local training. The
regularizer's threshold at the server is eta times the regularizer's weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Model, Point, Sent, by_rule
from fedloom.algorithms._regulariser import Regulariser, note_missing_regularizer, proximal
from fedloom.local import Ctx, Work, descend
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``."""

    x: Annotated[Tensor, Sent(prox="regulariser")]


class Client(NamedTuple):
    """Local model w and center y of the local problem, both ``[m, d]``."""

    w: Tensor
    y: Tensor


class FedDR(Algorithm):
    """FedDR (Tran-Dinh et al. 2021, Algorithm 1)."""

    eta: Derived = by_rule(
        description="step size of the proximal operators (default: 2 * reach, where reach is lr times the steps "
        "per round; 100, 500 and 1000 in the authors' scripts)"
    )
    alpha: float = Field(1.95, gt=0, le=2, description="relaxation parameter (1.95 in all experiments)")
    regulariser: Regulariser = Field(
        None, description="regularizer g with a proximal operator (0.01 ||x||_1 in the experiments)"
    )
    start: Literal["own", "server"] = Field(
        "server", description="starting point of local SGD: the server's xbar, or the client's own x_i (public code)"
    )

    family: ClassVar[str] = "composite"
    paper: ClassVar[Mapping[str, Any]] = {"eta": 100.0, "start": "own"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"eta": 2 * ctx.reach}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return note_missing_regularizer(self)

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, Point]:
        return Model(x0), Client(x0, x0), Point(x0)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Point, Client]:
        w, y = rows
        y = y + self.alpha * (down.x - w)  # y_i += alpha (xbar - x_i)
        w = descend(w if self.start == "own" else down.x, work, pull=((1 / self.eta, y),))  # x_i ~ prox_{eta f_i}(y_i)
        return Point(2 * w - y), Client(w, y)  # xhat_i = 2 x_i - y_i

    def server(self, server: Model, up: Point, ctx: Ctx) -> Model:
        return Model(proximal(self.regulariser, up.u, self.eta, ctx.layout))  # xbar = prox_{eta g}(mean of xhat_i)
