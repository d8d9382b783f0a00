"""Command lines and environments of Flower's programs: Flower's own parsers read them as they are meant."""

import tomllib
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedloom.errors import ConfigError
from fedloom_sites.deploy.ops.commands import command_words, process_environment
from fedloom_sites.deploy.setting_files import read_server, read_site


@pytest.fixture
def server(written):
    return read_server(written / "server" / "server.toml")


@pytest.fixture
def site(written):
    return read_site(written / "sites" / "site-2" / "site.toml")


def options(words):
    """The options of a command line; an option without a value is True."""
    pairs = zip(words[1:], [*words[2:], "--"], strict=True)
    return {word: True if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_superlink_has_tls_node_keys_and_installs_nothing(server):
    given = options(command_words("superlink", server))
    assert given["--ssl-certfile"] == str(server.certificate)
    assert given["--ssl-keyfile"] == str(server.key)
    assert given["--ssl-ca-certfile"] == str(server.ca)
    assert given["--enable-supernode-auth"] is True
    assert given["--disable-runtime-dependency-installation"] is True
    assert given["--isolation"] == "process"
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "18000")
    assert "--insecure" not in given


def test_superexec_reaches_the_superlink_and_shares_its_secret(server):
    link, given = options(command_words("superlink", server)), options(command_words("superexec", server))
    assert given["--runtime-api-address"] == f"{link['--host']}:{link['--port']}"
    assert given["--superexec-auth-secret-file"] == link["--superexec-auth-secret-file"]
    assert given["--root-certificates"] == str(server.ca)
    assert "--allow-runtime-dependency-installation" not in given


def test_flower_reads_the_supernodes_command_line(site):
    words = command_words("supernode", site, file=Path("/srv/site 1/site.toml"))
    begin = next(k for k, word in enumerate(words) if word.endswith("flower-supernode"))
    args = _parse_args_run_supernode().parse_args(words[begin + 1 :])
    assert args.superlink == "fl.example.org:8443"
    assert args.root_certificates == str(site.ca)
    assert args.auth_supernode_private_key == str(site.node_key)
    assert (args.host, args.port) == ("127.0.0.1", 9094)
    assert not args.insecure
    assert not args.runtime_dependency_install
    assert parse_config_args([args.node_config]) == {"site": "/srv/site 1/site.toml"}


def test_flower_reads_the_runs_configuration(written):
    given = options(command_words("run", app=written / "app", file=written / "server.toml"))
    assert parse_config_args([given["--run-config"]]) == {"server": str(written / "server.toml")}
    app = tomllib.loads((written / "server" / "app" / "pyproject.toml").read_text())
    assert set(app["tool"]["flwr"]["app"]["config"]) == {"server"}
    assert app["project"]["dependencies"] == []


@pytest.mark.parametrize("path", ['/a"b', "/a'b", "/a\\b"])
def test_a_path_that_flower_cannot_be_told_is_refused(site, path):
    with pytest.raises(ConfigError, match="another folder"):
        command_words("supernode", site, file=Path(path))


def test_no_secret_is_on_a_command_line(server, site):
    words = [
        *command_words("superlink", server),
        *command_words("superexec", server),
        *command_words("supernode", site, file=Path("/s.toml")),
    ]
    for path in (server.key, server.secret, site.node_key, site.signing_key):
        content = path.read_bytes()
        assert not any(len(word) > 8 and word.encode() in content for word in words)


def test_every_process_is_told_to_send_and_install_nothing():
    given = process_environment(Path("/home/fl"), Path("/opt/bin"), threads=2)
    assert given["FLWR_TELEMETRY_ENABLED"] == "0"
    assert given["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert given["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert given["RAY_USAGE_STATS_ENABLED"] == "0"
    assert given["FLWR_HOME"] == "/home/fl"
    assert given["PATH"].startswith("/opt/bin:")
    assert given["OMP_NUM_THREADS"] == "2"


def test_flowers_switches_are_still_called_so():
    """What Flower asks its environment for; a renamed switch would be a silent one."""
    import flwr.supercore.telemetry as telemetry
    import flwr.supercore.update_check as update

    sources = Path(telemetry.__file__).read_text() + Path(update.__file__).read_text()
    constants = (Path(telemetry.__file__).parent / "constant.py").read_text()
    assert "FLWR_TELEMETRY_ENABLED" in sources
    assert "FLWR_DISABLE_UPDATE_CHECK" in sources + constants
    installer = Path(telemetry.__file__).parents[1].rglob("*.py")
    assert any("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION" in path.read_text() for path in installer)


def test_profile_is_what_the_command_line_reads(written):
    document = tomllib.loads((written / "server" / "cli" / "config.toml").read_text())["superlink"]
    assert document[document["default"]] == {
        "address": "127.0.0.1:18000",
        "root-certificates": "/srv/fedloom/server/ca.crt",
    }
