"""Processes that never outlive what started them: each is ended by its id, with everything that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from fedloom.deploy import guard
from fedloom.errors import ConfigError, FedloomError


class ProcessError(FedloomError):
    """A process that ended, or did not answer, when it should have."""


class Process:
    """One process, the leader of a group of its own; its output goes to a file.

    Args:
        name: for messages.
        command: the program and its arguments.
        environment: what is added to this process's own environment.
        log: file of its output.
        folder: its working directory; None: this process's own.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        """Its id, which is also the id of its group."""
        return self._popen.pid

    def alive(self) -> bool:
        """Whether it still runs; one that has ended keeps its id until it is reaped, so that no other can have it."""
        if self._popen.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to it and to everything that it started."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """Its exit status; what is left of its group is killed first."""
        self.tell(signal.SIGKILL)
        return self._popen.wait()

    def tail(self, lines: int = 12) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raise if it has ended.

        Raises:
            ProcessError: with the end of its output.
        """
        if not self.alive():
            raise ProcessError(
                f"{self.name} ended with exit status {self.reap()}; the end of {self.log}:\n{self.tail()}"
            )


class Processes:
    """Processes that are ended when the block is left, however it is left: last started, first told.

    If this process is killed, a guard ends them (`fedloom.deploy.guard`). SIGTERM and SIGHUP leave the block as Ctrl-C
    does; while processes are being ended, which takes `guard.GRACE` seconds at most, further signals wait.
    """

    def __init__(self) -> None:
        self.started: list[Process] = []
        self._guard: subprocess.Popen[str] | None = None

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> Process:
        """Start a process; arguments as of `Process`."""
        process = Process(name, command, environment, log, folder)
        self.started.append(process)
        self._report(process.pid)
        return process

    def check(self) -> None:
        """Raise a `ProcessError` if any of them has ended."""
        for process in self.started:
            process.check()

    def stop(self) -> None:
        """End all of them, and everything that they started."""
        for process in reversed(self.started):
            process.tell(signal.SIGTERM)
        end = time.monotonic() + guard.GRACE
        while any(process.alive() for process in self.started) and time.monotonic() < end:
            time.sleep(0.05)
        for process in self.started:
            process.reap()
            self._report(-process.pid)
        self.started.clear()
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def _report(self, number: int) -> None:
        """Tell the guard of a group that has begun, or (minus its id) has ended."""
        if self._guard is None:
            command = [sys.executable, "-I", "-S", str(Path(guard.__file__))]
            self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            print(number, file=self._guard.stdin, flush=True)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _deaf():
            self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def _deaf() -> Iterator[None]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def check_free(port: int, what: str) -> None:
    """Refuse a port that is in use.

    Raises:
        ConfigError: somebody listens there.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigError(f"{what}: port {port} on 127.0.0.1 is not free ({error.strerror}); choose another") from None
