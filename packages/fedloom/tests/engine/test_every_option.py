"""Every option of everything that can be chosen, set alone away from its default: a small run has other bits, or it is
refused, or the run says that it changes nothing; what does neither stands below with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.algorithms import ALGORITHMS, REGISTRY
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS
from fedloom.data.federation import Federation
from fedloom.engine.early_stop import EarlyStop
from fedloom.engine.setting import Engine, Evaluate
from fedloom.errors import ConfigError, InvalidValue
from fedloom.local import LocalSGD
from fedloom.local.inexact import Solver
from fedloom.models import CNN, MLP, Augment, ModelSpec
from fedloom.rows.aggregators import AGGREGATORS, FLTrust
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channels import CHANNELS
from fedloom.schedule import DEVICES, SCHEDULES
from fedloom.tasks import Objective
from fedloom.values import Value, fields_of

LOCAL = {"lr": 0.1, "batch_size": 4}
SMALL = MLP(hidden=(40, 40))
TRACE = ((1, 1, 1, 0, 0, 1, 1, 0, 1, 1), (0, 1, 1, 1, 1, 1, 0, 1, 1, 0))
GIVEN: dict[str, list[Any]] = {
    "columns": [{"age": 1.0}],
    "layers": [("4",)],
    "gap": [-2.0],
    "head": [("fc2", "head")],
    "regulariser": [{"kind": "l1", "c": 0.05}],
    "pre": [({"kind": "nnm", "f": 1},)],
    "table": [TRACE],
    "delta": [1e-5, 0.5],
    "eps0": [1e-2, 1e-3],
    "shrink": [0.3, 0.5],
    "horizon": [4, 8],
    "decay_rounds": [4, 8],
    "server_lr": [0.5],
    "crop": [1],
    "optimizer": ["adam"],
    "optimizer_options": [{"nesterov": True}],
    "parts": [("test",)],
    "loss": [torch.nn.functional.multi_margin_loss],
    "metrics": [("balanced_accuracy",)],
    "class_weights": ["balanced"],
    "every": [2],
    "hidden": [(5,)],
    "channels": [(3, 3)],
    "adapters": [{"on": "linear"}],
    "timeout": [0.01],
}
"""Values of options whose type does not tell one, and of those that stand in for others."""
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("FedADMMInexact", "shrink"): {"eps0": 1e-4},
    ("CFL", "ratio"): {"least": 2, "gap": -2.0},
    ("CFL", "gap"): {"least": 2, "ratio": 9.0},
    ("CFL", "first"): {"least": 2, "gap": -2.0, "ratio": 9.0},
    ("CFL", "least"): {"gap": -2.0, "ratio": 9.0},
    ("FedFomo", "returns"): {"peers": 1},
    ("EquitableWeigher", "log_softmax"): {"clusters": 4},
    ("FairFedWeigher", "floor"): {"beta": 3.0},
    ("PowerOfChoice", "candidates"): {"clients": 4},
    ("LocalSGD", "schedule"): {"decay": 0.5, "decay_rounds": 4},
    ("LocalSGD", "optimizer_state"): {"optimizer": "adam"},
    ("MultiKrum", "squared"): {"k": 1, "f": 2},
}
"""What a field is set with, where it acts on few data or needs a second one."""
NOTHING = {
    ("Engine", "device"): "another machine",
    ("Engine", "precision"): "linear layers have one; tests/engine has convolutions",
    ("Engine", "quorum"): "acts where uploads are unusable",
    ("Engine", "gradient_engine"): "auto is compiled here; others change bits by rounding",
    ("Engine", "clients_per_batch"): "bits by rounding",
    ("Evaluate", "select_on"): "acts where the parts choose otherwise",
    ("FairFedWeigher", "group"): "acts on columns of a table; packages/fedloom/tests/choose/test_weighers.py",
    **{(kind, "init_from"): "reads a file; packages/fedloom/tests/models" for kind in ("Softmax", "MLP", "CNN")},
    ("EarlyStop", "metric"): "acts where metrics are best in different rounds",
    ("GIFAIR", "level"): "groups are the partition's, and asked for",
}
"""Fields that a small run cannot show, and why."""


class Normed(ModelSpec):
    """A network for FedBN."""

    def module(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        nn, width = torch.nn, int(np.prod(shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))


NETWORKS = {
    "FedBN": Normed(),
    "GPFL": MLP(hidden=(40, 40), guided=True),
    "KNNPer": MLP(hidden=(40, 40), memory=16),
}
"""Networks of methods that do nothing of their own on others."""


@cache
def pictures() -> Federation:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 160)
    x = (rng.normal(size=(3, 1, 4, 4))[y] + 0.7 * rng.normal(size=(160, 1, 4, 4))).astype("float32")
    return fl.partitions.dirichlet(clients=10, alpha=1.0, min_size=5, validation=0.25)(fl.Dataset.create(x, y), seed=0)


def played(method: Any, models_only: bool = False, **choices: Any) -> tuple[tuple[Any, ...], frozenset[str], Any]:
    """Bits of what a run measured and learned, what it says, and its method as it ran; work is not measured here."""
    rounds = 2 if models_only else 4
    judged = {"every": rounds, "parts": ("test",)}
    setting = {"rounds": rounds, "seed": 3, "local": LOCAL, "sampler": {"fraction": 0.8}, "evaluate": judged}
    name = type(getattr(method, "algorithm", method)).__name__
    found = fl.simulate(method, pictures(), NETWORKS.get(name, SMALL), **{**setting, **choices})
    kept = [r for r in found.state.records.items if (r.model or not models_only) and r.metric != "steps"]
    measured = tuple((r.round, r.model, r.part, r.metric, r.values.tobytes()) for r in kept)
    server = tuple(t.numpy().tobytes() for t in found.state.server if isinstance(t, torch.Tensor))
    return (measured, () if models_only else server), frozenset(found.job.notes), found.job.setting.algorithm


def words(kind: Any) -> Iterator[str]:
    """The words of a type."""
    yield from get_args(kind) if get_origin(kind) is Literal else (w for part in get_args(kind) for w in words(part))


def others(name: str, field: Any) -> tuple[list[Any], list[Any]]:
    """Words and flags other than the default, all of which must tell; and numbers, one of which must."""
    default = field.default
    if isinstance(default, bool):
        return [not default], []
    found = [w for kind in (field.annotation, *field.metadata) for w in words(kind) if isinstance(w, str)]
    if name in GIVEN:
        return [], GIVEN[name]
    start = default if isinstance(default, int | float) else 0
    numbers: list[Any] = (
        [] if isinstance(default, str | tuple | dict) else [1, 2, 0.5, 0.05, start * 2, start / 2, start + 1, 0]
    )
    numbers = [int(v) if isinstance(default, int) and int(v) == v else v for v in numbers if v != default]
    return [w for w in dict.fromkeys(found) if w != default], numbers


def tells(
    make: Callable[..., Any], run: Callable[..., Any], start: Any, given: Mapping[str, Any], name: str, value: Any
) -> bool | None:
    """Whether a value of a field changes bits, is refused or told; None where it is out of the field's range, or what
    the default stands for."""
    before, _, settled = start
    if getattr(settled, name, None) == value:
        return None
    try:
        after, said, _ = run(make(**{**given, name: value}))
    except InvalidValue as error:
        return True if any(e["type"] == "value_error" for e in error.errors()) else None
    except ConfigError as error:
        return True if re.search(rf"\b{name}\b", str(error)) else None
    return after != before or any(
        re.search(rf"\b{name}\b.*\b(ha(s|ve) (no|an) effect|acts|changes?)\b", note) for note in said
    )


def mute(make: Any, run: Callable[..., Any], base: Mapping[str, Any]) -> list[str]:
    """The fields of a class, or of a preset, whose change nobody notices."""
    found, plain = [], run(make(**base))
    owners = (getattr(make, "__name__", ""), *(part.__name__ for part in getattr(make, "parts", ())))
    for name, field in fields_of(make).items():
        if name in ("kind", *getattr(make, "free", ()), *base) or any((owner, name) in NOTHING for owner in owners):
            continue
        owner = next((n for n, f in BESIDE if f == name and n in owners), "")
        given = {**base, **BESIDE.get((owner, name), {})}
        every, one = others(name, field)
        start = plain if given == base else run(make(**given))
        answers = [tells(make, run, start, given, name, value) for value in every]
        numbers = (tells(make, run, start, given, name, value) for value in one)
        seen = [a for a in answers if a is not None]
        if not all(seen) or (not seen and not any(numbers)):
            found.append(name)
    return found


def choice(key: str, method: str = "fedavg") -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        beside = {"client_weights": "clusters-3"} if getattr(value, "disguises", False) else {}
        if isinstance(value, FLTrust):  # its client must be in every cohort
            beside["sampler"] = {"fraction": 1.0}
        return played(method, **{key: value}, **beside)

    return run


PLUGINS = [
    (key, kind)
    for key, kinds in {
        "sampler": SAMPLERS, "aggregation_weights": WEIGHERS, "personalized_aggregation": MIXERS,
        "aggregator": AGGREGATORS, "attack": ATTACKS, "upload_transform": CHANNELS
    }.items()
    for kind in kinds.values()
]  # fmt: skip
TABLES = [("task", Objective), ("augment", Augment), ("engine", Engine), ("evaluate", Evaluate), ("local", LocalSGD)]


def stopped_early(rule: EarlyStop) -> tuple[tuple[Any, ...], frozenset[str], EarlyStop]:
    """Bits of the models of a run that ends early, and what it says; by default, it watches the personal model."""
    scores = {"every": 1, "parts": ("train", "validation", "test")}
    found = fl.simulate(
        "flame", pictures(), SMALL, rounds=8, seed=3, local={**LOCAL, "lr": 1.0}, early_stop=rule, evaluate=scores
    )
    bits = tuple(found.models.rows(kind).numpy().tobytes() for kind in ("global", "personal"))
    return (found.rounds, *bits), frozenset(found.notes), rule if rule.model else rule.with_(model="personal")


def modelled(spec: ModelSpec) -> Any:
    found = fl.simulate("fedavg", pictures(), spec, rounds=2, seed=3, local=LOCAL, evaluate={"parts": ("test",)})
    return found.models.rows("global").numpy().tobytes(), frozenset(found.job.notes), spec


SLOW = {"kind": "lognormal", "speed": 50.0, "spread": 2.0}
TIMED: list[tuple[type[Value], Callable[[Any], Any], dict[str, Any]]] = [
    *((SCHEDULES[kind], lambda value: played("fedavg", schedule=value, devices=SLOW), given)
      for kind, given in {"deadline": {"seconds": 1.0}, "over-selection": {}, "buffered": {"buffer": 3},
                          "asynchronous": {}}.items()),
    *((DEVICES[kind], choice("devices"), given)
      for kind, given in {"equal": {}, "lognormal": {},
                          "classes": {"classes": {"a": {"share": 0.5}, "b": {"share": 0.5, "speed": 9.0}}}}.items()),
    (EarlyStop, stopped_early, {"result": "best"}),
    (MLP, modelled, {}),
    (CNN, modelled, {"kernel": 3, "padding": 1, "channels": (2, 4), "hidden": (6,), "pool": (True, False)}),
]  # fmt: skip
"""Values of the tables on time, the end of a run, and its model, with the options that a small run needs."""
STARTS = {"CenteredClipping": {"tau": 0.05}, "FIAELT": {"iterations": 2}, "criterion": {"lam": 40.0}, "LocalSGD": LOCAL}
"""Options without which nothing acts here, or only after many steps."""


@pytest.mark.parametrize("name", REGISTRY)
def test_options_of_a_method(name: str) -> None:
    assert mute(REGISTRY[name], played, {}) == []


@pytest.mark.parametrize(("key", "kind"), [*PLUGINS, *TABLES], ids=lambda v: getattr(v, "__name__", v))
def test_options_of_a_table(key: str, kind: type[Value]) -> None:
    run = choice(key, "flame" if key == "evaluate" else "fedavg")
    assert mute(kind, run, STARTS.get(kind.__name__, {})) == []


@pytest.mark.parametrize(("kind", "run", "given"), TIMED, ids=lambda v: getattr(v, "__name__", None))
def test_options_of_time_ends_and_models(kind: type[Value], run: Any, given: dict[str, Any]) -> None:
    assert mute(kind, run, given) == []


TORCH_SGD = "torch.optim:SGD"
COMBINED: list[tuple[str, dict[str, Any], str]] = [
    (
        "fedavg",
        {"local": {"optimizer": "torch.optim:SGD", "optimizer_options": {"dampening": 0.5}}},
        "optimizer_options",
    ),
    ("fedavg", {"local": {"optimizer": "torch.optim:SGD", "optimizer_state": "persistent"}}, "optimizer_state"),
    ("fedavg", {"evaluate": {"select_on": "test"}}, "select_on"),
    ("fedavg", {"evaluate": {"clients": 10}}, "clients"),
    ("fedavg", {"evaluate": {"personal_at_start": True}}, "personal_at_start"),
    ("fedavg", {"sampler": {"kind": "size-weighted", "clients": 1, "replacement": False}}, "replacement"),
    ("fedavg", {"sampler": {"kind": "clustered", "clients": 1, "by": "size"}}, "by"),
    ("fedavg", {"personalized_aggregation": {"kind": "angles", "self_weight": 1.0, "sigma": 3.0}}, "sigma"),
    ("fedavg", {"personalized_aggregation": {"kind": "clusters", "clusters": 1, "similarity": "model"}}, "similarity"),
    ("fedavg", {"schedule": {"kind": "buffered", "buffer": 3, "hinge": 9}, "devices": SLOW}, "hinge"),
    ("fedavg", {"devices": {"kind": "equal", "period": 9.0}}, "period"),
    ("fedavg", {"model": {"kind": "mlp", "hidden": [], "dropout": 0.5}}, "dropout"),
    ("fedavg", {"model": {"kind": "cnn", "kernel": 1, "groups": 4}}, "groups"),
    ("fedavg-ft", {"epochs": 3, "steps": 2}, "epochs"),
    ("fedadmm-inexact", {"rho": 1.0, "r0": 0.3}, "r0"),
    ("fiaelt", {"solver": "released", "start": "server"}, "start"),
]
"""Choices, and the option that does nothing beside the others."""


@pytest.mark.parametrize(("name", "choices", "idle"), COMBINED, ids=str)
def test_an_option_that_does_nothing_beside_others_is_noted(name: str, choices: dict[str, Any], idle: str) -> None:
    def run(choices: dict[str, Any]) -> Any:
        tables = {key: value for key, value in choices.items() if key in fl.Setting.model_fields}
        model = tables.pop("model", SMALL)
        setting = {"local": LOCAL, "rounds": 2, "seed": 3, "evaluate": {"parts": ("test",)}, **tables}
        method = ALGORITHMS[name](
            **{key: value for key, value in choices.items() if key not in fl.Setting.model_fields}
        )
        found = fl.simulate(method, pictures(), model, **setting)
        return found.state.server, found.notes, found.table()

    def without(table: dict[str, Any]) -> dict[str, Any]:
        return {k: without(v) if isinstance(v, dict) and k != idle else v for k, v in table.items() if k != idle}

    (server, notes, table), (plain, plain_notes, plain_table) = run(choices), run(without(choices))
    assert all(torch.equal(one, other) for one, other in zip(server, plain, strict=True))
    assert table.drop_columns(["value"]).equals(plain_table.drop_columns(["value"]))
    assert [note for note in notes if re.search(rf"{idle} = .* has no effect", note)]
    assert not [note for note in plain_notes if f"{idle} = " in note]


NEEDY = [
    (kind, key, value)
    for key, kind in [*((None, kind) for kind in ALGORITHMS.values()), *PLUGINS, *TABLES]
    for value in kind.needs
]


@pytest.mark.parametrize(("kind", "key", "field"), NEEDY, ids=lambda v: getattr(v, "__name__", v))
def test_a_field_acts_where_it_is_said_to_act(kind: type[Value], key: str | None, field: str) -> None:
    other, *values = kind.needs[field].split()
    run = choice(key) if key else played
    if other.startswith("local."):
        run, values, other = partial(played, local={**LOCAL, other.removeprefix("local."): 0.1}), [None], ""
    if values[:1] in (["not"], ["None"]):  # it acts beside the default
        values, other = [None], ""
    every, one = others(field, kind.model_fields[field])
    for beside in values or others(other, kind.model_fields[other])[1][:1]:
        given = {**STARTS.get(kind.__name__, {}), **({other: beside} if other else {})}
        given |= STARTS.get(str(beside), {})
        given |= {"decay": 0.5} if beside == "exponential" and field != "decay" else {}
        before = run(kind(**given, **({"decay": 0.9} if field == "decay" else {})))[0]
        assert any(
            run(kind(**{**given, field: v}))[0] != before for v in (*every, *one) if in_range(kind, given, field, v)
        )


def in_range(kind: type[Value], given: Mapping[str, Any], field: str, value: Any) -> bool:
    try:
        kind(**{**given, field: value})
    except InvalidValue:
        return False
    return True


LOCALS = {
    "lr": 0.02, "batch_size": 7, "epochs": 2, "steps": 1, "momentum": 0.5, "weight_decay": 0.1, "clip": 0.05,
    "schedule": "inverse-sqrt",
}  # fmt: skip
METHODS = [(name, {}) for name in ALGORITHMS]
METHODS += [("fiaelt", {"solver": s}) for s in get_args(Solver) if s != "sgd"] + [("flame", {"eps0": 1e-2, "lam": 1.0})]


@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_keys_of_local_training(name: str, options: dict[str, Any]) -> None:
    """What trains a client obeys ``[local]``, or says which keys it does not read."""
    method = ALGORITHMS[name](**options)

    def run(local: LocalSGD) -> Any:
        return played(method, models_only=True, local=local)

    start = run(LocalSGD(**LOCAL))
    assert [key for key, value in LOCALS.items() if tells(LocalSGD, run, start, LOCAL, key, value) is False] == []


def test_pooled_data_say_what_they_leave_out() -> None:
    notes = played(REGISTRY["centralized"](), attack={"kind": "gaussian"})[1]
    assert any("[sampler] and [attack] have no effect" in note for note in notes)
