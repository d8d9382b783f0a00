"""Channels, which transform a client's differences (concatenated into one vector) before they are sent.

``CHANNELS`` lists the channels by kind.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, Algorithm 2) works as follows: the client
stores the error that the channel C did not send, e <- x + e - C(x + e), and adds it to its next difference x. Nothing
is lost this way: over T rounds, sum C = sum x - e_T. The state e has the shape [m, D] and stays on the client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from fedloom.rows import fields
from fedloom.rows.algebra import dequantize, norm
from fedloom.values import Value


class Channel(Value, ABC):
    """Transformation of rows [m, D] that is applied to each row separately."""

    encoding: ClassVar[fields.Kind] = "dense"
    """Encoding of the channel's output."""
    remembers: ClassVar[bool] = False
    """True if the channel supports error feedback, which is switched on by its option `error_feedback`."""

    def init(self, D: int, dtype: torch.dtype) -> Tensor | None:
        """Return the initial state ``[D]`` of a client, or None if the channel is stateless."""
        return torch.zeros(D, dtype=dtype) if getattr(self, "error_feedback", False) else None

    def field(self, D: int, dtype: torch.dtype) -> fields.Field:
        """Return the format of the message field that contains a transformed row."""
        return fields.Field((D,), dtype, self.encoding, levels=getattr(self, "levels", 1))

    def apply(self, state: Tensor | None, diff: Tensor, gens: Sequence[Generator]) -> tuple[Tensor, Tensor | None]:
        """Transform differences before they are sent. Return the transformed differences and the new state.

        Args:
            state: states of the clients [m, D], or None (see `init`).
            diff: differences [m, D], in which all fields of a client are concatenated.
            gens: one random generator for each of the m clients.

        Returns:
            The transformed differences [m, D] and the new state.
        """
        if not diff.shape[1]:
            return diff, state
        if state is None:
            return self.send(diff, gens), None
        whole = diff + state
        sent = self.send(whole, gens)
        return sent, whole - sent

    @abstractmethod
    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        """Return C(x), the output of the channel without error feedback."""


class Clip(Channel):
    """x min(1, bound / ||x||), which has a norm of at most `bound`."""

    kind: Literal["clip"] = "clip"
    bound: float = Field(10.0, gt=0, description="largest norm")

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        return x * (self.bound / norm(x)).clamp_max(1)


class GaussianNoise(Channel):
    """x min(1, clip / ||x||) + N(0, (sigma clip)^2 I) (Dwork and Roth, 2014, appendix A; McMahan et al., ICLR 2018).

    If a delta is given, the run records epsilon for the client with the most uploads (see `fedloom.engine.privacy`).
    Every client adds its own noise. This provides local differential privacy, but reduces accuracy much more than
    adding noise to a sum. A simulation draws the noise from seeded generators, so it does not protect any client. A
    deployment draws unpredictable noise (`fedloom_sites.deploy.noise`) and tracks the privacy loss by Renyi
    divergences.
    """

    kind: Literal["gaussian-noise"] = "gaussian-noise"
    clip: float = Field(1.0, gt=0, description="maximum norm of an upload before noise is added")
    sigma: float = Field(1.0, ge=0, description="noise multiplier: standard deviation of the noise, in units of clip")
    delta: float | None = Field(
        None, gt=0, lt=1, description="delta of the recorded epsilon (requires the extra 'privacy')"
    )
    neighbours: Literal["replace", "zero"] = Field(
        "replace",
        description="change that epsilon hides: the replacement of one upload by another (sensitivity 2 * clip), or "
        "the presence or absence of an upload (sensitivity clip)",
    )
    accountant: Literal["rdp", "pld"] = Field(
        "pld",
        description="accounting method: Renyi divergences, as in every deployment, or privacy loss distributions "
        "(tighter)",
    )
    needs: ClassVar[Mapping[str, str]] = {"neighbours": "delta", "accountant": "delta"}

    @model_validator(mode="after")
    def _has_noise(self) -> Self:
        if self.delta is not None and self.sigma == 0:
            raise ValueError("delta needs noise: sigma must be greater than 0")
        return self

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        noise = _draw_for_each(gens, lambda gen: torch.randn(x.shape[1], generator=gen, dtype=x.dtype), x)
        return x * (self.clip / norm(x)).clamp_max(1) + self.sigma * self.clip * noise


class TopK(Channel):
    """Sparsification that keeps the k coordinates with the largest absolute values.

    All other coordinates are set to 0 (Stich et al., NeurIPS 2018, Definition 2.2).

    The channel is a contraction: ||x - C(x)||^2 <= (1 - k / D) ||x||^2.
    """

    encoding: ClassVar[fields.Kind] = "sparse"
    remembers: ClassVar[bool] = True
    kind: Literal["top-k"] = "top-k"
    fraction: float = Field(
        0.01, gt=0, le=1, description="fraction k / D of the D coordinates that is sent, with k at least 1"
    )
    error_feedback: bool = Field(True, description="keep the unsent part of the upload for the next round")

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        best = x.abs().topk(_count_kept(self.fraction, x.shape[1]), dim=1).indices
        return torch.zeros_like(x).scatter(1, best, x.gather(1, best))


class RandomK(Channel):
    """Sparsification that keeps k random coordinates, drawn without replacement.

    All other coordinates are set to 0 (Stich et al., NeurIPS 2018, Definition 2.2).

    Without error feedback, the kept coordinates are multiplied by D / k, which makes the channel unbiased: E ||C(x) -
    x||^2 = (D / k - 1) ||x||^2. With error feedback, they are not multiplied, which makes the channel a contraction: E
    ||x - C(x)||^2 = (1 - k / D) ||x||^2.
    """

    encoding: ClassVar[fields.Kind] = "sparse"
    remembers: ClassVar[bool] = True
    kind: Literal["random-k"] = "random-k"
    fraction: float = Field(
        0.01, gt=0, le=1, description="fraction k / D of the D coordinates that is sent, with k at least 1"
    )
    error_feedback: bool = Field(False, description="keep the unsent part of the upload for the next round")

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        D, k = x.shape[1], _count_kept(self.fraction, x.shape[1])
        drawn = _draw_for_each(gens, lambda gen: torch.randperm(D, generator=gen)[:k], x)
        sent = torch.zeros_like(x).scatter(1, drawn, x.gather(1, drawn))
        return sent if self.error_feedback else sent * (D / k)


class QSGD(Channel):
    """Unbiased stochastic rounding of each |x_j| / scale to a neighbor in {0, 1 / s, ..., 1}.

    (Alistarh et al., NeurIPS 2017, section 3.1. The scale is max|x|, as in their experiments, instead of ||x||_2, so
    that the variance is smaller.) It satisfies E ||C(x) - x||^2 <= D scale^2 / (4 s^2).
    """

    encoding: ClassVar[fields.Kind] = "levels"
    remembers: ClassVar[bool] = True
    kind: Literal["qsgd"] = "qsgd"
    levels: int = Field(
        127,
        ge=1,
        lt=2**15,
        description="s, number of positive quantization levels. A coordinate takes ceil(log2(2 s + 1)) bits, so "
        "s = 127 takes 8 bits",
    )
    error_feedback: bool = Field(False, description="keep the unsent part of the upload for the next round")

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        scale = x.abs().amax(1, keepdim=True)
        ratio = torch.where(scale > 0, x.abs() / scale, x.abs()) * self.levels
        u = _draw_for_each(gens, lambda gen: torch.rand(x.shape[1], generator=gen, dtype=x.dtype), x)
        level = ratio.floor() + (u < ratio - ratio.floor())
        return dequantize(scale, x.sign() * level, self.levels)


class Sign(Channel):
    """Quantization to mean|x| sign(x), with sign(0) = 1 (EF-signSGD: Karimireddy et al., ICML 2019, Algorithm 1).

    The channel is a contraction: ||x - C(x)||^2 = (1 - ||x||_1^2 / (D ||x||_2^2)) ||x||^2.
    """

    encoding: ClassVar[fields.Kind] = "sign"
    remembers: ClassVar[bool] = True
    kind: Literal["sign"] = "sign"
    error_feedback: bool = Field(True, description="keep the unsent part of the upload for the next round")

    def send(self, x: Tensor, gens: Sequence[Generator]) -> Tensor:
        return x.abs().mean(1, keepdim=True) * torch.where(x >= 0, 1, -1)


CHANNELS: dict[str, type[Channel]] = {
    "clip": Clip,
    "gaussian-noise": GaussianNoise,
    "top-k": TopK,
    "random-k": RandomK,
    "qsgd": QSGD,
    "sign": Sign,
}
"""Channels, keyed by kind."""


def _draw_for_each(gens: Sequence[Generator], draw: Callable[[Generator], Tensor], like: Tensor) -> Tensor:
    """Return random values [m, .] drawn by the clients' own generators."""
    return torch.stack([draw(gen) for gen in gens]).to(like.device)


def _count_kept(fraction: float, D: int) -> int:
    return max(round(fraction * D), 1)
