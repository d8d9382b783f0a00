"""Records: what server and nodes exchange, as Flower's records, and the document of a run."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor, nn

from fedloom.algorithms import ALGORITHMS, REGISTRY, Algorithm, upload_fields
from fedloom.choose.shares import by_clusters, column_of_shares
from fedloom.engine.setting import Evaluate, Setting
from fedloom.errors import ConfigError, Refused, WireError
from fedloom.local import LocalSGD
from fedloom.trained.model import running_statistics
from fedloom.values import Value, choose, dump, fields_of, make
from fedloom.version import __version__

HEAD = "fedloom"
"""Name of the record that has the plain values of a message, and of a reply."""
NUMPY = "numpy.ndarray"
"""Form of an array's bytes: those of a file of numpy's."""
WANTED = [
    name
    for name in Setting.model_fields
    if name not in ("algorithm", "model", "rounds", "task", "attack", "devices", "schedule")
]
"""Fields of a setting that a strategy takes: all but the app's own, and those of simulations."""
PART, NODES = "sampler={'kind': 'uniform', 'fraction': 0.5}", "min_nodes"
FIGURES = "client_metrics, which has the figures of every node"
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
    "accept_failures": "none, as a round takes the replies that arrive",
    "proximal_mu": "Strategy('fedprox', Net(), mu=...)",
    "num_malicious_nodes": "aggregator={'kind': 'krum', 'f': 2}",
    "num_malicious_clients": "aggregator={'kind': 'krum', 'f': 2}",
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
NEAR = 1e-3
"""Difference of means and spreads from which values that do not train are not the same."""
log = logging.getLogger("flwr").log
"""Writes to Flower's log; releases of Flower differ in where it can be imported from."""


def array_of(tensor: Tensor) -> Array:
    """Write a tensor as Flower does, in one pass over its values."""
    values, header = tensor.detach().cpu().contiguous().numpy(), io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
    return Array(str(values.dtype), values.shape, NUMPY, b"".join([header.getvalue(), values.data]))


def arrays_of(tensors: Mapping[str, Tensor], encoded: Mapping[str, Array] = MappingProxyType({})) -> ArrayRecord:
    """Write tensors as a record.

    Args:
        tensors: by name.
        encoded: those that are written already.
    """
    return ArrayRecord({name: encoded.get(name) or array_of(tensor) for name, tensor in tensors.items()})


def array_of_each(down: Any) -> dict[str, Array]:
    """Write the fields ``[d]`` of a download, which every client receives, once for all; none of None."""
    fields = {} if down is None else down._asdict()
    return {name: array_of(field) for name, field in fields.items() if field.dim() == 1}


def tensor_of(array: Array) -> Tensor:
    """Read an array, whose bytes the tensor shares: it must not be modified."""
    stream = io.BytesIO(array.data)
    if array.stype != NUMPY or npy.read_magic(stream) != (1, 0):
        return torch.from_numpy(array.numpy())
    shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    values = np.frombuffer(array.data, dtype, math.prod(shape), stream.tell())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(values.reshape(shape, order="F" if is_fortran else "C"))


def tensors_of(records: RecordDict, name: str) -> dict[str, Tensor]:
    """Read the tensors of a record, which must not be modified; none where it is not there.

    Raises:
        WireError: an array is damaged.
    """
    record = records.get(name)
    if not isinstance(record, ArrayRecord):
        return {}
    try:
        return {key: tensor_of(array) for key, array in record.items()}
    except Exception as error:  # of bytes from elsewhere
        raise WireError(f"the arrays {name!r} cannot be read: {type(error).__name__}") from error


def fields_like(template: Any, tensors: Mapping[str, Tensor], what: str) -> Any:
    """The named tuple of some tensors, of the shapes and types of another.

    Args:
        template: a named tuple of tensors.
        tensors: by name.
        what: the tuple in a word, for errors.

    Raises:
        WireError: other names, shapes, or no numbers with a fraction.
    """
    wanted = {name: tuple(value.shape) for name, value in template._asdict().items()}
    got = {name: tuple(value.shape) for name, value in tensors.items()}
    if got != wanted:
        raise WireError(f"the {what} has the arrays {got}, expected {wanted}")
    for name, value in tensors.items():
        if value.is_floating_point() != getattr(template, name).is_floating_point():
            raise WireError(f"the {what} {name!r} has numbers of type {value.dtype}")
    return type(template)(*[tensors[name].to(like) for name, like in template._asdict().items()])


def head_of(records: RecordDict) -> dict[str, Any]:
    """Read the plain values of a message.

    Raises:
        WireError: it is not one of fedloom's.
        Refused: another release wrote it.
    """
    record = records.get(HEAD)
    if not isinstance(record, ConfigRecord) or "release" not in record:
        raise WireError(f"the message has no record {HEAD!r}: the other side does not run fedloom.flower")
    if record["release"] != __version__:
        raise Refused(f"the other side runs fedloom {record['release']!s}, this one {__version__}")
    return dict(record)


def head(**values: Any) -> ConfigRecord:
    """Write the plain values of a message.

    Returns:
        A record with them and the release.
    """
    return ConfigRecord({"release": __version__, **values})


def document_of(algorithm: Any, choices: Mapping[str, Any]) -> str:
    """Write a method, with its options and the choices of a run, as JSON for the nodes.

    Raises:
        ConfigError: the method is none of the registry, a choice has another place, or a value has no such form.
    """
    for name in choices:
        if name in INSTEAD:
            raise ConfigError(f"{name} is an option of Flower's own strategies; use {INSTEAD[name]}")
        if name in OF_START:
            raise ConfigError(f"{name} is an argument of start: strategy.start(grid, arrays, {name}=...)")
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm must be a name, as in Strategy('ditto', Net(), lam=1.0), got {algorithm!r:.80}")
    if algorithm not in REGISTRY:
        choose("algorithm", REGISTRY, algorithm, base=Algorithm)  # names the nearest
        raise ConfigError(f"algorithm must be a name of fl.algorithms.REGISTRY, got {algorithm!r}")
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


def state_dict_of(arrays: Any, module: nn.Module) -> dict[str, Tensor]:
    """Read the values of a module from a record.

    Raises:
        ConfigError: they are those of another module.
    """
    if not isinstance(arrays, ArrayRecord):
        got = type(arrays).__name__
        raise ConfigError(f"initial_arrays must be an ArrayRecord, got {got}; give ArrayRecord(model.state_dict())")
    try:
        values, expected = dict(arrays.to_torch_state_dict()), module.state_dict()
    except Exception as error:
        raise ConfigError(
            f"initial_arrays: no values of torch ({error}); give ArrayRecord(model.state_dict())"
        ) from error
    for name in [*expected, *values]:
        if name not in values or name not in expected:
            has, lacks = ("the model", "initial_arrays") if name in expected else ("initial_arrays", "the model")
            raise ConfigError(f"{has} has {name!r}, but not {lacks}; give ArrayRecord(model.state_dict())")
        shape, expected_shape = [*values[name].shape], [*expected[name].shape]
        if shape != expected_shape:
            raise ConfigError(f"initial_arrays: {name!r} has the shape {shape}, the model's has {expected_shape}")
        if not values[name].isfinite().all():
            raise ConfigError(f"initial_arrays: {name!r} has NaN or infinity; give a model with finite values")
    return values


def shapes_of(module: nn.Module) -> str:
    """Shapes of a module's parameters, and of those values that do not train also mean and spread, as text.

    Statistics of normalisation layers are left out: a node computes them from its samples.
    """
    statistics = {id(value) for value in running_statistics(module)}
    facts: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.requires_grad:
            facts[name] = [[*value.shape]]
        elif isinstance(value, Tensor) and id(value) not in statistics and not name.endswith("num_batches_tracked"):
            numbers = torch.view_as_real(value) if value.is_complex() else value
            values = numbers.detach().double() if value.numel() else torch.zeros(1)
            facts[name] = [[*value.shape], float(values.mean()), float(values.std(correction=0))]
    return json.dumps(facts)


def check_alike(node: str, server: str) -> None:
    """Refuse a model that differs from the server's.

    Raises:
        Refused: the first parameter that differs, on both sides.
    """
    facts, expected = json.loads(node), json.loads(server)
    for name in [*facts, *expected]:
        got, want = facts.get(name, ["none"]), expected.get(name, ["none"])
        if (got[0], len(got)) != (want[0], len(want)):
            raise Refused(
                f"parameter {name!r} of the node's model has the shape {_described(got)}, that of the server "
                f"{_described(want)}"
            )
        if any(not math.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR) for a, b in zip(got[1:], want[1:], strict=True)):
            raise Refused(
                f"{name!r} does not train, and its values at the node are not those of the server (mean and spread "
                f"{got[1]:.6g} and {got[2]:.6g}, there {want[1]:.6g} and {want[2]:.6g}); load the same at every node"
            )


def _described(facts: list[Any]) -> str:
    return str(facts[0]) + (" and does not train" if len(facts) > 1 else "")


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
