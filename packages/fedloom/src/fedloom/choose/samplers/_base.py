"""Base classes of samplers, and functions that samplers share for random draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.local import Ctx, Nothing, Work
from fedloom.local.rows import Fields
from fedloom.values import Value


class Sampler(Value, ABC):
    """Rule that chooses the cohort of every round.

    A sampler's state is a NamedTuple of tensors. It is passed explicitly and stored in checkpoints.

    In `query`, `apply` and `init`, ``ctx.ids`` contains all clients.
    """

    kind: ClassVar[str]

    @property
    def probes(self) -> bool:
        """True if the server sends a query to candidates before the round.

        The candidates' answers are recorded as work and traffic.
        """
        return False

    @property
    def learns(self) -> bool:
        """True if the sampler uses individual clients' replies after a round (`learn`)."""
        return False

    @property
    def repeats(self) -> bool:
        """True if a client may be drawn more than once for a cohort."""
        return False

    @property
    def by_samples(self) -> bool:
        """True if clients are drawn in proportion to their samples, so all clients of a cohort have equal weights."""
        return False

    def adapted(self, n: int) -> Self:
        """Return the sampler with defaults that are valid for n clients."""
        return self

    def init(self, ctx: Ctx) -> Fields:
        """Return the state before the first round."""
        return Nothing()

    def query(self, state: Any, ctx: Ctx) -> Tensor:
        """Return the ids of the candidates that the server queries, in ascending order."""
        return ctx.ids[:0]

    def probe(self, model: Tensor, work: Work) -> Tensor:
        """Compute a candidate's answer ``[m, k]`` about the global model ``[d]``. This function runs at the client."""
        raise AssertionError("this sampler has no query")

    @abstractmethod
    def apply(self, state: Any, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Fields]:
        """Draw the cohort, and return it with the new state.

        Args:
            state: state after the previous round.
            info: answers of the candidates, in the order of `query`.
            ctx: context of all clients.

        Returns:
            Ids of the cohort, in ascending order. A client that is drawn twice (`repeats`) trains once, and its share
                in the mean is doubled. This does not apply to fields that are stored or accumulated over rounds,
                because they contain one term per client.
        """

    def report(self, model: Tensor, work: Work) -> Tensor | None:
        """Return reports ``[m, k]`` about trained models ``[m, d]``, which clients send with their replies for `learn`.

        This function runs at the client, and its cost is recorded as work and traffic. If it returns None, the server
        uses the uploads themselves.
        """
        return None

    def learn(self, state: Any, replies: Tensor, ctx: Ctx) -> Any:
        """Return the new state once the accepted replies have arrived.

        Args:
            state: state that `apply` returned.
            replies: one row per client, in the order of ``ctx.ids``. A row is the client's report or, if there are no
                reports, its model minus the model that it received, ``[m, d]``.
            ctx: context with the accepted cohort.
        """
        return state

    def check(self, n: int) -> None:
        """Raise an error if the sampler does not work with ``n`` clients.

        Raises:
            ConfigError: the sampler does not work with this number of clients. The message states the reason.
        """

    def remarks(self, ctx: Ctx) -> list[str]:
        """Return notes for the user if the sampler has no effect on this federation."""
        return []

    def smallest(self, n: int) -> int | None:
        """Return the minimum number of distinct clients in a round of a federation with ``n`` clients.

        The result is None if this number depends on random draws.
        """
        return None

    def sized_like(self, other: Sampler) -> Sampler:
        """Return this sampler with another sampler's cohort size, unless its own size was set."""
        return self


class SizedSampler(Sampler, ABC):
    """Sampler that draws a fixed number of clients."""

    fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of all clients that take part in a round: max(round(fraction * n), 1) clients",
    )
    clients: int | None = Field(None, ge=1, description="number of clients per round (replaces fraction)")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.clients is not None and self.fraction != 1.0:
            raise ValueError("set either fraction or clients, not both")
        return self

    def size(self, n: int) -> int:
        """Return the number of clients that the sampler draws from n clients."""
        return max(round(self.fraction * n), 1) if self.clients is None else self.clients

    def check(self, n: int) -> None:
        """Raise an error if the sampler draws more clients than the federation has."""
        if self.clients is not None and self.clients > n:
            raise ConfigError(
                f"sampler.clients must be at most the number of clients in the federation ({n}), got {self.clients}",
                rule="sampler-clients",
                fix=f"set {{sampler.clients = {n}}}, or use a smaller number",
            )

    def smallest(self, n: int) -> int | None:
        """Return the number of clients that the sampler draws."""
        return self.size(n)

    def sized_like(self, other: Sampler) -> Sampler:
        """Use the other sampler's cohort size if this sampler sets neither ``fraction`` nor ``clients``."""
        size_fields, named = ("fraction", "clients"), other.model_fields_set
        if not isinstance(other, SizedSampler) or self.model_fields_set.intersection(size_fields):
            return self
        sized: Sampler = self.with_(**{name: getattr(other, name) for name in size_fields if name in named})
        return sized


Masses = Literal["samples", "uniform"]
"""Probability p_i of drawing a client, n_i / n or 1 / n."""


def masses(ctx: Ctx, by: Masses) -> Tensor:
    """Return integers ``[n]`` that are proportional to the probabilities p_i."""
    return ctx.sizes[:, 0].cpu().long() if by == "samples" else torch.ones(ctx.n, dtype=torch.long)


def draw_distinct(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Return the first ``k`` elements of ``torch.randperm(n)``.

    If k is small, only some of the n elements are shuffled.
    """
    if 16 * k > n:
        return torch.randperm(n, generator=generator)[:k]
    pairs = torch.empty(-(-k // 2), dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    words = torch.stack([pairs >> 32, pairs], 1).flatten()[:k] & 0xFFFFFFFF  # in shuffled order
    moved, draws = dict[int, int](), list[int]()
    for i, word in enumerate(words.tolist()):
        j = i + word % (n - i)
        draws.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return torch.tensor(draws)


def draw(p: Tensor, k: int, generator: torch.Generator, *, replacement: bool = False) -> Tensor:
    """Draw ``k`` ids in sequence, with probabilities proportional to ``p [n]``."""
    return torch.multinomial(p.double(), k, replacement, generator=generator)
