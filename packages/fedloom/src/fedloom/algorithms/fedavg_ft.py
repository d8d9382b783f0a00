"""FedAvg-FT: FedAvg, followed by a few local steps in which every client fine-tunes the model.

Problem: min over x of sum_i alpha_i f_i(x). From the solution, client i takes a few steps toward min over v_i of
f_i(v_i).

Reference: T. Yu, E. Bagdasaryan, V. Shmatikov, "Salvaging Federated Learning by Local Adaptation", arXiv:2002.04758v3,
Section 4.1 (fine-tuning). The mean is the same as in FedAvg.

    paper    here         meaning
    G_T      x            server's model
    L        v            personal model, G_T after local SGD
    E epochs passes of the adaptation over the client's training set, or ``steps`` eta lr step size of the adaptation

Client state: none. Traffic per round: d values down, d up. The personal model is computed from the server's most recent
model whenever it is needed, which is at each evaluation and at the end. The personal model is never sent, so other
results do not depend on when it is computed. The gradients of the fine-tuning are recorded as work of the preceding
round.

Deviations: all parameters are fine-tuned by the run's local SGD, including momentum and weight decay.

Public code: the rounds and the fine-tuning in the clients of KarhouTam/FL-bench (06e658bc) produce the same models to
within 1e-15. Their code skips batches with a single sample.

Defaults: five epochs with the step size of the round. If the number of fine-tuning epochs equals the number of rounds,
fine-tuning costs as much as FedAvg's training. With 0 epochs, the method is equivalent to FedAvg.

Use this method as the first baseline in every comparison of personalized methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Delta, Model
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.layout import Layout


class FedAvgFT(Algorithm):
    """FedAvg with fine-tuning (Yu et al. 2020, Section 4.1)."""

    epochs: int = Field(5, ge=0, description="number of fine-tuning passes over the client's training set")
    steps: int | None = Field(
        None, ge=0, description="number of fine-tuning steps, the same for every client (used instead of epochs)"
    )
    lr: float | None = Field(None, gt=0, description="step size for fine-tuning (default: the round's step size)")

    family: ClassVar[str] = "personalised"
    needs: ClassVar[Mapping[str, str]] = {"epochs": "steps None"}

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        tunes = self.epochs if self.steps is None else self.steps
        plain = "FedAvgFT without fine-tuning steps is the same as FedAvg. Set epochs or steps to 1 or more"
        return [] if tunes else [plain]

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(descend(down.x, work) - down.x), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)  # G_{t+1} = G_t + mean of L_i - G_t

    def personal(self, down: Model, rows: Nothing, work: Work) -> Tensor:
        steps = work.epochs(self.epochs) if self.steps is None or work.is_idle else self.steps
        return descend(down.x, work, steps=steps, stream="fine-tuning", lr=self.lr)  # L <- L - eta g(L)
