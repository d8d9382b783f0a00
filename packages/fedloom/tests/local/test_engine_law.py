"""The engine law: every oracle trains as a hand-written loop does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import handwritten
import pytest
import torch
from engine_cases import CASES, TOLERANCE, M, Problem, Setting, make_work, oracles_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import kernels
from fedloom.data import Federation
from fedloom.local import LocalSGD, descend
from fedloom.local.oracles import Fused, make_oracle, products
from fedloom.models import MLP
from fedloom.tasks import Objective, make_task

SETTINGS = {
    "plain": Setting({"lr": 0.3}),
    "two epochs": Setting({"lr": 0.2, "epochs": 2}),
    "steps": Setting({"lr": 0.2, "steps": 5}),
    "full batch": Setting({"lr": 0.2, "batch_size": "full", "epochs": 3}),
    "batch of one": Setting({"lr": 0.05, "batch_size": 1, "steps": 4}),
    "momentum": Setting({"lr": 0.1, "momentum": 0.9, "epochs": 2}),
    "decay": Setting({"lr": 0.2, "weight_decay": 0.1, "epochs": 2}),
    "clip": Setting({"lr": 0.5, "clip": 0.05}),
    "schedule": Setting({"lr": 0.4, "schedule": "exponential", "decay": 0.5, "epochs": 2}, round=3),
    "own rate": Setting({"lr": 0.4}, lr=0.07),
    "pull": Setting({"lr": 0.2, "epochs": 2}, pulls=(("number", "d"),)),
    "pulls": Setting({"lr": 0.2, "epochs": 2}, pulls=(("number", "d"), ("rows", "md"))),
    "pull per coordinate": Setting({"lr": 0.05, "epochs": 2}, pulls=(("d", "d"), ("md", "md"), ("rows", "md"))),
    "pull per coordinate, with momentum, decay, clip, mask and prox": Setting(
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.05, "clip": 0.3}, pulls=(("md", "d"),), mask="d", soft="md"
    ),
    "shift d": Setting({"lr": 0.2}, shift="d"),
    "shift md": Setting({"lr": 0.2}, shift="md"),
    "pull and shift": Setting({"lr": 0.2, "epochs": 2}, pulls=(("rows", "d"),), shift="md"),
    "pull of zero": Setting({"lr": 0.2}, pulls=(("zero", "d"),)),
    "mask d": Setting({"lr": 0.2, "epochs": 2, "weight_decay": 0.1}, mask="d"),
    "mask md": Setting({"lr": 0.2}, mask="md", pulls=(("number", "md"),)),
    "prox": Setting({"lr": 0.2, "epochs": 2}, soft="none"),
    "prox around d": Setting({"lr": 0.2}, soft="d"),
    "prox around md, masked": Setting({"lr": 0.2, "momentum": 0.5}, soft="md", mask="md"),
    "all": Setting(
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.05, "clip": 0.3, "epochs": 2},
        round=2,
        pulls=(("rows", "md"), ("number", "d")),
        shift="d",
        mask="d",
        soft="md",
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_every_oracle_trains_as_the_handwritten_loop(case: str, setting: str) -> None:
    problem = Problem(CASES[case])
    expected = problem.by_hand(SETTINGS[setting])
    assert (expected - problem.start).abs().max() > 1e-3
    for name in oracles_of(problem):
        got = problem.by_engine(problem.oracle(name), SETTINGS[setting])
        torch.testing.assert_close(got, expected, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("setting", ["two epochs", "momentum", "clip", "pull and shift", "mask md", "all"])
@pytest.mark.parametrize("case", ["softmax", "mlp", "mlp dropout"])
def test_batched_products_train_as_compiled_ones(monkeypatch: pytest.MonkeyPatch, case: str, setting: str) -> None:
    problem = Problem(CASES[case])
    used: list[type[products.Products]] = []
    for kind in (products.BatchedProducts, products.CompiledProducts):
        init = kind.__init__

        def spy(self: products.Products, *args: Any, kind: type = kind, init: Any = init) -> None:
            used.append(kind)
            init(self, *args)

        monkeypatch.setattr(kind, "__init__", spy)
    compiled = problem.by_engine(problem.oracle("compiled"), SETTINGS[setting])
    assert set(used) == {products.CompiledProducts}
    used.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Fused, "loop_for", lambda *_: None)
        stepwise = problem.by_engine(problem.oracle("compiled"), SETTINGS[setting])
    assert set(used) == {products.CompiledProducts}
    torch.testing.assert_close(stepwise, compiled, **TOLERANCE)
    used.clear()
    monkeypatch.setattr(products.CompiledProducts, "fits", lambda _: False)
    batched = problem.by_engine(problem.oracle("compiled"), SETTINGS[setting])
    assert set(used) == {products.BatchedProducts}
    torch.testing.assert_close(batched, compiled, **TOLERANCE)
    torch.testing.assert_close(batched, problem.by_hand(SETTINGS[setting]), **TOLERANCE)


def test_rows_that_are_scattered_in_memory_are_changed_in_place() -> None:
    problem = Problem(CASES["mlp"])
    oracle = problem.oracle("compiled")
    work = make_work(oracle, LocalSGD(batch_size="full"))
    batch = work.plan("local", work.steps[:, 0]).batch(0)
    w = problem.start.clone()
    wide = torch.zeros(M, w.shape[1] + 3, dtype=w.dtype)
    scattered = wide[:, :-3]
    scattered.copy_(w)
    work.addgrad_(w, w, batch, 0.5, -0.1)
    work.addgrad_(scattered, scattered, batch, 0.5, -0.1)
    torch.testing.assert_close(scattered, w, **TOLERANCE)
    assert not wide[:, -3:].any()


def test_fused_is_tested_on_what_it_can_do() -> None:
    assert {name for name in CASES if "compiled" in oracles_of(Problem(CASES[name]))} >= {
        "softmax",
        "mlp",
        "mlp dropout",
    }
    assert "compiled" not in oracles_of(Problem(CASES["cnn"]))


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
@pytest.mark.parametrize("name", ["compiled", "vmap", "loop"])
def test_all_tasks(task: str, name: str) -> None:
    problem = Problem(CASES["mlp"], task=task)
    setting = Setting({"lr": 0.1, "epochs": 2, "weight_decay": 0.01}, pulls=(("rows", "d"),))
    got = problem.by_engine(problem.oracle(name), setting)
    torch.testing.assert_close(got, problem.by_hand(setting), **TOLERANCE)


@pytest.mark.parametrize("case", ["softmax", "mlp dropout", "cnn"])
def test_float32_is_float64_to_its_precision(case: str) -> None:
    wide, narrow = Problem(CASES[case]), Problem(CASES[case], dtype=torch.float32)
    for name in oracles_of(wide):
        for setting in ("two epochs", "all"):
            got = narrow.by_engine(narrow.oracle(name), SETTINGS[setting])
            assert got.dtype == torch.float32
            expected = wide.by_engine(wide.oracle(name), SETTINGS[setting])
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["mlp dropout", "cnn dropout"])
@pytest.mark.parametrize("setting", ["two epochs", "all"])
def test_a_row_depends_on_its_client_only(case: str, setting: str) -> None:
    problem = Problem(CASES[case])
    for name in oracles_of(problem):
        oracle = problem.oracle(name)
        together = problem.by_engine(oracle, SETTINGS[setting])
        for i in range(M):
            alone = problem.by_engine(oracle, SETTINGS[setting], [i])
            torch.testing.assert_close(alone[0], together[i], **TOLERANCE)
        order = [2, 0, 3, 1]
        torch.testing.assert_close(problem.by_engine(oracle, SETTINGS[setting], order), together[order], **TOLERANCE)
        twice = problem.by_engine(oracle, SETTINGS[setting])
        assert torch.equal(twice, together)


@settings(max_examples=40)
@given(data=st.data())
def test_any_combination(data: st.DataObject) -> None:
    local = {
        "lr": data.draw(st.sampled_from([0.05, 0.2])),
        "momentum": data.draw(st.sampled_from([0.0, 0.7])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1])),
        "clip": data.draw(st.sampled_from([None, 0.1])),
        "batch_size": data.draw(st.sampled_from([1, 3, 19, 20, 53, 60, "full"])),
        "epochs": data.draw(st.integers(0, 2)),
    }
    pull = st.tuples(st.sampled_from(["number", "rows", "zero", "d", "md"]), st.sampled_from(["d", "md"]))
    vector = st.sampled_from(["", "d", "md"])
    setting = Setting(
        local,
        round=data.draw(st.integers(1, 3)),
        pulls=tuple(data.draw(st.lists(pull, max_size=2))),
        shift=data.draw(vector),
        mask=data.draw(vector),
        soft=data.draw(st.sampled_from(["", "none", "d", "md"])),
    )
    problem = Problem(CASES[data.draw(st.sampled_from(["softmax", "mlp"]))])
    expected = problem.by_hand(setting)
    wide = {"rtol": 0.0, "atol": TOLERANCE["atol"] * max(1.0, float(expected.abs().max()))}
    for name in oracles_of(problem):
        torch.testing.assert_close(problem.by_engine(problem.oracle(name), setting), expected, **wide)


def normalised(stored: torch.dtype) -> Federation:
    """A federation of whole numbers up to 255, stored in a type, that are normalised when they are fetched."""
    fed = handwritten.federation(dtype=torch.float32)
    x = torch.randint(0, 256, fed.data.x.shape, generator=torch.Generator().manual_seed(1)).to(stored)
    return replace(fed, data=replace(fed.data, x=x, mean=torch.full((6,), 0.4), std=torch.full((6,), 90.0)))


@pytest.mark.parametrize("stored", [torch.uint8, torch.float32])
@pytest.mark.parametrize("weights", ["", "balanced"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_all_steps_at_once_are_the_steps(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, weights: str, momentum: float
) -> None:
    """Of samples stored as bytes or as numbers, with weights of classes and of clients, for short batches too."""
    fed = normalised(stored)
    module = MLP(hidden=(9, 5)).build((6,), 4, seed=3)
    task = make_task(fed.data, Objective(class_weights=weights or None))
    oracle = make_oracle(module, task, fed, "compiled")
    start = oracle.layout.vector(oracle.module).expand(M, -1)
    scale = torch.tensor([[1.0], [0.5], [2.0], [1.0]])

    def train(steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        work = make_work(oracle, LocalSGD(lr=0.1, batch_size=8, momentum=momentum, weight_decay=0.01), seed=2)
        got = descend(start, work, pull=((0.3, start[0]),), scale=scale, steps=steps)
        return got, work.counts.backward

    steps = torch.tensor([[3], [0], [5], [1]])
    assert oracle.loop_for(start.contiguous()) is not None
    got, counted = train(steps)
    monkeypatch.setattr(Fused, "loop_for", lambda *_: None)
    expected, samples = train(steps)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(counted, samples)
    assert torch.equal(got[1], start[1])


@pytest.mark.parametrize("stored", [torch.uint8, torch.float32])
@pytest.mark.parametrize("weights", ["", "balanced"])
@pytest.mark.parametrize("block", [4, 128])
def test_a_pass_through_the_whole_network_is_its_layers(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, weights: str, block: int
) -> None:
    """Block by block too: gradients into other rows, with what they held, and steps in place; and losses."""
    fed = normalised(stored)
    task = make_task(fed.data, Objective(class_weights=weights or None))
    oracle = make_oracle(MLP(hidden=(9, 5)).build((6,), 4, seed=3), task, fed, "compiled")
    work = make_work(oracle, LocalSGD(lr=0.1, batch_size="full"))
    monkeypatch.setattr(kernels, "BLOCK_SAMPLES", block)
    w, before, steady = torch.randn(3, M, oracle.layout.d, generator=torch.Generator().manual_seed(1))
    batch, beta = work.plan("local", work.steps[:, 0]).batch(0), torch.tensor([[0.0], [1.0], [0.5], [-2.0]])
    assert int(batch.count.max()) > 4 > int(batch.count.min())

    def gradients() -> list[torch.Tensor]:
        out, stepped = before.clone(), w.clone()
        work.addgrad_(out, w, batch, beta, -0.3, steady)
        work.addgrad_(stepped, stepped, batch, 0.9, -0.1, steady[:1].expand(M, -1))
        return [out, stepped, work.full_grad(w), work.add_full_grad_(before.clone(), w), work.loss(w)]

    passes: list[object] = []
    add = products.CompiledProducts.add_gradients_
    monkeypatch.setattr(products.CompiledProducts, "add_gradients_", lambda self, *a: (passes.append(a), add(self, *a)))
    got = gradients()
    assert len(passes) == 4
    monkeypatch.setattr(products.CompiledProducts, "fits", lambda _: False)
    expected = gradients()
    assert len(passes) == 4
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    fed = handwritten.federation(dtype=torch.float32)
    for hidden in ((), (9,)):
        oracle = make_oracle(MLP(hidden=hidden).build((6,), 4), make_task(fed.data), fed, "compiled")
        start = oracle.layout.vector(oracle.module).repeat(M, 1)
        start[2, 0] = torch.nan
        start[3, 0] = torch.inf
        got = descend(start, make_work(oracle, LocalSGD(lr=0.1, batch_size=8)))
        assert got.isfinite().all(1).tolist() == [True, True, False, False]


@pytest.mark.parametrize("case", ["mlp dropout", "mlp tanh"])
def test_all_steps_are_not_taken_at_once_where_the_loop_has_no_part_for_it(case: str) -> None:
    problem = Problem(CASES[case])
    assert problem.oracle("compiled").loop_for(problem.start) is None
    softmax = Problem(CASES["softmax"], task="binary")
    assert softmax.oracle("compiled").loop_for(softmax.start) is None
    plain = Problem(CASES["softmax"])
    assert plain.oracle("compiled").loop_for(plain.start.half()) is None
