"""Admission of the sites' keys to Flower's server: the keys in ``nodes/``, except revoked keys.

``nodes/NAME.pub`` contains a key that the server admits. When a key is revoked, it is moved to ``nodes/NAME.revoked``,
so that it is never admitted again: not at a start with an empty database, not by following the instructions again, and
not from an old copy of the folder.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedloom.errors import ConfigError
from fedloom.storage import read_toml, write_atomic
from fedloom.storage.files import read_content
from fedloom_sites.deploy.ops.commands import PROGRAMS_FOLDER, ask_flower
from fedloom_sites.deploy.ops.directory import CLI_FOLDER, LOCAL_FOLDER
from fedloom_sites.deploy.ops.processes import ProcessError
from fedloom_sites.deploy.ops.status import server_file
from fedloom_sites.deploy.setting_files import read_server

KEYS_FOLDER, ADMITTED_SUFFIX, REVOKED_SUFFIX = "nodes", ".pub", ".revoked"
UNREGISTERED_STATUS = "unregistered"
"""Flower's status of a node whose key was revoked."""


def admitted_key_file(server: Path, name: str) -> Path:
    """Return the path, in the server's folder, of a site's key that is to be admitted."""
    return server / KEYS_FOLDER / f"{name}{ADMITTED_SUFFIX}"


def is_revoked(server: Path, name: str) -> bool:
    """Return True if a site's key was revoked and the site has no other key that can be admitted.

    Args:
        server: folder of the server.
        name: name of the site.
    """
    former, file = _revoked_key_lines(server, name), admitted_key_file(server, name)
    return bool(former) and (not file.exists() or _key_line(file) in former)


def revoke(folder: Path, name: str, programs: Path = PROGRAMS_FOLDER) -> int:
    """Revoke the key of a site at Flower's running server, and return the number of the site's node.

    The site uses this key for its connection.

    Args:
        folder: folder of the deployment or of its server.
        name: name of the site, which may already have been removed from the settings.
        programs: folder of Flower's programs.

    Raises:
        ConfigError: the site does not exist, the server has never admitted its key, or the server's database cannot be
            read.
        ProcessError: the key was revoked earlier, Flower reports an error, or Flower does not answer.
    """
    file = server_file(folder)
    database, home = _running_server_paths(file)
    keys = _set_aside(file.parent, name)
    out = f"{name} cannot connect at any later start, because its key is now in {KEYS_FOLDER}/{name}{REVOKED_SUFFIX}"
    try:
        nodes = [node for key in keys if (node := _find_node(database, key)) is not None]
    except ConfigError as error:
        raise ConfigError(f"{error}\n{out}") from None
    if not nodes:
        raise ConfigError(f"the server has not yet registered a key of {name}. Also, {out}")
    registered = [number for number, status in nodes if status != UNREGISTERED_STATUS]
    if not registered:
        raise ProcessError(f"the server rejects the key of {name}, because it was revoked")
    try:
        ask_flower("unregister", home, programs, node=registered[-1])
    except ProcessError as error:
        raise ProcessError(f"{error}\n{out}. Repeat the command when the server answers again") from None
    return registered[-1]


def _set_aside(server: Path, name: str) -> list[str]:
    """Move the key of a site out of the admitted keys, and return the site's revoked keys. The last key is the newest.

    Raises:
        ConfigError: the site does not exist.
    """
    file = admitted_key_file(server, name)
    sites = sorted({path.stem for kind in (ADMITTED_SUFFIX, REVOKED_SUFFIX) for path in file.parent.glob(f"*{kind}")})
    if name not in sites:
        raise ConfigError(f"no site is called {name}; sites: {', '.join(sites)}")
    keys = _revoked_key_lines(server, name)
    if file.exists():
        keys = [*(key for key in keys if key != _key_line(file)), _key_line(file)]
        write_atomic(file.with_suffix(REVOKED_SUFFIX), "".join(f"{key}\n" for key in keys).encode())
        file.unlink()
    return keys


def _revoked_key_lines(server: Path, name: str) -> list[str]:
    file = server / KEYS_FOLDER / f"{name}{REVOKED_SUFFIX}"
    return file.read_text().splitlines() if file.exists() else []


def _key_line(file: Path) -> str:
    return read_content(file).decode().strip()


def _running_server_paths(file: Path) -> tuple[Path, Path]:
    """Return the paths of the server's database and of the folder that its command line uses.

    If only a local trial is running, its paths are returned instead.
    """
    home, tried = file.parent / CLI_FOLDER, file.parent.parent / LOCAL_FOLDER
    connection = read_toml(home / "config.toml", "connection to the server")["superlink"]["fedloom"]
    if (tried / CLI_FOLDER).is_dir() and not Path(connection["root-certificates"]).exists():
        return tried / "superlink.db", tried / CLI_FOLDER
    return read_server(file).database, home


def _find_node(database: Path, key: str) -> tuple[int, str] | None:
    """Return the number and status of the node with an OpenSSH key, or None if the key was never admitted.

    Raises:
        ConfigError: the database cannot be read.
    """
    pem = load_ssh_public_key(key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT node_id, status FROM node WHERE public_key = ?", (pem,)).fetchone()
    except sqlite3.Error as error:
        cure = "start the server and, if the site is connected, repeat the command on the server's machine"
        raise ConfigError(f"cannot read the nodes of {database} ({error}); {cure}") from None
    return None if row is None else (row[0] % (1 << 64), str(row[1]))
