"""Tracking: log the metrics of a run in progress to TensorBoard, MLflow (extra ``track``) or W&B (extra ``wandb``).

Only federation-wide metrics are logged. An interrupted and resumed run logs the same metrics as an uninterrupted run.
All trackers write to the ``tracking`` folder in the run directory. If MLFLOW_TRACKING_URI is set, MLflow logs to that
address instead. W&B works offline unless WANDB_MODE is set to a different mode. The offline files can be uploaded with
``wandb sync``.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedloom.engine.checks.guard import Guard
from fedloom.errors import ConfigError, describe_error
from fedloom.hints import unknown_name_error
from fedloom.lab.experiment.events import Event, Figures
from fedloom.lab.experiment.schema import Experiment
from fedloom.rundir import run_folder
from fedloom.storage.files import make_folder
from fedloom.values import check_type

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RETRY_SECONDS = 60.0
"""Seconds before a failed tracker is retried. An unreachable server delays a run by up to `HTTP_TIMEOUT_SECONDS` and
one retry, which is only a small part of the run time."""
HTTP_TIMEOUT_SECONDS, HTTP_RETRIES = 10, 1
"""Timeout in seconds, and number of retries, for MLflow's server, unless the environment sets other values. MLflow's
defaults of 120 seconds and 7 retries would delay a run by many minutes at every evaluation."""
MAX_CAUSE_CHARACTERS = 300
"""Maximum number of characters quoted from a library's error message in a warning."""
MAX_NAME_CHARACTERS = 250
"""Maximum number of characters in the name of an MLflow metric."""
TRACKING_FOLDER = "tracking"
MAX_METRICS_PER_CALL = 1000
"""Maximum number of metrics that MLflow accepts in one call."""


class Writer(Protocol):
    """Destination of one run's metrics."""

    last: int
    """Last round whose metrics were written."""

    def write(self, round: int, figures: Figures) -> None:
        """Write the metrics of a round later than all rounds written so far."""
        ...

    def close(self, status: str) -> None:
        """Record how the run ended."""
        ...


class Tracker:
    """Listener that passes the metrics of each run of an experiment to a writer for that run.

    If the tracker fails, for example because its server cannot be reached, a warning is issued and the run continues.
    Metrics are kept until the tracker works again. A failed tracker is retried after `RETRY_SECONDS`, and again at the
    end of the run. If the experiment is run again with the same tracker, missing metrics are written.

    Args:
        kind: one of `TRACKERS`.
        experiment: experiment whose runs are tracked.
        out: run directory of the experiment.

    Attributes:
        view: shell command for viewing the tracked metrics.

    Raises:
        ConfigError: the kind is unknown, or required packages are missing.
    """

    def __init__(self, kind: str, experiment: Experiment, out: Path) -> None:
        check_tracker(kind)
        self._kind, (self._make, self.view) = kind, TRACKERS[kind](experiment, out)
        self._writers: dict[tuple[str, int], Writer] = {}
        self._waiting: dict[tuple[str, int], dict[int, Figures]] = {}
        self._lock, self._guard, self._retry_at = threading.Lock(), Guard(), 0.0

    @property
    def wrote(self) -> bool:
        """True if metrics of at least one run were written."""
        return any(writer.last >= 0 for writer in self._writers.values())

    def __call__(self, event: Event) -> None:
        """Write the rounds that have not yet been written, and close the writer when the run ends."""
        key = event.label, event.seed
        with self._lock:
            self._waiting.setdefault(key, {}).update(event.figures)
            if not event.status and time.monotonic() < self._retry_at:
                return
            try:
                self._write(key, event.status)
            except Exception as error:  # libraries, networks and disks raise many types of errors
                self._fail(key, event.status, error)

    def _write(self, key: tuple[str, int], status: str) -> None:
        if key not in self._writers:
            self._writers[key] = self._make(*key)
        writer, waiting = self._writers[key], self._waiting[key]
        for round in sorted(waiting):
            if round > writer.last:
                writer.write(round, {name: v for name, v in waiting[round].items() if math.isfinite(v)})
            del waiting[round]
        if status:
            writer.close(status)

    def _fail(self, key: tuple[str, int], status: str, error: Exception) -> None:
        first, self._retry_at = not self._retry_at, time.monotonic() + RETRY_SECONDS
        missing = len(self._waiting[key])
        if first or status:
            lost = f"; {missing} rounds of {key[0]}, seed {key[1]}, are missing" if status and missing else ""
            cause = f"{describe_error(error)}".splitlines()[0][:MAX_CAUSE_CHARACTERS]
            self._guard.warn(
                f"--track {self._kind}: {cause}{lost}. The run continues. Run the same command again "
                f"with --track {self._kind} to log the missing values"
            )


class TensorBoard:
    """Writer of a run's TensorBoard event files. When a run resumes, the files are rewritten from the first round."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_folder(folder)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._events, self.last = SummaryWriter(str(folder)), -1

    def write(self, round: int, figures: Figures) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, round)
        self._events.flush()
        self.last = round

    def close(self, status: str) -> None:
        self._events.add_text("status", status)
        self._events.close()


class MLflow:
    """Writer of a run's metrics to MLflow.

    When a run resumes, logging continues in its existing MLflow run after the last logged round.
    """

    ENDS: Mapping[str, str] = {"done": "FINISHED", "interrupted": "KILLED"}

    def __init__(
        self, client: MlflowClient, experiment: str, name: str, origin: str, settings: Mapping[str, object]
    ) -> None:
        from mlflow.entities import Param

        self._client = client
        recorded_runs = client.search_runs([experiment], f"tags.`fedloom.run` = '{origin}'")
        if recorded_runs:
            recorded = recorded_runs[0]
            self._run, self.last = recorded.info.run_id, int(recorded.data.tags.get("fedloom.round", -1))
            client.update_run(self._run, status="RUNNING")
            return
        run = client.create_run(experiment, run_name=name, tags={"fedloom.run": origin})
        self._run, self.last = run.info.run_id, -1
        client.log_batch(
            self._run, params=[Param(key, str(value)[:500]) for key, value in _flatten_settings(settings).items()]
        )

    def write(self, round: int, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        names = mlflow_names(figures)
        metrics = [Metric(names[name], value, now, round) for name, value in figures.items()]
        for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self._client.log_batch(self._run, metrics=metrics[start : start + MAX_METRICS_PER_CALL])
        self._client.set_tag(self._run, "fedloom.round", round)
        self.last = round

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run, self.ENDS.get(status, "FAILED"))


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Return a name that MLflow accepts for each metric. Different metrics get different names.

    >>> mlflow_names(["global/test/recall[0]/mean", "global/test/a(b)", "global/test/a_b_"])
    {'global/test/recall[0]/mean': 'global/test/recall.0/mean', \
'global/test/a(b)': 'global/test/a_b_ 2', 'global/test/a_b_': 'global/test/a_b_'}
    """
    originals = list(names)
    cleaned = {name: _mlflow_name(name) for name in originals}
    used = {name for name in originals if cleaned[name] == name}
    for name in originals:
        clean, number = cleaned[name], 1
        while cleaned[name] != name and cleaned[name] in used:
            number += 1
            cleaned[name] = f"{clean[: MAX_NAME_CHARACTERS - 5]} {number}"
        used.add(cleaned[name])
    return cleaned


def _mlflow_name(name: str) -> str:
    """Return a name that consists of letters, digits and ``_-. :/``. All other characters are replaced.

    Because no component is empty, "." or "..", the name is a safe relative path.
    """
    parts = re.sub(r"\[(.*?)\]", r".\1", name).split("/")
    parts = [re.sub(r"[^\w. :-]", "_", part) for part in parts]
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME_CHARACTERS]


class WandB:
    """Writer of a run's metrics to W&B, offline by default.

    When a run resumes, its files are rewritten from the first round.
    """

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, object]) -> None:
        import wandb

        shutil.rmtree(folder / "wandb", ignore_errors=True)
        make_folder(folder)
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.last = -1

    def write(self, round: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=round)
        self.last = round

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "done" else 1)


MakeWriter = Callable[[str, int], Writer]
"""Function that opens the writer for the run with a label and a seed."""


def check_tracker(kind: str | None) -> None:
    """Raise an error before any work starts if a tracker cannot be used.

    Raises:
        ConfigError: the kind is unknown, or required packages are missing.
    """
    if kind is None:
        return
    check_type("track", kind, str)
    if kind not in TRACKERS:
        raise unknown_name_error("tracker", kind, TRACKERS, "--track")
    for package in TRACKER_PACKAGES[kind]:
        if find_spec(package) is None:
            extra = "wandb" if kind == "wandb" else "track"
            raise ConfigError(f"--track {kind} needs {package}: pip install 'fedloom[{extra}]'")


def _tensorboard(experiment: Experiment, out: Path) -> tuple[MakeWriter, str]:
    def make(label: str, seed: int) -> Writer:
        return TensorBoard(run_folder(out, TRACKING_FOLDER, label, seed))

    return make, f"tensorboard --logdir {out / TRACKING_FOLDER}"


def _mlflow(experiment: Experiment, out: Path) -> tuple[MakeWriter, str]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(HTTP_TIMEOUT_SECONDS))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(HTTP_RETRIES))
    folder = (out / TRACKING_FOLDER).resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    settings = {m.label: m.settings() for m in experiment.compared}

    @cache
    def open_client() -> tuple[MlflowClient, str]:
        """Return the MLflow client and the experiment's ID.

        The tracking folder is not created until a run starts.
        """
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        make_folder(folder)
        client = MlflowClient(uri)
        name = experiment.head.name
        existing = client.get_experiment_by_name(name)
        if existing is None:
            try:
                return client, client.create_experiment(name, (folder / "artifacts").as_uri())
            except MlflowException:
                existing = client.get_experiment_by_name(name)
                if existing is None:  # otherwise, another run has created the experiment meanwhile
                    raise
        return client, existing.experiment_id

    def make(label: str, seed: int) -> Writer:
        client, id = open_client()
        origin = f"{out.resolve()}#{label}#{seed}"
        return MLflow(client, id, f"{label}-{seed}", origin, {"seed": seed, **settings[label]})

    return make, f"mlflow ui --backend-store-uri {uri}"


def _wandb(experiment: Experiment, out: Path) -> tuple[MakeWriter, str]:
    settings, project = {m.label: m.settings() for m in experiment.compared}, experiment.head.name

    def make(label: str, seed: int) -> Writer:
        named = {"seed": seed, **settings[label]}
        return WandB(run_folder(out, TRACKING_FOLDER, label, seed), project, f"{label}-{seed}", named)

    return make, f"wandb sync {out / TRACKING_FOLDER}/*/wandb/offline-run-*"


TRACKERS: Mapping[str, Callable[[Experiment, Path], tuple[MakeWriter, str]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""Trackers that ``fedloom run --track`` accepts."""
TRACKER_PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "wandb": ("wandb",)}
"""Packages required by each tracker. MLflow's last two packages are required for its database."""


def _flatten_settings(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    dotted: dict[str, object] = {}
    for key, value in settings.items():
        dotted |= (
            _flatten_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return dotted
