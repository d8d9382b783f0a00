"""Checks of a path before something is written. A command may replace only its own files, and never its inputs.

Every command or method that writes files calls `check_output_file` or `check_output_folder` before it starts to work.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from fedloom.errors import ConfigError, capitalize, check_folder
from fedloom.outputs.kinds import FILE_KINDS, FileKind, never_own

LOCK_FILE = ".lock"
"""File that a process locks while it is using a run directory."""


def draft_path(path: Path) -> Path:
    """Return the path of the temporary file that is written first and renamed when it is complete."""
    return path.with_name(f".{path.name}.tmp")


def check_output_file(
    path: object,
    kind: FileKind,
    inputs: Iterable[object] = (),
    *,
    owns: Callable[[Path], bool] = never_own,
    force: bool | None = False,
) -> Path:
    """Check that a file may be written, and return its path.

    Args:
        path: the file.
        kind: kind of the file to be written.
        inputs: files, folders and names that the same call reads. Names that are not paths are ignored.
        owns: function that returns True if a file of this kind may be written to a given path relative to a run
            directory.
        force: True to replace a regular file of a different kind, or to accept a name with the extension of a different
            kind. Inputs, files that belong to a run or a deployment, and links are always rejected. None if the caller
            has no such option, so no message suggests it.

    Returns:
        The path.

    Raises:
        ConfigError: the path is an input, a link, a folder, a device, a read-only file, a path in a run directory or a
            deployment, or a file of a different kind.
        RunDirError: the folder of the path is a file or a broken link.
    """
    from fedloom.rundir import as_path  # needs pydantic, which a site's process must not wait for

    path = _check_name(as_path(path, "path"))
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link to {path.readlink()}, and fedloom would replace that file. Remove the "
            "link, or choose another path"
        )
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a file. Give the path of a file, such as {path / 'NAME'}")
    check_folder(path.parent)
    exists = path.exists()
    if exists and not path.is_file():
        raise ConfigError(f"{path} is not a regular file. Give the path of a regular file")
    for name, read in _existing_inputs(inputs):
        if _are_same_file(path, read) or _are_same_file(draft_path(path), read):
            raise ConfigError(f"{path} would overwrite {name}, which this call reads. Choose another path")
        if exists and _lies_in(path, read) and not kind.is_own(path):
            raise ConfigError(f"{path} is a file of {name}, which this call reads. Choose another path")
    _check_place(path.parent, path, path.parent.resolve() / path.name, owns)
    if exists and not os.access(path, os.W_OK):
        raise ConfigError(f"{path} is read-only. Change its permissions, or choose another path")
    if force:
        return path
    option = "" if force is None else "add --force"
    if exists and not kind.is_own(path):
        why = "" if kind.is_own is never_own else f", and is not {kind.description} that fedloom wrote"
        replace = f"{option} to replace this file, or " if option else ""
        raise ConfigError(f"{path} already exists{why}. {capitalize(f'{replace}choose another path')}")
    other = next((other for other, endings in FILE_KINDS.items() if path.suffix.lower() in endings), kind.name)
    if not exists and other != kind.name:
        raise ConfigError(
            f"{path}: {path.suffix} is the wrong extension for {kind.description}. Use a name that ends in "
            f"{' or '.join(FILE_KINDS[kind.name])}{f', or {option} to keep this name' if option else ''}"
        )
    return path


def check_output_folder(
    folder: object,
    inputs: Iterable[object] = (),
    *,
    entries: Collection[str] | None = None,
    owns: Callable[[Path], bool] = never_own,
) -> Path:
    """Check that files may be written to a folder, and return the path of the folder.

    Args:
        folder: folder, which does not have to exist.
        inputs: files, folders and names that the same call reads.
        entries: names of files and folders in the folder that belong to the command, which replaces and deletes them.
            If None, the command writes a new folder or its own run directory. If it is empty, individual files are
            written, which `check_output_file` checks, and the folder is not a run directory.
        owns: function that returns True if a path relative to a run directory may contain such folders.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder is in a run directory or a deployment, or an input would be replaced or deleted.
        RunDirError: the folder is a file or a broken link.
    """
    from fedloom.rundir import as_path  # needs pydantic, which a site's process must not wait for

    folder = _check_name(as_path(folder, "folder"))
    check_folder(folder)
    whole = folder.resolve()
    _check_place(whole if entries is None else whole.parent, folder, whole, owns)
    for name, read in _existing_inputs(inputs):
        if _lies_in(read, folder) and _fold_path_case(read).relative_to(_fold_path_case(folder)).parts[0] in (
            entries or ()
        ):
            raise ConfigError(f"{name}, which this call reads, would be replaced or deleted in {folder}. Move {name}")
    return folder


def _check_name(path: Path) -> Path:
    """Return a path that no program can confuse with an option or with the standard output.

    Raises:
        ConfigError: the path begins with a hyphen, or a new name in it contains a line break or a different control
            character.
    """
    if path.parts and path.parts[0].startswith("-"):
        what = "the standard output" if path.parts[0] == "-" else "an option"
        raise ConfigError(
            f"{str(path)!r} looks like {what}, but fedloom writes files. Give the path of a file or folder"
        )
    created = "".join(place.name for place in (path, *path.parents) if not place.exists())
    if any(unicodedata.category(character) == "Cc" for character in created):
        raise ConfigError(f"{str(path)!r} contains a line break or another control character. Use a printable name")
    return path


def is_run_directory(folder: Path) -> bool:
    """Return True if a run was started in a folder.

    A folder that contains only an experiment file with the name that runs use is not a run directory, because this file
    may be the user's own.
    """
    from fedloom.rundir import (  # needs pydantic, which a site's process must not wait for
        METRICS_FILE,
        PARTITION_FILE,
        SETTINGS_FILE,
        SUMMARY_FILE,
        has_digest,
    )

    settings = folder / SETTINGS_FILE
    with suppress(OSError):  # unreadable folders are skipped
        names = (LOCK_FILE, SUMMARY_FILE, METRICS_FILE, PARTITION_FILE)
        return settings.is_file() and (any((folder / n).exists() for n in names) or has_digest(settings.read_bytes()))
    return False


def _is_deployment(folder: Path) -> bool:
    """Return True if a folder belongs to a server, a site or a deployment."""
    with suppress(OSError):
        return any((folder / name).is_file() for name in ("site.toml", "server.toml", "authority/ca.crt"))
    return False


def _check_place(first: Path, shown: Path, target: Path, owns: Callable[[Path], bool]) -> None:
    """Raise an error if a folder or one of its parents is a run directory or belongs to a deployment.

    ``target`` is the path that will be written.
    """
    place = first.resolve()
    for folder in (place, *place.parents):
        if is_run_directory(folder):
            if owns(target.relative_to(folder)):
                return
            raise ConfigError(
                f"{shown} is in the run directory {folder}, and a run replaces the files there. "
                "Choose a path outside this directory"
            )
        if _is_deployment(folder):
            raise ConfigError(
                f"{shown} is in {folder}, which belongs to a deployment. Choose a path outside this folder"
            )


def _existing_inputs(inputs: Iterable[object]) -> Iterable[tuple[object, Path]]:
    """Yield the inputs that exist as files or folders."""
    for one in inputs:
        with suppress(OSError, ValueError):  # the name is not a valid path
            if isinstance(one, str | os.PathLike) and one and (path := Path(one).expanduser()).exists():
                yield one, path


def _are_same_file(path: Path, other: Path) -> bool:
    """Return True if two paths refer to the same file.

    Case and the encoding of accents are ignored, because some disks ignore them.
    """
    if path.exists() and other.exists() and path.samefile(other):
        return True
    return _fold_path_case(path) == _fold_path_case(other)


def _lies_in(path: Path, folder: Path) -> bool:
    return folder.is_dir() and _fold_path_case(folder) in _fold_path_case(path).parents


def _fold_path_case(path: Path) -> Path:
    return Path(unicodedata.normalize("NFC", str(path.resolve())).casefold())
