"""Format of a run directory: names of its files and folders, labels of its runs, and content of the summary.

This module also checks the paths of files and folders that a caller passes.

Simulations and deployments write run directories. These directories are read by reports, by `watch` and by runs that
are opened again. All of them use the names and values in this module, which does not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from os import PathLike, fsencode, fspath
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote_plus

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.errors import ConfigError, RunDirError

SETTINGS_FILE, SUMMARY_FILE, REPORT_FILE = "experiment.toml", "summary.json", "report.html"
METRICS_FILE, TIMINGS_FILE, PARTITION_FILE = "metrics.parquet", "timings.parquet", "partition.parquet"
CONFUSION_FILE, TSNE_FILE = "confusion.parquet", "tsne.parquet"
GROUPS_FILE, PREDICTIONS_FILE, IMPORTANCE_FILE = "groups.parquet", "predictions.parquet", "importance.parquet"
CHECKPOINTS_FOLDER, MODELS_FOLDER, ADAPTED_FOLDER, TRACKING_FOLDER, LIVE_FOLDER = (
    "checkpoints", "models", "adapted", "tracking", "live",
)  # fmt: skip
MAX_NAME_BYTES = 255
"""Maximum length of a file name on common file systems."""
WORK_FOLDER = ".work"
"""Folder with the claims of processes that share a run directory. A claim reserves a run for one process."""
RESULT_FILES = (
    METRICS_FILE, TIMINGS_FILE, PARTITION_FILE, CONFUSION_FILE, TSNE_FILE, GROUPS_FILE, PREDICTIONS_FILE,
    IMPORTANCE_FILE, SUMMARY_FILE, REPORT_FILE,
)  # fmt: skip
"""Files that a run rewrites, except for its settings and the analysis files that other packages add."""
RESULT_FOLDERS = (CHECKPOINTS_FOLDER, MODELS_FOLDER, ADAPTED_FOLDER, TRACKING_FOLDER, LIVE_FOLDER, WORK_FOLDER)

EXPERIMENT_TABLES = (
    "data", "partition", "model", "task", "local", "sampler", "aggregation_weights", "personalized_aggregation",
    "aggregator", "attack", "upload_transform", "augment", "devices", "schedule", "evaluate", "engine",
    "early_stop", "tune",
)  # fmt: skip
"""Tables of an experiment file, except for its methods, in the order of
`fedloom.lab.experiment.schema.SETTING_TABLES`."""

_DIGEST_PREFIX, _ZERO_DIGEST = b"sha256 of this file with zeros here: ", b"0" * 64
NO_DIGEST = (_DIGEST_PREFIX + _ZERO_DIGEST).decode()
"""Placeholder for a file's digest while the digest is computed."""

REPAIR_HINT = "Run the experiment again, or put the file back"
"""Advice that is shown for a damaged file."""
FEDERATION_CLIENT = -1
"""Client number of values for the whole federation."""
UPLOADS_FIGURE = "heard"
"""Recorded name of the number of a client's used uploads."""
SAMPLES_FIGURE = "samples"
"""Recorded name of the number of samples in a group."""
MAX_CLIENTS = 2**31
"""Upper limit on client numbers (exclusive)."""
MAX_LABEL_CHARACTERS = 150
"""Maximum number of characters that a label may use in a file name. A file system allows 255 bytes, and the seed, the
extension and the suffix of a draft need some of these bytes."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integer that fits into a column of a table."""


def as_path(path: object, what: str, otherwise: str = "") -> Path:
    """Return a path that a caller passed as a `Path`.

    Args:
        path: the given value.
        what: name of the argument, which is used in the message.
        otherwise: other allowed values, e.g. ``", or None for memory"``.

    Raises:
        ConfigError: the value is not a path, contains a name that is too long, or is empty, which would otherwise mean
            the current folder.
    """
    if not isinstance(path, str | PathLike) or not fspath(path):
        raise ConfigError(f"{what} must be a path{otherwise}, got {path!r:.80}")
    try:
        if b"\0" in fsencode(path):
            raise ValueError
    except ValueError:  # or a character that the file system cannot encode
        raise ConfigError(f"{what} contains a character that is not allowed in a path: {path!r:.80}") from None
    if long := [part for part in Path(path).parts if len(fsencode(part)) > MAX_NAME_BYTES]:
        raise ConfigError(
            f"{what}: {long[0]!r:.40}... is a name of {len(long[0]):,} characters, but a file system "
            f"accepts at most {MAX_NAME_BYTES} bytes. Use a shorter name"
        )
    return Path(path)


def get_label(method: Mapping[str, object]) -> str:
    """Return the label of a method's table: the given label, or else the name of the algorithm or of the user's class.

    >>> get_label({"algorithm": "my_parts:Pulled"}), get_label({"algorithm": "flame", "label": "mine"})
    ('Pulled', 'mine')
    """
    return str(method.get("label", str(method.get("algorithm")).rpartition(":")[2]))


def compared_tables(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of an experiment's methods, and a table for each model that an analysis fits for comparison.

    >>> compared_tables({"method": [{"label": "a"}], "analysis": [{"kind": "ridge", "compare": True}, {"kind": "cox"}]})
    [{'label': 'a'}, {'label': 'ridge', 'algorithm': 'ridge'}]
    """
    tables = [dict(table) for table in document.get("method", ()) if isinstance(table, Mapping)]
    for table in document.get("analysis", ()):
        if isinstance(table, Mapping) and table.get("compare"):
            options = {key: value for key, value in table.items() if key not in ("kind", "compare")}
            named = {"algorithm": str(table.get("kind"))}
            tables.append({"label": get_label(named), **named, **options})
    return tables


def file_name(label: str) -> str:
    """Return a label as one component of a file path. Different labels result in different names.

    If a label is too long, the file name consists of the beginning of the label and a digest.

    >>> file_name("flame"), file_name("rho=0.1"), file_name("rho 0.1"), file_name("a/b"), file_name("..")
    ('flame', 'rho=0.1', 'rho+0.1', 'a%2Fb', '%2E%2E')
    """
    name = label.replace(".", "%2E") if label.strip(".") == "" else quote_plus(label, safe="=")
    if len(name) <= MAX_LABEL_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: MAX_LABEL_CHARACTERS - len(digest) - 1]}@{digest}"  # no other file name contains @


def check_case(folder: Path, labels: Iterable[str]) -> None:
    """Raise an error if labels differ only in case and the disk ignores case, so that runs would share checkpoints.

    Args:
        folder: run directory. It contains the lock of this process.
        labels: labels of the methods.

    Raises:
        RunDirError: the file names of two labels refer to the same file on this disk.
    """
    first = dict[str, str]()
    for label in labels:
        namesake = first.setdefault(file_name(label).casefold(), label)
        if namesake != label and (folder / ".LOCK").exists():  # the lock file is .lock, so the disk ignores case
            raise RunDirError(
                f"{folder}: the disk ignores case, but the labels {namesake!r} and {label!r} differ "
                "only in case. Change one of the labels, or choose a folder on another disk"
            )


def analysis_file(kind: str) -> str:
    """Return the file name of an analysis's table.

    >>> analysis_file("left-out"), analysis_file("my_parts:Pulled")
    ('left_out.parquet', 'Pulled.parquet')
    """
    return f"{file_name(kind.rpartition(':')[2]).replace('-', '_')}.parquet"


def run_folder(out: Path, kind: str, label: str, seed: int) -> Path:
    """Return the folder in a run directory that contains a run's checkpoints, models or tracking data."""
    return out / kind / f"{file_name(label)}-{seed}"


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


ROLES_BY_NAME = {"local": "alone", "fedavg": "average", "centralized": "pooled"}
"""Roles that are assumed for methods if a run directory does not state their roles."""


class RunRecord(_Recorded):
    """Record of one method's run with one seed.

    ``diverged`` is the round in which divergence was detected. ``diverged`` may also be set for a run that reached its
    last round.

    ``role`` is the method's role in a comparison (`fedloom.algorithms.get_role`). In older run directories, the role is
    None. ``device_classes`` are the names of the clients' device classes, in the order of the numbers that represent
    them in the metrics.
    """

    method: str
    algorithm: str = ""
    role: str | None = None
    seed: Int64
    status: Literal["done", "diverged", "interrupted", "failed"]
    reason: str = ""
    diverged: Int64 | None = None
    rounds: Int64 = 0
    oracle: str | None = None
    chunk: Int64 | None = None
    device: str | None = None
    parameters: Int64 | None = None
    device_classes: tuple[str, ...] = ()

    @property
    def lost(self) -> bool:
        """True if the run has no result, because it failed or because it diverged and could not continue."""
        return self.status == "failed" or (self.status == "diverged" and self.diverged is None)


class Rejection(_Recorded):
    """Number of a site's replies that failed one step of the server's check, with the latest message."""

    count: Int64 = 0
    reason: str = ""


class SiteSummary(_Recorded):
    """Record of a site in a deployment: the number of rounds with and without the site, and its last accepted reply.

    ``staleness`` is the mean staleness of the site's uploads in a buffered run.
    """

    here: bool = True
    accepted: Int64 = 0
    missed: Int64 = 0
    last_reply: str | None = None
    mute: bool = False
    staleness: float | None = None
    rejected: dict[str, Rejection] = {}


class Summary(_Recorded):
    """Content of ``summary.json``, which records how every run ended.

    ``metrics`` are the metrics that the user declared. Each has the value True if larger values are better.

    A deployment also stores the reason why it ended and the record of its sites.
    """

    name: str = ""
    runs: tuple[RunRecord, ...] = ()
    clients: Int64 = 0
    classes: tuple[str, ...] = ()
    select_on: str = "validation"
    metrics: dict[str, bool] = {}
    warnings: tuple[str, ...] = ()
    stop: str | None = None
    reason: str = ""
    detail: str = ""
    sites: dict[str, SiteSummary] = {}

    def content(self) -> bytes:
        """Return the content of the file: every field that is set, followed by the digest."""
        document = self.model_dump(mode="json", exclude_unset=True)
        return insert_digest(json.dumps({**document, "digest": NO_DIGEST}, indent=1).encode())


def insert_digest(content: bytes) -> bytes:
    """Return the content of a file after replacing its only `NO_DIGEST` by the digest of the content."""
    before, mark, after = content.rpartition(_DIGEST_PREFIX)
    return before + mark + hashlib.sha256(content).hexdigest().encode() + after[len(_ZERO_DIGEST) :]


def has_digest(content: bytes) -> bool:
    """Return True if a file in a run directory contains the correct digest of its own content."""
    return _DIGEST_PREFIX in content


def check_digest(path: Path, content: bytes) -> None:
    """Raise an error if the content of a file in a run directory does not match the digest that is stored in the file.

    A file without a digest is accepted.

    Raises:
        RunDirError: the file has changed since it was written.
    """
    before, mark, after = content.rpartition(_DIGEST_PREFIX)
    size = len(_ZERO_DIGEST)
    if mark and hashlib.sha256(before + mark + _ZERO_DIGEST + after[size:]).hexdigest().encode() != after[:size]:
        raise RunDirError(f"{path} is damaged or was changed: its digest does not match. {REPAIR_HINT}")


def read_summary(path: Path) -> Summary:
    """Return the summary stored in a file.

    Raises:
        RunDirError: the file is damaged, or is not a summary.
        OSError: the file cannot be read.
    """
    if path.exists() and not path.is_file():
        raise RunDirError(f"{path} is not a regular file. Remove it")
    try:
        content = path.read_bytes()
        check_digest(path, content)
        document = json.loads(content)
        json.dumps(document, ensure_ascii=False).encode()  # fails for surrogates
        return Summary.model_validate(document)
    except RecursionError as error:
        raise RunDirError(f"{path} is damaged: it is nested too deeply. {REPAIR_HINT}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunDirError(f"{path}: {place}: {first['msg']}, got {str(first['input'])[:60]}") from error
    except ValueError as error:
        raise RunDirError(f"{path} is damaged: {error}. {REPAIR_HINT}") from error
