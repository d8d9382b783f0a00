"""Scores of many clients at once against those of each client alone, and against the models computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.choose import Uniform
from fedloom.data import load
from fedloom.data.partitions import Clusters, Dirichlet
from fedloom.engine.clients.scores import WORK_KEY, choose_model, personal_models, score_chunk
from fedloom.engine.result import Result
from fedloom.engine.setting import Evaluate
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.models import CNN, MLP
from fedloom.processes.clients import Scores, ScoreTask
from fedloom.tasks import make_task

MODELS = {"softmax": "softmax", "mlp": MLP(hidden=(9,)), "cnn": CNN(channels=(4,), kernel=3, hidden=(8,))}
SPLITS = ([1] * 17, [5, 7, 5], [16, 1])
LOCAL = LocalSGD(lr=0.1, batch_size=8)


@pytest.fixture(scope="module", params=[*MODELS])
def result(request: pytest.FixtureRequest) -> Result:
    """FLAME after a round of some of the clients: others have never been seen."""
    fed = Dirichlet(clients=17, alpha=0.3, min_size=2, max_train_per_client=300)(load("digits"), seed=0)
    evaluate, sampler = Evaluate(every=1), Uniform(clients=6)
    return simulate("flame", fed, MODELS[request.param], rounds=1, local=LOCAL, sampler=sampler, evaluate=evaluate)


def scored(result: Result, split: list[int]) -> Scores:
    job, server = result.job, result.state.server
    shared, down = job.algorithm.global_model(server), job.down(server, 1)
    pieces = torch.arange(job.n).split(split)
    found = [score_chunk(job, down, shared, ScoreTask(1, ids, torch.arange(job.n), common=False)) for ids in pieces]
    return {key: {name: torch.cat([f[key][name] for f in found]) for name in found[0][key]} for key in found[0]}


def by_hand(result: Result, row: Tensor, part: str, i: int) -> tuple[int, float]:
    """Samples that are predicted right, and the mean loss."""
    fed, oracle = result.job.eval_fed, result.job.oracle
    index = fed.indices(part, i)
    outputs = functional_call(oracle.module.eval(), oracle.layout.tree(row), (fed.fetch(index),)).double()
    y = fed.data.y[index]
    return int((outputs.argmax(1) == y).sum()), float(torch.nn.functional.cross_entropy(outputs, y))


def check(found: Scores, wanted: Scores, sizes: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for (model, part), values in found.items():
        one = wanted[model, part]
        if not part:  # figures of whole models
            continue
        counts, others = ((v["accuracy"] * sizes[part]).nan_to_num(-1).round() for v in (values, one))
        assert torch.equal(counts, others)
        torch.testing.assert_close(values["loss"], one["loss"], rtol=1e-6, atol=0, equal_nan=True)


def test_scores_do_not_depend_on_who_is_scored_together(result: Result) -> None:
    sizes = {part: result.job.eval_fed.sizes(part).double() for part in ("train", "validation", "test")}
    whole = scored(result, [17])
    assert {model for model, _ in whole} == {"global", "personal", ""}
    for split in SPLITS:
        found = scored(result, split)
        check(found, whole, sizes)
        assert all(torch.equal(found[WORK_KEY][name], count) for name, count in whole[WORK_KEY].items())


def test_scores_are_those_of_the_models_on_the_clients_samples(result: Result) -> None:
    job, server, wanted = result.job, result.state.server, dict[Any, Any]()
    shared, down = job.algorithm.global_model(server), job.down(server, 1)
    rows = {"global": shared.expand(job.n, -1), "personal": personal_models(job, down, 1, torch.arange(job.n))}
    sizes = {part: job.eval_fed.sizes(part).double() for part in ("train", "test")}
    for model, part in ((model, part) for model in rows for part in sizes):
        each = [by_hand(result, row, part, i) for i, row in enumerate(rows[model])]
        hits, losses = (torch.tensor(v, dtype=torch.float64) for v in zip(*each, strict=True))
        wanted[model, part] = {"accuracy": hits / sizes[part], "loss": losses}
    whole = scored(result, [17])
    check({key: whole[key] for key in wanted}, wanted, sizes)


def test_recovery_counts_no_round_of_one_planted_group() -> None:
    """Clusters that are recovered in every round have NMI 1 on average: a cohort of one group shows none of them."""
    fed = Clusters(classes=(4, 6), sizes=(4, 6), per_class=25)(load("digits"), seed=0)
    cohorts = [[0, 1, 5, 6], [0, 1, 2, 3], [4, 5, 6, 7], [2, 3, 8, 9], [0, 1, 2, 3]]
    run = simulate(
        "equitable-fl", fed, MLP(hidden=(20,)), rounds=len(cohorts), cohorts=cohorts, local=LocalSGD(lr=0.1, epochs=3),
        evaluate=Evaluate(every=1),
    )  # fmt: skip
    nmi = {r.round: float(r.values[0]) for r in run.state.records.items if r.metric == "nmi"}
    assert nmi == {1: 1.0, 4: 1.0}


def test_where_a_class_is_rare_the_hybrid_model_is_the_one_of_less_loss() -> None:
    """With one event in fifty every model has the accuracy of no event at all; of classes accuracy decides (FLAME)."""
    y = torch.zeros(100, dtype=torch.long)
    y[[3, 60]] = 1
    owner = torch.arange(100) // 50
    fine, poor = (torch.full((100, 1), -4.0) + shift * y[:, None] for shift in (3.0, -3.0))
    binary = make_task(SimpleNamespace(task="binary", classes=("0", "1"), y=y))
    personal, shared = (binary.metrics(torch.where(owner[:, None] == k, fine, poor), y, owner, 2) for k in (0, 1))
    assert torch.equal(personal["accuracy"], shared["accuracy"])
    chosen = choose_model({("personal", "validation"): personal, ("global", "validation"): shared}, "validation")
    assert chosen.tolist() == [False, True]
    classes = {"accuracy": torch.tensor([0.5, 0.6]), "loss": torch.tensor([1.0, 1.0])}
    others = {"accuracy": torch.tensor([0.6, 0.5]), "loss": torch.tensor([2.0, 0.5])}
    chosen = choose_model({("personal", "test"): classes, ("global", "test"): others}, "test")
    assert chosen.tolist() == [True, False]


def test_a_client_whose_personal_model_alone_has_no_figure_takes_the_global_one() -> None:
    none = float("nan")
    personal, shared = (
        {"accuracy": torch.tensor(values)} for values in ([none, none, 0.2, 0.2], [0.1, none, none, 0.1])
    )
    chosen = choose_model({("personal", "test"): personal, ("global", "test"): shared}, "test")
    assert chosen.tolist() == [True, False, False, False]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))


@pytest.mark.parametrize("statistics", ["averaged", "own"])
def test_whose_statistics_a_global_model_is_scored_with(statistics: Any) -> None:
    """By hand: a layer's inputs of training samples, of one client or of each client of the round."""
    fed = Dirichlet(clients=5, alpha=0.3, min_size=9)(load("digits"), seed=0)
    evaluate = Evaluate(every=1, batchnorm_stats=statistics)
    result = simulate("fedavg", fed, normalised, rounds=2, local=LOCAL, evaluate=evaluate)
    module = result.models["global"]
    [norm] = [m for m in module.modules() if isinstance(m, nn.BatchNorm1d)]
    front = nn.Sequential(module[0], module[1])
    inputs = [front(fed.fetch(fed.indices("train", i))).detach() for i in range(fed.n)]
    sizes = fed.sizes("train").double()
    means, variances = (torch.stack([f(x) for x in inputs]) for f in (lambda x: x.mean(0), lambda x: x.var(0)))
    share = (sizes / sizes.sum())[:, None]
    for i in range(fed.n):
        own = (means[i], variances[i])
        mean, variance = own if statistics == "own" else ((share * v).sum(0) for v in (means, variances))
        norm.running_mean, norm.running_var = mean.float(), variance.float()
        index = fed.indices("test", i)
        loss = torch.nn.functional.cross_entropy(module.eval()(fed.fetch(index)), fed.data.y[index])
        assert float(loss.detach()) == pytest.approx(float(result.final("global", "loss")[i]), rel=1e-4)
    whose = {"averaged": "average over the round's clients", "own": "the client's own"}[statistics]
    assert any(whose in note for note in result.notes)
    assert not any("normalization" in note for note in simulate("fedavg", fed, rounds=1, local=LOCAL).notes)
