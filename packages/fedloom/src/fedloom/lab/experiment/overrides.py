"""Overrides: command-line changes to the values, methods and rounds of an experiment file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedloom.analyses import ANALYSES, Analysis
from fedloom.errors import ConfigError
from fedloom.hints import unknown_name_error
from fedloom.rundir import get_label
from fedloom.values import FACTOR_PATTERN, check_is_table

BARE_TEXT_PATTERN = re.compile(rf"[A-Za-z_][\w./:-]*|{FACTOR_PATTERN}")
"""Pattern of text accepted without TOML quotes, because a shell would remove the quotes."""
KIND_KEYS = ("kind", "source")
"""Keys that determine which other keys a table may have."""


def apply_overrides(
    document: Mapping[str, object],
    where: str,
    values: Sequence[str] = (),
    methods: Sequence[str] = (),
    rounds: int | None = None,
    *,
    refit: bool = False,
) -> dict[str, Any]:
    """Apply command-line changes to an experiment document and return the changed document.

    The result is checked later, by `fedloom.lab.experiment.parse`.

    Args:
        document: content of an experiment file.
        where: name of the file, for error messages.
        values: changes of the form ``table.key=value``, ``key=value`` or ``method.LABEL.key=value``, with the value in
            TOML syntax. If a change specifies a different ``kind`` or ``source``, the file's keys are first removed
            from that table. If a change sets epochs, the file's steps are removed, and vice versa. The order of the
            changes matters only if several changes set the same key.
        methods: labels or algorithms of the methods to keep. If empty, all methods are kept.
        rounds: number of rounds for every method, which overrides the file.
        refit: True to train on all samples with the first seed and without held-out test samples, as after
            cross-validation.

    Raises:
        ConfigError: a change has invalid syntax, or names a method that does not exist. The message names the key.
    """
    changed: dict[str, Any] = {**document}
    methods_before = changed.get("method")
    entries = (
        [{**m} if isinstance(m, Mapping) else m for m in methods_before] if isinstance(methods_before, list) else []
    )
    if entries:
        changed["method"] = entries
    changed_keys = [text.partition("=")[0].strip() for text in values]
    depths = [(key.count("."), key.rpartition(".")[2] not in KIND_KEYS) for key in changed_keys]
    for _, text in sorted(
        zip(depths, values, strict=True), key=lambda pair: pair[0]
    ):  # outer tables first, then by kind
        _set_value(changed, text, where, changed_keys)
    named = [m for m in entries if isinstance(m, dict)]
    if methods:
        names = list(dict.fromkeys(name for m in named for name in (get_label(m), str(m.get("algorithm")))))
        for name in methods:
            if name not in names:
                raise unknown_name_error("method", name, names, f"{where}: --method")
        changed["method"] = [m for m in named if {get_label(m), m.get("algorithm")} & {*methods}]
        grid, kept = changed.get("grid"), {get_label(m) for m in changed["method"]}
        if isinstance(grid, dict) and isinstance(grid.get("method"), dict):
            changed["grid"] = {**grid, "method": {k: v for k, v in grid["method"].items() if k in kept}}
    if rounds is not None:
        changed["rounds"] = rounds
        for m in named:
            m.pop("rounds", None)
    return _remove_test_parts(changed, where, changed_keys) if refit else changed


def _remove_test_parts(document: dict[str, Any], where: str, explicit: Collection[str]) -> dict[str, Any]:
    """Return the document, changed so that no test samples are held out.

    Validation samples are held out only if models are recalibrated on them, early stopping monitors them, or their
    fraction is one of the ``explicit`` command-line changes.

    Raises:
        ConfigError: an explicit change holds out test samples.
    """
    if held_out := {"partition.test", "partition.folds"} & {*explicit}:
        raise ConfigError(f"{where}: --refit trains on all samples. Omit --refit or --set {min(held_out)}")
    names = ("partition", "early_stop")
    tables = {name: check_is_table(document.get(name, {}), f"{where}: [{name}]") for name in names}
    partition = {k: v for k, v in tables["partition"].items() if k != "folds"} | {"test": 0.0}
    stop, methods = tables["early_stop"], document.get("method")
    monitored = bool(stop) and stop.get("part", "validation") == "validation"
    entries = [document, *(methods if isinstance(methods, list) else ())]
    tasks = [entry.get("task") for entry in entries if isinstance(entry, Mapping)]
    calibrated = any(isinstance(task, Mapping) and task.get("calibrate") for task in tasks)
    if not (monitored or calibrated or "partition.validation" in explicit):
        partition["validation"] = 0.0
    seeds = document.get("seeds", [0])
    first = seeds[:1] if isinstance(seeds, list) else seeds
    analyses = [entry for entry in document.get("analysis", ()) if not _needs_test_samples(entry)]
    return {**document, "partition": partition, "analysis": analyses, "seeds": first}


def _needs_test_samples(entry: object) -> bool:
    """Return True if an analysis needs a run's test samples, which do not exist after a refit.

    Sum-based analyses use all rows instead.
    """
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    return not (kind in ANALYSES and ANALYSES[str(kind)].answer is not Analysis.answer)


def _set_value(document: dict[str, Any], text: str, where: str, changed_keys: Collection[str]) -> None:
    key, equals, value = text.partition("=")
    key, parts = key.strip(), [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {text!r} must be key=value, for example --set local.lr=0.1")
    setting, place = _parse_value(key, value.strip()), document
    if parts[0] == "method":
        place, parts = _find_method_table(document, parts, text, where)
    for part in parts[:-1]:
        place[part] = {**check_is_table(place.get(part, {}), f"{where}: --set {key}: [{part}]")}
        place = place[part]
    last = parts[-1]
    if last in KIND_KEYS and len(parts) > 1 and place.get(last, setting) != setting:
        place.clear()
    if parts[-2:-1] == ["local"] and last in ("epochs", "steps"):
        other = "steps" if last == "epochs" else "epochs"
        if f"{key.rpartition('.')[0]}.{other}" not in changed_keys:
            place.pop(other, None)
    place[last] = setting


def _find_method_table(
    document: Mapping[str, Any], parts: list[str], text: str, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the method's table named in a dotted key, and the rest of the key."""
    labels = {get_label(m): m for m in document.get("method", ()) if isinstance(m, dict)}
    if len(parts) < 3:
        raise ConfigError(f"--set {text!r}: method keys have the form method.LABEL.key. Labels: {', '.join(labels)}")
    if parts[1] not in labels:
        raise unknown_name_error("method", parts[1], labels, f"{where}: --set {text}")
    return labels[parts[1]], parts[2:]


def _parse_value(key: str, text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if BARE_TEXT_PATTERN.fullmatch(text):
            return text
        raise ConfigError(f"--set {key}: {text!r} is not a TOML value: {error}") from None
