"""FedACS: every client starts from an attention-weighted mean of the most similar clients' models.

Problem: min over w_1..w_n of sum_i F_i(w_i) + lambda R(W), where R is a similarity-weighted sum of squared distances.

Reference: "FedACS: Federated Learning with Attention-Based Client Selection", Algorithm 1, Eqs. 3-5. No public code.

    paper     here   meaning
    w_i       w      personal model, the last upload of every client
    s_ij      s      cosine similarity of w_i and w_j
    delta_k   delta  p-quantile of all entries of s
    u_i       u      mixture sent to client i
    lambda    lam    weight of R
    beta_k    lr     step size of the round

Client state: d values (w). Traffic per round: d values down (a different u to every client), d up. The server stores
every w.

Deviations: S, its quantile and Eq. 4 are computed only over the cohort. Algorithm 1 and Eq. 4 use all clients j = 1..n.
Set ``among = "all"`` to use all clients, with the initial model for clients that have never participated, or ``among =
"seen"`` to omit these clients. All clients start from the same model, so two clients that have never participated have
the cosine 1. alpha_k is 1, which turns Eq. 3 into Eq. 4, so that R and lambda have no effect. If ``lam`` is set,
alpha_k is lambda beta_k, as in Theorem 2.1. Similarities are compared with delta by >=, and the client itself is
included: with a strict comparison, the set would be empty if all models coincided. A client whose weights do not have a
positive sum receives its own model. Models whose cosine similarity is at least ``copies`` are treated as a single
model, so that attackers who send equal models cannot determine the quantile. ``copies = "off"`` restores the paper's
rule. The server receives the models of individual clients, so the method does not support secure aggregation.

Use this method if clients form groups that are not known in advance. A larger ``quantile`` means a higher threshold and
less collaboration. With quantile = 1, the method is equivalent to Local.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom.algorithms._mixture import Client, Down, Mixed, Up
from fedloom.choose.mixers import Among, Attention
from fedloom.local import Work, descend


class FedACS(Mixed):
    """FedACS (Algorithm 1)."""

    quantile: float = Field(
        0.5, ge=0, le=1, description="quantile p that sets the threshold delta_k (Algorithm 1; not stated in the paper)"
    )
    among: Among = Field(
        "cohort",
        description="clients whose models are in S: the round's cohort, all clients seen so far, or all clients "
        "(Eq. 4)",
    )
    lam: float | None = Field(
        None,
        gt=0,
        description="lambda in the step size alpha_k = lambda * beta_k (Eq. 3, Theorem 2.1; None: alpha_k = 1, Eq. 4)",
    )
    copies: Annotated[float, Field(gt=0, le=1)] | Literal["off"] = Field(
        0.999,
        description="minimum cosine similarity at which models are treated as copies, so that attackers with equal "
        "models have the weight of a single model. 'off': no such limit, as in the paper",
    )

    def mixer(self, round: int) -> Attention:
        copies = None if self.copies == "off" else self.copies
        return Attention(quantile=self.quantile, among=self.among, lam=self.lam, copies=copies)

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        w = descend(down.u, work)  # Eq. 5: steps on F_i only, from u_i
        return Up(w), Client(w)
