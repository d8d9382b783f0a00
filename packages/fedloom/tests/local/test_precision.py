"""bfloat16 in the gradients of steps: near the exact ones, rows as before, the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_cases import CASES, Problem
from torch import Tensor, nn

from fedloom.algorithms import FIAELT, FLAME, FedAvg
from fedloom.data import load
from fedloom.data.partitions import Iid
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import Network, make_oracle, precision
from fedloom.local.oracles.looped import Looped
from fedloom.local.oracles.precision import find_product_parameters
from fedloom.models import CNN, MLP, Softmax
from fedloom.tasks import make_task

SMALL = CNN(channels=(4,), kernel=3, hidden=(8,))


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without the instructions computes the same, slowly."""
    monkeypatch.setattr(precision, "has_bf16", lambda device: True)


def oracle_of(problem: Problem, name: str, low: precision.Precision) -> Network:
    return make_oracle(problem.module, make_task(problem.fed.data), problem.fed, name, precision=low)


@pytest.fixture
def switched() -> Iterator[dict[Any, str]]:
    """How a caller has single libraries round float32."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        pytest.skip("PyTorch before 2.9 has no such switches")
    chosen = {backends.mkldnn.matmul: "bf16", backends.cudnn.conv: "ieee"}
    before = {library: library.fp32_precision for library in chosen}
    older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for library, value in chosen.items():
        library.fp32_precision = value
    yield chosen
    for library, value in before.items():
        library.fp32_precision = value
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == older


def test_a_callers_switches_of_single_libraries_are_put_aside_and_back(switched: dict[Any, str]) -> None:
    backends: Any = torch.backends
    with precision.isolate_torch_settings():
        assert backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "highest"  # which PyTorch's exporters read
        for chosen, value in (("tf32", "tf32"), ("full", "ieee")):
            with precision.make_repeatable(torch.device("cuda"), chosen):
                gpu = backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul
                assert [library.fp32_precision for library in gpu] == [value] * 3
                assert backends.mkldnn.matmul.fp32_precision == "ieee"
    assert {library: library.fp32_precision for library in switched} == switched


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_a_callers_rounding_of_products_is_put_aside_and_back(chosen: str) -> None:
    cudnn, before = torch.backends.cudnn, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        with precision.isolate_torch_settings(), precision.make_repeatable(torch.device("cuda"), "full"):
            assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == ("highest", False)
        assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == (chosen, True)
    finally:
        torch.set_float32_matmul_precision(before)


def after_steps(problem: Problem, oracle: Network) -> tuple[Tensor, Tensor]:
    """Rows after a few steps, and the gradient over all samples there."""
    work = Work(oracle, torch.arange(3), torch.full((3, 1), 1 / 3), LocalSGD(lr=0.05, batch_size=4, steps=3), seed=1)
    w = descend(problem.start[:3], work)
    return w, work.full_grad(problem.start[:3])


@pytest.mark.parametrize("name", ["loop", "vmap"])
@pytest.mark.parametrize("case", ["cnn", "cnn dropout"])
@pytest.mark.usefixtures("able")
def test_steps_are_rounded_and_passes_over_all_samples_are_not(name: str, case: str) -> None:
    problem = Problem(CASES[case], torch.float32)
    (exact, gradient), (w, same) = (after_steps(problem, oracle_of(problem, name, p)) for p in ("full", "bf16"))
    assert w.dtype == torch.float32
    moved = exact - problem.start[:3]
    error = (w - exact).norm(dim=1) / moved.norm(dim=1)
    assert bool((error > 0).all())
    assert bool((error < 0.05).all())  # a number of bfloat16 has 8 bits: products are off by 2^-8 each
    assert torch.equal(same, gradient)


@pytest.mark.parametrize("case", ["cnn", "cnn dropout"])
@pytest.mark.usefixtures("able")
def test_parameters_rounded_once_give_the_bits_of_those_rounded_at_every_use(case: str) -> None:
    problem = Problem(CASES[case], torch.float32)
    once, every = (oracle_of(problem, "loop", "bf16") for _ in range(2))
    assert isinstance(once, Looped)
    assert isinstance(every, Looped)
    assert any(once.narrow)
    every.narrow = [False] * len(every.narrow)
    assert torch.equal(after_steps(problem, once)[0], after_steps(problem, every)[0])


def test_parameters_that_another_layer_uses_are_not_rounded_for_it() -> None:
    table, head, norm = nn.Embedding(7, 4), nn.Linear(4, 7), nn.GroupNorm(1, 4)
    module = nn.Sequential(table, norm, head)
    assert find_product_parameters(module, list(module.parameters())) == [False, False, False, True, True]
    head.weight = table.weight
    assert find_product_parameters(module, list(module.parameters())) == [False, False, False, True]


@pytest.mark.usefixtures("able")
def test_the_run_does_not_depend_on_workers() -> None:
    fed = Iid(clients=6)(load("digits"), seed=0)

    def run(workers: int) -> Any:
        return simulate(
            FLAME(),
            fed,
            SMALL,
            rounds=2,
            local=LocalSGD(lr=0.05, batch_size=50),
            evaluate=Evaluate(every=2),
            engine=Engine(precision="bf16", workers=workers, clients_per_batch=1),
        )

    one, two = run(1), run(2)
    assert one.table().equals(two.table())
    assert torch.equal(one.models.rows("personal"), two.models.rows("personal"))
    assert one.job.oracle.low


def refused(method: Any, model: Any, words: str, **engine: Any) -> None:
    fed = Iid(clients=3)(load("digits"), seed=0)
    with pytest.raises(Refused, match=words):
        simulate(method, fed, model, rounds=1, engine=Engine(precision="bf16", **engine))


@pytest.mark.usefixtures("able")
def test_what_bfloat16_does_nothing_for_is_refused_by_name() -> None:
    refused(FedAvg(), Softmax(), "the engine for linear layers uses float32")
    refused(FedAvg(), MLP(hidden=(4,)), "the engine for linear layers uses float32")
    refused(FedAvg(), SMALL, "engine.dtype is 'float64'", dtype="float64")
    refused(FLAME(eps0=0.1), SMALL, "FLAME with eps0 uses full gradients")
    refused(FIAELT(solver="svrg", smooth=1.0), SMALL, "FIAELT with solver 'svrg' uses full gradients")


def test_a_processor_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    refused(FedAvg(), SMALL, "no bfloat16 instructions, so bfloat16")
    for name in precision.BFLOAT16_INSTRUCTIONS:
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda name=name: {name: True})
        assert precision.has_bf16(torch.device("cpu"))
