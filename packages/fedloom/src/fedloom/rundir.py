"""Own the format of a run directory: its files and folders by name, how runs are labelled, and what its summary holds.

The paths of folders and files that a caller gives are checked here too.

A simulation and a deployment write one. Reports, opened runs and `watch` read it. All by these names and values, and
none of them needs torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote_plus

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.errors import ConfigError, RunDirError

SETTINGS_FILE, SUMMARY_FILE, REPORT_FILE = "experiment.toml", "summary.json", "report.html"
METRICS_FILE, TIMINGS_FILE, PARTITION_FILE = "metrics.parquet", "timings.parquet", "partition.parquet"
CONFUSION_FILE, TSNE_FILE = "confusion.parquet", "tsne.parquet"
GROUPS_FILE, PREDICTIONS_FILE, IMPORTANCE_FILE = "groups.parquet", "predictions.parquet", "importance.parquet"
CHECKPOINTS_FOLDER, MODELS_FOLDER, ADAPTED_FOLDER, TRACKING_FOLDER, LIVE_FOLDER = (
    "checkpoints",
    "models",
    "adapted",
    "tracking",
    "live",
)
WORK_FOLDER = ".work"
"""Folder of the claims of processes that work on a run directory together."""
RESULT_FILES = (
    METRICS_FILE,
    TIMINGS_FILE,
    PARTITION_FILE,
    CONFUSION_FILE,
    TSNE_FILE,
    GROUPS_FILE,
    PREDICTIONS_FILE,
    IMPORTANCE_FILE,
    SUMMARY_FILE,
    REPORT_FILE,
)
"""Files that a run writes anew, beside its settings and the files of analyses that packages add."""
RESULT_FOLDERS = (CHECKPOINTS_FOLDER, MODELS_FOLDER, ADAPTED_FOLDER, TRACKING_FOLDER, LIVE_FOLDER, WORK_FOLDER)

EXPERIMENT_TABLES = (
    "data", "partition", "model", "task", "local", "sampler", "aggregation_weights", "personalized_aggregation",
    "aggregator", "attack", "upload_transform", "augment", "devices", "schedule", "evaluate", "engine",
    "early_stop", "tune",
)  # fmt: skip
"""Tables of an experiment file beside its methods, in the order of `fedloom.lab.experiment.schema.TABLES`."""

_DIGEST_PREFIX, _ZERO_DIGEST = b"sha256 of this file with zeros here: ", b"0" * 64
NO_DIGEST = (_DIGEST_PREFIX + _ZERO_DIGEST).decode()
"""Placeholder for a file's digest while the digest is computed."""

REPAIR_HINT = "run the experiment again, or put the file back"
"""Advice on a damaged file."""
FEDERATION_CLIENT = -1
"""Client number of figures of the whole federation."""
UPLOADS_FIGURE = "heard"
"""Name under which the number of a client's uploads that were used is recorded."""
SAMPLES_FIGURE = "samples"
"""Name under which the number of samples of a group is recorded."""
MOST_CLIENTS = 2**31
"""Clients are numbered below this."""
MAX_LABEL_CHARACTERS = 150
"""Most characters of a label in a file's name: a system takes 255 bytes, of which seed, ending and draft need some."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A number that a column of a table can hold."""


def place_of(path: object, what: str, otherwise: str = "") -> Path:
    """Convert a caller's path.

    Args:
        path: what was given.
        what: its name in the message.
        otherwise: what else it may be, e.g. ``", or None for memory"``.

    Raises:
        ConfigError: it is no path, or empty, which would be the current folder.
    """
    if not isinstance(path, str | PathLike) or not fspath(path):
        raise ConfigError(f"{what} must be a path{otherwise}, got {path!r:.80}")
    return Path(path)


def label_of(method: Mapping[str, object]) -> str:
    """Return the label of a method's table: its own, else the algorithm's name, of user code the class alone.

    >>> label_of({"algorithm": "my_parts:Pulled"}), label_of({"algorithm": "flame", "label": "mine"})
    ('Pulled', 'mine')
    """
    return str(method.get("label", str(method.get("algorithm")).rpartition(":")[2]))


def file_name(label: str) -> str:
    """Convert a label to a part of a file name. Different labels give different names.

    Of one that is too long for that, the beginning and a digest are the name.

    >>> file_name("flame"), file_name("rho=0.1"), file_name("rho 0.1"), file_name("a/b"), file_name("..")
    ('flame', 'rho=0.1', 'rho+0.1', 'a%2Fb', '%2E%2E')
    """
    name = label.replace(".", "%2E") if label.strip(".") == "" else quote_plus(label, safe="=")
    if len(name) <= MAX_LABEL_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: MAX_LABEL_CHARACTERS - len(digest) - 1]}@{digest}"  # no other name has this sign


def check_case(folder: Path, labels: Iterable[str]) -> None:
    """Refuse labels that differ in case alone on a disk that ignores it, where their runs would share checkpoints.

    Args:
        folder: the run directory, which is locked.
        labels: of its methods.

    Raises:
        RunDirError: two of them have one name there.
    """
    first = dict[str, str]()
    for label in labels:
        namesake = first.setdefault(file_name(label).casefold(), label)
        if namesake != label and (folder / ".LOCK").exists():  # the lock is .lock
            raise RunDirError(
                f"{folder}: the disk ignores case, and the labels {namesake!r} and {label!r} differ in nothing else; "
                "give one of them another label, or choose a folder on another disk"
            )


def analysis_file(kind: str) -> str:
    """Return the name of the file that an analysis' table is in.

    >>> analysis_file("left-out"), analysis_file("my_parts:Pulled")
    ('left_out.parquet', 'Pulled.parquet')
    """
    return f"{file_name(kind.rpartition(':')[2]).replace('-', '_')}.parquet"


def run_folder(out: Path, kind: str, label: str, seed: int) -> Path:
    """Return the folder of a run's checkpoints, models or tracking in a run directory."""
    return out / kind / f"{file_name(label)}-{seed}"


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


ROLES_BY_NAME = {"local": "alone", "fedavg": "average", "centralized": "pooled"}
"""Roles of methods in run directories that do not state them."""


class RunRecord(_Recorded):
    """One method with one seed. ``diverged`` is the round by which it had, if it went on to its end.

    ``role`` is what a comparison takes the method for (`fedloom.algorithms.role_of`). None in earlier run directories.
    ``device_classes`` are the names of the clients' classes of devices, by their number in the metrics.
    """

    method: str
    algorithm: str = ""
    role: str | None = None
    seed: Whole
    status: Literal["done", "diverged", "interrupted", "failed"]
    reason: str = ""
    diverged: Whole | None = None
    rounds: Whole = 0
    oracle: str | None = None
    chunk: Whole | None = None
    device: str | None = None
    parameters: Whole | None = None
    device_classes: tuple[str, ...] = ()

    @property
    def lost(self) -> bool:
        """True if the run has no result: it failed, or diverged and could not go on."""
        return self.status == "failed" or (self.status == "diverged" and self.diverged is None)


class Rejection(_Recorded):
    """Replies of a site that failed one step of the server's check, and the newest sentence on it."""

    count: Whole = 0
    reason: str = ""


class SiteSummary(_Recorded):
    """Record of a site in a deployment: rounds with and without it, and its last accepted reply.

    ``staleness`` is the mean of its uploads, of a buffered run.
    """

    here: bool = True
    accepted: Whole = 0
    missed: Whole = 0
    last_reply: str | None = None
    mute: bool = False
    staleness: float | None = None
    rejected: dict[str, Rejection] = {}


class Summary(_Recorded):
    """``summary.json``: how every run ended. ``metrics`` are own ones, True where more is better.

    A deployment adds why it ended and how its sites did.
    """

    name: str = ""
    runs: tuple[RunRecord, ...] = ()
    clients: Whole = 0
    classes: tuple[str, ...] = ()
    select_on: str = "validation"
    metrics: dict[str, bool] = {}
    warnings: tuple[str, ...] = ()
    stop: str | None = None
    reason: str = ""
    detail: str = ""
    sites: dict[str, SiteSummary] = {}

    def content(self) -> bytes:
        """Render the file: every given field, and its digest."""
        document = self.model_dump(mode="json", exclude_unset=True)
        return insert_digest(json.dumps({**document, "digest": NO_DIGEST}, indent=1).encode())


def insert_digest(content: bytes) -> bytes:
    """Replace the one `NO_DIGEST` in a file's content by the content's digest."""
    before, mark, after = content.rpartition(_DIGEST_PREFIX)
    return before + mark + hashlib.sha256(content).hexdigest().encode() + after[len(_ZERO_DIGEST) :]


def has_digest(content: bytes) -> bool:
    """Return whether a file of a run directory has its digest in it."""
    return _DIGEST_PREFIX in content


def check_digest(path: Path, content: bytes) -> None:
    """Compare the content of a file of a run directory with the digest in it. One without a digest passes.

    Raises:
        RunDirError: it has changed since it was written.
    """
    before, mark, after = content.rpartition(_DIGEST_PREFIX)
    size = len(_ZERO_DIGEST)
    if mark and hashlib.sha256(before + mark + _ZERO_DIGEST + after[size:]).hexdigest().encode() != after[:size]:
        raise RunDirError(f"{path} is damaged, or was changed: it has not the digest that it names; {REPAIR_HINT}")


def read_summary(path: Path) -> Summary:
    """Read the summary in a file.

    Raises:
        RunDirError: it is damaged, or not one.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise RunDirError(f"{path} is no regular file; remove it")
    try:
        content = path.read_bytes()
        check_digest(path, content)
        document = json.loads(content)
        json.dumps(document, ensure_ascii=False).encode()  # refuses halves of characters
        return Summary.model_validate(document)
    except RecursionError as error:
        raise RunDirError(f"{path} is damaged: nested too deeply; {REPAIR_HINT}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunDirError(f"{path}: {place}: {first['msg']}, got {str(first['input'])[:60]}") from error
    except ValueError as error:
        raise RunDirError(f"{path} is damaged: {error}; {REPAIR_HINT}") from error
