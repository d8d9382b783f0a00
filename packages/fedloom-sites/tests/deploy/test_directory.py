"""`fedloom deploy init`: what is written, who may read it, and that it is what Flower, systemd, nginx and TLS take."""

import math
import os
import re
import shlex
import shutil
import ssl
import stat
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fedloom.errors import ConfigError, Refused, Stop
from fedloom.lab.cli import app
from fedloom.lab.experiment import read
from fedloom_sites.deploy.ops import join, keys
from fedloom_sites.deploy.ops import run as service
from fedloom_sites.deploy.ops.commands import command_words
from fedloom_sites.deploy.ops.directory import (
    Location,
    compose_file,
    proxy_configuration,
    renew,
    systemd_units,
    write_directory,
)
from fedloom_sites.deploy.ops.loopback import check_certificate
from fedloom_sites.deploy.ops.plan import _folder_names, plan_deployment
from fedloom_sites.deploy.setting_files import check_fingerprint, read_server, read_site, settings_text
from fedloom_sites.deploy.site import handover
from tests.commands import call, in_a_fork
from tests.deploy.scene import scene

ROOT = Path(__file__).parents[4]
TOP_K = {"upload_transform": {"kind": "top-k", "fraction": 0.02}}
SECRETS = {"ca.key", "server.key", "superexec.secret", "node-key", "signing-key"}


def test_only_the_owner_reads_what_is_secret(written):
    files = [path for path in written.rglob("*") if path.is_file()]
    private = {path.name for path in files if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert private == SECRETS
    assert all(path.name not in SECRETS or stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE(written.stat().st_mode) == 0o700
    for path in files:
        assert path.name in SECRETS or b"PRIVATE KEY" not in path.read_bytes()


def test_the_two_sides_hold_one_experiment_and_each_others_keys(written):
    server = read_server(written / "server" / "server.toml")
    check_fingerprint(server)
    assert [m.site for m in server.sites] == ["site-0", "site-1", "site-2"]
    for k, member in enumerate(server.sites):
        folder = written / "sites" / member.site
        site = read_site(folder / "site.toml")
        check_fingerprint(site)
        assert (site.client, site.samples, site.fingerprint) == (k, server.samples, server.fingerprint)
        for private, public in ((site.node_key, member.node_key), (site.signing_key, member.signing_key)):
            own = load_ssh_private_key(private.read_bytes(), password=None).public_key()
            assert own == load_ssh_public_key(public.encode())
        assert (written / "server" / "nodes" / f"{member.site}.pub").read_text().strip() == member.node_key
    assert len({m.node_key for m in server.sites} | {m.signing_key for m in server.sites}) == 6


def test_no_site_holds_another_sites_key_or_the_authoritys(written):
    for folder in (written / "sites").iterdir():
        assert {p.name for p in folder.iterdir()} & SECRETS == {"node-key", "signing-key"}
    assert not list((written / "server").rglob("*-key"))
    assert not list((written / "server").rglob("ca.key"))


def test_the_experiment_is_one_method_and_one_seed(experiment, written):
    one = read(written / "server" / "experiment.toml")
    assert len(one.methods) == len(one.head.seeds) == 1
    assert one.methods[0].setting.rounds == 3
    several = experiment("fedavg", "flame", seeds=[4, 5])
    with pytest.raises(ConfigError, match="fedavg, flame. Choose one with --method"):
        plan_deployment(several)
    chosen = tomllib.loads(plan_deployment(several, method="flame", rounds=7).experiment)
    assert (chosen["seeds"], chosen["method"][0]["label"], chosen["method"][0]["rounds"]) == ([4], "flame", 7)


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ({}, {"sites": 4}, "has 3 clients, but 4 sites"),
        ({"method": [{"algorithm": "centralized"}]}, {}, "pools the data of all clients"),
        ({"evaluate": {"clients": 3}}, {}, "evaluate.clients works only in simulations, because"),
        ({"attack": {"kind": "sign-flip", "fraction": 0.3}}, {}, "attacks exist only in simulations"),
        ({}, {"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({}, {"own_data": True}, "data. Add --sites"),
    ],
)
def test_what_cannot_be_deployed_is_refused(experiment, given, options, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan_deployment(experiment(**given), **options)


def test_what_does_not_go_together_is_refused_as_in_simulation(experiment):
    krum = {"algorithm": "ifca", "aggregator": {"kind": "krum", "f": 0}}
    with pytest.raises(Refused):
        plan_deployment(experiment(krum))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("a,A,b", "--names: A and a would share a folder on a case-insensitive disk. Change one"),
        ("a,b,a", "--names: a is listed twice. Change one"),
        (
            "a,b,\u00e9",
            "a name consists of letters and digits, and may contain '.', '_' or '-', but not at its "
            "start or end, got 'é'",
        ),
        ("a,b,e\u0301", "a name consists of letters and"),
        (
            "a,,b",
            "a name consists of letters and digits, and may contain '.', '_' or '-', but not at its "
            "start or end, got ''",
        ),
    ],
)
def test_every_site_has_a_folder_of_its_own_on_every_disk(experiment, names, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan_deployment(experiment(), names=names.split(","))


def test_clients_whose_names_differ_in_case_only_are_numbered():
    assert _folder_names(["Nord", "nord"]) == ("site-0", "site-1")
    assert _folder_names(["Nord", "Ost"]) == ("Nord", "Ost")


def test_sites_with_data_of_their_own(experiment, tmp_path):
    planned = plan_deployment(experiment(), 5, own_data=True)
    assert (len(planned.sites), planned.share) == (5, "all")
    write_directory(planned, tmp_path / "own", Location())
    assert read_site(tmp_path / "own" / "sites" / "site-4" / "site.toml").clients == 5


def test_a_quorum_beyond_the_sites_is_refused(planned, tmp_path):
    with pytest.raises(ConfigError, match="quorum must be at most the number of sites \\(3\\), got 4"):
        write_directory(planned, tmp_path / "new", Location(quorum=4))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_nothing_is_left_half_done(planned, ready, monkeypatch):
    before = (ready / "authority" / "ca.key").read_bytes()
    with pytest.raises(ConfigError, match="belongs to a deployment"):
        write_directory(planned, ready, Location())
    assert (ready / "authority" / "ca.key").read_bytes() == before
    monkeypatch.setattr(keys, "issue_server_certificate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_directory(planned, ready.parent / "new", Location())
    assert [p.name for p in ready.parent.iterdir()] == ["try"]


def test_the_certificate_is_the_authoritys_and_names_the_gate_and_loopback(written):
    ca = x509.load_pem_x509_certificate((written / "authority" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((written / "server" / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost"}
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("name", "now", "problem"),
    [
        ("localhost", None, None),
        ("other.example.org", None, "Hostname mismatch"),
        ("localhost", datetime.now(UTC) - timedelta(days=50), "expired"),
        ("localhost", datetime.now(UTC) + timedelta(days=2), "not yet valid"),
    ],
)
def test_tls_takes_the_certificate_only_while_it_holds_and_for_its_names(tmp_path, name, now, problem):
    ca = keys.make_authority("try", 100, datetime.now(UTC) - timedelta(days=60))
    made = keys.issue_server_certificate(ca, ["localhost", "127.0.0.1"], 30, now)
    found = handshake(tmp_path, made, ca, name)
    assert found is None if problem is None else problem in found


def test_tls_refuses_another_authority(tmp_path):
    made = keys.issue_server_certificate(keys.make_authority("try", 100), ["localhost"], 30)
    assert "unable to get local issuer" in handshake(tmp_path, made, keys.make_authority("other", 100), "localhost")


def handshake(folder, made, ca, name):
    """Why a client that trusts `ca` refuses the server, strict as Python 3.13 is by default; None: it does not."""
    (folder / "crt").write_bytes(made.certificate)
    (folder / "key").write_bytes(made.key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "crt", folder / "key")
    asking = ssl.create_default_context(cadata=ca.pem().decode())
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(a, b, server_side=True)
    client = asking.wrap_bio(b, a, server_hostname=name)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return None


def test_renew_makes_another_certificate_of_the_same_authority(ready):
    before = (ready / "server" / "server.crt").read_bytes()
    renew(ready, "fl.example.org", 100)
    after = (ready / "server" / "server.crt").read_bytes()
    assert after != before
    x509.load_pem_x509_certificate(after).verify_directly_issued_by(
        x509.load_pem_x509_certificate((ready / "server" / "ca.crt").read_bytes())
    )
    assert stat.S_IMODE((ready / "server" / "server.key").stat().st_mode) == 0o600
    said = CliRunner().invoke(app, ["deploy", "renew", str(ready), "--host", "fl.example.org"]).output
    for text in (said, (ready / "README.md").read_text().replace("\n  ", " ")):  # both hold the old certificate
        assert re.search(
            "reload the reverse proxy .*restart the superlink's unit|restart `fedloom-superlink` and reload", text
        )
    with pytest.raises(ConfigError, match=r"^fedloom deploy renew: days: .* got 0"):
        renew(ready, "fl.example.org", 0)
    (ready / "authority" / "ca.key").unlink()
    with pytest.raises(ConfigError, match="contains no certificate authority"):
        renew(ready, "fl.example.org", 100)


@pytest.mark.parametrize("public", ["fl.example.org:8443", "[2001:db8::7]:8443", "10.0.0.7:443"])
def test_renew_keeps_the_name_that_sites_reach_the_server_by(ready, public):
    file = ready / "server" / "server.toml"
    file.write_text(settings_text(read_server(file).with_(public=public)))
    call("deploy", "renew", ready)
    made = x509.load_pem_x509_certificate((ready / "server" / "server.crt").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert public.rpartition(":")[0].strip("[]") in {str(name.value) for name in names}
    file.unlink()
    with pytest.raises(ConfigError, match=r"server\.toml does not exist, so the server's host is unknown. Add --host"):
        renew(ready, None, 100)


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_renewal_that_is_killed_is_mended_by_the_next_one(ready, crash_at):
    """Before the first replacement, between the two, and after both."""
    server = read_server(ready / "server" / "server.toml")
    assert in_a_fork(lambda: renew(ready, "localhost", 100), crash_at) == 137
    if crash_at == 2:
        with pytest.raises(ConfigError, match=r"server\.key is not the key of server\.crt; 'fedloom deploy renew'"):
            check_certificate(server)
    said = call("deploy", "renew", ready)
    assert "an earlier renewal was interrupted. Its" in said
    check_certificate(server)
    assert not [path for path in (ready / "server").iterdir() if path.name.startswith(".")]
    assert "was killed" not in call("deploy", "renew", ready)


def test_a_damaged_authority_makes_no_certificate(ready):
    signing = (ready / "sites" / "site-0" / "signing-key").read_bytes()
    for path in (ready / "authority" / "ca.key", ready / "authority" / "ca.crt"):
        content = path.read_bytes()
        for odd in (b"", b"x", signing):
            path.write_bytes(odd)
            with pytest.raises(ConfigError, match="contains a damaged ca.key or ca.crt. Copy the authority's"):
                renew(ready, "fl.example.org", 100)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ConfigError, match="contains no certificate authority"):
            renew(ready, "fl.example.org", 100)
        path.unlink()
        path.write_bytes(content)


def test_ssh_keygen_reads_the_keys(written):
    for name, kind in (("node-key", "ECDSA"), ("signing-key", "ED25519")):
        done = subprocess.run(
            ["ssh-keygen", "-l", "-f", written / "sites" / "site-0" / name], capture_output=True, text=True, check=True
        )
        assert f"({kind})" in done.stdout


# ------------------------------------------------------------------------------------------- units and gate


def settings(unit):
    return [line.partition("=")[::2] for line in unit.splitlines() if "=" in line and not line.startswith("#")]


def test_units_run_the_command_lines_with_every_switch_and_write_only_their_folders(written):
    server = read_server(written / "server" / "server.toml")
    place = Location(host="192.0.2.7", home="/srv/fl", programs="/opt/fl/bin")
    site = read_site(written / "sites" / "site-1" / "site.toml")
    texts = {**systemd_units(server, place), **systemd_units(site, place)}
    for unit_name, unit in texts.items():
        name = unit_name.removeprefix("fedloom-srv-fl-")
        given = settings(unit)
        environment = {value for key, value in given if key == "Environment"}
        assert {
            "FLWR_TELEMETRY_ENABLED=0",
            "FLWR_DISABLE_UPDATE_CHECK=1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1",
        } <= environment
        once = dict(given)
        assert once["User"] == "fedloom"
        assert once["ProtectSystem"] == "strict"
        assert once["NoNewPrivileges"] == "yes"
        assert once["Restart"] == ("on-failure" if name == "run" else "always")
        assert once.get("RestartPreventExitStatus") == (str(service.FINAL_EXIT_CODE) if name == "run" else None)
        assert once["IPAddressDeny"] == "any"
        side = "site" if name == "site" else "server"
        assert all(path.startswith(f"/srv/fl/{side}/") for path in once["ReadWritePaths"].split())
        words = shlex.split(once["ExecStart"])
        if side == "site":
            assert words == ["/opt/fl/bin/python3", "-P", "-m", join.__name__, "/srv/fl/site/site.toml"]
        elif name == "run":
            assert words[:5] == [
                "/opt/fl/bin/python3",
                "-P",
                "-m",
                service.__name__,
                "/srv/fl/server/server.toml",
            ]
            assert words[5:7] == ["/opt/fl/bin/flwr", "run"]
            assert "FLWR_HOME=/srv/fl/server/cli" in environment
        else:
            assert words[0].startswith("/opt/fl/bin/flower-super")
        assert ("ExecStartPre", "-/opt/fl/bin/fedloom deploy check /srv/fl/site") in given or side == "server"
        assert not any("--insecure" in word for word in words)
    assert dict(settings(texts["fedloom-srv-fl-site"]))["IPAddressAllow"] == "localhost 192.0.2.7"


def test_deployments_of_a_site_can_share_its_memory(planned, tmp_path):
    """One folder, which the settings name and to which the unit and the container may write."""
    yaml, place = pytest.importorskip("yaml"), Location(home="/srv/fl", memory="/srv/memory")
    write_directory(planned, tmp_path / "new", place)
    folder = tmp_path / "new" / "sites" / "site-1"
    assert read_site(folder / "site.toml").memory == Path("/srv/memory")
    unit = dict(settings((folder / "fedloom-srv-fl-site.service").read_text()))
    assert unit["ReadWritePaths"].split() == ["/srv/fl/site/state", "/srv/fl/site/flower", "/srv/memory"]
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert services["site"]["volumes"] == ["./:/srv/fl/site", "/srv/memory:/srv/memory"]
    server = yaml.safe_load((tmp_path / "new" / "server" / "compose.yaml").read_text())["services"]
    assert server["superlink"]["volumes"] == ["./:/srv/fl/server"]
    with_any = [name for name, one in server.items() if service.RESTART_VARIABLE in one["environment"]]
    assert with_any == [name for name, one in server.items() if one["restart"] == "on-failure"] == ["run"]


def test_a_site_starts_with_what_its_file_says_then(ready, monkeypatch):
    """Without a new unit: a server or a port that was corrected is what the next start uses."""
    file = ready / "sites" / "site-1" / "site.toml"
    lines = []
    monkeypatch.setattr(os, "execv", lambda program, words: lines.append((program, words)))
    file.write_text(settings_text(read_site(file).with_(server="192.0.2.9:443", port=9095)))
    join.main(file)
    [(program, words)] = lines
    assert words == command_words("supernode", read_site(file), file=file)
    assert program == words[0]
    assert words[3:5] == [handover.__name__, str(file)]
    assert [words[words.index(option) + 1] for option in ("--superlink", "--port")] == ["192.0.2.9:443", "9095"]
    file.unlink()
    with pytest.raises(SystemExit, match=r"^fedloom: .*site\.toml"):
        join.main(file)


def test_two_deployments_on_a_machine_replace_nothing_of_each_other(written, planned, tmp_path):
    """Where they have a home each, as they must: units, gate and containers have names of their own."""
    write_directory(planned, tmp_path / "two", Location(home="/srv/heart"))
    seen = []
    for folder in (written, tmp_path / "two"):
        names = {path.name for path in folder.rglob("*.service")}
        names |= {re.search(r"conf\.d/(\S+)", (folder / "README.md").read_text())[1]}
        names |= {re.search(r"zone=(\S+):", (folder / "server" / "gate.conf").read_text())[1]}
        names |= {re.search("^name: (.*)", path.read_text(), re.MULTILINE)[1] for path in folder.rglob("compose.yaml")}
        assert names == {word for word in names if re.fullmatch(r"[A-Za-z0-9_.-]+", word)}
        assert len(names) == 4 + 1 + 1 + 2
        told = re.findall(r"enable --now ([^`\n&]+)", (folder / "README.md").read_text())
        assert {f"{unit}.service" for line in told for unit in line.split()} <= names
        seen.append(names)
    assert not seen[0] & seen[1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(written, tmp_path):
    server = read_server(written / "server" / "server.toml")
    place = Location(programs=tmp_path)
    for program in ("flower-superlink", "flower-superexec", "flower-supernode", "python3", "fedloom"):
        (tmp_path / program).touch(0o755)
    site = read_site(written / "sites" / "site-1" / "site.toml")
    texts = {**systemd_units(server, place), **systemd_units(site, place)}
    for name, text in texts.items():
        (tmp_path / f"{name}.service").write_text(text)
    files = [tmp_path / f"{name}.service" for name in texts]
    done = subprocess.run(
        ["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "folder", ["/srv/a study", "srv/fl", "/srv/50%", "/srv/$x", "/srv/a;b", "~/fl", '/srv/"', "/srv/a\n"]
)
def test_a_folder_that_a_unit_or_the_gate_would_cut_is_refused(folder):
    for option in ("home", "programs"):
        with pytest.raises(ConfigError, match=f"{option}: must begin with / and contain only letters, digits, "):
            Location(**{option: folder})
    assert Location(home="/srv/forschung-münchen/v1.2_a@b+c").home.is_absolute()


def test_the_gate_lets_the_fleet_api_through_and_nothing_else(written):
    server = read_server(written / "server" / "server.toml")
    text = proxy_configuration(server, Location(host="fl.example.org", proxy_port=444, home="/srv/fl"))
    assert re.findall(r"location (\S+)", text) == ["/v1/fleet/", "/"]
    assert "listen 444 ssl;" in text
    assert f"client_max_body_size    {server.body_limit};" in text
    assert "proxy_pass                    https://127.0.0.1:18000;" in text
    assert text.count("{") == text.count("}")


def test_the_directions_have_five_commands(written):
    text = (written / "README.md").read_text()
    assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == list("12345")
    assert "$" not in text.replace("$key", "")
    user = re.search("^User=(.*)", (written / "sites/site-0/fedloom-site.service").read_text(), re.MULTILINE)
    assert f"runuser -u {user[1]} -- /opt/fedloom/bin/fedloom deploy check /srv/fedloom/site" in text


# ------------------------------------------------------------------------------------------------- the command


def test_the_command(experiment, tmp_path):
    file, out = tmp_path / "try.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(experiment("fedavg", "flame").settings()))

    def init(*words):
        return CliRunner().invoke(app, ["deploy", "init", str(file), "--out", str(out), *words])

    for words, sentence in (
        (["--sites", "3"], "Choose one with --method"),
        (["--sites", "4", "--method", "flame"], "has 3 clients, but 4 sites"),
        (["--method", "flame", "--proxy-port", "70000"], "proxy_port"),
        (["--method", "flame", "--host", "no host"], "host"),
        (["--method", "flame", "--memory", "shared memory"], "memory: must begin with /"),
    ):
        bad = init(*words)
        assert (bad.exit_code, out.exists()) == (2, False), bad.output
        assert sentence in bad.output
    shared = ("--memory", "/m")
    done = init("--sites", "3", "--method", "flame", "--rounds", "9", "--host", "192.0.2.1", "--quorum", "3", *shared)
    assert done.exit_code == 0, done.output
    assert f"fedloom deploy local {out}" in done.output
    server = read_server(out / "server" / "server.toml")
    assert (server.quorum, server.public) == (3, "192.0.2.1:8443")
    assert read_site(out / "sites" / "site-0" / "site.toml").memory == Path("/m")
    assert read(server.experiment).methods[0].setting.rounds == 9
    assert init("--method", "flame").exit_code == 2


@pytest.mark.parametrize(("method", "channel"), [("fedavg", {}), ("flame", {}), ("scaffold", {}), ("fedavg", TOP_K)])
def test_the_bound_is_ten_times_the_longest_difference_of_the_first_round(tmp_path, method, channel):
    experiment = scene(tmp_path, method, rounds=1, **channel).experiment
    planned = plan_deployment(experiment)
    [agreed] = tomllib.loads(planned.experiment)["method"]
    here = scene(tmp_path / "agreed", agreed, rounds=1)
    assert here.serve() is Stop.DONE
    longest = max(line["norm"] for line in here.audit("accepted", kind="train"))
    if isinstance(planned.norm_bound, dict):  # a bound for each field; the log has the length of both together
        together = math.hypot(*planned.norm_bound.values())
        assert 0.99 * 10 * longest <= together <= 1.01 * 10 * longest * len(planned.norm_bound) ** 0.5
    else:
        assert planned.norm_bound == pytest.approx(10 * longest, rel=0.006)
    assert plan_deployment(experiment, norm_bound=3.0).norm_bound == 3.0


def test_a_method_that_sends_nothing_has_no_bound(experiment):
    assert plan_deployment(experiment("local")).norm_bound is None


def test_the_bound_is_the_servers(written):
    assert read_server(written / "server" / "server.toml").norm_bound > 0


def test_containers_run_the_commands_of_the_units(written):
    """With no more rights than the units give: no capability, nothing to write to but the side's folder."""
    yaml = pytest.importorskip("yaml")
    place = Location(home="/srv/fl", programs="/opt/fl/bin")
    server = read_server(written / "server" / "server.toml")
    site = read_site(written / "sites" / "site-1" / "site.toml")
    texts = {**systemd_units(server, place), **systemd_units(site, place)}
    services = {n: s for of in (server, site) for n, s in yaml.safe_load(compose_file(of, place))["services"].items()}
    assert {f"fedloom-srv-fl-{name}" for name in services} == texts.keys()
    for name, container in services.items():
        side = "site" if name == "site" else "server"
        given = settings(texts[f"fedloom-srv-fl-{name}"])
        assert container["command"] == shlex.split(dict(given)["ExecStart"].replace("$$", "$"))
        environment = {k: v for k, v in container["environment"].items() if k != service.RESTART_VARIABLE}
        assert {f"{k}={v}" for k, v in environment.items()} == {
            value.strip('"') for key, value in given if key == "Environment"
        }
        assert container["image"] == f"fedloom:{server.version}"
        assert container["volumes"] == [f"./:/srv/fl/{side}"]
        assert (container["read_only"], container["cap_drop"]) == (True, ["ALL"])


def test_the_image_installs_what_is_locked():
    """Its files are there, and everything is installed by hash."""
    text = (ROOT / "Dockerfile").read_text()
    copied = [word for line in text.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / path).exists() for path in copied)
    assert {f"!{path}" for path in copied} <= {*(ROOT / ".dockerignore").read_text().split()}
    assert "--require-hashes -r /build/requirements-deploy.txt" in text
    own = [line for line in text.splitlines() if "--no-deps" in line]
    assert {f"/build/packages/fedloom{name}" for name in ("", "-clinic", "-sites")} <= {*" ".join(own).split()}


DIGEST = "sha256:" + "ab" * 32
DOCKER = """#!/bin/sh
echo "$@" >> calls
case "$1" in image) echo "docker.io/library/python@$DIGEST" ;; esac
"""


@pytest.mark.parametrize("digest", [DIGEST, ""])
def test_the_image_is_built_from_a_base_with_a_recorded_digest(digest: str, tmp_path: Path) -> None:
    """A registry that gives none builds nothing; the recorded digest is used again without the registry."""
    (tmp_path / "packages").symlink_to(ROOT / "packages")
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DIGEST": digest}
    make = ["make", "-f", str(ROOT / "Makefile"), "image"]
    statuses = [subprocess.run(make, cwd=tmp_path, env=environment, capture_output=True).returncode for _ in range(2)]
    calls = (tmp_path / "calls").read_text().splitlines()
    builds = [line for line in calls if line.startswith("build")]
    if not digest:
        assert all(statuses)
        assert not builds
        return
    base = (tmp_path / "base-image.txt").read_text().strip()
    assert base.endswith(f"@{DIGEST}")
    assert statuses == [0, 0]
    assert sum(line.startswith("pull") for line in calls) == 1
    assert all(f"--build-arg BASE={base} " in line for line in builds)
    assert len(builds) == 2
    text = (ROOT / "Dockerfile").read_text()
    assert [line for line in text.splitlines() if line.startswith("FROM")] == ["FROM ${BASE}"]
    assert "ARG BASE=" not in text
