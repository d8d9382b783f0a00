"""Ditto: a personal model that is pulled toward the global model while the global model is being trained.

Problem: min over v_i of f_i(v_i) + lam/2 ||v_i - w*||^2 with w* a minimizer of the global problem.

Reference: T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, arXiv:2012.04221v3, Algorithm 1.

    paper    here     meaning
    w^t      x        server's model
    w_k      w        client's copy after local SGD
    v_k      v        personal model
    lambda   lam      pull of v to the received model

Client state: d values (v). Traffic per round: d values down, d up.

Deviations: the global model is trained by FedAvg with the run's aggregator (the paper allows any solver). The global
and the personal branch use the same batches unless ``batches = "own"``. v takes as many steps as w unless
``personal_epochs`` is set. ``branch = "own"`` gives Ditto as in FLAME's public code (zsk66/FLAME): the global branch
continues from the client's own w_k and takes one batch per epoch, so that the global model is a mean of purely local
runs. A client then has to store d more numbers.

Defaults: lam = 2/(reach sqrt(rounds)), where reach is the distance covered in a round (lr times the mean number of
steps). This pull equals FLAME's pull, and is chosen for the same reasons. With a constant pull, v would equal the
global model if rounds were long, and would equal the model of Local if rounds were short.

Public code: the clients of TsingZ0/PFLlib (d832e76f) give the same models to within 1e-15.

Use this method for personal models that remain useful under attack or with little data: lam = 0 gives Local, and a
larger lam moves the models towards the global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, DerivedFrom0, Model, by_rule
from fedloom.local import Ctx, Work, descend, where_moved
from fedloom.rows.layout import Layout


class Client(NamedTuple):
    """Personal model v ``[m, d]``."""

    v: Tensor


class Both(NamedTuple):
    """Personal model v and local model w of the global branch, both ``[m, d]``."""

    v: Tensor
    w: Tensor


class Ditto(Algorithm):
    """Ditto (Li et al. 2021, Algorithm 1)."""

    lam: DerivedFrom0 = by_rule(
        description="lambda, strength of the pull towards w (default: 2/(reach * sqrt(rounds)), where reach is "
        "lr times the steps per round; the paper tunes it over {0.1, 1, 2}, Sec. 5)"
    )
    personal_lr: float | None = Field(None, gt=0, description="step size of v (default: the local step size)")
    personal_epochs: int | None = Field(
        None, ge=0, description="number of epochs that train v per round (default: the same steps as in [local])"
    )
    batches: Literal["same", "own"] = Field(
        "same", description="batches for v: the same as for w (public code), or separate ones"
    )
    branch: Literal["server", "own"] = Field(
        "server",
        description="starting point of w: the received model, or the client's own last w_k (FLAME's public code)",
    )

    family: ClassVar[str] = "personalised"
    paper: ClassVar[Mapping[str, Any]] = {"lam": 1.0}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"lam": 2 / (ctx.reach * ctx.rounds**0.5)}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        warning = "Ditto with personal_epochs = 0 never trains the personal models. Set personal_epochs to 1 or more"
        return [] if self.personal_epochs != 0 else [warning]

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client | Both, None]:
        return Model(x0), Client(x0) if self.branch == "server" else Both(x0, x0), None

    def client(self, down: Model, rows: Client | Both, work: Work) -> tuple[Delta, Client | Both]:
        if isinstance(rows, Both):
            w = descend(rows.w, work, steps=work.passes())
        else:
            w = descend(down.x, work)  # line 5: the global branch
        stream = "local" if self.batches == "same" else "personal branch"
        steps = None if self.personal_epochs is None else work.epochs(self.personal_epochs)
        pull = ((self.lam, down.x),)  # w^t as received
        v = descend(rows.v, work, pull=pull, steps=steps, stream=stream, lr=self.personal_lr)  # line 6
        if isinstance(rows, Both):
            return Delta(where_moved(work, w - down.x, torch.zeros_like(w))), Both(v, w)
        return Delta(w - down.x), Client(v)

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)  # line 8

    def personal(self, down: Model, rows: Client | Both, work: Work) -> Tensor:
        return rows.v
