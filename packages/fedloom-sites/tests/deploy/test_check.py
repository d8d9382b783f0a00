"""`fedloom deploy check`: every reason why a site cannot take part has its sentence, and only then one refuses."""

import math
import shutil
import ssl
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from fedloom_sites.deploy.ops import check, keys
from fedloom_sites.deploy.ops.check import check_site
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.protocol.identity import public_key_line
from fedloom_sites.deploy.secure.opened import OPENED_FILE, write_checked
from fedloom_sites.deploy.setting_files import read_site, settings_text
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.local_data import part_sizes, site_federation
from tests.deploy.sessions import secured


@pytest.fixture
def site(ready):
    return read_site(ready / "sites" / "site-1" / "site.toml")


def refused(site, **options):
    return [f.sentence for f in check_site(site, **{"offline": True, **options}) if f.level == "refused"]


def changed(site, **changes):
    return site.model_copy(update=changes)


def test_a_site_in_order_has_nothing_against_it(site):
    findings = list(check_site(site, offline=True))
    assert {f.level for f in findings} <= {"ok", "note"}
    text = "\n".join(f.sentence for f in findings)
    for what in (
        f"fedloom {fedloom.__version__}",
        "60 samples for training",
        "10 classes",
        "keys",
        "valid until",
        "MB",
    ):
        assert what in text


def test_version_of_fedloom_both_sides_named(site):
    (sentence,) = refused(changed(site, version="9.9.9"))
    assert "9.9.9" in sentence
    assert fedloom.__version__ in sentence


@pytest.mark.parametrize("version", ["1.40.9", "1.43.0", "2.0"])
def test_version_of_flower(site, monkeypatch, version):
    monkeypatch.setattr(check, "version", lambda _: version)
    (sentence,) = refused(site)
    assert version in sentence
    assert "1.41 or newer, below 1.43" in sentence


def test_another_experiment(site):
    site.experiment.write_text(site.experiment.read_text() + "# changed\n")
    assert "experiment.toml is not the agreed experiment file: its SHA-256 is" in refused(site)[0]


def test_data_that_is_missing(site):
    (sentence,) = refused(changed(site, data={"source": "csv", "path": "/nowhere/x.csv", "target": "y"}))
    assert sentence == "no data at /nowhere/x.csv. Set path in [data] of site.toml to the site's data"
    (sentence,) = refused(changed(site, data={"source": "csv", "target": "y"}))
    assert sentence == "CSV: no path is set. Set path to the file or folder that contains the data"


def test_data_of_another_schema_both_sides_named(site):
    other = site.samples.with_(shape=(1, 9, 9))
    (sentence,) = refused(changed(site, samples=other))
    assert "1, 9, 9" in sentence
    assert "1, 8, 8" in sentence


def test_other_labels_both_sides_named(site):
    other = site.samples.with_(classes=tuple("abcdefghij"))
    (sentence,) = refused(changed(site, samples=other))
    assert "classes" in sentence
    assert "a, b, c" in sentence


def test_a_label_out_of_range_is_the_datas_own_sentence(site, tmp_path, monkeypatch):
    def broken(*_):
        raise DataError("digits: labels must be from 0 to 9, got 0 to 12")

    monkeypatch.setattr(check, "site_federation", broken)
    assert refused(site) == ["digits: labels must be from 0 to 9, got 0 to 12"]


def test_disk_too_full(site, monkeypatch):
    monkeypatch.setattr(check.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    (sentence,) = refused(site)
    assert sentence.startswith("only 5 MB are free")
    assert "1024 MB" in sentence


def test_state_that_cannot_be_written(site, monkeypatch):
    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(check, "NamedTemporaryFile", denied)
    (sentence,) = refused(site)
    assert "cannot write" in sentence


def test_key_that_others_read(site):
    site.node_key.chmod(0o644)
    (sentence,) = refused(site)
    assert "chmod 600" in sentence
    assert "644" in sentence


def test_key_that_is_missing_or_no_key_or_of_another_kind(site):
    signing = site.signing_key.read_bytes()
    site.signing_key.unlink()
    assert "No such file" in refused(site)[0]
    site.signing_key.write_text("hello")
    site.signing_key.chmod(0o600)
    assert "not an OpenSSH private key" in refused(site)[0]
    shutil.copy(site.node_key, site.signing_key)
    assert "must be an Ed25519 key" in refused(site)[0]
    site.signing_key.write_bytes(signing)
    site.node_key.write_bytes(signing)
    assert "must be an ECDSA P-384 key" in refused(site)[0]


def test_a_key_of_another_site_is_refused_with_its_name(ready):
    """In the directory of a deployment, whose server has a list, and at the site alone, which has its public key."""
    homes = {name: ready / "sites" / name for name in ("site-0", "site-1")}
    for kind in ("node-key", "signing-key"):
        own = (homes["site-1"] / kind).read_bytes()
        shutil.copy(homes["site-0"] / kind, homes["site-1"] / kind)
        [sentence] = refused(read_site(homes["site-1"] / "site.toml"))
        assert f"{homes['site-1'] / kind} is site-0's key, not site-1's. Restore this site's own key" in sentence
        assert not refused(read_site(homes["site-0"] / "site.toml"))
        (homes["site-1"] / kind).write_bytes(own)
    alone = shutil.copytree(homes["site-1"], ready.parent / "alone" / "site")
    assert not refused(read_site(alone / "site.toml"))
    shutil.copy(homes["site-0"] / "node-key", alone / "node-key")
    [sentence] = refused(read_site(alone / "site.toml"))
    assert "is not the private key of node-key.pub, so it is not the agreed key of site-1" in sentence
    shutil.copy(homes["site-1"] / "node-key", alone / "node-key")
    own = (alone / "signing-key").read_bytes()
    shutil.copy(homes["site-0"] / "signing-key", alone / "signing-key")
    [sentence] = refused(read_site(alone / "site.toml"))
    assert f"{alone / 'signing-key'} is not the private key of signing-key.pub" in sentence
    with pytest.raises(ConfigError, match="signing-key is not the private key of signing-key.pub. Restore this site's"):
        Client(read_site(alone / "site.toml"))
    (alone / "signing-key").write_bytes(own)  # the cure
    assert not refused(read_site(alone / "site.toml"))
    Client(read_site(alone / "site.toml"))
    (homes["site-1"] / "node-key").write_bytes(keys.make_key_pair("connection").private)
    [sentence] = refused(read_site(homes["site-1"] / "site.toml"))
    assert f"{homes['site-1'] / 'node-key'} is not the agreed-upon key of site-1" in sentence


def test_a_signing_key_that_the_sites_have_not_agreed_on(site, tmp_path):
    secure = secured(tmp_path, "fedavg", partition={"kind": "iid", "clients": 3}).sites[0].secure
    said = "".join(refused(changed(site, secure=secure)))
    assert f"{site.signing_key} is not the agreed-upon key of site-1" in said
    keys = (secure.keys[0], public_key_line(site.signing_key.read_bytes()), *secure.keys[2:])
    assert "agreed on" not in "".join(refused(changed(site, secure=changed(secure, keys=keys))))


def test_authority_that_is_missing_damaged_or_out_of_date(site):
    site.ca.write_text("hello")
    assert "not a certificate in PEM format" in refused(site)[0]
    site.ca.write_bytes(keys.make_authority("try", 10, datetime.now(UTC) - timedelta(days=20)).pem())
    assert "the authority's certificate expired on" in refused(site)[0]
    site.ca.write_bytes(keys.make_authority("try", 10, datetime.now(UTC) + timedelta(days=20)).pem())
    before = datetime.now(UTC)
    (sentence,) = refused(site)
    days = {f"{moment:%Y-%m-%d}" for moment in (before, datetime.now(UTC))}
    assert any(f"UTC, the time here is {day}" in sentence for day in days)  # both with their dates
    assert "Set the clock" in sentence
    site.ca.write_bytes(keys.make_authority("try", 10).pem())
    assert any("expires soon" in f.sentence for f in check_site(site, offline=True) if f.level == "note")
    site.ca.unlink()
    assert "cannot read the authority's certificate" in refused(site)[0]


def test_port_in_use(site):
    with serving(site) as (port, _):
        (sentence,) = refused(changed(site, port=port))
    assert f"port {port}" in sentence
    assert "If this site is running, it uses the port itself" in sentence


# --------------------------------------------------------------------------------------- with a server


class serving:
    """A TLS server on loopback with the site's server's certificate, whose clock is wrong by some seconds.

    To what is posted it answers with a status.
    """

    def __init__(self, site, wrong=0.0, made=None, status=501):
        folder = site.ca.parents[2] / "server"
        if made is not None:
            (folder / "server.crt").write_bytes(made.certificate)
            (folder / "server.key").write_bytes(made.key)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response_only(404)
                self.send_header("Date", format_datetime(datetime.now(UTC) + timedelta(seconds=wrong), usegmt=True))
                self.end_headers()

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.server.handle_error = lambda *_: None
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self):
        self.thread.start()
        port = self.server.server_address[1]
        return port, f"127.0.0.1:{port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(0, None), (-3, None), (200, None), (-60, "s ahead"), (400, "behind")],
)
def test_clock(site, wrong, sentence):
    with serving(site, wrong) as (_, address):
        found = refused(changed(site, server=address), offline=False)
    assert found == [] if sentence is None else sentence in found[0]


@pytest.mark.parametrize(
    ("status", "level", "sentence"),
    [
        (412, "refused", "rejects the key of site-1: it was never registered there, or it was revoked"),
        (400, "ok", "the server accepts the key of site-1, unless a node with the same key is already"),
        (501, None, " in"),
    ],
)
def test_key_that_the_server_does_not_know(status, level, sentence, site):
    with serving(site, status=status) as (_, address):
        findings = [*check_site(changed(site, server=address))]
    said = [f.level for f in findings if sentence in f.sentence and "key" in f.sentence]
    assert said == ([] if level is None else [level]), findings


def test_server_of_another_authority(site):
    with serving(site) as (_, address):
        site.ca.write_bytes(keys.make_authority("other", 10).pem())
        (sentence,) = refused(changed(site, server=address), offline=False)
    assert "does not have the server certificate in ca.crt" in sentence


@pytest.mark.parametrize(
    ("host", "days", "fault", "cure"),
    [
        ("127.0.0.1", -3, "has expired", "ask the coordinator to run 'fedloom deploy renew'"),
        ("127.0.0.1", 3, "is not yet valid", "set the clock"),
        ("127.0.0.2", 0, "is not valid for '127.0.0.1'", "correct server in site.toml"),
        ("fl.example.org", 0, "is not valid for 'localhost'", "with --host of this name"),
    ],
)
def test_server_whose_certificate_is_of_another_time_or_name(host, days, fault, cure, site, ready):
    ca = keys.Authority.load(
        (ready / "authority" / "ca.key").read_bytes(), (ready / "authority" / "ca.crt").read_bytes()
    )
    made = keys.issue_server_certificate(ca, [host], 1, datetime.now(UTC) + timedelta(days=days))
    with serving(site, made=made) as (port, address):
        address = address if host.startswith("127") else f"localhost:{port}"
        (sentence,) = refused(changed(site, server=address), offline=False)
    assert fault in sentence
    assert cure in sentence
    assert "ca.crt" not in sentence


def test_no_server(site):
    with serving(site) as (_, address):
        pass
    (sentence,) = refused(changed(site, server=address), offline=False)
    assert f"the server {address} cannot be reached over TLS" in sentence


# ------------------------------------------------------------------------------------------- the command


def test_exit_code_of_the_command(ready, site):
    folder = ready / "sites" / "site-1"
    fine = CliRunner().invoke(app, ["deploy", "check", str(folder), "--offline"])
    assert fine.exit_code == 0, fine.output
    (folder / "site.toml").write_text(
        settings_text(changed(site, version="9.9.9")),
    )
    bad = CliRunner().invoke(app, ["deploy", "check", str(folder), "--offline"])
    assert bad.exit_code == 1
    assert "1 of the findings must be fixed" in bad.output
    none = CliRunner().invoke(app, ["deploy", "check", str(ready), "--offline"])
    assert none.exit_code == 2
    assert "is not the folder of a site: it is the directory of a whole deployment" in none.output
    assert "sites/site-0" in none.output


# ------------------------------------------------------------------------------------------- tables of a site's own

TABLE = "age,sex,bp,disease\n" + "".join(
    f"{40 + k % 9}.5,{'fm'[k % 2]},{120 + k % 7},{'yes' if k % 3 else 'no'}\n" for k in range(40)
)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """A deployment whose sites have tables of their own; the experiment's table says what the columns are."""
    folder = tmp_path_factory.mktemp("clinic")
    (folder / "sample.csv").write_text(TABLE)
    document = {
        "data": {"source": "csv", "path": str(folder / "sample.csv"), "target": "disease", "categorical": ["sex"]},
        "partition": {"kind": "iid", "clients": 2},
        "method": [{"algorithm": "fedavg"}],
    }
    write_directory(plan_deployment(parse(document), 2, own_data=True), folder / "try", Location())
    return folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("", ""), None),
        (("age,sex,bp", "age,sex,weight"), "no column 'bp' (the agreement names it)"),
        (("age,sex,bp", "bp,sex,age"), None),
        ((",f,", ",w,"), "column 'sex': unknown level 'w', allowed are f, m (20 such)"),
        ((",bp,", ",bp,bmi,"), "cells"),
        (("yes", "sick"), "the label 'disease' is 'sick', but only no, yes are allowed"),
    ],
)
def test_a_table_with_other_columns_levels_or_labels_both_sides_named(clinic, tmp_path, change, sentence):
    site = read_site(clinic / "try" / "sites" / "site-1" / "site.toml")
    (tmp_path / "own.csv").write_text(TABLE.replace(*change) if change[0] else TABLE)
    own = changed(site, data={**site.data, "path": str(tmp_path / "own.csv")})
    found = refused(own)
    assert found == [] if sentence is None else sentence in found[0], found


@pytest.mark.parametrize(
    ("change", "level", "sentence"),
    [
        (("yes", "no"), "note", "the label 'disease' is 'no' in every row"),
        ((",f,", ",m,"), "note", "column 'sex': the same in every row"),
        (("48.5", "1e30"), "note", "row 10, column 'age': 1e+30 is extremely far from the other numbers"),
        (("48.5", "1e308"), "refused", "row 10, column 'age': expected a number of at most 3.4e+38, got '1e308'"),
    ],
)
def test_doubtful_columns_are_named_where_they_are(clinic, tmp_path, change, level, sentence):
    site = read_site(clinic / "try" / "sites" / "site-1" / "site.toml")
    (tmp_path / "own.csv").write_text(TABLE.replace(*change))
    own = changed(site, data={**site.data, "path": str(tmp_path / "own.csv")})
    assert any(sentence in f.sentence for f in check_site(own, offline=True) if f.level == level)


def test_every_version_that_a_result_can_depend_on_is_compared(site):
    here = check.read_relevant_versions()
    assert {"python", "torch", "numpy", "flwr", "cryptography", "pycryptodome", "opendp"} <= here.keys()
    assert site.versions == here
    other = site.with_(versions={**here, "torch": "1.0", "opendp": "0.1"})
    [note] = [f for f in check._check_versions(other) if "versions that differ" in f.sentence]
    assert note.level == "note"
    assert f"torch {here['torch']}, there 1.0; " in note.sentence
    assert f"opendp {here['opendp']}, there 0.1" in note.sentence
    assert not [f for f in check._check_versions(site) if "versions that differ" in f.sentence]


def test_a_site_that_may_be_too_large_for_a_sum_is_warned(tmp_path):
    """By samples, with what the others must have; by weights that are agreed on, with its own share."""

    def notes(name, client, agreed=None, **changes):
        here = secured(tmp_path / name, "fedavg", agreed=agreed, **changes)
        train = part_sizes(site_federation(here.experiment, here.sites[client]), client)[0]
        found = [
            f.sentence for f in check._check_data(here.sites[client]) if f.level == "note" and f.sentence[:5] == "sums:"
        ]
        return found, train

    [sentence], train = notes("samples", 1)
    assert (
        f"the other sites in every sum must have at least {math.ceil(train / 4)} training samples together" in sentence
    )
    [sentence] = notes("any", 1, {"max_share": 1.0})[0]
    assert "max_share = 1 allows one site to have 100% of the weight of a sum" in sentence
    assert "to set it to 0.8 or less" in sentence
    assert notes("uniform", 1, client_weights="uniform")[0] == []
    given = [9.0, 0.5, 0.5, 0.5, 0.5]
    assert (
        "this site has 82% of the total weight, but at most 80% is allowed"
        in notes("given", 0, client_weights=given)[0][0]
    )
    assert notes("small", 1, client_weights=given)[0] == []
    more = notes("more", 0, {"max_share": 0.85}, client_weights=given)[0]
    assert [("max_share = 0.85" in one, "this site has 82%" in one) for one in more] == [(True, False), (False, True)]


def test_a_site_is_told_what_an_unusual_agreement_reveals_and_that_it_stays_neutral(tmp_path):
    def notes(name, agreed=None):
        here = secured(tmp_path / name, "fedavg", agreed=agreed, client_weights="uniform")
        site = here.sites[1]
        if name == "turned":
            write_checked(site.memory_folder / OPENED_FILE, {"experiments": {}, "neutral": True, "turns": 3})
        return [f.sentence for f in check._check_weight_share(site, 9)]

    assert notes("usual") == []
    assert "changes = 99 and steady = 3 let the server compute differences" in notes("changes", {"changes": 99})[0]
    assert "changes = 4 and steady = 1 let the server" in notes("steady", {"steady": 1})[0]
    assert "this site sends only neutral uploads from now on" in notes("turned")[0]
