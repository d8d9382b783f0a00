"""Executors of others: text and data out, bytes in, the files of a run here; what cannot travel is refused first."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.errors import ConfigError, DataError, FedloomError
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.units import travel
from fedloom.lab.experiment.units.executors import compute_units, open_executor
from fedloom.lab.experiment.units.payload import decode, encode
from fedloom.lab.experiment.units.travel import PackedExperiment, UnitReply, compute_unit, pack_experiment
from tests.commands import call

SMALL: dict[str, Any] = {
    "rounds": 3,
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "model": {"kind": "softmax"},
    "engine": {"workers": 1},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "ditto", "label": "two words"}],
}
CUT = fl.partitions.iid(clients=3, max_train_per_client=30)


def contents(out: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    timed = ("timings.parquet", ".lock")
    return {n: p.read_bytes() for n, p in files.items() if n not in timed and not n.startswith(("checkpoints", "rep"))}


class Elsewhere:
    """An executor with one worker, which has nothing of this process; it counts what it is sent."""

    def __init__(self, failures: int = 0) -> None:
        self.calls, self.data, self._failures = 0, 0, failures

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Make the call now."""
        future, here = Future[Any](), travel._held.copy()
        self.calls, self.data = self.calls + 1, self.data + (len(arguments) > 2)
        try:
            if self.calls <= self._failures:
                raise OSError("the worker has died")
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        assert travel._held.keys() >= here.keys()
        return future


@pytest.fixture(autouse=True)
def nothing_held() -> None:
    travel._held.clear()
    travel.read_federation.cache_clear()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("alone") / "out"
    Plan(parse(SMALL), out).run(page=False)
    return contents(out)


@pytest.mark.parametrize(
    "executor", [Elsewhere(), Elsewhere(2), ThreadPoolExecutor(2)], ids=["one", "dying", "threads"]
)
def test_an_executor_gives_the_files_of_a_run_here(executor: Any, alone: dict[str, bytes], tmp_path: Path) -> None:
    outcomes = Plan(parse(SMALL), tmp_path / "out").run(page=False, executor=executor)
    assert [outcome.status for outcome in outcomes] == ["done"] * 4
    assert contents(tmp_path / "out") == alone
    calls = getattr(executor, "calls", 0)
    Plan(parse(SMALL), tmp_path / "out").run(page=False, executor=executor)
    assert getattr(executor, "calls", 0) == calls


def test_processes_that_share_nothing_give_the_same(alone: dict[str, bytes], tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        Plan(parse(SMALL), tmp_path / "out").run(page=False, executor=executor)
    assert contents(tmp_path / "out") == alone


def test_data_of_memory_travel_once_per_worker(tmp_path: Path) -> None:
    given = {"partition": CUT, "seeds": [0, 1], "rounds": 2, "progress_bar": False}
    x, y = torch.rand(120, 4), torch.arange(120) % 3
    here = fl.compare(["fedavg", "ditto"], (x, y), folder=tmp_path / "here", **given)
    elsewhere = Elsewhere()
    there = fl.compare(["fedavg", "ditto"], (x, y), folder=tmp_path / "there", executor=elsewhere, **given)
    assert elsewhere.data == 1
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert there.results.keys() == here.results.keys()


def test_a_federation_travels_too(tmp_path: Path) -> None:
    fed = CUT(fl.load("digits"), seed=0)
    given = {"seeds": [0], "rounds": 2, "progress_bar": False}
    fl.compare(["fedavg"], fed, folder=tmp_path / "here", **given)
    fl.compare(["fedavg"], fed, folder=tmp_path / "there", executor=Elsewhere(), **given)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_bytes_of_data_give_the_data(tmp_path: Path) -> None:
    fed = CUT(fl.load("digits"), seed=0)
    again = decode(encode(fed))
    assert encode(again) == encode(fed)
    assert again.data.checksum() == fed.data.checksum()
    assert all(torch.equal(a, b) for part in fed.parts for a, b in zip(fed.parts[part], again.parts[part], strict=True))
    with pytest.raises(ConfigError, match="cannot be sent"):
        encode((print,))


def test_what_cannot_travel_is_refused_before_any_work(tmp_path: Path) -> None:
    class Mine(fl.algorithms.FedAvg):
        """Mine."""

    elsewhere, fed = Elsewhere(), CUT(fl.load("digits"), seed=0)
    given = {"rounds": 2, "seeds": [0], "progress_bar": False, "executor": elsewhere, "folder": tmp_path / "out"}
    with pytest.raises(ConfigError, match="Put your classes and functions into a module"):
        fl.compare({"mine": Mine()}, fed, **given)
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        fl.compare(["fedavg"], fed, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **given)
    with pytest.raises(ConfigError, match="executor must have a method submit"):
        fl.compare(["fedavg"], fed, **{**given, "executor": 3})
    with pytest.raises(ConfigError, match="an executor already distributes the work"):
        fl.compare(["fedavg"], fed, join=True, **given)
    assert elsewhere.calls == 0
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_run_that_fails_elsewhere_has_failed_here(tmp_path: Path) -> None:
    odd = {"algorithm": "fedavg", "label": "odd", "local": {"lr": 1e30}}
    document = {**SMALL, "method": [{"algorithm": "fedavg"}, odd]}
    Plan(parse(document), tmp_path / "here").run(page=False)
    Plan(parse(document), tmp_path / "there").run(page=False, executor=Elsewhere())
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    runs = json.loads((tmp_path / "there" / "summary.json").read_text())["runs"]
    assert {run["status"] for run in runs if run["method"] == "odd"} <= {"diverged", "failed"}


def test_an_executor_that_loses_a_unit_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match="the executor lost .*the worker has died.*the same command again"):
        Plan(parse(SMALL), tmp_path / "out").run(page=False, executor=Elsewhere(100))
    Plan(parse(SMALL), tmp_path / "out").run(page=False, executor=Elsewhere())


def test_a_worker_with_other_data_says_so(tmp_path: Path) -> None:
    plan = Plan(parse(SMALL), tmp_path / "out")
    luggage = pack_experiment(plan.experiment, "0" * 64)
    with pytest.raises(DataError, match="differ from the experiment's data. Copy the same files"):
        compute_unit(luggage.text, json.dumps({"label": "fedavg", "seed": 0}))


def test_a_file_is_found_in_the_workers_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{k % 7},{k % 3}.5,{k % 2}\n" for k in range(90))
    (tmp_path / "table.csv").write_text("a,b,label\n" + rows)
    document = {**SMALL, "data": {"source": str(tmp_path / "table.csv")}, "seeds": [0]}
    plan = Plan(parse(document), tmp_path / "out")
    luggage = plan._pack_experiment()
    (tmp_path / "worker").mkdir()
    (tmp_path / "table.csv").rename(tmp_path / "worker" / "table.csv")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "worker"))
    assert UnitReply.decode(compute_unit(luggage.text, json.dumps({"label": "fedavg", "seed": 0}))).files


@pytest.mark.parametrize(
    ("name", "said"),
    [("dask:", "address"), ("slurm:x", "KEY=VALUE"), ("processes:none", "number of workers"), ("spark:1", "unknown")],
)
def test_a_name_that_is_no_executor_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_executor(name)


def test_a_reply_of_something_else_is_refused() -> None:
    class Other:
        """Returns something else."""

        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
            """Make no call."""
            future = Future[Any]()
            future.set_result(b"{}\nnothing")
            return future

    with pytest.raises(ConfigError, match="did not return a worker's reply"):
        list(compute_units(Other(), PackedExperiment("", None), ["unit"], lambda: False))


def test_the_command_has_the_same_files(alone: dict[str, bytes], tmp_path: Path) -> None:
    tomli_w = pytest.importorskip("tomli_w")
    (tmp_path / "small.toml").write_text(tomli_w.dumps({**SMALL, "name": "experiment"}))
    loky = pytest.importorskip("loky")
    try:
        call("run", tmp_path / "small.toml", "--out", tmp_path / "out", "--executor", "loky:2")
    finally:
        loky.get_reusable_executor(reuse=True).shutdown()  # its threads would be in the forks of later tests
    assert {k: v for k, v in contents(tmp_path / "out").items() if k in alone} == alone


@pytest.mark.slow
def test_dask_gives_the_same_though_a_worker_is_killed(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    document = {**SMALL, "rounds": 300}
    Plan(parse(document), tmp_path / "here").run(page=False)
    size = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**size) as cluster, distributed.Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
        killed = list[int]()

        class Killing:
            """Dask's executor, of which one worker dies after the first unit is sent."""

            def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
                """Make a call; the first one costs a worker its life."""
                future = client.get_executor().submit(function, *arguments)
                if not killed:
                    killed.append(pids[0])
                    os.kill(pids[0], signal.SIGKILL)
                return future

        Plan(parse(document), tmp_path / "there").run(page=False, executor=Killing())
    assert killed
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


@pytest.mark.slow
def test_submitit_gives_the_same(alone: dict[str, bytes], tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    executor = submitit.LocalExecutor(folder=tmp_path / "jobs", python=sys.executable)
    Plan(parse(SMALL), tmp_path / "out").run(page=False, executor=executor)
    assert contents(tmp_path / "out") == alone
