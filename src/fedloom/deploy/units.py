"""What makes the machines run a deployment: systemd units, hardened, and the gate before the server, for nginx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from string import Template

from pydantic import Field

from fedloom.deploy import commands
from fedloom.deploy.settings import Server, Site, placed
from fedloom.values import Value

TEMPLATES = files("fedloom.deploy") / "templates"
SERVER_WRITES = ("state", "results", "flower")
"""Folders that the server's processes write into."""
SITE_WRITES = ("state", "flower")
"""Folders that a site's processes write into."""
CLI = "cli"
"""Folder of Flower's command line on the server, which the administrator uses."""


class Place(Value):
    """Where a deployment will run."""

    host: str = Field("localhost", pattern=r"^[A-Za-z0-9.:-]+$", description="host or address of the gate")
    gate_port: int = Field(8443, ge=1, le=65535, description="port of the gate, which the sites connect to")
    port: int = Field(18000, ge=1, le=65535, description="port of the server behind the gate, on loopback")
    home: Path = Field(Path("/srv/fedloom"), description="folder on the machines that server/ and site/ are put into")
    programs: Path = Field(Path("/opt/fedloom/bin"), description="folder of fedloom's programs on the machines")
    days: int = Field(365, ge=1, le=3650, description="days that the certificates are valid")
    quorum: int | None = Field(None, ge=1, description="accepted replies that a round needs; more than half by default")


def server_units(server: Server, place: Place) -> dict[str, str]:
    """The systemd units of the server, by name."""
    home = place.home / "server"
    there = placed(server, home)
    environment = commands.environment(home / "flower", place.programs)
    made = {
        "fedloom-superlink": ("the server's connections", commands.superlink(there, place.programs)),
        "fedloom-superexec": ("the server's work", commands.superexec(there, place.programs)),
    }
    return {
        unit: _unit(unit, what, server.name, home, place, command, environment, SERVER_WRITES, "localhost")
        for unit, (what, command) in made.items()
    }


def site_unit(site: Site, place: Place) -> str:
    """The systemd unit of a site."""
    home = place.home / "site"
    command = commands.supernode(placed(site, home), home / "site.toml", place.programs)
    environment = commands.environment(home / "flower", place.programs, site.threads)
    what = f"site {site.site}"
    return _unit("fedloom-site", what, site.name, home, place, command, environment, SITE_WRITES, place.host)


def _unit(
    unit: str,
    what: str,
    name: str,
    folder: Path,
    place: Place,
    command: Sequence[str],
    environment: Mapping[str, str],
    writes: Sequence[str],
    peer: str,
) -> str:
    return filled(
        "unit.service",
        unit=unit,
        what=what,
        name=name,
        home=place.home,
        folder=folder,
        environment="\n".join(f"Environment={_quoted(f'{k}={v}')}" for k, v in environment.items()),
        command=" ".join(_quoted(word) for word in command),
        writes=" ".join(str(folder / write) for write in writes),
        addresses=_only_to(peer),
    )


def _only_to(peer: str) -> str:
    """Which addresses a unit may talk to: loopback and the other side, where that is known as an address."""
    try:
        others = "" if peer == "localhost" else f" {ip_address(peer)}"
        return f"IPAddressDeny=any\nIPAddressAllow=localhost{others}"
    except ValueError:
        return f"# IPAddressDeny=any with IPAddressAllow=localhost and the address of {peer} allows nothing else"


def gate(server: Server, place: Place) -> str:
    """The gate's configuration, for nginx."""
    return filled(
        "gate.conf",
        port=place.gate_port,
        host=place.host,
        limit=server.body_limit,
        folder=place.home / "server",
        behind=behind(server),
    )


def gate_address(place: Place) -> str:
    """What sites connect to: host:port."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{host}:{place.gate_port}"


def behind(server: Server) -> str:
    """What the gate connects to: host:port."""
    return f"{server.address}:{server.port}"


def filled(template: str, **values: object) -> str:
    """A template with its places filled."""
    return Template((TEMPLATES / template).read_text()).substitute({k: str(v) for k, v in values.items()})


def _quoted(word: str) -> str:
    """A word of a systemd command line."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(plain, escaped)
    return f'"{word}"' if set(word) & set(" \"'") else word
