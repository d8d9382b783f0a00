"""What can be known before a run is not discovered in it: random settings, cohorts, deadlines, hidden randomness."""

from __future__ import annotations

import os
import random  # noqa: TID251  # a user's
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS
from fedloom.data.federation import Federation
from fedloom.engine.result import Result
from fedloom.engine.setup import check
from fedloom.errors import ConfigError, DataError, Stop
from fedloom.rows.aggregators import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channels import CHANNELS

WIDTH = 5


def federation(n: int, rows: int = 12, kind: str = "classes", seed: int = 0) -> Federation:
    g = np.random.default_rng(seed)
    x = g.normal(size=(n * rows, WIDTH)).astype("float32")
    y: Any = x[:, 0] + x[:, 1] if kind == "numbers" else np.arange(len(x)) % (2 if kind == "two" else 3)
    return fl.partitions.iid(clients=n, validation=0.2, test=0.3)((x, y), seed=seed)


def drawn(seed: int) -> tuple[dict[str, Any], Federation]:
    """A random setting, whatever its parts are beside each other."""
    g = random.Random(seed)
    n = g.choice([1, 2, 3, 5, 8])

    def sometimes(p: float, value: Any) -> Any:
        return value if g.random() < p else None

    def rule() -> dict[str, Any]:
        kind = g.choice([*AGGREGATORS])
        fields = AGGREGATORS[kind].model_fields
        options: dict[str, Any] = {"kind": kind}
        for name, values in (("f", [0, 1, 2, 3]), ("k", [1, 2, 9]), ("root", [0, 1, 9])):
            if name in fields and g.random() < 0.6:
                options[name] = g.choice(values)
        if kind != "fltrust" and g.random() < 0.3:
            options["pre"] = [{"kind": "nnm", "f": g.choice([0, 1, 3])}]
        return options

    def sampler() -> dict[str, Any]:
        kind = g.choice([*SAMPLERS])
        options: dict[str, Any] = {"kind": kind}
        if kind == "bernoulli":
            return options | {"probability": g.choice([0.1, 0.5, 0.9])}
        if g.random() < 0.5:
            options |= g.choice([{"fraction": g.choice([0.3, 0.6])}, {"clients": g.choice([1, 2, 4])}])
        return options

    def schedule() -> dict[str, Any]:
        kind = g.choice(["deadline", "over-selection", "buffered", "asynchronous"])
        options: dict[str, Any] = {"kind": kind}
        if kind == "deadline":
            options |= {"seconds": g.choice([0.05, 0.3, 1.0, 10.0]), "partial": g.random() < 0.3}
        if kind in ("buffered", "asynchronous"):
            options |= {k: v for k, v in {
                "timeout": sometimes(0.4, g.choice([0.05, 1.0])), "concurrency": sometimes(0.4, g.choice([1, 2, 9])),
                "buffer": g.choice([1, 2, 9]) if kind == "buffered" else None,
            }.items() if v is not None}  # fmt: skip
        return options

    def forged() -> dict[str, Any]:
        return {"kind": g.choice([*ATTACKS]), "fraction": g.choice([0.2, 0.6])}

    models = [None, "mlp", nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(WIDTH, 3))]
    data = g.choice(["classes", "classes", "two", "numbers"])
    model = g.choice(models if data == "classes" else models[:2])
    time = sometimes(0.3, schedule())
    choices = {
        "algorithm": g.choice([*REGISTRY]),
        "model": model,
        "rounds": 3,
        "seed": g.randrange(5),
        "local": {"lr": 0.05, "batch_size": g.choice([4, "full"]), "epochs": g.choice([1, 2])}
        | (sometimes(0.15, {"momentum": 0.9}) or sometimes(0.15, {"optimizer": "adam"}) or {}),
        "aggregator": sometimes(0.4, rule()),
        "sampler": sometimes(0.5, sampler()),
        "aggregation_weights": sometimes(0.2, {"kind": g.choice([*WEIGHERS])}),
        "personalized_aggregation": sometimes(0.2, {"kind": g.choice([*MIXERS])}),
        "upload_transform": sometimes(0.2, {"kind": g.choice([*CHANNELS])}),
        "attack": sometimes(0.2, forged()),
        "schedule": time,
        "devices": {"kind": g.choice(["equal", "lognormal"])} if time or g.random() < 0.1 else None,
        "client_weights": sometimes(0.2, g.choice(["uniform", "groups", "clusters-2", "clusters-2 every 1"])),
        "evaluate": {"every": 3} | (sometimes(0.1, {"tsne": [0, 4]}) or {}),
    }
    return {k: v for k, v in choices.items() if v is not None}, federation(n, g.choice([6, 12]), data, seed % 3)


def run(choices: dict[str, Any], fed: Federation) -> Result | None:
    """The run that a check has let through; None where the check refused it."""
    try:
        setting = fl.Setting.create(**choices)
        check(setting, fed)
    except (ConfigError, DataError):
        return None
    return fl.simulate(setting, fed)


def hold(seed: int) -> bool:
    choices, fed = drawn(seed)
    result = run(choices, fed)
    if result is None:
        return False
    assert result.stop in (Stop.DONE, Stop.DIVERGED), f"{choices}: {result.stop}, {result.detail}"
    return True


def test_a_random_setting_is_refused_before_round_1_or_runs() -> None:
    assert sum(hold(seed) for seed in range(24)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_settings_are_refused_before_round_1_or_run(block: int) -> None:
    assert sum(hold(1000 + 30 * block + k) for k in range(30)) >= 3


def test_a_rule_that_a_later_cohort_is_too_small_for_is_refused_before_round_1() -> None:
    """The run of a shorter time, whose cohorts are large enough, is not."""
    fed = federation(10)
    choices: Any = {
        "sampler": {"kind": "bernoulli", "probability": 0.7},
        "aggregator": {"kind": "trimmed-mean", "f": 2},
    }
    with pytest.raises(ConfigError, match=r"round \d+ of 300 has \d clients: trimmed-mean needs m > 2 f") as refused:
        fl.simulate("fedavg", fed, rounds=300, **choices)
    first = int(str(refused.value).split()[1])
    assert refused.value.rule == "cohort-too-small"
    rounds = 1
    while rounds < first and run({"algorithm": "fedavg", "rounds": rounds + 1, **choices}, fed) is not None:
        rounds += 1
    result = fl.simulate("fedavg", fed, rounds=rounds, **choices)
    assert result.stop is Stop.DONE


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "ditto", "fedrep"])
@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_deadline_is_refused_if_and_only_if_no_client_meets_it(method: str, factor: float) -> None:
    """On equal devices and equal clients all meet it or none does: the seconds are those of the first round."""
    fed = federation(4)
    timed: Any = {"devices": {"kind": "equal", "speed": 50.0}, "local": {"lr": 0.05, "batch_size": 4}}
    first = fl.simulate(method, fed, rounds=1, **timed).state.clock.now
    choices = {"schedule": {"kind": "deadline", "seconds": first * factor}, **timed}
    result = run({"algorithm": method, "rounds": 2, **choices}, fed)
    assert (result is None) == (factor < 1)
    assert result is None or result.stop is Stop.DONE


class Drawing(nn.Module):
    """Draws by a function; ``everywhere`` also in evaluation."""

    def __init__(self, draw: Any, everywhere: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.draw, self.everywhere = nn.Linear(WIDTH, 4), nn.Linear(4, 3), draw, everywhere

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw() if self.everywhere or self.training else 0.0
        out: Tensor = self.head(torch.tanh(self.body(x)) + drawn)
        return out


def by_numpy() -> float:
    return float(np.random.normal())  # noqa: NPY002  # a user's


def by_python() -> float:
    return random.gauss()


def by_torch() -> Tensor:
    return torch.randn(4)


def figures(draw: Any, workers: int) -> tuple[Any, ...]:
    with fl.seeds.as_global(fl.seeds.generator(0), torch.device("cpu")):
        made = Drawing(draw)
    for generator in (np.random.seed, random.seed):
        generator(int.from_bytes(os.urandom(4)))
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    result = fl.simulate("fedavg", federation(6), made, rounds=3, engine={"workers": workers}, evaluate={"every": 1})
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before  # noqa: NPY002
    values = [item.values.tolist() for item in result.state.records.items if item.metric in ("loss", "accuracy")]
    return str(values), result.models.rows("global").tolist(), result.notes


@pytest.mark.parametrize("draw", [by_numpy, by_python, by_torch])
def test_a_model_that_draws_gives_the_same_run_on_any_number_of_workers(draw: Any) -> None:
    first, again, on_two = (figures(draw, workers) for workers in (1, 1, 2))
    assert first == again == on_two
    assert not [note for note in first[2] if "random" in note]


def test_a_model_with_a_generator_of_its_own_has_a_note() -> None:
    g = torch.Generator()
    notes = fl.simulate("fedavg", federation(3), Drawing(lambda: torch.randn(4, generator=g)), rounds=1).notes
    assert any("random numbers that do not depend on the seed, for example" in note for note in notes)


def test_code_of_a_server_that_draws_has_a_note() -> None:
    class Shaken(fl.algorithms.FedAvg):
        def server(self, server: Any, up: Any, ctx: Any) -> Any:
            by_numpy()
            return super().server(server, up, ctx)

    made = fl.simulate(Shaken(), federation(3), rounds=1)
    assert any("server code draws" in note for note in made.notes)
    assert not any("server code" in note for note in fl.simulate("fedavg", federation(3), rounds=1).notes)
