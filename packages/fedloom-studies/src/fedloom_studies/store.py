"""Records of studies as lines of JSON, so that files from several machines can be merged line by line."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom.errors import RunDirError, check_folder
from fedloom.storage import make_folder, release_lock, take_lock, write_atomic

RECORDS_FOLDER = Path(__file__).parent / "results"
"""Folder that contains the records in an installed package. In a checkout of the repository, they are in
``studies/results``."""
CHECKOUT_FOLDER = Path("studies") / "results"
NEW_RESULTS_FOLDER = Path("runs") / "results"
"""Folder for the records of users without a checkout of the repository."""


def choose_folder(results: Path | None) -> Path:
    """Return the folder for records: the given one, otherwise the one in the checkout, otherwise ``runs/results``.

    When ``runs/results`` is created, the records in the installed package are copied to it.

    Raises:
        RunDirError: the path exists but is not a folder.
    """
    if results is not None or CHECKOUT_FOLDER.is_dir():
        check_folder(results or CHECKOUT_FOLDER)
        return results or CHECKOUT_FOLDER
    if not NEW_RESULTS_FOLDER.is_dir() and RECORDS_FOLDER.is_dir():
        draft = NEW_RESULTS_FOLDER.with_name(f".{NEW_RESULTS_FOLDER.name}.{secrets.token_hex(4)}")
        try:
            make_folder(draft)
            for file in RECORDS_FOLDER.iterdir():
                write_atomic(draft / file.name, file.read_bytes())
            with suppress(OSError):  # another process has created the folder
                draft.rename(NEW_RESULTS_FOLDER)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return NEW_RESULTS_FOLDER


def read_records_of_file(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in a file, each as a new dictionary.

    A record that occurs twice because of a merge is yielded twice, in file order.

    Raises:
        RunDirError: a line of the file is not a record. The message names the file and the line.
    """
    try:
        state = file.stat()
    except FileNotFoundError:
        return
    for number, record in enumerate(_parse_lines(file, state.st_mtime_ns, state.st_size, state.st_ino), 1):
        if not isinstance(record, dict):
            raise not_a_record_error(file, number, "it contains no fields")
        yield dict(record)


@lru_cache(maxsize=4)
def _parse_lines(file: Path, *_state: int) -> list[Any]:
    """Parse the lines of a file. The result is cached until the file changes."""
    lines = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise not_a_record_error(file, number, error) from None
    return lines


def read_document(file: Path, kind: type, cure: str = "delete it and run it again") -> dict[str, Any]:
    """Read a dictionary from a file, and check that each of its values has the type ``kind``.

    Return {} if the file does not exist.

    Raises:
        RunDirError: the file is damaged.
    """
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RunDirError(f"{file} is damaged: {error}; {cure}") from None
    if not isinstance(values, dict) or not all(isinstance(value, kind) for value in values.values()):
        raise RunDirError(f"{file} is damaged: it does not contain the expected kind of data; {cure}")
    return values


def not_a_record_error(file: Path, number: int, reason: object) -> RunDirError:
    """Return the error to raise for a line that is not a record."""
    return RunDirError(f"{file}, line {number}, is not a record: {reason}. Delete the line and run it again")


def write_record(file: Path, record: Mapping[str, object], key: tuple[str, ...]) -> None:
    """Write a record to a file. The new record replaces any record with the same values of the fields ``key``.

    The lines are sorted by the values of these fields.
    """
    make_folder(file.parent)
    with lock_folder(file.parent):
        by_key = {tuple(r.get(k, "") for k in key): r for r in read_records_of_file(file)}
        by_key[tuple(record[k] for k in key)] = dict(record)
        write_atomic(file, "".join(json.dumps(r) + "\n" for _, r in sorted(by_key.items())).encode())


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, waiting until no other process or thread holds it.

    Raises:
        RunDirError: the file system does not support file locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        take_lock(descriptor, folder, wait=True)
        yield
    finally:
        release_lock(descriptor)  # closing is not enough: a forked process may share it
        os.close(descriptor)
