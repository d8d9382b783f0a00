"""Read, write and compare the files of a deployment: the settings of its server and sites, and its experiment file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import tomli_w

from fedloom.data import SOURCES
from fedloom.engine.checks.moved import update_document
from fedloom.errors import ConfigError
from fedloom.imports import is_path
from fedloom.storage import read_toml
from fedloom.storage.files import read_content
from fedloom.values import Value, fields_of, make
from fedloom.version import __version__
from fedloom_sites.deploy.settings import Server, SharedSettings, Site

V = TypeVar("V", bound=Value)
SITE_FILE, SERVER_FILE = "site.toml", "server.toml"
"""Names of the settings files in the folder of a site and in the folder of the server."""
SNAPSHOTS_FOLDER = "snapshots"
"""Name of the folder with snapshots, within a site's `Site.memory_folder`."""
AGREED_FILE_HINT = "restore the file from a backup, or get it from the coordinator again"
"""Advice about an agreed file that is missing or differs."""


def describe_folder(folder: Path) -> str:
    """Return a description of a folder in a deployment, as the predicate of a sentence."""
    if not folder.is_dir():
        return "is not a folder" if folder.exists() else "does not exist"
    if (folder / SITE_FILE).exists():
        return "is the folder of a site"
    if (folder / SERVER_FILE).exists():
        return "is the folder of the server"
    if (folder / "server" / SERVER_FILE).exists():
        return "is the directory of a whole deployment"
    return "contains no site.toml and no server.toml"


def check_site_folder(folder: Path) -> None:
    """Raise an error that describes a folder and names the folders of sites in it, if it is not the folder of a site.

    Raises:
        ConfigError: the folder does not contain a site.toml.
    """
    if (folder / SITE_FILE).exists():
        return
    files = sorted([*folder.glob(f"sites/*/{SITE_FILE}"), *folder.glob(f"*/{SITE_FILE}")])
    sites = ", ".join(f"{file.parent}" for file in files)
    cure = f"Pass the path of a site's folder{f': {sites}' if sites else ''}"
    if (folder / SERVER_FILE).exists():
        cure = "Run the command at a site, with the path of the site's folder"
    raise ConfigError(f"{folder} is not the folder of a site: it {describe_folder(folder)}. {cure}")


def read_site(path: Path, *, live: bool = False) -> Site:
    """Read a site's TOML file, and return the settings with absolute paths, including paths in its data settings.

    Args:
        path: the file.
        live: True to use the site's current data even if the site normally reads a snapshot.

    Raises:
        ConfigError: the file is missing or contains an invalid value.
    """
    folder = path.parent.resolve()
    if path.name == SITE_FILE:
        check_site_folder(path.parent)
    site = _read_settings(Site, path, "site file")
    source = site.data["source"]
    is_file = bool({"/", "\\"} & set(source) or Path(source).suffix or (folder / source).exists())
    keys = ("path", "source") if is_file and source not in SOURCES and not is_path(source) else ("path",)
    keys = ("path",) if source.startswith("hub:") else keys
    places = {key: site.data[key] for key in keys if isinstance(site.data.get(key), str)}
    data = site.data | {key: str(folder / Path(place).expanduser()) for key, place in places.items()}
    if site.snapshot is not None and not live:
        key = "path" if "path" in data else "source"
        file = f"{site.snapshot}{Path(data[key]).suffix}"
        data[key] = str(site.memory_folder / SNAPSHOTS_FOLDER / file)
    return site.model_copy(update={"data": data})


def read_server(path: Path) -> Server:
    """Read a server's TOML file, and return the settings with absolute paths.

    Raises:
        ConfigError: the file is missing or contains an invalid value.
    """
    return _read_settings(Server, path, "server file")


def check_version(shared: SharedSettings) -> None:
    """Raise an error if the version of fedloom differs from the agreed version.

    Raises:
        ConfigError: the versions differ. The message names both.
    """
    if shared.version != __version__:
        raise ConfigError(
            f"fedloom is {__version__} here, but the experiment runs {shared.version}. Install that version, or ask "
            "the coordinator for an agreement on a patch release (fedloom deploy upgrade)"
        )


def resolve_paths(value: V, folder: Path) -> V:
    """Return settings with relative paths resolved from ``folder``.

    Raises:
        ConfigError: a path contains a NUL character.
    """
    paths = {name: folder / v for name in type(value).model_fields if isinstance(v := getattr(value, name), Path)}
    for name, path in paths.items():
        if "\0" in str(path):
            raise ConfigError(
                f"{folder}: {name} = {str(path)!r} contains a NUL character, which is not allowed in "
                "a path. Correct the path"
            )
    return value.model_copy(update=paths)


def settings_text(value: Value) -> str:
    """Convert settings to TOML. Parsing the text gives equal settings.

    The table with the data comes first, because people at the site edit this table.
    """
    tables = value.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps({key: tables.pop(key) for key in ("data",) if key in tables} | tables)


def check_fingerprint(shared: SharedSettings) -> bytes:
    """Return the content of the experiment file, and raise an error if it differs from the agreed file.

    Returns:
        Content, exactly as it was compared.

    Raises:
        ConfigError: the file cannot be read, or the digests differ. The message names both.
    """
    content = read_content(shared.experiment, "the experiment file", AGREED_FILE_HINT)
    check_agreed(f"{shared.experiment}", "experiment file", content, shared.fingerprint)
    return content


def sha256_hex(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def check_agreed(what: str, kind: str, content: bytes, wanted: str, cure: str = AGREED_FILE_HINT) -> None:
    """Raise an error if the SHA-256 of a file's content differs from the agreed value.

    Raises:
        ConfigError: the digests differ. The message names both.
    """
    got = sha256_hex(content)
    if got != wanted:
        raise ConfigError(
            f"{what} is not the agreed {kind}: its SHA-256 is {got[:16]}..., but {wanted[:16]}... was agreed; {cure}"
        )


def _read_settings(kind: type[V], path: Path, what: str) -> V:
    document = read_toml(path, what)
    if isinstance(document.get("data"), dict):  # of a site, which may be of an earlier version
        document = {**document, "data": update_document({"data": document["data"]})["data"]}
    try:
        value = make(kind, document, str(path), fields_of(kind))
    except ConfigError as error:
        release = document.get("version", __version__)
        if release == __version__:
            raise
        raise ConfigError(
            f"{error}. The file was written by fedloom {release}, but this is {__version__}. Install that version"
        ) from None
    return resolve_paths(value, path.parent.resolve())
