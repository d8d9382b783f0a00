"""Training samples that cannot change any model are refused before round 1, and no others."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom.engine.checks.learnable import check_learnable
from fedloom.engine.setup import check
from fedloom.errors import ConfigError
from fedloom.seeds import generator
from fedloom.tasks import Survival
from fedloom.tasks.survival import partial_loss

ROWS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)
"""Times and events of the rows of each client."""


def clients(rows: list[list[tuple[int, int]]]) -> fl.Federation:
    rng = np.random.default_rng(0)
    held = {
        f"site {k}": (rng.normal(size=(len(some), 2)).astype("float32"), np.array(some, "float32"))
        for k, some in enumerate(rows)
    }
    return fl.Federation.create(held, task="survival", test=0, validation=0)


@given(rows=ROWS)
@settings(max_examples=100, deadline=None)
def test_times_are_refused_exactly_if_the_loss_of_every_client_is_constant(rows: list[list[tuple[int, int]]]) -> None:
    moves, draws = False, generator(0, purpose="outputs")
    for some in rows:
        z = torch.randn(len(some), 1, generator=draws, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(partial_loss(z, torch.tensor(some, dtype=torch.float64)), z, allow_unused=True)
        moves = moves or bool((slope.abs() > 1e-12).any())
    fed = clients(rows)
    if moves:
        check_learnable(Survival(), fed)
    else:
        with pytest.raises(ConfigError) as caught:
            check_learnable(Survival(), fed)
        assert caught.value.rule == "nothing-to-learn"


def times(events: list[int], rows: int = 30) -> fl.Federation:
    rng = np.random.default_rng(1)
    return clients([[(1 + int(t), event) for t in rng.integers(1, 50, rows)] for event in events])


def own_loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of exponential times, which learns from censored rows."""
    return (outputs[:, 0].exp() * y[:, 0] / 50 - y[:, 1] * outputs[:, 0]).mean()


@pytest.mark.parametrize("choices", [{}, {"local": {"lr": 0.1, "weight_decay": 0.1}}, {"task": {"horizon": 9.0}}])
def test_no_event_anywhere_is_refused_before_round_1(choices: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no training row has an event"):
        fl.simulate("fedavg", times([0, 0, 0]), rounds=2, **choices)


def test_a_site_without_events_takes_part_beside_another_and_own_losses_learn_from_censored_rows() -> None:
    assert fl.simulate("fedavg", times([0, 1, 0]), rounds=2).status == "done"
    assert fl.simulate("fedavg", times([0, 0, 0]), rounds=2, task={"loss": own_loss}).status == "done"


@pytest.mark.parametrize("kind", ["kaplan-meier", "table-1"])
def test_analyses_need_no_event(kind: str) -> None:
    pytest.importorskip("fedloom_clinic")
    options = {"width": 10.0} if kind == "kaplan-meier" else {}
    assert fl.analyze(kind, times([0, 0, 0], 60), **options).table.num_rows


def test_batches_of_one_row_are_noted() -> None:
    notes = check(fl.Setting.create(fl.algorithms.FedAvg(), "softmax", local={"batch_size": 1}), times([1, 1]))
    assert any("a batch of one row" in note for note in notes)
    assert not any(
        "a batch of one row" in note for note in check(fl.Setting.create(fl.algorithms.FedAvg()), times([1]))
    )


def labelled(classes: list[int]) -> fl.Federation:
    x = np.random.default_rng(2).normal(size=(len(classes), 2)).astype("float32")
    data = fl.Dataset("classes", torch.from_numpy(x), torch.tensor(classes), "classification", ("a", "b", "c"))
    return fl.partitions.iid(clients=2, test=0, validation=0)(data)


@pytest.mark.parametrize(("weights", "fine"), [([0.0, 0.0, 1.0], False), ([0.0, 1.0, 1.0], True), ("balanced", True)])
def test_weights_that_no_training_sample_has_are_refused(weights: Any, fine: bool) -> None:
    setting, fed = fl.Setting.create(fl.algorithms.FedAvg(), task={"class_weights": weights}), labelled([0, 1] * 20)
    if fine:
        check(setting, fed)
    else:
        with pytest.raises(ConfigError, match="weight 0 to every class"):
            check(setting, fed)


def test_a_run_that_trained_is_done_although_its_test_rows_have_no_event() -> None:
    rng = np.random.default_rng(3)

    def side(event: int, rows: int) -> Any:
        return rng.normal(size=(rows, 2)), np.stack([rng.integers(1, 50, rows), np.full(rows, event)], 1)

    fed = fl.Federation.create({name: (side(1, 30), side(0, 8)) for name in "abc"}, task="survival")
    assert fl.simulate("fedavg", fed, rounds=2, evaluate={"parts": ["test"]}).status == "done"


class Learned(NamedTuple):
    """Number of replies."""

    replies: torch.Tensor


class Avoiding(fl.samplers.Sampler):
    """Sampler that draws one client, in turn, but a client without weight only until the first reply."""

    kind: ClassVar[str] = "avoiding"

    @property
    def learns(self) -> bool:
        return True

    def init(self, ctx: Any) -> Learned:
        return Learned(torch.zeros(1))

    def apply(self, state: Learned, info: Any, ctx: Any) -> tuple[torch.Tensor, Learned]:
        return torch.tensor([(ctx.round - 1) % (2 if state.replies else ctx.n)]), state

    def learn(self, state: Learned, replies: torch.Tensor, ctx: Any) -> Learned:
        return Learned(state.replies + len(replies))


def test_cohorts_of_a_sampler_that_learns_are_not_judged_by_their_weights() -> None:
    rng = np.random.default_rng(4)
    fed = fl.Federation.create({k: (rng.normal(size=(12, 2)), np.arange(12) % 3) for k in "abc"})
    result = fl.simulate("fedavg", fed, rounds=4, sampler=Avoiding(), client_weights=[1.0, 1.0, 0.0])
    assert result.status == "done"


def censored(events: int, rows: int = 60, subject: bool = False, order: bool = False) -> fl.Dataset:
    """Times of which the first few are events, early ones."""
    rng = np.random.default_rng(4)
    time = np.where(np.arange(rows) < events, 1.0 + np.arange(rows) / rows, rng.uniform(5, 50, rows))
    y = np.stack([time, np.arange(rows) < events], 1).astype("float32")
    options: dict[str, Any] = {"subject": np.arange(rows)} if subject else {}
    options |= {"order": np.arange(rows)[::-1]} if order else {}
    return fl.Dataset.create((rng.normal(size=(rows, 2)).astype("float32"), y), task="survival", **options)


@pytest.mark.parametrize("subject", [False, True])
@pytest.mark.parametrize("events", [1, 2, 7])
def test_every_fold_trains_on_an_event_and_folds_share_the_others(events: int, subject: bool) -> None:
    """As of classes: without it, one fold without an event refused the comparison of all folds."""
    partition, data = fl.partitions.iid(clients=1, folds=3, validation=0.2), censored(events, subject=subject)
    tested = []
    for seed in range(9):
        fed = partition(data, seed)
        check(fl.Setting.create(fl.algorithms.FedAvg(), seed=seed), fed)
        counts = {part: int(fed.data.y[fed.parts[part].index, 1].sum()) for part in fed.parts}
        assert sum(counts.values()) == events
        assert counts["train"] > 0
        assert any("rows of the test set are censored" in note for note in fed.notes) is (counts["test"] == 0)
        tested.append(counts["test"])
    assert max(tested) - min(tested) <= 1


def test_a_fold_without_an_event_is_named() -> None:
    """Blocks in the order of dates keep no shares: the events are in the last block here."""
    partition, data = fl.partitions.iid(clients=1, folds=3), censored(6, order=True)
    setting = fl.Setting.create(fl.algorithms.FedAvg())
    with pytest.raises(ConfigError, match=r"in fold 2 of 3 \(seed 1\), no training row has an event") as caught:
        check(setting.with_(seed=1), partition(data, 1))
    assert "Omit seed 1" in str(caught.value)
