"""Base classes of aggregators, and of transformations that are applied to rows before aggregation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import distances, norm
from fedloom.rows.context import Cohort
from fedloom.values import Value

Rows = Mapping[str, Tensor]
"""Rows of all upload fields, ``{field: [m, .]}``."""
State = dict[str, Tensor]
"""State that a rule carries over from one round to the next, or {} if the rule is stateless."""

_BYZANTINE_TEXT = "number of Byzantine clients per cohort (default: 1, or 0 if the cohort is too small for 1)"
ByzantineCount = Annotated[int, Field(ge=0, description=_BYZANTINE_TEXT)]
"""Type of the option ``f`` of a rule."""
MIN_RULE_ROWS = 7
"""Number of rows that is sufficient for every rule with f = 1. For f = m + 1, 4 m + 7 rows are sufficient (bulyan needs
4 f + 3)."""


class ClipRows(Value):
    """Clipping of each client's row (all fields together) to a norm of at most `bound`.

    Use it only for fields that are differences.
    """

    kind: Literal["clip"] = "clip"
    bound: float = Field(10.0, gt=0, description="maximum norm of a client's upload across all fields")

    def rows(self, m: int) -> int:
        """Return the number of rows that remain when m rows are transformed."""
        return m

    def mix(self, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> tuple[dict[str, Tensor], Tensor]:
        factor = (self.bound / norm(torch.cat([norm(r) for r in rows.values()], -1))).clamp_max(1)
        return {name: factor * r for name, r in rows.items()}, weights


class Bucketing(Value):
    """Bucketing: each random group of `s` rows is replaced by its mean.

    (Karimireddy, He and Jaggi, ICLR 2022, Algorithm 1.) The last group may be smaller. Each mean is weighted, and a
    group has the total weight of its members, so the weighted mean of all rows does not change.
    """

    kind: Literal["bucketing"] = "bucketing"
    s: PositiveInt = Field(2, description="number of vectors per group (2 in section 6)")

    def rows(self, m: int) -> int:
        """Return the number of rows that remain when m rows are transformed."""
        return -(-m // self.s)

    def mix(self, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> tuple[dict[str, Tensor], Tensor]:
        m = len(weights)
        order = torch.randperm(m, generator=ctx.rng("bucketing")).to(weights.device)
        group = torch.empty_like(order).index_copy(0, order, torch.arange(m, device=order.device) // self.s)
        member = torch.nn.functional.one_hot(group, self.rows(m)).T.to(weights.dtype)
        mass = member * weights.T
        mass = torch.where(mass.sum(1, keepdim=True) > 0, mass, member)
        share = mass / mass.sum(1, keepdim=True)
        return {name: share.to(r.dtype) @ r for name, r in rows.items()}, member @ weights


class NNM(Value):
    """Nearest-neighbor mixing: each row is replaced by the mean of its m - f nearest rows, including itself.

    (Allouah et al., Fixing by Mixing, AISTATS 2023, Algorithm 2.) Distances are measured in the primary field.
    """

    kind: Literal["nnm"] = "nnm"
    f: ByzantineCount = 1

    def rows(self, m: int) -> int:
        """Return the number of rows that remain when m rows are transformed.

        Raises:
            ConfigError: there are at most f rows.
        """
        if self.f >= m:
            raise ConfigError(
                f"nnm needs m > f, got m = {m} rows and f = {self.f}",
                rule="cohort-too-small",
                fix="omit {aggregator.pre}, or use more clients per round",
            )
        return m

    def mix(self, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> tuple[dict[str, Tensor], Tensor]:
        m = len(weights)
        near = distances(rows[primary]).argsort(dim=1, stable=True)[:, : m - self.f]
        share = torch.zeros(m, m, device=near.device, dtype=torch.float64).scatter(1, near, 1 / (m - self.f))
        return {name: share.to(r.dtype) @ r for name, r in rows.items()}, weights


PreAggregation = Annotated[ClipRows | Bucketing | NNM, Field(discriminator="kind")]


class Aggregator(Value, ABC):
    """Rule that combines a cohort's rows into a single vector. Rows must be finite.

    The state is a dict of tensors that is saved in checkpoints. It is empty for a stateless rule.
    """

    pre: tuple[PreAggregation, ...] = Field(
        (), description="transformations applied to the vectors before the rule, in this order"
    )

    weighted: ClassVar[bool] = False
    """True if the rule uses the aggregation weights."""

    @property
    def linear(self) -> bool:
        """True if the result is linear in the rows, that is, a weighted mean."""
        return False

    def init(self, ctx: Cohort) -> State:
        """Return the state before the first round."""
        return {}

    def check(self, m: int) -> None:
        """Raise an error if a cohort of m rows is too small for the rule or too large to compute.

        Raises:
            ConfigError: m is too small or too large. If the cohort is too small, the message states the smallest
                allowed m.
        """
        for step in self.pre:
            m = step.rows(m)
        try:
            self.require(m)
        except ConfigError as error:
            refusal = self._suggest_value(error, m)
            raise refusal from None

    def _suggest_value(self, error: ConfigError, m: int) -> ConfigError:
        """Return the error, with advice on the maximum number of attackers (or used rows) that m rows allow."""
        for name in ("f", "k"):
            now = getattr(self, name, None)
            for smaller in range(min(now, m), -1, -1) if isinstance(now, int) else ():
                try:
                    self.with_(**{name: smaller}).require(m)
                except ConfigError:
                    continue
                return error.replace_fix(f"set {{aggregator.{name} = {smaller}}}, or take more clients per round")
        return error.replace_fix("set {aggregator = 'median'}, or take more clients per round")

    @property
    def needs_client(self) -> bool:
        """True if a particular client must be part of every cohort."""
        return False

    def check_cohort(self, ids: Tensor) -> None:
        """Raise an error if `check` rejects the number of clients in ``ids [m]``, or if a required client is missing.

        Raises:
            ConfigError: the rule does not work with this cohort.
        """
        self.check(len(ids))

    def require(self, m: int) -> None:
        """Check the number m of rows that reach the rule itself, after all transformations.

        Raises:
            ConfigError: the rule needs more rows, or there are too many subsets of the rows.
        """

    def adapted(self, m: int) -> Self:
        """Return the rule with defaults that work for m rows. If the default of f needs more rows, f is set to 0.

        If a cohort is too small even for f = 0, the rule is returned unchanged, and `check` rejects the cohort.
        """
        if self._allows(m) or not self._allows(4 * m + MIN_RULE_ROWS):
            return self
        pre = tuple(s.with_(f=0) if isinstance(s, NNM) and "f" not in s.model_fields_set else s for s in self.pre)
        changes: dict[str, Any] = {"pre": pre} if pre != self.pre else {}
        if "f" in type(self).model_fields and "f" not in self.model_fields_set:
            changes["f"] = 0
        return self.with_(**changes) if changes else self

    def _allows(self, m: int) -> bool:
        try:
            self.check(m)
        except ConfigError:
            return False
        return True

    def apply(
        self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort
    ) -> tuple[dict[str, Tensor], State]:
        """Aggregate all fields. Return the aggregates and the new state.

        Args:
            state: state after the previous round.
            rows: rows of each field, {field: [m, .]}.
            weights: weights [m, 1], which are nonnegative and have a positive sum. Only rules that are `weighted` use
                them.
            primary: field by which a selection rule chooses rows.
            ctx: the rows' client ids, and the server's random generators.

        Returns:
            The aggregates {field: [.]} and the new state.

        Raises:
            ConfigError: the rule rejects this number of rows (see `check`).
        """
        for step in self.pre:
            step.rows(len(weights))
            rows, weights = step.mix(rows, weights, primary, ctx)
        self.require(len(weights))
        return self.combine(state, rows, weights, primary, ctx)

    @abstractmethod
    def combine(
        self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort
    ) -> tuple[dict[str, Tensor], State]:
        """Apply the rule itself, after all transformations. The arguments are the same as for `apply`.

        Raises:
            ConfigError: the rule does not work with this cohort.
        """


def mixture(coefficients: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Return the sum of each field's rows times coefficients ``[m, 1]`` (a weighted mean if they add up to 1)."""
    return {name: (coefficients.T.to(r.dtype) @ r).squeeze(0) for name, r in rows.items()}


def check_row_count(kind: str, ok: bool, rule: str, m: int, **got: object) -> None:
    """Raise an error if a requirement on the number m of rows is not satisfied.

    Raises:
        ConfigError: ``ok`` is False, so `rule` does not hold.
    """
    if not ok:
        values = "".join(f" and {name} = {value}" for name, value in got.items())
        raise ConfigError(
            f"{kind} needs {rule}, got m = {m} rows{values}", rule="cohort-too-small", fix="use more clients"
        )
