"""Cache for text that is expensive to compute, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path


def _cache_folder() -> Path:
    """Return the cache folder: FEDLOOM_CACHE if it is set, otherwise ``fedloom`` in XDG_CACHE_HOME or ``~/.cache``."""
    project_folder, shared = os.environ.get("FEDLOOM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(project_folder) if project_folder else Path(shared or Path.home() / ".cache") / "fedloom"


def _cache_header(key: str, text: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b"\0" + text, digest_size=32).hexdigest().encode() + b"\n"


def read_cached_text(name: str, key: str) -> str | None:
    """Return the cached text for a name and key, or None if it is missing or damaged."""
    try:
        head, _, text = (_cache_folder() / name).read_bytes().partition(b"\n")
        return text.decode() if head + b"\n" == _cache_header(key, text) else None
    except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: the home folder is unknown
        return None


def write_cached_text(name: str, key: str, text: str) -> None:
    """Store text in the cache, replacing any earlier text with the same name.

    Nothing is stored if the folder is not writable.
    """
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
    except (OSError, RuntimeError):
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_cache_header(key, text.encode()) + text.encode())
        os.replace(draft, folder / name)
    except OSError:
        Path(draft).unlink(missing_ok=True)


def fingerprint_sources(places: Iterable[Path]) -> str:
    """Return a digest of the software versions and of each file's name, size and modification time under some paths.

    Args:
        places: paths of files or folders. A folder stands for all files in it and its subfolders. A nonexistent path is
            treated as an empty folder.
    """
    digest = hashlib.blake2b(digest_size=16)
    for place in places:
        for file in [place] if place.is_file() else _source_files(place):
            state = os.stat(file)
            digest.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    for library in ("pydantic", "pydantic_core", "torch"):
        digest.update(f"{library} {version(library)}\n".encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()


def _source_files(folder: Path) -> Iterable[str]:
    """Return the files in a folder and its subfolders in a fixed order, except Python's bytecode files."""
    for name, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        yield from (os.path.join(name, file) for file in sorted(files))
