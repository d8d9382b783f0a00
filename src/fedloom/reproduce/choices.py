"""Settings that a recipe leaves to be chosen, by `fedloom.tune`: every candidate is tried, with one seed.

``choose = {eta = [0.01, 0.1]}`` in a ``[[method]]`` names the candidates (a key of `local` as ``"local.lr"``); several
keys make a grid, which is the whole search space of the method. The score is the last round's validation accuracy (or
the first metric by which `fedloom.tune` goes), the mean over the models that the method has. A ``[choose]`` table may
shorten the ``rounds`` of these trials, and ``once = true`` lets the first variant choose for all. Test data play no
part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import RunDirError
from fedloom.reproduce.recipe import label_of, merged
from fedloom.storage.files import write_atomic

if TYPE_CHECKING:
    from fedloom.tune.plan import Found

TRIALS = "choose"
"""Folder beside the run directories of the variants: for each, the directory of its search for settings."""
CHOSEN = "chosen.json"
"""In the directory of a search: what was chosen, and the score of every candidate."""


def candidates(method: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Text and method table of every candidate; one with empty text if there is nothing to choose."""
    plain = {k: v for k, v in method.items() if k != "choose"}
    grid = method.get("choose", {})
    found = []
    for combination in product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        table = plain
        for key, value in values.items():
            outer, dot, inner = key.partition(".")
            table = merged(table, {outer: {inner: value}} if dot else {outer: value})
        found.append((_text(grid, values), table))
    return found


def first(document: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with the first candidate of every method."""
    return chosen(document, {})


def open_methods(document: Mapping[str, Any], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Methods of which something is to be chosen and has not been."""
    return [m for m in document["method"] if len(candidates(m)) > 1 and label_of(m) not in known]


def rounds_of(document: Mapping[str, Any], method: Mapping[str, Any]) -> int:
    """Rounds of every trial of a method."""
    return int(method.get("rounds", document.get("choose", {}).get("rounds", document["rounds"])))


def search_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment file of the search: the methods of which something is to be chosen, and their grids."""
    methods = open_methods(document, {})
    grids: dict[str, dict[str, Any]] = {label_of(m): m["choose"] for m in methods}
    # a method may be called as another one's algorithm is: its grid is not the other one's
    space = {label_of(m): {key: [] for key in grids.get(m["algorithm"], {})} | m["choose"] for m in methods}
    tune = {
        "trials": max(len(candidates(m)) for m in methods),
        "rounds": document.get("choose", {}).get("rounds", document["rounds"]),
        "seeds": document["seeds"][:1],
        "model": "mean",
        "prune": False,
        "equal_work": False,
        "defaults": False,
        "space": space,
    }
    plain = [{k: v for k, v in m.items() if k != "choose"} for m in methods]
    return {k: v for k, v in document.items() if k != "choose"} | {"method": plain, "tune": tune}


def trials_of(document: Mapping[str, Any], variant: str) -> str:
    """Name of the folder of a variant's trials."""
    return "once" if document.get("choose", {}).get("once") else variant


def chosen(document: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The experiment with what was chosen; the first candidate where nothing was."""
    methods: list[dict[str, Any]] = []
    for method in document["method"]:
        options = dict(candidates(method))
        text = str(known.get(label_of(method), {}).get("chosen"))
        methods.append(options.get(text, next(iter(options.values()))))
    return {k: v for k, v in document.items() if k != "choose"} | {"method": methods}


def check_folder(folder: Path) -> None:
    """Refuse trials that are no search of `fedloom.tune`.

    Raises:
        RunDirError: they are of a version that ran a recipe's candidates as experiments.
    """
    if (folder / "choices.json").exists():
        raise RunDirError(
            f"{folder} holds trials of an earlier version, which chose settings without 'fedloom tune'; delete it to "
            "have them chosen anew, or choose another --out"
        )


def read_choices(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen so far by the search in a folder: per method the winner, and the score of every candidate.

    A method whose candidates are others by now is left out.
    """
    file = folder / CHOSEN
    known = dict(json.loads(file.read_text())) if file.exists() else {}
    there = {label_of(m): {text for text, _ in candidates(m)} for m in document["method"]}
    return {label: choice for label, choice in known.items() if choice["scores"].keys() == there.get(label)}


def write_choices(folder: Path, document: Mapping[str, Any], found: Iterable[Found]) -> None:
    """Write what a search gave beside what was known; the first candidate wins where no trial completed."""
    known = read_choices(folder, document)
    methods = {label_of(m): m for m in document["method"]}
    for study, trials, best in found:
        method = methods[study.method.label]
        values = {_text(method["choose"], t.params): t.value for t in trials}
        scores = {text: values[text] for text, _ in candidates(method)}
        known[study.method.label] = {
            "chosen": next(iter(scores)) if best is None else _text(method["choose"], best.params),
            "scores": {text: None if value is None else round(value, 6) for text, value in scores.items()},
        }
    write_atomic(folder / CHOSEN, json.dumps(known, indent=1).encode())


def _text(grid: Iterable[str], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {values[key]}" for key in grid)
