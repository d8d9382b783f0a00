"""FairFed's weights and the options of the equitable weigher, against their equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from fedloom import Evaluate, simulate
from fedloom.algorithms import REGISTRY, FedAvg, PresetMethod
from fedloom.choose import EquitableWeigher, FairFedWeigher, SamplesWeigher, UniformWeigher
from fedloom.data import Dataset, load
from fedloom.data.partitions import Dirichlet, Natural
from fedloom.errors import ConfigError, Refused
from fedloom.local import Ctx, LocalSGD, Work
from fedloom.local.oracles import make_oracle
from fedloom.models import make_spec
from fedloom.tasks import make_task
from fedloom.testing import Problem, federate
from fedloom.testing.federate import ReferenceFederation


def context(p: Problem, ids: list[int]) -> Ctx:
    return ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(1, ids)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_uniform_and_samples() -> None:
    p = Problem.random(0)
    ctx = context(p, [3, 1])
    torch.testing.assert_close(UniformWeigher().apply((), None, ctx)[0], column(1.0, 1.0))  # type: ignore[arg-type]
    torch.testing.assert_close(SamplesWeigher().apply((), None, ctx)[0], column(*p.sizes[[3, 1]].tolist()))  # type: ignore[arg-type]


def test_fairfed_follows_equation_7() -> None:
    p = Problem.random(0)
    weigher, ids, metric = FairFedWeigher(beta=0.2, floor=False), [4, 0, 3], [0.9, 0.2, 0.6]
    n = p.sizes.double()
    omega = {i: float(n[i] / n.sum()) for i in range(p.n)}
    state = weigher.init(context(p, ids))
    for _ in range(3):
        centre = sum(float(n[i]) * a for i, a in zip(ids, metric, strict=True)) / sum(float(n[i]) for i in ids)
        gap = [abs(a - centre) for a in metric]
        for i, g in zip(ids, gap, strict=True):
            omega[i] -= 0.2 * (g - sum(gap) / 3)
        shares, state = weigher.apply(state, column(*metric), context(p, ids))
        torch.testing.assert_close(shares, column(*(omega[i] for i in ids)), rtol=0, atol=1e-12)
        torch.testing.assert_close(state.omega, column(*omega.values())[:, 0], rtol=0, atol=1e-12)
        assert float(state.omega.sum()) == pytest.approx(1.0, abs=1e-12)
        metric = metric[1:] + metric[:1]


def test_fairfed_at_the_floor() -> None:
    p = Problem.random(0)
    ids = [0, 1, 2]
    ctx, metric = context(p, ids), column(1.0, 0.0, 0.5)
    below, free = FairFedWeigher(beta=5.0, floor=False).apply(FairFedWeigher().init(ctx), metric, ctx)
    floored, state = FairFedWeigher(beta=5.0).apply(FairFedWeigher().init(ctx), metric, ctx)
    assert float(below.min()) < 0
    torch.testing.assert_close(floored, below.clamp(min=0))
    torch.testing.assert_close(state.omega, free.omega.clamp(min=0))


def test_fairfed_falls_back_on_samples_where_no_weight_is_left() -> None:
    p = Problem.random(0)
    ctx = context(p, [0, 1])
    for omega in (torch.zeros(p.n, dtype=torch.float64), torch.full((p.n,), -1.0, dtype=torch.float64)):
        weigher = FairFedWeigher(beta=0.0, floor=False)
        shares, _ = weigher.apply(type(weigher.init(ctx))(omega), column(0.5, 0.5), ctx)
        torch.testing.assert_close(shares[:, 0], p.sizes[[0, 1]].double())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fairfed_without_budget_is_fedavg_by_samples(seed: int) -> None:
    p, cohorts = Problem.random(seed), [(0, 1), (1, 3, 4), (2,)]
    made = REGISTRY["fairfed"](beta=0.0, metric="loss")
    assert isinstance(made, PresetMethod)
    options = {"local": LocalSGD(lr=0.1, batch_size=2), "noise": 0.5, "cohorts": cohorts}
    got = federate(made.algorithm, p, 3, weigher=made.weigher, **options)[-1]
    want = federate(FedAvg(), p, 3, weigher=SamplesWeigher(), **options)[-1]
    torch.testing.assert_close(got.server.x, want.server.x, rtol=0, atol=1e-12)


def test_fairfed_asks_about_the_received_model() -> None:
    p = Problem.random(1)
    fed = ReferenceFederation(p.oracle(), p.alpha, LocalSGD())
    down = FedAvg().down(FedAvg().init(p.x0, fed.ctx(0, [0]))[0], None, fed.ctx(1, [0, 2]))
    got = FairFedWeigher(metric="loss").probe(down, p.minimiser[[0, 2]], fed.work(1, [0, 2]))
    torch.testing.assert_close(got, fed.work(1, [0, 2]).loss(p.x0))
    with pytest.raises(Refused, match="this task has no classes. Use the loss"):
        FairFedWeigher().probe(down, p.x0, fed.work(1, [0, 2]))


@pytest.fixture(scope="module")
def digits() -> Work:
    fed = Dirichlet(clients=5, alpha=0.5, min_size=5)(load("digits"), seed=0).to("cpu", torch.float64)
    module = make_spec("mlp", hidden=[6]).build(tuple(fed.data.shape), make_task(fed.data).outputs, 0)
    oracle = make_oracle(module, make_task(fed.data), fed, "loop")
    return Work(oracle, torch.tensor([1, 3]), torch.full((2, 1), 0.2), LocalSGD(batch_size=7, epochs=2), round=2)


def test_accuracy_is_that_of_the_training_part_and_is_counted(digits: Work) -> None:
    oracle = digits.oracle
    w = torch.stack([oracle.layout.vector(oracle.module, torch.float64) * k for k in (1.0, -2.0)])  # type: ignore[attr-defined]
    fresh = digits.take(slice(None))
    before = fresh.counts.forward.clone()
    got = fresh.accuracy(w)
    for k, i in enumerate(fresh.ids.tolist()):
        index = oracle.fed.indices("train", i)  # type: ignore[attr-defined]
        z = oracle.run(w[k], oracle.fed.fetch(index))  # type: ignore[attr-defined]
        hits = [float(z[j].argmax() == oracle.fed.targets(index)[j]) for j in range(len(index))]  # type: ignore[attr-defined]
        assert float(got[k]) == pytest.approx(sum(hits) / len(hits), abs=1e-12)
    assert (fresh.counts.forward - before).tolist() == fresh.sizes[:, 0].tolist()


def test_activations_of_the_last_mini_batch(digits: Work) -> None:
    oracle = digits.oracle
    w = torch.stack([oracle.layout.vector(oracle.module, torch.float64) * k for k in (1.0, 2.0)])  # type: ignore[attr-defined]
    work = digits.take(slice(None))
    before = work.counts.forward.clone()
    got = EquitableWeigher(reduce="last_batch", layer="logits").probe(None, w, work)
    assert int((work.counts.forward - before).max()) <= 7
    for k, i in enumerate(work.ids.tolist()):
        steps = int(work.steps[k])
        alone = work.take(slice(k, k + 1)).plan("local", torch.tensor([steps])).batch(steps - 1)
        where = alone.position[0, : int(alone.count[0])]
        z = oracle.run(w[k], oracle.fed.fetch(oracle.fed.indices("train", i)[where]))  # type: ignore[attr-defined]
        torch.testing.assert_close(got[k], (z - z.logsumexp(1, keepdim=True)).mean(0))
    assert not torch.allclose(got, EquitableWeigher(layer="logits").probe(None, w, work))
    raw = EquitableWeigher(reduce="last_batch", layer="logits", log_softmax=False).probe(None, w, work)
    assert not torch.allclose(raw, got)


@pytest.mark.parametrize("metric", ["equal-opportunity", "statistical-parity"])
def test_fairfed_by_groups_follows_the_paper(metric: str) -> None:
    """Two rounds from Algorithm 1: F of the pooled samples, F_i of each client, accuracies where F_i has no value."""
    rng = np.random.default_rng(4)
    group, clients = rng.integers(0, 2, 160), np.repeat([0, 1, 2, 3], 40)
    group[clients == 3] = 1  # this client has one group only, so its metric has no value
    x = np.column_stack([rng.normal(group, 1), rng.normal(0, 1, 160)])
    y = (x[:, 0] + 0.5 * clients * x[:, 1] + rng.normal(0, 1, 160) > 0.3).astype(int)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "sex": np.where(group, "m", "f"), "site": clients, "y": y})
    data = Dataset.create(frame, target="y", client_column="site", drop=("sex",), group_columns=("sex",))
    fed = Natural(test=0.2)(data, seed=0)
    weigher = FairFedWeigher(beta=0.3, metric=metric, group="sex", floor=False)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "local": LocalSGD(lr=0.5),
        "evaluate": Evaluate(every=1),
        "aggregation_weights": weigher,
    }
    runs = [simulate(FedAvg(), fed, "softmax", rounds=t, **options) for t in (1, 2)]
    module = make_spec("softmax").build(tuple(fed.data.shape), make_task(fed.data).outputs, 0)
    start = runs[0].job.oracle.layout.vector(module)
    parts = [fed.indices("train", i) for i in range(4)]
    n = np.array([len(part) for part in parts], float)
    omega = n / n.sum()
    for received, result in zip((start, runs[0].state.server.x), runs, strict=True):
        predicted, truth, sex = [], [], []
        for part in parts:
            rows = fed.fetch(part)
            predicted.append((rows @ received[:-1].reshape(-1) + received[-1] > 0).int().numpy())
            truth.append(fed.targets(part).numpy())
            sex.append(group[part.numpy()])

        def difference(guess: Any, label: Any, of: Any) -> float:
            def rate(a: int) -> float:
                chosen = (of == a) & (label == 1) if metric == "equal-opportunity" else of == a
                return float(guess[chosen].mean()) if chosen.any() else float("nan")

            return rate(0) - rate(1)

        pooled = difference(*map(np.concatenate, (predicted, truth, sex)))
        accuracy = np.array([(g == t).mean() for g, t in zip(predicted, truth, strict=True)])
        apart = [abs(difference(*own) - pooled) for own in zip(predicted, truth, sex, strict=True)]
        assert np.isnan(apart).tolist() == [False, False, False, True]
        gap = np.where(np.isnan(apart), abs(accuracy - (n * accuracy).sum() / n.sum()), apart)
        omega = omega - 0.3 * (gap - gap.mean())
        np.testing.assert_allclose(result.state.weigher.omega, omega, atol=1e-6)
    assert abs(omega - n / n.sum()).max() > 0.01


@pytest.mark.parametrize(
    ("weigher", "sentence"),
    [
        ({}, "compares two groups of rows. Set group, for example"),
        ({"group": "ward"}, "'ward' defines 3 groups"),
        ({"group": "sexx"}, "sexx"),
    ],
)
def test_fairfed_by_groups_needs_two_of_them(weigher: dict[str, Any], sentence: str) -> None:
    frame = pd.DataFrame({"a": range(30), "ward": ["u", "v", "w"] * 10, "site": [0, 1] * 15, "y": [0, 1, 1] * 10})
    fed = Natural(test=0.2)(
        Dataset.create(frame, target="y", client_column="site", categorical=("ward",), group_columns=("ward",)), seed=0
    )
    chosen = FairFedWeigher(metric="equal-opportunity", **weigher)
    with pytest.raises(ConfigError, match=sentence):
        simulate(FedAvg(), fed, "softmax", rounds=1, aggregation_weights=chosen)
