"""A site's permanent process, which answers messages one by one and keeps data and model in memory.

`handover` starts the process, and passes it a listening socket and the lock that prevents a second process. The process
ends when its owner ends, or when the site's settings or the version change. Nothing is lost if it is killed, because
everything relevant is on disk before an answer leaves the site. The process reads its data again whenever a data file
has changed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from fedloom.data import SOURCES
from fedloom.data.sources import DATA_FOLDER_VARIABLE, FileSource
from fedloom.errors import ConfigError
from fedloom_sites.deploy.code import CODE_FOLDER
from fedloom_sites.deploy.setting_files import read_site
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.handover import (
    ANSWER_REPLY,
    ERROR_REPLY,
    HANDOVER_MAGIC,
    OTHER_REPLY,
    SAME_SITE_REPLY,
    START_SECONDS,
    is_own_message,
    receive_bytes,
    send_sized,
    settings_digest,
)
from fedloom_sites.flwr_adapter import decode_records, encode_records

MAX_HEAD_BYTES = 1 << 20
"""Maximum number of bytes in a message besides its arrays."""
MAX_WATCHED_FILES = 10_000
"""Maximum number of a data set's files that are watched for changes. A larger data set is read again for every
message."""
CHECK_INTERVAL_SECONDS = 5
"""Time in seconds between two checks of the settings."""
FRESH_NANOSECONDS = 2_000_000_000
"""Within this time, in nanoseconds, a changed file may change again without a new modification time."""


class WarmSite:
    """Answers of a site, computed from data that are cached in memory.

    Args:
        site: the site's settings.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._client: Client | None = None
        self._read: Stamp | None = None

    def answer(self, content: bytes) -> bytes:
        """Return the signed reply to a message.

        Raises:
            ConfigError: the signing key cannot be read.
        """
        client, request = self._current_client(), decode_records(content)
        return encode_records(client.reply(request))

    def prepare(self) -> None:
        """Read and build everything that answers need. If this fails, the first answer reports the error."""
        with suppress(Exception):
            self._current_client().prepare()

    def _current_client(self) -> Client:
        """Return the client, which is created anew if a file has changed."""
        now, at = file_stamps(self._site), time.time_ns()
        if self._client is None or now is None or now != self._read:
            self._client = Client(self._site)
        unchanged = now is not None and all(at - max(times) > FRESH_NANOSECONDS for *_, times in now)
        self._read = now if unchanged else None
        return self._client


Stamp = tuple[tuple[str, int, int, tuple[int, int]], ...]
"""For each file: path, inode, size, and the times in nanoseconds when its content and its inode changed."""


def file_stamps(site: Site) -> Stamp | None:
    """Return the current state of the files read by a site, or None if it cannot be determined."""
    modules = [spec.origin for name in site.installed if (spec := find_spec(name)) and spec.origin]
    roots = [site.experiment, site.signing_key, site.experiment.parent / CODE_FOLDER, *map(Path, modules)]
    source = site.data["source"]
    named = [Path(site.data["path"])] if "path" in site.data else [Path(source)] if os.path.isabs(source) else []
    kind = SOURCES.get(source)
    if not named and kind is None:
        return None  # data from user code or from a hub
    if not named and kind is not None and issubclass(kind, FileSource):
        folder = site.data_dir or os.environ.get(DATA_FOLDER_VARIABLE)
        if folder is None:
            return None
        named = [Path(folder)]
    stamps: list[tuple[str, int, int, tuple[int, int]]] = []
    for path in (path for root in (*roots, *named) for path in _iterate_files(root)):
        if len(stamps) == MAX_WATCHED_FILES:
            return None
        try:
            about = path.stat()
        except OSError:
            continue
        stamps.append((str(path), about.st_ino, about.st_size, (about.st_mtime_ns, about.st_ctime_ns)))
    return tuple(stamps)


def _iterate_files(root: Path) -> Iterator[Path]:
    yield root
    for folder, _, names in os.walk(root, followlinks=True):
        yield from (Path(folder, name) for name in names)


def serve_messages(listener: socket.socket, site_file: Path) -> None:
    """Answer messages until the settings differ from the settings at the start of the process."""
    key, site = settings_digest(site_file), read_site(site_file)
    warm = WarmSite(site)
    warm.prepare()
    while True:
        line, _ = listener.accept()
        with line:
            line.settimeout(START_SECONDS)
            try:
                if not is_own_message(line) or receive_bytes(line, len(HANDOVER_MAGIC)) != HANDOVER_MAGIC:
                    continue
                if receive_bytes(line, len(key)) != key:
                    line.sendall(OTHER_REPLY)
                    return
                line.sendall(SAME_SITE_REPLY)
                _answer_connection(line, warm, site.message_limit + MAX_HEAD_BYTES)
            except OSError:
                continue  # the caller closed the connection, and will connect again


def _answer_connection(line: socket.socket, warm: WarmSite, limit: int) -> None:
    size = int.from_bytes(receive_bytes(line, 8), "big")
    if size > limit:
        send_sized(line, f"a message of {size} bytes, at most {limit} are read".encode(), ERROR_REPLY)
        return
    content = receive_bytes(line, size)
    try:
        kind, answer = ANSWER_REPLY, warm.answer(content)
    except Exception as error:  # the caller receives the error, and the process keeps running
        kind, answer = ERROR_REPLY, f"{type(error).__name__}: {error}".encode()
    send_sized(line, answer, kind)


def end_with(owner: int, site_file: Path) -> None:
    """End this process as soon as the owner's process ends or the settings change, even in the middle of its work."""
    key = settings_digest(site_file)

    def watch() -> None:
        poll = select.poll()
        try:
            if hasattr(os, "pidfd_open"):
                poll.register(os.pidfd_open(owner), select.POLLIN)
            while not poll.poll(1000 * CHECK_INTERVAL_SECONDS):
                os.kill(owner, 0)
                if settings_digest(site_file) != key:
                    break
        except (ProcessLookupError, ConfigError):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(words: Sequence[str]) -> None:
    """Serve a site.

    The arguments are the site's TOML file, the numbers of the socket and the lock, and the ID of the owner's process.
    """
    file, (listening, lock, owner) = Path(words[0]), map(int, words[1:])
    for fd in (listening, lock):
        os.set_inheritable(fd, False)
    end_with(owner, file)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with socket.socket(fileno=listening) as listener:
        serve_messages(listener, file)
        os._exit(0)  # exits immediately, without PyTorch's cleanup


if __name__ == "__main__":
    main(sys.argv[1:])
