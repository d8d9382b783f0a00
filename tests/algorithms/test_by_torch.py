"""Personalised methods against loops written from their papers with torch, and at the ends of their options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_torch import COHORTS, ROUNDS, SIZES, mean, network, put, run, same, trained, vector
from torch import Tensor

from fedloom.algorithms import FedAvg, FedAvgFT

N = len(SIZES)


def fedavg_rounds() -> Tensor:
    """The model of FedAvg after all rounds."""
    net = network()
    for t, cohort in enumerate(COHORTS, start=1):
        net = put(net, mean([vector(trained(net, t, i)) for i in cohort], cohort))
    return vector(net)


# --- FedAvg-FT


@pytest.mark.parametrize(("epochs", "lr"), [(5, 0.3), (2, 0.05)])
def test_fedavg_ft_is_fedavg_and_then_local_steps(epochs: int, lr: float) -> None:
    result = run(FedAvgFT(epochs=epochs, lr=lr))
    x = put(network(), fedavg_rounds())
    same(result.models.rows("global"), vector(x))
    own = [vector(trained(x, ROUNDS, i, epochs, "fine-tuning", lr)) for i in range(N)]
    same(result.models.rows("personal"), torch.stack(own))


def test_fedavg_ft_without_steps_is_fedavg() -> None:
    plain = run(FedAvg()).models.rows("global")
    for none in ({"epochs": 0}, {"steps": 0}):
        result = run(FedAvgFT(**none))
        assert torch.equal(result.models.rows("global"), plain)
        assert torch.equal(result.models.rows("personal"), plain.expand(N, -1))


def test_steps_of_fine_tuning_take_the_place_of_epochs() -> None:
    one = run(FedAvgFT(steps=1)).models.rows("personal")
    assert torch.equal(one, run(FedAvgFT(steps=1, epochs=9)).models.rows("personal"))
    assert not torch.equal(one, run(FedAvgFT()).models.rows("personal"))


def work_of(result: Any, name: str = "samples_backward") -> dict[int, int]:
    return {r.round: int(r.values[0]) for r in result.state.records.items if r.metric == name}


@pytest.mark.parametrize("every", [1, 2, ROUNDS])
def test_the_work_of_a_round_has_what_the_personal_models_after_it_took(every: int) -> None:
    """Whatever was evaluated before; a client never seen counts with what its first training takes."""
    trains = [sum(SIZES[i] for cohort in COHORTS[:t] for i in cohort) for t in range(ROUNDS + 1)]
    evaluate = {"every": every, "parts": ("train",)}
    got = work_of(run(FedAvgFT(epochs=3), evaluate=evaluate))
    assert got == {t: trains[t] + 3 * sum(SIZES) for t in got}
    assert sorted(got)[1:] == [*range(every, ROUNDS + 1, every)]
    few = [[0], [0, 2], [0], [2]]
    late = work_of(run("ditto", cohorts=few))[ROUNDS]
    assert late == 2 * (sum(SIZES[i] for cohort in few for i in cohort) + SIZES[1] + SIZES[3])


def test_work_of_clients_that_are_not_scored_counts_as_that_of_those_that_are() -> None:
    judged = {"every": ROUNDS, "parts": ("train",), "clients": 2}
    result = run(FedAvgFT(epochs=3), evaluate=judged)
    trains = sum(SIZES[i] for cohort in COHORTS for i in cohort)
    scored = sum(SIZES[i] for i in result.job.scored_ids.tolist())
    assert work_of(result)[ROUNDS] == trains + 3 * scored * N // 2


def test_workers_change_no_count() -> None:
    assert work_of(run(FedAvgFT(), engine={"dtype": "float64", "workers": 2})) == work_of(run(FedAvgFT()))
