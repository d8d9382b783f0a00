"""MOON: local training keeps representations close to the received model's and away from the client's last model's.

Problem: min over x of sum_i alpha_i f_i(x). Local steps are taken on f_i(w) + mu l_con(w).

Reference: Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv:2103.16257v1, Algorithm 1 and
Eq. 3 (public code: QinbinLi/MOON).

    paper       here     meaning
    w_t         x        server's model
    w_i^(t-1)   last     client's model after its last training (at first, the initial model)
    z, z_glob,  features, anchors    representations of a sample by the local, the received and the last model
    z_prev
    tau         tau      temperature
    mu          mu       weight of the contrastive loss

Client state: d values (last). Traffic per round: d values down, d up.

Deviations: the representation is the input of the model's head. The paper adds a two-layer projection head to every
network. Here, the user may include a projection head in the model. The representations of the received model and of the
last model are computed without dropout. Absent clients keep the model from their last round, as in the public code with
a pool of one model.

Public code: the clients of fluke-fl 0.8.1 on PyPI, including absent clients, give the same models to within 1e-15.

Defaults: mu = 0.5, which is between the paper's two smallest values. With mu of 1 or more, the term ties
representations to the received model's representations so strongly that a network barely moves in a few rounds of small
steps.

Use this method if labels are skewed and networks are deep enough to have representations. Each sample needs two
additional forward passes. With mu = 0, the method is equivalent to FedAvg. If the whole model is the head, the method
is also equivalent to FedAvg, and a warning is issued.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.local import Ctx, Term, Work, descend, where_moved
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Client(NamedTuple):
    """Client's model ``[m, d]`` after its last training."""

    last: Tensor


class MOON(Algorithm):
    """MOON (Li et al. 2021, Algorithm 1)."""

    mu: float = Field(
        0.5, ge=0, description="weight of the contrastive loss (the paper tunes it over {0.1, 1, 5, 10}, Sec. 4.1)"
    )
    tau: float = Field(0.5, gt=0, description="temperature; 0.5 (Sec. 4.1)")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        return masks.note_head_is_model("MOON", masks.head(layout), "FedAvg") if layout.matrix_shapes else []

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Delta, Client]:
        def contrast(z: Tensor, _outputs: Tensor, _y: Tensor, anchors: Tensor, _argument: Any) -> Tensor:
            near, far = (torch.cosine_similarity(z, anchor) / self.tau for anchor in anchors)
            return torch.logaddexp(near, far) - near  # Eq. 3

        w = descend(down.x, work, terms=(Term(contrast, self.mu, (down.x, rows.last)),))
        return Delta(w - down.x), Client(where_moved(work, w, rows.last))

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)
