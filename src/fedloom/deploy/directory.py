"""The ready directory of a deployment: everything that the server and every site need, each in a folder of its own."""

from __future__ import annotations

import os
import secrets
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedloom.deploy import commands, keys
from fedloom.deploy.code import FOLDER
from fedloom.deploy.plan import Plan
from fedloom.deploy.settings import Member, Server, Site, fingerprint, text_of
from fedloom.deploy.units import (
    CLI,
    SERVER_WRITES,
    SITE_WRITES,
    TEMPLATES,
    Place,
    behind,
    filled,
    gate,
    gate_address,
    server_units,
    site_unit,
)
from fedloom.errors import ConfigError
from fedloom.values import make
from fedloom.version import __version__

APP = "app"
AUTHORITY_DAYS = 3650
"""Days that the authority is valid: sites have its certificate, so it should outlive the server's."""


def write(plan: Plan, out: Path, place: Place) -> None:
    """Write the directory, as a whole or not at all.

    Raises:
        ConfigError: there is something at ``out`` already, or a value cannot be.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; its keys are kept: choose another --out, or delete it yourself")
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    new.mkdir(mode=0o700)
    try:
        _fill(new, plan, place)
        if out.exists():
            out.rmdir()
        new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _fill(folder: Path, plan: Plan, place: Place) -> None:
    ca = keys.authority(plan.name, AUTHORITY_DAYS)
    pairs = {site: (keys.key_pair("connection"), keys.key_pair("signing")) for site in plan.sites}
    members = tuple(
        Member(site=site, client=k, node_key=node.public, signing_key=signing.public)
        for k, (site, (node, signing)) in enumerate(pairs.items())
    )
    experiment = _write(folder / "server" / "experiment.toml", plan.experiment)
    shared: dict[str, Any] = {
        "name": plan.name,
        "experiment": "experiment.toml",
        "fingerprint": fingerprint(experiment),
        "version": __version__,
        "clients": len(plan.sites),
        "samples": plan.samples,
        "columns": plan.columns,
        "fixed_data": plan.fixed_data,
        "code": plan.code.digests(),
        "installed": plan.code.installed,
    }
    quorum = place.quorum or len(members) // 2 + 1
    given = {**shared, "sites": members, "quorum": quorum, "port": place.port, "public": gate_address(place)}
    given["norm_bound"] = plan.norm_bound
    server = make(Server, given, "fedloom deploy init", Server.model_fields)
    _write(folder / "authority" / "ca.key", ca.private(), private=True)
    _write(folder / "authority" / "ca.crt", ca.pem())
    _write_server(folder / "server", server, ca, place)
    _write_code(folder / "server", plan)
    for member, (node, signing) in zip(members, pairs.values(), strict=True):
        site = Site(
            **shared,
            site=member.site,
            client=member.client,
            data=plan.data,
            data_dir=plan.data_dir,
            share=plan.share,
            server=gate_address(place),
        )
        there = folder / "sites" / site.site
        _write(there / "experiment.toml", plan.experiment)
        _write(there / "ca.crt", ca.pem())
        _write_code(there, plan)
        _write_site(there, site, node, signing, place)
        _write(folder / "server" / "nodes" / f"{site.site}.pub", node.public + "\n")
    _write(folder / "README.md", _readme(plan, server, place))


def _write_code(folder: Path, plan: Plan) -> None:
    for path, data in plan.code.files.items():
        _write(folder / FOLDER / path, data)


def _write_site(folder: Path, site: Site, node: keys.Pair, signing: keys.Pair, place: Place) -> None:
    _write(folder / "site.toml", text_of(site))
    _write(folder / "node-key", node.private, private=True)
    _write(folder / "node-key.pub", node.public + "\n")
    _write(folder / "signing-key", signing.private, private=True)
    _write(folder / "fedloom-site.service", site_unit(site, place))
    for name in SITE_WRITES:
        (folder / name).mkdir(mode=0o700)


def _write_server(folder: Path, server: Server, ca: keys.Authority, place: Place) -> None:
    certify(folder, ca, place)
    _write(folder / "ca.crt", ca.pem())
    _write(folder / "superexec.secret", secrets.token_bytes(32), private=True)
    _write(folder / "server.toml", text_of(server))
    _write(folder / "gate.conf", gate(server, place))
    home = place.home / "server"
    _write(folder / CLI / "config.toml", commands.profile(behind(server), home / "ca.crt"))
    for name, text in server_units(server, place).items():
        _write(folder / "units" / f"{name}.service", text)
    write_app(folder / APP)
    for name in SERVER_WRITES:
        (folder / name).mkdir(mode=0o700, exist_ok=True)


def certify(folder: Path, ca: keys.Authority, place: Place) -> None:
    """A new certificate of the server, for the gate's host and for loopback."""
    names = dict.fromkeys((place.host, "localhost", "127.0.0.1", "::1"))
    certificate = keys.server_certificate(ca, tuple(names), place.days)
    _write(folder / "server.crt", certificate.certificate)
    _write(folder / "server.key", certificate.key, private=True)


def renew(folder: Path, host: str, days: int) -> Path:
    """Another certificate of the server, by the authority of a deployment's directory; its path.

    Raises:
        ConfigError: the directory holds no authority, or not its key any more.
    """
    here = folder / "authority"
    try:
        ca = keys.Authority.load((here / "ca.key").read_bytes(), (here / "ca.crt").read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{here} has no authority ({error.strerror}); put its folder there for this command"
        ) from None
    left = (ca.certificate.not_valid_after_utc - datetime.now(UTC)).days
    if left < days:
        raise ConfigError(f"the authority's own certificate ends in {left} days, so --days must be at most that")
    new = folder / "server" / f".new-{secrets.token_hex(4)}"
    certify(new, ca, Place(host=host, days=days))
    for path in new.iterdir():
        path.replace(folder / "server" / path.name)
    new.rmdir()
    return folder / "server" / "server.crt"


def write_app(folder: Path) -> None:
    """The app that Flower carries to the sites: two modules that name what is installed there."""
    for name in ("pyproject.toml", *(f"fedloom_app/{m}.py" for m in ("__init__", "server_app", "client_app"))):
        _write(folder / name, TEMPLATES.joinpath(APP, *name.split("/")).read_text())


def _readme(plan: Plan, server: Server, place: Place) -> str:
    home = place.home / "server"
    words = commands.run(home / APP, home / "server.toml", place.programs)
    return filled(
        "README.md",
        name=plan.name,
        count=len(plan.sites),
        home=place.home,
        cli=home / CLI,
        programs=place.programs,
        version=__version__,
        run=" ".join(f"'{word}'" if '"' in word else word for word in words),
        behind=behind(server),
        until=f"{datetime.now(UTC) + timedelta(days=place.days):%Y-%m-%d}",
    )


def _write(path: Path, content: str | bytes, *, private: bool = False) -> Path:
    """A new file on the disk; a private one only its owner reads."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path
