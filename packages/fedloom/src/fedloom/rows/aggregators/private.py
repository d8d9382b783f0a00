"""Central differential privacy: each client's rows are clipped, and the server adds noise to their mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.rows.aggregators._base import Aggregator, ClipRows, Rows, State
from fedloom.rows.context import Cohort


class PrivateMean(Aggregator):
    """(sum_i x_i min(1, clip / ||x_i||) + N(0, (sigma clip)^2 I)) / m (McMahan et al., ICLR 2018, Algorithm 1).

    The vector x_i consists of all fields of client i. The noise is calibrated to the sum, to which each client
    contributes a vector with a norm of at most clip. The number m of clients is treated as public. The server receives
    the uploads without noise, so it must be trusted. The guarantee applies to the models that leave the server. A
    simulation draws the noise from the run's seed, so it does not protect any client. A deployment draws unpredictable
    noise (`fedloom_sites.deploy.noise`) and tracks the privacy loss by Renyi divergences.
    """

    kind: Literal["private-mean"] = "private-mean"
    clip: float = Field(1.0, gt=0, description="maximum norm of a client's change across all fields")
    sigma: float = Field(
        1.0, ge=0, description="noise multiplier: standard deviation of the noise in the sum, in units of clip"
    )
    delta: float | None = Field(
        None, gt=0, lt=1, description="delta of the recorded epsilon (requires the extra 'privacy')"
    )
    neighbours: Literal["replace", "zero"] = Field(
        "zero",
        description="change that epsilon hides: the presence or absence of an upload (sensitivity clip), or the "
        "replacement of one upload by another (sensitivity 2 * clip)",
    )
    accountant: Literal["rdp", "pld"] = Field(
        "pld",
        description="accounting method: Renyi divergences, as in every deployment, or privacy loss distributions "
        "(tighter)",
    )
    needs: ClassVar[Mapping[str, str]] = {"neighbours": "delta", "accountant": "delta"}

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.delta is not None and self.sigma == 0:
            raise ValueError("delta needs noise: sigma must be greater than 0")
        if self.pre:
            raise ValueError(
                "private-mean bounds the influence of each client separately, but `pre` would mix "
                "the clients first. Leave `pre` empty"
            )
        return self

    def combine(
        self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort
    ) -> tuple[dict[str, Tensor], State]:
        clipped, _ = ClipRows(bound=self.clip).mix(rows, weights, primary, ctx)
        source, m = ctx.rng("noise"), len(weights)
        noisy = {}
        for name, r in clipped.items():
            noise = torch.randn(r.shape[1], generator=source, dtype=r.dtype).to(r.device)
            noisy[name] = (r.sum(0) + self.sigma * self.clip * noise) / m
        return noisy, state
