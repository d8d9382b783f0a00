"""The example over the network, with models in the nodes' own folders, in Flower's simulation, and under NVFlare."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedloom_sites.deploy.ops.commands import PROGRAMS_FOLDER, process_environment
from fedloom_sites.deploy.ops.processes import ManagedProcess, ManagedProcesses, free_port

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

FOLDER = Path(__file__).parents[4] / "examples" / "flower"
ROUNDS, NODES = 2, 2


class Link:
    """A SuperLink and its SuperNodes, which it may simulate.

    ``folder`` has a home, a log and a folder of models for each.
    """

    def __init__(self, folder: Path, processes: ManagedProcesses, *, simulates: bool = False) -> None:
        self.folder, self._processes = folder, processes
        self.models = [folder / f"models of node {k}" for k in range(NODES)]
        self.app = shutil.copytree(FOLDER, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        port, *ports = (free_port() for _ in range(1 + NODES))
        address = f"127.0.0.1:{port}"
        (folder / "cli").mkdir()
        connection = {"address": address, "insecure": True}
        (folder / "cli" / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": "here", "here": connection}})
        )
        words = ["--insecure", "--host", "127.0.0.1", "--port", str(port), *(["--simulation"] if simulates else [])]
        self._await(self._start("superlink", "flower-superlink", *words), "Uvicorn running")
        self._federation = ["--federation-config", f"num-supernodes={NODES}"] if simulates else []
        for k, models in enumerate(self.models):
            config = f'partition-id={k} models="{models}"'
            words = ["--insecure", "--superlink", address, "--port", str(ports[k]), "--node-config", config]
            if not simulates:
                self._await(self._start(f"node-{k}", "flower-supernode", *words), "SuperNode ID")

    def _start(self, name: str, program: str, *words: str) -> ManagedProcess:
        command, variables = (
            [str(PROGRAMS_FOLDER / program), *words],
            process_environment(self.folder / name, threads=1),
        )
        return self._processes.start(name, command, variables, self.folder / f"{name}.log")

    def _await(self, process: ManagedProcess, text: str) -> None:
        end = time.monotonic() + 300
        while text not in process.log.read_text():
            process.check()
            assert time.monotonic() < end, process.tail(40)
            time.sleep(0.1)

    def run(self, method: str) -> dict[str, float]:
        """The figures that the app prints at the end of a run."""
        config = f'method="{method}" num-server-rounds={ROUNDS} min-nodes={NODES}'
        words = ["run", str(self.app), "here", "--stream", "--run-config", config, *self._federation]
        stream = self._start("cli", "flwr", *words)
        end, start = time.monotonic() + 500, stream.log.stat().st_size
        while stream.alive():
            assert time.monotonic() < end, stream.tail(40)
            time.sleep(0.2)
        text = stream.log.read_bytes()[start:].decode()
        assert stream.reap() == 0, text
        figures = re.findall(r"\{'[^{}]*/test/[^{}]*\}", text)
        assert figures, text
        values: dict[str, float] = literal_eval(figures[-1])
        return values


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with ManagedProcesses() as processes:
        yield Link(tmp_path_factory.mktemp("link"), processes)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("quickstart.task")
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


@pytest.mark.parametrize("method", ["ditto", "flame", "scaffold", "fedala", "fedrep"])
def test_models_are_kept_at_the_nodes_and_are_those_that_were_scored(link: Link, task: Any, method: str) -> None:
    figures = link.run(method)
    accuracies, weights = [], []
    for k, folder in enumerate(link.models):
        (file,) = folder.iterdir()
        model = task.Net()
        model.load_state_dict(load_file(file))
        x, y = (torch.stack([torch.as_tensor(pair[i]) for pair in task.load_data(k)[1]]) for i in (0, 1))
        accuracies.append(float((model.eval()(x).argmax(1) == y).double().mean()))
        weights.append(load_file(file)["head.weight"])
    kind = "global" if method == "scaffold" else "personal"
    assert figures[f"{kind}/test/accuracy"] == pytest.approx(sum(accuracies) / NODES)
    assert torch.equal(*weights) == (kind == "global")


def test_the_example_runs_in_flowers_simulation(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Flower's simulation needs ray: pip install 'flwr[simulation]'")
    with ManagedProcesses() as processes:
        figures = Link(tmp_path, processes, simulates=True).run("ditto")
    assert figures["personal/test/accuracy"] > figures["global/test/accuracy"]


NVFLARE = """
from nvflare.app_opt.flower.recipe import FlowerRecipe
from nvflare.recipe import SimEnv

config = {{"method": "ditto", "num-server-rounds": {rounds}, "min-nodes": {nodes}}}
waits = {{"superlink_ready_timeout": 120.0, "configure_task_timeout": 120, "start_task_timeout": 120}}
waits |= {{"per_msg_timeout": 100.0, "tx_timeout": 400.0}}  # of a busy machine
recipe = FlowerRecipe(flower_content={app!r}, min_clients={nodes}, run_config=config, **waits)
recipe.execute(SimEnv(num_clients={nodes}, num_threads={nodes}, workspace_root={folder!r}))
"""


def test_the_example_runs_under_nvflare(tmp_path: Path) -> None:
    """NVFlare 2.9 starts Flower with an option that newer releases of Flower refuse."""
    pytest.importorskip("nvflare", reason="needs nvflare, in an environment of its own")
    usage = subprocess.run(
        [PROGRAMS_FOLDER / "flower-superlink", "--help"], capture_output=True, text=True, check=True
    ).stdout
    if "--serverappio-api-address" not in usage:
        pytest.skip(f"flwr {version('flwr')} cannot be started by nvflare {version('nvflare')}")
    script = NVFLARE.format(rounds=ROUNDS, nodes=NODES, app=str(FOLDER), folder=str(tmp_path / "workspace"))
    (tmp_path / "job.py").write_text(script)
    with ManagedProcesses() as processes:
        command, variables = [sys.executable, str(tmp_path / "job.py")], process_environment(tmp_path, threads=1)
        job = processes.start("nvflare", command, variables, tmp_path / "job.log")
        end = time.monotonic() + 500
        while job.alive():
            assert time.monotonic() < end, job.tail(40)
            time.sleep(0.5)
        assert job.reap() == 0, job.tail(40)
    assert "finished:completed" in (tmp_path / "job.log").read_text()
