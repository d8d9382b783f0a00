"""Every two parts of two kinds beside FedAvg: the run finishes, or is refused for the reason that the page has.

What is refused is checked of all pairs; some are run, drawn anew every day, and all where slow tests are.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator

from fedloom.choose import SAMPLERS, Uniform
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.engine.setup import check
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Stop
from fedloom.local import LocalSGD
from fedloom.models import MLP
from fedloom.rows.attacks import Backdoor
from fedloom.schedule import SCHEDULES
from tests.engine.test_matrix import (
    CURE,
    KINDS,
    PAIR_REASONS,
    STREAMS,
    Pair,
    always_there,
    choices_of,
    in_groups,
    pair_refusal,
    pairs,
    rotation,
)

N, RUN = 9, 30
OTHERS = (SAMPLERS.keys() | SCHEDULES.keys()) - {"uniform", "synchronous"}
"""Parts by which cohorts are others than those of the test."""
FEW = {Stop.TOO_FEW, Stop.UNUSABLE}
"""How a run ends whose cohort has fewer clients than a rule needs, or lacks the one that it trusts."""


@pytest.fixture(scope="module")
def fed() -> Federation:
    """Nine clients in two groups, which a column has too."""
    rows = [torch.randn(12, 4, generator=Generator().manual_seed(k)) for k in range(N)]
    labels = [(x[:, k % 3] > 0).long() + (x[:, 3] > 0) for k, x in enumerate(rows)]
    fed = Federation.create([((x[:8], y[:8]), (x[8:], y[8:])) for x, y in zip(rows, labels, strict=True)])
    return in_groups(fed)


def setting(pair: Pair, root: int = 0) -> Setting:
    """A run of two rounds with both parts, and what they need; ``root`` is the client that fltrust trusts."""
    parts: dict[str, Any] = {"sampler": Uniform(clients=N - 1)}
    for kind, plugin in ((pair.kind, pair.plugin), (pair.other, pair.beside)):
        parts |= choices_of(kind, plugin, root=root, clients=N - 1)
    if isinstance(attack := parts.get("attack"), Backdoor):
        parts["attack"] = attack.with_(columns={"0": 1.0})  # a table has no corner to stamp
    if "personalized_aggregation" in parts and pair.beside in STREAMS:
        parts["personalized_aggregation"] = parts["personalized_aggregation"].with_(among="all")
    if pair.beside == "buffered":
        parts["schedule"] = parts["schedule"].with_(buffer=N - 1)
    if pair.beside == "over-selection":
        parts["schedule"] = parts["schedule"].with_(factor=1.1)
    if "forged-activations" in (pair.plugin, pair.beside):
        parts = {"client_weights": "clusters-2", **parts}
    if "fltrust" in (pair.plugin, pair.beside):  # its trusted client must be in every cohort
        parts["sampler"] = Uniform(fraction=1.0)
    if (
        pair.kind == "aggregator"
        and pair.beside in ("size-weighted", "bernoulli")
        and hasattr(parts["aggregator"], "f")
    ):
        parts["aggregator"] = parts["aggregator"].with_(f=0)  # large clients are drawn repeatedly, so cohorts are small
    local = LocalSGD(lr=0.05, steps=2, batch_size=8)
    return Setting.create("fedavg", MLP(hidden=(3,)), rounds=2, local=local, evaluate={"every": 2}, **parts)


def test_two_parts_are_refused_for_a_reason_on_the_page(fed: Federation) -> None:
    wrong = []
    for pair in pairs():
        reason = pair_refusal(pair)
        try:
            check(setting(pair), fed)
        except ConfigError as error:
            if reason is None or PAIR_REASONS[reason][0] not in str(error) or not CURE.search(str(error)):
                wrong.append((pair, str(error)))
        else:
            wrong += [] if reason is None else [(pair, "runs")]
    assert wrong == [], wrong


def run(fed: Federation, pair: Pair) -> None:
    """Run two parts that go together; every model stays finite."""
    result = simulate(setting(pair, always_there(fed)), fed)
    if pair.kind == "aggregator" and pair.beside in OTHERS and result.stop in FEW:
        return
    if {pair.kind, pair.other} == {"aggregator", "upload_transform"} and result.stop is Stop.UNCHANGED:
        return  # most clients leave a coordinate at zero, and so does a robust rule
    assert result.stop is Stop.DONE, (pair, result.detail)
    assert all(bool(field.isfinite().all()) for field in result.state.server), pair


def test_two_parts_run(fed: Federation) -> None:
    able = [pair for pair in pairs() if pair_refusal(pair) is None]
    for place in np.random.default_rng(rotation()).choice(len(able), RUN, replace=False):
        run(fed, able[place])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "other"), [*combinations(KINDS, 2)])
def test_every_two_parts_run(fed: Federation, kind: str, other: str) -> None:
    for pair in pairs():
        if (pair.kind, pair.other) == (kind, other) and pair_refusal(pair) is None:
            run(fed, pair)
