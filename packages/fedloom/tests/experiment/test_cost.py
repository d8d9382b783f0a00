"""One cost model: what a dry run, a bench and a plan of equal work say of a run is what the run then counts."""

from __future__ import annotations

from itertools import islice

import pytest

import fedloom as fl
from fedloom.choose import Uniform
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine.setting import Setting
from fedloom.lab.experiment.measure.cost import (
    ESTIMATE_ROUNDS,
    RoundCost,
    measure_rounds,
    play_rounds,
    run_cost,
    samples_per_round,
)
from fedloom.lab.tune.work import plain_budget
from fedloom.processes.clients import CLIENT_COUNTS


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Iid(clients=4)(fl.load("digits"), 0)


def setting(algorithm: str = "fedavg", **choices: object) -> Setting:
    local = {"batch_size": 20, "lr": 0.1, "epochs": 1}
    return Setting.model_validate({"algorithm": algorithm, "model": "softmax", "rounds": 5, "local": local, **choices})


PARTS: list[tuple[str, dict[str, object]]] = [
    ("fedavg", {"client_weights": "clusters-2"}),
    ("flame", {"client_weights": "clusters-2 every 2", "upload_transform": "top-k"}),
    ("fedavg-ft", {"personalized_aggregation": "attention", "client_weights": "clusters-2 every 1"}),
    ("equitable-fl", {"upload_transform": "sign"}),
]


@pytest.mark.parametrize(("algorithm", "choices"), PARTS)
def test_a_run_counts_its_rounds_and_what_is_of_none(
    algorithm: str, choices: dict[str, object], fed: Federation
) -> None:
    """Finding clusters, before round 1 and later, and the training of personal models for the last evaluation."""
    asked = setting(algorithm, evaluate={"every": 4}, **choices)
    records = fl.simulate(asked, fed).state.records
    cost = run_cost(asked, fed)
    assert any(cost.other) == ("client_weights" in choices)
    for counted, of_round, name in zip(
        cost.other, cost.round[3:6], ("samples_backward", "bytes_up", "bytes_down"), strict=True
    ):
        recorded = records.last("", "", name)
        assert recorded is not None
        assert cost.rounds * of_round + counted == pytest.approx(float(recorded[0]))


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_every_estimate_is_what_a_run_counts(algorithm: str, fed: Federation) -> None:
    asked = setting(algorithm)
    whole = fl.simulate(asked, fed)
    cost = run_cost(asked, fed)
    totals = dict(zip(CLIENT_COUNTS, whole.state.totals.tolist(), strict=False))
    steps, samples, up, down = (
        totals[name] / whole.rounds for name in ("steps", "samples_backward", "bytes_up", "bytes_down")
    )
    assert (cost.rounds, cost.parameters, cost.round.clients) == (5, 650, 4)
    assert cost.round[2:6] == pytest.approx((steps, samples, up, down))
    first, *_ = measure_rounds(asked, fed, 2).rounds
    assert first[1:6] == pytest.approx(cost.round[1:6])
    assert samples_per_round(asked, fed) == samples


def test_a_mean_round_is_the_mean_of_its_rounds(fed: Federation) -> None:
    asked = setting(sampler=Uniform(clients=3))
    played = [*islice(play_rounds(asked, fed), ESTIMATE_ROUNDS)]
    costs = [one.cost for one in played]
    mean = run_cost(asked, fed).round
    for name in RoundCost._fields[1:6]:
        assert getattr(mean, name) == pytest.approx(sum(getattr(cost, name) for cost in costs) / ESTIMATE_ROUNDS)
    assert played[-1].samples == sum(cost.samples for cost in costs)


def test_a_budget_of_plain_rounds_is_their_cost(fed: Federation) -> None:
    asked = setting()
    assert plain_budget(asked, fed, 3).samples == 3 * samples_per_round(asked, fed)
