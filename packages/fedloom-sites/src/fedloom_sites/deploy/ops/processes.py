"""Processes that never outlive the process that started them: each is ended, by its ID, with all its descendants."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from fedloom.errors import ConfigError, FedloomError, Stop
from fedloom_sites.deploy.ops import reaper

EXIT_CODE_PREFIX = "Exit Code: "
"""Prefix of the line that explains why a Flower program ends. Details follow in the lines below."""


_RETURNED_PORTS = set[int]()
"""Ports that `free_port` has returned."""


class ProcessError(FedloomError):
    """Error: a process ended unexpectedly or did not answer, or its run stopped early.

    Args:
        message: a sentence.
        stop: the reason why the run stopped. `Stop.FAILED` if a process failed.
    """

    def __init__(self, message: str, stop: Stop = Stop.FAILED) -> None:
        self.stop = stop
        super().__init__(message)


class ManagedProcess:
    """A process that leads its own process group. Its output is written to a file.

    Args:
        name: name of the process, which is used in messages.
        command: program and arguments.
        environment: variables that are added to this process's environment.
        log: file of the output.
        folder: working directory. If None, the working directory of this process is used.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **environment}, start_new_session=True, cwd=folder,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """ID of the process, which is also the ID of its group."""
        return self._popen.pid

    @property
    def is_reaped(self) -> bool:
        """True if the exit status was collected, so that the system may give the ID to another process."""
        return self._popen.returncode is not None

    def alive(self) -> bool:
        """Return True if the process is still running.

        A process that has ended keeps its ID until it is reaped, so that no other process can get this ID.
        """
        if self.is_reaped:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def collect_exit_status(self) -> None:
        """Collect the exit status of an ended process, so that its group disappears with its last process."""
        self._popen.poll()

    def reap(self) -> int:
        """Return the exit status. Any remaining processes in its group are killed first."""
        if not self.is_reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._popen.wait()

    def tail(self, lines: int = 12) -> str:
        """Return the end of the output, or the reason for the exit that Flower or the operating system has written."""
        output = self.log.read_text(errors="replace")
        if os.strerror(errno.EADDRINUSE).lower() in output.lower():
            return "another program has taken the chosen port in the meantime. Run the same command again"
        _, why, reason = output.rpartition(EXIT_CODE_PREFIX)
        return why + reason.partition("\n\n")[0] if why else "\n".join(output.splitlines()[-lines:])

    def check(self) -> None:
        """Raise an error if the process has ended.

        Raises:
            ProcessError: the process has ended. The message contains the end of the process's output.
        """
        if not self.alive():
            raise ProcessError(
                f"{self.name} ended with exit status {self.reap()}. The end of {self.log}:\n{self.tail()}"
            )


class ManagedProcesses:
    """Context manager that ends its processes at the end of the block, or when this process is killed.

    A reaper process (`reaper`) ends them within `reaper.GROUP_GRACE_SECONDS` seconds. SIGTERM and SIGHUP leave the
    block in the same way as Ctrl-C. While processes are being ended, further signals are held back.
    """

    def __init__(self) -> None:
        self.started: list[ManagedProcess] = []
        self._reaper: subprocess.Popen[str] | None = None

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> ManagedProcess:
        """Start and return a process. The arguments are the same as for `ManagedProcess`."""
        if self._reaper is None:
            words = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), str(reaper.GROUP_GRACE_SECONDS)]
            self._reaper = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)
        process = ManagedProcess(name, command, environment, log, folder)
        self.started.append(process)
        self._tell_reaper(process.pid)
        return process

    def end(self, process: ManagedProcess) -> int:
        """Kill the remaining processes in a started process's group, and return the process's exit status.

        Afterwards, the system may give the ID to another process, so neither this block nor the reaper uses it again.
        """
        status = process.reap()
        self._tell_reaper(-process.pid)
        self.started.remove(process)
        return status

    def check(self) -> None:
        """Raise a `ProcessError` if any of the processes has ended."""
        for process in self.started:
            process.check()

    def stop(self) -> None:
        """End all processes, including their descendants."""
        for process in [p for p in self.started if p.is_reaped]:
            self.end(process)
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            with suppress(BrokenPipeError):
                self._reaper.stdin.close()
            while self._reaper.poll() is None:
                for process in self.started:
                    process.collect_exit_status()
                time.sleep(0.02)
            self._reaper = None
        for process in self.started:
            process.reap()
        self.started.clear()

    def _tell_reaper(self, number: int) -> None:
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            with suppress(BrokenPipeError):
                print(number, file=self._reaper.stdin, flush=True)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, _raise_interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self.stop()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _raise_interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def free_port() -> int:
    """Return a loopback port that is currently free and that no earlier call in this process has returned.

    The program that receives the port needs seconds until it listens, and the system would choose the port again.
    """
    with ExitStack() as stack:
        while True:
            port: int = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            if port not in _RETURNED_PORTS:
                _RETURNED_PORTS.add(port)
                return port


def check_free(port: int, what: str, cure: str = "Choose another port") -> None:
    """Raise an error that ends with ``cure`` if a port is already in use.

    Raises:
        ConfigError: another process listens on the port.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # Python's own text repeats the address
        raise ConfigError(f"{what}: port {port} on 127.0.0.1 is not free ({reason}). {cure}") from None
