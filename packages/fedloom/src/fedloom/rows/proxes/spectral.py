"""Matrix functions: each acts on the matrix view of every layer, and leaves one-dimensional parameters unchanged."""

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
    """f(x) = c sum over layers of ||W||_*, the sum of singular values.

    The prox is singular value thresholding: S_{c t} of each singular value.

    (Cai, Candes and Shen, SIAM J. Optim. 2010, Theorem 2.1; FedSLR, section 3: the threshold is lambda eta_g per layer,
    a convolution [o, i, k, k] is the matrix [o k, i k].) Needs the layout.
    """

    convex: ClassVar[bool] = True
    makes: ClassVar[Form] = "lowrank"
    kind: Literal["nuclear"] = "nuclear"
    c: float = Field(1e-4, ge=0, description="weight of the norm (lambda of FedSLR, section 5)")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        spectra = [spectrum(w) for w in _layers(self, layout).matrices(x).values()]
        return self.c * total(torch.cat([x[..., :0], *spectra], -1))

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        layers = _layers(self, layout)
        shrunk = {k: map_spectrum(w, lambda s: soft(s, self.c * t)) for k, w in layers.matrices(v).items()}
        return layers.replace_matrices(v, shrunk)


class NuclearBall(ConvexSet):
    """f = 0 if ||W||_* <= radius in every layer, else infinite. The prox projects every spectrum onto the l1 ball.

    (Parikh and Boyd, 6.7.3: an absolutely symmetric function of the singular values.) Needs the layout.
    """

    makes: ClassVar[Form] = "lowrank"
    kind: Literal["nuclear-ball"] = "nuclear-ball"
    radius: float = Field(1.0, gt=0, description="maximum nuclear norm of a layer")

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        layers = _layers(self, layout)
        inside = {k: map_spectrum(w, lambda s: onto_l1_ball(s, self.radius)) for k, w in layers.matrices(v).items()}
        return layers.replace_matrices(v, inside)


def _layers(function: Value, layout: Layout | None) -> Layout:
    if layout is None:
        raise ConfigError(f"{type(function).__name__} acts on the matrices of a model. Pass the layout of the model")
    return layout
