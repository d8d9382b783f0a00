"""Sites that come and go: a new agreement, which every site approves for itself, and approval of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedloom.errors import ConfigError, Refused, RunDirError, Stop
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from fedloom.storage.checkpoint import Checkpoints
from fedloom.version import __version__
from fedloom_sites.deploy import setting_files
from fedloom_sites.deploy.audit import SENT_FILE, read_entries
from fedloom_sites.deploy.ops import amend as amendments
from fedloom_sites.deploy.ops import keys, members
from fedloom_sites.deploy.ops.amend import rotate, upgrade
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment
from fedloom_sites.deploy.ops.members import accept_agreement, add, check_proposal, keys_digest, remove
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses
from fedloom_sites.deploy.protocol import checks, envelope
from fedloom_sites.deploy.protocol.identity import public_key_line
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site
from fedloom_sites.deploy.settings import Server, Site
from fedloom_sites.deploy.site import client
from fedloom_sites.deploy.site.client import Client
from tests.commands import call
from tests.deploy.conftest import make_experiment
from tests.deploy.grid import FakeGrid, outside_flower
from tests.deploy.scene import FIRST

RELEASED = (amendments, checks, client, envelope, setting_files)
"""Modules that compare releases of fedloom."""
ROUND = ("train", "masked")
QUICK: dict[str, Any] = {"deadline": 0.2, "ttl": 0.4, "patience": 0.4}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    outside_flower()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "secure"])
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A deployment of three sites with data of their own, whose run stopped after round 1 of 3."""
    outside_flower()
    folder = tmp_path_factory.mktemp("members") / "d"
    experiment = make_experiment(rounds=3, partition={"kind": "iid", "clients": 3, "max_train_per_client": 30})
    write_directory(
        plan_deployment(experiment, 3, own_data=True, secure_aggregation=request.param, norm_bound=50.0),
        folder,
        Location(),
    )
    assert serve_run(grid(folder, range(3), rounds=1), read(folder), lambda _: None) is Stop.TOO_FEW
    return folder, request.param


@pytest.fixture
def ready(trained: tuple[Path, bool], tmp_path: Path) -> Path:
    return shutil.copytree(trained[0], tmp_path / "d")


def read(folder: Path) -> Server:
    return read_server(folder / "server" / "server.toml").with_(**QUICK)


def grid(folder: Path, clients: Any, rounds: int = 99) -> FakeGrid:
    """The sites of a deployment on a grid; what is of a later round never arrives."""
    sites = [Client(read_site(path)) for path in sorted(folder.glob("sites/*/site.toml"))]
    nodes = {FIRST + c.site.client: c.answer for c in sites if c.site.client in clients}
    return FakeGrid(nodes, lambda _n, message, reply: reply if message.content["head"]["round"] <= rounds else None)


def apply(folder: Path, change: members.AgreementChange, approving: Any = range(3)) -> None:
    """Bring a change to the server, the new site, and the sites that approve."""
    shutil.copytree(change.folder / "server", folder / "server", dirs_exist_ok=True)
    shutil.copytree(change.folder / "site", folder / "sites" / "new")
    for c in approving:
        accept_agreement(folder / "sites" / f"site-{c}", change.folder / "approval", change.digest)


def amend(folder: Path, change: members.AgreementChange, rotated: int | None = None, approving: Any = range(3)) -> None:
    """Bring an amendment to the server and to the sites that approve."""
    shutil.copytree(change.folder / "server", folder / "server", dirs_exist_ok=True)
    for c in approving:
        accept_agreement(
            folder / "sites" / f"site-{c}", change.folder / ("site" if c == rotated else "approval"), change.digest
        )


def run_release(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let every module be of another release."""
    for module in RELEASED:
        monkeypatch.setattr(module, "__version__", version)


def next_patch() -> str:
    first, second, last = __version__.split(".")
    return f"{first}.{second}.{int(last) + 1}"


def memory(folder: Path) -> dict[str, bytes]:
    """What the sites remember, of models, sums and budgets, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.glob("sites/*/state/**/*"))
        if path.is_file() and path.suffix in (".json", ".state", ".safetensors")
    }


def test_new_keys_and_a_patch_release_within_an_experiment_change_no_bit(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.copytree(ready, tmp_path / "whole")
    assert serve_run(grid(whole, range(3)), read(whole), lambda _: None) is Stop.DONE
    secure, kept = read(ready).secure is not None, memory(ready)
    old = read(ready).sites[1]
    rotated = rotate(ready, "site-1")
    amend(ready, rotated, rotated=1)
    assert (rotated.digest != read(whole).digest) is secure
    new = read(ready).sites[1]
    assert (new.site, new.client) == (old.site, old.client)
    assert {old.node_key, old.signing_key}.isdisjoint({new.node_key, new.signing_key})
    private = ready / "sites" / "site-1" / "signing-key"
    assert public_key_line(private.read_bytes()) == new.signing_key
    assert private.stat().st_mode & 0o777 == 0o600
    assert memory(ready) == kept, "state, sums and budgets stay"
    assert (ready / "server" / "nodes" / "site-1.pub").read_text().strip() == new.node_key
    assert serve_run(grid(ready, range(3), rounds=2), read(ready), lambda _: None) is Stop.TOO_FEW
    run_release(monkeypatch, next_patch())
    with pytest.raises(ConfigError, match="fedloom deploy upgrade"):
        serve_run(grid(ready, range(3)), read(ready), lambda _: None)
    upgraded = upgrade(ready)
    amend(ready, upgraded, approving=range(2))
    late = read_site(ready / "sites" / "site-2" / "site.toml")
    with pytest.raises(ConfigError, match="the experiment runs"):
        _ = Client(late).trainer.experiment
    amend(ready, upgraded, approving=[2])
    sites = [read_site(p) for p in sorted(ready.glob("sites/*/site.toml"))]
    assert {site.digest for site in sites} == {read(ready).digest} == {upgraded.digest}
    assert serve_run(grid(ready, range(3)), read(ready), lambda _: None) is Stop.DONE
    models = [load_file(read(folder).results / "global.safetensors")["rows"] for folder in (whole, ready)]
    torch.testing.assert_close(*models, rtol=0, atol=0)
    log = read_entries(read(ready).audit)
    assert [x["round"] for x in log if x["what"] == "accepted" and x["site"] == "site-1" and x["kind"] in ROUND] == [
        x["round"] for x in read_entries(read(whole).audit)
        if x["what"] == "accepted" and x["site"] == "site-1" and x["kind"] in ROUND
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "0.2.0"}, "not a patch release"),
        ({"fixed_data": True}, "the agreement changes"),
        ({"data_name": "other"}, "the agreement changes"),
        ({"models_per_round": 9}, "the agreement changes"),
        ({"epsilon": 9.0}, "settings that belong to the site"),
    ],
)
def test_an_amendment_changes_nothing_else(change: dict[str, Any], sentence: str, ready: Path) -> None:
    made = rotate(ready, "site-1")
    site = ready / "sites" / "site-0"
    check_proposal(site, made.folder / "approval")
    file = made.folder / "approval" / "agreement.json"
    document = json.loads(file.read_text())
    document["shared"] |= change
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=sentence):
        check_proposal(site, made.folder / "approval")


def test_rotated_keys_go_to_their_site_alone(ready: Path) -> None:
    change = rotate(ready, "site-1")
    with pytest.raises(ConfigError, match=r"agreement.json.*Name the folder 'approval'"):
        check_proposal(ready / "sites" / "site-1", change.folder)
    with pytest.raises(ConfigError, match="Take the folder with the site's new keys"):
        check_proposal(ready / "sites" / "site-1", change.folder / "approval")
    with pytest.raises(ConfigError, match="the agreement names a different signing key for this site"):
        check_proposal(ready / "sites" / "site-0", change.folder / "site")
    with pytest.raises(ConfigError, match="already exists"):
        rotate(ready, "site-1")
    with pytest.raises(ConfigError, match="no site is called nope"):
        rotate(ready, "nope")
    if read(ready).secure is not None:
        file = change.folder / "approval" / "agreement.json"
        document = json.loads(file.read_text())
        document["shared"]["secure"]["keys"][2] = keys.make_key_pair("signing").public
        file.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match="cannot be approved|more than the keys of one site"):
            check_proposal(ready / "sites" / "site-0", change.folder / "approval")


@pytest.mark.parametrize("kind", ["node_key", "signing_key"])
def test_an_agreement_in_which_two_sites_have_one_key_is_not_approved(kind: str, ready: Path) -> None:
    change = rotate(ready, "site-1")
    file = change.folder / "approval" / "agreement.json"
    document = json.loads(file.read_text())
    document["members"][2][kind] = document["members"][1][kind]
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"site-1 and site-2 have the same {kind}, but every site needs its own"):
        check_proposal(ready / "sites" / "site-0", change.folder / "approval")


def test_an_upgrade_is_to_another_patch_release_only(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="already runs fedloom .*Install the new release first"):
        upgrade(ready)
    run_release(monkeypatch, "9.9.9")
    with pytest.raises(ConfigError, match="only the last part of the version number may change"):
        upgrade(ready)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Test losses of the global model after the last round, by client."""
    table = pq.read_table(read(folder).results / "metrics.parquet").to_pylist()
    chosen = [
        r for r in table if (r["model"], r["part"], r["metric"]) == ("global", "test", "loss") and r["client"] >= 0
    ]
    return [(r["client"], r["value"]) for r in chosen if r["round"] == chosen[-1]["round"]]


def test_a_site_joins_later_and_training_goes_on_from_the_last_model(ready: Path) -> None:
    last = load_file(ready / "server" / "results" / "global.safetensors")["rows"].reshape(-1)
    change = add(ready, "new", Location())
    apply(ready, change)
    server = read(ready)
    assert (server.clients, server.digest) == (4, change.digest)
    sites = [read_site(p) for p in sorted(ready.glob("sites/*/site.toml"))]
    assert {site.digest for site in sites} == {change.digest}
    [received] = [Client(sites[0]).trainer.job.oracle.layout.d]
    assert received == len(last)
    start = torch.cat([t.flatten() for t in load_file(ready / "server" / "weights.safetensors").values()])
    assert torch.equal(start.sort().values, last.sort().values)
    assert serve_run(grid(ready, range(4)), server, lambda _: None) is Stop.DONE
    log = read_entries(server.audit)
    assert {x["site"] for x in log if x["what"] == "accepted"} == {"site-0", "site-1", "site-2", "new"}
    document = tomllib.loads((ready / "server" / "experiment.toml").read_text())
    assert document["method"][0]["rounds"] == 2
    further = add(ready, "further", Location(memory="/srv/memory")).folder / "site"
    assert tomllib.loads((further / "site.toml").read_text())["memory"] == "/srv/memory"
    assert "/srv/memory" in (further / "fedloom-site.service").read_text()


@pytest.mark.parametrize(("every", "secure"), [(2, False), (9, True)])
def test_a_site_that_joins_after_a_kill_begins_with_the_model_of_the_counted_rounds(
    every: int, secure: bool, tmp_path: Path
) -> None:
    """The files of results are of the last evaluation; the counted rounds and the model agree anyway."""
    cut = {"kind": "iid", "clients": 3, "max_train_per_client": 30}
    experiment = make_experiment(rounds=9, partition=cut, evaluate={"every": every})
    folder = tmp_path / "d"
    write_directory(
        plan_deployment(experiment, 3, own_data=True, secure_aggregation=secure, norm_bound=50.0), folder, Location()
    )
    server = read(folder)

    def killed(line: str) -> None:
        if "round 3/9" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve_run(grid(folder, range(3)), server, killed)
    evaluated = load_file(server.results / "global.safetensors")["rows"].reshape(-1)
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    add(folder, "new", Location())
    assert before == {path: path.read_bytes() for path in before}
    assert {*folder.rglob("*")} == {*before, *(p for p in folder.rglob("*") if p.is_dir() or "changes" in p.parts)}
    change = folder / "changes" / "new" / "server"
    assert tomllib.loads((change / "experiment.toml").read_text())["method"][0]["rounds"] == 9 - 3
    start = torch.cat([t.flatten() for t in load_file(change / "weights.safetensors").values()]).sort().values
    assert not torch.equal(start, evaluated.sort().values)
    newest = Checkpoints(server.checkpoints).load(server.fingerprint[:16])
    assert newest is not None
    assert newest.meta["round"] == 3
    assert torch.equal(start, newest.tensors["server.x"].reshape(-1).sort().values)


def test_a_method_without_a_global_model_admits_no_further_site_after_its_first_round(tmp_path: Path) -> None:
    cut = {"kind": "iid", "clients": 3, "max_train_per_client": 30}
    experiment = make_experiment("fedper", rounds=3, partition=cut)
    folder = tmp_path / "d"
    write_directory(plan_deployment(experiment, 3, own_data=True), folder, Location())
    assert serve_run(grid(folder, range(3), rounds=1), read(folder), lambda _: None) is Stop.TOO_FEW
    with pytest.raises(Refused, match=r"no global model \(fedper\).*after round 1. Start a new deployment of all"):
        add(folder, "new", Location())
    assert not (folder / "changes").exists()


def test_the_printed_steps_name_every_folder_and_the_start_of_a_stopped_run(ready: Path) -> None:
    """Following the lines leads to a run that starts."""
    call("deploy", "stop", ready)
    for name, words in (("new", ("add", "new")), ("keys-site-1", ("rotate", "site-1"))):
        said = " ".join(call("deploy", words[0], ready, words[1]).split())
        change = ready / "changes" / name
        assert all(str(change / part) in said for part in ("site", "server"))
        asks_all = name == "new" or read(ready).secure is not None  # only they know the keys of other sites
        assert (str(change / "approval") in said) is asks_all
        assert (
            f"cp -r {change / 'server'}/. /srv/fedloom/server (for a trial on this machine: {ready / 'server'})" in said
        )
        assert f"supernode register /srv/fedloom/server/nodes/{words[1]}.pub" in said
        assert (f"fedloom deploy stop {ready} --undo" in said) is (words[0] == "rotate")
    shutil.copytree(change / "server", ready / "server", dirs_exist_ok=True)
    assert serve_run(grid(ready, ()), read(ready), lambda _: None) is Stop.INTERRUPTED
    call("deploy", "stop", ready, "--undo")
    assert serve_run(grid(ready, ()), read(ready), lambda _: None) is Stop.TOO_FEW


def test_the_unit_of_a_new_site_can_start_and_reach_the_server(ready: Path) -> None:
    file = ready / "server" / "server.toml"
    file.write_text(file.read_text().replace('public = "localhost:8443"', 'public = "192.0.2.7:8443"'))
    folder = add(ready, "new", Location()).folder / "site"
    unit = (folder / "fedloom-site.service").read_text()
    assert "IPAddressAllow=localhost 192.0.2.7\n" in unit
    [paths] = re.findall("^ReadWritePaths=(.*)", unit, re.MULTILINE)
    assert all((folder / Path(path).relative_to("/srv/fedloom/site")).is_dir() for path in paths.split())


def test_a_further_site_gets_nothing_of_the_file_of_another(tmp_path: Path) -> None:
    """On one machine it would train on that site's patients, or multiply its own columns by that site's factors."""
    (tmp_path / "amsel.csv").write_text("age,ill\n" + "\n".join(f"{30 + k},{k % 2}" for k in range(40)))
    table = {"source": str(tmp_path / "amsel.csv"), "target": "ill"}
    document = {"data": table, "partition": {"kind": "iid", "clients": 2}, "method": [{"algorithm": "fedavg"}]}
    write_directory(plan_deployment(parse(document), 2, own_data=True), tmp_path / "d", Location())
    file = tmp_path / "d" / "sites" / "site-0" / "site.toml"
    before = tomllib.loads(file.read_text())
    own = {"path": table["source"], "missing": ["-9"], "factors": {"age": 12.0}, "separator": ","}
    file.write_text(tomli_w.dumps(before | {"data": before["data"] | own}))
    further = tomllib.loads((add(tmp_path / "d", "new", Location()).folder / "site" / "site.toml").read_text())
    assert further["data"] == before["data"] == {"source": "csv", "target": "ill", "path": "amsel.csv"}


def test_a_further_site_gets_the_folders_of_the_deployment(tmp_path: Path) -> None:
    place = Location(home=Path("/data/fl"), programs=Path("/usr/local/fl/bin"))
    experiment = make_experiment(partition={"kind": "iid", "clients": 3})
    write_directory(plan_deployment(experiment, 3, own_data=True), tmp_path / "d", place)
    for words, home in (([], "/data/fl"), (["--home", "/srv/other"], "/srv/other")):
        done = CliRunner().invoke(app, ["deploy", "add", str(tmp_path / "d"), f"new{len(words)}", *words])
        assert done.exit_code == 0, done.output
        [unit] = (tmp_path / "d" / "changes" / f"new{len(words)}" / "site").glob("*.service")
        assert f"WorkingDirectory={home}/site\n" in unit.read_text()
        assert "ExecStart=/usr/local/fl/bin/" in unit.read_text()


def test_a_server_that_adds_a_site_by_itself_learns_nothing(ready: Path) -> None:
    """The sites stay with their agreement: they answer no message of another one, and nothing of them leaves."""
    files = {p: len(read_entries(p)) for p in ready.glob(f"sites/*/state/*/{SENT_FILE}")}
    apply(ready, add(ready, "new", Location()), approving=())
    assert serve_run(grid(ready, range(4)), read(ready), lambda _: None) is Stop.TOO_FEW
    fresh = [line for p, n in files.items() for line in read_entries(p)[n:]]
    assert fresh
    assert {(line["status"], line["bytes"], line["numbers"]) for line in fresh} == {("refused", 0, 0)}
    reasons = {x["reason"] for x in read_entries(read(ready).audit) if x["what"] == "rejected"}
    assert reasons
    assert all("experiment is" in reason for reason in reasons)
    assert all(
        reason.endswith(". The site has a different agreement, or has not approved this one") for reason in reasons
    )


def test_a_key_that_a_server_slips_into_its_own_list_gets_nothing(trained: tuple[Path, bool], ready: Path) -> None:
    """Under secure aggregation, with the fingerprint as it was: no site shares a secret with a key it does not know."""
    if not trained[1]:
        pytest.skip("without masks the server reads each upload anyway")
    change = add(ready, "new", Location())
    forged = read_server(change.folder / "server" / "server.toml")
    old = read(ready)
    rogue = old.with_(clients=4, sites=forged.sites, secure=forged.secure, quorum=3, checkpoints=ready / "rogue")
    files = {p: len(read_entries(p)) for p in ready.glob(f"sites/*/state/*/{SENT_FILE}")}
    assert serve_run(grid(ready, range(3)), rogue, lambda _: None) is Stop.TOO_FEW
    fresh = [line for p, n in files.items() for line in read_entries(p)[n:]]
    assert not [line for line in fresh if line["kind"] in ("shares", "masked", "unmask") and line["status"] == "ok"]


BENT = {
    "the experiment file has changed": lambda c: (c / "experiment.toml").write_text("name = 'other'\n[[method]]"),
    "the initial model has changed": lambda c: (c / "weights.safetensors").write_bytes(b"other"),
    "the experiment file names other members": lambda c: edit(c, lambda p: p["members"][0].update(site="other")),
    "the agreement changes": lambda c: edit(c, lambda p: p["shared"].update(fixed_data=True)),
    "it is not a change of this site's agreement": lambda c: edit(c, lambda p: p.update(before="0" * 64)),
    "it changes settings that belong to the site (epsilon, server)": lambda c: edit(
        c, lambda p: p["shared"].update(epsilon=1e9, server="elsewhere:443")
    ),
    "the change does not add exactly one member": lambda c: edit(c, lambda p: p["shared"].update(clients=9)),
}


def edit(change: Path, bend: Any) -> None:
    proposal = json.loads((change / members.AGREEMENT_FILE).read_text())
    bend(proposal)
    (change / members.AGREEMENT_FILE).write_text(json.dumps(proposal))


@pytest.mark.parametrize("sentence", BENT)
def test_a_site_approves_one_member_more_and_nothing_else(sentence: str, trained: Any, ready: Path) -> None:
    if trained[1] and "exactly one member" in sentence:
        pytest.skip("the keys of secure aggregation are then too few")
    change = add(ready, "new", Location())
    before = (ready / "sites" / "site-0" / "site.toml").read_bytes()
    BENT[sentence](change.folder / "approval")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        accept_agreement(ready / "sites" / "site-0", change.folder / "approval", change.digest)
    assert (ready / "sites" / "site-0" / "site.toml").read_bytes() == before


def test_a_change_that_cannot_be_made_leaves_nothing(ready: Path) -> None:
    path = ready / "server" / "ca.crt"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot read .*ca\.crt"):
        add(ready, "new", Location())
    assert not (ready / "changes" / "new").exists()


ODD = (b"", b"\xff", b"[" * 100_000, b"[1]", b"null", b"{}", b"method = 3", b"method = []", b"[[method]]\nrounds = inf")


def test_a_new_agreement_may_be_anything(ready: Path) -> None:
    approval = add(ready, "new", Location()).folder / "approval"
    for path in (approval / "experiment.toml", approval / members.AGREEMENT_FILE):
        content = path.read_bytes()
        for odd in ODD:
            path.write_bytes(odd)
            with pytest.raises(ConfigError):
                check_proposal(ready / "sites" / "site-0", approval)
        path.write_bytes(content)
    assert check_proposal(ready / "sites" / "site-0", approval).new_members


def test_a_site_takes_what_was_checked_and_not_what_came_after(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, check = add(ready, "new", Location()), members.check_approved_digest
    names = ("experiment.toml", "weights.safetensors")
    sent = {name: (change.folder / "approval" / name).read_bytes() for name in names}

    def swap(site: Site, digest: str) -> None:
        check(site, digest)
        edit(change.folder / "approval", lambda p: p["shared"].update(fixed_data=True))
        for name in names:
            (change.folder / "approval" / name).write_text("name = 'other'\n")

    monkeypatch.setattr(members, "check_approved_digest", swap)
    site = ready / "sites" / "site-0"
    assert accept_agreement(site, change.folder / "approval", change.digest).digest == change.digest
    assert {name: (site / name).read_bytes() for name in names} == sent


def test_a_new_member_is_refused_inside_a_secure_session(trained: tuple[Path, bool], tmp_path: Path) -> None:
    if not trained[1]:
        pytest.skip("of secure aggregation")
    folder = shutil.copytree(trained[0], tmp_path / "d")
    change = add(folder, "new", Location())
    lost = grid(folder, range(3))
    fault = lambda _n, message, reply: None if message.content["head"]["kind"] == "unmask" else reply  # noqa: E731
    lost.fault = fault
    assert serve_run(lost, read(folder), lambda _: None) is Stop.TOO_FEW
    with pytest.raises(RunDirError, match="secure session is in progress: the sum of round 2"):
        add(folder, "other", Location())
    site = folder / "sites" / "site-0"
    record = json.loads(next(site.glob("state/*/session/session.json")).read_bytes().rpartition(b"\n")[0])
    assert "told" in record  # this site has answered the last step
    assert accept_agreement(site, change.folder / "approval", change.digest).clients == 4


def test_a_wrong_digest_approves_nothing(ready: Path) -> None:
    change = add(ready, "new", Location())
    with pytest.raises(ConfigError, match="the digest of the run is"):
        accept_agreement(ready / "sites" / "site-0", change.folder / "approval", "0" * 64)
    site, new, _ = check_proposal(ready / "sites" / "site-0", change.folder / "approval")
    assert site.digest == change.digest
    assert [(m.site, keys_digest([m])) for m in new] == [("new", change.keys)]


def test_the_same_name_or_a_shared_partition_is_refused(written: Path, ready: Path) -> None:
    with pytest.raises(ConfigError, match="has a site site-1"):
        add(ready, "site-1", Location())
    with pytest.raises(ConfigError, match="has a site site-1, got SITE-1. Choose a name that does not differ only in"):
        add(ready, "SITE-1", Location())
    with pytest.raises(ConfigError, match="fedloom deploy init FILE --out NEW --own-data"):
        add(written, "new", Location())


def test_a_site_is_taken_out(trained: tuple[Path, bool], ready: Path) -> None:
    if trained[1]:
        with pytest.raises(ConfigError, match="only 2 sites would remain, but a run needs 3"):
            remove(ready, "site-1")
        return
    assert [m.site for m in remove(ready, "site-1").sites] == ["site-0", "site-2"]
    assert serve_run(grid(ready, range(3)), read(ready), lambda _: None) is Stop.DONE
    loss = {client: value for client, value in losses(ready) if client in (0, 2)}
    table = [row for row in LoopbackDeployment(ready, ManagedProcesses()).table() if row["model"] == "global"]
    assert [(row["site"], row["loss"]) for row in table] == [("site-0", loss[0]), ("site-2", loss[2])]
    with pytest.raises(ConfigError, match="no site is called site-1; sites: site-0, site-2"):
        remove(ready, "site-1")


def test_nothing_trains_before_the_run_is_approved(ready: Path) -> None:
    for path in ready.glob("sites/*/site.toml"):
        path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | {"approval": True}))
    assert serve_run(grid(ready, range(3)), read(ready), lambda _: None) is Stop.TOO_FEW
    rejected = [x["reason"] for x in read_entries(read(ready).audit) if x["what"] == "rejected"]
    assert any("has not approved run" in reason and reason.endswith("--digest DIGEST") for reason in rejected)
    for path in ready.glob("sites/*/site.toml"):
        shown = CliRunner().invoke(app, ["deploy", "approve", str(path.parent)])
        assert read_site(path).digest in shown.output
        wrong = CliRunner().invoke(app, ["deploy", "approve", str(path.parent), "--digest", "0" * 64])
        assert wrong.exit_code == 2
        done = CliRunner().invoke(app, ["deploy", "approve", str(path.parent), "--digest", read(ready).digest])
        assert done.exit_code == 0, done.output
    assert serve_run(grid(ready, range(3)), read(ready), lambda _: None) is Stop.DONE


def test_a_run_begins_with_a_file_that_all_have(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from fedloom.models import Softmax

    weights = tmp_path / "w.safetensors"
    state = {k: torch.full_like(t, 0.25) for k, t in Softmax().build((1, 8, 8), 10).state_dict().items()}
    save_file(state, weights)
    experiment = make_experiment(rounds=1, model={"kind": "softmax", "init_from": str(weights)})
    folder = tmp_path / "d"
    write_directory(plan_deployment(experiment, 3), folder, Location())
    clients = [Client(read_site(p)) for p in sorted(folder.glob("sites/*/site.toml"))]
    assert bool((clients[0].trainer.node.server.x == 0.25).all())
    late = Client(read_site(folder / "sites" / "site-1" / "site.toml"))
    assert late.trainer.rounds == 1  # the file was compared
    save_file({k: t + 1 for k, t in state.items()}, folder / "sites" / "site-1" / "weights.safetensors")
    with pytest.raises(ConfigError, match="the SHA-256 is .* is required"):
        late.prepare()
    (folder / "sites" / "site-0" / "weights.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match="is not the agreed initial model"):
        _ = Client(read_site(folder / "sites" / "site-0" / "site.toml")).trainer.rounds
    assert issubclass(Refused, ConfigError)
