"""A site's tasks ask for a secret, and run the app that is installed at the site, whatever the server sends."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedloom.deploy.apps import client_app
from fedloom.deploy.ops.commands import command
from fedloom.deploy.settings import read_site
from fedloom.deploy.site import pinned
from fedloom.deploy.site.pinned import PROGRAM, SECRET, start_executor


def words(folder: Path) -> list[str]:
    """A site's network process, beside a program that writes down how it was started."""
    program = folder / "flower-superexec"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/words\necho "$PATH" > {folder}/path\n')
    program.chmod(0o700)
    return [str(folder / "flower-supernode"), "--port", "9094", SECRET, str(folder / "secret")]


def ended(pid: int) -> None:
    os.waitpid(pid, 0)


def test_the_process_that_starts_tasks_has_the_secret_and_the_sites_own_program(tmp_path: Path) -> None:
    given, secrets = words(tmp_path), []
    for _ in range(2):
        ended(start_executor(given, tmp_path))
        assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
        secrets.append((tmp_path / "secret").read_bytes())
    assert [len(s) for s in secrets] == [32, 32]
    assert secrets[0] != secrets[1]
    started = (tmp_path / "words").read_text().split()
    assert started == [
        *("--insecure", "--runtime-api-address", "127.0.0.1:9094"),
        *(SECRET, str(tmp_path / "secret"), "--parent-pid", str(os.getpid())),
    ]
    first = (tmp_path / "path").read_text().split(os.pathsep)[0]
    assert first == str(tmp_path / "bin")
    assert stat.S_IMODE((Path(first) / PROGRAM).stat().st_mode) == 0o700


def test_the_program_of_a_task_is_flowers_but_for_the_app(tmp_path: Path) -> None:
    ended(start_executor(words(tmp_path), tmp_path))
    shown = subprocess.run(
        [tmp_path / "bin" / PROGRAM, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Run a Flower ClientApp" in shown.stdout


def test_what_the_server_sent_is_not_installed_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    seen: list[Any] = []

    def task() -> None:
        assert run_clientapp.install_from_fab(b"what the server sent", skip_prompt=True) is None
        load = run_clientapp.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        seen.append(load("an app", "1.0.0", "0" * 64))

    for name in ("install_from_fab", "get_project_dir", "get_load_client_app_fn"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    monkeypatch.setattr(sys.modules[flwr_clientapp.__module__], "flwr_clientapp", task)
    pinned.main()
    assert seen == [client_app]


def test_a_site_is_started_with_a_secret_of_its_own(written: Path) -> None:
    """By the command of its unit and of `deploy local`; the secret is not in the directory that `init` writes."""
    [file, *_] = sorted(written.glob("sites/*/site.toml"))
    made = command("supernode", read_site(file), file=file)
    assert made[made.index("--isolation") + 1] == "process"
    secret = Path(made[made.index(SECRET) + 1])
    assert secret.parent == file.parent / "state"
    assert not secret.exists()
    for unit in written.glob("sites/*/*.service"):
        assert f"--isolation process {SECRET}" in unit.read_text()
