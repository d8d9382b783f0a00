"""LPGD: FedAvg with a prox in every local step, and FedSLR's sparse personal component.

Problem: (P1) min over w of sum_i alpha_i f_i(w) + lam sum over layers ||W_l||_*. (P2) min over p_i of f_i(w + p_i) + mu
||p_i||_1.

Reference: T. Huang, L. Shen, Y. Sun, W. Lin, D. Tao, "Fusion of Global and Local Knowledge for Personalized Federated
Learning", TMLR 2023, Appendix A.2, Eqs. 18-19, where the paper compares FedSLR with this method.

    paper      here       meaning
    w_t        x          global knowledge representation (GKR)
    w_{i,t}    w          local model, of low rank
    p_i        p          personal component of phase II
    eta        lr         local step size (the prox of a step has the threshold eta lam)
    lambda     lam        weight of the GKR's penalty
    mu         mu         weight of the personal penalty

Client state: d values (p). Traffic per round: d values down, because a mean of low-rank models does not have low rank.
Clients send the model itself. It is sent as factors U, V if they are shorter.

Deviations: the paper assumes dense uploads and mentions factors only as a possibility. p starts at zero.

Use this method as a baseline for FedSLR, or if uploads are expensive. The limit of the method is biased. Unless all
clients agree, the limit neither solves the problem nor has low rank. Every step computes the singular values of every
weight matrix.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model, Sent
from fedloom.algorithms._regulariser import Components, penalties
from fedloom.local import Ctx, Work, descend
from fedloom.rows.proxes import Prox


class Client(NamedTuple):
    """Personal component p ``[m, d]``."""

    p: Tensor


class Up(NamedTuple):
    """Trained model w ``[m, d]``, which has low rank."""

    w: Annotated[Tensor, Mean(primary=True), Sent(prox="global")]


class LPGD(Algorithm):
    """LPGD (Huang et al. 2023, Appendix A.2)."""

    lam: float = Field(1e-4, ge=0, description="penalty weight lambda for the global model (GKR; Sec. 6.1)")
    mu: float = Field(1e-3, ge=0, description="penalty weight mu for the personal component (Sec. 6.1)")
    personal_epochs: int | None = Field(
        1, ge=0, description="number of epochs in phase II (Sec. 6.1; None: same steps as in [local])"
    )
    components: Components = Field(
        "lr+s", description="structure of the global and the personal part: low-rank (lr) or sparse (s) (App. A.3)"
    )

    family: ClassVar[str] = "personalised"
    plain_sgd: ClassVar[str | None] = (
        "its thresholds are the step size times lam and mu, but momentum makes larger steps"
    )

    def proxes(self) -> dict[str, Prox]:
        return penalties(self.components, self.lam, self.mu)

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0.new_zeros(x0.shape)), None

    def client(self, down: Model, rows: Client, work: Work) -> tuple[Up, Client]:
        w = descend(down.x, work, prox=(self.proxes()["global"], None))  # Eq. 18
        steps = None if self.personal_epochs is None else work.epochs(self.personal_epochs)
        prox = (self.proxes()["personal"], down.x)
        v = descend(down.x + rows.p, work, prox=prox, steps=steps, stream="phase II")  # v = GKR + p_i, phase II
        return Up(w), Client(v - down.x)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        return Model(up.w)  # Eq. 19

    def personal(self, down: Model, rows: Client, work: Work) -> Tensor:
        return down.x + rows.p  # GKR + p_i
