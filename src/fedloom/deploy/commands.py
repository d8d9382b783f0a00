"""The command lines of Flower's programs, and the environment that each of them needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from fedloom.deploy.settings import SERVER_KEY, SITE_KEY, Server, Site
from fedloom.errors import ConfigError

PROGRAMS = Path(sys.executable).parent
"""Where the programs of this environment are."""

PROFILE = "fedloom"
"""Name of the connection in the file `config.toml` of Flower's command line."""

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nothing is sent to anybody, and nothing is installed, by any of the processes."""


def environment(home: Path, programs: Path = PROGRAMS, threads: int | None = None) -> dict[str, str]:
    """What a Flower process needs in its environment.

    Args:
        home: its own folder, for the app it unpacks and, for the command line, the connection.
        programs: folder of Flower's programs; they start one another by name.
        threads: threads of numerical libraries; None: theirs to decide.
    """
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**SWITCHES, "FLWR_HOME": str(home), "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", **count}


def profile(address: str, ca: Path) -> str:
    """The file `config.toml` in the home of Flower's command line: how it reaches the server."""
    connection = {"address": address, "root-certificates": str(ca)}
    return tomli_w.dumps({"superlink": {"default": PROFILE, PROFILE: connection}})


def superlink(server: Server, programs: Path = PROGRAMS) -> list[str]:
    """The server's network process: TLS, and only nodes whose key is registered."""
    return [
        str(programs / "flower-superlink"),
        *("--host", server.address, "--port", str(server.port)),
        *("--ssl-ca-certfile", str(server.ca)),
        *("--ssl-certfile", str(server.certificate)),
        *("--ssl-keyfile", str(server.key)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *("--database", str(server.database)),
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(server.secret)),
    ]


def superexec(server: Server, programs: Path = PROGRAMS) -> list[str]:
    """The process that runs the server's half of the app; apart from `superlink`, so that either may restart."""
    return [
        str(programs / "flower-superexec"),
        *("--runtime-api-address", f"{server.address}:{server.port}"),
        *("--root-certificates", str(server.ca)),
        *("--superexec-auth-secret-file", str(server.secret)),
    ]


def supernode(site: Site, file: Path, programs: Path = PROGRAMS) -> list[str]:
    """A site's network process.

    Args:
        site: its settings.
        file: the absolute path of the site's TOML file, which the app is told.
        programs: folder of Flower's programs.
    """
    return [
        str(programs / "flower-supernode"),
        *("--root-certificates", str(site.ca)),
        *("--superlink", site.server),
        *("--auth-supernode-private-key", str(site.node_key)),
        *("--host", "127.0.0.1", "--port", str(site.port)),
        *("--node-config", _pairs({SITE_KEY: str(file)})),
    ]


def register(public_key: Path, programs: Path = PROGRAMS) -> list[str]:
    """Let the node with this key in; prints its number as JSON."""
    return [str(programs / "flwr"), "supernode", "register", str(public_key), PROFILE, "--format", "json"]


def unregister(node: int, programs: Path = PROGRAMS) -> list[str]:
    """Revoke the key of a node."""
    return [str(programs / "flwr"), "supernode", "unregister", str(node), PROFILE, "--format", "json"]


def nodes(programs: Path = PROGRAMS) -> list[str]:
    """The nodes that are registered, and whether they are there, as JSON."""
    return [str(programs / "flwr"), "supernode", "list", PROFILE, "--format", "json"]


def run(app: Path, file: Path, programs: Path = PROGRAMS) -> list[str]:
    """Start the experiment and show its log.

    Args:
        app: folder of the app.
        file: the absolute path of the server's TOML file, which the app is told.
        programs: folder of Flower's programs.
    """
    return [
        *(str(programs / "flwr"), "run", str(app), PROFILE),
        *("--stream", "--run-config", _pairs({SERVER_KEY: str(file)})),
    ]


def runs(programs: Path = PROGRAMS) -> list[str]:
    """All runs and how they ended, as JSON."""
    return [str(programs / "flwr"), "list", PROFILE, "--format", "json"]


def _pairs(values: Mapping[str, str]) -> str:
    for key, value in values.items():
        if set(value) & set("\"'\\\n"):
            raise ConfigError(
                f"{key}: Flower takes no path with quotes or backslashes, got {value!r}; use another folder"
            )
    return " ".join(f'{key}="{value}"' for key, value in values.items())
