"""Laws of aggregators, the rules that combine the rows of a cohort into one vector."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.data.dataset import default_to_cpu
from fedloom.errors import ConfigError
from fedloom.rows.aggregators import Aggregator
from fedloom.seeds import generator
from fedloom.testing.report import check_arguments, generators_untouched, hold
from fedloom.testing.scene import TIGHT_TOLERANCE, agree, demand
from fedloom.testing.trees import locate_difference, reload_from_checkpoint

UPLOAD_WIDTHS = {"dw": 6, "beside": 3}
"""Fields of the uploads in the laws, with their lengths. The primary field comes first."""
MAX_LAW_ROWS = 30
"""Largest cohort to try when searching for a cohort that the aggregator accepts. `bulyan` needs at least 4 f + 3
rows."""


class LawCohort(NamedTuple):
    """Context that is passed to the aggregator (see `fedloom.aggregators.Cohort`)."""

    ids: Tensor

    def rng(self, purpose: str) -> torch.Generator:
        """Return the random generator for this round and a purpose."""
        return generator(0, 1, purpose=purpose)


class LawUploads(NamedTuple):
    """Input of a law: an aggregator, and the uploads of a cohort of m clients."""

    rule: Aggregator
    rows: dict[str, Tensor]
    weights: Tensor
    ids: Tensor

    @classmethod
    def create(cls, rule: Aggregator, m: int, dtype: torch.dtype = torch.float64) -> LawUploads:
        """Return random rows of m clients, which differ from each other and from zero."""
        g = generator(m, purpose="laws of aggregators")
        rows = {name: torch.randn(m, d, generator=g, dtype=torch.float64) + 2 for name, d in UPLOAD_WIDTHS.items()}
        weights = torch.rand(m, 1, generator=g, dtype=torch.float64) + 0.5
        return cls(rule, {name: r.to(dtype) for name, r in rows.items()}, weights, torch.arange(m))

    def combined(self, state: dict[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the aggregate of each field, and the new state."""
        ctx = LawCohort(self.ids)
        state = self.rule.init(ctx) if state is None else state
        return self.rule.apply(state, self.rows, self.weights, next(iter(UPLOAD_WIDTHS)), ctx)

    def change(self, **changes: Any) -> LawUploads:
        """Return the same input after replacing some fields."""
        return self._replace(**changes)


def _runs(s: LawUploads) -> None:
    """Check that the aggregator combines the rows of two rounds without an error."""
    s.combined(s.combined()[1])


def _shapes(s: LawUploads) -> None:
    """Check that aggregates are one finite vector per field in the rows' dtype, and states are dicts of tensors."""
    for dtype in (torch.float64, torch.float32):
        uploads = LawUploads.create(s.rule, len(s.ids), dtype)
        got: Any = uploads.combined()
        demand(isinstance(got, tuple) and len(got) == 2, "combine must return the pair (aggregates, state)")
        combined, state = got
        demand([*combined] == [*uploads.rows], f"the aggregates must be {[*uploads.rows]}, got {[*combined]}")
        for name, value in combined.items():
            demand(
                value.shape == uploads.rows[name].shape[1:],
                f"the aggregate of {name} must be [{uploads.rows[name].shape[1]}], got {[*value.shape]}",
            )
            wide = f"the aggregate of {name} must have the type {dtype} of the rows, got {value.dtype}"
            demand(value.dtype == dtype, f"{wide}. Weights are float64, so use weights.to(rows[primary])")
            demand(value.isfinite().all(), f"the aggregate of {name} is not finite")
        tensors = isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
        demand(tensors, f"the state must be a dict of tensors, got {state!r:.80}")


def _arguments_unmodified(s: LawUploads) -> None:
    """Check that the aggregator does not change the rows, weights or state that it receives."""
    s = LawUploads.create(s.rule, len(s.ids))  # new input that no law has used
    before: list[Any] = [{k: v.clone() for k, v in s.rows.items()}, s.weights.clone()]
    state = s.combined()[1]
    arguments = (dict(s.rows), s.weights, dict(state))
    before.append({k: v.clone() for k, v in state.items()})
    for value in s.combined(state)[0].values():
        value.add_(1)  # reveals views of arguments
    for what, got, want in zip(("rows", "weights", "state"), arguments, before, strict=True):
        agree(got, want, f"{what} changed, or share memory with the aggregates")


def repeatable(s: LawUploads) -> None:
    """Check that equal calls give bitwise equal results, and that the aggregator itself does not change."""
    before = s.rule.model_dump()
    with generators_untouched():
        first, state = s.combined()
    later = s.combined(state)
    agree(s.combined()[0], first, "two identical calls give different results")
    other = s.change(rule=s.rule.with_()).combined(state)[0]
    agree(other, later[0], "a rule with the same options gives different results")
    demand(s.rule.model_dump() == before, f"the rule changed from {before} to {s.rule.model_dump()}")


def resume(s: LawUploads) -> None:
    """Check that a round gives bitwise the same result after its state was stored in a checkpoint and loaded again."""
    state = s.combined()[1]
    saved, combined = s.combined(_reload_state(state)), s.combined(state)
    for what, got, want in zip(("aggregates", "state"), saved, combined, strict=True):
        agree(got, want, f"the {what} changed after the state was stored and loaded again")


def permutation(s: LawUploads) -> None:
    """Check that the result does not depend on the order of the clients."""
    order = torch.randperm(len(s.ids), generator=generator(0, purpose="order"))
    other = s.change(rows={n: r[order] for n, r in s.rows.items()}, weights=s.weights[order], ids=s.ids[order])
    agree(other.combined()[0], s.combined()[0], "the order of the clients changes the result", TIGHT_TOLERANCE)


def weighted(s: LawUploads) -> None:
    """Check that a `weighted` aggregator uses the weights, and only their ratios.

    If an aggregator is not `weighted`, it must not use the weights.
    """
    first, other = s.combined()[0], s.change(weights=s.weights.flip(0) + 1).combined()[0]
    if not s.rule.weighted:
        agree(other, first, "weighted is False, but the weights change the result", TIGHT_TOLERANCE)
        return
    scaled = s.change(weights=3 * s.weights).combined()[0]
    agree(scaled, first, "multiplying all weights by 3 changes the result", TIGHT_TOLERANCE)
    heavy = s.change(weights=torch.where(s.ids[:, None] == 0, 100.0, s.weights)).combined()[0]
    used = any(locate_difference(got, first, TIGHT_TOLERANCE) for got in (other, heavy))
    demand(used, "weighted is True, but other weights do not change the result")


def agreement(s: LawUploads) -> None:
    """Check that the aggregate is the clients' row if all clients send the same row."""
    same = {name: r[:1].expand_as(r).contiguous() for name, r in s.rows.items()}
    agree(s.change(rows=same).combined()[0], {n: r[0] for n, r in same.items()}, "equal rows change", TIGHT_TOLERANCE)


def linear(s: LawUploads) -> None:
    """Check that a `linear` aggregator computes the weighted mean."""
    if s.rule.linear:
        share = s.weights / s.weights.sum()
        want = {name: (share * r).sum(0) for name, r in s.rows.items()}
        agree(s.combined()[0], want, "linear is True, but the result is not the weighted mean", TIGHT_TOLERANCE)


def precision(s: LawUploads) -> None:
    """Check that float32 rows give the same result as float64 rows, up to 1e-4."""
    single = LawUploads.create(s.rule, len(s.ids), torch.float32).combined()[0]
    sentence = "float32 and float64 give different results"
    agree({n: v.double() for n, v in single.items()}, s.combined()[0], sentence, 1e-4)


def small_cohorts(s: LawUploads) -> None:
    """Check that each small cohort is either rejected by `require` or combined into a finite result."""
    for m in range(1, len(s.ids)):
        few = LawUploads.create(s.rule, m)
        try:
            s.rule.check(m)
        except ConfigError:
            continue
        for name, value in few.combined()[0].items():
            demand(value.isfinite().all(), f"the aggregate of {name} of {m} rows is not finite")


AGGREGATOR_LAWS: dict[Callable[[Any], None], str] = {
    _runs: "repair this line",
    _shapes: "return a dict with one vector [.] for each field of rows [m, .], and a dict of tensors, {} without state",
    _arguments_unmodified: "clone before an in-place operation, and return new tensors",
    repeatable: "draw from ctx.rng(purpose), and store values for later rounds in the state, not on self",
    resume: "store everything that the next round needs in the state",
    permutation: "use ctx.ids instead of a client's position in the cohort. If the rule groups clients by position, as "
    "bucketing does, omit this law: without=['permutation']",
    weighted: "set weighted: ClassVar[bool] = True exactly if the rule uses weights, and divide by their sum",
    agreement: "the coefficients of the rows must sum to 1. If the rule adds noise or clips rows, omit this law: "
    "without=['agreement']",
    linear: "set linear = True only if the rule is the weighted mean",
    precision: "take dtypes from the rows: torch.zeros_like(rows[primary]), weights.to(rows[primary].dtype)",
    small_cohorts: "in require(m), raise fl.errors.ConfigError if m rows are too few",
}
"""All laws of an aggregator, each with advice on how a violation is usually fixed."""


@default_to_cpu()
def check_aggregator(aggregator: Aggregator, without: Collection[str] = ()) -> None:
    """Check that an aggregator satisfies all laws, on random rows of two fields.

    Args:
        aggregator: the rule.
        without: names of laws that the aggregator violates on purpose.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the aggregator, the problem and the
            usual fix. If the aggregator's code raised an error, the message contains the function, the error, the file
            and the line.
        ConfigError: the value is not an aggregator, it does not accept any cohort of up to 30 rows, or a name in
            ``without`` is not the name of a law.
    """
    check_arguments(aggregator, Aggregator, "fl.aggregators.Median()", AGGREGATOR_LAWS, without)
    hold(AGGREGATOR_LAWS, LawUploads.create(aggregator, _enough(aggregator)), aggregator, Aggregator, without)


def _reload_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state to the bytes of a checkpoint, and then back."""
    return dict(zip(state, reload_from_checkpoint(tuple(state.values())), strict=True))


def _enough(rule: Aggregator) -> int:
    """Return a cohort size that the aggregator accepts: two more than the minimum, and at least 5."""
    refusal = ""
    for m in range(1, MAX_LAW_ROWS + 1):
        try:
            rule.check(m)
        except ConfigError as error:
            refusal = str(error)
        except Exception:  # the law `runs` reports this error
            return 5
        else:
            return max(5, m + 2)
    raise ConfigError(
        f"{rule!r} rejects every cohort of up to {MAX_LAW_ROWS} rows ({refusal}). Pass a rule with a smaller f"
    )
