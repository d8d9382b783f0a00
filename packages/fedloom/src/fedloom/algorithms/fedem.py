"""FedEM: every client's model is a mixture of a few shared networks, with the client's own mixture weights.

Problem: min over x_1..x_M and pi_1..pi_n of sum_i alpha_i (mean over the samples of client i of -log sum_m pi_im p(y |
x_m)).

Reference: O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, arXiv:2108.10252v4, Algorithm 1 with Eqs. 7 to 9.

    paper       here          meaning
    theta_m     x             component m of the mixture, on the server
    pi_tm       pi            weights of client t, stored as logarithms in the model's parameter ``mixing``
    q_t(z = m)  share         share of component m in a sample: pi_m p(y | theta_m), scaled to the sum 1

Client state: M values (pi). Traffic per round: d values down, d up, where d is the number of parameters of all M
components.

Deviations: none. A step minimizes sum_m q_m (-log p(y | theta_m)), where q is the value at the start of the round (Eq.
9). This step is implemented as the loss of the mixture plus an additional term. In the paper, the server has no model
for unknown clients. A mixture with equal weights would not be suitable for them either. The pi of a new client is
computed by one expectation step over its samples.

Public code: clients and server of omarfoq/FedEM (996faddf), with the same batches for all components, produce the same
x, pi and predictions to within 1e-15. The pi of a new client is also the same. In their code, the mean over a cohort
includes the absent clients, with the model that they received.

Use this method if all clients mix the same few kinds of data in different proportions. Set ``mixture`` in [model] to
the number of kinds of data, which is 3 in the paper. With a model that is not a mixture, FedEM is equivalent to FedAvg,
and a warning is issued. The task must be a classification.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.local import Ctx, Term, Work, descend, where_moved
from fedloom.models.mixture import MIXING, log_probabilities
from fedloom.rows import masks
from fedloom.rows.layout import Layout

MIN_MIXTURE_WEIGHT = 1e-12
"""Smallest weight of a component. This weight is positive so that the logarithm stays finite."""


class Client(NamedTuple):
    """Mixture weights pi ``[m, M]`` of the components."""

    pi: Tensor


class FedEM(Algorithm):
    """FedEM (Marfoq et al. 2021, Algorithm 1)."""

    family: ClassVar[str] = "personalised"

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        plain = "FedEM without a mixture is the same as FedAvg. Set mixture in [model] to a number of components"
        return [] if components(layout) > 1 else [plain]

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        count = components(ctx.layout)
        return Model(x0), Client(x0.new_full((count,), 1 / count)), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:
        if components(work.layout) == 1:
            return Delta(descend(down.x, work) - down.x), rows
        term = Term(surrogate, anchors=(down.x,), argument=rows.pi.log())
        w = descend(down.x, work, terms=(term,), mask=~work.layout.mask(MIXING).to(down.x.device))
        return Delta(w - down.x), Client(where_moved(work, self._expected(down, rows, work), rows.pi))

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)

    def global_model(self, server: Model) -> None:
        return None

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        if components(work.layout) == 1:
            return down.x.expand(work.m, -1).clone()
        mixing = work.layout.mask(MIXING).to(down.x.device)
        return masks.joined(down.x, rows.pi.log(), mixing)

    def _expected(self, down: Model, rows: Client, work: Work) -> Tensor:
        """Return the mean of q over each client's samples, ``[m, M]`` (Eq. 8)."""
        count, means = rows.pi.shape[1], list[Tensor]()
        for (z, y), pi in zip(work.features(down.x), rows.pi, strict=True):
            means.append(shares(losses(z, y, count), pi.log()).mean(0))
        return torch.stack(means).clamp(min=MIN_MIXTURE_WEIGHT)


def components(layout: Layout) -> int:
    """Return M, the number of components of a model, or 1 if the model is not a mixture."""
    return layout.shapes[layout.names.index(MIXING)][0] if MIXING in layout.names else 1


def losses(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """Return -log p(y) ``[b, M]`` of each component, given the concatenated logits of all components ``[b, M c]``."""
    logs = log_probabilities(logits.unflatten(1, (count, -1)))
    return -logs.gather(2, y.long().view(-1, 1, 1).expand(-1, count, 1))[:, :, 0]


def shares(loss: Tensor, log_pi: Tensor) -> Tensor:
    """Return q ``[b, M]`` for samples with the losses ``[b, M]`` (Eq. 7)."""
    return (log_pi - loss).softmax(1)


def surrogate(z: Tensor, outputs: Tensor, y: Tensor, anchors: Tensor, log_pi: Any) -> Tensor:
    """Return, for each sample, the objective of Eq. 9 minus the loss of the mixture itself."""
    share = shares(losses(anchors[0], y, len(log_pi)), log_pi)
    return (share * losses(z, y, len(log_pi))).sum(1) - losses(outputs, y, 1)[:, 0]
