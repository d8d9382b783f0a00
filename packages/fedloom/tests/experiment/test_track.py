"""Runs that go on: what the terminal is told, and what TensorBoard and MLflow hold afterwards, also after a restart."""

from __future__ import annotations

import signal
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedloom.errors import ConfigError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse, track
from fedloom.lab.experiment.events import Event
from fedloom.lab.experiment.track import TRACKERS, Tracker
from fedloom.lab.progress import show_progress
from fedloom.rundir import run_folder

SMALL = """
name = "small"
rounds = 5
seeds = [0, 1]
[data]
source = "digits"
[evaluate]
every = 2
[engine]
checkpoint_every = 1e-9
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
label = "my ditto"
"""
Figures = dict[tuple[int, str], float]
"""Values by round and name."""


def plan(out: Path, **engine: Any) -> Plan:
    document = tomllib.loads(SMALL)
    document["engine"] |= engine
    return Plan(parse(document), out)


def recorded(out: Path, method: str, seed: int) -> Figures:
    table = pq.read_table(out / "metrics.parquet")
    mine = pc.and_(pc.equal(table["method"], method), pc.equal(table["seed"], seed))
    rows = table.filter(pc.and_(mine, pc.equal(table["client"], -1))).to_pylist()
    named = {(r["round"], "/".join(p for p in (r["model"], r["part"], r["metric"]) if p)): r["value"] for r in rows}
    return {key: value for key, value in named.items() if value == value}


def from_tensorboard(out: Path, label: str, seed: int) -> Iterator[tuple[tuple[int, str], float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_folder(out, "tracking", label, seed)
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from (((e.step, name), e.value) for e in events.Scalars(name))


def from_mlflow(out: Path, label: str, seed: int) -> Iterator[tuple[tuple[int, str], float]]:
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(f"sqlite:///{out / 'tracking' / 'mlflow.db'}")
    id = client.get_experiment_by_name("small").experiment_id
    (run,) = client.search_runs([id], f"tags.mlflow.runName = '{label}-{seed}'")
    assert run.info.status == "FINISHED"
    assert run.data.params["local.batch_size"] == "20"
    assert run.data.params["seed"] == str(seed)
    for name in run.data.metrics:
        yield from (((m.step, name), m.value) for m in client.get_metric_history(run.info.run_id, name))


READ = {"tensorboard": from_tensorboard, "mlflow": from_mlflow}
NEEDED = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "alembic")}


@pytest.mark.filterwarnings("ignore")  # of the trackers, about their own libraries
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("tensorboard", 1), ("tensorboard", 2), ("mlflow", 1), pytest.param("mlflow", 2, marks=pytest.mark.slow)],
)
def test_what_is_tracked_is_what_was_recorded_once(tmp_path: Path, kind: str, workers: int) -> None:
    for package in NEEDED[kind]:
        pytest.importorskip(package)
    out = tmp_path / "out"

    def interrupt(event: Event) -> None:
        if (event.label, event.seed, event.round) == ("my ditto", 0, 3) and not event.status:
            signal.raise_signal(signal.SIGINT)

    first = plan(out, workers=workers)
    tell = [interrupt] if workers == 1 else []
    outcomes = first.run(*tell, Tracker(kind, first.experiment, out), page=False)
    assert {o.status for o in outcomes} == ({"done", "interrupted"} if workers == 1 else {"done"})
    again = plan(out, workers=workers)
    again.run(Tracker(kind, again.experiment, out), page=False)
    for label in ("fedavg", "my ditto"):
        for seed in (0, 1):
            found = list(READ[kind](out, label, seed))
            assert len({key for key, _ in found}) == len(found)
            want = recorded(out, label, seed)
            assert dict(found).keys() == want.keys()
            assert dict(found) == {key: pytest.approx(value, rel=1e-6) for key, value in want.items()}


@pytest.mark.filterwarnings("ignore")
def test_runs_that_begin_in_one_mlflow_at_the_same_time_share_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDED["mlflow"]:
        pytest.importorskip(package)
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'shared.db'}")
    create = MlflowClient.create_experiment

    def second(client: Any, *given: Any) -> str:
        """Another run has made it since this one looked."""
        create(client, *given)
        made: str = create(client, *given)
        return made

    monkeypatch.setattr(MlflowClient, "create_experiment", second)
    one = plan(tmp_path / "out")
    track = Tracker("mlflow", one.experiment, one.out)
    track(Event("fedavg", 0, 4, 1, {1: {"global/test/accuracy": 0.5}}))
    (experiment,) = MlflowClient().search_experiments(filter_string="name = 'small'")
    assert len(MlflowClient().search_runs([experiment.experiment_id])) == 1


def test_every_tracker_is_tested() -> None:
    assert READ.keys() == NEEDED.keys() == TRACKERS.keys() - {"wandb"}  # tested below, with a module in its place


def test_an_unknown_tracker_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    found = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "out"), "--track", "tensorbord"])
    assert found.exit_code == 2
    assert "did you mean 'tensorboard'" in found.output
    assert not (tmp_path / "out").exists()


def test_what_is_tracked_after_force_is_of_the_new_run_alone(tmp_path: Path) -> None:
    kind = "tensorboard"
    for package in NEEDED[kind]:
        pytest.importorskip(package)
    out = tmp_path / "out"
    for force in (False, True):
        made = Plan(plan(out).experiment, out, force=force)
        made.run(Tracker(kind, made.experiment, out), page=False)
        steps = [key for key, _ in READ[kind](out, "fedavg", 0)]
        assert steps
        assert len(set(steps)) == len(steps)


def test_a_tracker_that_wrote_nothing_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_label: str, _seed: int) -> Any:
        raise ConnectionError("no server")

    monkeypatch.setattr(track, "TRACKERS", {**TRACKERS, "tensorboard": lambda *_: (away, "tensorboard --logdir x")})
    (tmp_path / "e.toml").write_text(SMALL)
    said = CliRunner().invoke(
        app, ["run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "o"), "--track", "tensorboard"]
    )
    assert said.exit_code == 0, said.output
    assert "tracked:" not in said.output


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.lab.experiment.track.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs mlflow: pip install 'fedloom\[track\]'"):
        Tracker("mlflow", plan(tmp_path / "out").experiment, tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
def test_every_measured_figure_is_told_once_in_order(tmp_path: Path, workers: int) -> None:
    told: dict[tuple[str, int], list[Event]] = {}
    made = plan(tmp_path / "out", workers=workers)
    made.run(lambda event: told.setdefault((event.label, event.seed), []).append(event), page=False)
    assert len(told) == 4
    for (label, seed), events in told.items():
        *going, end = events
        assert (end.status, end.round, end.figures) == ("done", 5, {})
        assert not any(event.status for event in going)
        assert [event.round for event in going] == sorted({event.round for event in going})
        assert going[-1].round == 5
        figures = [(t, name, v) for e in going for t, f in e.figures.items() for name, v in f.items() if v == v]
        assert {(t, name): v for t, name, v in figures} == recorded(tmp_path / "out", label, seed)
        assert len({figure[:2] for figure in figures}) == len(figures)


def test_plain_lines_have_the_current_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(tmp_path / "out", workers=2)
    with show_progress(made) as tell:
        made.run(tell, page=False)
    lines = capsys.readouterr().err.splitlines()
    ends = [line for line in lines if "round 5/5" in line]
    assert len(ends) == 4
    assert all("validation loss" in line and "accuracy" in line for line in ends)
    assert sum("my ditto" in line and "personal validation" in line for line in ends) == 2


def test_wandb_gets_every_round_once_and_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    class Run:
        def __init__(self, **settings: Any) -> None:
            self.settings, self.logged, self.summary, self.code = settings, dict[int, Figures](), {}, None
            runs.append(self)

        def log(self, figures: Any, step: int) -> None:
            assert step not in self.logged
            self.logged[step] = figures

        def finish(self, exit_code: int) -> None:
            self.code = exit_code

    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init, module.Settings = Run, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    made = plan(tmp_path / "out")
    made.run(Tracker("wandb", made.experiment, made.out), page=False)
    assert len(runs) == 4
    for run in runs:
        label, _, seed = run.settings["name"].rpartition("-")
        want = recorded(made.out, label, int(seed))
        assert {(k, name): v for k, figures in run.logged.items() for name, v in figures.items()} == want
        assert (run.settings["mode"], run.code, run.summary) == ("offline", 0, {"status": "done"})
        assert run.settings["config"]["seed"] == int(seed)


def test_a_tracker_that_is_missing_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.lab.experiment.track.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--track wandb needs wandb: pip install 'fedloom\[wandb\]'"):
        Tracker("wandb", plan(tmp_path / "out").experiment, tmp_path / "out")
