"""A run that trained nothing has failed; what only looks at a run, or scores it, ends no run."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine.checks import rehearsal
from fedloom.errors import FedloomError, GivenUp, RunStopped, Stop
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.track import RETRY_SECONDS, Tracker, Writer
from fedloom.processes.clients import LocalClients
from tests.commands import call

LATE = {"devices": "lognormal", "schedule": {"kind": "deadline", "seconds": 1e-9}}
FILE = """
rounds = 4
[data]
source = "digits"
[partition]
kind = "iid"
clients = 4
[evaluate]
every = 2
"""


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.iid(clients=4)(fl.load("digits"), seed=0)


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is refused because its deadline is too early; real sites may be slower than any forecast."""
    monkeypatch.setattr(rehearsal, "check_times", lambda problem, start: None)


class Still(torch.nn.Module):
    """A network whose outputs depend on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x.flatten(1)[:, :10]) + 0 * self.layer(x.flatten(1))


@pytest.mark.parametrize(
    ("method", "model", "choices"),
    [
        ("fedavg", Still(), {}),
        ("local", Still(), {}),
        ("ditto", Still(), {"rounds": 4, "evaluate": {"every": 2}}),
        (fl.algorithms.FedAvg(server_lr=1e-300), "softmax", {}),
        ("fedavg", "softmax", {"task": {"loss": lambda outputs, y: (0 * outputs).sum()}}),
        *(
            (method, "softmax", {"local": {"lr": 1e-20}})
            for method in ("fedadmm", "flame", "fedpd", "pfedme", "fedacs")
        ),
    ],
)
def test_a_run_that_changed_no_model_is_no_success(
    method: Any, model: Any, choices: dict[str, Any], fed: Federation
) -> None:
    result = fl.simulate(method, fed, model, **{"rounds": 2, "local": {"lr": 0.1}, **choices})
    assert (result.stop, result.status) == (Stop.UNCHANGED, "failed")
    assert "every loss is unchanged" in result.detail


@pytest.mark.parametrize(("method", "lr"), [("fedavg", 1e-6), ("fedavg", 1e-7), ("local", 1e-7)])
def test_a_run_whose_steps_are_small_is_no_failure(method: str, lr: float, fed: Federation) -> None:
    result = fl.simulate(method, fed, rounds=2, local={"lr": lr, "epochs": 1})
    assert result.status == "done"
    assert lr > 1e-7 or "after 2 rounds, every loss is unchanged except for rounding errors" in result.notes


@pytest.mark.usefixtures("unforeseen")
def test_a_deadline_that_nobody_meets_is_no_success(fed: Federation, tmp_path: Path) -> None:
    result = fl.simulate("fedavg", fed, rounds=9, folder=tmp_path, **LATE)
    assert (result.stop, result.status, result.rounds) == (Stop.UNUSABLE, "failed", 9)
    assert "no upload was used in 9 rounds" in result.detail
    assert [note for note in result.notes if "late" in note] == [
        "round 1: 4 of 4 clients were late, including [0, 1, 2, 3] (and in 8 more rounds, the last of them 9)"
    ]
    again = fl.simulate("fedavg", fed, rounds=9, folder=tmp_path, **LATE)
    assert (again.stop, again.detail, again.notes) == (result.stop, result.detail, result.notes)


@pytest.mark.usefixtures("unforeseen")
def test_the_command_says_so_and_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        f'{FILE}[devices]\nkind = "lognormal"\n[schedule]\nkind = "deadline"\nseconds = 1e-9\n'
        '[[method]]\nalgorithm = "fedavg"\n'
    )
    said = call("run", tmp_path / "e.toml", "--out", tmp_path / "run", code=1)
    assert "no upload was used in 4 rounds" in said
    record, *_ = fl.open_run(tmp_path / "run")
    assert (record.status, record.rounds) == ("failed", 4)
    assert "no upload was used in 4 rounds" in (tmp_path / "run" / "report.html").read_text()


def test_one_round_that_counts_is_a_run(fed: Federation) -> None:
    some = {"devices": "lognormal", "schedule": {"kind": "over-selection", "factor": 2.0}}
    assert fl.simulate("fedavg", fed, rounds=3, **some).status == "done"


def test_rounds_that_are_all_given_up_are_no_success(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at sites whose masked sums are never revealed."""

    def train(self: LocalClients, request: Any) -> Any:
        raise GivenUp("too few sites are left", request.ids.tolist())

    monkeypatch.setattr(LocalClients, "train", train)
    result = fl.simulate("fedavg", fed, rounds=5)
    assert (result.stop, result.status, result.rounds) == (Stop.UNUSABLE, "failed", 5)
    assert len([note for note in result.notes if "abandoned" in note]) == 1


@pytest.mark.parametrize("error", [ValueError("full"), OSError(28, "No space left"), AssertionError(), KeyError("x")])
def test_a_callback_that_fails_changes_no_number(
    error: Exception, fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    calls = list[int]()

    def broken(state: Any) -> None:
        calls.append(state.round)
        raise error

    plain = fl.simulate("fedavg", fed, rounds=3)
    result = fl.simulate("fedavg", fed, rounds=3, callbacks=[broken])
    assert (result.status, calls) == ("done", [1, 2, 3])
    assert result.table().equals(plain.table())
    (warning,) = [note for note in result.notes if "callback" in note]
    assert warning.startswith(f"callback broken failed: {type(error).__name__}")
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [warning]


class Traced(NamedTuple):
    """A server state with a field that keeps a graph."""

    x: Tensor
    trace: Tensor


class WithGraph(fl.algorithms.FedAvg):
    """A method whose server state keeps the graph of a computation."""

    def init(self, x0: Tensor, ctx: Any) -> Any:
        server, *others = super().init(x0, ctx)
        return Traced(server.x, torch.zeros(1)), *others

    def server(self, server: Any, up: Any, ctx: Any) -> Any:
        return Traced(super().server(server, up, ctx).x, torch.ones(1, requires_grad=True) + 1)


@pytest.mark.parametrize("method", [fl.algorithms.FedAvg(), WithGraph()])
def test_a_callback_that_changes_the_state_changes_no_number(method: Any, fed: Federation) -> None:
    def spoil(state: Any) -> None:
        state.server.x.zero_()

    plain, result = (fl.simulate(method, fed, rounds=3, callbacks=calls) for calls in ([], [spoil]))
    assert torch.equal(result.models.rows("global"), plain.models.rows("global"))
    assert result.table().equals(plain.table())


def leave(outputs: Tensor, _y: Tensor) -> float:
    """A metric that ends the program without an error, in a batch larger than those before round 1."""
    if len(outputs) > 64:
        raise SystemExit(0)
    return 1.0


def test_code_that_ends_the_program_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        f'{FILE}[task]\nmetrics = ["{__name__}:leave"]\n[[method]]\nalgorithm = "fedavg"\n'
    )
    said = call("run", tmp_path / "e.toml", "--out", tmp_path / "run", code=1)
    assert "called ended it: SystemExit: 0 (test_effect.py, line" in said


@pytest.mark.parametrize("door", ["simulate", "compare"])
def test_a_metric_that_ends_the_program_is_an_error_in_python(door: str, fed: Federation) -> None:
    call: Any = fl.simulate if door == "simulate" else lambda method, *a, **k: fl.compare([method], *a, **k)
    with pytest.raises(FedloomError, match=r"code that the run called ended it: SystemExit: 0 \(test_effect.py, line"):
        call("fedavg", fed, rounds=1, task={"metrics": [end]})


def end(_outputs: Tensor, _y: Tensor) -> float:
    raise SystemExit(0)


async def wait(_state: Any) -> None:
    """A callback whose call runs nothing."""


def test_a_callback_whose_call_runs_nothing_is_refused(fed: Federation) -> None:
    with pytest.raises(fl.FedloomError, match="a call of wait runs no code"):
        fl.simulate("fedavg", fed, rounds=1, callbacks=[wait])


def test_a_loss_that_fails_in_scoring_names_the_round_and_the_line(fed: Federation) -> None:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        if len(y) > 64:
            raise ValueError("too many")
        return torch.nn.functional.cross_entropy(outputs, y)

    with pytest.raises(
        fl.errors.ClientError, match=r"scoring failed at clients .* in round 0: .*\(test_effect.py, line"
    ):
        fl.simulate("fedavg", fed, rounds=1, task={"loss": loss})


def test_what_is_documented_to_end_a_run_does(fed: Federation) -> None:
    def stop(_state: Any) -> None:
        raise RunStopped(Stop.STOPPED, "by hand")

    assert fl.simulate("fedavg", fed, rounds=3, callbacks=[lambda s: "enough" if s.round == 2 else 7]).rounds == 2
    ended = fl.simulate("fedavg", fed, rounds=3, callbacks=[stop])
    assert (ended.stop, ended.rounds) == (Stop.STOPPED, 1)

    def interrupt(_state: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.simulate("fedavg", fed, rounds=3, callbacks=[interrupt])


def test_a_listener_that_fails_leaves_the_others_and_the_run(tmp_path: Path) -> None:
    for workers in (1, 2):
        document = tomllib.loads(f'{FILE}[engine]\nworkers = {workers}\n[[method]]\nalgorithm = "fedavg"\n')
        document["seeds"] = [0, 1]
        heard = list[str]()

        def broken(_event: Any) -> None:
            raise RuntimeError("no display")

        outcomes = Plan(parse(document), tmp_path / str(workers)).run(
            broken, lambda event, heard=heard: heard.append(event.status), page=False
        )
        assert {o.status for o in outcomes} == {"done"}
        assert heard.count("done") == 2


def fails_on_few(output: Tensor, target: Tensor) -> float:
    """A user's metric that needs three classes among the targets, and cannot do with fewer."""
    if len(target.unique()) < 3:
        raise ValueError("three classes are needed")
    return float((output.argmax(1) == target).double().mean())


def test_a_metric_that_fails_at_a_client_is_no_number_there() -> None:
    data = fl.load("digits")
    two = (data.y < 2).nonzero()[:60, 0]
    parts = [((data.x[k], data.y[k]), (data.x[k], data.y[k])) for k in (torch.arange(200), torch.arange(200, 400), two)]
    fed = fl.Federation.create(parts)
    plain = fl.simulate("fedavg", fed, rounds=2)
    result = fl.simulate("fedavg", fed, rounds=2, task={"metrics": [fails_on_few]})
    assert result.status == "done"
    assert torch.equal(result.models.rows("global"), plain.models.rows("global"))
    values = result.final("global", "fails_on_few")
    assert values.isnan().tolist() == [False, False, True]


class Flaky(Writer):
    """A tracker in memory that fails while its server is away."""

    def __init__(self, away: list[bool], kept: dict[int, Any]) -> None:
        self.last, self.away, self.kept = max(kept, default=-1), away, kept

    def write(self, round: int, figures: Any) -> None:
        if self.away[0]:
            raise ConnectionError("server away\nsecond line")
        self.kept[round] = figures
        self.last = round

    def close(self, status: str) -> None:
        self.kept[10**6] = status


@pytest.mark.parametrize("returns", [True, False])
def test_a_tracker_whose_server_is_away_costs_a_warning_and_catches_up(
    returns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away, kept = [True], dict[int, Any]()
    monkeypatch.setattr(
        "fedloom.lab.experiment.track.TRACKERS", {"mine": lambda *_: (lambda *_: Flaky(away, kept), "view")}
    )
    monkeypatch.setattr("fedloom.lab.experiment.track.TRACKER_PACKAGES", {"mine": ()})
    document = tomllib.loads(f'{FILE}[engine]\ncheckpoint_every = 1e-9\n[[method]]\nalgorithm = "fedavg"\n')
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "fedloom.lab.experiment.track.time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0)
    )

    def back(event: Any) -> None:
        if event.round == 3 and returns:
            away[0], clock.now = False, RETRY_SECONDS + 1

    plan = Plan(parse(document), tmp_path / "run")
    (outcome,) = plan.run(back, Tracker("mine", plan.experiment, plan.out), page=False)
    assert outcome.status == "done"
    warnings = [record.message for record in caplog.records if "--track mine" in record.message]
    assert "ConnectionError: server away" in warnings[0]
    assert "continues. Run the same command again with --track mine" in warnings[-1]
    assert len(warnings) == (1 if returns else 2)
    if not returns:
        assert "3 rounds of fedavg, seed 0, are missing" in warnings[-1]
        away[0] = False
        again = Plan(parse(document), tmp_path / "run")
        again.run(Tracker("mine", again.experiment, again.out), page=False)
    assert sorted(kept) == [0, 2, 4, 10**6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "file:{folder}/closed", "nonsense://x"])
def test_no_mlflow_ends_a_run(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mlflow", "alembic"):
        pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.format(folder=tmp_path))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    document = tomllib.loads(f'{FILE}[[method]]\nalgorithm = "fedavg"\n')
    plan = Plan(parse(document), tmp_path / "run")
    (outcome,) = plan.run(Tracker("mlflow", plan.experiment, plan.out), page=False)
    assert outcome.status == "done"


@pytest.mark.filterwarnings("ignore")
def test_metrics_of_classes_have_names_that_mlflow_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for package in ("mlflow", "alembic"):
        pytest.importorskip(package)
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    document = tomllib.loads(f'{FILE}[task]\nmetrics = ["recall"]\n[[method]]\nalgorithm = "fedavg"\n')
    plan = Plan(parse(document), tmp_path / "run")
    plan.run(Tracker("mlflow", plan.experiment, plan.out), page=False)
    assert not [record for record in caplog.records if "--track" in record.message]
    client: Any = MlflowClient(f"sqlite:///{tmp_path / 'run' / 'tracking' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert len([name for name in run.data.metrics if "test/recall." in name]) >= 10
