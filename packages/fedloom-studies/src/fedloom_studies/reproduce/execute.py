"""Execution of a recipe: first the search for settings, then the runs of every variant.

Only missing parts are run, and only within a time limit.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import RunDirError, RunStopped, Stop
from fedloom.lab.experiment import Event, Executor, Experiment, Listener, Plan, parse
from fedloom.lab.report import read_runs
from fedloom.processes import check_alone
from fedloom.rundir import file_name, get_label
from fedloom.storage import make_folder, write_atomic
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.choices import (
    TRIALS_FOLDER,
    choices_so_far,
    chosen_experiment,
    first_candidate_experiment,
    iterate_searches,
    make_search_document,
    open_methods,
    read_choices,
    trials_folder_name,
    write_choices,
)
from fedloom_studies.reproduce.recipe import Recipe, Scale, digest_of
from fedloom_studies.reproduce.summary import RecipeSummary
from fedloom_studies.store import lock_folder, read_document

PROTOCOL_FILE = "protocol.json"
"""File, in a recipe's folder, with digests of the documents that were run."""
DEVICE_KEY = "engine.device"
"""Key in this file for the device that was used. The value of this key is the name of the device."""
SUM_ORDER_TOLERANCE = 0.002
"""Maximum relative difference between values due to the order of summation on different processors."""
ShowProgress = Callable[[int | Mapping[str, int]], AbstractContextManager[Listener]]
"""Function that shows the progress of runs, given the total number of rounds or the numbers of rounds by label."""


def _ignore_rounds(_rounds: int | Mapping[str, int]) -> AbstractContextManager[Listener]:
    return nullcontext(lambda _event: None)


def parse_closed_document(document: Mapping[str, Any], where: str, workers: int | str = 1) -> Experiment:
    """Parse a document that leaves no settings open, and return its experiment.

    Raises:
        ConfigError: see `fedloom.lab.experiment.parse`.
    """
    return parse({**document, "engine": {"workers": workers, **document.get("engine", {})}}, where)


class TimeBudget:
    """A recipe's time limit.

    When the limit is reached, the current run is saved and stopped. A stopped run can be resumed later.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._stop_requested = False

    @property
    def remaining_seconds(self) -> float:
        """Remaining time in seconds."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def __call__(self, event: Event) -> None:
        """Stop a run that exceeds the time limit."""
        here = threading.current_thread() is threading.main_thread()  # events from other processes share one stop
        if self.remaining_seconds <= 0 and not event.status and (here or not self._stop_requested):
            self._stop_requested = True
            signal.raise_signal(signal.SIGINT)


def reproduce(
    recipe: Recipe,
    scale: Scale,
    out: Path,
    *,
    results: Path | None = None,
    data_dir: Path | None = None,
    seeds: Sequence[int] = (),
    only: Sequence[str] = (),
    workers: int | str = 1,
    device: str = "cpu",
    budget: TimeBudget | None = None,
    show: ShowProgress = _ignore_rounds,
    join: bool = False,
    executor: Executor | None = None,
) -> RecipeSummary | None:
    """Run the missing parts of a recipe.

    The result is a summary of the runs. The summary is written after each variant.

    Args:
        recipe: recipe to run.
        scale: scale of the run.
        out: folder for the recipe's results. Each variant has its own run directory in this folder.
        results: folder for the summaries. If None, no summary is written.
        data_dir: folder with the data sets.
        seeds: seeds that replace the recipe's seeds.
        only: labels of the methods to run. All methods are run if no labels are given.
        workers: number of processes.
        device: device for the runs and trials, as in ``[engine]``.
        budget: time limit of the recipe.
        show: function that shows the progress of runs.
        join: True to share the runs of every variant with other processes that make the same call, on any machine that
            can access the folder.
        executor: executor that performs the runs and searches of a variant, with a method ``submit(function,
            *arguments)``.

    Returns:
        The summary. The summary is incomplete if the time limit was reached or the user stopped the run. None if there
        is no result yet.

    Raises:
        DataError: the data are missing.
        ConfigError: the recipe does not contain one of the methods, or torchrun has started more than one rank.
        RunDirError: the folder contains other files, or runs or choices of an earlier version of the recipe.
        ModuleNotFoundError: settings must be chosen, but Optuna is not installed.
    """
    check_alone("a recipe")
    budget, documents = budget or TimeBudget(), recipe.make_documents(scale, seeds, only)
    if device != "cpu":
        documents = {name: {**d, "engine": {**d.get("engine", {}), "device": device}} for name, d in documents.items()}
    if scale != "smoke" and any(open_methods(document, {}) for document in documents.values()):
        import fedloom.lab.tune  # noqa: F401 (without Optuna nothing is begun)

    _claim_folder(out, documents)
    command = shlex.join(
        ["fedloom", "reproduce", recipe.name, "--scale", scale]
        + (["--seeds", ",".join(map(str, seeds))] if seeds else [])
        + [part for label in only for part in ("--only", label)]
        + (["--device", device] if device != "cpu" else [])
    )
    done, samples = None, _count_samples(documents, data_dir)
    for variant, document in documents.items():
        folder = out / file_name(variant)
        with summaries.count_spent_time(out, variant) as note:
            chooses = next(iter(documents.values())) if document.get("choose", {}).get("once") else document
            listeners: tuple[Listener, ...] = (budget, lambda _event, note=note: note())  # type: ignore[misc]
            ended = budget.remaining_seconds > 0 and _run_variant(
                recipe, scale, variant, document, chooses, folder, data_dir, workers, show, join, executor, *listeners
            )
        done = summaries.summarise(recipe, scale, command, documents, out, samples)
        if done is not None and results is not None:
            summaries.write_summary(done, results)
        if not ended:
            break
    return done


def _claim_folder(out: Path, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the documents that the folder belongs to. Methods and seeds may still be added or removed later.

    Raises:
        RunDirError: the folder contains runs or trials of another version of a variant.
    """
    make_folder(out)
    with lock_folder(out):
        _add_digests(out / PROTOCOL_FILE, out, documents)


def _add_digests(file: Path, out: Path, documents: Mapping[str, Mapping[str, Any]]) -> None:
    before: dict[str, dict[str, str]] = read_document(file, dict, f"choose another --out, or delete {out}")
    for variant, document in documents.items():
        was, now = before.get(variant, {}), _document_digests(document)
        folder = out / file_name(variant)
        shares = document.get("choose", {}).get("once") and variant != next(iter(documents))
        trials = [] if shares else [out / TRIALS_FOLDER / trials_folder_name(document, folder.name)]
        places = [place for place in (folder, *trials) if place.exists()]
        changed = {part for part in was.keys() & now.keys() if was[part] != now[part]} if places else set()
        what = " and ".join(map(str, places))
        if DEVICE_KEY in changed:
            raise RunDirError(
                f"variant {variant!r} was run on device {was[DEVICE_KEY]} in {what}, but this run "
                f"uses {now[DEVICE_KEY]}. Repeat it with --device {was[DEVICE_KEY]}, delete the "
                "earlier run, or choose another --out"
            )
        if changed:
            raise RunDirError(
                f"variant {variant!r} has changed since it was run in {what}. Delete that folder, or "
                "choose another --out"
            )
        before[variant] = (was if places else {}) | now
    write_atomic(file, json.dumps(before, indent=1).encode())


def _document_digests(document: Mapping[str, Any]) -> dict[str, str]:
    """Return one digest for each method (keyed by label, including candidates), and one for all keys except the seeds.

    The device is added by its name, so that error messages can state it.
    """
    parts = {get_label(method): method for method in document["method"]}
    parts[""] = {key: value for key, value in document.items() if key not in ("method", "name", "seeds")}
    device = document.get("engine", {}).get("device", "cpu")
    return {part: digest_of(table) for part, table in parts.items()} | {DEVICE_KEY: device}


def _count_samples(documents: Mapping[str, Mapping[str, Any]], data_dir: Path | None) -> dict[str, int]:
    """Return the number of samples in each data set, keyed by source."""
    sources = {
        d["data"]["source"]: parse_closed_document(first_candidate_experiment(d), "data").source
        for d in documents.values()
    }
    return {name: len(source.load(data_dir)) for name, source in sources.items()}


@dataclass(frozen=True)
class Difference:
    """Value in a summary, and the value that the same run produces on this machine."""

    reference: str
    recorded_value: float | None
    measured_value: float | None

    @property
    def size(self) -> float:
        """Relative difference of the values, or absolute difference if the value in the summary is between -1 and 1."""
        if self.recorded_value is None or self.measured_value is None:
            return 0.0 if self.recorded_value == self.measured_value else math.inf
        return abs(self.recorded_value - self.measured_value) / max(1.0, abs(self.recorded_value))


def verify_seed(
    recipe: Recipe, summary: RecipeSummary, folder: Path, *, data_dir: Path | None = None, only: Sequence[str] = (),
    workers: int | str = 1, show: ShowProgress = _ignore_rounds,
) -> list[Difference]:  # fmt: skip
    """Rerun the first seed of a summary's first variant, with the settings that were chosen then.

    Return the differences between the values.

    Args:
        recipe: recipe of the summary.
        summary: summary to compare values with.
        folder: empty folder for the run.
        data_dir: folder with the data sets.
        only: labels of the methods to run. All methods are run if no labels are given.
        workers: number of processes.
        show: function that shows the progress of runs.

    Raises:
        RunDirError: the summary comes from an earlier version of the recipe.
    """
    if summary.protocol != recipe.protocol(summary.scale):
        raise RunDirError(
            f"the summary of {recipe.name} belongs to an earlier version of the recipe. Run the recipe again"
        )
    variant, seed = next(iter(summary.numbers)), summary.seeds[0]
    document = recipe.make_documents(summary.scale, [seed], only)[variant]
    choices: dict[str, Any] = summary.choices.get(variant) or next(iter(summary.choices.values()), {})
    plan = Plan(
        parse_closed_document(chosen_experiment(document, choices), f"recipe {recipe.name}, {variant}", workers),
        folder,
        data_dir,
    )
    with show(plan.rounds) as listener:
        plan.run(listener, page=False)
    now = summaries.numbers_of(recipe, document, read_runs([folder])[0])
    was, key = summary.numbers[variant], str(seed)
    return [Difference(ref, was[ref].get(key), by_seed.get(key)) for ref, by_seed in now.items() if ref in was]


def _run_variant(
    recipe: Recipe, scale: Scale, variant: str, document: dict[str, Any], chooses: dict[str, Any], folder: Path,
    data_dir: Path | None, workers: int | str, show: ShowProgress, join: bool, executor: Executor | None,
    *listeners: Listener,
) -> bool:  # fmt: skip
    """Run one variant with the settings that were chosen for the document ``chooses``.

    Return True if its runs have ended, or False if they were interrupted.
    """
    where = f"recipe {recipe.name}, {variant}"

    def run(document: Mapping[str, object], *, page: bool = False) -> bool:
        plan = Plan(parse_closed_document(document, where, workers), folder, data_dir)
        with show(plan.rounds) as listener:
            try:
                outcomes = plan.run(listener, *listeners, page=page, join=join, executor=executor)
            except RunStopped as stopped:
                return _is_ended(stopped)
            return all(outcome.status != "interrupted" for outcome in outcomes)

    def search(place: Path, searched: dict[str, Any]) -> bool:
        from fedloom.lab.tune import Tuning

        def read(document: Mapping[str, object], where: str) -> Experiment:
            return parse_closed_document(document, where, workers)

        tuning = Tuning(make_search_document(searched), where, place, data_dir, read=read)
        with show(tuning.rounds) as listener:
            try:
                findings = tuning.run(lambda *_: None, listener, *listeners, tuned=False, join=join, executor=executor)
            except RunStopped as stopped:
                return _is_ended(stopped)
        write_choices(place, searched, findings)
        return True

    if scale == "smoke":
        return run(first_candidate_experiment(document))
    trials = folder.parent / TRIALS_FOLDER / trials_folder_name(document, folder.name)
    for place, searched in iterate_searches(trials, chooses):
        if open_methods(searched, read_choices(place, searched)) and not search(place, searched):
            return False
    return run(chosen_experiment(document, choices_so_far(trials, chooses)), page=True)


def _is_ended(stopped: RunStopped) -> bool:
    """Return False if the user stopped the run. Otherwise, raise the given exception."""
    if stopped.reason is not Stop.INTERRUPTED:
        raise stopped
    return False
