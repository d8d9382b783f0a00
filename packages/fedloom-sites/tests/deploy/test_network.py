"""A real server on loopback, over TLS with node keys: who is let in, and who is not, and why."""

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import time
from datetime import UTC, datetime, timedelta
from http.client import HTTPSConnection

import pytest

from fedloom.errors import ConfigError
from fedloom_sites.deploy.ops import keys
from fedloom_sites.deploy.ops.check import check_site
from fedloom_sites.deploy.ops.commands import command_words, flower_profile, process_environment
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses, ProcessError, free_port
from fedloom_sites.deploy.site.pinned import REFUSED_CONNECTION_HINT

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
REFUSAL = 300.0
"""Seconds within which a node that is not let in has ended; measured: 3 to 6 on an idle machine."""


@pytest.fixture(scope="module")
def network(written, tmp_path_factory):
    """A server that knows site-0 and site-1; site-0 is there. site-2's key was never registered."""
    folder = shutil.copytree(written, tmp_path_factory.mktemp("network") / "try")
    with ManagedProcesses() as processes:
        here = LoopbackDeployment(folder, processes)
        here.start_server()
        here.nodes = {name: here.register(folder / "server" / "nodes" / f"{name}.pub") for name in ("site-0", "site-1")}
        here.start_site("site-0")
        until(here, here.nodes["site-0"], "online")
        yield here


def until(here, node, status, seconds=300):
    """Wait until a node has a status. If a process ends meanwhile or the time is over, the error contains the logs."""
    end = time.monotonic() + seconds
    while (found := statuses(here).get(node)) != status:
        here._processes.check()
        assert time.monotonic() < end, f"node {node} is {found}, not {status}:\n{logs(here)}"
        time.sleep(0.5)


def logs(here):
    """The end of every log of a deployment, and of the gate before it."""
    files = sorted([*here.work.glob("*.log"), *here.folder.parent.parent.glob("gate*/log")])
    return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def statuses(here):
    return {int(n["node-id"]): n["status"] for n in here.ask("nodes")["nodes"]}


def ended(process):
    """The output of a process that ends by itself."""
    end = time.monotonic() + REFUSAL
    while process.alive():
        assert time.monotonic() < end, f"still there: {process.tail()}"
        time.sleep(0.1)
    text = process.log.read_text()
    with pytest.raises(ProcessError, match="ended with exit status [^0]"):
        process.check()
    return text


def refused(here, name, words):
    """What a node says that is started with a command line and is not let in."""
    log = here.work / f"{name}.log"
    log.unlink(missing_ok=True)
    process = here._processes.start(name, words, process_environment(here.work / "refused"), log)
    try:
        return ended(process)
    finally:
        here._processes.end(process)


def node(here, name, **changes):
    site = here.sites[name].model_copy(update={"server": here.address, "port": free_port(), **changes})
    return command_words("supernode", site, file=here.site_file(name))


def without(words, option, values=1):
    at = words.index(option)
    return [*words[:at], *words[at + 1 + values :]]


def test_wrong_authority(network, tmp_path):
    (tmp_path / "ca.crt").write_bytes(keys.make_authority("other", 10).pem())
    text = refused(network, "wrong-ca", node(network, "site-1", ca=tmp_path / "ca.crt"))
    assert "CERTIFICATE_VERIFY_FAILED" in text


def test_no_key(network):
    text = refused(network, "no-key", without(node(network, "site-1"), "--auth-supernode-private-key"))
    assert "Exit Code: 305" in text


CLOCK_AHEAD = """if True:
    import sys
    from datetime import datetime, timedelta
    from flwr.supernode import node_auth_http_interceptor as signatures
    from fedloom_sites.deploy import clock
    from fedloom_sites.deploy.site.handover import main
    class Ahead(datetime):
        now = classmethod(lambda cls, zone=None: datetime.now(zone) + timedelta(seconds=60))
    clock.datetime, right = Ahead, signatures.now
    signatures.now = lambda: right() + timedelta(seconds=60)
    main(sys.argv[1:])
"""
"""Program of a site on a machine whose clock is 60 s ahead."""


def test_a_clock_that_is_ahead(network):
    python, _, _, _, *words = node(network, "site-1")  # python3 -P -m MODULE
    text = refused(network, "ahead", [python, "-P", "-c", CLOCK_AHEAD, *words])
    assert re.search(r"the clock is \d{2,3} s ahead of the server's clock, .* Synchronize the clock with NTP", text)
    assert statuses(network)[network.nodes["site-1"]] != "online"


def about_key(here, name):
    """What the check of a site finds out about its key at the server."""
    site = here.sites[name].model_copy(update={"server": here.address, "port": free_port()})
    return [f.level for f in check_site(site) if f"the key of {name}" in f.sentence or f"lets {name} in" in f.sentence]


def test_key_that_is_not_registered(network):
    assert "Exit Code: 305" in refused(network, "unregistered", node(network, "site-2"))
    before = statuses(network)
    assert about_key(network, "site-2") == ["refused"]
    assert about_key(network, "site-0") == about_key(network, "site-1") == ["ok"]
    assert statuses(network) == before  # nobody was let in by it, nor sent away


def test_key_in_use_by_a_node_that_is_there(network):
    assert REFUSED_CONNECTION_HINT in refused(network, "second", node(network, "site-0"))
    assert statuses(network)[network.nodes["site-0"]] == "online"


def test_plain_http(network):
    words = [*without(node(network, "site-1"), "--root-certificates"), "--insecure"]
    assert "Exit Code: 303" in refused(network, "plain-key", words)
    without_key = [*without(words, "--auth-supernode-private-key"), "--max-retries", "2"]
    assert "Exit Code: 305" in refused(network, "plain", without_key)
    with socket.create_connection((network.server.address, network.server.port), timeout=120) as plain:
        plain.sendall(b"GET /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in plain.recv(100)


def test_tls_before_1_2(network):
    context = ssl.create_default_context(cafile=network.server.ca)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection((network.server.address, network.server.port), timeout=120) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain, server_hostname="localhost")


def test_revoked_key(network):
    """Registered, let in, revoked: its node ends or is offline, and cannot come back; the other stays."""
    process = network.start_site("site-1")
    number = network.nodes["site-1"]
    until(network, number, "online")
    network.ask("unregister", node=number)
    assert statuses(network).get(number) in (None, "unregistered")
    network._processes.end(process)
    assert "Exit Code: 305" in refused(network, "revoked", node(network, "site-1"))
    assert about_key(network, "site-1") == ["refused"]
    assert statuses(network)[network.nodes["site-0"]] == "online"


def test_port_in_use(network, written, tmp_path):
    """Even by a server with a certificate of the same authority, which answers as well."""
    other = LoopbackDeployment(shutil.copytree(written, tmp_path / "try"), ManagedProcesses(), network.server.port)
    with pytest.raises(ConfigError, match=f"the server: port {network.server.port} on 127.0.0.1 is not free"):
        other.start_server()


def test_expired_certificate(ready):
    ca = keys.Authority.load((ready / "authority/ca.key").read_bytes(), (ready / "authority/ca.crt").read_bytes())
    made = keys.issue_server_certificate(ca, ["localhost", "127.0.0.1"], 1, datetime.now(UTC) - timedelta(days=3))
    (ready / "server" / "server.crt").write_bytes(made.certificate)
    (ready / "server" / "server.key").write_bytes(made.key)
    with ManagedProcesses() as processes:
        here = LoopbackDeployment(ready, processes)
        with pytest.raises(ProcessError, match="is not valid: certificate has expired; 'fedloom deploy renew'"):
            here.start_server()


# ------------------------------------------------------------------------------------------------- the gate


@pytest.fixture(scope="module")
def gate(network, tmp_path_factory):
    """nginx with the gate's configuration before the network's server; the address it serves."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        pytest.fail("the gate's tests need nginx: apt-get install nginx")
    folder, port = tmp_path_factory.mktemp("gate"), free_port()
    server = network.folder / "server"
    text = (server / "gate.conf").read_text()
    text = re.sub(r"listen \d+ ssl", f"listen 127.0.0.1:{port} ssl", text).replace("/srv/fedloom/server", str(server))
    text = text.replace("127.0.0.1:18000", network.address)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{text}\n}}\n"
    )
    with ManagedProcesses() as processes:
        words = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        running = processes.start("gate", words, {}, folder / "log")
        end = time.monotonic() + 300
        while True:
            running.check()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert time.monotonic() < end
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"


def answer(network, address, method, path, body=b""):
    context = ssl.create_default_context(cafile=network.server.ca)
    connection = HTTPSConnection(address, timeout=120, context=context)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/openapi.json", "/v1/control/list-runs", "/v1/runtime/x", "/v1/fleet/../control/x"]
)
def test_the_gate_hides_everything_but_the_fleet_api(network, gate, path):
    assert answer(network, gate, "POST", path) == 404
    assert answer(network, gate, "GET", path) == 404


def test_the_gate_refuses_a_body_beyond_the_limit(network, gate):
    limit = network.server.body_limit
    assert answer(network, gate, "POST", "/v1/fleet/push-messages", bytes(limit + 1)) == 413
    assert answer(network, gate, "POST", "/v1/fleet/push-messages", bytes(limit)) not in (404, 413, 200)


def test_the_gate_does_not_let_the_command_line_in(network, gate, tmp_path):
    (tmp_path / "config.toml").write_text(flower_profile(gate, network.server.ca))
    done = subprocess.run(
        command_words("nodes"),
        env={"HOME": str(tmp_path), **process_environment(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert '"success": true' not in done.stdout
    assert "404" in done.stdout + done.stderr


def test_a_site_joins_through_the_gate(network, gate):
    """The node of site-2, registered now, is let in through the gate."""
    number = network.register(network.folder / "server" / "nodes" / "site-2.pub")
    network.start_site("site-2", server=gate)
    until(network, number, "online")
