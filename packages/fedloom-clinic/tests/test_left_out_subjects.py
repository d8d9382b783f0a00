"""A client that is left out is scored without the patients whom another client has trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedloom as fl
from fedloom.errors import ConfigError
from fedloom_clinic.left_out import LeftOut, remove_client, score_new_client


def test_nobody_who_was_trained_on_is_scored_as_a_new_patient() -> None:
    rng = np.random.default_rng(0)
    patient = np.sort(rng.integers(80, size=240))
    hospital = np.array(["a", "b", "c"])[patient % 3]
    hospital[::7] = "a"  # patients of b and c who were at a, too
    frame = pd.DataFrame({
        "patient_id": patient, "hospital": hospital, "age": rng.normal(60, 9, 240).round(1),
        "crp": rng.exponential(9, 240).round(2), "died": rng.integers(2, size=240),
    })  # fmt: skip
    fed = fl.partitions.natural()(fl.Dataset.create(frame, "died", client_column="hospital", subject="patient_id"), 0)
    result = fl.simulate("fedavg", remove_client(fed, 0), rounds=1)
    scored = score_new_client(result, fed, 0).to_pylist()
    (rows,) = {row["value"] for row in scored if row["metric"] == "samples"}
    elsewhere = {*frame["patient_id"][frame["hospital"] != "a"]}
    alone = (~frame["patient_id"].isin(elsewhere) & (frame["hospital"] == "a")).sum()
    assert 0 < alone <= rows < (frame["hospital"] == "a").sum()


X, Y = np.sin(np.arange(120.0)).reshape(40, 3), np.arange(40) % 2
SITES = {name: (X[k::4], Y[k::4]) for k, name in enumerate("abcd")}


@pytest.mark.parametrize(
    ("choices", "rule"),
    [
        ({"client_weights": [1.0, 2.0, 3.0, 4.0]}, ""),
        ({"early_stop": {"patience": 2}, "evaluate": {"parts": ["validation", "test"]}}, ""),
        ({"sampler": {"kind": "uniform", "clients": 4}}, "sampler-clients"),
        ({"aggregator": {"kind": "fltrust", "root": 2}}, "left-out-trusted-client"),
        ({"aggregator": {"kind": "median"}, "sampler": {"kind": "uniform", "clients": 3}}, ""),
        ({"devices": {"kind": "equal"}, "schedule": {"kind": "buffered", "buffer": 4}}, "schedule-buffer"),
    ],
    ids=str,
)
def test_runs_without_a_client_are_checked_before_the_first_round_and_then_work(
    choices: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    cut = fl.partitions.natural(validation=0.2)
    given: dict[str, Any] = {"rounds": 1, "seeds": [0], "partition": cut, "progress_bar": False, **choices}
    if rule:
        with pytest.raises(ConfigError, match="left-out trains without client") as caught:
            fl.compare(
                ["fedavg"],
                fl.Dataset.create((X, Y), clients=np.arange(40) % 4),
                analyses=["left-out"],
                folder=tmp_path / "r",
                **given,
            )
        assert caught.value.rule == rule
        assert not (tmp_path / "r").exists()
    else:
        fl.compare(
            ["fedavg"],
            fl.Dataset.create((X, Y), clients=np.arange(40) % 4),
            analyses=["left-out"],
            folder=tmp_path / "r",
            **given,
        )
        assert (tmp_path / "r" / "left_out.parquet").exists()


def test_the_only_client_with_events_cannot_be_left_out_and_the_advice_names_the_analysis() -> None:
    rng = np.random.default_rng(0)
    sites = {
        f"site {k}": (
            rng.normal(size=(20, 2)),
            np.stack([rng.integers(1, 50, 20), np.full(20, k == 1)], 1, dtype=float),
        )
        for k in range(3)
    }
    fed = fl.Federation.create(sites, task="survival")
    with pytest.raises(ConfigError, match="left-out trains without client 'site 1'.*, or omit this analysis") as caught:
        LeftOut().check_run(fed, fl.Setting.create("fedavg"))
    assert caught.value.rule == "nothing-to-learn"


def test_a_method_without_a_global_model_has_no_runs_without_a_client() -> None:
    sampler = {"kind": "uniform", "clients": 4}
    setting = fl.Setting.create("fedper", sampler=sampler)
    LeftOut().check_run(fl.Federation.create(SITES), setting)


def test_clients_keep_their_own_values_when_another_client_is_left_out() -> None:
    fed = fl.Federation.create(SITES)
    result = fl.simulate("fedavg", fed, rounds=1)
    setting = fl.Setting.create(
        "fedavg", client_weights=[1.0, 2.0, 3.0, 4.0], aggregator={"kind": "fltrust", "root": 3}
    )
    weights = dict(zip(fed.names, (1.0, 2.0, 3.0, 4.0), strict=True))
    runs = [*LeftOut().units(setting.with_(aggregator=None), fed, result)]
    assert [dict(zip(run.fed.names, run.setting.client_weights, strict=True)) for run in runs] == [
        {name: weight for name, weight in weights.items() if name != left} for left in fed.names
    ]
    for run in [next(LeftOut().units(setting, fed, result))]:
        assert run.fed.names[run.setting.aggregator.root] == fed.names[3]
