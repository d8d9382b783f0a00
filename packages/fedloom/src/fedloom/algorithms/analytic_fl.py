"""Analytic FL: least squares over all clients in one round, with a frozen body and a head computed from feature sums.

Problem: min over the head W of the sum over all samples of ||W' z - t||^2 + ridge ||W||^2, where z are the body's
features.

Reference: R. He, K. Tong, D. Fang, H. Sun, Z. Zeng, H. Li, T. Chen, H. Zhuang, "AFL: A Single-Round Analytic Approach
for Federated Learning with Pre-trained Models", CVPR 2025, arXiv:2405.16240, Theorem 1 and Section 3.4. The name `afl`
in the registry refers to agnostic federated learning.

    paper        here          meaning
    X_k, Y_k     z, t          features of the frozen body with a 1, and one-hot labels
    C_k          zz            X_k' X_k, a client's Gram matrix
    C_k W_k      zt            X_k' Y_k
    C_agg        total         their sum over clients

Client state: the s statistics that the client has sent. Traffic per round: d values down and s up, where s is (k + 1)
(k + 2) / 2 + (k + 1) c for k features and c outputs. Clients do not send a model, and after its first upload a client
sends only zeros.

Deviations: clients send the sums X' X and X' Y, whereas the paper's clients send their heads and X' X. The resulting
head is the same, but the paper's gamma, its later removal, and the recursion over clients are not needed. Heads have a
bias. Sums are divided by the number of samples.

The body is taken from the initial model: its features come either from an untrained network with random weights or from
a network that the user trained. For a model without a hidden layer, the method is linear ridge regression. Learning
rate, epochs and batches have no effect. If shares are proportional to the numbers of samples, then once every client
has participated, the head depends neither on how rows are distributed over clients nor on the order of participation.
Outputs are least-squares fits to 0 and 1, and their softmax is not a probability. Compare accuracies instead of losses.

Public code: the local solutions, the recursion over clients and the removal of gamma (1 and 10) of
ZHUANGHP/Analytic-federated-learning (1e7c2d99), on features with a 1, give the same head to within 1e-14.

Attackers: attackers forge statistics instead of a model. A forged upload changes each sum in proportion to the
attacker's share.

Use this method if a good frozen body is available, and labels are skewed or rounds are expensive.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedloom.algorithms import _statistics as sums
from fedloom.algorithms._base import Algorithm, Model
from fedloom.local import Ctx, Work


class AnalyticFL(Algorithm):
    """AFL, analytic federated learning (He et al. 2025, Theorem 1)."""

    ridge: float = Field(
        0.0,
        ge=0,
        description="weight of the penalty on the head's squared norm, like alpha in scikit-learn's Ridge; 0 "
        "gives AFL's least squares",
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
        total = server.total + ctx.part * up.change  # C_agg
        head = sums.solve_head(sums.unpack_statistics(total, ctx.layout), self.ridge / int(ctx.sizes.sum()), ctx.layout)
        return sums.Server(sums.replace_head(server.x, head, ctx.layout), total)

    def reshared(self, server: sums.Server, moved: sums.Up, ctx: Ctx) -> sums.Server:
        return sums.Server(server.x, server.total + moved.change)
