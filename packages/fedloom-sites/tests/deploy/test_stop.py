"""deploy stop: a run ends after its round, says so, and goes on to the same model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fedloom.errors import Stop
from fedloom_sites.deploy.ops import run
from fedloom_sites.deploy.ops.status import read_status
from fedloom_sites.deploy.server.run import stop_file
from fedloom_sites.deploy.setting_files import read_server
from tests.commands import call
from tests.deploy.scene import scene


def test_a_stopped_run_loses_no_round_and_resumes_to_the_same_model(tmp_path: Path) -> None:
    whole, here = scene(tmp_path / "whole", "fedavg", rounds=4), scene(tmp_path / "here", "fedavg", rounds=4)
    assert whole.serve() is Stop.DONE

    def stops(_node: int, _message: Any, reply: Any) -> Any:
        if read_status(here.server)["rounds"] == 1:  # while the second one is computed
            stop_file(here.server).write_bytes(b"")
        return reply

    assert here.serve(here.grid(stops)) is Stop.INTERRUPTED
    status = read_status(here.server)
    assert (status["state"], status["rounds"]) == ("stopped", 2)
    assert "fedloom deploy stop" in status["reason"]
    assert here.serve() is Stop.INTERRUPTED  # as long as the file is there, also after a restart of the service
    stop_file(here.server).unlink()
    assert here.serve() is Stop.DONE
    assert torch.equal(here.model(), whole.model())


def test_the_command_asks_for_the_stop_and_a_service_does_not_start_the_run_again(written: Path) -> None:
    file = written / "server" / "server.toml"
    words = [str(file), sys.executable, "-c", "raise SystemExit(5)"]
    assert run.main(words) == run.main([str(written / "none.toml"), *words[1:]]) == 1
    assert "no run is in progress" in call("deploy", "stop", written)
    assert stop_file(read_server(file)).exists()
    assert run.main(words) == 0
    assert "the next start resumes the run" in call("deploy", "stop", written, "--undo")
    assert not stop_file(read_server(file)).exists()
    assert run.main(words) == 1
