"""FedSLR: a low-rank global model trained with all clients, plus a sparse personal component for each client.

Problem: (P1) min over w of sum_i alpha_i f_i(w) + lam sum over layers ||W_l||_*. (P2) min over p_i of f_i(w + p_i) + mu
||p_i||_1.

Reference: T. Huang, L. Shen, Y. Sun, W. Lin, D. Tao, "Fusion of Global and Local Knowledge for Personalized Federated
Learning", TMLR 2023, Algorithms 1-3, Eqs. 4-7 (public code: huangtiansheng/fedslr).

    paper      here              meaning
    w_t        x                 global knowledge representation (GKR)
    w_{i,t}    w                 local model of phase I
    gamma_i    gi                auxiliary variable, equal to grad f_i(w) after an exact step
    gamma      gamma             mean of all gamma_i (Algorithm 3)
    p_i        p                 personal component of phase II
    eta_g      eta_g             proximal step size
    lambda     lam               weight of the GKR's penalty
    mu         mu                weight of the personal penalty
    eta_l, K   lr, ...           step size and number of local steps (``personal_epochs`` in phase II)

Client state: 2d values (gi, p). Traffic per round: d values down, as factors U, V if they are shorter (``ranks`` from
the server's SVD), d up. Uploads approximate the clients' gradients (and reveal as much), and gamma the mean gradient.

Deviations: in line 10, Algorithm 2 divides gamma by eta_g. In contrast, Eq. 6, Algorithms 1 and 3, the public code and
this implementation multiply. Algorithm 3, which uses a single mean gamma, is also used with partial participation,
where it produces the iterates of Algorithm 2. p starts at zero. In the public code, p starts as a copy of w_0
(``personal_start``). In phase II, weight decay acts on w + p. In the public code, it acts on p (``personal_decay``).
Public code: with both options, huangtiansheng/fedslr (35dc740c) produces the same w, gamma_i and p to within 1e-14.

Defaults: eta_g = 4 reach, where reach is the distance covered in a round (lr times the mean number of steps). On a
quadratic with curvature h, the method converges if 3 s + 2 a < 4. Here, s is the fraction of the distance to the
minimum that a client covers in a round, and a is at most reach / eta_g, the fraction of the distance to the mean
gradient that gamma covers. This holds for every s <= 1 if a = 1/4, but only for s < 2/3 if a = 1 (eta_g = reach). In
directions of small curvature, the model advances by eta_g h per round, 4 times as fast as in FedAvg.

Attackers: gamma adds the mean's change again, so a forged model moves w_t (1 + |S|/n) times as far as in FedAvg.

Use this method for models with few personal parameters and small downloads. ``components`` selects LR+S, S+S, S+LR or
LR+LR. ``method`` selects GPGD (FedAvg, then the prox, with a biased limit). LPGD applies the prox in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, Mean, Sent, by_rule
from fedloom.algorithms._regulariser import Components, penalties
from fedloom.local import Ctx, Work, decay_of, descend
from fedloom.rows.proxes import Prox


class Server(NamedTuple):
    """Model x and mean gamma of the auxiliary variables, both ``[d]``, and the ranks of x ``[matrices]``."""

    x: Tensor
    gamma: Tensor
    ranks: Tensor


class Down(NamedTuple):
    """The server's model x ``[d]``."""

    x: Annotated[Tensor, Sent(prox="global", ranks="ranks")]


class Client(NamedTuple):
    """Auxiliary variable gi and personal component p, both ``[m, d]``."""

    gi: Tensor
    p: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the received model."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, accumulates=True)]


class Sparsity(NamedTuple):
    """Number of nonzero parameters in p, int64 ``[m, 1]``."""

    nonzeros: Tensor


class FedSLR(Algorithm):
    """FedSLR (Huang et al. 2023, Algorithm 3)."""

    eta_g: Derived = by_rule(description="proximal step size eta_g (default: 4 * lr * steps per round; 10 in Sec. 6.1)")
    lam: float = Field(1e-4, ge=0, description="penalty weight lambda for the global component (GKR; Sec. 6.1)")
    mu: float = Field(1e-3, ge=0, description="penalty weight mu for the personal component p (Sec. 6.1)")
    personal_epochs: int | None = Field(1, ge=0, description="epochs in phase II (Sec. 6.1; None: as in phase I)")
    components: Components = Field("lr+s", description="global + personal part: low-rank (lr) or sparse (s) (App. A.3)")
    method: Literal["fedslr", "gpgd"] = Field("fedslr", description="algorithm for problem (P1) (App. A.2)")
    personal_start: Literal["zero", "model"] = Field("zero", description="initial component p: 0, or w_0 (public code)")
    personal_decay: Literal["model", "component"] = Field(
        "model", description="apply weight decay in phase II to w + p, or to p (public code)"
    )

    family: ClassVar[str] = "personalised"
    plain_sgd: ClassVar[str | None] = "its thresholds are the step size times mu, but momentum makes larger steps"
    paper: ClassVar[Mapping[str, Any]] = {"eta_g": 10.0}
    released: ClassVar[Mapping[str, Any]] = {"eta_g": 10.0, "personal_start": "model", "personal_decay": "component"}
    needs: ClassVar[Mapping[str, str]] = {"eta_g": "method fedslr", "personal_decay": "local.weight_decay"}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        return {"eta_g": 4 * ctx.reach}

    def proxes(self) -> dict[str, Prox]:
        return penalties(self.components, self.lam, self.mu)

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Client, None]:
        zero = torch.zeros_like(x0)
        p = x0 if self.personal_start == "model" else zero
        return Server(x0, zero, ctx.layout.ranks(x0)), Client(zero, p), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        x, (gi, p) = down.x, rows
        if self.method == "fedslr":
            w = descend(x, work, pull=((1 / self.eta_g, x),), shift=-gi)  # Eq. 4
        else:
            w = descend(x, work)  # Eq. 20
        steps = None if self.personal_epochs is None else work.epochs(self.personal_epochs)
        prox, shift = (self.proxes()["personal"], x), None
        if self.personal_decay == "component":
            shift = -decay_of(work, x)  # wd (v - x) = wd p
        v = descend(x + p, work, prox=prox, shift=shift, steps=steps, stream="phase II")  # Eq. 7, v = x + p
        return self.encode(w, down, rows._replace(p=v - x), work)

    def encode(self, model: Tensor, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        gi = rows.gi + (down.x - model) / self.eta_g if self.method == "fedslr" else rows.gi  # Eq. 5
        return Up(model - down.x), rows._replace(gi=gi)

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        x, gamma = server.x + up.dw, server.gamma
        if self.method == "fedslr":
            gamma = gamma - up.dw / self.eta_g * ctx.part  # Algorithm 3, line 6
            x = self.proxes()["global"].prox(x - self.eta_g * gamma, self.eta_g, ctx.layout)  # Eq. 6
        elif self.method == "gpgd":
            x = self.proxes()["global"].prox(x, ctx.local.lr_at(ctx.round), ctx.layout)  # Eq. 21
        return Server(x, gamma, ctx.layout.ranks(x))

    def reshared(self, server: Server, moved: Up, ctx: Ctx) -> Server:
        return server._replace(gamma=server.gamma - moved.dw / self.eta_g) if self.method == "fedslr" else server

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return down.x + rows.p  # GKR + p_i

    def observe(self, down: Down, rows: Client, work: Work) -> Sparsity:
        return Sparsity((rows.p != 0).sum(1, keepdim=True))

    def diagnostics(self, server: Server, total: Sparsity, ctx: Ctx) -> dict[str, float]:
        figures = {"rank": float(server.ranks.sum()), "nonzeros": float(server.x.count_nonzero())}
        return {**figures, "personal_nonzeros": float(total.nonzeros) / ctx.n}
