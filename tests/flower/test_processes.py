"""The example over the network: a SuperLink, two SuperNodes, and models in the nodes' own folders."""

from __future__ import annotations

import re
import shutil
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedloom.deploy.ops.commands import PROGRAMS, environment
from fedloom.deploy.ops.processes import Process, Processes, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.deploy, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "examples" / "flower"
ROUNDS, NODES = 2, 2


class Link:
    """A SuperLink and its SuperNodes; ``folder`` has a home, a log and a folder of models for each."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self._processes = folder, processes
        self.models = [folder / f"models of node {k}" for k in range(NODES)]
        self.app = shutil.copytree(FOLDER, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        port, *ports = free_ports(1 + NODES)
        address = f"127.0.0.1:{port}"
        (folder / "cli").mkdir()
        connection = {"address": address, "insecure": True}
        (folder / "cli" / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": "here", "here": connection}})
        )
        server = self._start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        self._await(server, "Uvicorn running")
        for k, models in enumerate(self.models):
            config = f'partition-id={k} models="{models}"'
            words = "--insecure", "--superlink", address, "--port", str(ports[k]), "--node-config", config
            self._await(self._start(f"node-{k}", "flower-supernode", *words), "SuperNode ID")

    def _start(self, name: str, program: str, *words: str) -> Process:
        command, variables = [str(PROGRAMS / program), *words], environment(self.folder / name, threads=1)
        return self._processes.start(name, command, variables, self.folder / f"{name}.log")

    def _await(self, process: Process, text: str) -> None:
        end = time.monotonic() + 60
        while text not in process.log.read_text():
            process.check()
            assert time.monotonic() < end, process.tail(40)
            time.sleep(0.1)

    def run(self, method: str) -> dict[str, float]:
        """The figures that the app prints at the end of a run."""
        config = f'method="{method}" num-server-rounds={ROUNDS} min-nodes={NODES}'
        stream = self._start("cli", "flwr", "run", str(self.app), "here", "--stream", "--run-config", config)
        end, start = time.monotonic() + 300, stream.log.stat().st_size
        while stream.alive():
            assert time.monotonic() < end, stream.tail(40)
            time.sleep(0.2)
        text = stream.log.read_bytes()[start:].decode()
        assert stream.reap() == 0, text
        figures = re.findall(r"\{'[^{}]*/test/[^{}]*\}", text)
        assert figures, text
        values: dict[str, float] = literal_eval(figures[-1])
        return values


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    with Processes() as processes:
        yield Link(tmp_path, processes)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("quickstart.task")
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def test_models_of_two_methods_are_kept_at_the_nodes_and_are_those_that_were_scored(link: Link, task: Any) -> None:
    for method in ("ditto", "fedrep"):
        figures = link.run(method)
        accuracies, weights = [], []
        for k, folder in enumerate(link.models):
            (file,) = folder.iterdir()
            model = task.Net()
            model.load_state_dict(load_file(file))
            x, y = (torch.stack([torch.as_tensor(pair[i]) for pair in task.load_data(k)[1]]) for i in (0, 1))
            accuracies.append(float((model.eval()(x).argmax(1) == y).double().mean()))
            weights.append(load_file(file)["head.weight"])
        assert figures["personal/test/accuracy"] == pytest.approx(sum(accuracies) / NODES)
        assert not torch.equal(*weights)
