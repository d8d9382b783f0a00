"""A study through its life: data that grow every night, a patch release, new keys, a new certificate; no round lost."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from PIL import Image
from safetensors.torch import load_file

from fedloom.errors import ConfigError, RunDirError, Stop
from fedloom.version import __version__
from fedloom_sites.deploy import setting_files, snapshots
from fedloom_sites.deploy.audit import read_entries
from fedloom_sites.deploy.ops import amend
from fedloom_sites.deploy.ops.amend import rotate, upgrade
from fedloom_sites.deploy.ops.directory import Location, renew, write_directory
from fedloom_sites.deploy.ops.members import AgreementChange, accept_agreement
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.protocol import checks, envelope
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site
from fedloom_sites.deploy.settings import Server
from fedloom_sites.deploy.site import client
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.snapshots import declare_snapshot
from tests.commands import call
from tests.deploy.conftest import make_experiment
from tests.deploy.grid import FakeGrid, outside_flower
from tests.deploy.scene import FIRST

SITES = ("birke", "dorn", "esche")
RELEASED = (amend, checks, client, envelope, setting_files)
"""Modules that compare releases of fedloom."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    outside_flower()


def grow(file: Path, rows: int, seed: int) -> None:
    """Append patients to a table."""
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    lines = [f"{a:.6f},{b:.6f},{c:.6f},{int(a > b)}\n" for a, b, c in x]
    if not file.exists():
        file.write_text("a,b,c,ill\n")
    with file.open("a") as out:
        out.writelines(lines)


def deployment(folder: Path, rounds: int, secure: bool = False, days: int = 365) -> Path:
    """A deployment of three hospitals, whose tables have 40 patients each."""
    folder.mkdir()
    grow(folder / "cohort.csv", 40, 99)
    data = {"source": str(folder / "cohort.csv"), "target": "ill"}
    cut = {"kind": "iid", "clients": 3, "test": 0.2, "validation": 0.1}
    tables: dict[str, Any] = {"evaluate": {"every": rounds}, "engine": {"dtype": "float64"}}
    experiment = make_experiment(rounds=rounds, data=data, partition=cut, **tables)
    made = plan_deployment(experiment, 3, names=SITES, own_data=True, secure_aggregation=secure, norm_bound=50.0)
    write_directory(made, folder / "d", Location(days=days))
    for k, site in enumerate(SITES):
        grow(folder / "d" / "sites" / site / "cohort.csv", 40, k)
    return folder / "d"


def server_of(folder: Path) -> Server:
    return read_server(folder / "server" / "server.toml").with_(deadline=0.2, ttl=0.4, patience=0.4)


def run(folder: Path, until: int) -> Stop:
    """Start all processes anew, and run until after a round."""
    clients = [Client(read_site(folder / "sites" / site / "site.toml")) for site in SITES]
    nodes = {FIRST + one.site.client: one.answer for one in clients}

    def fault(_node: int, message: Any, reply: Any) -> Any:
        return reply if message.content["head"]["round"] <= until else None

    return serve_run(FakeGrid(nodes, fault), server_of(folder), lambda _line: None)


def amended(folder: Path, change: AgreementChange, rotated: str = "") -> None:
    """Bring an amendment to the server and to every site."""
    shutil.copytree(change.folder / "server", folder / "server", dirs_exist_ok=True)
    for site in SITES:
        accept_agreement(
            folder / "sites" / site, change.folder / ("site" if site == rotated else "approval"), change.digest
        )


def is_valid(folder: Path, now: datetime) -> bool:
    """Whether a site accepts the server's certificate at a time."""
    ca = x509.load_pem_x509_certificate((folder / "sites" / SITES[0] / "ca.crt").read_bytes())
    certificate = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    verifier = PolicyBuilder().store(Store([ca])).time(now).build_server_verifier(x509.DNSName("localhost"))
    try:
        return bool(verifier.verify(certificate, []))
    except VerificationError:
        return False


def play(folder: Path, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round a day."""
    today, moment = date(2026, 12, 1), datetime.now(UTC)
    for site in SITES:
        assert declare_snapshot(folder / "sites" / site, today.isoformat()).used
    for day in range(1, days + 1):
        now = today + timedelta(days=day)
        for k, site in enumerate(SITES):
            grow(folder / "sites" / site / "cohort.csv", 2, 1000 * day + k)
        if day == days // 3:
            first, second, last = __version__.split(".")
            for module in RELEASED:
                monkeypatch.setattr(module, "__version__", f"{first}.{second}.{int(last) + 1}")
            amended(folder, upgrade(folder))
        if day == days // 2:
            amended(folder, rotate(folder, "dorn"), rotated="dorn")
        if day == 2 * days // 3:
            assert not is_valid(folder, moment + timedelta(days=days))
            renew(folder, None, 365)
        if day % 5 == 3:  # for the next experiment
            assert not declare_snapshot(folder / "sites" / "birke", now.isoformat()).used
        assert run(folder, day) is (Stop.DONE if day == days else Stop.TOO_FEW)
        assert is_valid(folder, moment + timedelta(days=day))


ROUND = ("train", "masked")
LONG = [pytest.param(30, secure, marks=pytest.mark.slow) for secure in (False, True)]


@pytest.mark.parametrize(("days", "secure"), [(4, False), (4, True), *LONG])
def test_a_trial_loses_no_round_and_gives_the_bits_of_a_quiet_one(
    days: int, secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = deployment(tmp_path / "quiet", days, secure)
    (tmp_path / "trial").mkdir()
    folder = Path(shutil.copytree(quiet, tmp_path / "trial" / "d"))
    renew(folder, None, days - 1)  # so that it ends within the trial
    assert run(quiet, days) is Stop.DONE
    play(folder, days, monkeypatch)
    models = [load_file(server_of(one).results / "global.safetensors")["rows"] for one in (quiet, folder)]
    assert torch.equal(*models)
    log = [x for x in read_entries(server_of(folder).audit) if x["what"] == "accepted" and x["kind"] in ROUND]
    for site in SITES:
        assert [x["round"] for x in log if x["site"] == site] == list(range(1, days + 1))
    refused = [x for x in read_entries(server_of(folder).audit) if x["what"] in ("rejected", "refused")]
    assert refused == []
    known = [x for x in read_entries(server_of(folder).audit) if "snapshot of 2026-12-01" in str(x.get("reason"))]
    assert {x["site"] for x in known} == {*SITES}


def test_a_table_that_grows_stops_its_site_and_the_sentence_names_the_snapshot(tmp_path: Path) -> None:
    folder = deployment(tmp_path / "x", 3)
    assert run(folder, 1) is Stop.TOO_FEW
    grow(folder / "sites" / "dorn" / "cohort.csv", 9, 5)
    run(folder, 3)
    refused = [x for x in read_entries(server_of(folder).audit) if x.get("site") == "dorn" and "reason" in x]
    assert any("fedloom deploy snapshot" in str(x["reason"]) for x in refused)


def test_snapshots_belong_to_the_data_and_differ_by_enough_subjects(tmp_path: Path) -> None:
    folder = deployment(tmp_path / "x", 3)
    home = folder / "sites" / "birke"
    table = home / "cohort.csv"
    said = call("deploy", "snapshot", home, "--date", "2026-12-01")
    assert "snapshot of 2026-12-01: 40 subjects" in said
    assert "this experiment reads this snapshot" in said
    first = read_site(home / "site.toml")
    assert Path(first.data["path"] if "path" in first.data else first.data["source"]).read_bytes() == table.read_bytes()
    for day, sentence in (("2026-12-01", "must have a later date"), ("tomorrow", "must have the form 2026-12-01")):
        with pytest.raises(ConfigError, match=sentence):
            declare_snapshot(home, day)
    grow(table, 3, 7)
    with pytest.raises(
        ConfigError,
        match="differs from the snapshot of 2026-12-01 by 3 subjects, but it must differ by 0 or at least 5",
    ):
        declare_snapshot(home, "2026-12-02")
    text = table.read_text().splitlines(keepends=True)
    table.write_text("".join([text[0], *reversed(text[1:])]))
    grow(table, 2, 8)
    second = declare_snapshot(home, "2026-12-03")
    assert (second.subjects, second.used) == (45, True)
    assert read_site(home / "site.toml").snapshot == "2026-12-03"
    table.write_text("".join(text[:41]))
    assert declare_snapshot(home, "2026-12-04").subjects == 40, (
        "the rows of the first one in another order differ in none"
    )
    later = deployment(tmp_path / "y", 2) / "sites" / "birke"
    settings_file = later / "site.toml"
    settings_file.write_text(f'memory = "{home / "state"}"\n{settings_file.read_text()}')
    shutil.copy(table, later / "cohort.csv")
    grow(later / "cohort.csv", 1, 9)
    with pytest.raises(ConfigError, match="by 1 subject, but it must differ by 0 or at least 5"):
        declare_snapshot(later, "2027-01-01")
    path = Path(second.path)
    assert path.stat().st_mode & 0o222 == 0
    path.chmod(0o600)
    path.write_text(path.read_text().replace("1\n", "0\n", 1))
    site = read_site(home / "site.toml").model_copy(update={"snapshot": "2026-12-03"})
    site = site.model_copy(update={"data": {**site.data, "path" if "path" in site.data else "source": str(path)}})
    with pytest.raises(ConfigError, match="has changed since it was declared"):
        snapshots.check_snapshot(site)
    record = first.memory_folder / snapshots.RECORD_FILE
    record.write_text(record.read_text().replace("2026", "2025", 1))
    with pytest.raises(RunDirError, match="damaged"):
        declare_snapshot(home, "2027-02-01")


def test_a_folder_of_images_that_grows_becomes_a_snapshot(tmp_path: Path) -> None:
    """The copy is read in place of the folder, and a change of any of its files is noticed."""
    rng = np.random.default_rng(0)

    def photograph(folder: Path, first: int, count: int) -> None:
        for k in range(first, first + count):
            (folder / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
            image = rng.integers(0, 255, (6, 6), dtype=np.uint8)
            Image.fromarray(image).save(folder / "ab"[k % 2] / f"{k}.png")

    photograph(tmp_path / "pictures", 0, 40)
    cut = {"kind": "iid", "clients": 3, "test": 0.2}
    experiment = make_experiment(rounds=1, data={"source": str(tmp_path / "pictures")}, partition=cut)
    made = plan_deployment(experiment, 3, names=SITES, own_data=True, norm_bound=50.0)
    write_directory(made, tmp_path / "d", Location())
    home = tmp_path / "d" / "sites" / "birke"
    file = home / "site.toml"
    live = read_site(file, live=True)
    key = "path" if "path" in live.data else "source"
    pictures = Path(live.data[key])
    photograph(pictures, 0, 40)
    assert declare_snapshot(home, "2026-12-01").subjects == 40
    photograph(pictures, 40, 2)
    with pytest.raises(ConfigError, match="differs from the snapshot of 2026-12-01 by 2 subjects"):
        declare_snapshot(home, "2026-12-02")
    photograph(pictures, 42, 8)
    second = declare_snapshot(home, "2026-12-03")
    assert (second.subjects, second.used) == (50, True)
    site = read_site(file)
    assert Path(site.data[key]) == second.path
    assert snapshots.check_snapshot(site) == "2026-12-03"
    assert [one.name for one in second.path.parent.iterdir() if one.name.startswith(".")] == []
    one = second.path / "a" / "0.png"
    one.chmod(0o600)
    one.write_bytes((pictures / "a" / "2.png").read_bytes())
    with pytest.raises(ConfigError, match="has changed since it was declared"):
        snapshots.check_snapshot(site)
