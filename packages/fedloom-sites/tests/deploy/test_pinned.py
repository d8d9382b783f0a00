"""A site's tasks ask for a secret, and run the app that is installed at the site, whatever the server sends."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom_sites.deploy.apps import client_app
from fedloom_sites.deploy.ops.commands import command_words, process_environment
from fedloom_sites.deploy.ops.processes import ManagedProcess, ProcessError
from fedloom_sites.deploy.setting_files import read_site
from fedloom_sites.deploy.site import pinned
from fedloom_sites.deploy.site.pinned import CLIENT_PROGRAM, REFUSED_CONNECTION_HINT, SECRET_OPTION, start_executor


def started(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """What the process that starts a site's tasks is given, from itself."""
    from fedloom_sites import flwr_adapter

    seen = folder / "seen.json"

    def write(address: str, *, superexec_auth_secret: bytes, **options: object) -> None:
        known = {"address": address, "secret": superexec_auth_secret.hex(), "path": os.environ["PATH"], **options}
        seen.write_text(json.dumps({**known, "own parent": os.getppid()}))

    monkeypatch.setattr(flwr_adapter, "run_superexec", write, raising=False)  # it keeps the name once it is used
    os.waitpid(start_executor(["flower-supernode", "--port", "9094", SECRET_OPTION, str(folder / "secret")], folder), 0)
    arguments: dict[str, Any] = json.loads(seen.read_text())
    return arguments


def test_the_process_that_starts_tasks_has_the_secret_and_the_sites_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, folder = [], tmp_path / "state" / "experiment"  # which somebody has removed since the site was checked
    for _ in range(2):
        given = started(monkeypatch, folder)
        assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
        assert given.pop("secret") == (folder / "secret").read_bytes().hex()
        secrets.append((folder / "secret").read_bytes())
    assert [len(s) for s in secrets] == [32, 32]
    assert secrets[0] != secrets[1]
    first = given.pop("path").split(os.pathsep)[0]
    here = os.getpid()
    assert given == {"address": "127.0.0.1:9094", "insecure": True, "parent_pid": here, "own parent": here}
    assert first == str(folder / "bin")
    assert stat.S_IMODE((Path(first) / CLIENT_PROGRAM).stat().st_mode) == 0o700


def test_the_program_of_a_task_is_the_sites_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, tmp_path)
    shown = subprocess.run(
        [tmp_path / "bin" / CLIENT_PROGRAM, "--help"], capture_output=True, text=True, check=True, timeout=600
    )
    assert "with the app that is installed here" in " ".join(shown.stdout.split())


def test_what_the_server_sent_is_not_installed_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supernode.runtime import run_clientapp

    seen: list[Any] = []

    def task(address: str, token: str, **options: object) -> None:
        assert run_clientapp.install_from_fab(b"what the server sent", skip_prompt=True) is None
        load = run_clientapp.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        seen.extend([load("an app", "1.0.0", "0" * 64), address, token, options])

    for name in ("install_from_fab", "get_project_dir", "get_load_client_app_fn"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    monkeypatch.setattr(run_clientapp, "run_clientapp", task)
    words = ["--runtime-api-address", "127.0.0.1:9", "--token", "abc", "--parent-pid", "7", "--insecure"]
    monkeypatch.setattr(sys, "argv", [CLIENT_PROGRAM, *words])
    pinned.main()
    assert seen == [client_app, "127.0.0.1:9", "abc", {"insecure": True, "parent_pid": 7}]


def test_a_site_is_started_with_a_secret_of_its_own(written: Path) -> None:
    """By the command of its unit and of `deploy local`; the secret is not in the directory that `init` writes."""
    [file, *_] = sorted(written.glob("sites/*/site.toml"))
    made = command_words("supernode", read_site(file), file=file)
    assert made[made.index("--isolation") + 1] == "process"
    secret = Path(made[made.index(SECRET_OPTION) + 1])
    assert secret.parent == file.parent / "state"
    assert not secret.exists()


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (60, "the clock is 60 s ahead of the server's clock, but at most 5 s are allowed. A signature from the future"),
        (-400, "the clock is 400 s behind the server's clock, but at most 300 s are allowed. A signature from the"),
        (0, "although the clocks agree. The key is no longer known to the server because it was revoked or replaced"),
        (None, "the server rejects this site's signature"),
    ],
)
def test_a_site_whose_signature_is_rejected_says_why_and_ends_with_an_error(
    seconds: float | None, sentence: str, tmp_path: Path
) -> None:
    """On its own, Flower ends the process without a reason and with exit code 0."""
    program = """if True:
        import sys
        from datetime import UTC, datetime, timedelta
        import httpx
        from fedloom_sites.deploy import clock
        from fedloom_sites.deploy.site import pinned
        from fedloom_sites.flwr_adapter import NodeAuthHttpInterceptor
        NodeAuthHttpInterceptor.intercept = lambda _self, _context, call_next: call_next(None)
        pinned.explain_rejected_signatures()
        noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
        class Clock(datetime):
            now = classmethod(lambda cls, _zone: noon + timedelta(seconds=float(sys.argv[1])))
        clock.datetime = Clock
        headers = {"Date": "Thu, 01 Jan 2026 12:00:00 GMT"} if sys.argv[1:] else {}
        for status in (200, 412, 401):
            NodeAuthHttpInterceptor.intercept(None, None, lambda _: httpx.Response(status, headers=headers))
            print(status, flush=True)
    """
    words = [sys.executable, "-c", program, *([] if seconds is None else [str(seconds)])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (1, "200\n412\n")
    [line] = done.stderr.splitlines()
    assert line.startswith("fedloom: the server rejects this site's signature")
    assert sentence in line
    assert ("Synchronize the clock with NTP" if seconds else "Ask the coordinator") in line


def test_a_site_that_is_not_let_in_is_told_why_and_what_to_do(tmp_path: Path) -> None:
    """Flower has an exit code for a key that it does not know and for one in use, and no reason."""
    program = """if True:
        import sys
        from flwr.supercore.exit import ExitCode, flwr_exit
        from importlib import import_module
        from fedloom_sites.deploy.site import pinned
        pinned.start_executor = lambda *_: None
        node = import_module("flwr.supernode.cli.flower_supernode")
        node.flower_supernode = lambda: flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, "[code: 2004] why")
        pinned.run_network(["flower-supernode"], sys.argv[1])
    """
    process = ManagedProcess(
        "site", [sys.executable, "-c", program, "."], process_environment(tmp_path), tmp_path / "log"
    )
    while process.alive():
        time.sleep(0.05)
    with pytest.raises(ProcessError, match="site ended with exit status 1") as refusal:
        process.check()
    [_, *lines] = str(refusal.value).splitlines()
    assert lines == ["Exit Code: 305", "[code: 2004] why", REFUSED_CONNECTION_HINT]
