"""Non-zeros and ranks of composite methods' models, against torch on the models themselves."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedloom.algorithms import REGISTRY
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine.clients import scores as counts
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.models import MLP
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import L1, Form, Nuclear, NuclearBall, Total
from fedloom.values import Value


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Iid(clients=4)(load("digits"), seed=0)


def run(fed: Federation, method: Any) -> Any:
    return simulate(
        method,
        fed,
        MLP(hidden=(12,)),
        rounds=2,
        local=LocalSGD(lr=0.1, batch_size=50),
        evaluate=Evaluate(every=2, parts=("validation", "test")),
        engine=Engine(dtype="float64"),
    )


def recorded(result: Any, model: str) -> dict[str, float]:
    names = ("nonzeros", "rank", "factorised")
    found = {name: result.state.records.last(model, "", name) for name in names}
    return {name: float(value[0]) for name, value in found.items() if value is not None}


def by_hand(layout: Layout, row: torch.Tensor) -> dict[str, float]:
    rank = thin = 0
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        value = layout.tree(row)[name]
        if len(shape) < 2:
            thin += value.numel()
            continue
        r = int(torch.linalg.matrix_rank(value))
        rank += r
        thin += min(r * (shape[0] + shape[1]), value.numel())
    return {"nonzeros": float((row != 0).sum()), "rank": float(rank), "factorised": float(thin)}


def test_low_rank_and_sparse_parts_are_counted_at_both_models(fed: Federation) -> None:
    result = run(fed, REGISTRY["fedslr"](lam=0.3, mu=0.01))
    layout = result.job.oracle.layout
    shared = by_hand(layout, result.models.rows("global"))
    assert recorded(result, "global") == shared
    assert shared["rank"] < sum(min(s) for s in layout.matrix_shapes.values())
    assert shared["factorised"] < layout.d
    each = [by_hand(layout, row) for row in result.models.rows("personal")]
    expected = {name: sum(e[name] for e in each) / 4 for name in shared}
    assert recorded(result, "personal") == pytest.approx(expected)


def test_methods_without_a_penalty_have_no_such_figures(fed: Federation) -> None:
    result = run(fed, REGISTRY["ditto"]())
    assert not recorded(result, "global")
    assert not recorded(result, "personal")


def test_ranks_are_for_nuclear_norms_that_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.create(MLP(hidden=(5,)).build((6,), 3, 0))
    rows = torch.ones(2, layout.d)
    fiaelt = REGISTRY["fiaelt"]
    assert set(counts.measure_sizes(fiaelt(regulariser=L1(c=0.1)), layout, rows)) == {"nonzeros"}
    low = fiaelt(regulariser=Nuclear(c=0.1))
    assert set(counts.measure_sizes(low, layout, rows)) == {"nonzeros", "rank", "factorised"}
    monkeypatch.setattr(counts, "MAX_RANK_OPERATIONS", 1.0)
    assert set(counts.measure_sizes(low, layout, rows)) == {"nonzeros"}


class Shrink(Value):
    """A prox of a user: the l1 norm once more, or a nuclear norm, by the name of what it makes."""

    convex: ClassVar[bool] = True
    c: float = 0.01

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return L1(c=self.c).f(x)

    def prox(self, v: Tensor, t: Any, layout: Layout | None = None) -> Tensor:
        return L1(c=self.c).prox(v, t)


class Sparse(Shrink):
    makes: ClassVar[Form] = "sparse"


class LowRank(Shrink):
    makes: ClassVar[Form] = "lowrank"

    def prox(self, v: Tensor, t: Any, layout: Layout | None = None) -> Tensor:
        return Nuclear(c=self.c).prox(v, t, layout)


class Misspelt(Shrink):
    makes: ClassVar[str] = "low-rank"


def received(result: Any) -> float:
    return float(result.state.records.last("", "", "bytes_down").sum())


@pytest.mark.parametrize(
    ("own", "built_in"), [(Sparse(c=1e-3), L1(c=1e-3)), (LowRank(c=0.01), Nuclear(c=0.01))], ids=["sparse", "low rank"]
)
def test_a_prox_of_a_user_is_sent_and_counted_like_a_built_in_one(fed: Federation, own: Any, built_in: Any) -> None:
    ours, theirs = (run(fed, REGISTRY["feddr"](regulariser=f, defaults="paper")) for f in (own, built_in))
    assert torch.equal(ours.models.rows("global"), theirs.models.rows("global"))
    assert recorded(ours, "global") == recorded(theirs, "global")
    plain = run(fed, REGISTRY["feddr"](defaults="paper"))
    assert received(ours) == received(theirs) < received(plain)


def test_a_prox_that_says_nothing_makes_models_that_are_sent_dense(fed: Federation) -> None:
    silent, none = (run(fed, REGISTRY["feddr"](regulariser=f, defaults="paper")) for f in (Shrink(c=1e-3), None))
    assert received(silent) == received(none)
    assert "nonzeros" in recorded(silent, "global")


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="`makes` of Misspelt must be one of dense, sparse, lowrank, got 'low-rank'"):
        REGISTRY["feddr"](regulariser=Misspelt())


def test_every_function_that_makes_low_ranks_has_its_ranks_recorded() -> None:
    layout = Layout.create(MLP(hidden=(5,)).build((6,), 3, 0))
    rows = torch.ones(2, layout.d)
    for low in (NuclearBall(), Total(parts=(Nuclear(c=0.1), Nuclear(c=0.2)))):
        assert "rank" in counts.measure_sizes(REGISTRY["fiaelt"](regulariser=low), layout, rows)
