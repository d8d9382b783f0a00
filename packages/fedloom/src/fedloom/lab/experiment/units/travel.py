"""Travel: send a unit of work to an external executor's worker as text that refers to the data by digest.

The worker's reply contains the run's files.
"""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedloom.analyses.fitted import run_setting
from fedloom.data.federation import Federation
from fedloom.data.groups import keep_group_columns
from fedloom.errors import CodeError, ConfigError, DataError, FedloomError, RunStopped, Stop
from fedloom.lab.experiment.file import parse
from fedloom.lab.experiment.schema import Experiment
from fedloom.lab.experiment.units.payload import decode, encode
from fedloom.local.oracles.precision import isolate_torch_settings

MEMORY_SOURCE = "memory"
"""Name of a source that represents in-memory data, which have no file."""
PLACEHOLDER_TABLES = {"data": {"source": "digits"}, "partition": {"kind": "iid", "clients": 1}}
"""Placeholder for in-memory data in an experiment's text."""
_UNIT_LOCK = threading.Lock()
"""Lock that forces a process to compute its units one at a time, because torch's settings apply to the whole process.
"""
_held = dict[str, bytes]()
"""In-memory data received by this process, keyed by digest."""


class PackedExperiment(NamedTuple):
    """Experiment as sent to workers.

    Attributes:
        text: the experiment as a TOML document.
        data: the clients or the data set, encoded as bytes. If None, each worker reads the data from the source that
            the experiment names.
    """

    text: str
    data: bytes | None


class UnitReply(NamedTuple):
    """Result of a unit of work, sent back by a worker.

    Attributes:
        files: contents of the run's checkpoint files, keyed by file name.
        failure: reason why the run has no result. Empty if it has one.
        interrupted: True if the worker was asked to stop.
        wants_data: True if the worker does not have the data and the unit was sent without them.
        worker: name of the process that sent the reply.
    """

    files: Mapping[str, bytes]
    failure: str = ""
    interrupted: bool = False
    wants_data: bool = False
    worker: str = ""

    def pack(self) -> bytes:
        """Encode the reply as bytes: a line of JSON, followed by an archive of the files."""
        head = json.dumps({k: v for k, v in self._asdict().items() if k != "files"}).encode()
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, content in sorted(self.files.items()):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return head + b"\n" + archive.getvalue()

    @classmethod
    def decode(cls, content: bytes) -> UnitReply:
        """Decode a reply from bytes.

        Raises:
            ConfigError: the bytes do not encode a reply.
        """
        head, _, archive = content.partition(b"\n")
        files = dict[str, bytes]()
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar:
                    stream = tar.extractfile(member)
                    if stream is None or Path(member.name).name != member.name or member.name.startswith(".."):
                        raise ValueError(f"{member.name!r} is not a file of a run")
                    files[member.name] = stream.read()
            return cls(files, **json.loads(head))
        except (ValueError, TypeError, tarfile.TarError) as error:
            raise ConfigError(f"the executor did not return a worker's reply: {error}") from None


def pack_experiment(experiment: Experiment, checksum: str, **tables: object) -> PackedExperiment:
    """Pack an experiment so that a worker computes the same results from it.

    Args:
        experiment: experiment to run.
        checksum: checksum of the data set. Every worker must have a data set with this checksum.
        tables: additional tables to add to the document, such as ``tune``.

    Raises:
        ConfigError: part of the experiment cannot be represented as text, or its data cannot be encoded as bytes.
    """
    settings, data = experiment.settings(), None
    if experiment.source_options.get("source") == MEMORY_SOURCE:
        held: Any = getattr(experiment.partition, "held", None)
        in_memory = held if isinstance(held, Federation) else experiment.source.held  # type: ignore[attr-defined]
        data = encode(in_memory)
        partition = {} if isinstance(in_memory, Federation) else {"partition": settings["partition"]}
        settings = {**settings, **PLACEHOLDER_TABLES, **partition}
    text = tomli_w.dumps(settings)
    try:
        again = parse(tomllib.loads(text), "executor")
        same = [m.settings() for m in again.methods] == [m.settings() for m in experiment.methods]
    except FedloomError as error:
        raise ConfigError(
            f"the experiment cannot be sent to a worker: {error}. Put your classes and functions into "
            "a module that the workers can import, and refer to them by import path"
        ) from None
    if not same:
        raise ConfigError(
            "the experiment cannot be sent to a worker, because a method or model cannot be written as text. Put the "
            "class into a module that the workers can import, and the weights into a file"
        )
    checks = {"data": "" if data is None else sha256(data).hexdigest(), "checksum": checksum}
    return PackedExperiment(tomli_w.dumps({**settings, **tables, "travel": checks}), data)


def compute_unit(experiment: str, unit: str, data: bytes | None = None) -> bytes:
    """Compute one unit of an experiment in any process, and return the reply as bytes.

    The same arguments always give the same models and metrics.

    Args:
        experiment: text that `pack_experiment` returned.
        unit: JSON object with the keys ``label`` and ``seed``.
        data: bytes that `pack_experiment` returned. Each worker receives the data only once.

    Returns:
        A `UnitReply`, encoded as bytes.

    Raises:
        DataError: the worker's data differ from the data of the experiment.
        ConfigError: the worker cannot import code that the experiment needs.
    """
    if not receive_data(experiment, data):
        return UnitReply({}, wants_data=True, worker=worker_name()).pack()
    key = json.loads(unit)
    with unit_folder() as folder:
        plan = parse(read_document(experiment), "executor")
        fed = read_federation(experiment, key["seed"])
        setting = next(m.setting for m in plan.compared if m.label == key["label"]).with_(seed=key["seed"])
        setting, place = setting.with_(engine=setting.engine.with_(workers=1)), folder / "state"
        failure, interrupted = "", False
        try:
            interrupted = run_setting(setting, fed, folder=place).stop is Stop.INTERRUPTED
        except (CodeError, RunStopped) as error:
            failure = str(error)
        files = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} if place.is_dir() else {}
        return UnitReply(files, failure, interrupted, worker=worker_name()).pack()


def worker_name() -> str:
    """Return a name for this process that is unique across machines."""
    return f"{socket.gethostname()} {os.getpid()}"


def receive_data(experiment: str, data: bytes | None) -> bool:
    """Store any data sent with a unit, and return True if the experiment's data are now available, or need not be sent.

    Raises:
        DataError: the data belong to a different experiment.
    """
    digest = tomllib.loads(experiment)["travel"]["data"]
    if data is not None:
        if sha256(data).hexdigest() != digest:
            raise DataError("the data sent with a unit of work differ from its experiment's data")
        _held[digest] = data
    return not digest or digest in _held


@contextmanager
def unit_folder() -> Iterator[Path]:
    """Create a temporary folder for a unit and yield its path, while other units of this process wait."""
    with _UNIT_LOCK, isolate_torch_settings(), tempfile.TemporaryDirectory(prefix="fedloom-unit-") as folder:
        yield Path(folder)


def read_document(experiment: str) -> dict[str, Any]:
    """Return the document of a received experiment, with the data's path on this worker."""
    return _localize_data_path({key: value for key, value in tomllib.loads(experiment).items() if key != "travel"})


@lru_cache(maxsize=4)
def read_federation(experiment: str, seed: int) -> Federation:
    """Check that the data match the sender's data, and return an experiment's clients for a seed.

    Raises:
        DataError: the data on this worker are different.
    """
    travel, plan = tomllib.loads(experiment)["travel"], parse(read_document(experiment), "executor")
    if not travel["data"]:
        source = keep_group_columns(plan.source, plan.kept_columns).read(None)
        if source.checksum() != travel["checksum"]:
            raise DataError(
                f"the data {plan.source_options['source']} on this worker differ from the experiment's data. Copy the "
                "same files to the worker, to the same path or to the FEDLOOM_DATA folder"
            )
        return plan.partition(source, seed)
    held = decode(_held[travel["data"]])
    return held if isinstance(held, Federation) else plan.partition(held, seed)


def _localize_data_path(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the data's path on this worker: the same path, or a path in the FEDLOOM_DATA folder."""
    path, folder = Path(str(document["data"]["source"])).expanduser(), os.environ.get("FEDLOOM_DATA")
    here = Path(folder or ".") / path.name
    if len(path.parts) < 2 or path.exists() or folder is None or not here.exists():
        return dict(document)
    return {**document, "data": {**document["data"], "source": str(here)}}
