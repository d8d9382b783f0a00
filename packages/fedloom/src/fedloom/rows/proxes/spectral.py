"""Functions of matrices, which act on the matrix view of each layer and leave one-dimensional parameters unchanged."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import Scalar, map_spectrum, onto_l1_ball, soft, spectrum, total
from fedloom.rows.layout import Layout
from fedloom.rows.proxes._base import Form
from fedloom.rows.proxes.sets import ConvexSet
from fedloom.values import Value


class Nuclear(Value):
    """f(x) = c sum over layers of ||W||_*, where ||W||_* is the sum of the singular values of a layer's matrix W.

    The prox is singular value thresholding, which applies the soft threshold S_{c t} to each singular value.

    (Cai, Candes and Shen, SIAM J. Optim. 2010, Theorem 2.1; FedSLR, section 3: the threshold is lambda eta_g per layer,
    a convolution [o, i, k, k] is the matrix [o k, i k].) The layout must be passed.
    """

    convex: ClassVar[bool] = True
    makes: ClassVar[Form] = "lowrank"
    kind: Literal["nuclear"] = "nuclear"
    c: float = Field(1e-4, ge=0, description="weight of the nuclear norm penalty (lambda in FedSLR, section 5)")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        spectra = [spectrum(w) for w in _require_layout(self, layout).matrices(x).values()]
        return self.c * total(torch.cat([x[..., :0], *spectra], -1))

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        layers = _require_layout(self, layout)
        shrunk = {k: map_spectrum(w, lambda s: soft(s, self.c * t)) for k, w in layers.matrices(v).items()}
        return layers.replace_matrices(v, shrunk)


class NuclearBall(ConvexSet):
    """f = 0 if ||W||_* <= radius in every layer, and infinite otherwise.

    The prox projects the singular values of each layer onto the l1 ball.

    (Parikh and Boyd, 6.7.3: an absolutely symmetric function of the singular values.) The layout must be passed.
    """

    makes: ClassVar[Form] = "lowrank"
    kind: Literal["nuclear-ball"] = "nuclear-ball"
    radius: float = Field(1.0, gt=0, description="maximum nuclear norm of a layer")

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        layers = _require_layout(self, layout)
        inside = {k: map_spectrum(w, lambda s: onto_l1_ball(s, self.radius)) for k, w in layers.matrices(v).items()}
        return layers.replace_matrices(v, inside)


def _require_layout(function: Value, layout: Layout | None) -> Layout:
    if layout is None:
        raise ConfigError(f"{type(function).__name__} acts on the matrices of a model. Pass the layout of the model")
    return layout
