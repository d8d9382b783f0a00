"""A deployment on loopback, as far as it goes without starting anything."""

import socket

import pytest
from typer.testing import CliRunner

from fedloom.errors import ConfigError, RunDirError
from fedloom.lab.cli import app
from fedloom.storage.locks import lock
from fedloom_sites.deploy.ops import loopback
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment, run_all
from fedloom_sites.deploy.ops.processes import ManagedProcesses, ProcessError
from fedloom_sites.deploy.setting_files import read_server, settings_text


def local(*words):
    return CliRunner().invoke(app, ["deploy", "local", *map(str, words)])


def test_a_folder_that_is_no_deployment(tmp_path):
    done = local(tmp_path / "nothing")
    assert done.exit_code == 2
    assert "fedloom deploy init" in done.output
    assert not (tmp_path / "nothing").exists()


def test_port_in_use(ready):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = local(ready, "--port", port)
    assert done.exit_code == 2
    assert f"the server: port {port} on 127.0.0.1 is not free" in done.output
    assert not (ready / "local").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("server.key", None, "cannot read the server's private key"),
        ("server.crt", None, "cannot read the server's certificate"),
        ("ca.crt", None, "cannot read the authority's certificate"),
        ("server.key", "authority/ca.key", r"server\.key is not the key of server\.crt; 'fedloom deploy renew'"),
        ("server.key", "README.md", r"server\.key and its certificate cannot be read as PEM; 'fedloom deploy renew'"),
        ("server.crt", "README.md", r"server\.key and its certificate cannot be read as PEM; 'fedloom deploy renew'"),
        ("ca.crt", "README.md", r"ca\.crt is not a certificate in PEM format"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_anything_starts(ready, name, content, sentence):
    file = ready / "server" / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes((ready / content).read_bytes())
    with ManagedProcesses() as processes, pytest.raises(ConfigError, match=sentence):
        LoopbackDeployment(ready, processes).start_server()
    assert not processes.started
    assert not (ready / "local").exists()


def test_one_at_a_time(ready):
    with lock(ready), pytest.raises(RunDirError, match="is in use by process"):
        run_all(ready, lambda _: None)
    assert not (ready / "local").exists()


def test_a_run_whose_server_is_killed_says_how_to_go_on(ready, monkeypatch):
    monkeypatch.setattr(loopback, "command_words", lambda *_, **__: ["true"])
    monkeypatch.setattr(LoopbackDeployment, "status", lambda _: "finished:failed")
    sentence = "the run ended with status finished:failed; run the same command again to resume"
    with ManagedProcesses() as processes, pytest.raises(ProcessError, match=sentence):
        LoopbackDeployment(ready, processes).run(str)


def test_a_site_with_another_experiment_file(ready):
    file = ready / "sites" / "site-2" / "experiment.toml"
    file.write_text(file.read_text().replace("rounds = 3", "rounds = 4"))
    with pytest.raises(
        ConfigError, match=r"sites/site-2/experiment.toml is not the agreed experiment file: its SHA-256 is"
    ):
        LoopbackDeployment(ready, ManagedProcesses())


def test_another_version_of_fedloom(ready):
    file = ready / "server" / "server.toml"
    file.write_text(settings_text(read_server(file).model_copy(update={"version": "9.9.9"})))
    with pytest.raises(ConfigError, match=r"here, but the experiment runs 9\.9\.9"):
        LoopbackDeployment(ready, ManagedProcesses())


def test_sites_reach_the_server_on_loopback_at_ports_of_their_own(ready):
    here = LoopbackDeployment(ready, ManagedProcesses())
    assert here.server.address == "127.0.0.1"
    assert list(here.sites) == ["site-0", "site-1", "site-2"]
    assert here.server.database.is_relative_to(ready / "local")
