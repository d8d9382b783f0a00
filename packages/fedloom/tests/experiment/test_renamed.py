"""Keys that had another name: one sentence at every entrance, and recorded documents are read as before."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedloom as fl
from fedloom.algorithms import ALGORITHMS
from fedloom.data.partitions import PARTITIONS
from fedloom.engine.checks.moved import (
    restore_document,
    restore_numbers,
    update_document,
    update_numbers,
)
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError
from fedloom.hints import EARLIER_DEFAULTS, RENAMED_KEYS, RENAMED_VALUES
from fedloom.lab.experiment import Plan, open_run, parse, read
from fedloom.lab.experiment.overrides import apply_overrides
from fedloom.lab.experiment.schema import SETTING_TABLES
from fedloom.values import fields_of
from tests.commands import call

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "test": 0.05},
    "method": [{"algorithm": "fedavg"}],
}
PLACES = [
    (place, old, new)
    for place, names in RENAMED_KEYS.items()
    if place.split(" ")[0] in {"", "method", *SETTING_TABLES, "analysis"}
    for old, new in names.items()
]
ALIASES = {(f"partition {kind}", alias) for kind, entry in PARTITIONS.items() for alias in entry.aliases}
"""Names that papers have, which are accepted."""


def document_with(place: str, key: str, value: Any = "x") -> dict[str, Any]:
    """A document with a key at a place of the table of names."""
    table, _, kind = place.partition(" ")
    if not table:
        return {**SMALL, key: value}
    named: dict[str, Any] = {"source" if table == "data" else "kind": kind} if kind else {}
    if table == "data" and not kind:
        named = {"source": "csv", "path": "x.csv"}
    if table == "personalized_aggregation":
        named = {"kind": "attention"}
    if table in ("method", "analysis"):
        return {
            **SMALL,
            table: [{"algorithm": "fedavg"} | named | {key: value} if table == "method" else named | {key: value}],
        }
    kept = SMALL.get(table, {}) if not named else {}
    return {**SMALL, table: {**kept, **named, key: value}}


def test_every_new_name_is_a_key_and_no_old_one_is() -> None:
    for place, old, new in PLACES:
        table, _, kind = place.partition(" ")
        if table in ("", "method"):
            fields: Any = {**Setting.model_fields, "defaults": None}
        elif table == "analysis":
            fields = fields_of(fl.analyses.ANALYSES[kind])
        else:
            entry = SETTING_TABLES[table]
            chosen = entry.kinds[kind or "csv"] if table == "data" else entry.kinds.get(kind, entry.base)
            fields = fields_of(chosen)
        assert new in fields, (place, new)
        assert old not in fields, (place, old)


@pytest.mark.parametrize(("place", "old", "new"), PLACES, ids=[f"{p or 'top'}: {o}" for p, o, _ in PLACES])
def test_an_old_key_of_a_new_file_is_one_sentence_with_the_new_key(place: str, old: str, new: str) -> None:
    if (place, old) in ALIASES:
        return
    with pytest.raises(ConfigError) as caught:
        parse(document_with(place, old))
    assert f"unknown key {old!r}; its name is now {new!r}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("old", [old for place, old, _ in PLACES if place == ""])
def test_an_override_with_an_old_key_names_the_new_key(old: str) -> None:
    for text in (f"{old}=x", f"method.fedavg.{old}=x"):
        with pytest.raises(ConfigError, match=f"its name is now '{RENAMED_KEYS[''][old]}'"):
            parse(apply_overrides(SMALL, "file", [text]))


def test_calls_in_python_with_an_old_keyword_name_the_new_keyword() -> None:
    fed = fl.partitions.iid(clients=2, max_train_per_client=20)(fl.load("digits"), seed=0)
    for old, new in {**RENAMED_KEYS[""], **RENAMED_KEYS["simulate"]}.items():
        with pytest.raises(ConfigError, match=f"unknown key '{old}'; its name is now '{new}'"):
            fl.simulate("fedavg", fed, **{old: "x"})  # type: ignore[arg-type]
    for old, new in RENAMED_KEYS["compare"].items():
        with pytest.raises(ConfigError, match=f"unknown key '{old}'; its name is now '{new}'"):
            fl.compare(["fedavg"], fed, **{old: "x"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'used'; its name is now 'best-on-validation'"):
        fl.compare(["fedavg"], fed, compare_model="used")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'horizon'; its name is now 'decay_rounds'"):
        fl.LocalSGD(horizon=3)
    with pytest.raises(AttributeError, match="partitions.writers is now .*partitions.natural"):
        _ = fl.partitions.writers  # type: ignore[attr-defined]


@pytest.mark.parametrize(("place", "key"), [p for p in RENAMED_VALUES if p[0] in SETTING_TABLES])
def test_an_old_value_of_a_new_file_names_the_new_value(place: str, key: str) -> None:
    for old, new in RENAMED_VALUES[place, key].items():
        options: dict[str, Any] = {"noise_draws": {"kind": "feature-noise"}}.get(key, {})
        with pytest.raises(ConfigError) as caught:
            parse({**SMALL, place: {**options, key: old}})
        assert f"{old!r}; its name is now {new!r}" in str(caught.value)


def test_dirichlet_takes_the_name_of_either_paper() -> None:
    for kind in ("dirichlet", "quantity-skew", "mixed"):
        named = parse({**SMALL, "partition": {"kind": kind, "beta": 0.3}})
        assert named.partition == parse({**SMALL, "partition": {"kind": kind, "alpha": 0.3}}).partition
        assert named.settings()["partition"]["alpha"] == 0.3
        assert PARTITIONS[kind](beta=0.3) == PARTITIONS[kind](alpha=0.3)
        with pytest.raises(ConfigError, match="beta"):
            PARTITIONS[kind](beta=0.3, alpha=0.3)
        with pytest.raises(ConfigError, match="beta and alpha are the same option. Omit beta"):
            parse({**SMALL, "partition": {"kind": kind, "beta": 0.3, "alpha": 0.3}})


@pytest.mark.parametrize(("place", "old", "new"), PLACES, ids=[f"{p or 'top'}: {o}" for p, o, _ in PLACES])
def test_a_recorded_document_has_the_present_names_and_goes_back(place: str, old: str, new: str) -> None:
    recorded = document_with(place, old)
    now = update_document(recorded)
    assert now == document_with(place, new)
    assert update_document(now) == now
    assert restore_document(now) == restore_document(recorded)
    assert update_document(restore_document(now)) == now


def test_values_nested_tables_searches_and_grids_are_translated() -> None:
    recorded = {
        "partition": {"kind": "hybrid", "first": {"kind": "quality", "reading": "std", "draws": "anew", "base": {
            "kind": "quantity", "beta": 1.0}}, "beta": 0.5},
        "engine": {"oracle": "stacked"},
        "method": [{"algorithm": "fedavg", "weigher": {"kind": "fairfed", "beta": 1.0}, "local": {"horizon": 3},
                    "choose": {"local.horizon": [1, 2], "beta": [1]}}],
        "tune": {"model": "used", "space": {"all": {"local.horizon": [1], "beta": [2]}}},
        "grid": {"local": {"horizon": [1]}, "method": {"fedavg": {"weights": ["uniform"]}}},
    }  # fmt: skip
    now = update_document(recorded)
    assert now == {
        "partition": {"kind": "mixed", "first_partition": {"kind": "feature-noise", "sigma_unit": "std",
            "noise_draws": "per-batch", "base": {"kind": "quantity-skew", "alpha": 1.0}}, "alpha": 0.5},
        "engine": {"gradient_engine": "vmap"},
        "method": [{"algorithm": "fedavg", "aggregation_weights": {"kind": "fairfed", "beta": 1.0},
                    "local": {"decay_rounds": 3}, "choose": {"local.decay_rounds": [1, 2], "beta": [1]}}],
        "tune": {"model": "best-on-validation", "space": {"all": {"local.decay_rounds": [1], "beta": [2]}}},
        "grid": {"local": {"decay_rounds": [1]}, "method": {"fedavg": {"client_weights": ["uniform"]}}},
    }  # fmt: skip
    assert restore_document(now) == recorded


def test_a_fingerprint_is_of_the_first_names() -> None:
    numbers = Setting.create("fedavg", client_weights="uniform", engine={"gradient_engine": "loop"}).numbers()
    first = restore_numbers(numbers)
    assert first["weights"] == "uniform"
    assert first["engine.oracle"] == "looped"
    assert not first.keys() & {"client_weights", "engine.gradient_engine", "aggregation_weights.kind"}
    assert update_numbers(first) == numbers
    assert len(first) == len(numbers)


def test_a_run_directory_of_before_opens_reports_and_resumes(tmp_path: Path) -> None:
    document = {
        **SMALL, "client_weights": "uniform", "upload_transform": {"kind": "clip"},
        "engine": {"gradient_engine": "loop"},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 5.0, "max_train_per_client": 30},
    }  # fmt: skip
    Plan(parse(document), tmp_path / "run").run(page=False)
    file = tmp_path / "run" / "experiment.toml"
    recorded = tomllib.loads(file.read_text())
    file.write_text(tomli_w.dumps(restore_document(recorded)))
    first = file.read_text()
    assert all(word in first for word in ("weights =", ".channel]", "beta =", "keep =", "oracle =", ".weigher]"))
    assert open_run(tmp_path / "run").experiment.common.client_weights == "uniform"
    call("report", tmp_path / "run")
    metrics = (tmp_path / "run" / "metrics.parquet").read_bytes()
    Plan(read(file), tmp_path / "run").run(page=False)
    assert (tmp_path / "run" / "metrics.parquet").read_bytes() == metrics
    as_new = {key: value for key, value in tomllib.loads(first).items() if key != "resolved"}
    with pytest.raises(ConfigError, match="its name is now"):
        parse(as_new)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS["command"].items())
def test_an_old_option_of_the_command_line_names_the_new_option(old: str, new: str, tmp_path: Path) -> None:
    commands = {"--keep": "predict", "--by": "init", "--oracle": "bench", "--by-site": "glm", "--least": "cox"}
    command = {**commands, "--gate-port": "deploy init"}.get(old, "report").split()
    shown = call(*command, tmp_path, old, "x", code=2)
    assert f"No such option: {old}; its name is now {new}" in " ".join(shown.split())
    assert new in call(*command, "--help")


def test_no_default_of_the_schema_has_an_old_key() -> None:
    schema = json.loads(call("schema"))
    assert not {"weights", "weigher", "mixer", "channel", "settings"} & schema["properties"].keys()


@pytest.mark.parametrize(
    ("name", "key", "value"), [(n, k, v) for n, o in EARLIER_DEFAULTS.items() for k, v in o.items()]
)
def test_a_recorded_method_keeps_the_default_of_its_day(name: str, key: str, value: object) -> None:
    """A recorded document states the former default; its digest stays; a new file has the present default."""
    default = ALGORITHMS[name].model_fields[key].default
    old, stated = ({**SMALL, "method": [{"algorithm": name, **options}]} for options in ({}, {key: default}))
    assert default != value
    assert update_document(old)["method"] == [{"algorithm": name, key: value}]
    assert update_document(stated)["method"] == stated["method"]
    assert restore_document(update_document(old))["method"] == old["method"]
    assert restore_document(stated)["method"] == stated["method"]
    assert getattr(ALGORITHMS[name](), key) == default
