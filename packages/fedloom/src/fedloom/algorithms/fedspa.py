"""FedSpa: every client trains its own sparse part of a common model, and this part changes during training.

Problem: min over w of sum_i alpha_i f_i(m_i * w), where m_i is a mask with a fixed size per layer that client i
searches for.

Reference: T. Huang, S. Liu, L. Shen, F. He, W. Lin, D. Tao, "Achieving Personalized Federated Learning with Sparse
Local Models", arXiv:2201.11380, Algorithm 1 (mask search as in RigL, Evci et al. 2020).

    paper      here       meaning
    w_t        x          server's model
    m_i        mask       1 where client i has a parameter, else 0
    w~_i       w          client's model, zero outside its mask
    U_i        -dw        masked update
    alpha_t    rate       share of a layer that is exchanged, which falls from alpha_0 along a cosine
    T          horizon    number of rounds after which the rate is zero

Client state: d values (mask). Traffic per round: d values down, density * d up (values and indices).

Deviations: the download is dense, and the client applies its mask. The server therefore does not need the masks, and
only learns about them from the uploads. In the paper, the server sends the masked model. Parameters with fewer than two
dimensions always belong to the mask. Parameters are added to the mask again if they have the largest gradients on one
batch. All parameters outside the mask are candidates, including those that have just been pruned.

Public code: the clients of rong-dai/DisPFL (e2f47d4a), written by some of the authors with the same search, produce the
same models and masks to within 1e-15, once their number of exchanged parameters is rounded down. Their code rounds this
number up.

Defaults: T is the number of rounds in the run.

Attackers: a forged model moves the parameters in the attacker's mask as far as in FedAvg, and it leaves all other
parameters unchanged.

Use this method if clients can handle only a part of the model. With ``density`` = 1, the method is equivalent to
FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Mean, Model, Sent, by_rule
from fedloom.local import Batch, Ctx, Work, descend, iterate, where_moved
from fedloom.rows import masks


class Client(NamedTuple):
    """Mask ``[m, d]`` of zeros and ones."""

    mask: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the model, which is 0 outside the client's mask."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True), Sent("sparse")]


class _Look(NamedTuple):
    w: Tensor
    g: Tensor


class FedSpa(Algorithm):
    """FedSpa (Huang et al. 2022, Algorithm 1)."""

    density: float = Field(
        0.5, gt=0, le=1, description="fraction of the weights that a mask keeps (0.5 in FedSLR's comparison)"
    )
    exchange: float = Field(0.5, ge=0, le=1, description="alpha_0, fraction of a layer's weights exchanged in round 1")
    horizon: Derived = by_rule(
        description="T, last round with changes to the masks (default: the number of rounds of the run)"
    )

    family: ClassVar[str] = "personalised"
    paper: ClassVar[Mapping[str, Any]] = {"horizon": 1000}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"horizon": ctx.rounds}

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        score = torch.rand(len(x0), generator=ctx.rng("mask"), dtype=torch.float64)
        chosen = masks.smallest(score, ctx.layout, masks.erdos_renyi_kernel(ctx.layout, self.density))
        mask = chosen | ~masks.matrices(ctx.layout)  # the same for all clients
        return Model(x0), Client(mask.to(x0)), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Up, Client]:
        def look(r: _Look, work: Work, batch: Batch) -> _Look:
            return r._replace(g=work.grad(r.w, batch))

        x, mask = down.x, rows.mask
        w = descend(x * mask, work, mask=mask)
        g = iterate(look, _Look(w, torch.zeros_like(w)), work, 1 * (work.steps > 0), stream="regrow").g  # dense
        new = where_moved(work, self._search_mask(mask, w, g, work), mask)
        return Up(w.sub_(x).mul_(mask)), Client(new)

    def encode(self, model: Tensor, down: Model, rows: Client, work: Work) -> tuple[Up, Client]:
        return Up((model - down.x) * rows.mask), rows

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)  # w_{t+1} = w_t - mean of U_i

    def global_model(self, server: Model) -> None:
        return None  # a client has m_i * x

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        return down.x * rows.mask  # m_i * w

    def _search_mask(self, mask: Tensor, w: Tensor, g: Tensor, work: Work) -> Tensor:
        """Return the next mask ``[m, d]``.

        In each layer, the parameters with the smallest weights are removed from the mask, and the same number of
        parameters with the largest gradients are added to it.
        """
        rate = self.exchange / 2 * (1 + math.cos(math.pi * min(1.0, (work.round - 1) / self.horizon)))  # alpha_t
        count = (rate * masks.erdos_renyi_kernel(work.layout, self.density)).long()
        never = torch.finfo(w.dtype).max  # as a score
        out = torch.add(w.abs(), 1 - mask, alpha=never)
        mask = mask - masks.smallest(out, work.layout, count).to(mask)  # prune
        out = torch.sub(never * mask, g.abs())
        return mask + masks.smallest(out, work.layout, count).to(mask)  # regrow
