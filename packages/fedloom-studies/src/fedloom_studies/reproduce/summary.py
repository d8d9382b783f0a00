"""Summaries of completed and partial runs of recipes.

Each recipe has one record for each scale, which is stored together with the code.

All verdicts are derived from these records.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import RunDirError
from fedloom.formats import round_significant
from fedloom.lab.report import MODEL_KINDS, WORK_FIGURES, Run, read_runs
from fedloom.rundir import file_name, get_label
from fedloom.storage import write_atomic
from fedloom_studies.reproduce.choices import TRIALS_FOLDER, choices_so_far, trials_folder_name
from fedloom_studies.reproduce.figures import Reference, values_by_seed
from fedloom_studies.reproduce.recipe import Recipe, Scale, read_recipes
from fedloom_studies.store import lock_folder, not_a_record_error, read_document, read_records_of_file, write_record

SUMMARIES_FILE = "papers.jsonl"
"""File for the summaries."""
SPENT_FILE = "spent.json"
WRITE_INTERVAL_SECONDS = 5.0
"""Minimum processor time, in seconds, between two updates of ``spent.json``."""
SIGNIFICANT_DIGITS = 7
"""Number of significant digits kept in summaries."""
ESTIMATES_FILE = "estimates.json"
"""File with the requirements of recipes that have neither a summary nor a laptop scale. The file is located in the same
folder as the summaries."""


class RecipeNeed(NamedTuple):
    """Requirements of a recipe at full scale: core-minutes, and the data sets that are missing on this machine."""

    minutes: float
    missing: list[str]


@dataclass(frozen=True)
class RecipeSummary:
    """Results of a recipe at one scale.

    Attributes:
        protocol: digest of the recipe that was run, from `Recipe.protocol`.
        says: sentence that states how the run differs from the paper's protocol.
        numbers: values, keyed by variant, reference and seed. A value is None if its run has no result.
        minutes: processor time that runs, trials and evaluation have used so far, in core-minutes.
        complete: True if all variants, methods and seeds were run.
        choices: chosen settings, keyed by variant and method, with the scores of all candidates.
        failures: sentences about runs that diverged or failed.
        commit: commit of the code, followed by "-dirty" if the code contained uncommitted changes. If the commit is
            unknown, it is empty.
        samples: number of samples in every data set of the run, keyed by source. In summaries of earlier versions, the
            mapping is empty.
    """

    recipe: str
    scale: Scale
    protocol: str
    says: str
    command: str
    date: str
    machine: str
    versions: dict[str, str]
    complete: bool
    seeds: list[int]
    rounds: int
    minutes: float
    choices: dict[str, Any]
    failures: list[str]
    numbers: dict[str, dict[str, dict[str, float | None]]]
    commit: str = ""
    samples: dict[str, int] = field(default_factory=dict[str, int])


def summarise(
    recipe: Recipe, scale: Scale, command: str, documents: Mapping[str, Any], out: Path, samples: Mapping[str, int]
) -> RecipeSummary | None:
    """Summarize the run directories in the folder ``out``, or return None if no variant has been run.

    Each variant has its own run directory.
    """
    numbers: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    failures: list[str] = []
    versions: dict[str, str] = {}
    missing = False
    for variant, document in documents.items():
        folder = out / file_name(variant)
        if not (folder / "summary.json").exists():
            missing = True
            continue
        run = read_runs([folder])[0]
        versions = run.options["resolved"]["versions"]
        numbers[variant] = numbers_of(recipe, document, run)
        trials = trials_folder_name(document, folder.name)
        choices = {} if trials != folder.name and chosen else choices_so_far(out / TRIALS_FOLDER / trials, document)
        chosen |= {variant: choices} if choices else {}
        wanted = {(get_label(m), seed) for m in document["method"] for seed in document["seeds"]}
        ended = {(r.method, r.seed): r for r in run.summary.runs if r.status != "interrupted"}
        missing |= not wanted <= ended.keys()
        failures += [f"{variant}: {r.method}, seed {r.seed}: {r.reason}" for r in ended.values() if r.status != "done"]
    if not numbers:
        return None
    some = next(iter(documents.values()))
    return RecipeSummary(
        recipe.name, scale, recipe.protocol(scale), recipe.sentence(scale), command, datetime.date.today().isoformat(),
        processor_name(), versions, not missing, list(some["seeds"]), some["rounds"],
        round(sum(spent_seconds(out).values()) / 60, 2), chosen, failures, numbers, current_commit(), dict(samples),
    )  # fmt: skip


@cache
def current_commit() -> str:
    """Return the commit of this code, with "-dirty" if the code was changed, or "" if it is not in its repository."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here.parent), *arguments],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    try:
        git("ls-files", "--error-unmatch", here.name)
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parents[2]))
        return git("rev-parse", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_seeds(seeds: Iterable[int]) -> str:
    """Render seeds in their order, with at least three consecutive seeds as a range.

    >>> write_seeds([0, 1, 2, 3, 4, 20, 21, 22]), write_seeds([1, 10, 0, 2, 3, 4]), write_seeds([0, 1])
    ('0 to 4 and 20 to 22', '1, 10, 0 and 2 to 4', '0 and 1')
    """
    groups: list[list[int]] = []
    for seed in seeds:
        if groups and seed == groups[-1][-1] + 1:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    *first, last = [
        text for group in groups for text in ([f"{group[0]} to {group[-1]}"] if len(group) > 2 else map(str, group))
    ]
    return f"{', '.join(first)} and {last}" if first else last


def processor_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, one thread per process"


def write_summary(summary: RecipeSummary, folder: Path) -> None:
    """Write a summary to a folder."""
    write_record(folder / SUMMARIES_FILE, summary.__dict__, ("recipe", "scale"))


def read_summary(folder: Path, recipe: str, scale: Scale) -> RecipeSummary | None:
    """Return the summary of a recipe at a scale, or None if none exists.

    Raises:
        RunDirError: a line of the file is not a recipe's summary.
    """
    file = folder / SUMMARIES_FILE
    summary = None
    for number, record in enumerate(read_records_of_file(file), 1):
        if (record.get("recipe"), record.get("scale")) == (recipe, scale):
            try:
                summary = RecipeSummary(**record)
            except TypeError as error:
                raise not_a_record_error(file, number, error) from None
    return summary


def add_rivals(recipe: Recipe, summary: RecipeSummary, folder: Path) -> RecipeSummary:
    """Return the summary with values added for methods from another recipe of the same experiment (``rivals``).

    In both recipes, the same seed gives the same data, cohorts, initial models and batches. Nothing is added if the
    other record belongs to a different experiment or an earlier version of the other recipe.
    """
    other = read_recipes()[recipe.paper.rivals] if recipe.paper.rivals else None
    record = read_summary(folder, other.name, summary.scale) if other else None
    if other is None or record is None or record.protocol != other.protocol(summary.scale):
        return summary
    numbers = dict(summary.numbers)
    for variant, document in recipe.make_documents(summary.scale).items():
        beside = other.make_documents(summary.scale).get(variant, {})
        if variant in numbers and _shared_experiment_parts(document) == _shared_experiment_parts(beside):
            numbers[variant] = {**record.numbers.get(variant, {}), **numbers[variant]}
    return replace(summary, numbers=numbers)


def _shared_experiment_parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an experiment that all methods share, without its name and without open settings."""
    return {key: value for key, value in document.items() if key not in ("method", "name", "choose")}


def read_needs(folder: Path) -> dict[str, RecipeNeed]:
    """Return the stored estimates, keyed by recipe."""
    file = folder / ESTIMATES_FILE
    try:
        return {name: RecipeNeed(**need) for name, need in read_document(file, dict).items()}
    except TypeError as error:
        raise RunDirError(f"{file} is damaged: {error}. Delete it and run it again") from None


def numbers_of(recipe: Recipe, document: Mapping[str, Any], run: Run) -> dict[str, dict[str, float | None]]:
    """Return all values of a run that are kept in a summary, keyed by reference and seed."""
    numbers, runs = {}, run.summary.runs
    lost = {r.method for r in runs} - {r.method for r in runs if r.status in ("done", "interrupted")}
    for reference in _wanted_references(recipe, [get_label(m) for m in document["method"]]):
        by_seed = values_by_seed(run, reference)
        is_lost = reference.method in lost and reference.figure not in WORK_FIGURES
        if is_lost or any(math.isfinite(v) for v in by_seed.values()):
            numbers[str(reference)] = {
                str(s): round_significant(v, SIGNIFICANT_DIGITS) for s, v in sorted(by_seed.items())
            }
    return numbers


def _wanted_references(recipe: Recipe, methods: Iterable[str]) -> list[Reference]:
    """Return the references that a summary keeps: for columns and claims, also at the chosen round, and for costs."""
    paper = recipe.paper
    texts = [*paper.columns.values(), *(t for c in paper.claims for t in (c.subject, *c.than) if isinstance(t, str))]
    methods = list(methods)
    named = [Reference.create(text, paper.figure)._replace(variant="") for text in texts]
    named += [Reference("", method, model, paper.figure) for method in methods for model in MODEL_KINDS]
    named += [chosen for reference in named if (chosen := reference.chosen())]
    named += [Reference("", method, "", name) for method in methods for name in WORK_FIGURES]
    return list(dict.fromkeys(reference for reference in named if reference.method in methods))


def collect_claim_references(recipe: Recipe, document: Mapping[str, Any]) -> set[str]:
    """Return the references that the claims need, taken from the methods of a document."""
    labels = {get_label(method) for method in document["method"]}
    sides = [side for claim in recipe.paper.claims for side in (claim.subject, *claim.than) if isinstance(side, str)]
    read = [Reference.create(side, recipe.paper.figure) for side in sides]
    return {str(reference) for reference in read if reference.method in labels}


@contextmanager
def count_spent_time(out: Path, variant: str) -> Iterator[Callable[[], None]]:
    """Measure the processor time of the block, and add it to the file ``spent.json`` in a recipe's folder.

    The block receives a function that updates the file. Call this function from time to time, so that little is lost if
    the process is killed.
    """
    last_written = _processor_seconds()

    def write() -> None:
        nonlocal last_written
        if out.is_dir():
            with lock_folder(out):
                seconds_by_variant, now = spent_seconds(out), _processor_seconds()
                seconds_by_variant[variant] = seconds_by_variant.get(variant, 0.0) + now - last_written
                write_atomic(out / SPENT_FILE, json.dumps(seconds_by_variant, indent=1).encode())
                last_written = now

    try:
        yield lambda: write() if _processor_seconds() - last_written >= WRITE_INTERVAL_SECONDS else None
    finally:
        write()


def _processor_seconds() -> float:
    """Return the processor time used so far in seconds, including the time of child processes that have ended."""
    return sum(os.times()[:4])


def spent_seconds(out: Path) -> dict[str, float]:
    """Return the processor time in seconds that `count_spent_time` recorded for each variant."""
    return read_document(out / SPENT_FILE, float)
