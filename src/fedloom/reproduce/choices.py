"""Values that a recipe leaves to be chosen: every candidate is run with one seed, the best on validation data is taken.

``choose = {eta = [0.01, 0.1]}`` in a ``[[method]]`` names the candidates (a key of `local` as ``"local.lr"``); several
keys make a grid. The score is the last round's validation accuracy (or the first metric that leads a report), the mean
over the models that the method has. A ``[choose]`` table may shorten the ``rounds`` of these runs, and ``once = true``
lets the first variant choose for all. Test data play no part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.report.naming import LEADING
from fedloom.report.numbers import curve
from fedloom.report.reading import Key, Run, read_runs
from fedloom.reproduce.recipe import label_of, merged
from fedloom.running.files import make_folder, write_atomic

TRIALS = "choose"
"""Folder beside the run directories of the variants: for each, what was chosen and the runs behind it."""


def candidates(method: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Text and method table of every candidate; one with empty text if there is nothing to choose."""
    plain = {k: v for k, v in method.items() if k != "choose"}
    grid = method.get("choose", {})
    found = []
    for combination in product(*grid.values()):
        chosen = dict(zip(grid, combination, strict=True))
        table = plain
        for key, value in chosen.items():
            outer, dot, inner = key.partition(".")
            table = merged(table, {outer: {inner: value}} if dot else {outer: value})
        found.append((", ".join(f"{k} = {v}" for k, v in chosen.items()), table))
    return found


def first(document: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with the first candidate of every method."""
    rest = {k: v for k, v in document.items() if k != "choose"}
    return rest | {"method": [candidates(m)[0][1] for m in document["method"]]}


def open_methods(document: Mapping[str, Any], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Methods of which something is to be chosen and has not been."""
    return [m for m in document["method"] if len(candidates(m)) > 1 and label_of(m) not in known]


def trial(document: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment that runs every candidate of a method with the first seed."""
    options = document.get("choose", {})
    rest = {k: v for k, v in document.items() if k != "choose"}
    methods = [table | {"label": text} for text, table in candidates(method)]
    return rest | {"method": methods, "seeds": document["seeds"][:1], "rounds": options.get("rounds", rest["rounds"])}


def trials_of(document: Mapping[str, Any], variant: str) -> str:
    """Name of the folder of a variant's trials."""
    return "once" if document.get("choose", {}).get("once") else variant


def best(folder: Path) -> dict[str, Any]:
    """The winner of a finished trial: its text, and the score of every candidate."""
    run = read_runs([folder])[0]
    scores = {label: _score(run, label) for label in run.methods}
    finite = {label: score for label, score in scores.items() if math.isfinite(score)}
    winner = max(finite, key=lambda label: finite[label]) if finite else next(iter(scores))
    return {"chosen": winner, "scores": {k: round(v, 6) if math.isfinite(v) else None for k, v in scores.items()}}


def _score(run: Run, label: str) -> float:
    record = next(r for r in run.summary.runs if r.method == label)
    if record.status != "done":
        return math.nan
    for metric in LEADING:
        last = [
            curve(run, Key(label, record.seed, model, "validation", metric), "mean").last
            for model in ("global", "personal")
        ]
        known = [value for value in last if math.isfinite(value)]
        if known:
            return float(np.mean(known))
    return math.nan


def chosen(document: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The experiment with what was chosen; the first candidate where nothing was."""
    methods: list[dict[str, Any]] = []
    for method in document["method"]:
        options = dict(candidates(method))
        text = str(known.get(label_of(method), {}).get("chosen"))
        methods.append(options.get(text, next(iter(options.values()))))
    return {k: v for k, v in document.items() if k != "choose"} | {"method": methods}


def read_choices(folder: Path) -> dict[str, Any]:
    """What has been chosen so far, of the trials in a folder."""
    file = folder / "choices.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def write_choices(folder: Path, known: Mapping[str, Any]) -> None:
    """``choices.json`` in the folder of the trials."""
    make_folder(folder)
    write_atomic(folder / "choices.json", json.dumps(known, indent=1).encode())
