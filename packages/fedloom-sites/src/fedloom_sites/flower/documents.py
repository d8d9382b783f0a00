"""Documents: the method and the choices of an app, as text for its nodes, and what they may not have."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedloom.algorithms import ALGORITHMS, REGISTRY, Algorithm, upload_fields
from fedloom.choose.shares import by_clusters, column_of_shares
from fedloom.engine.setting import Evaluate, Setting
from fedloom.errors import ConfigError, Refused
from fedloom.local import LocalSGD
from fedloom.values import Value, choose, dump, fields_of, make

WANTED = [
    name
    for name in Setting.model_fields
    if name not in ("algorithm", "model", "rounds", "task", "attack", "devices", "schedule")
]
"""Fields of a setting that a strategy takes: all but the app's own, and those of simulations."""
PART, NODES = "sampler={'kind': 'uniform', 'fraction': 0.5}", "min_nodes"
FIGURES = "client_metrics, which has the figures of every node"
AS_THEY_ARRIVE = "none, as a round takes the replies that arrive"
MOMENTUM = "Strategy('fedopt', Net(), optimiser='momentum')"
TRIMMED, KRUM, MULTI_KRUM, BULYAN = (
    f"aggregator={{'kind': '{kind}', 'f': 2}}" for kind in ("trimmed-mean", "krum", "multi-krum", "bulyan")
)
STRATEGIES = {
    "fedadagrad": "Strategy('fedopt', Net(), optimiser='adagrad')",
    "fedadam": "Strategy('fedopt', Net(), optimiser='adam')",
    "fedyogi": "Strategy('fedopt', Net(), optimiser='yogi')",
    "fedavgm": MOMENTUM,
    "fedmedian": "Strategy('fedavg', Net(), aggregator={'kind': 'median'})",
    "fedtrimmedavg": f"Strategy('fedavg', Net(), {TRIMMED})",
    "krum": f"Strategy('fedavg', Net(), {KRUM})",
    "multikrum": f"Strategy('fedavg', Net(), {MULTI_KRUM})",
    "bulyan": f"Strategy('fedavg', Net(), {BULYAN})",
    "qfedavg": "Strategy('q-ffl', Net(), q=...)",
}
"""Flower's strategies that have another name here, by theirs in small letters, and what takes their place."""
INSTEAD = {
    "fraction_train": PART,
    "fraction_fit": PART,
    "fraction_evaluate": "evaluate_every, as all nodes are scored",
    "min_train_nodes": NODES,
    "min_evaluate_nodes": NODES,
    "min_available_nodes": NODES,
    "min_fit_clients": NODES,
    "min_evaluate_clients": NODES,
    "min_available_clients": NODES,
    "weighted_by_key": "weights='samples' or 'uniform'",
    "train_metrics_aggr_fn": FIGURES,
    "evaluate_metrics_aggr_fn": FIGURES,
    "fit_metrics_aggregation_fn": FIGURES,
    "evaluate_metrics_aggregation_fn": FIGURES,
    "on_fit_config_fn": "local, by which all nodes train",
    "on_evaluate_config_fn": "@app.evaluate('mine') at the nodes for scores of your own",
    "accept_failures": AS_THEY_ARRIVE,
    "min_completion_rate_fit": AS_THEY_ARRIVE,
    "min_completion_rate_evaluate": AS_THEY_ARRIVE,
    "proximal_mu": "Strategy('fedprox', Net(), mu=...)",
    "num_malicious_nodes": KRUM,
    "num_malicious_clients": KRUM,
    "num_nodes_to_select": f"{MULTI_KRUM}, which averages all but f",
    "num_clients_to_keep": f"{MULTI_KRUM}, which averages all but f",
    "selection_rule": BULYAN,
    "first_aggregation_rule": BULYAN,
    "beta": TRIMMED,
    "eta": "Strategy('fedopt', Net(), server_lr=...)",
    "beta_1": "Strategy('fedopt', Net(), beta1=...)",
    "beta_2": "Strategy('fedopt', Net(), beta2=...)",
    "tau": "Strategy('fedopt', Net(), tau=...)",
    "server_learning_rate": f"{MOMENTUM}, with server_lr",
    "server_momentum": f"{MOMENTUM}, with beta1",
    "q": STRATEGIES["qfedavg"],
    "q_param": STRATEGIES["qfedavg"],
    "train_loss_key": "none, as nodes compute the loss of the method",
    "client_learning_rate": "local={'lr': ...}",
    "qffl_learning_rate": "local={'lr': ...}",
    "eta_l": "local={'lr': ...}",
    "initial_parameters": "initial_arrays of start",
    "arrayrecord_key": "none, as fedloom names the records",
    "configrecord_key": "none, as fedloom names the records",
}
"""Options of Flower's strategies, and those in their place."""
UNREAD = {
    "engine": {
        "quorum": "a round takes the replies that arrive, one at least; leave it out",
        "device": "the node names it: Local(..., device='cuda')",
        "checkpoint_every": "a folder gets a checkpoint after every round; leave it out",
    }
    | dict.fromkeys(("workers", "chunk"), "a node computes for one client; leave it out"),
    "evaluate": dict.fromkeys(
        sorted(Evaluate.model_fields.keys() - {"select_on", "parts", "clients"}),
        "nodes score their own parts; compute it there, with personal_model(context)",
    )
    | {
        "every": "use evaluate_every",
        "statistics": "a node computes them from its training samples; leave it out",
    },
}
"""Fields of choices that an app has no use for, and what to do."""
OF_START = ("initial_arrays", "num_rounds", "timeout", "train_config", "evaluate_config", "evaluate_fn")
"""Arguments of `Strategy.start`."""
CLIPPING = "clipping_norm"
"""Key by which Flower's strategies with differential privacy have a mod clip."""
PRIVACY = (
    "in the place of Flower's DifferentialPrivacy strategies, clip and add noise with the channel: "
    "channel={'kind': 'gaussian-noise', 'clip': 1.0, 'sigma': 1.0}"
)
"""What to do in the place of a strategy around one of fedloom's."""


def document_of(algorithm: Any, choices: Mapping[str, Any]) -> str:
    """Write a method, with its options and the choices of a run, as JSON for the nodes.

    Raises:
        ConfigError: the method is none of the registry, or a name of Flower's, a choice has another place, or a value
            has no such form.
    """
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm must be a name, as in Strategy('ditto', Net(), lam=1.0), got {algorithm!r:.80}")
    if algorithm not in REGISTRY:
        if cure := STRATEGIES.get(algorithm.lower().replace("-", "").replace("_", "")):
            raise ConfigError(f"{algorithm!r} is a strategy of Flower's; use {cure}")
        choose("algorithm", REGISTRY, algorithm, base=Algorithm)  # names the nearest
        raise ConfigError(f"algorithm must be a name of fl.algorithms.REGISTRY, got {algorithm!r}")
    for name in choices:
        if name in INSTEAD and name not in fields_of(REGISTRY[algorithm]):
            raise ConfigError(f"{name} is an option of Flower's own strategies; use {INSTEAD[name]}")
        if name in OF_START:
            raise ConfigError(f"{name} is an argument of start: strategy.start(grid, arrays, {name}=...)")
    options = {name: value for name, value in choices.items() if name not in WANTED}
    for name in options:
        if name in LocalSGD.model_fields and name not in fields_of(REGISTRY[algorithm]):
            raise ConfigError(f"{name} is of the training at the nodes; use local={{{name!r}: ...}}")
    wanted = _plain({name: value for name, value in choices.items() if name in WANTED})
    for part, cures in UNREAD.items():
        table = wanted.get(part)
        for name in cures.keys() & (table if isinstance(table, Mapping) else ()):
            raise ConfigError(f"{part}: {name!r} has no effect in an app: {cures[name]}")
    try:
        return json.dumps({"algorithm": algorithm, "options": _plain(options), "choices": wanted})
    except TypeError as error:
        raise ConfigError(f"a strategy takes names, numbers, tables and values of fedloom: {error}") from error


def resolved_document(setting: Setting) -> str:
    """Write the setting of a job for its nodes, with all that follows from the federation made a number."""
    name = next(name for name, kind in ALGORITHMS.items() if kind is type(setting.method))
    parts = [name for name in WANTED if name not in ("aggregator", "weights")]  # which the server has for itself
    choices = {part: value for part in parts if (value := getattr(setting, part)) is not None}
    return json.dumps({"algorithm": name, "options": dump(setting.method), "choices": _plain(choices)})


def setting_of(document: str, model: nn.Module, rounds: int, **more: Any) -> Setting:
    """Read the setting of a document.

    Raises:
        ConfigError: a value that cannot work.
        Refused: it names code, which no message may.
    """
    content = json.loads(document)
    for text in _texts(content):
        if ":" in text:
            raise Refused(f"{text!r} names code; a strategy takes the names of fedloom's own parts only")
    choices = {**content["choices"], **more}
    entry: Any = REGISTRY[content["algorithm"]]
    algorithm = make(entry, content["options"], content["algorithm"], fields_of(entry))
    return Setting.of(algorithm, model=model, rounds=rounds, **choices)


def check_counts(**counts: tuple[Any, int]) -> None:
    """Refuse a count, by name with the least that it may be, that is no whole number or smaller.

    Raises:
        ConfigError: the first such count.
    """
    for name, (count, least) in counts.items():
        if type(count) is not int or count < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, got {count!r:.80}")


def check_nodes_suffice(name: str, setting: Setting) -> None:
    """Refuse a method, by its name, or choices for which the nodes of an app lack something.

    Raises:
        Refused: it needs all samples in one place, a clock, or models that stay at the clients.
    """
    if setting.pooled:
        raise Refused(f"{name} pools the data of all clients, which nodes do not give; choose another method")
    if setting.devices is not None or setting.schedule.kind != "synchronous":
        raise Refused("devices and schedule are of virtual time, and real nodes take their own; leave both out")
    resolved = setting.resolved()
    kinds = upload_fields(type(resolved.method)).values()
    if resolved.sampler.learns and any(k.primary and k.base.startswith("rows.") for k in kinds):
        raise Refused(
            f"sampler {resolved.sampler.kind!r} looks at the clients' models, but {name} uploads a "
            "difference to a state that stays at the client; choose another sampler"
        )
    if (clusters := by_clusters(setting.weights)) or column_of_shares(setting.weights):
        cure = "use weigher 'equitable'" if clusters else "give a number for each client"
        raise Refused(f"weights = {setting.weights!r} needs all samples in one place; {cure}")


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def refuse_privacy(config: Mapping[str, object]) -> None:
    """Refuse Flower's strategies with differential privacy around the one that calls this.

    Those whose nodes clip say so in the config. Those that clip at the server say it nowhere, and read the replies
    before the strategy in them does: they are found among the callers.

    Raises:
        ConfigError: there is one.
    """
    if CLIPPING in config:
        raise ConfigError(f"config has {CLIPPING!r}, by which no node of fedloom clips; {PRIVACY}")
    frame = inspect.currentframe()
    while frame is not None:
        caller = type(frame.f_locals.get("self")).__name__
        if caller.startswith("DifferentialPrivacy"):
            raise ConfigError(f"{caller} clips arrays of models, and nodes of fedloom send none; {PRIVACY}")
        frame = frame.f_back
