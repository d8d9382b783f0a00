"""One description of a run: its document, what decides its numbers, and what a folder of another run says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import Field

import fedloom as fl
from fedloom.algorithms import REGISTRY, PresetMethod
from fedloom.data.federation import Federation
from fedloom.engine.setting import Choices, Engine, Evaluate, Setting
from fedloom.engine.tables import SettingTable
from fedloom.errors import ConfigError, RunDirError
from fedloom.lab.experiment import parse
from fedloom.values import find_difference, flatten_document


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.iid(clients=4)(fl.load("digits"), seed=0)


CHOICES = {
    "rounds": 7,
    "model": {"kind": "mlp", "hidden": [8]},
    "task": {"loss": "torch.nn.functional:cross_entropy", "metrics": ["brier"], "class_weights": {"3": 2.0}},
    "local": {"lr": 0.1, "steps": 3, "optimizer": "adam", "optimizer_options": {"eps": 1e-6}},
    "sampler": {"kind": "uniform", "clients": 3},
    "aggregation_weights": "samples",
    "personalized_aggregation": {"kind": "attention", "quantile": 0.25},
    "aggregator": {"kind": "trimmed-mean", "f": 1},
    "attack": {"kind": "sign-flip", "fraction": 0.25},
    "upload_transform": "top-k",
    "augment": {"flip": 0.5},
    "early_stop": {"patience": 3, "result": "best"},
    "client_weights": "uniform",
    "devices": {"kind": "lognormal", "spread": 0.5},
    "schedule": {"kind": "deadline", "seconds": 20.0},
    "evaluate": {"every": 2},
    "engine": {"gradient_engine": "loop"},
}
"""Something other than the default for every choice but the method and the seed."""


def test_every_choice_is_written_and_read_back() -> None:
    assert {*CHOICES, "algorithm", "seed"} == set(Setting.model_fields)
    setting = Setting.create("fedavg", **CHOICES)
    again = Setting.create("fedavg", **setting.document())
    assert again == setting
    assert again.numbers() == setting.numbers()
    assert not {k for k in CHOICES if Setting.create("fedavg").document().get(k) == setting.document()[k]}


def test_the_document_is_that_of_an_experiment_file() -> None:
    document = {"data": {"source": "digits"}, "seeds": [3], "method": [{"algorithm": "fedavg"}], **CHOICES}
    document |= {"aggregation_weights": {"kind": "samples"}, "upload_transform": {"kind": "top-k"}}
    (method,) = parse(document).methods
    assert method.setting == Setting.create("fedavg", seed=3, **CHOICES)


def test_a_choice_is_added_in_one_place() -> None:
    class More(Setting):
        """A plain key more, and a table more."""

        patience: int = Field(3, ge=1, description="rounds to wait")
        late: Engine | None = None

    made = More.create("fedavg", patience=5)
    assert "patience" in More.plain()
    assert made.document()["patience"] == made.numbers()["patience"] == 5
    assert find_difference(More.create("fedavg").numbers(), made.numbers()) == "patience was 3, now it is 5"
    with pytest.raises(
        ConfigError, match=r"patience: .*greater than or equal to 1, got 0 \(patience: rounds to wait\)"
    ):
        More.create("fedavg", patience=0)


def test_what_changes_no_number_is_left_out_and_everything_else_is_in() -> None:
    setting = Setting.create("fedavg", **CHOICES)
    free = {f"{name}.{key}" for name, table in Setting.tables().items() for key in table.base.free}
    assert free == {f"evaluate.{k}" for k in Evaluate.free} | {f"engine.{k}" for k in Engine.free}
    assert set(flatten_document(setting.document())) - free == set(setting.numbers()) - {
        "algorithm.class",
        "algorithm.server_lr",
        "seed",
    }
    other = setting.with_(engine=setting.engine.with_(workers=2, state_memory_mib=1))
    assert other.numbers() == setting.numbers()


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_preset_is_resolved_into_its_parts(name: str) -> None:
    made = REGISTRY[name]()
    setting = Setting.create(name, sampler={"kind": "uniform", "clients": 3})
    resolved = setting.resolved()
    assert resolved.algorithm == setting.method == (made.algorithm if isinstance(made, PresetMethod) else made)
    assert resolved.resolved() == resolved
    assert resolved.numbers() == setting.numbers()
    if isinstance(made, PresetMethod) and made.sampler is not None:
        assert type(resolved.sampler) is type(made.sampler)
        assert getattr(resolved.sampler, "clients", 3) == 3


def test_a_setting_runs_as_its_choices_do(fed: Federation) -> None:
    choices = {"rounds": 2, "local": {"lr": 0.1}, "seed": 4}
    one = fl.simulate(Setting.create("fedavg", **choices), fed)
    other = fl.simulate("fedavg", fed, **choices)
    changed = fl.simulate(Setting.create("fedavg", **choices), fed, rounds=1)
    assert one.table().equals(other.table())
    assert torch.equal(one.models.rows("global"), other.models.rows("global"))
    assert changed.rounds == 1


def test_simulate_names_every_choice() -> None:
    assert {*Choices.__annotations__} == {*Setting.model_fields} - {"algorithm", "model"}
    assert all(f"``{name}``" in (fl.simulate.__doc__ or "") for name in Choices.__annotations__)


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"lrate": 1}, "unknown key 'lrate'"),
        ({"sampler": "unifrm"}, "did you mean 'uniform'"),
        ({"local": {"lr": -1}}, "lr: input should be greater than 0, got -1"),
        ({"model": 3}, "model: model must be a name"),
        ({"local": "fast"}, "local: must be a LocalSGD or a table, got 'fast'"),
    ],
)
def test_a_wrong_choice_is_a_sentence(fed: Federation, choices: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fl.simulate("fedavg", fed, **choices)
    assert sentence in str(caught.value)


def test_a_folder_of_another_run_says_what_differs(fed: Federation, tmp_path: Path) -> None:
    fl.simulate("fedavg", fed, rounds=1, folder=tmp_path)
    with pytest.raises(RunDirError, match=r"a different run: local\.lr was 0\.01, now it is 0\.2"):
        fl.simulate("fedavg", fed, rounds=1, local={"lr": 0.2}, folder=tmp_path)
    fl.simulate("fedavg", fed, rounds=1, folder=tmp_path, engine={"checkpoint_every": 1.0})


def test_a_table_without_choice_is_none() -> None:
    table = Setting.tables()["upload_transform"]
    assert isinstance(table, SettingTable)
    assert table.read({}) is table.read({"kind": "none"}) is table.read(None) is None
    with pytest.raises(ConfigError, match="kind is missing"):
        table.read({"bound": 1.0})
