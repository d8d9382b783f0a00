"""A deployment's complete directory, with a folder for the server and one for every site.

Units, reverse proxy, app and instructions are filled-in templates from `ops/`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import UnsupportedAlgorithm
from pydantic import AfterValidator, Field

from fedloom.errors import ConfigError
from fedloom.outputs import check_output_folder
from fedloom.storage import disk
from fedloom.storage.disk import check_regular_file
from fedloom.values import Value, make
from fedloom.version import __version__
from fedloom_sites.deploy.code import CODE_FOLDER, INITIAL_MODEL_FILE
from fedloom_sites.deploy.ops import keys
from fedloom_sites.deploy.ops.check import read_relevant_versions
from fedloom_sites.deploy.ops.commands import (
    FINAL_EXIT_CODE,
    OPS_FOLDER,
    RESTART_VARIABLE,
    command_words,
    fill_template,
    flower_profile,
    process_environment,
)
from fedloom_sites.deploy.ops.plan import DeploymentPlan
from fedloom_sites.deploy.setting_files import (
    SERVER_FILE,
    SITE_FILE,
    describe_folder,
    read_server,
    resolve_paths,
    settings_text,
    sha256_hex,
)
from fedloom_sites.deploy.settings import Member, SecureSettings, Server, Site

APP_FOLDER = "app"
AUTHORITY_FOLDER = "authority"
"""Folder of the certificate authority, which the administrator keeps offline."""
CLI_FOLDER = "cli"
"""Folder of Flower's command line on the server, for use by the administrator."""
LOCAL_FOLDER = "local"
"""Folder of a local trial on one machine, next to the server's and the sites' folders."""
SECRET_FILES = ("ca.key", "server.key", "superexec.secret", "node-key", "signing-key")
"""Files that only their owners may read."""
WRITABLE_FOLDERS = {"server": ("state", "results", "flower", "cli"), "site": ("state", "flower")}
"""Folders that the processes of the server or of a site write to."""
MEMORY_LIMITS = {"server": "40%", "site": "50%"}
"""Memory limits for the units of the server and of a site, in systemd's notation. Percentages refer to the machine's
memory."""
DEFAULT_HOME = Path("/srv/fedloom")
"""Default folder of a deployment on a machine."""
AUTHORITY_DAYS = 3650
"""Validity of the authority in days. It should exceed the validity of the server's certificate, because the sites have
the authority's certificate."""

FileContents = dict[str, str | bytes]
"""Contents by path."""


def _check_plain_path(path: Path) -> Path:
    """Check that a path is safe to use in units, in the reverse proxy and in instructions, and return it."""
    if not re.fullmatch(r"/[\w./@+-]*", str(path)):
        raise ValueError(
            f"must begin with / and contain only letters, digits, '.', '_', '@', '+' or '-', got {str(path)!r}"
        )
    return path


Folder = Annotated[Path, AfterValidator(_check_plain_path)]


class Location(Value):
    """Where a deployment is located on its machines."""

    host: str = Field(
        "localhost", pattern=r"^[A-Za-z0-9.:][A-Za-z0-9.:-]{0,252}$", description="host or address of the reverse proxy"
    )
    proxy_port: int = Field(8443, ge=1, le=65535, description="port of the reverse proxy to which sites connect")
    port: int = Field(18000, ge=1, le=65535, description="the server's loopback port behind the reverse proxy")
    home: Folder = Field(DEFAULT_HOME, description="folder on each machine for server/ or site/")
    programs: Folder = Field(
        Path("/opt/fedloom/bin"), description="folder on each machine where fedloom's programs are installed"
    )
    memory: Folder | None = Field(
        None,
        description="folder on each site's machine for its record of its data, shared by all of the site's "
        "deployments (default: the site's state folder)",
    )
    days: int = Field(365, ge=1, le=3650, description="validity of the certificates, in days")
    quorum: int | None = Field(
        None,
        ge=1,
        description="number of accepted replies required in each round (default: more than half of the sites)",
    )
    metrics_port: int | None = Field(None, ge=1, le=65535, description="loopback port for the server's metrics")

    @property
    def prefix(self) -> str:
        """Prefix for the names of units, reverse proxy and containers, which differs between homes on one machine."""
        return "fedloom" if self.home == DEFAULT_HOME else "fedloom" + re.sub(r"[^A-Za-z0-9_.]", "-", str(self.home))

    @property
    def proxy(self) -> str:
        """Address that sites connect to, as host:port."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.proxy_port}"


def machine_folders(folder: Path) -> dict[str, Path]:
    """Return ``home`` and ``programs`` as configured in the units of a server's folder, or {} without units."""
    unit = next(iter(sorted(folder.glob("units/*-superlink.service"))), None)
    lines = dict(line.partition("=")[::2] for line in unit.read_text().splitlines()) if unit is not None else {}
    home, words = Path(lines.get("WorkingDirectory", "")), lines.get("ExecStart", "").split()
    return {"home": home.parent, "programs": Path(words[0]).parent} if words and home.is_absolute() else {}


def write_directory(plan: DeploymentPlan, out: Path, place: Location) -> None:
    """Write the complete directory of a deployment, or write nothing.

    Raises:
        ConfigError: ``out`` already exists, ``out`` lies in a run directory or another deployment, or a value is
            invalid.
        RunDirError: the folder could not be created.
    """
    check_output_folder(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"{out} already exists and contains keys. Choose another --out, or delete the folder manually"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    new.mkdir(mode=0o700)
    try:
        for side, folder, contents in _iterate_sides(plan, place):
            write_side(new / folder, side, contents)
        if out.exists():
            out.rmdir()
        new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def renew(folder: Path, host: str | None, days: int) -> tuple[Path, bool]:
    """Create another server certificate and key, signed by the deployment's authority, and return their path.

    If the process is killed after writing only one of the two files, they do not match, and no server accepts them. The
    next call writes both files again.

    Args:
        folder: the directory.
        host: name or address of the server for the sites. If None, the host in the deployment's server.toml is
            used.
        days: validity of the certificate in days.

    Returns:
        The path of the certificate, and True if an earlier call was killed (in this case, its files are removed).

    Raises:
        ConfigError: the directory does not contain the authority, its key, or settings that name the host.
    """
    here = folder / AUTHORITY_FOLDER
    try:
        ca = keys.Authority.load(
            check_regular_file(here / "ca.key").read_bytes(), check_regular_file(here / "ca.crt").read_bytes()
        )
    except OSError as error:
        raise ConfigError(
            f"{here} contains no certificate authority ({error.strerror}), and {folder} {describe_folder(folder)}. "
            f"{_authority_cure(folder)}"
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{here} contains a damaged ca.key or ca.crt. Copy the authority's folder there to use this command"
        ) from None
    server = folder / "server"
    host = _read_host(server / "server.toml") if host is None else host
    place = make(Location, {"host": host, "days": days}, "fedloom deploy renew", Location.model_fields)
    left = (ca.certificate.not_valid_after_utc - datetime.now(UTC)).days
    if left < 1:
        raise ConfigError(
            f"the certificate of the authority in {here} has expired or expires today, so sites would reject every "
            "certificate that it signs. Create a new deployment, with a new authority: fedloom deploy init"
        )
    if left < days:
        raise ConfigError(f"the certificate of the authority expires in {left} days, so --days must be at most {left}")
    drafts, new = [*server.glob(".new-*")], server / f".new-{secrets.token_hex(4)}"
    try:
        write_files(new, _issue_certificate(ca, place))
        for path in sorted(new.iterdir()):
            disk.note_disk_step("rename", server / path.name)
            path.replace(server / path.name)
        disk.fsync_folder(server)
    finally:
        for draft in (new, *drafts):
            shutil.rmtree(draft, ignore_errors=True)
    return server / "server.crt", bool(drafts)


def _authority_cure(folder: Path) -> str:
    """Return instructions for renewing the server's certificate if a folder does not contain the authority."""
    if (folder / SITE_FILE).exists():
        return "A site cannot renew the server's certificate and needs no new file. Ask the coordinator to renew it"
    if (folder / SERVER_FILE).exists():
        return (
            f"Run the command on the directory that 'fedloom deploy init' wrote, where {AUTHORITY_FOLDER}/ is kept. "
            "Then copy the new server.crt and server.key from its folder server/ to this folder"
        )
    return (
        f"Pass the directory that 'fedloom deploy init' wrote, and put {AUTHORITY_FOLDER}/ back into it from the place "
        "where you keep it"
    )


def _read_host(server_file: Path) -> str:
    if not server_file.exists():
        raise ConfigError(f"{server_file} does not exist, so the server's host is unknown. Add --host")
    return read_server(server_file).host


def systemd_units(of: Server | Site, place: Location) -> dict[str, str]:
    """Return the systemd units of the server or of a site, keyed by name."""
    about = {
        "superlink": "the server's connections",
        "superexec": "the server's work",
        "run": "the experiment, until all rounds are done",
        "site": f"site {of.site}" if isinstance(of, Site) else "",
    }
    return {
        f"{place.prefix}-{name}": _systemd_unit(name, about[name], of, place, words)
        for name, words in _side_commands(of, place).items()
    }


def _side_name(of: Server | Site) -> str:
    return "server" if isinstance(of, Server) else "site"


def _side_environment(of: Server | Site, name: str, place: Location) -> dict[str, str]:
    """Return the environment of a process that belongs to the server or to a site."""
    home = place.home / _side_name(of) / (CLI_FOLDER if name == "run" else "flower")
    return process_environment(home, place.programs, of.threads if isinstance(of, Site) else None)


def _side_commands(of: Server | Site, place: Location) -> dict[str, list[str]]:
    """Return the command lines of the processes of the server or of a site, keyed by process name."""
    home, programs = place.home / _side_name(of), place.programs
    if isinstance(of, Site):
        return {"site": command_words("join", None, programs, file=home / "site.toml")}
    location = resolve_paths(of, home)
    commands = {name: command_words(name, location, programs) for name in ("superlink", "superexec")}
    file = home / "server.toml"
    run = command_words("run", None, programs, app=home / APP_FOLDER, file=file)
    return commands | {"run": [*command_words("serve", None, programs, file=file), *run]}


def site_files(site: Site, node: keys.KeyPair, signing: keys.KeyPair, place: Location) -> FileContents:
    """Return the files of a single site: settings, keys and unit."""
    return {
        "site.toml": settings_text(site),
        "node-key": node.private,
        "node-key.pub": f"{node.public}\n",
        "signing-key": signing.private,
        "signing-key.pub": f"{signing.public}\n",
        "compose.yaml": compose_file(site, place),
        **{f"{name}.service": text for name, text in systemd_units(site, place).items()},
    }


def compose_file(of: Server | Site, place: Location) -> str:
    """Return the ``docker compose`` file of the server or of a site, which corresponds to the systemd units."""
    folder, services = place.home / _side_name(of), []
    for name, words in _side_commands(of, place).items():
        restarts = {RESTART_VARIABLE: "1"} if name == "run" else {}
        services.append(
            fill_template(
                "service.yaml",
                service=name,
                version=of.version,
                command=json.dumps([word.replace("$", "$$") for word in words]),
                folder=folder,
                volumes=json.dumps([f"./:{folder}", *(f"{shared}:{shared}" for shared in _shared_folders(of))]),
                environment=json.dumps(_side_environment(of, name, place) | restarts),
                restart="on-failure" if name == "run" else "unless-stopped",
                network="host" if name in ("superlink", "site") else "service:superlink",
            )
        )
    about = (
        f"# {of.name}: docker compose up -d. Make image builds the image; the reverse proxy for nginx is in gate.conf"
    )
    return "\n".join([about, f"name: {_compose_project(place, _side_name(of))}", "services:", *services])


def _compose_project(place: Location, side: str) -> str:
    """Return the ``docker compose`` project name of the server or of a site.

    By default, it would be only the folder's name, which is ambiguous.
    """
    return re.sub(r"[^a-z0-9_-]", "-", f"{place.prefix}-{side}".lower())


def proxy_configuration(server: Server, place: Location) -> str:
    """Return the nginx configuration of the reverse proxy."""
    places = {"host": place.host, "port": place.proxy_port, "folder": place.home / "server", "prefix": place.prefix}
    return fill_template("gate.conf", **places, limit=server.body_limit, behind=_proxy_target(server))


def _iterate_sides(plan: DeploymentPlan, place: Location) -> Iterator[tuple[str, str, FileContents]]:
    """Yield the name, folder and files of the authority, the server, each site, and the instructions."""
    ca = keys.make_authority(plan.name, AUTHORITY_DAYS)
    pairs = {site: (keys.make_key_pair("connection"), keys.make_key_pair("signing")) for site in plan.sites}
    members = tuple(
        Member(site=site, client=k, node_key=node.public, signing_key=signing.public)
        for k, (site, (node, signing)) in enumerate(pairs.items())
    )
    shared: dict[str, Any] = {
        "name": plan.name,
        "experiment": "experiment.toml",
        "fingerprint": sha256_hex(plan.experiment.encode()),
        "version": __version__,
        "versions": read_relevant_versions(),
        "clients": len(plan.sites),
        "samples": plan.samples,
        "fixed_data": plan.fixed_data,
        "data_name": plan.data_name,
        "code": plan.code.digests(),
        "installed": plan.code.installed,
    }
    if plan.threshold is not None:
        signing_keys = tuple(m.signing_key for m in members)
        shared["secure"] = SecureSettings(
            threshold=plan.threshold,
            keys=signing_keys,
            names=plan.sites,
            norm_bound=plan.norm_bound,
            changes=plan.changes,
            verify=plan.verify,
        )
    if plan.start is not None:
        shared["start"] = sha256_hex(plan.start)
    agreed: FileContents = {} if plan.start is None else {INITIAL_MODEL_FILE: plan.start}
    agreed |= {"experiment.toml": plan.experiment, "ca.crt": ca.pem()}
    agreed |= {f"{CODE_FOLDER}/{path}": data for path, data in plan.code.files.items()}
    quorum = place.quorum or plan.threshold or len(members) // 2 + 1
    settings = {**shared, "sites": members, "quorum": quorum, "port": place.port, "public": place.proxy}
    settings |= {} if place.metrics_port is None else {"metrics_port": place.metrics_port}
    settings["norm_bound"] = plan.norm_bound
    settings |= {} if plan.most_samples is None else {"examples_limit": plan.most_samples}
    server = make(Server, settings, "fedloom deploy init", Server.model_fields)
    home = place.home / "server"
    yield "authority", AUTHORITY_FOLDER, {"ca.key": ca.private(), "ca.crt": ca.pem()}
    yield (
        "server",
        "server",
        {
            **agreed,
            **_issue_certificate(ca, place),
            "superexec.secret": secrets.token_bytes(32),
            "server.toml": settings_text(server),
            "gate.conf": proxy_configuration(server, place),
            "compose.yaml": compose_file(server, place),
            f"{CLI_FOLDER}/config.toml": flower_profile(_proxy_target(server), home / "ca.crt"),
            **{f"units/{name}.service": text for name, text in systemd_units(server, place).items()},
            **{f"nodes/{m.site}.pub": f"{m.node_key}\n" for m in members},
            **{f"{APP_FOLDER}/{name}": OPS_FOLDER.joinpath(APP_FOLDER, name).read_text() for name in _APP_FILES},
        },
    )
    for member, (node, signing) in zip(members, pairs.values(), strict=True):
        site = Site(
            **shared, site=member.site, client=member.client, data=plan.data, data_dir=plan.data_dir, share=plan.share,
            memory=place.memory, server=place.proxy,
        )  # fmt: skip
        yield ("site", f"sites/{site.site}", {**agreed, **site_files(site, node, signing, place)})
    yield "instructions", ".", {"README.md": _readme_text(plan, server, place)}


_APP_FILES = ("pyproject.toml", *(f"fedloom_app/{name}.py" for name in ("__init__", "server_app", "client_app")))
"""Files of the app that Flower transfers to the sites: two modules that refer to code installed at the sites."""


def _issue_certificate(ca: keys.Authority, place: Location) -> FileContents:
    """Issue and return a new server certificate for the reverse proxy's host and for loopback."""
    names = dict.fromkeys((place.host, "localhost", "127.0.0.1", "::1"))
    certificate = keys.issue_server_certificate(ca, tuple(names), place.days)
    return {"server.crt": certificate.certificate, "server.key": certificate.key}


def _readme_text(plan: DeploymentPlan, server: Server, place: Location) -> str:
    home = place.home / "server"
    words = command_words("run", None, place.programs, app=home / APP_FOLDER, file=home / "server.toml")
    return fill_template(
        "README.md",
        name=plan.name,
        count=len(plan.sites),
        home=place.home,
        prefix=place.prefix,
        cli=home / CLI_FOLDER,
        programs=place.programs,
        environment=place.programs.parent,
        version=__version__,
        run=" ".join(f"'{word}'" if '"' in word else word for word in words),
        behind=_proxy_target(server),
        until=f"{datetime.now(UTC) + timedelta(days=place.days):%Y-%m-%d}",
    )


def _systemd_unit(name: str, what: str, of: Server | Site, place: Location, words: list[str]) -> str:
    side, runs = _side_name(of), name == "run"
    folder, peer = place.home / side, "localhost" if isinstance(of, Server) else place.host
    check = "" if isinstance(of, Server) else f"ExecStartPre=-{place.programs / 'fedloom'} deploy check {folder}\n"
    return fill_template(
        "unit.service",
        unit=f"{place.prefix}-{name}",
        what=what,
        name=of.name,
        home=place.home,
        folder=folder,
        environment="\n".join(
            f"Environment={_quote_for_systemd(f'{k}={v}')}" for k, v in _side_environment(of, name, place).items()
        ),
        check=check,
        command=" ".join(map(_quote_for_systemd, words)),
        restart="on-failure" if runs else "always",
        seconds=60 if runs else 5,
        prevent=f"RestartPreventExitStatus={FINAL_EXIT_CODE}\n" if runs else "",
        after=f" {place.prefix}-superexec.service" if runs else "",
        memory=MEMORY_LIMITS[side],
        writes=" ".join(map(str, [*(folder / write for write in WRITABLE_FOLDERS[side]), *_shared_folders(of)])),
        addresses=_allowed_addresses(peer),
    )


def _shared_folders(of: Server | Site) -> list[Path]:
    """Return the folders that the processes of a site share with the site's other deployments."""
    return [of.memory] if isinstance(of, Site) and of.memory is not None else []


def _allowed_addresses(peer: str) -> str:
    """Return the addresses that a unit may contact: loopback, and the other party if its address is known."""
    try:
        address = "" if peer == "localhost" else f" {ip_address(peer)}"
        return f"IPAddressDeny=any\nIPAddressAllow=localhost{address}"
    except ValueError:
        return f"# IPAddressDeny=any with IPAddressAllow=localhost and the address of {peer} allows nothing else"


def _proxy_target(server: Server) -> str:
    """Return the address behind the reverse proxy, as host:port."""
    return f"{server.address}:{server.port}"


def _quote_for_systemd(word: str) -> str:
    """Return a word quoted for a systemd command line."""
    word = word.translate({ord("\\"): "\\\\", ord('"'): '\\"', ord("%"): "%%", ord("$"): "$$"})
    return f'"{word}"' if set(word) & set(" \"'") else word


def write_side(folder: Path, side: str, contents: Mapping[str, str | bytes]) -> None:
    """Create the server's or a site's folder, including the folders that its units write to."""
    write_files(folder, contents)
    for name in WRITABLE_FOLDERS.get(side, ()):
        (folder / name).mkdir(mode=0o700, exist_ok=True)


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write new files so that they survive a crash. Files that contain secrets can be read only by their owners.

    Raises:
        FileExistsError: a file already exists.
    """
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if path.name in SECRET_FILES else 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
