"""The command line: ``fedloom run FILE.toml`` and the other commands.

Torch is imported only by the commands that need it.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

from fedloom.lab.cli import advise, analyze, bench, facts, models, runs, tune, watch
from fedloom.lab.cli._app import (
    DataDir,
    ExecutorName,
    FileArgument,
    Join,
    StrictCommandGroup,
    Trust,
    add_file_to_errors,
    app,
    print_errors,
    say,
    say_json,
    worker_count,
)
from fedloom.lab.cli._complete import algorithms, complete_from, complete_one_of
from fedloom.lab.cli.analyze import choose_analysis
from fedloom.lab.cli.models import ForceOption, IdColumnOption, PredictionsFile, SetThresholdOption, ThresholdOption

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "DataDir", "ExecutorName", "FileArgument", "ForceOption", "IdColumnOption", "Join", "PredictionsFile",
    "SetThresholdOption", "StrictCommandGroup", "ThresholdOption", "Trust", "add_file_to_errors", "advise",
    "algorithms", "analyze", "app", "bench", "choose_analysis", "complete_from", "complete_one_of", "facts", "main",
    "models", "print_errors", "runs", "say", "say_json", "tune", "watch", "worker_count",
]  # fmt: skip

# Command packages import the names above, so they are loaded last.
for _package in entry_points(group="fedloom.commands"):
    _package.load()


class SafeErrorStream(FileIO):
    """Standard error stream whose failures never end a run.

    Text that cannot be written, for example to a closed pipe, is dropped.
    """

    def write(self, data: Buffer, /) -> int:
        """Write bytes and return their number, even if they could not be written."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def main() -> None:
    """Run the command ``fedloom``.

    If the caller has closed a standard stream, the stream is replaced by the null device.

    Characters that the output encoding cannot represent, such as the lines of a table in ASCII, are written as question
    marks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the process ends)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, TextIOWrapper):
        log, form = BufferedWriter(SafeErrorStream(sys.stderr.fileno(), "w", closefd=False)), sys.stderr
        sys.stderr = TextIOWrapper(log, form.encoding, form.errors, line_buffering=True)
    app()
