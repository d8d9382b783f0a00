"""Runs on a GPU: in double precision they give what the CPU gives, the same bits again, and the same after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.errors import Stop
from fedloom.local import LocalSGD
from fedloom.models import CNN, LSTM, MLP, Adapters, ModelSpec, ResNet18, Transformer
from tests.engine.test_matrix import KINDS, choices_of, in_groups
from tests.local.test_sequences import federation

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = "cuda:0"
LOCAL = LocalSGD(lr=0.05, batch_size=16, steps=3)
PARTS: dict[str, dict[str, Any]] = {"fedem": {"mixture": 3}, "gpfl": {"guided": True}, "knn-per": {"memory": 16}}
"""Parts of the network that methods ask for."""
NETWORKS: dict[str, tuple[ModelSpec, str]] = {
    "linear layers": (MLP(hidden=(12, 8), dropout=0.2), "compiled"),
    "group normalisation": (CNN(channels=(4,), kernel=3, hidden=(8,), norm="group", dropout=0.1), "vmap"),
    "batch normalisation": (CNN(channels=(4,), kernel=3, hidden=(8,), norm="batch"), "loop"),
    "mixture": (MLP(hidden=(12,), mixture=2), "vmap"),
    "guided": (MLP(hidden=(12,), guided=True), "vmap"),
    "memory": (MLP(hidden=(12,), memory=8), "vmap"),
    "adapters": (MLP(hidden=(12,), adapters=Adapters(rank=2, on="linear")), "vmap"),
}
"""Networks, and the oracle that a GPU takes for them."""
SEQUENCES = {"lstm": LSTM(embedding=4, hidden=6, layers=2), "transformer": Transformer(width=8, layers=2, heads=2)}


@pytest.fixture(scope="module")
def fed() -> Federation:
    """Pictures of nine clients, each in a group."""
    return in_groups(fl.partitions.iid(clients=9, max_train_per_client=360)(load("digits"), seed=0))


def run(method: Any, fed: Federation, model: ModelSpec, device: str, dtype: str = "float64", **choices: Any) -> Any:
    """Three rounds on a device, every one evaluated."""
    engine = {"device": device, "dtype": dtype, **choices.pop("engine", {})}
    setting = {"rounds": 3, "local": LOCAL, "sampler": {"clients": 4}, "evaluate": {"every": 1}, **choices}
    return fl.simulate(method, fed, model, seed=5, engine=engine, **setting)


def agree(found: Any, wanted: Any, tolerance: float = 1e-8) -> None:
    """Check that two runs measured and learned the same, up to rounding."""
    assert (found.stop, found.detail) == (wanted.stop, wanted.detail)
    assert found.table().drop(["value"]).equals(wanted.table().drop(["value"]))
    values = [np.array(run.table()["value"], dtype=float) for run in (found, wanted)]
    np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance)
    assert found.models.kinds() == wanted.models.kinds()
    for kind in wanted.models.kinds():
        rows = found.models.rows(kind)
        torch.testing.assert_close(rows.cpu(), wanted.models.rows(kind), rtol=tolerance, atol=tolerance)


def same_bits(one: Any, other: Any) -> None:
    """Check that two runs have the same tables and models, bit by bit."""
    tables = [run.table() for run in (one, other)]
    assert tables[0].drop(["value"]).equals(tables[1].drop(["value"]))
    np.testing.assert_array_equal(*(table["value"].to_numpy() for table in tables))
    for kind in one.models.kinds():
        assert torch.equal(one.models.rows(kind), other.models.rows(kind)), kind


def made(name: str) -> Any:
    return REGISTRY[name](**({"layers": ("fc1.bias",)} if name == "fedbn" else {}))


@pytest.mark.parametrize("name", sorted({*REGISTRY} - {"fedspa"}))  # pixels that are always 0 tie in its masks
def test_every_method_gives_what_the_cpu_gives(fed: Federation, name: str) -> None:
    network = MLP(hidden=(12, 8), **PARTS.get(name, {}))
    found, wanted = (run(made(name), fed, network, device) for device in (DEVICE, "cpu"))
    assert found.job.oracle.device == torch.device(DEVICE)
    agree(found, wanted)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_method_gives_the_same_bits_again_and_after_a_kill(fed: Federation, name: str, tmp_path: Path) -> None:
    network = MLP(hidden=(12, 8), **PARTS.get(name, {}))
    whole = run(made(name), fed, network, DEVICE, "float32")

    def killed(state: Any) -> None:
        if state.round == 2:
            raise KeyboardInterrupt

    always = {"checkpoint_every": 1e-6}
    with pytest.raises(KeyboardInterrupt):
        run(made(name), fed, network, DEVICE, "float32", engine=always, folder=tmp_path, callbacks=[killed])
    same_bits(run(made(name), fed, network, DEVICE, "float32", engine=always, folder=tmp_path), whole)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "flame", "moon", "fedslr"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_gives_what_the_cpu_gives(fed: Federation, network: str, method: str) -> None:
    if (network, method) == ("batch normalisation", "moon"):
        pytest.skip("a term on a representation needs samples apart")
    model, oracle = NETWORKS[network]
    augment = {"flip": 0.5, "crop": 1} if oracle == "vmap" else None
    found, wanted = (run(method, fed, model, device, augment=augment) for device in (DEVICE, "cpu"))
    assert found.job.oracle.name == oracle
    agree(found, wanted)


def test_a_large_network_gives_what_the_cpu_gives(fed: Federation) -> None:
    local = LocalSGD(lr=0.01, batch_size=8, steps=1)
    few = {"rounds": 1, "local": local, "sampler": {"clients": 2}, "evaluate": {"every": 1, "clients": 1}}
    agree(*(run("fedavg", fed, ResNet18(), device, **few) for device in (DEVICE, "cpu")))


@pytest.mark.parametrize("network", SEQUENCES)
def test_sequences_give_what_the_cpu_gives(network: str) -> None:
    choices = {"sampler": {"fraction": 1.0}, "evaluate": {"every": 1, "parts": ("train",)}}
    texts = federation(each=True)
    agree(*(run("fedavg", texts, SEQUENCES[network], device, **choices) for device in (DEVICE, "cpu")))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind]])
def test_every_part_gives_what_the_cpu_gives(fed: Federation, kind: str, name: str) -> None:
    if (kind, name) == ("sampler", "clustered"):
        pytest.skip("its clusters are of rows that are equal up to rounding")
    choices = choices_of(kind, name, root=0)
    if name == "forged-activations":
        choices["client_weights"] = "clusters-2"
    every = {} if "sampler" in choices else {"sampler": {"clients": 9}}
    found, wanted = (
        run("fedavg", fed, MLP(hidden=(12, 8)), device, **{**every, **choices}) for device in (DEVICE, "cpu")
    )
    agree(found, wanted)


@pytest.mark.parametrize("precision", ["full", "tf32", "bf16"])
@pytest.mark.parametrize("network", [*NETWORKS, *SEQUENCES])
def test_every_network_gives_the_same_bits_again(fed: Federation, network: str, precision: str) -> None:
    samples = federation(each=True) if network in SEQUENCES else fed
    choices = {"sampler": {"fraction": 1.0}, "evaluate": {"every": 1, "parts": ("train",)}}
    model = SEQUENCES.get(network) or NETWORKS[network][0]
    if precision == "bf16" and network not in SEQUENCES and NETWORKS[network][1] == "compiled":
        pytest.skip("linear layers have no bfloat16")

    def once() -> Any:
        return run("ditto", samples, model, DEVICE, "float32", engine={"precision": precision}, **choices)

    same_bits(once(), once())


@pytest.mark.parametrize("model", [MLP(hidden=(64, 64)), CNN(channels=(32, 32), kernel=3, padding=1, norm="group")])
def test_products_are_of_float32_unless_tf32_is_chosen(fed: Federation, model: ModelSpec) -> None:
    def model_of(dtype: str, precision: str) -> torch.Tensor:
        result = run("fedavg", fed, model, DEVICE, dtype, engine={"precision": precision})
        return result.models.rows("global").double().cpu()

    kept = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    exact = model_of("float64", "full")
    full, tf32 = (float((model_of("float32", precision) - exact).abs().max()) for precision in ("full", "tf32"))
    assert 10 * full < tf32 < 1e-2
    assert kept == (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "momentum"])
def test_optimisers_give_what_the_cpu_gives(fed: Federation, optimizer: str) -> None:
    steps = {"momentum": 0.9} if optimizer == "momentum" else {"optimizer": optimizer}
    local = LocalSGD(lr=0.02, batch_size=16, steps=3, **steps)
    agree(*(run("ditto", fed, NETWORKS["group normalisation"][0], device, local=local) for device in (DEVICE, "cpu")))


def test_all_that_is_evaluated_gives_what_the_cpu_gives(fed: Federation) -> None:
    evaluate = {
        "every": 1, "parts": ("train", "validation", "test"),
    }  # fmt: skip
    agree(*(run("flame", fed, MLP(hidden=(12, 8)), device, evaluate=evaluate) for device in (DEVICE, "cpu")))


@pytest.mark.parametrize("network", ["group normalisation", "batch normalisation"])
def test_bfloat16_is_near_full_precision(fed: Federation, network: str) -> None:
    model = NETWORKS[network][0]
    low, full = (
        run("fedavg", fed, model, DEVICE, "float32", engine={"precision": precision}) for precision in ("bf16", "full")
    )
    assert low.stop is Stop.DONE
    start = torch.nn.utils.parameters_to_vector(model.build(tuple(fed.data.shape), 10, 5).parameters()).detach()
    moved = full.models.rows("global").cpu() - start
    error = low.models.rows("global").cpu() - full.models.rows("global").cpu()
    assert 0 < float(error.norm() / moved.norm()) < 0.1


def test_models_of_a_gpu_are_used_on_a_cpu(fed: Federation, tmp_path: Path) -> None:
    network = MLP(hidden=(12, 8))
    found, wanted = (run("flame", fed, network, device).models for device in (DEVICE, "cpu"))
    samples = fed.data.x[:9].numpy()
    np.testing.assert_array_equal(found.predict(samples, client=2), wanted.predict(samples, client=2))
    assert {p.device.type for kind in found.kinds() for p in found.module(kind, 2).parameters()} == {"cpu"}
    assert [file.name for file in found.save(tmp_path)]
    adapted = [models.adapt(load("digits")).row for models in (found, wanted)]
    torch.testing.assert_close(adapted[0].cpu(), adapted[1], rtol=1e-8, atol=1e-8)


EXPERIMENT = """
rounds = 3
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "dirichlet"
clients = 6
alpha = 0.5
[model]
kind = "cnn"
channels = [4]
kernel = 3
hidden = [8]
[local]
lr = 0.05
epochs = 1
[engine]
device = "cuda"
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
"""


def command(*arguments: str, ranks: int = 0) -> str:
    program = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    made = [sys.executable, *program, "-m", "fedloom.lab.cli", *arguments]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_command_takes_a_gpu_with_and_without_ranks(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(EXPERIMENT)
    command("run", str(file), "--out", str(tmp_path / "alone"))
    command("run", str(file), "--out", str(tmp_path / "ranks"), ranks=2)
    assert "ditto" in command("models", str(tmp_path / "alone"))
    assert "fedavg" in command("bench", str(file), "--rounds", "2", "--ranks", "1")
    alone, ranks = (pq.read_table(tmp_path / name / "metrics.parquet") for name in ("alone", "ranks"))
    keys = [name for name in alone.column_names if alone[name].type != "double"]
    assert alone.select(keys).equals(ranks.select(keys))
    assert alone.equals(ranks)
