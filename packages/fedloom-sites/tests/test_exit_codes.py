"""One rule for the exit codes of all commands: a code follows from how a run ended, not from the command."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedloom.errors import EXIT_CODES, DataError, Refused, RunStopped, Stop
from fedloom.lab.cli import app
from fedloom.lab.cli._app import print_errors
from fedloom.lab.experiment import Plan
from fedloom_sites.deploy.ops import loopback, status
from fedloom_sites.deploy.ops.processes import ProcessError
from fedloom_sites.deploy.server import run as server_run

FILE = """rounds = 1
[data]
source = "digits"
[partition]
kind = "iid"
clients = 3
[[method]]
algorithm = "fedavg"
"""


def code_of(*words: str) -> int:
    return CliRunner().invoke(app, [*words]).exit_code


def test_the_page_lists_the_codes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "stable.md").read_text()
    for code in {0, 2, 3, *EXIT_CODES.values()}:
        assert f"\n| {code} | " in page


@pytest.mark.parametrize("stop", Stop)
def test_a_run_ends_with_the_code_of_its_status_in_every_command(
    stop: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.toml").write_text(FILE)
    codes = dict[str, int]()

    with pytest.raises(typer.Exit) as stopped, print_errors():  # tune, analyze, watch and the studies
        raise RunStopped(stop, "")
    codes["an error"] = stopped.value.exit_code

    outcome = SimpleNamespace(status=stop.status, label="fedavg", seed=0, reason=stop.value, result=None, notes=())
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "run", lambda *_, **__: [outcome])
        patch.setattr("fedloom.lab.cli.runs._print_table", lambda *_: None)
        patch.setattr("fedloom.lab.cli.runs._print_failures", lambda *_: None)
        patch.setattr("fedloom.lab.cli.runs._print_conclusions", lambda *_: None)
        codes["run"] = code_of("run", str(tmp_path / "x.toml"), "--out", str(tmp_path / "out"))

    ended: Any = SimpleNamespace(table=list, server=SimpleNamespace(results=tmp_path), sites={})
    shown = {"state": "", "reason": "", "analyses": []}
    with monkeypatch.context() as patch:
        patch.setattr(status, "read_status", lambda _: shown)
        patch.setattr(status, "status_lines", lambda _: [])

        def run_all(*_: Any) -> Any:
            if stop.is_resumable:
                raise ProcessError(f"stops: {stop.value}", stop)
            return ended

        patch.setattr(loopback, "run_all", run_all)
        patch.setattr(server_run, "finished_reason", lambda _: stop)
        codes["deploy local"] = code_of("deploy", "local", str(tmp_path))
    assert codes == dict.fromkeys(codes, EXIT_CODES[stop.status])


@pytest.mark.parametrize("stop", Stop)
def test_the_line_of_the_server_tells_how_the_run_stopped(stop: Stop) -> None:
    error = loopback.stop_error(f"{server_run.STOP_PREFIX}{RunStopped(stop, 'a detail')}")
    assert (error.stop, "a detail" in str(error)) == (stop, True)


@pytest.mark.parametrize("error", [DataError("rows"), Refused("few", rule="small-cells")])
def test_an_analysis_without_an_answer_ends_with_the_same_code_alone_and_in_a_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fedloom_clinic")
    rows = "".join(f"{k % 7},{k % 5},{k % 2},{'abc'[k % 3]}\n" for k in range(90))
    (tmp_path / "x.csv").write_text("age,crp,died,ward\n" + rows)
    (tmp_path / "x.toml").write_text(
        f'rounds = 1\nseeds = [0]\n[data]\nsource = "{tmp_path / "x.csv"}"\ntarget = "died"\ncategorical = ["ward"]\n'
        '[partition]\nkind = "iid"\nclients = 3\n[[method]]\nalgorithm = "fedavg"\n[[analysis]]\nkind = "table-1"\n'
    )
    words, out = (str(tmp_path / "x.toml"), "--out", str(tmp_path / "out")), tmp_path / "out"
    assert (code_of("analyze", "table-1", words[0]), code_of("run", *words)) == (0, 0)

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("fedloom.analyses.analyze", refuse)
        patch.setattr("fedloom.lab.experiment.outputs.analyze", refuse)
        assert (code_of("analyze", "table-1", words[0]), code_of("run", *words, "--force")) == (2, 2)
        assert code_of("run", *words) == 2  # also if nothing is left to do
    assert json.loads((out / "summary.json").read_text())["runs"][0]["status"] == "done"
