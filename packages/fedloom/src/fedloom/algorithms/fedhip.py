"""FedHiP: a closed-form personal head for every client, which combines its own sums with the sums of all clients.

Problem: min over the head W_i of the sum of ||W_i' z - t||^2 over client i's samples, plus share times the same sum
over all other clients' samples, plus ridge ||W_i||^2, where z are the features of a frozen body.

Reference: J. Tang, Z. Yang, J. Wang, K. Fan, J. Xu, H. Zhuang, A. Liu, H. H. Song, L. Wang, Y. Liu, "FedHiP:
Heterogeneity-Invariant Personalized Federated Learning Through Closed-Form Solutions", 2025, arXiv:2508.04470v1.

    paper                            here          meaning
    analytic local training          statistics    a client's sums of z z' and z t'
    analytic global aggregation      total         their sum over clients, and its head
    analytic local personalization   personal      the client's head, from its own sums and the sums of all clients

Client state: the s statistics that the client has sent. Traffic per round: d + s values down and s up, where s is (k +
1) (k + 2) / 2 + (k + 1) c for k features and c outputs. Clients do not send a model, and after its first upload a
client sends only zeros.

Deviations: each client chooses a share between its own head (share 0) and the pooled head (share 1). The client tries
nine shares and uses the one with the smallest exact leave-one-out error on its rows. In the paper, all clients use the
same number. The sums of the other clients are multiplied by the share. The method could not be compared with the
paper's code, because this code is not public. Heads have a bias.

If shares are proportional to the numbers of samples, a personal head does not depend on how rows are distributed over
the other clients. Learning rate, epochs and batches have no effect. Outputs are least-squares fits to 0 and 1, and
their softmax is not a probability. Compare accuracies instead of losses.

Attackers: attackers forge statistics instead of a model. A forged upload changes each sum in proportion to the
attacker's share.

Use this method with a good frozen body, if clients differ in their labels or in the meaning of labels, and if rounds
are expensive.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import _statistics as sums
from fedloom.algorithms._base import Algorithm
from fedloom.local import Ctx, Work

SHARES_TRIED = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 0.0)


class Down(NamedTuple):
    """Model x ``[d]``, and the statistics total ``[s]`` of all clients."""

    x: Tensor
    total: Tensor


class Fit(NamedTuple):
    """Head ``[k + 1, c]`` and its leave-one-out error."""

    head: Tensor
    error: float


class FedHiP(Algorithm):
    """FedHiP (Tang et al. 2025)."""

    ridge: float = Field(
        1.0, ge=0, description="weight of the penalty on the head's squared norm, like alpha in scikit-learn's Ridge"
    )
    share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="weight of the other clients' statistics in a client's head (default: each client chooses its own)",
    )

    family: ClassVar[str] = "personalised"
    needs_exact: ClassVar[str | None] = sums.SUM_IS_EXACT

    @property
    def ignored(self) -> tuple[str, ...]:
        return sums.IGNORED_LOCAL_KEYS

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[sums.Server, sums.Client, None]:
        return sums.start(x0, ctx.layout)

    def client(self, down: Down, rows: sums.Client, work: Work) -> tuple[sums.Up, sums.Client]:
        return sums.sent_fields(down.x, rows, work)

    def server(self, server: sums.Server, up: sums.Up, ctx: Ctx) -> sums.Server:
        total = server.total + ctx.part * up.change
        head = sums.solve_head(sums.unpack_statistics(total, ctx.layout), self.ridge / int(ctx.sizes.sum()), ctx.layout)
        return sums.Server(sums.replace_head(server.x, head, ctx.layout), total)

    def reshared(self, server: sums.Server, moved: sums.Up, ctx: Ctx) -> sums.Server:
        return sums.Server(server.x, server.total + moved.change)

    def personal(self, down: Down, rows: sums.Client, work: Work) -> Tensor:
        heads, outputs = [], sums.outputs_of(work.layout)
        for i, part in enumerate(work.features(down.x)):
            weight, size = work.weight[i].double(), max(len(part.z), 1)
            ridge = float(self.ridge * weight / size)  # for sums over all samples if shares are by samples
            rest = sums.unpack_statistics(down.total - weight.to(down.total) * rows.sent[i], work.layout)
            z, t = sums.samples_of(part, outputs)
            client_sums = rest._replace(zz=weight / size * (z.T @ z), zt=weight / size * (z.T @ t))
            tried = SHARES_TRIED if self.share is None else (self.share,)
            mixes = [
                client_sums._replace(zz=client_sums.zz + s * rest.zz, zt=client_sums.zt + s * rest.zt) for s in tried
            ]
            fits = [self._fit(z, t, mix, float(weight / size), ridge, work) for mix in mixes]
            heads.append(min(fits, key=lambda fit: fit.error).head)
        return sums.replace_head(down.x, torch.stack(heads), work.layout)

    def _fit(self, z: Tensor, t: Tensor, mix: sums.FeatureSums, unit: float, ridge: float, work: Work) -> Fit:
        """Return a head, and the mean squared error on each row of the head that is computed without that row."""
        if not len(z) or self.share is not None:
            return Fit(sums.solve_head(mix, ridge, work.layout), 0.0)
        both = sums.solve_head(mix._replace(zt=torch.cat([mix.zt, z.T], 1)), ridge, work.layout)
        head, directions = both.split([t.shape[1], len(z)], 1)
        leverage = unit * (z * directions.T).sum(1, keepdim=True)
        return Fit(head, float(((t - z @ head) / (1 - leverage).clamp(min=1e-9)).square().mean()))
