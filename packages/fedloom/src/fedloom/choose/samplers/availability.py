"""Samplers for clients that are not always available."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.choose.samplers._base import SizedSampler
from fedloom.errors import ConfigError
from fedloom.local import Ctx, Nothing


class Availability(SizedSampler):
    """Sampler that draws uniformly from the available clients, which follow a recorded table or cycles of fixed length.

    Row t of the table marks the clients that are available in round t. After the last row, the table starts over.
    Without a table, client i is available in the first ``on`` rounds of every cycle of ``period`` rounds, and its
    cycles start i rounds earlier than those of client 0. If fewer clients are available than the sampler would draw,
    all of them participate.
    """

    kind: ClassVar[str] = "availability"
    table: tuple[tuple[Literal[0, 1], ...], ...] | None = Field(
        None,
        min_length=1,
        description="table of shape rounds x clients with 1 if the client is available in the round, else 0",
    )
    period: int = Field(
        2,
        ge=1,
        description="number of rounds in a cycle if there is no table (default: at most the number of clients)",
    )
    on: int = Field(
        1, ge=1, description="number of rounds per cycle in which a client is available if there is no table"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.table is not None and (self.period, self.on) != (2, 1):
            raise ValueError("set either `table`, or `period` and `on`")
        if self.on > self.period:
            raise ValueError(f"`on` must be at most `period` = {self.period}, got {self.on}")
        return self

    def adapted(self, n: int) -> Self:
        """Limit the cycle to n rounds if neither a cycle nor a table is set."""
        turns = self.model_fields_set.intersection(("table", "period", "on"))
        return self if turns or self.period <= n else self.with_(period=n)

    def present(self, round: int, n: int) -> Tensor:
        """Return a mask ``[n]`` of the clients that are available in a round."""
        if self.table is not None:
            return torch.tensor(self.table[(round - 1) % len(self.table)]) == 1
        return (round - 1 + torch.arange(n)) % self.period < self.on

    def check(self, n: int) -> None:
        """Raise an error if the table does not have n columns, or if a round has no available client."""
        super().check(n)
        for t, row in enumerate(self.table or (), 1):
            if len(row) != n:
                raise ConfigError(
                    f"sampler.table must have one column for each of the {n} clients, but row {t} has "
                    f"{len(row)} columns",
                    rule="sampler-table",
                    fix="write one 0 or 1 per client in every row of {sampler.table}",
                )
        for t, count in enumerate(self._counts(n), 1):
            if not count:
                raise ConfigError(
                    f"sampler: no client is available in round {t}, but every round needs at least one client",
                    rule="sampler-empty-round",
                    fix="omit {sampler.period} and {sampler.table}, or make at least one client "
                    "available in every round",
                )

    def smallest(self, n: int) -> int | None:
        """Return the size of the smallest cohort, which the number of available clients may limit."""
        return min(self.size(n), *self._counts(n))

    def _counts(self, n: int) -> list[int]:
        """Return the number of available clients in each round of a cycle."""
        turn = self.period if self.table is None else len(self.table)
        return [int(self.present(t, n).sum()) for t in range(1, 1 + turn)]

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Draw m of the available clients, or all of them if fewer than m are available."""
        present = self.present(ctx.round, ctx.n).nonzero()[:, 0]
        order = torch.randperm(len(present), generator=ctx.rng("cohort"))
        return present[order[: self.size(ctx.n)]].sort().values, state
