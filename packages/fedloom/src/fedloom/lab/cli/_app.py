"""The command-line application, the format of its error messages, and arguments that several commands share."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import core
from typer.core import TyperGroup

from fedloom.errors import (
    EXIT_CODES,
    PLAIN_KEYS,
    ConfigError,
    DataError,
    FedloomError,
    RunStopped,
    Stop,
    describe_cause,
    escape_controls,
    write_singular,
)
from fedloom.hints import RENAMED_KEYS
from fedloom.version import __version__

core.HAS_RICH = False  # otherwise, typer prints "\\[required]" in plain help. Only rich's markup needs this escape


MAX_INTEGER = 2**63 - 1
"""Largest integer that an option accepts."""
EMPTY_ALLOWED_FLAGS = ("--event", "--client-column", "--subject")
"""Options whose value may be an empty string."""


def _plain_number(kind: Any, value: object, param: Any, ctx: Any) -> Any:
    """Convert an option's value to a number, or report an error."""
    if isinstance(value, str) and not re.fullmatch(r"[-+.0-9a-zA-Z]{1,400}", value):
        kind.fail(f"{value!r:.80} is not a number in plain digits, such as 10 or 0.5", param, ctx)
    number = kind.converts(value, param, ctx)
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        kind.fail(f"{value!r:.80} is too large: the maximum is {MAX_INTEGER:,}", param, ctx)
    return number


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"error: {escape_controls(sentence)}", err=True)
    raise typer.Exit(2)


@contextmanager
def _exit_on_closed_output() -> Iterator[None]:
    """Exit without a message if the reader of the output has closed the pipe, as in ``fedloom list | head -1``."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):  # their buffers are flushed at the end of the process
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None


HELP_PANELS = ("Start", "Run", "Use models", "Statistics", "Real sites", "Studies")
"""Groups of commands in the help text. The commands that new users need most are listed first."""


COMMAND_PACKAGES = ("fedloom-clinic", "fedloom-sites")
"""Packages of this project that add commands."""


class StrictCommandGroup(TyperGroup):
    """Command group that rejects empty arguments and invalid text.

    An empty argument usually results from an unset shell variable. As a path, it would mean the current folder. Numbers
    must be written in plain digits, although Python would also accept ``1_0``, digits of other scripts, and spaces.
    """

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return the command with this name, or None if there is none."""
        command: Any = super().get_command(ctx, cmd_name)
        for option in [] if command is None else command.params:
            if option.type.name.startswith(("integer", "float")) and not hasattr(option.type, "converts"):
                option.type = copy(option.type)  # click shares its types in this process
                option.type.converts, option.type.convert = option.type.convert, partial(_plain_number, option.type)
        return command

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Return the context of the command, unless help or the version was requested and has been printed."""
        with _exit_on_closed_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command and return its result. Expected errors are printed as sentences."""
        with _exit_on_closed_output(), print_errors():
            try:
                return super().invoke(ctx)
            except Exception as error:
                wrong: Any = error  # click's error, which typer does not export
                if new := RENAMED_KEYS["command"].get(str(getattr(error, "option_name", ""))):
                    wrong.message, wrong.possibilities = (
                        f"No such option: {wrong.option_name}; its name is now {new}",
                        None,
                    )
                raise

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Check the arguments and return the arguments for the command."""
        for k, word in enumerate(args):
            empty = not word.strip() or (word.startswith("--") and word.find("=") == len(word.rstrip()) - 1)
            if empty and (word or args[max(k - 1, 0)]).rstrip("=") not in EMPTY_ALLOWED_FLAGS:
                place = f" after {args[k - 1]}" if k and not word.strip() else f": {word}" if word.strip() else ""
                _refuse(
                    f"there is an empty word{place}. A shell variable may not be set. Pass a value, or omit the empty "
                    "word"
                )
            if re.match(r"(--[\w-]+=)?~(/|$)", word):
                _refuse(f"{word!r:.80}: the shell did not replace ~ with the home folder. Write the whole path")
            try:
                word.encode()
            except UnicodeEncodeError:
                _refuse(f"{word!a} is not UTF-8 text. Use another name")
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands by group, in the order of `HELP_PANELS`.

        Commands that do not belong to any group are listed last.
        """
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in HELP_PANELS}
        width = formatter.width - 6 - max(map(len, self.list_commands(ctx)), default=0)
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else "Commands"
                panels.setdefault(title, []).append((name, command.get_short_help_str(width)))
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Return the command named by the first argument.

        If the command does not exist, the error suggests similar commands once.
        """
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if "Did you mean" in getattr(error, "message", "") and hasattr(error, "possibilities"):
                error.possibilities = None  # the message contains them already
            missing = [name for name in COMMAND_PACKAGES if find_spec(name.replace("-", "_")) is None]
            if missing and hasattr(error, "message"):
                error.message += f" More commands come with the packages {' and '.join(missing)}."
            raise


app = typer.Typer(
    cls=StrictCommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning for heterogeneous clients: compare personalized, fair, robust and sparse methods.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """Process the options of the program itself."""


def say(*lines: object, err: bool = False) -> None:
    """Print lines to the terminal. Control characters are escaped, because names in the lines may come from files."""
    for line in lines:
        typer.echo(write_singular(escape_controls(line)), err=err)


def say_json(value: object) -> None:
    """Print a value as JSON to the terminal. Non-finite numbers are written as null."""
    typer.echo(json.dumps(finite_only(value), indent=2))


def finite_only(value: Any) -> Any:
    """Return a copy of nested lists and tables with every non-finite number replaced by None.

    >>> finite_only({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): finite_only(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_only(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


AsJson = Annotated[bool, typer.Option("--json", help="print the output as one JSON object")]
FileArgument = Annotated[Path, typer.Argument(help="experiment file (TOML)", show_default=False)]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help=(
            "run code that the file refers to by import path, even if the code belongs to another user or a package. "
            "Review the code first"
        ),
    ),
]
Join = Annotated[
    bool,
    typer.Option(
        "--join", help="share the work with other processes that run the same command, on machines that share a disk"
    ),
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor", help="backend for executing the runs: dask:ADDRESS, slurm:KEY=VALUE,..., loky:N or processes:N"
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="folder of data sets (default: the environment variable FEDLOOM_DATA)"),
]


def worker_count(text: str) -> int | str:
    """Return the value of --workers: an integer >= 1, or 'auto'.

    Raises:
        ConfigError: the text is neither an integer >= 1 nor 'auto'.
    """
    if text != "auto" and not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
        raise ConfigError(f"--workers must be 'auto' or a number of at least 1, got {text!r:.80}")
    return text if text == "auto" else int(text)


PACKAGES_BY_MODULE = {
    **dict.fromkeys(("Crypto", "cryptography", "prometheus_client"), "fedloom-sites[deploy]"),
    **dict.fromkeys(("flwr", "opendp"), "fedloom-sites"),
    **dict.fromkeys(("altair", "vl_convert"), "fedloom[charts]"),
    "optuna": "fedloom[tune]",
    "scikit_posthocs": "fedloom-studies",
}
"""Package that provides each optional module, keyed by module. The error message names the package if the import fails.
"""


@contextmanager
def add_file_to_errors(file: Path) -> Iterator[None]:
    """Add the experiment file's name and the affected key's line number to errors raised inside the block.

    Raises:
        ConfigError: an error was raised inside the block. Its message includes the file and the line. A DataError is
            extended in the same way.
    """
    try:
        yield
    except (ConfigError, DataError) as error:
        text = file.read_text(errors="replace") if file.is_file() else ""
        fix = getattr(error, "fix", "")
        error.args = ("\n".join(_add_location(line, file, text, fix) for line in str(error).splitlines()),)
        raise


def _add_location(sentence: str, file: Path, text: str, fix: str) -> str:
    """Return an error message that starts with the file and the line of the first key that it mentions."""
    if sentence.startswith("--") or "choose another --out" in sentence:
        return sentence  # the message is about the command, not the file
    rest = sentence.removeprefix(f"{file}: ").removeprefix(f"{file}")
    if rest != sentence and not sentence.startswith(f"{file}: "):
        return sentence
    named = NAMED_KEY_PATTERN.match(rest) or FIX_KEY_PATTERN.search(fix)
    line = None if named is None else find_line(text, **{k: v for k, v in named.groupdict().items() if v})
    return f"{file}{'' if line is None else f':{line}'}: {rest}"


NAMED_KEY_PATTERN = re.compile(
    r"(?:\[\[(?P<array>\w+)\]\] (?P<place>\d+):? ?|\[(?P<table>\w+)\]:? ?|(?P<part>\w+)\.)?"
    r"(?:(?P<key>\w+)(?:[.:]| is )|unknown \w+ '(?P<word>[^']+)')"
)
"""Pattern for the start of an error message about an experiment file. The pattern matches a table, an entry in a list
of tables, a key, or an unknown word."""
FIX_KEY_PATTERN = re.compile(r"\{(?P<table>[a-z_]+)(?:\.(?P<key>[a-z_]+))?")


def find_line(
    text: str, table: str = "", key: str = "", word: str = "", array: str = "", place: str = "0", part: str = ""
) -> int | None:
    r"""Return the line number in an experiment file that a message refers to, or None if no line matches.

    Args:
        text: text of the file.
        table: table that contains the key. For a top-level key, the name is empty.
        key: name of the key.
        word: unknown key or value.
        array: name of a list of tables, used instead of ``table``.
        place: position of the table in its list, counting from 1.
        part: name of the table in a dotted key.

    >>> find_line("rounds = 2\n[local]\nlr = -1", "local", "lr"), find_line("lr = 3", word="lr")
    (3, 1)
    """
    now, count, header, table = "", 0, None, table or part
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[+\s*([\w.-]+)\s*\]+", line):
            now = head[1]
            count += now == array
            header = number if (now == table and table) or (now == array and count == int(place)) else header
        inside = now == (array or table) and (not array or count == int(place))
        if inside and word and re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", line):
            return number
        if inside and key and re.match(rf"\s*{key}\s*[=.]", line):
            return number
        if key and table and re.match(rf"\s*{table}\s*(=|\.{key})", line):
            return number
        if table in PLAIN_KEYS and re.match(rf"\s*{table}\s*=", line):
            return number
    return header


@contextmanager
def print_errors() -> Iterator[None]:
    """Print an expected error as one sentence to standard error, and exit with its code (see `EXIT_CODES`)."""
    try:
        yield
    except RunStopped as stop:
        say(str(stop) if stop.reason is Stop.INTERRUPTED else f"error: {stop}", err=True)
        raise typer.Exit(EXIT_CODES[stop.reason.status]) from None
    except FedloomError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            say("error: the disk is full. Free some space and run the same command again", err=True)
            raise typer.Exit(1) from None
        if error.filename is None:
            raise
        if error.errno == errno.ENAMETOOLONG:
            say(
                f"error: {error.filename!s:.80}...: the name is too long for the file system. Use a shorter name",
                err=True,
            )
            raise typer.Exit(2) from None
        say(f"error: {error.filename}: {error.strerror}. Check the path and its permissions", err=True)
        raise typer.Exit(1) from None
    except SystemExit as end:
        if traceback.extract_tb(end.__traceback__)[-1].name == "join_ranks":  # another rank reports the cause
            raise
        say(
            f"error: the program was ended by code that it called: {describe_cause(end)}. Raise a different exception "
            "in that code",
            err=True,
        )
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        package = PACKAGES_BY_MODULE.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        say(f"error: this command needs {error.name}. Run: pip install '{package}'", err=True)
        raise typer.Exit(2) from None
