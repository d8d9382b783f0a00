"""Random changes of a whole run: chunks, workers and resuming leave its numbers, and files say what was done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedloom.algorithms import FedAvg
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import FeatureNoise, Iid
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, RunDirError
from fedloom.lab.experiment import json_schema, parse
from fedloom.local import LocalSGD
from fedloom.models import Augment

AUGMENT = Augment(flip=0.5, crop=1)
TEXT = {"data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Iid(clients=6)(load("digits"), seed=0)


def run(fed: Federation, augment: Augment | None = AUGMENT, folder: Path | None = None, **engine: object) -> Result:
    return simulate(
        FedAvg(),
        fed,
        rounds=2,
        local=LocalSGD(lr=0.1, batch_size=50),
        augment=augment,
        evaluate=Evaluate(every=2, parts=("train",)),
        engine=Engine(dtype="float64", **engine),  # type: ignore[arg-type]
        folder=folder,
    )


@pytest.mark.parametrize("augment", [AUGMENT, None])
def test_chunks_workers_and_oracles_change_nothing_but_rounding(fed: Federation, augment: Augment | None) -> None:
    fed, clean = fed if augment else FeatureNoise(clients=6, noise_draws="per-batch")(load("digits"), seed=0), fed
    whole = run(fed, augment).models.rows("global")
    for engine in ({"clients_per_batch": 2, "workers": 2}, {"gradient_engine": "loop"}, {"gradient_engine": "vmap"}):
        torch.testing.assert_close(run(fed, augment, **engine).models.rows("global"), whole, rtol=0, atol=1e-10)
    assert not torch.allclose(run(clean, None).models.rows("global"), whole, atol=1e-4)


def test_augmentation_that_does_nothing_is_none(fed: Federation) -> None:
    plain = run(fed, None).models.rows("global")
    for off in (Augment(), Augment(crop=3, crop_probability=0)):
        assert torch.equal(run(fed, off).models.rows("global"), plain)


def test_a_run_is_not_continued_with_other_noise(tmp_path: Path) -> None:
    def noisy(sigma: float) -> Federation:
        return FeatureNoise(clients=6, sigma=sigma, noise_draws="per-batch", test=0, validation=0)(
            load("digits"), seed=0
        )

    run(noisy(0.1), None, folder=tmp_path)
    run(noisy(0.1), None, folder=tmp_path)
    with pytest.raises(RunDirError, match="a different run"):
        run(noisy(0.2), None, folder=tmp_path)


def test_a_run_is_not_continued_with_another_augmentation(fed: Federation, tmp_path: Path) -> None:
    run(fed, folder=tmp_path)
    run(fed, folder=tmp_path)
    for other in (None, Augment(flip=0.5)):
        with pytest.raises(RunDirError):
            run(fed, other, tmp_path)


def test_experiment_files_have_a_table_for_it() -> None:
    assert parse(TEXT).common.augment == Augment()
    experiment = parse({**TEXT, "augment": {"flip": 0.5, "crop": 4, "crop_probability": 0.5}})
    assert experiment.common.augment == Augment(flip=0.5, crop=4, crop_probability=0.5)
    assert parse(experiment.settings()).common.augment == experiment.common.augment
    assert set(json.loads(json_schema())["properties"]["augment"]["properties"]) == set(Augment.model_fields)
    with pytest.raises(ConfigError, match=r"\[augment\]: unknown key 'flp'; did you mean 'flip'"):
        parse({**TEXT, "augment": {"flp": 0.5}})
    with pytest.raises(ConfigError, match=r"\[augment\]: flip: input should be less than or equal to 1, got 2"):
        parse({**TEXT, "augment": {"flip": 2}})
