"""Running a recipe: what is to be chosen, then every variant; what is missing only, and within a budget."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom.algorithms import Composition
from fedloom.experiment import Experiment, Plan, parse
from fedloom.experiment.schema import Method
from fedloom.experiment.telling import Now, Tell
from fedloom.reproduce import summary as summaries
from fedloom.reproduce.as_published import AS_PUBLISHED
from fedloom.reproduce.choices import (
    TRIALS,
    best,
    chosen,
    first,
    open_methods,
    read_choices,
    trial,
    trials_of,
    write_choices,
)
from fedloom.reproduce.recipe import Recipe, Scale, label_of
from fedloom.reproduce.summary import Summary, folder_of
from fedloom.running.distributed import check_alone
from fedloom.values import choose

Show = Callable[[Plan], AbstractContextManager[Tell]]
"""Shows the progress of a plan."""


def experiment(document: Mapping[str, Any], where: str, workers: int | str = 1) -> Experiment:
    """The experiment of a document in which nothing is left to choose.

    Raises:
        ConfigError: as `fedloom.experiment.parse`.
    """
    methods = [{k: v for k, v in m.items() if k != "as_published"} for m in document["method"]]
    engine = {"workers": workers, **document.get("engine", {})}
    parsed = parse({**document, "method": methods, "engine": engine}, where)
    pairs = zip(parsed.methods, document["method"], strict=True)
    return replace(parsed, methods=tuple(_published(m) if t.get("as_published") else m for m, t in pairs))


def _published(method: Method) -> Method:
    kind = choose("method as published", AS_PUBLISHED, method.algorithm)
    fields = method.composition.algorithm
    return replace(method, composition=Composition(kind(**{k: getattr(fields, k) for k in fields.model_fields_set})))


class Budget:
    """Time that may be spent; when it is over, the run at hand is saved and stopped, and can be resumed."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._asked = False

    @property
    def left(self) -> float:
        """Seconds left."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def watch(self, tell: Tell) -> Tell:
        """``tell``, which also stops the run at the end."""

        def watched(label: str, seed: int, rounds: int, now: Now | None) -> None:
            tell(label, seed, rounds, now)
            if self.left <= 0 and not (now is None and self._asked):
                self._asked = True
                signal.raise_signal(signal.SIGINT)

        return watched


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
    budget: Budget | None = None,
    show: Show | None = None,
) -> Summary | None:
    """Run what is missing of a recipe; the summary is written after every variant.

    Args:
        recipe: what to run.
        scale: how much of it.
        out: the recipe's folder; a run directory per variant is made in it.
        results: folder of summaries; None writes none.
        data_dir: folder of data sets.
        seeds: instead of the recipe's.
        only: labels of the methods to run; all when empty.
        workers: processes.
        budget: time that may be spent.
        show: shows progress.

    Returns:
        The summary, not complete where the budget or the user ended it; None if nothing has a result.

    Raises:
        DataError: the data are missing.
        ConfigError: the recipe has no such method, or torchrun has started several ranks.
    """
    check_alone("a recipe")
    budget, documents = budget or Budget(), recipe.at(scale, seeds, only)
    command = shlex.join(
        ["fedloom", "reproduce", recipe.name, "--scale", scale]
        + (["--seeds", ",".join(map(str, seeds))] if seeds else [])
        + [part for label in only for part in ("--only", label)]
    )
    done = None
    for variant, document in documents.items():
        folder = out / folder_of(variant)
        with summaries.counted(out, variant):
            ended = budget.left > 0 and _variant(
                recipe, scale, variant, document, folder, data_dir, workers, budget, show
            )
        done = summaries.summarise(recipe, scale, command, documents, out)
        if done is not None and results is not None:
            summaries.write(done, results)
        if not ended:
            break
    return done


def _variant(
    recipe: Recipe, scale: Scale, variant: str, document: dict[str, Any], folder: Path, data_dir: Path | None,
    workers: int | str, budget: Budget, show: Show | None,
) -> bool:  # fmt: skip
    """Run one variant; whether it came to its end."""
    where = f"recipe {recipe.name}, {variant}"

    def run(document: Mapping[str, Any], place: Path, *, page: bool = False) -> bool:
        plan = Plan(experiment(document, where, workers), place, data_dir)
        shown: AbstractContextManager[Tell] = show(plan) if show else nullcontext(lambda *_: None)
        with shown as tell:
            return all(outcome.status != "interrupted" for outcome in plan.run(budget.watch(tell), page=page))

    if scale == "smoke":
        return run(first(document), folder)
    trials = folder.parent / TRIALS / trials_of(document, folder.name)
    known = read_choices(trials)
    for method in open_methods(document, known):
        place = trials / folder_of(label_of(method))
        if not run(trial(document, method), place):
            return False
        known |= {label_of(method): best(place)}
        write_choices(trials, known)
    return run(chosen(document, known), folder, page=True)
