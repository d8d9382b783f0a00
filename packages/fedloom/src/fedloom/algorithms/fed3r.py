"""Fed3R: a ridge classifier over all clients, computed in one round, with normalized class weights.

Problem: min over the head W of the sum over all samples of ||W' z - t||^2 + ridge ||W||^2, where z are the body's
features.

Reference: E. Fani, R. Camoriano, B. Caputo, M. Ciccone, "Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers", ICML 2024, arXiv:2406.01116, Section 4.

    paper    here      meaning
    A_k      zz        sum of z z' over a client's samples
    b_k      zt        sum of z t'
    W*       head      (A + lambda I)^-1 b
    lambda   ridge     weight of the squared norm of the head

Client state: the s statistics that the client has sent. Traffic per round: d values down and s up, where s is (k + 1)
(k + 2) / 2 + (k + 1) c for k features and c outputs. Clients do not send a model, and after its first upload a client
sends only zeros.

Deviations: if the head of the model has a bias, this bias is 0, as in the paper. The released code appends a constant
feature (``bias``), penalizes its weight like the other weights, and divides it by the norm of the class's other
weights. Sums are divided by the number of samples. Random Fourier features (Fed3R-RF) correspond to a model with a
frozen body of random weights. To fine-tune from the computed head (Fed3R-FT), start a run of a different method from
this model.

The weights of each class are divided by their norm, as in the paper, so that a class cannot win only because its
weights are large. Without this normalization, the method is equivalent to analytic-fl with a ridge penalty and no bias.
Learning rate, epochs and batches have no effect. If shares are proportional to the numbers of samples, the head does
not depend on how rows are distributed over clients.

Public code: the sums, the solution and the normalization of Erosinho13/Fed3R (c2a8e5de) give the same heads to within
1e-14.

Attackers: attackers forge statistics instead of a model. A forged upload changes each sum in proportion to the
attacker's share.

Use this method if a good frozen body is available and there are many classes, or as a starting point for other methods.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedloom.algorithms import _statistics as sums
from fedloom.algorithms._base import Algorithm, Model
from fedloom.local import Ctx, Work


class Fed3R(Algorithm):
    """Fed3R (Fani et al. 2024, Section 4)."""

    ridge: float = Field(
        0.01,
        ge=0,
        description="lambda, weight of the penalty on the head's squared norm, like alpha in scikit-learn's "
        "Ridge (0.01 in the paper)",
    )
    normalise: bool = Field(True, description="scale every class's weight vector to length 1")
    bias: bool = Field(
        False, description="append a constant feature, whose weight is the class's bias, as in the released code"
    )

    needs_exact: ClassVar[str | None] = sums.SUM_IS_EXACT

    @property
    def ignored(self) -> tuple[str, ...]:
        return sums.IGNORED_LOCAL_KEYS

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[sums.Server, sums.Client, None]:
        return sums.start(x0, ctx.layout)

    def client(self, down: Model, rows: sums.Client, work: Work) -> tuple[sums.Up, sums.Client]:
        return sums.sent_fields(down.x, rows, work)

    def server(self, server: sums.Server, up: sums.Up, ctx: Ctx) -> sums.Server:
        total = server.total + ctx.part * up.change  # A, b
        ridge = self.ridge / int(ctx.sizes.sum())
        moments = sums.unpack_statistics(total, ctx.layout)
        head = sums.solve_head(moments, ridge, ctx.layout, bias=self.bias, penalize_bias=True)
        if self.normalise:
            length = head[:-1].norm(dim=0)
            head = head / length.where(length > 0, 1)  # W_c / ||W_c||
        return sums.Server(sums.replace_head(server.x, head, ctx.layout), total)

    def reshared(self, server: sums.Server, moved: sums.Up, ctx: Ctx) -> sums.Server:
        return sums.Server(server.x, server.total + moved.change)
