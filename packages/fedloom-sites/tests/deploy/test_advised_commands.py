"""Messages that advise a command of `fedloom deploy`: the command, run in the place that they name, is a cure."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from typer.testing import CliRunner

from fedloom.errors import FedloomError
from fedloom.lab.cli import app
from fedloom_sites.deploy.ops import keys
from fedloom_sites.deploy.ops.loopback import check_certificate
from fedloom_sites.deploy.ops.status import read_status, status_lines
from fedloom_sites.deploy.server.run import STOP_HINT, stop_file
from fedloom_sites.deploy.setting_files import read_server, read_site
from fedloom_sites.deploy.site.approval import check_approved

Cure = Callable[[], None]
"""Runs the advised command, and checks that the fault is gone."""
ADVISED = re.compile(r"fedloom deploy ([a-z-]+)")


class Machines(NamedTuple):
    """A coordinator with the directory of a deployment, and a site with its own folder on another machine."""

    whole: Path
    site: Path


@pytest.fixture
def machines(written: Path, tmp_path: Path) -> Machines:
    whole = shutil.copytree(written, tmp_path / "coordinator" / "try")
    return Machines(whole, shutil.copytree(written / "sites" / "site-1", tmp_path / "hospital" / "site"))


def call(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["deploy", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def check(site: Path, *, code: int) -> str:
    return call("check", site, "--offline", code=code)


def digest_in(text: str) -> str:
    return str(re.findall(r"[0-9a-f]{64}", text)[0])


def approve(site: Path, *change: Path) -> None:
    """As every message about approval says: without a digest the command prints it, with the digest it approves."""
    call("approve", site, *change, "--digest", digest_in(call("approve", site, *change)))
    check_approved(read_site(site / "site.toml"))


def rotate(here: Machines) -> None:
    """As the printed steps say: new keys for the site, which approves them."""
    said = call("rotate", here.whole, "site-1")
    assert "deploy approve /srv/fedloom/site site --digest" in " ".join(said.split())
    approve(here.site, here.whole / "changes" / "keys-site-1" / "site")
    check(here.site, code=0)


def renew(here: Machines) -> None:
    call("renew", here.whole)
    check_certificate(read_server(here.whole / "server" / "server.toml"))
    assert days_left(here) > 300


def outdate(here: Machines, *, authority: int, server: int) -> None:
    """Let the certificates of the authority and of the server end in so many days."""
    then = datetime.now(UTC) - timedelta(days=1000)
    ca = keys.make_authority("try", 1000 + authority, then)
    made = keys.issue_server_certificate(ca, ["fl.example.org"], 1000 + server, then)
    for path in (here.whole / "authority" / "ca.crt", here.whole / "server" / "ca.crt", here.site / "ca.crt"):
        path.write_bytes(ca.pem())
    (here.whole / "authority" / "ca.key").write_bytes(ca.private())
    (here.whole / "server" / "server.crt").write_bytes(made.certificate)
    (here.whole / "server" / "server.key").write_bytes(made.key)


def days_left(here: Machines) -> int:
    content = (here.whole / "server" / "server.crt").read_bytes()
    return (x509.load_pem_x509_certificate(content).not_valid_after_utc - datetime.now(UTC)).days


def require_approval(here: Machines) -> str:
    file = here.site / "site.toml"
    file.write_text(re.sub(r"approval = \w+", "approval = true", file.read_text()))
    with pytest.raises(FedloomError) as refused:
        check_approved(read_site(file))
    return str(refused.value)


def play_foreign_key(here: Machines, name: str) -> tuple[str, Cure]:
    shutil.copy(here.whole / "sites" / "site-0" / name, here.site / name)
    return check(here.site, code=1), lambda: rotate(here)


def play_lost_key(here: Machines) -> tuple[str, Cure]:
    (here.site / "signing-key").unlink()
    return check(here.site, code=1), lambda: rotate(here)


def play_approval(here: Machines) -> tuple[str, Cure]:
    return require_approval(here), lambda: approve(here.site)


def play_expired_certificate(here: Machines) -> tuple[str, Cure]:
    outdate(here, authority=2000, server=-1)
    said = "\n".join(status_lines(read_status(read_server(here.whole / "server" / "server.toml"))))
    return said, lambda: renew(here)


def play_damaged_certificate(here: Machines) -> tuple[str, Cure]:
    shutil.copy(here.whole / "authority" / "ca.key", here.whole / "server" / "server.key")
    server = read_server(here.whole / "server" / "server.toml")
    with pytest.raises(FedloomError) as refused:
        check_certificate(server)
    return str(refused.value), lambda: renew(here)


def play_stopped_run(here: Machines) -> tuple[str, Cure]:
    call("stop", here.whole)

    def undo() -> None:
        call("stop", here.whole, "--undo")
        assert not stop_file(read_server(here.whole / "server" / "server.toml")).exists()

    return STOP_HINT, undo


SITUATIONS: dict[str, tuple[Callable[[Machines], tuple[str, Cure]], str]] = {
    "another site's signing key": (lambda here: play_foreign_key(here, "signing-key"), "rotate"),
    "another site's connection key": (lambda here: play_foreign_key(here, "node-key"), "rotate"),
    "a lost key": (play_lost_key, "rotate"),
    "a run without approval": (play_approval, "approve"),
    "an expired certificate": (play_expired_certificate, "renew"),
    "a damaged certificate": (play_damaged_certificate, "renew"),
    "a stopped run": (play_stopped_run, "stop"),
}
"""How each message comes about, with its cure, and the command that it advises."""


@pytest.mark.parametrize("name", SITUATIONS)
def test_an_advised_command_is_a_cure_where_it_is_advised(name: str, machines: Machines) -> None:
    play, command = SITUATIONS[name]
    said, cure = play(machines)
    assert set(ADVISED.findall(said)) == {command}
    cure()


def test_an_expired_authority_needs_a_new_deployment(machines: Machines) -> None:
    """Renewing is not advised, because the authority of the sites would reject its result."""
    outdate(machines, authority=-1, server=-1)
    for said in (check(machines.site, code=1), call("renew", machines.whole, code=2)):
        assert set(ADVISED.findall(said)) == {"init"}
        assert "--days" not in said
    lines = status_lines(read_status(read_server(machines.whole / "server" / "server.toml")))
    assert any("authority's certificate expired" in line and "start a new deployment" in line for line in lines)


def test_a_certificate_lasts_as_long_as_its_authority(machines: Machines) -> None:
    outdate(machines, authority=40, server=-1)
    [days] = re.findall(r"--days must be at most (\d+)", call("renew", machines.whole, code=2))
    call("renew", machines.whole, "--days", days)
    assert days_left(machines) == int(days) - 1


def test_a_wrong_folder_of_a_change_names_the_right_one(machines: Machines) -> None:
    call("rotate", machines.whole, "site-1")
    change = machines.whole / "changes" / "keys-site-1"
    said = call("approve", machines.site, change, code=2)
    assert "at the site that gets new keys, its folder 'site'" in said
    said = call("approve", machines.site, change / "approval", code=2)
    assert "Take the folder with the site's new keys" in said
    approve(machines.site, change / "site")
    approve(machines.site, change / "site")  # again, as after a crash
    check(machines.site, code=0)
    said = call("rotate", machines.whole, "site-1", code=2)
    assert f"{change} already exists. Use this folder" in said


def test_a_site_on_another_machine_does_not_begin_a_new_memory(machines: Machines, tmp_path: Path) -> None:
    """Its sums and budgets are in a folder that does not move with the folder of the site."""
    file, memory = machines.site / "site.toml", tmp_path / "former" / "memory"
    file.write_text(f'memory = "{memory}"\nepsilon = 3.0\n' + file.read_text())
    said = check(machines.site, code=1)
    assert f"{memory}, does not exist, so the site would forget the sums and budgets of its data" in said
    assert not memory.exists()
    memory.mkdir(parents=True)
    assert "does not exist" not in CliRunner().invoke(app, ["deploy", "check", str(machines.site), "--offline"]).output
