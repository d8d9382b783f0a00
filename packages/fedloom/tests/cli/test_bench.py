"""``fedloom bench``: rows, what is picked, the estimate, disturbance, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from fedloom.engine.setup import make_job
from fedloom.lab.cli import app
from fedloom.lab.experiment import Experiment, parse
from fedloom.lab.experiment.measure.bench import Bench
from fedloom.lab.experiment.measure.cost import samples_per_round
from fedloom.processes import machine_load
from tests.commands import call

RUNNER = CliRunner()
FILE = """
name = "small"
rounds = 30
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "iid"
clients = 20
[sampler]
kind = "uniform"
clients = 4
[local]
steps = 3
batch_size = 10
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
rounds = 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(FILE)
    return path


def experiment(**engine: object) -> Experiment:
    return parse({**tomllib.loads(FILE), "engine": engine})


def test_the_time_per_gradient_is_relative_to_fedavg_and_says_where_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    names = ("fedavg", "moon", "analytic-fl")
    network = {
        "model": {"kind": "mlp", "hidden": [32]},
        "partition": {"kind": "iid", "clients": 5, "max_train_per_client": 100},
    }
    methods = [{"algorithm": name} for name in names]
    file.write_text(tomli_w.dumps({"rounds": 2, "data": {"source": "digits"}, **network, "method": methods}))
    found = json.loads(call("bench", file, "--per-gradient", "--rounds", 3, "--json"))["methods"]
    rows = {row["method"]: row for row in found}
    assert list(rows) == list(names)
    for name in names[:2]:
        row = rows[name]
        assert row["relative to fedavg"] == pytest.approx(row["at clients"] + row["at server"])
        assert min(row["at clients"], row["at server"]) > 0
    assert 0.3 < rows["fedavg"]["relative to fedavg"] < 3
    assert [rows[name]["forward/gradient"] for name in names[:2]] == [0, 2]  # its own model before, and the server's
    assert rows["moon"]["relative to fedavg"] > rows["fedavg"]["relative to fedavg"]
    assert rows["analytic-fl"]["note"] == "no gradient in these rounds"
    assert "--workers cannot be used with --per-gradient" in call(
        "bench", file, "--per-gradient", "--workers", 2, code=2
    )


def test_auto_is_the_number_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engine.workers.usable_cores", lambda: 3)
    assert {way.workers for way in Bench(experiment(), workers=["auto"]).ways["fedavg"]} == {1}
    monkeypatch.setattr("fedloom.engine.workers.MIN_FORKING_WORK", 0)
    assert {way.workers for way in Bench(experiment(), workers=["auto"]).ways["fedavg"]} == {1, 3}


def test_every_way_has_a_row_and_nothing_is_written(file: Path) -> None:
    result = RUNNER.invoke(app, ["bench", str(file), "--rounds", "1", "--workers", "1", "--workers", "2"])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith((" fedavg", " ditto"))]
    found = [tuple(line[:3]) for line in lines]
    assert len(found) == len(set(found)) == 12
    assert {oracle for _, oracle, _ in found} == {"compiled", "vmap", "loop"}
    picked = [tuple(line[:3]) for line in lines if line[3] == "yes"]
    assert picked == [("fedavg", "compiled", "1"), ("ditto", "compiled", "1")]
    assert "the whole experiment, 4 runs, without evaluation" in result.stdout
    assert [p.name for p in file.parent.iterdir()] == ["small.toml"]


def test_each_block_of_a_narrow_terminal_names_the_way_of_its_rows(file: Path) -> None:
    narrow = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "50"}
    words = ["bench", str(file), "--rounds", "1", "--gradient-engine", "compiled", "--workers", "1", "--workers", "2"]
    result = RUNNER.invoke(app, words, env=narrow)
    blocks = re.sub(r"\x1b\[[\d;]*m", "", result.stdout).split(" method ")[1:]
    assert len(blocks) > 1
    assert {*(tuple(block.split()[:2]) for block in blocks)} == {("gradient_engine", "workers")}


def test_only_what_is_asked_for_is_measured_beside_what_is_picked(file: Path) -> None:
    plan = Bench(experiment(), oracles=["loop"], workers=[2])
    ways = [way[:2] for way in plan.ways["fedavg"]]
    assert ways == [("compiled", 1), ("compiled", 2), ("loop", 1), ("loop", 2)]


def test_what_is_picked_is_what_a_run_takes() -> None:
    asked = experiment(gradient_engine="loop", workers=2)
    asked = parse({**asked.settings(), "method": [{"algorithm": "fedavg"}], "seeds": [0]})
    plan = Bench(asked)
    method = asked.methods[0]
    job, _ = make_job(method.setting, plan.federation)
    assert plan.ways["fedavg"][0] == (job.oracle.name, job.workers, True) == ("loop", 2, True)


def test_samples_are_those_of_the_method_and_the_estimate_adds_up_all_runs() -> None:
    plan = Bench(experiment(), rounds=2, oracles=["compiled"], workers=[1])
    speeds = list(plan.measure())
    assert [s.method for s in speeds] == ["fedavg", "ditto"]
    assert samples_per_round(plan.experiment.methods[0].setting, plan.federation) == 4 * 3 * 10
    assert plan.minutes(speeds) == pytest.approx((2 * 30 * speeds[0].seconds + 2 * 10 * speeds[1].seconds) / 60)
    assert all(s.seconds > 0 and s.samples > 0 for s in speeds)


def test_runs_side_by_side_take_less_time() -> None:
    plan = Bench(experiment(workers=2), rounds=1, oracles=["compiled"], workers=[1])  # twenty clients are one chunk
    speeds = list(plan.measure())
    assert plan.share == (2, 1)
    assert {speed.way.workers for speed in speeds if speed.way.is_chosen} == {1}
    assert plan.minutes(speeds) == pytest.approx((60 * speeds[0].seconds + 20 * speeds[1].seconds) / 60 / 2)


def test_other_processes_are_seen_and_ones_own_work_is_not() -> None:
    def work() -> None:
        end = machine_load.process_seconds() + 0.6
        while machine_load.process_seconds() < end:
            sum(range(1000))

    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with machine_load.watch_others() as disturbed:
            work()
    finally:
        other.kill()
        other.wait()
    assert disturbed.cores > machine_load.MAX_FOREIGN_CORES


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "machine_seconds", machine_load.process_seconds)  # as if nobody else were there
    with machine_load.watch_others() as quiet:
        sum(range(10_000_000))
    assert quiet.cores < machine_load.MAX_FOREIGN_CORES


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--gradient-engine", "compile"], "did you mean 'compiled'"),
        (["--workers", "0"], "0"),
        (["--rounds", "0"], "0"),
        (["--patience", "nan"], "--patience must be a finite number, got nan"),
        (["--ranks", "1", "--rate", "inf"], "--rate must be a finite number, got inf"),
        (["--ranks", "1", "--trip", "nan"], "--trip must be a finite number, got nan"),
    ],
)
def test_bad_input_is_refused(file: Path, more: list[str], sentence: str) -> None:
    result = RUNNER.invoke(app, ["bench", str(file), *more])
    assert result.exit_code == 2
    assert sentence in result.output


def test_an_oracle_that_cannot_is_refused_when_named_and_left_out_else(file: Path) -> None:
    convolution = {**experiment().settings(), "model": {"kind": "cnn", "channels": [4], "kernel": 3, "hidden": [8]}}
    assert "compiled" not in {way.oracle for way in Bench(parse(convolution)).ways["fedavg"]}
    with pytest.raises(ValueError, match="compiled"):
        Bench(parse(convolution), oracles=["compiled"])


def test_rounds_on_other_machines_are_calculated(file: Path) -> None:
    link = ["--machines", "2", "--rate", "100", "--trip", "50", "--clients", "1000", "--cohort", "40"]
    result = RUNNER.invoke(app, ["bench", str(file), "--rounds", "1", "--ranks", "1", "--ranks", "3", *link])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith((" fedavg", " ditto"))]
    assert [row[:4] for row in rows] == [[m, "2", "x", r] for m in ("fedavg", "ditto") for r in ("1", "3")]
    assert all(float(row[4]) >= 0.15 for row in rows)  # three times there and back
    assert "ns per client of the federation" in result.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--machines", "2", "--cohort", "3"], "--machines and --cohort can be used only with --ranks"),
        (["--ranks", "2", "--gradient-engine", "compiled"], "--gradient-engine cannot be used with --ranks"),
    ],
)
def test_options_of_the_other_table_are_refused(file: Path, given: list[str], said: str) -> None:
    result = RUNNER.invoke(app, ["bench", str(file), *given])
    assert result.exit_code == 2
    assert said in result.stderr
