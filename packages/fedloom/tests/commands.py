"""Commands as a user types them, in this process; and work that dies, in a fork of it."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedloom.lab.cli import app
from fedloom.storage import disk


def call(*words: object, code: int = 0) -> str:
    """What a command says that ends with this exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def reading_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of time end after so many readings of their clock, on a machine of any speed."""
    monkeypatch.setattr("fedloom_studies.reproduce.execute.time", SimpleNamespace(monotonic=count(0.0).__next__))


def fork(work: Callable[[], object], said: str | Path = os.devnull) -> int:
    """Process of a fork that does some work and writes what it says to a file; it ends with 1 after an error."""
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # an onnxruntime session of the parent, deleted here, would wait for threads that are not here
        code = 1
        try:
            sys.stdout = sys.stderr = open(said, "w")  # noqa: SIM115
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def end(pid: int) -> int:
    """Exit code of a fork, when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_fork(work: Callable[[], object], crash_at: int) -> int:
    """Exit code of some work in a fork that dies, with 137, at its ``crash_at``-th change of the disk; 0 is never."""

    def dies() -> None:
        disk._crash_at = crash_at
        work()

    return end(fork(dies))
