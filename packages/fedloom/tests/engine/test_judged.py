"""evaluate.clients: some clients are scored, as they would be among all; nothing else of a run changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from fedloom.algorithms import FLAME, FedAvg
from fedloom.choose import Uniform
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.rows.attacks import Gaussian

SOME = 7


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Iid(clients=20, pool=True)(load("digits"), seed=0)


def run(fed: Federation, clients: int | None = SOME, method: Any = None, **choices: Any) -> Result:
    given: dict[str, Any] = {
        "rounds": 4,
        "local": LocalSGD(lr=0.05, batch_size=16),
        "sampler": Uniform(clients=8),
        **choices,
    }
    return simulate(method or FLAME(), fed, evaluate=Evaluate(every=2, clients=clients), **given)


def test_figures_of_the_scored_are_those_among_all(fed: Federation) -> None:
    every, some = run(fed, None), run(fed)
    ids = some.job.scored_ids
    assert len(ids) == SOME
    assert set(some.table()["client"].to_pylist()) == {-1, *ids.tolist()}
    for model in ("global", "personal", "hybrid"):
        for metric in ("accuracy", "macro_f1", "loss"):
            for part in ("train", "validation", "test"):
                found, wanted = (one.final(model, metric, part) for one in (some, every))
                close = {"rtol": 1e-6 if metric == "loss" else 0.0, "atol": 0.0, "equal_nan": True}
                torch.testing.assert_close(found, wanted[ids], **close)  # type: ignore[arg-type]
    assert torch.equal(some.models.rows("global"), every.models.rows("global"))
    assert torch.equal(some.models.rows("personal"), every.models.rows("personal"))


def test_means_are_of_the_scored(fed: Federation) -> None:
    result = run(fed)
    mean = result.state.records.last("global", "test", "accuracy/mean")
    assert mean is not None
    assert mean[0] == np.nanmean(result.final("global").numpy())
    index = torch.cat([fed.indices("test", i) for i in result.job.scored_ids.tolist()])  # of no official test set
    row = result.models.rows("global")
    hit = torch.cat([out.argmax(1) for out in result.job.oracle.outputs(row, index)]) == fed.targets(index)
    common = result.state.records.last("global", "common", "accuracy")
    assert common is not None
    assert common[0] == pytest.approx(float(hit.double().mean()), abs=1e-12)


def test_the_same_clients_in_every_round_with_every_method_and_worker(fed: Federation) -> None:
    flame, avg = run(fed), run(fed, method=FedAvg())
    assert torch.equal(flame.job.scored_ids, avg.job.scored_ids)
    assert not torch.equal(flame.job.scored_ids, run(fed, seed=1).job.scored_ids)
    assert (
        run(fed, engine=Engine(clients_per_batch=3))
        .table()
        .equals(run(fed, engine=Engine(workers=2, clients_per_batch=3)).table())
    )
    by_round = flame.table().filter(pc.greater_equal(flame.table()["client"], 0)).group_by("round")
    assert set(by_round.aggregate([("client", "count_distinct")])["client_count_distinct"].to_pylist()) == {SOME}


def test_a_resumed_run_knows_whom_it_scores(fed: Federation, tmp_path: Path) -> None:
    whole = run(fed)
    run(fed, folder=tmp_path, callbacks=[lambda state: "enough" if state.round == 2 else None])
    assert run(fed, folder=tmp_path, advance=False).table().num_rows < whole.table().num_rows
    again = run(fed, folder=tmp_path)
    assert again.state.records.ids is not None
    assert torch.equal(again.state.records.ids, whole.job.scored_ids)


def test_as_many_as_there_are_are_all(fed: Federation) -> None:
    assert run(fed, 20).table().equals(run(fed, None).table())
    assert run(fed, 1000).table().equals(run(fed, None).table())


def test_nobody_takes_a_model_that_was_not_compared(fed: Federation) -> None:
    assert run(fed).models.kinds() == ["global", "personal"]


def test_attackers_among_the_scored_count_in_no_mean(fed: Federation) -> None:
    result = run(fed, method=FedAvg(), attack=Gaussian(fraction=0.5))
    benign = ~result.job.malicious[result.job.scored_ids]
    assert 0 < int(benign.sum()) < SOME
    mean = result.state.records.last("global", "test", "loss/mean")
    assert mean is not None
    assert mean[0] == pytest.approx(float(result.final("global", "loss")[benign].mean()), rel=1e-12)
