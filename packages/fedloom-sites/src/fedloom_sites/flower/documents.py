"""Text that describes an app's method and choices to its nodes, and checks for choices that an app does not support."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from torch import nn

from fedloom.algorithms import ALGORITHMS, REGISTRY
from fedloom.engine import Setting
from fedloom.engine.setting import Evaluate
from fedloom.errors import ConfigError, Refused
from fedloom.hints import unknown_name_error
from fedloom.values import Value, dump_value, fields_of

STRATEGY_FIELDS = [
    name
    for name in Setting.model_fields
    if name not in ("algorithm", "model", "rounds", "task", "attack", "devices", "schedule")
]
"""Fields of a setting that a strategy accepts: all fields except those that belong to the app or to simulations."""
REPLACEMENT_HINTS = tomllib.loads((files("fedloom_sites.flower") / "cures.toml").read_text(encoding="utf-8"))
"""Replacements for Flower's strategies and their options, and for choices that have no effect in an app."""
SCORED_BY_NODES_HINT = "nodes score their own parts. Compute it there, with personal_model(context)"
UNREAD_CHOICES = {
    "engine": REPLACEMENT_HINTS["unread"]["engine"],
    "evaluate": dict.fromkeys(
        sorted(Evaluate.model_fields.keys() - {"select_on", "parts", "clients"}), SCORED_BY_NODES_HINT
    )
    | REPLACEMENT_HINTS["unread"]["evaluate"],
}
"""Fields of choices that have no effect in an app, with advice for each of them."""
START_ARGUMENTS = ("initial_arrays", "num_rounds", "timeout", "train_config", "evaluate_config", "evaluate_fn")
"""Arguments of `Strategy.start`."""
CLIPPING_KEY = "clipping_norm"
"""Config key that Flower's strategies for differential privacy use to make a mod clip."""
PRIVACY_HINT = (
    "instead of Flower's DifferentialPrivacy strategies, clip and add noise with an upload "
    "transform: upload_transform={'kind': 'gaussian-noise', 'clip': 1.0, 'sigma': 1.0}"
)
"""Advice on what to use instead of a strategy that wraps one of fedloom's strategies."""


def document_of(algorithm: object, choices: Mapping[str, Any]) -> str:
    """Return a method as JSON for the nodes, with its options and the choices of a run.

    Raises:
        ConfigError: the method is not in the registry or is one of Flower's strategies, a choice belongs elsewhere, or
            a value cannot be written as JSON.
    """
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm must be a name, such as Strategy('ditto', Net(), lam=1.0), got {algorithm!r:.80}")
    if algorithm not in REGISTRY:
        if cure := REPLACEMENT_HINTS["strategies"].get(algorithm.lower().replace("-", "").replace("_", "")):
            raise ConfigError(f"{algorithm!r} is one of Flower's own strategies. Use {cure}")
        raise unknown_name_error("algorithm", algorithm, REGISTRY)
    for name, value in choices.items():
        if name not in (*STRATEGY_FIELDS, *fields_of(REGISTRY[algorithm])) and (cure := _replacement_hint(name, value)):
            raise unknown_name_error("key", name, (), algorithm, cure)
    for part, cures in UNREAD_CHOICES.items():
        table = _plain_value(choices.get(part))
        for name in cures.keys() & (table if isinstance(table, Mapping) else ()):
            raise ConfigError(f"{part}: {name!r} has no effect in an app: {cures[name]}")
    try:
        return json.dumps(_plain_value({"algorithm": algorithm, **choices}))
    except TypeError as error:
        raise ConfigError(f"a strategy accepts names, numbers, tables and values of fedloom: {error}") from error


def _replacement_hint(key: str, value: object) -> str:
    """Return a hint about what replaces an option of Flower's strategies, or an argument of `Strategy.start`."""
    if key in REPLACEMENT_HINTS["options"]:
        return f"{key} is an option of Flower's own strategies. Use {REPLACEMENT_HINTS['options'][key]}"
    if key in START_ARGUMENTS:
        return f"{key} is an argument of start: strategy.start(grid, arrays, {key}=...)"
    cures = [cures[key] for cures in UNREAD_CHOICES.values() if key in cures]
    return f"it has no effect in an app: {cures[0]}" if cures else ""


NO_CHOICES = {
    "attack": ("attacks are simulated", "deploy-attack", "leave {attack} out"),
    "devices": ("real nodes take their own time", "deploy-devices", "leave {devices} out"),
    "schedule": ("real nodes take their own time", "deploy-schedule", "leave {schedule} out"),
    "early_stop": (
        "a simulation looks at its own rounds",
        "deploy-early-stop",
        "leave {early_stop} out, and choose the rounds",
    ),
    "task": ("nodes have the loss and the metrics", "app-task", "leave {task} out, and pass the loss to Local"),
    "rounds": ("Flower counts rounds", "app-rounds", "pass the number of rounds to start, as num_rounds"),
}
"""Choices of a simulation that an app does not support, each with the reason, the rule, and how to fix it."""


def resolved_document(setting: Setting) -> str:
    """Return a job's setting as JSON for its nodes, with numbers in place of all that depends on the federation."""
    name = next(name for name, kind in ALGORITHMS.items() if kind is type(setting.method))
    parts = [
        name for name in STRATEGY_FIELDS if name not in ("aggregator", "client_weights")
    ]  # only the server needs these two
    choices = {part: value for part in parts if (value := getattr(setting, part)) is not None}
    return json.dumps({"algorithm": name, **dump_value(setting.method), **_plain_value(choices)})


def read_setting(document: str, model: nn.Module, rounds: int, **more: object) -> Setting:
    """Return the setting that a document describes.

    Raises:
        ConfigError: a value is invalid.
        Refused: the document refers to code, which a message must never do.
    """
    content = json.loads(document)
    for text in _texts_in_value(content):
        if ":" in text:
            raise Refused(f"{text!r} names code, but a strategy accepts only the names of fedloom's own parts")
    _check_choices(content)
    tables = {name: table.keys() for name, table in Setting.tables().items() if name in STRATEGY_FIELDS}
    places = Setting.places(
        tables=tables,
        plain=STRATEGY_FIELDS,
        keys=tuple(STRATEGY_FIELDS),
        special=_replacement_hint,
        call="Strategy({name!r}, Net(), {key}={value!r})",
    )
    return Setting.read(content, content["algorithm"], places).changed({"model": model, "rounds": rounds, **more})


def _check_choices(content: Mapping[str, Any]) -> None:
    """Raise an error if a document contains a choice that is meaningful only in simulations.

    Raises:
        Refused: the document contains such a choice, which the message names.
    """
    for name, (why, rule, fix) in NO_CHOICES.items():
        if content.get(name) is not None:
            raise Refused(f"{name} cannot be set in an app: {why}", rule=rule, fix=fix)
    evaluate = content.get("evaluate")
    if isinstance(evaluate, Mapping) and evaluate.get("clients") is not None:
        raise Refused(
            "evaluate.clients works only in simulations, because every node scores models",
            rule="deploy-scored-clients",
            fix="leave {evaluate.clients} out",
        )


def check_counts(**counts: tuple[Any, int]) -> None:
    """Raise an error if one of the named counts is not a whole number, or is below its minimum.

    Raises:
        ConfigError: a count is invalid. The message names the first invalid count.
    """
    for name, (count, least) in counts.items():
        if type(count) is not int or count < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, got {count!r:.80}")


def _plain_value(value: object) -> Any:
    if isinstance(value, Value):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain_value(inner) for key, inner in value.items()}
    return [_plain_value(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _texts_in_value(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts_in_value(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts_in_value(inner)]
    return [value] if isinstance(value, str) else []


def refuse_privacy(config: Mapping[str, object]) -> None:
    """Raise an error if the calling strategy is wrapped in one of Flower's strategies for differential privacy.

    If nodes should clip, these strategies add a key to the config. If the server clips, nothing in the config shows it,
    and these strategies read the replies before the wrapped strategy does. This function therefore searches for them
    among its callers.

    Raises:
        ConfigError: the calling strategy is wrapped.
    """
    if CLIPPING_KEY in config:
        raise ConfigError(f"config contains {CLIPPING_KEY!r}, but fedloom nodes do not use it to clip; {PRIVACY_HINT}")
    frame = inspect.currentframe()
    while frame is not None:
        caller = type(frame.f_locals.get("self")).__name__
        if caller.startswith("DifferentialPrivacy"):
            raise ConfigError(f"{caller} clips arrays of models, but fedloom nodes send no such arrays; {PRIVACY_HINT}")
        frame = frame.f_back
