"""FedFomo: a client moves toward those models of other clients that fit its held-out samples better than its own.

Problem: min over w_1..w_n of sum_i alpha_i f_i(w_i).

Reference: M. Zhang, K. Sapra, S. Fidler, S. Yeung, J. M. Alvarez, "Personalized Federated Learning with First Order
Model Optimization", ICLR 2021, arXiv:2012.08565 (public code: NVlabs/FedFomo).

    paper       here     meaning
    theta_n^t   w        model of client n after its training (a client may also take its own)
    theta_i^t-1 start    model from which the client's last training started
    w_n         weight   max(L_i(theta_i^t-1) - L_i(theta_n^t), 0) / ||theta_n^t - theta_i^t-1||, scaled to the sum 1
    L_i         held     loss on the samples that the client does not train on
    M           peers    number of models that a client receives
    P_i         liking   sums of the weights that a client gave to the models of each client
    epsilon     epsilon  probability of receiving the models of randomly drawn clients

Client state: d values (start). The server stores the client's w and its preference weights. Traffic per round: (peers +
1) d + peers + n values down, d + n up. The server receives the models of individual clients, so the method does not
support secure aggregation.

Deviations: the held-out samples are a share of the training set, and are the same in every round. A client may receive
the last model of any client, even of absent clients. With probability epsilon, all models that a client receives are
drawn at random instead of by preference. In the public code, each model is drawn at random with this probability, means
over groups of clients are also used, and preference weights may be negative. In the public code, the default distance
is the sum of absolute differences. If "l2" is chosen, the distance is the squared norm.

Public code: given the same received models and held-out samples, the clients of TsingZ0/PFLlib (d832e76f) produce the
same models and weights to within 1e-14, without the 1e-5 that their code adds to distances. With ``returns``, the
functions of NVlabs/FedFomo (fe04f664) also produce the same weights and mixtures, once the square root of that code's
"l2" is taken.

Defaults: a client receives five models and holds out a fifth of its samples. epsilon starts at 0.3 and decreases by
0.05 per round, as in the paper. If no received model is better than the model from which the client started, the client
keeps its trained model, as in PFLlib. With ``returns``, the client returns to the starting model, as in the paper. If
few samples are held out, returning to the previous model wastes the work of a round when steps rarely lower the loss on
these samples.

Use this method if some clients are similar, but it is not known which ones. Traffic grows with ``peers``. With peers =
0, the method is equivalent to Local.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Kept
from fedloom.local import Ctx, Nothing, Work, descend, split, where_moved
from fedloom.rows.algebra import norm
from fedloom.seeds import generator


class Down(NamedTuple):
    """The client's model w ``[m, d]``, the models of the client's peers, and preference weights.

    others ``[m, peers d]`` are the peers' models, and peers ``[m, peers]`` are their ids. liking ``[m, n]`` are the
    client's preference weights for the models of all clients.
    """

    w: Tensor
    others: Tensor
    peers: Tensor
    liking: Tensor


class Client(NamedTuple):
    """Model start ``[m, d]`` from which the client's last training began."""

    start: Tensor


class Up(NamedTuple):
    """Trained model w ``[m, d]`` and preference weights liking ``[m, n]``."""

    w: Annotated[Tensor, Kept(primary=True)]
    liking: Annotated[Tensor, Kept()]


class FedFomo(Algorithm):
    """FedFomo (Zhang et al. 2021)."""

    peers: int = Field(5, ge=0, description="M, maximum number of models that a client receives from other clients")
    epsilon: float = Field(
        0.3, ge=0, le=1, description="probability of drawing the received models at random in the first round"
    )
    decay: float = Field(0.05, ge=0, description="amount by which epsilon decreases every round")
    share: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="fraction of the training samples that is held out to compute the weights of the received models",
    )
    returns: bool = Field(
        False,
        description="if no received model helps a client, return it to the initial model of its last training",
    )

    mixes: ClassVar[bool] = True
    family: ClassVar[str] = "personalised"
    paper: ClassVar[Mapping[str, Any]] = {"returns": True}

    @property
    def mixes_all(self) -> bool:
        return True

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Nothing, Client, Up]:
        return Nothing(), Client(x0), Up(x0, x0.new_zeros(ctx.n))

    def down(self, server: Nothing, kept: Up, ctx: Ctx) -> Down:
        chosen, liking = list[Tensor](), kept.liking[ctx.ids]
        epsilon, n = max(self.epsilon - self.decay * (ctx.round - 1), 0.0), min(kept.liking.shape)
        for i, row in zip(ctx.ids.tolist(), liking.cpu(), strict=True):
            g = generator(ctx.seed, ctx.round, i, "peers")
            at_random = float(torch.rand(1, generator=g, dtype=torch.float64)) < epsilon
            order = torch.randperm(n, generator=g)  # where likings are equal, too
            order = order if at_random else order[row[order].argsort(descending=True, stable=True)]
            chosen.append(order[order != i][: self.peers])
        peers = torch.stack(chosen).to(kept.w.device)
        return Down(kept.w[ctx.ids], kept.w[peers].flatten(1), peers.to(kept.w), liking)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        if not down.peers.shape[1]:
            return Up(descend(down.w, work), down.liking), rows
        peers = torch.cat([work.ids[:, None].to(down.peers), down.peers], 1)
        models = torch.cat([down.w, down.others], 1).view(work.m, -1, work.layout.d)
        (rest, held), weight = split(work, self.share), torch.zeros_like(peers)
        loss = held.loss(rows.start)
        for n, other in enumerate(models.unbind(1)):
            apart = norm(other - rows.start)
            weight[:, n : n + 1] = (loss - held.loss(other)).clamp(min=0) / torch.where(apart > 0, apart, 1)
        total = weight.sum(1, keepdim=True)
        weight = weight / torch.where(total > 0, total, 1) * (work.steps > 0).to(weight)
        # theta_i^t <- theta_i^t-1 + sum w_n (theta_n^t - theta_i^t-1)
        start = rows.start + (weight[:, :, None] * (models - rows.start[:, None])).sum(1)
        start = start if self.returns else torch.where(total > 0, start, down.w)
        liking = down.liking.scatter_add(1, peers.long(), weight)  # P_i <- P_i + w
        w = where_moved(work, descend(start, rest), down.w)
        return Up(w, liking), Client(where_moved(work, start, rows.start))

    def server(self, server: Nothing, up: Up, ctx: Ctx) -> Nothing:
        return server

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return down.w.clone()
