"""Snapshots: dated copies of a site's data, for data that grow while runs and analyses read them.

Like the records of sums and budgets, a snapshot belongs to a site and to data with a certain name, and can be read by
every experiment on these data. Two snapshots that differ by only a few subjects would reveal these subjects, so the
second would be rejected.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedloom.data import Dataset
from fedloom.errors import ConfigError, RunDirError
from fedloom.storage import make_folder, read_toml, write_atomic
from fedloom.storage.files import content_of
from fedloom_sites.deploy.analyses import DEFAULT_MIN_SUBJECTS, agreed_analyses
from fedloom_sites.deploy.code import read_agreed
from fedloom_sites.deploy.row_sets import digest_subjects, isolates_subjects
from fedloom_sites.deploy.secure.opened import lock_folder, read_checked, write_checked
from fedloom_sites.deploy.setting_files import SNAPSHOTS_FOLDER, read_site
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.approval import check_data_name
from fedloom_sites.deploy.site.local_data import read_data
from fedloom_sites.deploy.site.state import SAMPLES_FILE

RECORD_FILE = "snapshots.json"
"""File, in the site's memory of the data, with the date, digest and subjects of every snapshot."""


class DeclaredSnapshot(NamedTuple):
    """A new snapshot.

    Attributes:
        day: date of the snapshot, which is also its name.
        path: its file or folder.
        subjects: number of subjects in the snapshot.
        used: True if the current experiment reads the snapshot, False if a run has already begun with other data.
    """

    day: str
    path: Path
    subjects: int
    used: bool


def declare_snapshot(folder: Path, day: str | None = None) -> DeclaredSnapshot:
    """Copy a site's data to a snapshot, and make the experiment read the snapshot if its run has not yet begun.

    Args:
        folder: folder of the site.
        day: date of the data, such as 2026-12-01. If None, the date is today (UTC).

    Raises:
        ConfigError: the data are neither a file nor a folder, the date is not later than that of the last snapshot, or
            the snapshot differs from an earlier one in too few subjects.
        DataError: the data cannot be read or do not match the agreement.
    """
    file, day = folder / "site.toml", day or datetime.now(UTC).date().isoformat()
    site, live = read_site(file), read_site(file, live=True)
    try:
        date.fromisoformat(day)
    except ValueError:
        raise ConfigError(f"the date of a snapshot must have the form 2026-12-01, got {day!r:.40}") from None
    key = "path" if "path" in live.data else "source"
    source = Path(live.data[key])
    if not source.is_file() and not source.is_dir():
        raise ConfigError(
            f"{source} is neither a file nor a folder. A snapshot copies the data that [data] of {file} names"
        )
    check_data_name(live.with_(snapshot=None), remembers_answers=True)
    memory = site.memory_folder
    with lock_folder(memory):
        record = _read_records(memory)
        earlier: list[dict[str, Any]] = record["snapshots"]
        if earlier and day <= earlier[-1]["day"]:
            raise ConfigError(
                f"the last snapshot is dated {earlier[-1]['day']}. A new snapshot must have a later date, got {day}"
            )
        make_folder(memory / SNAPSHOTS_FOLDER, mode=0o700)
        draft = memory / SNAPSHOTS_FOLDER / f".draft{source.suffix}"
        try:
            _delete_path(draft)
            if source.is_dir():
                shutil.copytree(source, draft, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, draft)
            copied = live.model_copy(update={"data": live.data | {key: str(draft)}})
            subjects = _digest_subjects(read_data(read_agreed(site), copied), record["salt"])
            _check_apart(site, day, subjects, earlier)
            path = draft.with_name(f"{day}{source.suffix}")
            earlier.append({"day": day, "digest": _digest_of_files(draft), "subjects": subjects})
            for copied_file in _files_at_path(draft):
                copied_file.chmod(0o400)
            draft.replace(path)
            write_checked(memory / RECORD_FILE, record)
        finally:
            _delete_path(draft)
    used = not (site.folder / SAMPLES_FILE).exists()
    if used:
        rest = re.sub(r"(?m)^snapshot = .*\n", "", content_of(file).decode())
        write_atomic(file, f'snapshot = "{day}"\n{rest}'.encode())
        assert read_toml(file, "site file")["snapshot"] == day
    return DeclaredSnapshot(day, path, len({*subjects}), used)


def check_snapshot(site: Site) -> str:
    """Return the date of the snapshot that a site reads, or "" if it reads its data directly.

    Raises:
        ConfigError: the snapshot was never declared, or its file has changed.
    """
    if site.snapshot is None:
        return ""
    record = _read_records(site.memory_folder)
    earlier = next((one for one in record["snapshots"] if one["day"] == site.snapshot), None)
    path = Path(site.data["path" if "path" in site.data else "source"])
    if earlier is None or _digest_of_files(path) != earlier["digest"]:
        what = "was never declared" if earlier is None else "has changed since it was declared"
        raise ConfigError(f"the snapshot of {site.snapshot} {what}. Create another snapshot: fedloom deploy snapshot")
    return site.snapshot


def _files_at_path(path: Path) -> list[Path]:
    """Return all files in a folder, or a list that contains only the given file."""
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def _digest_of_files(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of a folder's files."""
    digests = {one: hashlib.sha256(content_of(one, "the snapshot")).hexdigest() for one in _files_at_path(path)}
    if not path.is_dir():
        return digests[path]
    lines = [f"{one.relative_to(path).as_posix()}\0{digest}\n" for one, digest in digests.items()]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _delete_path(path: Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _check_apart(site: Site, day: str, subjects: list[str], earlier: list[dict[str, Any]]) -> None:
    """Raise an error if a snapshot differs from an earlier one in too few subjects."""
    agreed = agreed_analyses(read_agreed(site), site.samples, site.clients, None, 0).values()
    least, here = max([DEFAULT_MIN_SUBJECTS, *(one.rules.min_subjects for one in agreed)]), {*subjects}
    for one in earlier:
        before = {*one["subjects"]}
        apart = max(len(here - before), len(before - here))
        if 0 < apart < least:
            raise ConfigError(
                f"the snapshot of {day} differs from the snapshot of {one['day']} by {apart} subjects, but it must "
                f"differ by 0 or at least {least} subjects. Wait until more subjects have changed"
            )
    if isolates_subjects(here, [[{*one["subjects"]}] for one in earlier], least):
        raise ConfigError(
            f"the snapshot of {day} and a combination of earlier snapshots differ by fewer than {least} subjects. Wait "
            "until more subjects have changed"
        )


def _read_records(memory: Path) -> dict[str, Any]:
    record = read_checked(memory / RECORD_FILE)
    if record is None and (memory / RECORD_FILE).exists():
        raise RunDirError(
            f"{memory / RECORD_FILE} is damaged, so the earlier snapshots are unknown. Restore this file from a backup"
        )
    return record or {"salt": secrets.token_hex(16), "snapshots": []}


def _digest_subjects(data: Dataset, salt: str) -> list[str]:
    """Return every subject's digest, computed from all its rows regardless of their order."""
    design = data.design
    of = torch.arange(len(data)) if design is None or design.subject is None else design.subject
    contents = (b"".join(part[k].contiguous().numpy().tobytes() for part in (data.x, data.y)) for k in range(len(of)))
    return digest_subjects(sorted(zip(of.tolist(), contents, strict=True)), bytes.fromhex(salt))
