"""One preflight: what cannot work is refused by the same rule with the same fix at seven entrances, before round 1."""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from torch import nn

import fedloom as fl
import fedloom_sites.flower as ff
from fedloom.data.federation import Federation
from fedloom.engine.setup import check
from fedloom.errors import ConfigError, adapt_wording, capitalize, rewrite_keys
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.tune import Tuning
from fedloom.sklearn import FederatedClassifier, FederatedRegressor
from fedloom_sites.deploy.ops.plan import plan_deployment
from tests import impossible
from tests.flower.app import App
from tests.impossible import CLIENTS, ENTRANCES, ROWS, ROWS_OF_TABLE, Entrance, Kind, Row, samples

PAGE = Path(__file__).parents[3] / "docs" / "preflight.md"
BY_NAME = {row.name: row for row in ROWS_OF_TABLE}
TERMS: dict[Entrance, Any] = {
    "simulate": "python", "compare": "python", "run": "file", "tune": "file", "scikit-learn": "estimator",
    "Flower": "flower", "deploy": "file",
}  # fmt: skip


def dataset(kind: Kind) -> fl.Dataset:
    x, y = samples(kind)
    if kind in ("censored", "late"):
        return fl.Dataset("times", x, y, "survival")
    return fl.Dataset.create((x.numpy(), y.reshape(-1).numpy()))


def federation(kind: Kind) -> Federation:
    return fl.partitions.iid(clients=CLIENTS, validation=0.2, test=0.3)(dataset(kind), seed=0)


def model_of(row: Row) -> Any:
    made = getattr(impossible, row.model, None)
    return row.model if made is None else made()


def method_of(row: Row) -> dict[str, Any]:
    return {"algorithm": row.method, **row.options}


def document(row: Row, folder: Path) -> dict[str, Any]:
    """The experiment file of a row."""
    x, y = samples(row.data)
    source: dict[str, Any] = {"source": str(folder / "samples.npz")}
    if row.data in ("censored", "late"):
        source = {"source": str(folder / "samples.csv"), "target": "time", "event": "event"}
        columns = np.concatenate([x.numpy(), y.numpy()], 1)
        names = ",".join([*(f"x{k}" for k in range(x.shape[1])), "time", "event"])
        np.savetxt(source["source"], columns, fmt="%.6g", delimiter=",", header=names, comments="")
    else:
        np.savez(folder / "samples.npz", x=x.numpy(), y=y.reshape(-1).numpy())
    model = row.model if not hasattr(impossible, row.model) else f"{impossible.HERE}:{row.model}"
    return {
        "seeds": [0],
        "data": source,
        "partition": {"kind": "iid", "clients": CLIENTS, "validation": 0.2, "test": 0.3},
        "model": {"kind": model},
        "rounds": 3,
        "local": dict(impossible.LOCAL),
        **copy.deepcopy(dict(row.choices)),
        "method": [method_of(row)],
        "tune": {"trials": 1, "space": {row.method: {"local.batch_size": [5, 10]}}},
    }


def simulate(row: Row, folder: Path) -> object:
    algorithm: Any = fl.algorithms.REGISTRY[row.method]
    return fl.simulate(algorithm(**row.options), federation(row.data), model_of(row), **{"rounds": 3, **row.choices})


def compare(row: Row, folder: Path) -> object:
    cut, data = fl.partitions.iid(clients=CLIENTS, validation=0.2, test=0.3), dataset(row.data)
    choices = {"rounds": 3, **row.choices}
    return fl.compare([method_of(row)], data, model_of(row), partition=cut, seeds=[0], progress_bar=False, **choices)


def run(row: Row, folder: Path) -> object:
    return Plan(parse({k: v for k, v in document(row, folder).items() if k != "tune"}), folder / "run")


def tune(row: Row, folder: Path) -> object:
    return Tuning(document(row, folder), "x.toml", folder / "tune")


def estimate(row: Row, folder: Path) -> object:
    x, y = (part.double().numpy() for part in samples(row.data))
    choices = copy.deepcopy(dict(row.choices))
    local, groups = {**impossible.LOCAL, **choices.pop("local", {})}, np.repeat(np.arange(CLIENTS), ROWS)
    own = {key: local.pop(key) for key in ("lr", "epochs", "batch_size") if key in local}
    if "steps" in local:
        own["epochs"] = None
    algorithm: Any = fl.algorithms.REGISTRY[row.method]
    kind = FederatedRegressor if row.data == "numbers" else FederatedClassifier
    made = kind(
        algorithm(**row.options), rounds=choices.pop("rounds", 3), model=model_of(row), **own,
        settings=choices | ({"local": local} if local else {}),
    )  # fmt: skip
    return made.fit(x, y.reshape(-1), groups=groups)


def flower(row: Row, folder: Path) -> object:
    x, y = samples(row.data)
    names = {"softmax": lambda: nn.Linear(impossible.WIDTH, 1 if row.data == "numbers" else impossible.CLASSES)}
    make: Callable[[], nn.Module] = names.get(row.model) or getattr(impossible, row.model)
    loss = nn.MSELoss() if row.data == "numbers" else nn.CrossEntropyLoss()

    def local(context: Context) -> ff.Local:
        k = int(context.node_config["partition-id"])
        own = slice(k * ROWS, (k + 1) * ROWS)
        return ff.Local(make(), (x[own], y[own]), loss)

    choices = copy.deepcopy(dict(row.choices))
    rounds = choices.pop("rounds", 3)
    strategy = ff.Strategy(row.method, make(), wait=0.1, **row.options, **{"local": impossible.LOCAL, **choices})
    return strategy.start(App(local, CLIENTS).grid, ArrayRecord(make().state_dict()), num_rounds=rounds)


def deploy(row: Row, folder: Path) -> object:
    return plan_deployment(parse({k: v for k, v in document(row, folder).items() if k != "tune"}))


ENTER: dict[Entrance, Callable[[Row, Path], object]] = {
    "simulate": simulate, "compare": compare, "run": run, "tune": tune, "scikit-learn": estimate, "Flower": flower,
    "deploy": deploy,
}  # fmt: skip


def refusal_of(row: Row) -> ConfigError:
    """The error of the check itself."""
    algorithm: Any = fl.algorithms.REGISTRY[row.method]
    with pytest.raises(ConfigError) as caught:
        check(
            fl.Setting.create(algorithm(**row.options), model_of(row), **{"rounds": 3, **row.choices}),
            federation(row.data),
        )
    return caught.value


def test_there_are_sixty_rows_and_each_has_a_rule_of_its_own_kind() -> None:
    assert len(ROWS_OF_TABLE) >= 60
    assert len(BY_NAME) == len(ROWS_OF_TABLE)
    assert len({row.rule for row in ROWS_OF_TABLE}) >= 50
    for row in ROWS_OF_TABLE:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", row.rule), row


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", BY_NAME)
def test_an_impossible_setting_has_one_rule_and_one_fix_at_every_entrance(
    name: str, entrance: Entrance, tmp_path: Path
) -> None:
    row = BY_NAME[name]
    if entrance in row.reasons:
        assert row.reasons[entrance]
        return
    known = refusal_of(row)
    assert (known.rule, bool(known.fix)) == (row.rule, True), str(known)
    with pytest.raises(ConfigError) as caught:
        ENTER[entrance](row, tmp_path)
    assert caught.value.rule == known.rule, str(caught.value)
    if entrance == "scikit-learn":  # its clients train on all rows, so seconds are others
        assert re.sub(r"[\d.]+", "N", caught.value.fix) == re.sub(r"[\d.]+", "N", known.fix), str(caught.value)
    else:
        assert caught.value.fix == known.fix, str(caught.value)
    with adapt_wording(TERMS[entrance]):
        assert str(caught.value).endswith(capitalize(rewrite_keys(caught.value.fix))), str(caught.value)
    assert not (tmp_path / "run").exists()


def page() -> str:
    """docs/preflight.md."""
    lines = list[str]()
    with adapt_wording("file"):
        for row in ROWS_OF_TABLE:
            error = refusal_of(row)
            cure = f"{rewrite_keys(error.fix)}.".replace("|", "\\|")
            lines.append(f"| `{row.rule}` | {capitalize(row.name)} (`{row.method}`) | {cure[0].upper()}{cure[1:]} |")
    return HEAD + "\n".join(lines) + "\n"


HEAD = """# Settings that cannot work

fedloom checks every run before round 1 and rejects settings that cannot work. The check is the same
for `fl.simulate`, `fl.compare`, `fedloom run`, `fedloom tune`, the scikit-learn estimators, Flower
apps and deployments. The error suggests a fix that matches how you started the run: a keyword
argument in Python, a key in the experiment file, or a command-line option. In Python, the error
also has the rule and the fix as attributes:

```python
import fedloom as fl

fed = fl.partitions.iid(clients=6)(fl.load("digits"), seed=0)
try:
    fl.simulate("fedavg", fed, aggregator={"kind": "krum", "f": 2})
except fl.errors.ConfigError as error:
    assert error.rule == "cohort-too-small"
    print(error)
```

The check makes the same random draws as the run. It therefore knows every round's cohort and can
detect before round 1 that a robust rule would fail in round 21. If a deadline or a timeout is set,
the check trains one client. If a model has no layer below its head, the check performs one training
step instead.

Some models draw random numbers with PyTorch, NumPy or `random`. fedloom seeds these global
generators in every training step and restores them afterward. If a model has its own generator,
fedloom cannot seed it and prints a note.

The table shows an example of each rule. Tests check that the rule and the fix are the same for all
seven ways to start a run, and that the settings work after the fix. For methods and plug-ins that
work together, see [Compatibility](combinations.md).

| rule | example | fix |
|---|---|---|
"""


def test_the_page_shows_the_rules() -> None:
    """FEDLOOM_WRITE=1 writes it anew."""
    if os.environ.get("FEDLOOM_WRITE"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


SET = re.compile(r"\{([a-z_]+)(?:\.([a-z_]+))?(?: = ((?:[^{}]|\{[^{}]*\})+))?\}")


def followed(fix: str, row: Row) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The choices and options of a row after its fix has been followed, its first way; None if it names no key."""
    choices, options = copy.deepcopy(dict(row.choices)), dict(row.options)
    way = re.split(r",? or |, which", fix)[0]
    keys = list(SET.finditer(way))
    if not keys:
        return None
    for match in keys:
        table, key, value = match[1], match[2], match[3]
        place = options if table == "method" else choices.setdefault(table, {}) if key else choices
        if not isinstance(place, dict):
            place = choices[table] = {"kind": place}
        name = key or table
        if value is None:
            place.pop(name, None)
        elif key is None and table not in ("client_weights", "rounds"):
            given = ast.literal_eval(value)
            place[name] = given if isinstance(given, dict) else {"kind": given}
        else:
            place[name] = ast.literal_eval(value)
    return choices, options


@pytest.mark.parametrize("name", BY_NAME)
def test_the_fix_that_an_error_suggests_works(name: str) -> None:
    """Followed again while another part stands in the way, three times at most."""
    row, fed = BY_NAME[name], federation(BY_NAME[name].data)
    error, rules = refusal_of(row), list[str]()
    for _ in range(3):
        new = followed(error.fix, row)
        if new is None:
            pytest.skip(f"no key: {error.fix}")
        choices, options = new
        row = Row(row.name, row.rule, row.method, choices, options, row.data, row.model)
        rules.append(error.rule)
        algorithm: Any = fl.algorithms.REGISTRY[row.method]
        try:
            check(fl.Setting.create(algorithm(**options), model_of(row), **{"rounds": 3, **choices}), fed)
        except ConfigError as further:
            if further.rule in rules:
                break
            error = further
        else:
            return
    raise AssertionError(f"{rules}, {error.fix}: {error}")


EQUAL = {"devices": {"kind": "equal"}}
AT_REAL_CLIENTS: dict[str, tuple[str, Row]] = {
    "an attack": ("deploy-attack", Row("", "", choices={"attack": {"kind": "sign-flip", "fraction": 0.2}})),
    "devices": ("deploy-devices", Row("", "", choices=EQUAL)),
    "a deadline": ("deploy-schedule", Row("", "", choices={"schedule": {"kind": "deadline", "seconds": 9.0}})),
    "early stopping": (
        "deploy-early-stop",
        Row("", "", choices={"early_stop": {"patience": 2}, "evaluate": {"parts": ["validation", "test"]}}),
    ),
    "some clients scored": ("deploy-scored-clients", Row("", "", choices={"evaluate": {"clients": 2}})),
    "pooled data": ("deploy-pooled-data", Row("", "", method="centralized")),
    "shares by clusters": ("deploy-weights", Row("", "", choices={"client_weights": "clusters"})),
    "models of differences": (
        "deploy-sampler-models",
        Row("", "", method="fedadmm", choices={"sampler": {"kind": "clustered", "clients": 3}}),
    ),
}
"""Settings of a simulation that real clients cannot have, and the rule that refuses them."""


@pytest.mark.parametrize("name", AT_REAL_CLIENTS)
def test_a_setting_for_simulation_has_one_rule_and_a_fix_at_real_clients(name: str, tmp_path: Path) -> None:
    rule, row = AT_REAL_CLIENTS[name]
    simulation: Any = fl.algorithms.REGISTRY[row.method]
    if name != "a deadline":  # which needs devices
        check(
            fl.Setting.create(simulation(**row.options), model_of(row), **{"rounds": 3, **row.choices}),
            federation(row.data),
        )
    entrances: tuple[Entrance, ...] = ("deploy", "Flower")
    for entrance in entrances:
        with pytest.raises(ConfigError) as caught:
            ENTER[entrance](row, tmp_path)
        assert caught.value.rule == rule, (entrance, str(caught.value))
        with adapt_wording(TERMS[entrance]):
            assert str(caught.value).endswith(capitalize(rewrite_keys(caught.value.fix))), str(caught.value)
