"""A default is never impossible: every kind of every table without options, on federations of few clients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS
from fedloom.data import PARTITIONS
from fedloom.errors import ConfigError, FedloomError
from fedloom.rows.aggregators import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channels import CHANNELS
from fedloom.schedule import DEVICES, SCHEDULES

SMALL = (1, 2, 3, 8)
TABLES: dict[str, Any] = {
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "upload_transform": CHANNELS,
    "sampler": SAMPLERS,
    "aggregation_weights": WEIGHERS,
    "personalized_aggregation": MIXERS,
    "devices": DEVICES,
    "schedule": SCHEDULES,
}
KINDS = [
    *((table, kind) for table, kinds in TABLES.items() for kind in kinds),
    *(("method", name) for name in REGISTRY),
    *(("pre", kind) for kind in ("clip", "bucketing", "nnm")),
]


def federation(n: int) -> fl.Federation:
    rng = np.random.default_rng(n)
    clients = []
    for _ in range(n):
        y = np.arange(12) % 3
        x = (np.eye(3)[y] + 0.3 * rng.normal(size=(12, 3))).astype("float32")
        clients.append(((x, y), (x[:4], y[:4])))
    return fl.Federation.create(clients)


def refusal(call: Callable[[], object]) -> str:
    """What a call is refused with; nothing if it works."""
    try:
        call()
    except FedloomError as error:
        return str(error)
    return ""


ABOUT_WHAT_IS_WRITTEN = (
    r"field required",  # an option without a default
    r"a backdoor in a table needs columns to change",  # of [attack], for a table
    (
        "has nothing to forge: only client_weights = 'clusters' and aggregation_weights 'equitable' "
        "describe clients by activations"
    ),  # of [attack] kind, beside no weigher
    r"FedBN keeps normalization layers .* but the model has no normalization layers",  # of the method, with this model
    r"(krum|multi-krum|bulyan) needs .* and f = 0\. Set aggregator='median', or take more clients",  # whatever its f
    r"fltrust needs m >= 2, got m = 1 row\. Set aggregator='median', or take more clients",
)


@pytest.mark.parametrize("n", SMALL)
@pytest.mark.parametrize(("table", "kind"), KINDS)
def test_every_kind_without_options_runs_or_is_refused_for_what_is_written(table: str, kind: str, n: int) -> None:
    choices: dict[str, Any] = {table: {"kind": kind}}
    if table == "method":
        choices = {}
    elif table == "pre":
        choices = {"aggregator": {"kind": "mean", "pre": [{"kind": kind}]}}
    elif table == "schedule" and kind != "synchronous":
        choices["devices"] = {"kind": "lognormal"}
    says = refusal(lambda: fl.simulate(kind if table == "method" else "fedavg", federation(n), rounds=2, **choices))
    assert not says or any(re.search(allowed, says) for allowed in ABOUT_WHAT_IS_WRITTEN), says


@pytest.mark.parametrize("n", SMALL)
@pytest.mark.parametrize("kind", PARTITIONS)
def test_every_partition_of_so_many_clients_runs_or_is_refused_for_what_is_written(kind: str, n: int) -> None:
    rows = 24 * n
    site, names = torch.arange(rows) % n, tuple(f"site {k}" for k in range(n))
    data = fl.Dataset(
        "images", torch.arange(rows * 12, dtype=torch.uint8).view(rows, 1, 4, 3), torch.arange(rows) % 3,
        classes=tuple("abc"), users=site, user_names=names, columns={"site": site}, levels={"site": names},
    )  # fmt: skip
    options: dict[str, Any] = {"clients": n} if "clients" in PARTITIONS[kind].model_fields else {}
    options |= {"column": "site"} if kind == "by-column" else {}
    options |= {"classes": (1, 2), "sizes": (1, n)} if kind == "clusters" else {}
    says = refusal(lambda: PARTITIONS[kind](**options)(data))
    about_clients = kind == "mixed" and n == 1 and "clients: input should be greater than or equal to 2, got 1" in says
    assert not says or about_clients, says


@pytest.mark.parametrize(
    ("n", "choices", "note"),
    [
        (8, {"schedule": {"kind": "buffered"}, "devices": {"kind": "lognormal"}}, "schedule 'buffered': buffer = 8"),
        (2, {"aggregator": {"kind": "trimmed-mean"}}, "'trimmed-mean': f = 0.*2 uploads.*tolerates no attacker"),
        (3, {"aggregator": {"kind": "krum"}}, "aggregator 'krum': f = 0, because 3 uploads are too few"),
        (6, {"aggregator": {"kind": "bulyan"}}, "aggregator 'bulyan': f = 0"),
        (8, {"aggregator": {"kind": "krum"}, "sampler": {"kind": "uniform", "clients": 4}}, "f = 0, because 4 uploads"),
        (1, {"sampler": {"kind": "availability"}}, "sampler 'availability': period = 1, because 1 client"),
    ],
)
def test_a_default_that_is_another_one_is_noted(n: int, choices: dict[str, Any], note: str) -> None:
    result = fl.simulate("fedavg", federation(n), rounds=2, **choices)
    assert [text for text in result.notes if re.search(note, text)], result.notes


@pytest.mark.parametrize(
    ("n", "choices", "says"),
    [
        (
            8,
            {"schedule": {"kind": "buffered", "buffer": 9}, "devices": {"kind": "lognormal"}},
            "at most the number of clients",
        ),
        (2, {"aggregator": {"kind": "trimmed-mean", "f": 1}}, r'm = 2 rows and f = 1\. Set aggregator={"f": 0}, or'),
        (1, {"sampler": {"kind": "availability", "period": 2}}, "no client is available in round 2"),
        (
            8,
            {"aggregator": {"kind": "multi-krum", "k": 9}},
            r'k <= m, got m = 8 .*\. Set aggregator={"k": 8}',
        ),
    ],
)
def test_what_is_written_stays_and_is_refused(n: int, choices: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fl.simulate("fedavg", federation(n), rounds=2, **choices)


def test_defaults_that_fit_stay() -> None:
    choices: dict[str, Any] = {"schedule": {"kind": "buffered"}, "devices": {"kind": "lognormal"}}
    result = fl.simulate("fedavg", federation(12), rounds=2, aggregator={"kind": "krum"}, **choices)
    assert result.job.setting.schedule.size == 10
    assert result.job.setting.aggregator.f == 1
    assert not [note for note in result.notes if "too few for the default" in note]
