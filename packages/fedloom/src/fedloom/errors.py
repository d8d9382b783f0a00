"""Exceptions, and the reasons why a run ends.

Every message states what happened, where it happened, which value was given, and what to do.

FedloomError
├── ConfigError (ValueError)      a value, key, name or combination that cannot work
│   ├── InvalidValue              invalid options of a value
│   ├── Refused                   two valid parts that do not fit together
│   └── PartitionError            a split that is not possible for the data
├── DataError (ValueError)        a data file or data set that is missing, damaged or out of range
│   └── NoSamples                 a data set without samples
├── LayoutError (ValueError)      a vector, state or message of another model
├── WireError (ValueError)        bytes that are not a message of this experiment
├── RunDirError (ValueError)      a run directory that is missing or belongs to another experiment
├── CheckpointError               no checkpoint could be read, or none could be written
│   └── DamagedCheckpoint         the saved state of one run is damaged. Other runs are not affected
├── CodeError                     code of a part failed, or gave an invalid result: part, round and cause are named
│   ├── FunctionError             a user's loss or metric failed, or did not return a number
│   └── ClientError               code of a client failed: round, client and stage are named
├── GivenUp                       a round of a deployment whose only effect is its privacy cost
└── RunStopped                    a run that ended early, with its `Stop` reason
"""

from __future__ import annotations

import ast
import errno
import inspect
import re
import stat
import traceback
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from fedloom.lazy import make_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pydantic_core import ErrorDetails


# Entrances: the ways to start a run. A fix names keys in braces, as an experiment file nests them, and every entrance
# writes the same key in its own terms.

Entrance = Literal["python", "file", "command", "estimator", "flower"]
"""Entry points of fedloom: `simulate` and `compare`, a deployment file, ``fedloom run`` and
``tune``, scikit-learn, Flower."""

_current: ContextVar[Entrance | None] = ContextVar("entrance", default=None)

_KEY_PATTERN = re.compile(r"\{(?P<table>[a-z_]+)(?:\.(?P<key>[a-z_]+))?(?: = (?P<value>(?:[^{}]|\{[^{}]*\})+))?\}")
_FIRST_WORD_PATTERN = re.compile(r"[a-z]+(?=[ ,:]|$)")
"""Pattern of an ordinary word at the start of a message, as opposed to a key, an option or code."""

PLAIN_KEYS = ("rounds", "seed", "client_weights", "name")
"""Keys of an experiment file that do not belong to any table."""
ESTIMATOR_KEYS = {"local.lr": "lr", "local.epochs": "epochs", "local.batch_size": "batch_size"}
"""Dotted keys of an experiment file, mapped to the arguments of the scikit-learn estimators that set them."""
ESTIMATOR_ARGUMENTS = ("rounds", "model", "clients")
"""Other arguments of the estimators whose names are also keys of an experiment file."""
QUOTE_CHARACTERS = "'\""
COMMAND_FLAGS = {"rounds": "--rounds", "engine.workers": "--workers"}
"""Keys that can be set both by a command-line flag and by ``--set``."""


@contextmanager
def adapt_wording(entrance: Entrance) -> Iterator[bool]:
    """Adapt the wording of errors raised in the block to an entry point. Yield True if no other block surrounds it.

    The outermost entry point determines the wording. For example, if `compare` calls `simulate`, errors are worded so
    that they refer to `compare`.

    Yields:
        In a nested block, the yielded value is False.
    """
    if _current.get() is not None:
        yield False
        return
    token = _current.set(entrance)
    try:
        yield True
    finally:
        _current.reset(token)


def rewrite_keys(text: str) -> str:
    """Return text with the keys in braces rewritten in the notation of the current entry point.

    >>> rewrite_keys("set {local.momentum = 0}")
    'set local={"momentum": 0}'
    >>> with adapt_wording("file"):
    ...     rewrite_keys("set {local.momentum = 0}"), rewrite_keys("omit {attack}")
    ('set [local] momentum = 0', 'omit [attack]')
    """
    write = _KEY_WRITERS[_current.get() or "python"]
    return _KEY_PATTERN.sub(lambda match: write(match["table"], match["key"], match["value"]), text)


def capitalize(text: str) -> str:
    """Return text as the start of a sentence: the first word is capitalized unless it is a name or a key.

    >>> capitalize("set [local] lr"), capitalize("local.lr is too large"), capitalize("--out names a folder")
    ('Set [local] lr', 'local.lr is too large', '--out names a folder')
    """
    return text[:1].upper() + text[1:] if _FIRST_WORD_PATTERN.match(text) else text


_COUNT_ADJECTIVES = (
    "benign|different|empty|equal|evaluated|evaluation|fewer|finite|further|gradient|labeled|local|missing|more|new|"
    "numeric|other|personal|scored|sending|short|suitable|summed|test|training|unusable|usable|used|validation"
)
_COUNT_NOUNS = (
    "answer|attacker|batche|candidate|cell|channel|character|classe|client|cluster|column|core|epoch|error|event|"
    "experiment|factor|failure|feature|figure|file|fold|gradient|group|hospital|image|interval|label|layer|level|line|"
    "machine|message|method|model|name|network|node|number|output|parameter|part|partition|patient|point|position|"
    "prediction|processe|question|record|residual|round|row|run|sample|score|second|seed|sentence|server|setting|shard|"
    "share|site|step|stratum|subject|table|token|trial|unit|upload|value|visit|word|worker"
)
_COUNT_LEADS = (
    "about|across|after|all|also|an|and|another|answered|answers|are|as|at|be|because|before|but|by|contain|contained|"
    "contains|covers|declared|declares|defines|did|do|does|drew|drops|during|every|exactly|expected|finds|first|for|"
    "found|from|gave|gives|got|had|has|have|held|hold|holds|if|in|include|includes|into|is|its|just|kept|keeps|knows|"
    "last|least|leaves|left|less|lists|made|makes|misses|most|need|needed|needs|next|no|not|of|on|only|or|other|over|"
    "per|plus|read|reads|received|rejected|reports|sent|since|so|state|than|that|the|their|then|these|they|through|to|"
    "took|until|up|used|uses|was|were|when|where|which|while|with|within|without"
)
"""Words before a count. A count after any other word may be part of a name that a user chose, as in Week 1 visits."""
_SINGLE_COUNT_PATTERN = re.compile(
    r"(?<!\w)(?P<quote>['\"`]).*?(?P=quote)(?!\w)|"
    rf"(?P<lead>^|[:;,.=>|]\s|[(=>\n]|(?<![\w/\\.'\"-])(?i:{_COUNT_LEADS})\s)1 "
    rf"(?P<adjectives>(?:(?:{_COUNT_ADJECTIVES}) )*)(?:(?P<noun>{_COUNT_NOUNS})s|(?P<y>entr|categor)ies|"
    r"(?P<is>analys)es)\b(?![\w/\\-]|\.\w)(?P<verb> (?:are|have|were|do|need)\b)?"
)
"""Pattern of a quoted text, which remains unchanged, or of a count of one thing. Paths contain no such count."""
_SINGULAR_VERBS = {" are": " is", " have": " has", " were": " was", " do": " does", " need": " needs"}


def write_singular(text: str) -> str:
    """Return a sentence with singular nouns and verbs after the number 1, except in quoted text, names and paths.

    >>> write_singular("1 clients have no test part, 1 training samples, 1 classes"), write_singular("21 rows")
    ('1 client has no test part, 1 training sample, 1 class', '21 rows')
    >>> write_singular("column 'Week 1 visits': 1 rows"), write_singular("site 1 records/a.csv: no such file")
    ("column 'Week 1 visits': 1 row", 'site 1 records/a.csv: no such file')
    """

    def write(match: re.Match[str]) -> str:
        quote, lead, adjectives, noun, in_y, in_is, verb = match.groups(default="")
        if quote:
            return match[0]
        noun = noun.removesuffix("e") if noun in ("batche", "classe", "processe") else noun
        noun += f"{in_y}y" if in_y else f"{in_is}is" if in_is else ""
        return f"{lead}1 {adjectives}{noun}{_SINGULAR_VERBS.get(verb, '')}"

    sentence = _SINGLE_COUNT_PATTERN.sub(write, text)
    return Note.create(sentence, text.rule) if isinstance(text, Note) else sentence


def _write_python_key(table: str, key: str | None, value: str | None) -> str:
    if table == "method" and key:
        return f"{key} in the method" if value is None else f"{key}={value} in the method"
    if table == "partition" and key:
        return f"{key} in the partition" if value is None else f"{key}={value} in the partition"
    if key is None:
        return f"{table}={'' if value is None else value}"
    return f"{table}.{key}" if value is None else f'{table}={{"{key}": {value}}}'


def _write_file_key(table: str, key: str | None, value: str | None) -> str:
    place = "[[method]]" if table == "method" else f"[{table}]"
    if table in PLAIN_KEYS:
        return table if value is None else f"{table} = {_toml(value)}"
    if key is None:
        return place if value is None else f"{place} {_option_lines(value)}"
    return f"{place} {key}" if value is None else f"{place} {key} = {_toml(value)}"


def _write_command_key(table: str, key: str | None, value: str | None) -> str:
    text = _write_file_key(table, key, value)
    dotted = f"{table}.{key}" if key else table if table in PLAIN_KEYS else f"{table}.kind"
    if value is None or table in ("method", "partition", "data"):
        return text
    if dotted in COMMAND_FLAGS:
        return f"{text} ({COMMAND_FLAGS[dotted]} {value})"
    return text if value.startswith(("{", "[")) else f"{text} (--set {dotted}={value.strip(QUOTE_CHARACTERS)})"


def _write_estimator_key(table: str, key: str | None, value: str | None) -> str:
    name = ESTIMATOR_KEYS.get(f"{table}.{key}") or (table if key is None and table in ESTIMATOR_ARGUMENTS else None)
    if name is not None:
        return f"{name}={'' if value is None else value}"
    if table == "partition" and key == "clients":
        return f"clients={'' if value is None else value}"
    if table in ("method", "partition"):
        return _write_python_key(table, key, value)
    if key is None:
        return f'settings["{table}"]' if value is None else f'settings={{"{table}": {value}}}'
    return f'settings["{table}"]["{key}"]' if value is None else f'settings={{"{table}": {{"{key}": {value}}}}}'


def _write_flower_key(table: str, key: str | None, value: str | None) -> str:
    if table == "method" and key:
        return f"{key}={'' if value is None else value}"
    if table == "rounds":
        return f"num_rounds={'' if value is None else value}"
    if table == "partition":
        return "the number of nodes" if value is None else f"{value} nodes"
    return _write_python_key(table, key, value)


def _toml(value: str) -> str:
    if value.startswith("{"):
        options = ast.literal_eval(value).items()
        return f"{{ {', '.join(f'{key!r} = {_toml(repr(option))}' for key, option in options)} }}"
    return {"True": "true", "False": "false"}.get(value, value)


def _option_lines(value: str) -> str:
    """Return lines of an experiment file with the table that describes a value, the name of a kind, or a dictionary."""
    options = ast.literal_eval(value) if value.startswith("{") else {"kind": ast.literal_eval(value)}
    return ", ".join(f"{key} = {_toml(repr(option))}" for key, option in options.items())


_KEY_WRITERS: Mapping[Entrance, Callable[[str, str | None, str | None], str]] = {
    "python": _write_python_key,
    "file": _write_file_key,
    "command": _write_command_key,
    "estimator": _write_estimator_key,
    "flower": _write_flower_key,
}


class FedloomError(Exception):
    """Base class of all errors that fedloom raises intentionally."""

    def __str__(self) -> str:
        return write_singular(super().__str__())


class ConfigError(FedloomError, ValueError):
    """A value, key or name that is not allowed.

    Args:
        message: description of the problem, its location and the given value.
        rule: id of the failed check, such as ``"cohort-too-small"``. The id is the same for every entry point and every
            release. The id is empty for errors that are not raised by the checks before the first round.
        fix: advice that may contain keys in braces (see `rewrite_keys`). The message ends with this advice, in the
            notation of the entry point.
    """

    def __init__(self, message: str, *, rule: str = "", fix: str = "") -> None:
        self.rule, self.fix = rule, fix
        super().__init__(f"{message}. {capitalize(rewrite_keys(fix))}" if fix else message)

    def replace_fix(self, fix: str) -> Self:
        """Return the same error with different advice."""
        error, message = copy(self), str(self)
        old = rewrite_keys(self.fix)
        error.args = (f"{message.removesuffix(old).removesuffix(capitalize(old))}{capitalize(rewrite_keys(fix))}",)
        error.fix = fix
        return error

    def placed(self, where: str) -> Self:
        """Return the same error with its location at the start of the message."""
        error = copy(self)
        error.args = (f"{where}: {self}",)
        return error


class Note(str):
    """Note on data or a setting that also contains the id of its check.

    Attributes:
        rule: id of the check, such as ``"parts-share-rows"``. The id is the same for all entry points and releases.
    """

    rule: str

    @classmethod
    def create(cls, text: str, rule: str) -> Note:
        """Return a note that contains the id of its check."""
        note = cls(text)
        note.rule = rule
        return note


def place_note(where: str, note: str) -> str:
    """Return a note that starts with its location. The id of the check is retained."""
    return Note.create(f"{where}: {note}", note.rule) if isinstance(note, Note) else f"{where}: {note}"


class InvalidValue(ConfigError):
    """Invalid options of a value: options that are unknown, of the wrong type, or out of range.

    Args:
        message: one sentence per option.
        details: pydantic's error entry for each option.
    """

    def __init__(self, message: str, details: Sequence[ErrorDetails] = ()) -> None:
        super().__init__(message)
        self.details = list(details)

    def errors(self) -> list[ErrorDetails]:
        """Return pydantic's error entries, one for each invalid option."""
        return self.details


class Refused(ConfigError):
    """Combination of options that are individually valid but incompatible. The message states the reason."""


class PartitionError(ConfigError):
    """Partition that is impossible for the data set."""


class DataError(FedloomError, ValueError):
    """Data file or data set that is missing or damaged, or that contains values out of range."""


class NoSamples(DataError):
    """Data set without samples."""


class LayoutError(FedloomError, ValueError):
    """Vector, state or message that belongs to a different model."""


class WireError(FedloomError, ValueError):
    """Bytes that are not a message of this experiment."""


class RunDirError(FedloomError, ValueError):
    """Run directory that is missing or invalid, or that belongs to a different experiment."""


class CheckpointError(FedloomError):
    """Checkpoint that cannot be read or written."""


class DiskError(CheckpointError):
    """Error raised if writing to a disk fails.

    The same operation may succeed later, after disk space has been freed or the disk responds again.
    """


class DamagedCheckpoint(CheckpointError):
    """Saved state that is incomplete or damaged.

    Args:
        damage: the damaged file, and a description of the damage.
    """

    def __init__(self, damage: str) -> None:
        self.damage = damage
        super().__init__(f"{damage}. Start anew with --force")

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.damage,)


class CodeError(FedloomError):
    """Error in the code of one part of a run, or an invalid result of that code.

    The code may have been written by the user.
    """


class FunctionError(CodeError):
    """Failure of a user-defined loss or metric, or a result that is not a single number."""


class ClientError(CodeError):
    """Error raised by the code of an individual client.

    Args:
        stage: stage of the client's work, e.g. ``"client step"``.
        round: round number, counted from 1.
        clients: ids of the affected clients.
        cause: message of the original error, as a sentence.
    """

    def __init__(self, stage: str, round: int, clients: list[int], cause: str) -> None:
        self.stage, self.round, self.clients, self.cause = stage, round, clients, cause
        who = f"client {clients[0]}" if len(clients) == 1 else f"clients {clients[:8]}"
        super().__init__(f"{stage} failed at {who} in round {round}: {cause}")

    def __reduce__(self) -> tuple[type, tuple[str, int, list[int], str]]:
        return type(self), (self.stage, self.round, self.clients, self.cause)


def describe_cause(error: BaseException) -> str:
    """Return a description of an unexpected error: its message and the last line of user code in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f
        for f in frames
        if not any(part in f.filename for part in ("site-packages", "importlib"))
        and Path(__file__).parent not in Path(f.filename).parents
    ]
    at = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"{': '.join(filter(None, (type(error).__name__, str(error))))}{at}"


def describe_error(error: Exception) -> str:
    """Return a description of an error as a single sentence.

    If another package raised the error, the description begins with the error's class.
    """
    return str(error) if isinstance(error, FedloomError) else f"{type(error).__name__}: {error}"


@contextmanager
def attribute_error(what: str, part: object, where: str) -> Iterator[None]:
    """Report errors raised in the block as errors in the code of ``part``.

    Args:
        what: role of the part, e.g. ``"sampler"``.
        part: value whose code is executed.
        where: e.g. ``"round 3"``.

    Raises:
        CodeError: the block raised an error that is neither one of fedloom's own errors nor a file error.
    """
    try:
        yield
    except FedloomError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # the message already names the file
            raise
        raise CodeError(f"{what} {type(part).__name__} failed in {where}: {describe_cause(error)}") from error


@contextmanager
def report_exit() -> Iterator[None]:
    """Report a `SystemExit` of user code in the block as an error. Otherwise a script would end without a message.

    Raises:
        CodeError: the block raised `SystemExit`.
    """
    try:
        yield
    except SystemExit as end:
        raise CodeError(
            f"code that the run called ended it: {describe_cause(end)}. Raise a different exception there"
        ) from end


def warn_user(sentence: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning for the innermost line of code that belongs to neither fedloom nor a wrapper of its functions."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] in ("fedloom", "torch", "contextlib")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, category, stacklevel=level + 1)


def check_folder(folder: Path) -> None:
    """Raise an error if a path is not a folder and no folder can be created at this path.

    Raises:
        RunDirError: the path or its parent is a file or a broken link.
    """
    for place in (folder, *folder.parents):
        try:
            mode = place.stat().st_mode  # a single call, because another process may change the path
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            if place.is_symlink() and not place.exists():
                raise RunDirError(
                    f"{place} is a link to {place.readlink()}, which does not exist. Remove the link, "
                    "or choose another folder"
                ) from None
            continue
        if stat.S_ISDIR(mode):
            return
        raise RunDirError(f"{place} is a file, not a folder. Choose another folder")


@contextmanager
def explain_os_error(path: Path, kept: str, again: str) -> Iterator[None]:
    """Raise a `DiskError` with a one-sentence message if the block fails to write a file.

    Args:
        path: the file.
        kept: sentence that states which results are still intact.
        again: last part of the advice, which states what to do after disk space has been freed.

    Raises:
        DiskError: the disk is full or the write is rejected.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else error.strerror or str(error)
        first = "Free some space" if full else "Check the disk and the permissions of the folder"
        raise DiskError(f"{path} could not be written: {what}. {kept}. {first}, then {again}") from error


class Stop(Enum):
    """Reason why a run ended. The value of each member is the sentence that users see.

    The same reason results in the same status in a simulation and in a deployment. Repeating a command resumes the run
    only if the status is "interrupted".
    """

    DONE = "all rounds done"
    STOPPED = "stopped by a callback"
    INTERRUPTED = "interrupted. Run the same command again to continue"
    TOO_FEW = "too few clients returned a usable update"
    NEUTRAL = "too few sites could train from the model"
    BUDGET = "the privacy budget is spent"
    DIVERGED = "diverged: the loss of the model is not finite or far beyond its start"
    UNUSABLE = "too few uploads can be used"
    UNCHANGED = "nothing was trained: no model has changed"
    FAILED = "failed"

    @property
    def status(self) -> Literal["done", "interrupted", "diverged", "failed"]:
        """Status of the run as one word."""
        return _STOP_STATUSES[self]

    @property
    def is_resumable(self) -> bool:
        """True if the same command can resume the run, because sites may still answer or a budget may be raised."""
        return self.status == "interrupted"


_STOP_STATUSES: dict[Stop, Literal["done", "interrupted", "diverged", "failed"]] = {
    Stop.DONE: "done",
    Stop.STOPPED: "done",
    Stop.INTERRUPTED: "interrupted",
    Stop.TOO_FEW: "interrupted",
    Stop.NEUTRAL: "interrupted",
    Stop.BUDGET: "interrupted",
    Stop.DIVERGED: "diverged",
    Stop.UNUSABLE: "failed",
    Stop.UNCHANGED: "failed",
    Stop.FAILED: "failed",
}


EXIT_CODES = {"done": 0, "interrupted": 130, "diverged": 1, "failed": 1}
"""Exit code of every command for the status of a run. The code 130 means that the same command resumes the run.

A command ends with code 2 if its input (an option, a file or the data) has no result, and with code 1 after any other
failure.
"""


def choose_exit_code(statuses: Iterable[str]) -> int:
    """Return the exit code of a command for the statuses of its runs. A run that can be resumed takes precedence.

    >>> choose_exit_code(["done", "failed"]), choose_exit_code(["failed", "interrupted"]), choose_exit_code([])
    (1, 130, 0)
    """
    return max((EXIT_CODES[status] for status in statuses), default=0)


class RunStopped(FedloomError):
    """Run that ended before its last round.

    Args:
        reason: member of `Stop`.
        detail: text that names the round, the clients and the numbers involved.
        events: sentences that describe the events of the last round.
    """

    def __init__(self, reason: Stop, detail: str, events: Iterable[str] = ()) -> None:
        self.reason, self.detail, self.events = reason, detail, tuple(events)
        super().__init__(f"{reason.value} ({detail})")

    def __reduce__(self) -> tuple[type, tuple[Stop, str, tuple[str, ...]]]:
        return type(self), (self.reason, self.detail, self.events)


class GivenUp(FedloomError):
    """Round whose sum was requested but not revealed.

    If a sum over different sites were requested instead, the difference between the two sums would be revealed.

    Args:
        reason: a sentence.
        clients: sites whose values are included in the requested sum.
    """

    def __init__(self, reason: str, clients: Iterable[int]) -> None:
        self.clients = sorted(clients)
        super().__init__(reason)


_DIRECTION_MARKS = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Unicode's bidirectional control characters, which can make one text look like another."""
_HIDDEN_MARKS = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff"
"""Control characters and invisible characters, which can make two different texts look the same."""


def direction_in(*names: object, hidden: bool = False) -> str:
    r"""Return a description of the first name with a bidirectional control character, or "" if no name contains one.

    Args:
        names: names to check.
        hidden: True to also report names that contain invisible characters.

    >>> direction_in("age", "a\u202eb")[:26]
    "'a\\u202eb' contains U+202E"
    """
    for name in map(str, names):
        if match := re.search(f"[{_DIRECTION_MARKS}{_HIDDEN_MARKS if hidden else ''}]", name):
            does = "is invisible" if re.match(f"[{_HIDDEN_MARKS}]", match[0]) else "changes the direction of text"
            return (
                f"'{escape_controls(name)}' contains U+{ord(match[0]):04X}, which {does}, so the name looks like a "
                "different name. Remove this character"
            )
    return ""


def escape_controls(text: object) -> str:
    r"""Return text with escaped control characters, which could otherwise move a terminal's cursor or hide words.

    >>> escape_controls("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return re.sub(
        rf"[{_HIDDEN_MARKS}\r{_DIRECTION_MARKS}\u2028\u2029\ud800-\udfff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        str(text),
    )


def escape_line(text: object) -> str:
    r"""Return printable text without line breaks, so that text from another machine cannot add a line to a log.

    >>> escape_line("a\nb")
    'a\\nb'
    """
    return escape_controls(text).replace("\n", r"\n")


__dir__ = make_dir(__name__)
