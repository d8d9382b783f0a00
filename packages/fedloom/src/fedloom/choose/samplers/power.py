"""Power-of-choice sampling: select the candidates with the largest losses."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.choose.samplers._base import SizedSampler, draw, masses
from fedloom.errors import ConfigError
from fedloom.local import Ctx, Nothing, Work


class Losses(NamedTuple):
    """Last loss ``[n]`` that each client sent, or infinity before its first reply."""

    loss: Tensor


class PowerOfChoice(SizedSampler):
    """Sampler that selects the m largest losses of d candidates, drawn without replacement with probabilities n_i / n.

    Reference: Y. J. Cho, J. Wang, G. Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
    AISTATS 2022, arXiv:2010.01243, Section 4: pow-d computes the loss of the global model over all samples (``loss``),
    cpow-d computes it on one mini-batch (``batch``), and rpow-d uses the last losses that clients sent (``last``).

    Deviations: rpow-d uses the loss of a client's trained model on its last mini-batch instead of the mean over its
    local steps. Ties, such as those between clients that have never participated, are broken at random.
    """

    kind: ClassVar[str] = "power-of-choice"
    candidates: int | None = Field(
        None, ge=1, description="d, number of candidate clients (default: twice the number of clients in a round)"
    )
    estimate: Literal["loss", "batch", "last"] = Field(
        "loss",
        description="loss that ranks the candidates: over all samples (pow-d), over one mini-batch (cpow-d), or the "
        "last known loss (rpow-d)",
    )

    @property
    def probes(self) -> bool:
        """True unless the sampler uses stored losses."""
        return self.estimate != "last"

    @property
    def learns(self) -> bool:
        """True if the sampler uses stored losses."""
        return self.estimate == "last"

    @property
    def by_samples(self) -> bool:
        """Always True, because candidates are drawn in proportion to their samples."""
        return True

    def check(self, n: int) -> None:
        """Raise an error if there are fewer candidates than clients per round or more than clients in total."""
        super().check(n)
        if self.candidates is not None and not self.size(n) <= self.candidates <= n:
            raise ConfigError(
                f"sampler.candidates must be from {self.size(n)} (the clients in a round) to {n} (the "
                f"clients in the federation), got {self.candidates}"
            )

    def remarks(self, ctx: Ctx) -> list[str]:
        """Return a note that the selection has no effect if every client participates."""
        if self.size(ctx.n) < ctx.n:
            return []
        reason = f"because all {ctx.n} clients take part. Lower fraction or clients"
        return [f"sampler {self.kind!r} has no effect, {reason}"]

    def init(self, ctx: Ctx) -> Losses | Nothing:
        """Return infinite losses, because no client has participated yet."""
        return Losses(torch.full((ctx.n,), torch.inf, dtype=torch.float64)) if self.learns else Nothing()

    def query(self, state: Losses | Nothing, ctx: Ctx) -> Tensor:
        """Draw the d candidates."""
        d = min(2 * self.size(ctx.n), ctx.n) if self.candidates is None else self.candidates
        return draw(masses(ctx, "samples"), d, ctx.rng("candidates")).sort().values

    def probe(self, model: Tensor, work: Work) -> Tensor:
        """Compute the loss F_k of the global model."""
        if self.estimate == "loss":
            return work.loss(model)
        return work.loss(model, work.plan("power-of-choice", torch.ones(work.m, dtype=torch.long)).batch(0))

    def apply(self, state: Losses | Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Losses | Nothing]:
        """Choose the m candidates with the largest losses."""
        candidates = self.query(state, ctx)
        if isinstance(state, Losses):
            loss = state.loss[candidates]
        else:
            assert info is not None
            loss = info[:, 0]
        order = torch.randperm(len(candidates), generator=ctx.rng("ties"))
        largest = order[loss[order].argsort(descending=True, stable=True)][: self.size(ctx.n)]
        return candidates[largest].sort().values, state

    def report(self, model: Tensor, work: Work) -> Tensor | None:
        """Compute the loss of the trained model on the last mini-batch."""
        return work.loss(model, work.last_batch())

    def learn(self, state: Losses, replies: Tensor, ctx: Ctx) -> Losses:
        """Return the state with the cohort's new losses."""
        loss = state.loss.clone()
        loss[ctx.ids] = replies[:, 0].to(loss)
        return Losses(loss)
