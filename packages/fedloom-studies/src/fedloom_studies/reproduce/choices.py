"""Search for settings that a recipe leaves open, using `fedloom.lab.tune`.

Every candidate is tried with one or several seeds.

``choose = {eta = [0.01, 0.1]}`` in a ``[[method]]`` lists the candidates. A key of ``local`` is written as
``"local.lr"``. Several keys form a grid, which is the method's entire search space. The score is the validation
accuracy in the last round, averaged over the method's models. If there is no accuracy, the score is the first metric
that `fedloom.lab.tune` uses. With ``model = "auto"``, only the personal model is scored if there is one. A ``[choose]``
table may reduce the ``rounds`` of these trials, and average the score over the first ``seeds``. With ``once = true``,
the choice for the first variant applies to all variants. With ``metric = "accuracy/weighted"``, the score is the value
that decides the recipe's claims. Test data are never used for this. With ``extend = K``, a grid is extended up to K
times if its best value lies at an edge; the rule is the same for all methods. The next value is the edge value times
its ratio to its neighbor. With ``edges = "every"``, the grid is extended in every key whose best value lies at its
edge, and combinations of the best and the next values are tried. Otherwise, only the grid of the first such key is
extended, with all values of the other keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import ConfigError
from fedloom.formats import format_significant, round_significant
from fedloom.lab.experiment import parse
from fedloom.rundir import get_label
from fedloom.storage import write_atomic
from fedloom_studies.reproduce.recipe import merge_tables
from fedloom_studies.store import read_document

if TYPE_CHECKING:
    from fedloom.lab.tune import SearchResult

TRIALS_FOLDER = "choose"
"""Folder, next to the variants' run directories, with one directory for each variant's search for settings."""
CHOICE_FILE = "chosen.json"
"""File in the directory of a search, with the choices and the score of every candidate."""


def method_candidates(method: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each candidate's text, and the method table that results from it.

    If the recipe leaves no setting open, a single candidate with an empty text is returned.
    """
    grid = method.get("choose", {})
    every = [dict(zip(grid, combination, strict=True)) for combination in product(*grid.values())]
    return [(_values_text(grid, values), _replace_values(method, values)) for values in every]


def _replace_values(method: Mapping[str, object], values: Mapping[str, object]) -> dict[str, Any]:
    """Return a method table with the chosen values inserted.

    If a key contains a dot, the part before the dot is the name of a table.
    """
    table = {k: v for k, v in method.items() if k != "choose"}
    for key, value in values.items():
        outer, dot, inner = key.partition(".")
        table = merge_tables(table, {outer: {inner: value}} if dot else {outer: value})
    return table


def iterate_searches(folder: Path, document: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield, on demand, the folder and the document of the search for settings, then the same for each extension."""
    yield folder, dict(document)
    choices = read_choices(folder, document)
    for k in range(1, document.get("choose", {}).get("extend", 0) + 1):
        further = extend_grids(document, choices)
        if not further:
            return
        for part, searched in enumerate(further):
            place = folder.with_name(f"{folder.name}@{k}" + f".{part}" * bool(part))
            yield place, searched
            choices = _better_choices(choices, read_choices(place, searched))


def extend_grids(document: Mapping[str, Any], choices: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return documents that extend the grids of methods whose best value lies at an edge.

    There is either a single document, or one for each key whose grid can be extended. The grids of different documents
    have no candidates in common.
    """
    every = document.get("choose", {}).get("edges", "first") == "every"
    parts: list[list[dict[str, Any]]] = []
    for method in document["method"]:
        choice = choices.get(get_label(method), {})
        edges = edge_keys(choice["chosen"], choice["scores"]) if choice else []
        further = _next_edge_values(document, method, choice, edges if every else edges[:1])
        if not every:
            grids = [{**method["choose"], key: [value]} for key, value in further.items()]
        else:
            best = {key: [value] for key, value in _chosen_values(method, choice).items()} if further else {}
            grids = []
            for key, value in further.items():
                grids.append({**best, key: [value]})
                best[key] = [*best[key], value]
        for part, grid in enumerate(grids):
            parts += [[]] * (part == len(parts))
            parts[part] = [*parts[part], {**method, "choose": grid}]
    return [{**document, "method": methods} for methods in parts]


def _next_edge_values(
    document: Mapping[str, Any], method: Mapping[str, Any], choice: Mapping[str, Any], edges: Iterable[str]
) -> dict[str, Any]:
    """Return the next value of each key whose best value lies at an edge of its grid, if the method accepts it."""
    extended = {}
    for key in edges:
        values, tried = _parse_candidates(choice["chosen"], choice["scores"])
        ordered = sorted({size for v in tried if (size := _value_size(v.get(key))) is not None})
        edge, beside = (
            (ordered[0], ordered[1]) if _value_size(values[key]) == ordered[0] else (ordered[-1], ordered[-2])
        )
        size, like = (round_significant(edge * edge / beside, 3) or 0.0) if beside else edge, method["choose"][key][0]
        next_value = f"{format_significant(size, 6)}x" if isinstance(like, str) else type(like)(size)
        if size != edge and _accepts_settings(document, _replace_values(method, {**values, key: next_value})):
            extended[key] = next_value
    return extended


def _chosen_values(method: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chosen values, in the order of the method's grid.

    If no trial was completed, the values of the first candidate are used.
    """
    by_key = choice.get("values") or {key: values[0] for key, values in method["choose"].items()}
    return {key: by_key[key] for key in method["choose"]}


def _accepts_settings(document: Mapping[str, object], method: Mapping[str, object]) -> bool:
    """Return True if a method accepts these settings."""
    try:
        parse({**{k: v for k, v in document.items() if k != "choose"}, "method": [method]}, "candidates")
    except ConfigError:
        return False
    return True


def edge_keys(chosen: str, scores: Iterable[str]) -> list[str]:
    """Return the numeric keys whose chosen value is the smallest or the largest of several candidates."""
    values, tried = _parse_candidates(chosen, scores)
    edges = []
    for key, value in values.items():
        sizes = {size for v in tried if (size := _value_size(v.get(key))) is not None}
        if len(sizes) > 1 and _value_size(value) in (min(sizes), max(sizes)):
            edges.append(key)
    return edges


def _value_size(value: Any) -> float | None:
    """Return the size of a number or of a multiple such as ``0.5x``, or None if the value is neither."""
    if isinstance(value, str):
        return float(value[:-1]) if re.fullmatch(r"\d*\.?\d+(?:e-?\d+)?x", value) else None
    return None if value is None or isinstance(value, bool) else float(value)


def count_beyond_edges(choice: Mapping[str, object]) -> int:
    """Return the number of candidates beyond the original grid's edges that were tried."""
    return _count_trials(choice)["beyond"]


def _parse_candidates(chosen: str, scores: Iterable[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parse candidates from text and return their values."""

    def read(text: str) -> dict[str, Any]:
        pairs = (part.split(" = ", 1) for part in text.split(", ") if " = " in part)
        return {key: _parse_value(value) for key, value in pairs}

    return read(chosen), [read(text) for text in scores]


def _parse_value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _better_choices(choices: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the better of two choices for every method (the earlier one if they are tied), with the scores of both."""
    joined = dict(choices)
    for label, new in more.items():
        old = choices[label]
        sign = 1 if new["higher"] else -1
        scored = [c for c in (old, new) if c["scores"][c["chosen"]] is not None]
        best = max(scored, key=lambda c: sign * c["scores"][c["chosen"]], default=old)
        trials = {**_count_trials(old), "beyond": _count_trials(old)["beyond"] + len(new["scores"])}
        joined[label] = {**best, "scores": {**old["scores"], **new["scores"]}, "trials": trials}
    return joined


def _count_trials(choice: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of candidates that were tried on the original grid and beyond its edges."""
    counts: dict[str, int] = choice.get("trials", {"grid": len(choice["scores"]), "beyond": 0})
    return counts


def choices_so_far(folder: Path, document: Mapping[str, object]) -> dict[str, Any]:
    """Return the choices made by all searches for a document so far, including extensions (see `read_choices`)."""
    choices: dict[str, Any] = {}
    for place, searched in iterate_searches(folder, document):
        choices = _better_choices(choices, read_choices(place, searched)) if choices else read_choices(place, searched)
    return choices


def first_candidate_experiment(document: Mapping[str, object]) -> dict[str, Any]:
    """Return the experiment with the first candidate of every method."""
    return chosen_experiment(document, {})


def open_methods(document: Mapping[str, Any], choices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the methods that have open settings."""
    return [m for m in document["method"] if m.get("choose") and get_label(m) not in choices]


def count_rounds(document: Mapping[str, Any], method: Mapping[str, Any]) -> int:
    """Return the number of rounds of a method's trials."""
    return int(method.get("rounds", document.get("choose", {}).get("rounds", document["rounds"])))


def make_search_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment document of the search, which contains the methods with open settings and their grids."""
    methods = open_methods(document, {})
    grids: dict[str, dict[str, Any]] = {get_label(m): m["choose"] for m in methods}
    # if a label equals another method's algorithm, the search must not apply the grid to the other method
    space = {get_label(m): {key: [] for key in grids.get(m["algorithm"], {})} | m["choose"] for m in methods}
    tune = {
        "trials": max(len(method_candidates(m)) for m in methods),
        "rounds": document.get("choose", {}).get("rounds", document["rounds"]),
        "seeds": document["seeds"][: document.get("choose", {}).get("seeds", 1)],
        "model": document.get("choose", {}).get("model", "mean"),
        **({"metric": metric} if (metric := document.get("choose", {}).get("metric")) else {}),
        "prune": False,
        "equal_work": False,
        "default_spaces": False,
        "space": space,
    }
    plain = [{k: v for k, v in m.items() if k != "choose"} for m in methods]
    return {k: v for k, v in document.items() if k != "choose"} | {"method": plain, "tune": tune}


def trials_folder_name(document: Mapping[str, Any], variant: str) -> str:
    """Return the name of the folder that holds the trials of a variant."""
    return "once" if document.get("choose", {}).get("once") else variant


def chosen_experiment(document: Mapping[str, Any], choices: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the experiment with the chosen settings inserted.

    For a method without a choice, its first candidate is used.
    """
    methods: list[dict[str, Any]] = []
    for method in document["method"]:
        options, choice = dict(method_candidates(method)), choices.get(get_label(method), {})
        extended = _replace_values(method, choice["values"]) if choice.get("values") else next(iter(options.values()))
        methods.append(options.get(str(choice.get("chosen")), extended))
    return {k: v for k, v in document.items() if k != "choose"} | {"method": methods}


def read_choices(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices stored by a search in a folder: each method's winner, and the scores of all candidates.

    Methods whose candidates have changed since then are omitted.
    """
    choices = read_document(folder / CHOICE_FILE, dict)
    candidates_by_label = {get_label(m): {text for text, _ in method_candidates(m)} for m in document["method"]}
    return {
        label: choice
        for label, choice in choices.items()
        if choice.get("scores", {}).keys() == candidates_by_label.get(label)
    }


def write_choices(folder: Path, document: Mapping[str, Any], findings: Iterable[SearchResult]) -> None:
    """Add the results of a search to its file of choices.

    If no trial of a method was completed, its first candidate wins.
    """
    choices = read_choices(folder, document)
    methods = {get_label(m): m for m in document["method"]}
    for study, trials, best in findings:
        method = methods[study.method.label]
        values = {_values_text(method["choose"], t.params): t.value for t in trials}
        scores = {text: values[text] for text, _ in method_candidates(method)}
        choices[study.method.label] = {
            "chosen": next(iter(scores)) if best is None else _values_text(method["choose"], best.params),
            "values": {} if best is None else {key: best.params[key] for key in method["choose"]},
            "higher": study.search.higher,
            "scores": {text: None if value is None else round(value, 6) for text, value in scores.items()},
            "trials": {"grid": len(scores), "beyond": 0},
        }
    write_atomic(folder / CHOICE_FILE, json.dumps(choices, indent=1).encode())


def _values_text(grid: Iterable[str], values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} = {values[key]}" for key in grid)
