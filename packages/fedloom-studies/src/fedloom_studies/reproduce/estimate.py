"""Estimate of a recipe's run time here: the number of sample gradients times the measured seconds per gradient.

The numbers of gradients are determined by running the first round of each method on a tiny federation. The round yields
the number of gradients per training sample and round. The number of gradients is multiplied by the numbers of rounds,
seeds, participating clients and samples. For the seconds per gradient, FedAvg takes two steps on random data of the
same shape, with the same model, batch size and engine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fedloom as fl
from fedloom.algorithms import FedAvg
from fedloom.data import Dataset, Source
from fedloom.engine import Setting
from fedloom.errors import DataError, FedloomError
from fedloom.formats import format_duration, format_option, round_significant
from fedloom.lab.experiment import Experiment, Method, measure_rounds, samples_per_round
from fedloom.local import LocalSGD
from fedloom.models import MLP, ModelSpec
from fedloom.seeds import generator
from fedloom.storage import make_folder, write_atomic
from fedloom_studies.reproduce.choices import count_rounds, first_candidate_experiment, method_candidates
from fedloom_studies.reproduce.execute import parse_closed_document
from fedloom_studies.reproduce.page import is_earlier_version, last_summary, recipe_state_phrase
from fedloom_studies.reproduce.recipe import NOMINAL_SETS, NominalDataset, Recipe, Scale
from fedloom_studies.reproduce.summary import ESTIMATES_FILE, RecipeNeed, read_summary

MAX_TIMED_BATCH = 10
"""Maximum batch size for timing convolutional networks."""
FIXED_WORK_METHODS = ("fiaelt", "fedadmm-inexact")
"""Methods whose local work does not grow with the client's number of samples."""
_SECONDS_OF_ROUND: dict[str, float] = {}


def estimate_minutes(recipe: Recipe, scale: Scale) -> float:
    """Estimate the core-minutes that a recipe takes at a scale, including the choice of settings.

    The estimate does not include evaluation.
    """
    total = 0.0
    for number, document in enumerate(recipe.make_documents(scale).values()):
        plan = parse_closed_document(first_candidate_experiment(document), recipe.name)
        data = NOMINAL_SETS[document["data"]["source"]]
        if recipe.paper.samples is not None and scale != "smoke":
            data = data._replace(train=recipe.paper.samples, test=0)
        clients, samples = _client_and_sample_counts(document, data)
        for method, table in zip(plan.methods, document["method"], strict=True):
            seconds = seconds_per_round(plan, method, data, clients, samples / clients)
            seeds = min(document.get("choose", {}).get("seeds", 1), len(document["seeds"]))
            trials = (
                seeds * len(method_candidates(table)) if scale != "smoke" and len(method_candidates(table)) > 1 else 0
            )
            trials = 0 if number and document.get("choose", {}).get("once") else trials
            rounds = method.setting.rounds * len(plan.head.seeds) + trials * count_rounds(document, table)
            total += seconds * rounds
    return total / 60


def seconds_per_round(plan: Experiment, method: Method, data: NominalDataset, clients: int, samples: float) -> float:
    """Estimate the processor time of one round, in seconds. The estimate does not include evaluation.

    Args:
        plan: experiment that compares the method.
        method: method whose round is estimated.
        data: shape and classes of the samples.
        clients: number of clients in the federation.
        samples: number of a client's training samples.
    """
    gradients = _gradients_per_round(method, samples) * _cohort_size(method, clients)
    return gradients * _gradient_speed(plan, method, data, min(clients, 10), samples)


def _client_and_sample_counts(document: Mapping[str, Any], data: NominalDataset) -> tuple[int, float]:
    """Return the number of clients, and the total number of their training samples."""
    cut = document["partition"]
    samples: float = data.train + (data.test if cut.get("pool") else 0)
    share = 1 - (cut.get("test", 0.2) if cut.get("test_from", "own") == "own" else 0) - cut.get("validation", 0.1)
    clients = cut.get("clients") or sum(cut.get("sizes", ())) or data.users
    if cut["kind"] == "clusters" and cut.get("per_class"):
        each = cut["per_class"] if isinstance(cut["per_class"], list) else [cut["per_class"]] * len(cut["sizes"])
        samples = sum(n * c * k for n, c, k in zip(cut["sizes"], cut["classes"], each, strict=True))
    return clients, min(samples * share, clients * cut.get("max_train_per_client", math.inf))


def _cohort_size(method: Method, clients: int) -> float:
    """Return the number of clients that take part in a round."""
    if method.setting.pooled:
        return clients
    sampler = method.setting.sampler
    fixed = getattr(sampler, "clients", None)
    return float(fixed or clients * getattr(sampler, "fraction", getattr(sampler, "probability", 1.0)))


def _gradients_per_round(method: Method, samples: float) -> float:
    """Return the number of sample gradients that a client computes in a round."""
    local = method.setting.local
    size = 20 if local.batch_size == "full" else local.batch_size
    sized = local if local.batch_size == "full" else local.with_(batch_size=size)
    try:
        counted = _count_gradients(method.setting.method, sized, 2 * size)
    except FedloomError:
        counted = 2 * size * max(1, local.epochs)
    fixed = local.steps is not None or method.algorithm in FIXED_WORK_METHODS
    return counted * (1 if fixed else samples / (2 * size))


def _count_gradients(algorithm: object, local: LocalSGD, samples: int) -> float:
    """Return the number of sample gradients that a client computes in a round.

    The count is cached for equal arguments.
    """
    key = repr((algorithm, local, samples))  # optimizer options are not hashable
    if key not in _SECONDS_OF_ROUND:
        _SECONDS_OF_ROUND[key] = _try_gradients(algorithm, local, samples)
    return _SECONDS_OF_ROUND[key]


def _try_gradients(algorithm: object, local: LocalSGD, samples: int) -> float:
    fed = fl.partitions.iid(clients=2, test=0.0, validation=0.0)(_random_federation((4,), 3, 2 * samples), 0)
    setting = Setting(algorithm=algorithm, model=MLP(hidden=(3,)), rounds=1, local=local)
    return samples_per_round(setting, fed) / 2


@cache
def _seconds_per_gradient(spec: ModelSpec, shape: tuple[int, ...], classes: int, batch: int, clients: int) -> float:
    """Return the processor time in seconds per sample gradient.

    The measured time is the time of the second of two rounds with two steps each.
    """
    data = _random_federation(shape, classes, clients * 2 * batch)
    fed = fl.partitions.iid(clients=clients, test=0.0, validation=0.0)(data, 0)
    local = LocalSGD(batch_size=batch, lr=1e-4)
    setting = Setting(algorithm=FedAvg(), model=spec, local=local, rounds=2)
    second_round = measure_rounds(setting, fed, 2, time.process_time).rounds[1]
    return (second_round.seconds or 0.0) / second_round.samples


def _gradient_speed(plan: Experiment, method: Method, data: NominalDataset, clients: int, samples: float) -> float:
    wanted, model = method.setting.local.batch_size, plan.common.model
    batch = int(samples) if wanted == "full" else wanted
    heavy = len(data.shape) == 3 and not isinstance(model, MLP) and plan.model_kind != "softmax"
    size = max(1, min(batch, int(samples), MAX_TIMED_BATCH if heavy else batch))
    return _seconds_per_gradient(model, data.shape, 10 if heavy else data.classes, size, 1 if heavy else clients)


def _random_federation(shape: tuple[int, ...], classes: int, samples: int) -> Dataset:
    x = torch.rand(samples, *shape, generator=generator(0, purpose="estimate"))
    names = tuple(str(c) for c in range(classes))
    return Dataset("random", x, torch.arange(samples) % classes, "classification", names)


def recipe_rows(
    recipes: Mapping[str, Recipe], scale: Scale, results: Path, data_dir: Path | None, *, estimated: bool = False
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each recipe: its name, title, data, state, declared time limit, and measured time.

    If a recipe has not been run, the time is an estimate for this machine if ``estimated`` is true. To make estimates,
    one model of each kind is timed once.
    """
    missing: dict[str, bool] = {}
    for name, recipe in recipes.items():
        needed = {
            d["data"]["source"]: parse_closed_document(first_candidate_experiment(d), name).source
            for d in recipe.make_documents(scale).values()
        }
        for source in needed.keys() - missing.keys():
            missing[source] = not _is_available(needed[source], data_dir)
        data = ", ".join(f"{source}{' (data missing)' if missing[source] else ''}" for source in sorted(needed))
        budget, summary = recipe.budget(scale), read_summary(results, name, scale)
        stated = "-" if budget is None else f"{format_option(budget)} min"
        if summary is not None and summary.complete and not is_earlier_version(recipe, summary):
            time_spent = f"took {format_duration(summary.minutes)}, {len(summary.seeds)} seeds"
        else:
            time_spent = f"about {format_duration(estimate_minutes(recipe, scale))}" if estimated else "-"
        yield name, recipe.paper.title, data, recipe_state_phrase(recipe, summary), stated, time_spent


def store_estimates(recipes: Mapping[str, Recipe], results: Path, data_dir: Path | None) -> Path:
    """Estimate the requirements of recipes that have not been run, and write the estimates to a file.

    Return the path of this file.

    The file is in the folder of the summaries. The estimates cover the full scale of all recipes that have no laptop
    scale.
    """
    estimates = {}
    for name, recipe in recipes.items():
        if recipe.budget("laptop") is None and last_summary(recipe, results) is None:
            sources = {
                d["data"]["source"]: parse_closed_document(first_candidate_experiment(d), name).source
                for d in recipe.make_documents("full").values()
            }
            missing = sorted(source for source, one in sources.items() if not _is_available(one, data_dir))
            estimates[name] = RecipeNeed(
                round_significant(estimate_minutes(recipe, "full"), 2) or 0.0, missing
            )._asdict()
    make_folder(results)
    write_atomic(results / ESTIMATES_FILE, (json.dumps(estimates, indent=1) + "\n").encode())
    return results / ESTIMATES_FILE


def _is_available(source: Source, data_dir: Path | None) -> bool:
    try:
        source.load(data_dir)
    except DataError:
        return False
    return True
