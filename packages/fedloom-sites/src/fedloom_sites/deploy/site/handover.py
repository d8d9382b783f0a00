"""Handover of messages from Flower's short-lived processes to the site's permanent process.

Flower starts a new process for each message. This process imports neither PyTorch nor the experiment. It opens a Unix
socket to the permanent process (see `warm`), which it starts if necessary, and passes a single message to it. Whichever
process holds the lock on `warm.lock` is the site's process. The lock is inherited together with the socket, so there is
only one such process even if many messages arrive at once.

Each process checks which user runs the other process, and whether both have the same digest of version and settings. A
permanent process whose digest differs ends. In each direction, a message is preceded by its length, encoded in eight
bytes. An incomplete message receives no answer.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path

from fedloom.errors import ConfigError, FedloomError
from fedloom.storage import take_lock
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import read_content
from fedloom.version import __version__
from fedloom_sites.deploy.site.pinned import SECRET_OPTION, run_network

SOCKET_FILE, SOCKET_LOCK_FILE, SITE_LOG_FILE = "warm.sock", "warm.lock", "warm.log"
MAX_SOCKET_PATH_BYTES = 100
"""Maximum length, in bytes, of a Unix socket's path. Operating systems allow 104 bytes or more."""
HANDOVER_MAGIC = b"fedloom1"
SAME_SITE_REPLY, OTHER_REPLY, ANSWER_REPLY, ERROR_REPLY = b"y", b"n", b"a", b"e"
OWNER_VARIABLE = "FEDLOOM_SITE_PROCESS"
"""Environment variable that contains the ID of the site's network process. The variable is inherited by all processes
that this process starts."""
START_SECONDS = 10.0
"""Time limit in seconds for finding or starting the site's process. After that, the answer is an error."""
CONNECT_INTERVAL_SECONDS = 0.05
MAX_LOG_BYTES = 1 << 20
"""Size of the log file, in bytes, above which a new process starts a new file."""


class NoAnswer(FedloomError):
    """Error: the site's process has ended or could not be started.

    The state on the site's disk remains as it was before the message.
    """


def hand_over(site_file: Path, content: bytes, owner: int | None = None) -> bytes:
    """Pass a message to the site's process and return the answer.

    Args:
        site_file: file with the settings of the site.
        content: the message's content.
        owner: ID of the process whose end also ends the site's process. If None, the owner is the site's network
            process if the environment contains its ID, and otherwise the process that started this one.

    Raises:
        ConfigError: the settings cannot be read, or a folder does not belong to the site.
        RunDirError: the disk that holds the site's state does not support file locks.
        NoAnswer: no answer has arrived. If the previous process had ended, a new one has been started.
    """
    key, state = settings_digest(site_file), state_folder(site_file)
    begin = _ProcessStart(site_file.resolve(), state, _owner_process_id() if owner is None else owner)
    end = time.monotonic() + START_SECONDS
    while True:
        line = _connect_to_process(begin.path)
        if line is not None:
            with line:
                if _is_taken(line, key):
                    return _exchange_message(line, content, begin)
        if time.monotonic() > end:
            raise NoAnswer(f"the process of the site could not be started. The reason is in {state / SITE_LOG_FILE}")
        if line is None:
            begin.attempt()
        time.sleep(CONNECT_INTERVAL_SECONDS)


def main(words: list[str]) -> None:
    """Start a site's process and the process that starts its tasks, and then become the site's network process.

    Both processes end when the network process ends.

    Args:
        words: the site's TOML file, followed by the command of its network process or any other command.
    """
    os.environ[OWNER_VARIABLE] = str(os.getpid())  # also the ID of the command, which replaces this program
    try:
        file = Path(words[0]).resolve()
        _ProcessStart(file, state_folder(file), os.getpid()).attempt(wait=START_SECONDS)
    except (FedloomError, OSError) as error:  # the answer to the first message also reports this error
        sys.stderr.write(f"fedloom: {error}\n")
    if SECRET_OPTION in words:
        try:
            run_network(words[1:], state_folder(Path(words[0]).resolve()))
        except FedloomError as error:
            sys.exit(f"fedloom: {error}")
    os.execv(words[1], words[1:])


def _owner_process_id() -> int:
    """Return the ID of the process whose end also ends the site's process.

    If this process has been orphaned, the function returns its own ID rather than the ID of the process that adopted
    it.
    """
    named = os.environ.get(OWNER_VARIABLE, "")
    if named.isdigit():
        return int(named)
    return os.getppid() if os.getppid() > 1 else os.getpid()


def settings_digest(site_file: Path) -> bytes:
    """Return the SHA-256 of the version and the settings, which include the experiment's fingerprint.

    Both processes must compute the same digest.

    Raises:
        ConfigError: the settings cannot be read.
    """
    return hashlib.sha256(__version__.encode() + b"\0" + read_content(site_file, "the site file")).digest()


def is_own_message(line: socket.socket) -> bool:
    """Return True if, according to the operating system, the other process belongs to this user.

    On systems that do not report this, only the socket's mode restricts access.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    user: int = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
    return user == os.getuid()


def receive_bytes(line: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes, and return them.

    Raises:
        ConnectionError: fewer bytes arrived.
    """
    parts, missing = [], size
    while missing:
        part = line.recv(min(missing, 1 << 20))
        if not part:
            raise ConnectionError(f"{missing} of {size} bytes are missing")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def receive_sized(line: socket.socket) -> bytes:
    """Receive bytes that are preceded by their number, and return the bytes.

    Raises:
        ConnectionError: fewer bytes arrived.
    """
    return receive_bytes(line, int.from_bytes(receive_bytes(line, 8), "big"))


def send_sized(line: socket.socket, content: bytes, before: bytes = b"") -> None:
    """Send the number of bytes, and then the bytes themselves."""
    line.sendall(before + len(content).to_bytes(8, "big"))
    line.sendall(content)


def socket_path(state: Path) -> Path:
    """Return the socket's path: in the state's folder, or in a short private folder if that path is too long.

    Raises:
        ConfigError: a folder belongs to a different user, or other users can write to it.
    """
    _check_own(state.resolve(), stat.S_IWOTH)
    path = state / SOCKET_FILE
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    short = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    short /= f"fedloom-{os.getuid()}-{hashlib.sha256(os.fsencode(state)).hexdigest()[:16]}"
    with suppress(FileExistsError):
        short.mkdir(mode=0o700)
    _check_own(short, stat.S_IRWXG | stat.S_IRWXO)
    return short / SOCKET_FILE


class _ProcessStart:
    """Command that starts the site's process."""

    def __init__(self, site_file: Path, state: Path, owner: int) -> None:
        self._file, self._state, self._owner = site_file, state, owner
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = socket_path(state)

    def attempt(self, wait: float = 0.0) -> None:
        """Start the site's process, unless it is already running or starting.

        After that, the process's socket accepts messages.

        Raises:
            RunDirError: the disk with the state does not support file locks.
        """
        end = time.monotonic() + wait
        path = self._state / SOCKET_LOCK_FILE
        lock = _open_descriptor(path, os.O_RDWR)
        try:
            while not take_lock(lock, path):
                if time.monotonic() >= end:
                    return
                time.sleep(CONNECT_INTERVAL_SECONDS)
            self.path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                before = os.umask(0o177)
                try:
                    listener.bind(str(self.path))
                finally:
                    os.umask(before)
                listener.listen(16)
                self._start(listener.fileno(), lock)
        finally:
            os.close(lock)

    def _start(self, listener: int, lock: int) -> None:
        log = self._state / SITE_LOG_FILE
        with suppress(FileNotFoundError):
            if log.stat().st_size > MAX_LOG_BYTES:
                log.replace(log.with_suffix(".log.old"))
        output = _open_descriptor(log, os.O_WRONLY | os.O_APPEND)
        words = [sys.executable, "-P", "-m", "fedloom_sites.deploy.site.warm", str(self._file)]
        words += map(str, (listener, lock, self._owner))
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        try:
            for fd in (listener, lock):
                os.set_inheritable(fd, True)
            streams = [(os.POSIX_SPAWN_DUP2, output, stream) for stream in (1, 2)]
            os.posix_spawn(sys.executable, words, os.environ, file_actions=[*actions, *streams])
        finally:
            os.close(output)


def _open_descriptor(path: Path, flags: int) -> int:
    """Open a file of the state, creating the file if necessary, and return its descriptor.

    Raises:
        ConfigError: the path is not a regular file, or the file cannot be written to.
    """
    try:
        return os.open(check_regular_file(path), flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _connect_to_process(path: Path) -> socket.socket | None:
    """Connect to the process, and return the socket. Return None if no process is listening."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    if not is_own_message(line):
        line.close()
        raise ConfigError(f"{path} belongs to a process of another user. Remove it")
    return line


def _is_taken(line: socket.socket, key: bytes) -> bool:
    """Return True if the process accepts a message for these settings.

    A process with different settings, or one that is ending, does not accept the message.
    """
    try:
        line.sendall(HANDOVER_MAGIC + key)
        return line.recv(1) == SAME_SITE_REPLY
    except OSError:
        return False


def _exchange_message(line: socket.socket, content: bytes, begin: _ProcessStart) -> bytes:
    try:
        send_sized(line, content)
        kind, answer = receive_bytes(line, 1), receive_sized(line)
    except OSError as error:
        begin.attempt(wait=START_SECONDS / 2)
        raise NoAnswer("the process of the site ended before it answered. A new process was started") from error
    if kind != ANSWER_REPLY:
        raise NoAnswer(answer.decode(errors="replace"))
    return answer


def state_folder(site_file: Path) -> Path:
    """Return the folder with the experiment's state at the site.

    The folder also contains the socket, the lock and the log.

    Raises:
        ConfigError: the settings cannot be read.
    """
    try:
        site = tomllib.loads(check_regular_file(site_file).read_text(encoding="utf-8-sig"))
        return site_file.parent.resolve() / str(site.get("state", "state")) / str(site["fingerprint"])[:16]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read the site file {site_file}: {error}") from None


def _check_own(folder: Path, refused: int) -> None:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & refused:
        raise ConfigError(
            f"{folder} must be owned by this user and not be writable by others. Remove it, or change "
            "its owner and mode"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
