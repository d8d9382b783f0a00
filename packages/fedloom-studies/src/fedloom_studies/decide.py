"""Experiments that may settle undecided headline claims, from a list that was frozen before the first one was run.

The file ``decide.toml`` lists every open headline claim on the page of the papers. For each claim, it names the
experiment that may settle it, with its cost, or states why the claim remains undecided. An experiment either adds seeds
to a recorded recipe, with the originally chosen settings, or runs a recipe for the first time.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedloom.formats import format_option
from fedloom.lab.experiment import Plan
from fedloom.lab.report import read_runs
from fedloom.rundir import file_name
from fedloom.values import Value
from fedloom_studies.reproduce import Recipe, TimeBudget
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.choices import chosen_experiment
from fedloom_studies.reproduce.execute import ShowProgress, parse_closed_document
from fedloom_studies.reproduce.page import is_earlier_version
from fedloom_studies.reproduce.summary import RecipeSummary, collect_claim_references


class Decision(Value):
    """Experiment that may settle some of the open headline claims.

    Each claim is identified as ``PAPER | ROW | PROTOCOL``, as in ``papers.toml``.
    """

    recipe: str
    seeds: int = Field(ge=1, description="total number of seeds, including the recorded ones")
    hours: float = Field(
        ge=0, description="estimated core-hours, based on the record before the first seed (0: no run, only a test)"
    )
    how: str = Field(description="what the experiment adds")
    scale: Literal["points", "ratio", "gradients", "bytes", "as printed"] = Field(description="scale of the test")
    looks: tuple[int, ...] = Field(description="numbers of seeds for testing the claims")
    claims: tuple[str, ...] = Field(min_length=1)

    @property
    def price(self) -> float:
        """Core-hours per claim."""
        return self.hours / len(self.claims)


class OpenClaims(Value):
    """Undecided headline claims that no experiment in the list can settle."""

    why: str
    claims: tuple[str, ...] = Field(min_length=1)


@cache
def read_decisions() -> tuple[tuple[Decision, ...], tuple[OpenClaims, ...]]:
    """Return the experiments, in order of cost per claim, and the claims that stay undecided."""
    document = tomllib.loads(files("fedloom_studies").joinpath("decide.toml").read_text())
    experiments = sorted((Decision(**one) for one in document["experiment"]), key=lambda one: one.price)
    return tuple(experiments), tuple(OpenClaims(**one) for one in document["left"])


def seeds_to_run(recipe: Recipe, summary: RecipeSummary, count: int) -> list[int]:
    """Return the seeds, up to a total number, for which the summary lacks a value that the recipe needs."""
    wanted = recipe.seeds(count)
    lacking = set[int]()
    for variant, document in recipe.make_documents(summary.scale).items():
        recorded = summary.numbers.get(variant, {})
        seeds_known = {int(seed) for by_seed in recorded.values() for seed in by_seed}
        lacking |= {*wanted} - seeds_known
        if any(ref not in recorded for ref in collect_claim_references(recipe, document)):
            lacking |= {*wanted}
    return [seed for seed in wanted if seed in lacking]


def add_seeds(
    recipe: Recipe, summary: RecipeSummary, seeds: list[int], out: Path, *, data_dir: Path | None = None,
    workers: int | str = 1, budget: TimeBudget | None = None, show: ShowProgress,
) -> RecipeSummary | None:  # fmt: skip
    """Run a recorded summary's settings with more seeds, and return the summary with these seeds added.

    Return None if the time limit was reached.

    Args:
        recipe: recipe of the summary.
        summary: summary to extend.
        seeds: seeds to run.
        out: folder for the run directories. A second call with the same folder resumes the runs.
        data_dir: folder with the data sets.
        workers: number of processes.
        budget: time limit of the runs.
        show: function that displays progress.
    """
    budget, numbers, failures = budget or TimeBudget(), dict(summary.numbers), list(summary.failures)
    for variant, document in recipe.make_documents(summary.scale, seeds).items():
        choices: Mapping[str, Any] = summary.choices.get(variant) or next(iter(summary.choices.values()), {})
        where, folder = f"recipe {recipe.name}, {variant}", out / file_name(variant)
        plan = Plan(parse_closed_document(chosen_experiment(document, choices), where, workers), folder, data_dir)
        with summaries.count_spent_time(out, variant), show(plan.rounds) as listener:
            outcomes = plan.run(listener, budget, page=False)
        if any(outcome.status == "interrupted" for outcome in outcomes):
            return None
        (run,) = read_runs([folder])
        numbers[variant] = merge_seeds(numbers.get(variant, {}), summaries.numbers_of(recipe, document, run))
        failures += [
            f"{variant}: {r.method}, seed {r.seed}: {r.reason}" for r in run.summary.runs if r.status != "done"
        ]
    every = recipe.ordered({str(seed) for seed in (*summary.seeds, *seeds)})
    return replace(
        summary, numbers=numbers, seeds=[int(seed) for seed in every], failures=failures,
        minutes=round(summary.minutes + sum(summaries.spent_seconds(out).values()) / 60, 2),
        date=datetime.date.today().isoformat(), machine=summaries.processor_name(), commit=summaries.current_commit(),
        command=f"{summary.command.partition(' --seeds')[0]} --decide",
    )  # fmt: skip


def merge_seeds(
    old: Mapping[str, Mapping[str, float | None]], new: Mapping[str, Mapping[str, float | None]]
) -> dict[str, dict[str, float | None]]:
    """Return two sets of recorded values, merged seed by seed.

    If a seed was rerun, its new values replace the old ones.
    """
    return {
        reference: dict(
            sorted({**old.get(reference, {}), **new.get(reference, {})}.items(), key=lambda item: int(item[0]))
        )
        for reference in dict.fromkeys([*old, *new])
    }


def can_extend(recipe: Recipe, summary: RecipeSummary | None) -> bool:
    """Return True if seeds can be added to a recorded summary.

    If no seeds can be added, the entire recipe must be run.
    """
    return summary is not None and summary.complete and not is_earlier_version(recipe, summary)


def is_done(one: Decision, recipe: Recipe, summary: RecipeSummary | None) -> bool:
    """Return True if a summary already contains the seeds that an experiment would add."""
    return summary is not None and can_extend(recipe, summary) and not seeds_to_run(recipe, summary, one.seeds)


def decision_rows(recipes: Mapping[str, Recipe], results: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each experiment: recipe, added seeds, core-hours, number of claims, and state."""
    experiments, left = read_decisions()
    for one in experiments:
        summary = summaries.read_summary(results, one.recipe, "laptop")
        state = "done" if is_done(one, recipes[one.recipe], summary) else "open"
        yield one.recipe, one.how, format_option(one.hours), str(len(one.claims)), state
    for more in left:
        yield "-", more.why, "-", str(len(more.claims)), "left open"
