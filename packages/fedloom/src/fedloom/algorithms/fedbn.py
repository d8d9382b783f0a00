"""FedBN: all parameters are shared except the parameters of the normalization layers, which stay with the client.

Problem: min over x, b_1..b_n of sum_i alpha_i f_i(x, b_i), where b are the affine parameters of the normalization
layers.

Reference: X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, arXiv:2102.07623, Algorithm 1 (public code: med-air/FedBN).

    paper         here      meaning
    w, not BN     x         shared parameters, on the server
    w, BN         norm      weight and bias of the client's normalization layers

Client state: the parameters of its normalization layers. Traffic per round: all other parameters, down and up.

Deviations: the statistics of the normalization layers are not parameters. For evaluation, these statistics are computed
from the client's own training set. All kinds of normalization layers are recognized by the shapes of their parameters:
a weight with fewer than two dimensions, or with the shape of the bias. A PReLU layer is also recognized, because it has
the same shapes. ``layers`` names others. A model without such layers is rejected, because the method would be
equivalent to FedAvg.

Public code: the clients of fluke-fl 0.8.1 on PyPI give the same models to within 1e-15.

Use this method if features differ between clients, for example because of different scanners or cameras, but labels do
not.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Model, Sent
from fedloom.errors import Refused
from fedloom.local import Ctx, Work, descend
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Down(NamedTuple):
    """The server's model x ``[d]``. Only the shared parameters are sent."""

    x: Annotated[Tensor, Sent(part="shared")]


class Client(NamedTuple):
    """The k parameters ``[m, k]`` of the clients' normalization layers."""

    norm: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the shared parameters, which is 0 in the normalization layers."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="shared")]


class FedBN(Algorithm):
    """FedBN (Li et al. 2021, Algorithm 1)."""

    layers: tuple[str, ...] = Field(
        (), description="name prefixes of the parameters that stay on the client (empty: the normalization layers)"
    )

    family: ClassVar[str] = "personalised"

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if not masks.normalisation(layout, self.layers).any():
            raise Refused(
                "FedBN keeps normalization layers at the clients, but the model has no normalization layers, so FedBN "
                "would equal FedAvg. Use a model with `norm`, or list the parameters to keep in `layers`"
            )
        return []

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.normalisation(layout, self.layers)

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Client, None]:
        return Model(x0), Client(x0[masks.normalisation(ctx.layout, self.layers)]), None

    def client(self, down: Down, rows: Client, work: Work) -> tuple[Up, Client]:
        norm = masks.normalisation(work.layout, self.layers).to(down.x.device)
        w = descend(masks.joined(down.x, rows.norm, norm), work)
        w_norm = masks.part(w, norm)
        return Up(masks.zero_outside_(w.sub_(down.x), ~norm)), Client(w_norm)

    def server(self, server: Model, up: Up, ctx: Ctx) -> Model:
        shared = self.part("shared", ctx.layout).to(server.x.device)
        return Model(server.x + up.dw * shared)  # mean of every layer that is not BN

    def global_model(self, server: Model) -> None:
        return None  # x has no normalisation layers

    def personal(self, down: Down, rows: Client, work: Work) -> Tensor:
        return masks.joined(down.x, rows.norm, masks.normalisation(work.layout, self.layers))
