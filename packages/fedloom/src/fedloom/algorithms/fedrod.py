"""FedRoD: one body with two heads, a generic head trained as if classes were balanced, and a personal head.

Problem: min over x of sum_i alpha_i b_i(x), and for every client min over h_i of f_i(x + h_i), where h_i changes only
the head, and b_i is f_i with log n_ic added to the output of class c.

Reference: H.-Y. Chen, W.-L. Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification",
ICLR 2022, arXiv:2107.00778v2, Algorithm 1 with Eqs. 8 and 9, without the hypernetwork (public code: TsingZ0/PFLlib, not
by the authors).

    paper        here       meaning
    theta, psi   x          body and generic head, on the server
    phi_i        head       personal head, whose outputs are added to the generic ones
    L^BSM        shift      balanced softmax: gamma log n_ic is added to the output of class c
    gamma        gamma      exponent of the class counts

Client state: the head's parameters. Traffic per round: d values down, d up. The class counts never leave the client.

Deviations: for the gradient, log n_ic is added to the bias of the head, which gives the same result. A class without
samples at a client is treated as if it had 1e-9 samples. The personal head starts at zero. In the public code, it
starts as a copy of the generic head. Here, the personal model is therefore initially equal to the generic model. Both
heads are linear, so the personal model is a single network whose head is the sum of the two heads.

Public code: the clients of TsingZ0/PFLlib (d832e76f) produce the same models to within 1e-9, if personal heads start at
zero. In their code, personal heads start as copies of the generic head.

Use this method if labels are skewed, and if both a generic model and personal models are needed. With gamma = 0, the
generic model equals FedAvg's model. The method needs a classification task and a head that has a bias.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.algorithms._prototypes import require_bias
from fedloom.local import Batch, Ctx, Work, iterate
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Client(NamedTuple):
    """Difference ``[m, h]`` that a client adds to the generic head."""

    head: Tensor


class _Rows(NamedTuple):
    w: Tensor
    head: Tensor
    shift: Tensor


class FedRoD(Algorithm):
    """FedRoD (Chen and Chao 2022, Algorithm 1)."""

    gamma: float = Field(1.0, ge=0, description="exponent of the class counts in the balanced softmax (1 in Eq. 8)")

    family: ClassVar[str] = "personalised"
    plain_sgd: ClassVar[str | None] = "each batch updates both of its heads by a plain SGD step"

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        require_bias("FedRoD", layout)
        return masks.note_head_is_model("FedRoD", masks.head(layout), "Local and FedAvg side by side")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(torch.zeros_like(x0[masks.head(ctx.layout)])), None

    def _shift(self, work: Work, like: Tensor) -> Tensor:
        """Return gamma log n_ic ``[m, d]`` in the coordinates of the head's bias, and 0 in all other coordinates."""
        bias = masks.head(work.layout) & ~masks.matrices(work.layout)
        prior = self.gamma * work.class_counts.clamp(min=1e-9).log()
        prior = prior[:, 1:] - prior[:, :1] if bias.sum() == 1 else prior  # one output for two classes
        return like.new_zeros(work.m, work.layout.d).masked_scatter(bias.to(like.device), prior.to(like))

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:
        top = masks.head(work.layout).to(down.x.device)
        decay = work.local.weight_decay

        def step(r: _Rows, work: Work, batch: Batch) -> _Rows:
            both = r.w.clone()
            both[:, top] += r.head
            slope = work.clipped(both, batch)[:, top].add_(r.head, alpha=decay)  # Eq. 9, body and psi as they are
            generic = work.add_decay_(work.clipped(r.w + r.shift, batch), r.w)  # Eq. 8
            return r._replace(w=r.w.sub(generic, alpha=work.lr), head=r.head.sub(slope, alpha=work.lr))

        w, head, _ = iterate(step, _Rows(down.x.expand(work.m, -1).clone(), rows.head, self._shift(work, down.x)), work)
        return Delta(w - down.x), Client(head)

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        top = masks.head(work.layout).to(down.x.device)
        return masks.joined(down.x, down.x[..., top] + rows.head, top)
