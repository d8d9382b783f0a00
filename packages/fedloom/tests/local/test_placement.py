"""Runs on an accelerator that is only pretended (`pretend`): all lies where it must, with the values of the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch

from fedloom.algorithms import REGISTRY
from fedloom.choose import Uniform
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Refused, Stop
from fedloom.local import LocalSGD
from fedloom.models import CNN, MLP
from tests.engine.test_matrix import KINDS, choices_of, in_groups

MODELS: dict[str, Any] = {
    "compiled": MLP(hidden=(12,), dropout=0.2),
    "vmap": CNN(channels=(4,), kernel=3, hidden=(8,), norm="group"),
    "loop": CNN(channels=(4,), kernel=3, hidden=(8,), norm="batch"),
}


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Iid(clients=6, max_train_per_client=100)(load("digits"), seed=0)


@pytest.fixture(scope="module")
def nine() -> Federation:
    """Nine clients in two groups."""
    return in_groups(Iid(clients=9, max_train_per_client=180)(load("digits"), seed=0))


def run(fed: Federation, method: str, oracle: str, device: str) -> Any:
    return simulate(
        method,
        fed,
        MODELS[oracle],
        rounds=2,
        local=LocalSGD(lr=0.05, batch_size=32),
        sampler=Uniform(clients=4),
        evaluate=Evaluate(every=1),
        engine=Engine(device=device, gradient_engine=oracle if device == "cpu" else "auto", dtype="float64"),
    )


def test_a_pretended_device_refuses_to_meet_the_cpu() -> None:
    with pretend.accelerator():
        there, here = torch.ones(3, device="cuda:0"), torch.ones(3)
        assert there.device == pretend.DEVICE
        assert (2 * there + there.new_ones(3)).cpu().tolist() == [3, 3, 3]
        for meet in (lambda: there + here, lambda: there[None] @ here, lambda: here.index_select(0, there.long())):
            with pytest.raises(pretend.Mixed):
                meet()


@pytest.mark.parametrize(
    ("method", "oracle"),
    [
        *((name, "compiled") for name in ("fedavg", "scaffold", "flame", "fedacs")),
        ("flame", "vmap"),
        ("fedavg", "loop"),
    ],
)
def test_a_run_on_a_device_gives_what_the_cpu_gives(fed: Federation, method: str, oracle: str) -> None:
    wanted = run(fed, method, oracle, "cpu")
    with pretend.accelerator():
        found = run(fed, method, oracle, "cuda:0")
        assert found.job.oracle.name == oracle
        assert found.job.oracle.device == pretend.DEVICE
        table = found.table()
        rows = {kind: found.models.rows(kind) for kind in found.models.kinds()}
    assert table.drop(["value"]).equals(wanted.table().drop(["value"]))
    for kind, row in rows.items():
        torch.testing.assert_close(row, wanted.models.rows(kind), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_method_keeps_to_the_device(fed: Federation, name: str) -> None:
    with pretend.accelerator():
        method = REGISTRY[name](**({"layers": ("fc1.bias",)} if name == "fedbn" else {}))
        assert simulate(
            method,
            fed,
            MODELS["compiled"],
            rounds=1,
            local=LocalSGD(lr=0.05, batch_size=64),
            engine=Engine(device="cuda:0"),
        ).rounds


PAIRS = [
    ("flame", "upload_transform", "top-k"),
    ("afl", "aggregation_weights", "fairfed"),
    ("fedproto", "schedule", "buffered"),
]
"""Methods whose first step reads weights, and whose late uploads change, beside FedAvg."""


@pytest.mark.parametrize(
    ("method", "kind", "name"), [*(("fedavg", kind, name) for kind in KINDS for name in KINDS[kind]), *PAIRS]
)
def test_every_part_keeps_to_the_device(nine: Federation, method: str, kind: str, name: str, tmp_path: Path) -> None:
    choices = {"sampler": Uniform(clients=9), **choices_of(kind, name, root=0)}
    choices |= {"client_weights": "clusters-2"} if name == "forged-activations" else {}

    class Killed(BaseException):
        pass

    def kill(state: Any) -> None:
        if state.round == 2:
            raise Killed

    engine, local = Engine(device="cuda:0", checkpoint_every=1e-9), LocalSGD(lr=0.05, batch_size=64)
    choices |= {"rounds": 3, "local": local, "engine": engine, "folder": tmp_path}
    with pretend.accelerator():
        with pytest.raises(Killed):
            simulate(method, nine, MODELS["compiled"], callbacks=[kill], **choices)
        assert simulate(method, nine, MODELS["compiled"], **choices).stop is Stop.DONE


@pytest.mark.parametrize("name", ["flame", "ditto", "fedrep", "fedacs", "fedslr", "apfl"])
def test_a_new_client_adapts_a_run_of_the_device(fed: Federation, name: str) -> None:
    found = run(fed, name, "compiled", "cpu").models.adapt(load("digits"), steps=2).row
    with pretend.accelerator():
        result = run(fed, name, "compiled", "cuda:0")
        row = result.models.adapt(load("digits"), steps=2).row
    torch.testing.assert_close(row, found, rtol=1e-9, atol=1e-9)


def test_a_device_that_is_not_there_is_refused(fed: Federation) -> None:
    with (
        pretend.accelerator(),
        pytest.raises(ConfigError, match=r"'cuda:1', but this machine has 1 \(numbered from 0\)"),
    ):
        simulate("fedavg", fed, MODELS["compiled"], rounds=1, engine=Engine(device="cuda:1"))


def test_forked_workers_are_refused_on_a_device(fed: Federation) -> None:
    with (
        pretend.accelerator(),
        pytest.raises(Refused, match=r"is 2, but workers are forks .*\. Omit engine\.workers, or start one"),
    ):
        simulate("fedavg", fed, MODELS["compiled"], rounds=1, engine=Engine(device="cuda:0", workers=2))


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).parents[4] / "benchmarks" / "gpu.py"
    return subprocess.run([sys.executable, str(program), *options], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_gpus_refuses_without_one() -> None:
    found = benchmark()
    assert found.returncode == 1
    assert found.stderr == "benchmarks/gpu.py needs a CUDA device, and torch finds none; nothing was measured\n"


def test_the_benchmark_of_gpus_refuses_a_graph_by_a_sentence_and_goes_on() -> None:
    small = ("--device", "cpu", "--workload", "softmax", "--clients", "2", "--rounds", "1", "--steps", "1")
    found = benchmark(*small)
    assert found.returncode == 0, found.stderr
    assert found.stderr == "softmax, 2 clients, captured, float32: graphs are captured on CUDA devices only\n"
    cells = found.stdout.splitlines()[-1].split("|")[4:10]
    assert [float(cell) > 0 for cell in cells] == [True, True, False, True, False, True]
