"""Exceptions and stop reasons: every message has what happened, where, what was got and what to do.

FedloomError
├── ConfigError (ValueError)      a value, key, name or combination that cannot work
│   ├── InvalidValue              options that a value refuses
│   ├── Refused                   two valid parts that make no sense together
│   └── PartitionError            a split that the data cannot give
├── DataError (ValueError)        a data file or data set that is missing, damaged or out of range
│   └── NoSamples                 a data set without a sample
├── LayoutError (ValueError)      a vector, state or message of another model
├── WireError (ValueError)        bytes that are not a message of this experiment
├── RunDirError (ValueError)      a run directory that is missing or belongs to another experiment
├── CheckpointError               no checkpoint could be read, or none could be written
│   └── DamagedCheckpoint         what one run has saved is damaged. Other runs are not concerned
├── CodeError                     code of a part failed, or gave what it must not: part, round and cause are named
│   └── ClientError               code of a client failed: round, client and stage are named
├── GivenUp                       a round of a deployment that changes nothing but what it cost of privacy
└── RunStopped                    a run that ended early, with its `Stop` reason
"""

from __future__ import annotations

import ast
import errno
import re
import stat
import traceback
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from fedloom.lazy import lister

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pydantic_core import ErrorDetails


# Entrances: the ways to start a run. A fix names keys in braces, as an experiment file nests them, and every entrance
# writes the same key in its own terms.

Entrance = Literal["python", "file", "command", "estimator", "flower"]
"""`simulate` and `compare`. A deployment's file. ``fedloom run`` and ``tune``; scikit-learn; a Flower app."""

_current: ContextVar[Entrance | None] = ContextVar("entrance", default=None)

_KEY = re.compile(r"\{(?P<table>[a-z_]+)(?:\.(?P<key>[a-z_]+))?(?: = (?P<value>(?:[^{}]|\{[^{}]*\})+))?\}")

PLAIN_KEYS = ("rounds", "seed", "client_weights", "name")
"""Keys of an experiment file that are in no table."""
ESTIMATOR_KEYS = {"local.lr": "lr", "local.epochs": "epochs", "local.batch_size": "batch_size"}
"""Keys that are arguments of the scikit-learn estimators themselves, by their place in an experiment file."""
ESTIMATOR_ARGUMENTS = ("rounds", "model", "clients")
"""Other arguments of the estimators that have the name of a key."""
QUOTES = "'\""
COMMAND_FLAGS = {"rounds": "--rounds", "engine.workers": "--workers"}
"""Keys that have a flag on the command line, beside ``--set``."""


@contextmanager
def entered(entrance: Entrance) -> Iterator[bool]:
    """Word the errors inside for an entrance. The outermost one counts, as `compare` calls `simulate`.

    Yields:
        True if it is the outermost.
    """
    if _current.get() is not None:
        yield False
        return
    token = _current.set(entrance)
    try:
        yield True
    finally:
        _current.reset(token)


def worded(text: str) -> str:
    """Return a text whose keys in braces are written as the current entrance has them.

    >>> worded("set {local.momentum = 0}")
    'set local={"momentum": 0}'
    >>> with entered("file"):
    ...     worded("set {local.momentum = 0}"), worded("leave {attack} out")
    ('set [local] momentum = 0', 'leave [attack] out')
    """
    write = _WRITERS[_current.get() or "python"]
    return _KEY.sub(lambda match: write(match["table"], match["key"], match["value"]), text)


def _python(table: str, key: str | None, value: str | None) -> str:
    if table == "method" and key:
        return f"{key} in the method" if value is None else f"{key}={value} in the method"
    if table == "partition" and key:
        return f"{key} in the partition" if value is None else f"{key}={value} in the partition"
    if key is None:
        return f"{table}={'' if value is None else value}"
    return f"{table}.{key}" if value is None else f'{table}={{"{key}": {value}}}'


def _file(table: str, key: str | None, value: str | None) -> str:
    place = "[[method]]" if table == "method" else f"[{table}]"
    if table in PLAIN_KEYS:
        return table if value is None else f"{table} = {_toml(value)}"
    if key is None:
        return place if value is None else f"{place} {_options(value)}"
    return f"{place} {key}" if value is None else f"{place} {key} = {_toml(value)}"


def _command(table: str, key: str | None, value: str | None) -> str:
    text = _file(table, key, value)
    dotted = f"{table}.{key}" if key else table if table in PLAIN_KEYS else f"{table}.kind"
    if value is None or table in ("method", "partition", "data"):
        return text
    if dotted in COMMAND_FLAGS:
        return f"{text} ({COMMAND_FLAGS[dotted]} {value})"
    return text if value.startswith(("{", "[")) else f"{text} (--set {dotted}={value.strip(QUOTES)})"


def _estimator(table: str, key: str | None, value: str | None) -> str:
    name = ESTIMATOR_KEYS.get(f"{table}.{key}") or (table if key is None and table in ESTIMATOR_ARGUMENTS else None)
    if name is not None:
        return f"{name}={'' if value is None else value}"
    if table == "partition" and key == "clients":
        return f"clients={'' if value is None else value}"
    if table in ("method", "partition"):
        return _python(table, key, value)
    if key is None:
        return f'settings["{table}"]' if value is None else f'settings={{"{table}": {value}}}'
    return f'settings["{table}"]["{key}"]' if value is None else f'settings={{"{table}": {{"{key}": {value}}}}}'


def _flower(table: str, key: str | None, value: str | None) -> str:
    if table == "method" and key:
        return f"{key}={'' if value is None else value}"
    if table == "rounds":
        return f"num_rounds={'' if value is None else value}"
    if table == "partition":
        return "the number of nodes" if value is None else f"{value} nodes"
    return _python(table, key, value)


def _toml(value: str) -> str:
    return {"True": "true", "False": "false"}.get(value, value)


def _options(value: str) -> str:
    """Write the lines of a table that a value, a name of a kind or a dictionary, stands for."""
    options = ast.literal_eval(value) if value.startswith("{") else {"kind": ast.literal_eval(value)}
    return ", ".join(f"{key} = {_toml(repr(option))}" for key, option in options.items())


_WRITERS: Mapping[Entrance, Callable[[str, str | None, str | None], str]] = {
    "python": _python,
    "file": _file,
    "command": _command,
    "estimator": _estimator,
    "flower": _flower,
}


class FedloomError(Exception):
    """Base of every error that fedloom raises on purpose."""


class ConfigError(FedloomError, ValueError):
    """A value, key or name that is not allowed.

    Args:
        message: what cannot be, where, and the value that was given.
        rule: the id of the check that failed, as ``"cohort-too-small"``. It is the same at every entrance and in every
            release. Empty for an error that belongs to no check before the first round.
        fix: what to do, with keys in braces (see `worded`). The message ends with it in the entrance's terms.
    """

    def __init__(self, message: str, *, rule: str = "", fix: str = "") -> None:
        self.rule, self.fix = rule, fix
        super().__init__(f"{message}; {worded(fix)}" if fix else message)

    def refixed(self, fix: str) -> Self:
        """Return the same error with another fix."""
        error, message = copy(self), str(self)
        error.args = (f"{message.removesuffix(worded(self.fix))}{worded(fix)}",)
        error.fix = fix
        return error

    def placed(self, where: str) -> Self:
        """Return the same error with the place where it was found before its message."""
        error = copy(self)
        error.args = (f"{where}: {self}",)
        return error


class InvalidValue(ConfigError):
    """Options that a value refuses: unknown, of a wrong type or out of range.

    Args:
        message: a sentence for each.
        details: pydantic's entry for each.
    """

    def __init__(self, message: str, details: Sequence[ErrorDetails] = ()) -> None:
        super().__init__(message)
        self.details = list(details)

    def errors(self) -> list[ErrorDetails]:
        """Pydantic's entries, one for each option that is refused."""
        return self.details


class Refused(ConfigError):
    """A combination that makes no sense. The message has the reason."""


class PartitionError(ConfigError):
    """A partition that the data set cannot give."""


class DataError(FedloomError, ValueError):
    """A data file or data set that is missing, damaged or out of range."""


class NoSamples(DataError):
    """A data set without a single sample."""


class LayoutError(FedloomError, ValueError):
    """A vector, state or message that belongs to another model."""


class WireError(FedloomError, ValueError):
    """Bytes that are not a message of this experiment."""


class RunDirError(FedloomError, ValueError):
    """A run directory that is missing, not one, or of another experiment."""


class CheckpointError(FedloomError):
    """A checkpoint that cannot be read or written."""


class DamagedCheckpoint(CheckpointError):
    """Saved state that is incomplete or damaged.

    Args:
        damage: the file, and what is wrong with it.
    """

    def __init__(self, damage: str) -> None:
        self.damage = damage
        super().__init__(f"{damage}; start anew with --force")

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.damage,)


class CodeError(FedloomError):
    """Code of a part of the run, perhaps the user's, failed or gave what it must not."""


class ClientError(CodeError):
    """Code of one client failed.

    Args:
        stage: what the client was doing, e.g. ``"client step"``.
        round: round number, from 1.
        clients: ids of the clients concerned.
        cause: the sentence of the original error.
    """

    def __init__(self, stage: str, round: int, clients: list[int], cause: str) -> None:
        self.stage, self.round, self.clients, self.cause = stage, round, clients, cause
        who = f"client {clients[0]}" if len(clients) == 1 else f"clients {clients[:8]}"
        super().__init__(f"{stage} failed at {who} in round {round}: {cause}")

    def __reduce__(self) -> tuple[type, tuple[str, int, list[int], str]]:
        return type(self), (self.stage, self.round, self.clients, self.cause)


def cause_of(error: BaseException) -> str:
    """Describe an unexpected error: its message, and the last line of the user's code that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f for f in frames if "site-packages" not in f.filename and Path(__file__).parent not in Path(f.filename).parents
    ]
    at = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"{type(error).__name__}: {error}{at}"


def sentence_of(error: Exception) -> str:
    """Describe an error in a sentence. Another package's error begins with its class."""
    return str(error) if isinstance(error, FedloomError) else f"{type(error).__name__}: {error}"


@contextmanager
def attribute_error(what: str, part: object, where: str) -> Iterator[None]:
    """Attribute errors within to the code of ``part``.

    Args:
        what: its role, e.g. ``"sampler"``.
        part: the value whose code runs.
        where: e.g. ``"round 3"``.

    Raises:
        CodeError: an error that is neither one of fedloom's own nor of a file.
    """
    try:
        yield
    except FedloomError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # of a file that the message names
            raise
        raise CodeError(f"{what} {type(part).__name__} failed in {where}: {cause_of(error)}") from error


def check_folder(folder: Path) -> None:
    """Refuse a path that is no folder and cannot become one.

    Raises:
        RunDirError: it, or what it is to lie in, is a file, or a link that leads nowhere.
    """
    for place in (folder, *folder.parents):
        try:
            mode = place.stat().st_mode  # one look: another process may create or delete it meanwhile
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            if place.is_symlink() and not place.exists():
                raise RunDirError(
                    f"{place} is a link to {place.readlink()}, which is not there; remove it, or choose another folder"
                ) from None
            continue
        if stat.S_ISDIR(mode):
            return
        raise RunDirError(f"{place} is a file, not a folder; choose another folder")


@contextmanager
def explain_os_error(path: Path, kept: str, again: str) -> Iterator[None]:
    """Report in one sentence that a file could not be written.

    Args:
        path: the file.
        kept: what is intact all the same.
        again: what to do once there is room.

    Raises:
        CheckpointError: the disk is full or refuses.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else error.strerror or str(error)
        first = "free some space" if full else "check the disk and the permissions of the folder"
        raise CheckpointError(f"{path} could not be written: {what}; {kept} intact; {first}, then {again}") from error


class Stop(Enum):
    """Why a run ended. The value is the sentence shown to people.

    The same end has the same status in a simulation and in a deployment, and a run with the status "interrupted" is the
    only one that the same command resumes.
    """

    DONE = "all rounds done"
    STOPPED = "stopped by a callback"
    INTERRUPTED = "interrupted; run the same command again to go on"
    TOO_FEW = "too few clients returned a usable update"
    BUDGET = "the privacy budget is spent"
    DIVERGED = "diverged: the loss of the model is not finite or far beyond its start"
    UNUSABLE = "too few uploads can be used"
    UNCHANGED = "nothing was trained: no model has changed"
    FAILED = "a client's code failed"

    @property
    def status(self) -> Literal["done", "interrupted", "diverged", "failed"]:
        """The end in a word."""
        return _STOP_STATUSES[self]

    @property
    def resumable(self) -> bool:
        """True if the same command resumes the run: sites may answer then, or a budget may be larger."""
        return self.status == "interrupted"


_STOP_STATUSES: dict[Stop, Literal["done", "interrupted", "diverged", "failed"]] = {
    Stop.DONE: "done",
    Stop.STOPPED: "done",
    Stop.INTERRUPTED: "interrupted",
    Stop.TOO_FEW: "interrupted",
    Stop.BUDGET: "interrupted",
    Stop.DIVERGED: "diverged",
    Stop.UNUSABLE: "failed",
    Stop.UNCHANGED: "failed",
    Stop.FAILED: "failed",
}


class RunStopped(FedloomError):
    """A run that ended before its last round.

    Args:
        reason: one of `Stop`.
        detail: round, clients and numbers.
        events: sentences on what happened in the round that ended it.
    """

    def __init__(self, reason: Stop, detail: str, events: Iterable[str] = ()) -> None:
        self.reason, self.detail, self.events = reason, detail, tuple(events)
        super().__init__(f"{reason.value} ({detail})")

    def __reduce__(self) -> tuple[type, tuple[Stop, str, tuple[str, ...]]]:
        return type(self), (self.reason, self.detail, self.events)


class GivenUp(FedloomError):
    """A round whose sum was asked for and never revealed, to ask for a sum of other sites would reveal the difference.

    Args:
        reason: a sentence.
        clients: the sites that the sum was to be of.
    """

    def __init__(self, reason: str, clients: Iterable[int]) -> None:
        self.clients = sorted(clients)
        super().__init__(reason)


_DIRECTION_MARKS = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Unicode's bidirectional control characters, by which a text looks like another one."""


def direction_in(*names: object) -> str:
    r"""Return what is wrong with the first name that holds a character for the direction of text. Empty without one.

    >>> direction_in("age", "a\u202eb")[:23]
    "'a\\u202eb' holds U+202E"
    """
    for name in map(str, names):
        match = re.search(f"[{_DIRECTION_MARKS}]", name)
        if match:
            mark = f"U+{ord(match[0]):04X}"
            return (
                f"'{printable(name)}' holds {mark}, which changes the direction of text, so that the name looks like "
                "another one; write the name without it"
            )
    return ""


def printable(text: object) -> str:
    r"""Text for a terminal: its control characters, which could move the cursor or hide words, as escapes.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return re.sub(
        rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTION_MARKS}\u2028\u2029\ud800-\udfff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        str(text),
    )


__dir__ = lister(__name__)
