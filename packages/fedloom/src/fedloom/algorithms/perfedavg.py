"""Per-FedAvg: an initial model from which a single SGD step gives a good personal model.

Problem: min over w of sum_i alpha_i f_i(w - alpha grad f_i(w)).

Reference: A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, arXiv:2002.07948, Algorithm 1, with its two approximations.

    paper      here        meaning
    w_k        x           server's model
    w_k,t      w           client's model after t local steps
    alpha      alpha       step size of the personal model
    beta       local.lr    step size of w
    delta      delta       half width of the difference that replaces the Hessian product

Client state: none. Traffic per round: d values down, d up.

Deviations: ``variant`` "hf" uses three batches per local step and "fo" uses two. The batches are drawn one after
another, so an epoch of local steps passes over the data three times ("hf") or twice ("fo"). The personal model is
obtained by one step of size alpha on a batch of the client's own training set. In the public code of pFedMe, two steps
are taken, on test batches.

Public code: for "fo" and "hf", the clients of KarhouTam/FL-bench (06e658b) produce the same models to within 1e-14. For
"fo", clients and server of TsingZ0/PFLlib (d832e76f) also produce the same models to within 1e-14.

Defaults: alpha = local.lr, so that a personal model is one local training step away from the server's model.

Use this method if new clients have little data, because they need only one step. "fo" drops the Hessian term and costs
half as much as "hf".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, DerivedFrom0, Model, by_rule
from fedloom.local import Batch, Ctx, Nothing, Work, descend, iterate, step_


class PerFedAvg(Algorithm):
    """Per-FedAvg (Fallah et al. 2020, Algorithm 1)."""

    alpha: DerivedFrom0 = by_rule(
        description="step size alpha of the personal model (default: local.lr; 0.01 in FedSLR's comparison)"
    )
    variant: Literal["hf", "fo"] = Field(
        "hf", description="approximation of the Hessian: Hessian-free (hf) or first-order (fo)"
    )
    delta: float = Field(
        0.001,
        gt=0,
        description="step delta in the finite difference for the Hessian-vector product (0.001 in public codes)",
    )

    family: ClassVar[str] = "personalised"
    plain_sgd: ClassVar[str | None] = "its local step uses the gradient at a model that is one plain SGD step away"

    paper: ClassVar[Mapping[str, Any]] = {"alpha": 0.01}
    needs: ClassVar[Mapping[str, str]] = {"delta": "variant hf"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"alpha": ctx.local.lr}

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        def step(w: Tensor, work: Work, first: Batch, second: Batch, *third: Batch) -> Tensor:
            personal = step_(w.clone(), work, first, self.alpha, at=w)  # w - alpha grad f_i(w, D)
            d = work.grad(personal, second)
            for batch in third:  # HF: grad^2 f_i(w, D'') d by a central difference
                rate = work.lr * self.alpha / (2 * self.delta)
                side = torch.add(w, d, alpha=self.delta)
                step_(w, work, batch, -rate, at=side)
                step_(w, work, batch, rate, at=side.sub_(d, alpha=2 * self.delta))
            return w.sub_(d, alpha=work.lr)  # w - beta (I - alpha grad^2 f_i(w, D'')) d

        w = iterate(step, down.x.expand(work.m, -1).clone(), work, batches=3 if self.variant == "hf" else 2)
        return Delta(w.sub_(down.x)), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)

    def personal(self, down: Model, rows: Nothing, work: Work) -> Tensor:
        return descend(down.x, work, steps=1, stream="personal", lr=self.alpha)  # w - alpha grad f_i(w, D)
