"""Keys at the wrong place, in Python and in a file: each is refused with the place where it belongs."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

import pytest

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, FedloomError, InvalidValue
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.schema import SETTING_TABLES, TopLevelKeys

DOCUMENT: dict[str, Any] = {"data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("fedavg", {"lr": 0.1}, "'lr'; it belongs in local={'lr': 0.1}"),
        ("fedavg", {"learning_rate": 0.1}, "'learning_rate'; it belongs in local={'lr': 0.1}"),
        ("fedavg", {"local_epochs": 2}, "'local_epochs'; it belongs in local={'epochs': 2}"),
        ("fedavg", {"fraction_fit": 0.5}, "it belongs in sampler={'fraction': 0.5}"),
        ("fedavg", {"num_rounds": 3}, "did you mean 'rounds'?"),
        ("fedavg", {"num_clients": 3}, "or the partition, as in fl.partitions.iid(clients=3)"),
        ("ditto", {"epochs": 2}, "it belongs in local={'epochs': 2}"),
        ("fedprox", {"mu": 0.1}, "method. Pass fl.algorithms.FedProx(mu=0.1) instead"),
        (fl.algorithms.FedProx(), {"mu": 0.2}, "method. Pass fl.algorithms.FedProx(mu=0.2) instead"),
        ("equitable-fl", {"clusters": 2}, "method. Pass fl.algorithms.REGISTRY['equitable-fl'](clusters=2) instead"),
        ("fedavg", {"mu": 0.1}, "an option of other methods (fedprox, "),
        ("fedavg", {"fraction": 0.5}, "it belongs in sampler={'fraction': 0.5}"),
        ("fedavg", {"f": 2}, "it belongs in aggregator={'kind': 'trimmed-mean', 'f': 2}"),
        ("fedavg", {"hidden": [8]}, "it belongs in model={'kind': 'mlp', 'hidden': [8]}"),
        ("fedavg", {"beta": 0.5}, "the partition, as in fl.partitions.dirichlet(beta=0.5)"),
        ("fedavg", {"workers": 2}, "it belongs in engine={'workers': 2}"),
        ("fedavg", {"roundz": 2}, "did you mean 'rounds'"),
        ("fedavg", {"local": {"mu": 0.1}}, "unknown key 'mu'; it is an option of other methods (fedprox, "),
    ],
)
def test_in_python(method: Any, given: dict[str, Any], sentence: str) -> None:
    fed = fl.partitions.iid(clients=4)(fl.load("digits"), 0)
    for door in (lambda: fl.simulate(method, fed, rounds=1, **given), lambda: Setting.create(method, **given)):
        with pytest.raises(ConfigError) as refused:
            door()
        assert sentence in str(refused.value)
    with pytest.raises(ConfigError, match="unknown key"):
        fl.simulate(Setting.create(method), fed, **given)


def test_what_the_sentence_says_works() -> None:
    fed = fl.partitions.iid(clients=4)(fl.load("digits"), 0)
    given: dict[str, Any] = {"lr": 0.5, "fraction": 0.5, "hidden": [8], "f": 1, "every": 2}
    for name, value in given.items():
        with pytest.raises(ConfigError) as refused:
            fl.simulate("fedavg", fed, rounds=1, **{name: value})
        table, _, options = str(refused.value).partition("it belongs in ")[2].split(" or ")[0].partition("=")
        assert fl.simulate("fedavg", fed, rounds=1, **{table: ast.literal_eval(options)}).rounds == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lr": 0.1}, "experiment: unknown key 'lr'; it belongs in [local]: lr = 0.1"),
        ({"mu": 0.1}, "an option of methods (fedprox, "),
        ({"local": {"mu": 0.1}}, "[local]: unknown key 'mu'; it is an option of methods (fedprox, "),
        ({"local": {"rounds": 3}}, "it belongs at the top of the file, before any table: rounds = 3"),
        ({"clients": 4}, "[partition]"),
        ({"fraction": 0.5}, "[sampler]"),
        (
            {"method": [{"algorithm": "fedavg", "lr": 0.1}]},
            "it belongs in [local]: lr = 0.1. For this method alone, local = { lr = 0.1 }",
        ),
        ({"method": [{"algorithm": "fedavg", "servr_lr": 1.0}]}, "did you mean 'server_lr'"),
        ({"method": [{"algorithm": "fedavg", "name": "a"}]}, "unknown key 'name'; the name of a method in tables and"),
        ({"local": {"learning_rate": 0.1}}, "did you mean 'lr'"),
        ({"partition": {"kind": "iid", "alpha": 0.1}}, "[partition]: unknown key 'alpha'; it is an option of kind"),
        ({"seed": 1}, "did you mean 'seeds'"),
    ],
)
def test_in_a_file(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({**DOCUMENT, **change})
    assert sentence in str(refused.value)


DATA: dict[str, Any] = {"data": "digits", "partition": fl.partitions.iid(clients=3), "progress_bar": False}
KEYS = sorted({key for table in SETTING_TABLES.values() for keys in table.keys().values() for key in keys})
KEYWORDS = sorted({key for table in Setting.tables().values() for keys in table.keys().values() for key in keys})


def refusal(call: Any) -> str:
    """Return the sentence with which a call is refused."""
    with pytest.raises(FedloomError) as refused:
        call()
    return str(refused.value)


def takes(table: str, key: str) -> bool:
    """Whether a kind of a table has a key."""
    return any(key in keys for keys in SETTING_TABLES[table].keys().values())


@pytest.mark.parametrize("key", [key for key in KEYS if key not in (*SETTING_TABLES, *TopLevelKeys.model_fields)])
def test_every_key_is_named_with_tables_that_take_it(key: str) -> None:
    documents = [{**DOCUMENT, key: 1}, {**DOCUMENT, "method": [{"algorithm": "fedavg", key: 1}]}]
    documents += [{**DOCUMENT, table: {key: 1}} for table in ("local", "engine") if not takes(table, key)]
    for document in documents:
        said = refusal(lambda document=document: parse(document))
        homes, _, line = said.partition("it belongs in ")[2].partition(": ")
        if not homes:
            assert any(
                word in said for word in ("did you mean", "its name is now", "a separate", "at the top", f"{key}: ")
            ), said
        for home in re.findall(r"\[(\w+)\]", homes):
            assert takes(home, line.partition(" = ")[0]), said


@pytest.mark.parametrize("key", [key for key in KEYWORDS if key not in Setting.model_fields and key != "name"])
def test_every_key_is_named_with_a_keyword_that_takes_it(key: str) -> None:
    doors = [lambda given: Setting.create("fedavg", **given), lambda given: fl.compare(["fedavg"], **DATA, **given)]
    for door in doors:
        said = refusal(lambda door=door: door({key: 1}))
        places = re.findall(r"(\w+)=(\{[^}]*\})", said.partition("it belongs in ")[2])
        assert places or "did you mean" in said or "fl.partitions" in said, said
        for table, options in (place for place in places if place[0] != "tune"):
            with suppress(InvalidValue):  # whose value 1 another sentence refuses
                Setting.create("fedavg", **{table: ast.literal_eval(options)})


@pytest.mark.parametrize("key", ["lr", "fraction_fit", "clusters", "q", "flip", "channels_last", "num_clients"])
def test_every_door_of_python_names_the_same_place(key: str) -> None:
    fed = fl.partitions.iid(clients=4)(fl.load("digits"), 0)
    doors = [
        lambda given: fl.simulate("fedavg", fed, **given),
        lambda given: fl.simulate(Setting.create("fedavg"), fed, **given),
        lambda given: fl.compare(["fedavg"], **DATA, **given),
        lambda given: fl.compare({"a": {"algorithm": "fedavg", **given}}, **DATA),
        lambda given: fl.compare({"a": {"algorithm": REGISTRY["fedavg"](), **given}}, **DATA),
    ]
    said = {refusal(lambda door=door: door({key: 2})).rpartition(f"'{key}'; ")[2] for door in doors}
    assert len(said) == 1, said
    assert "did you mean" not in said.pop()


@pytest.mark.parametrize("key", ["evaluate", "engine", "seeds", "partition"])
def test_what_all_methods_share_is_refused_in_the_table_of_one(key: str) -> None:
    here, value = {"algorithm": "fedavg", key: {}}, "a separate table" if key != "seeds" else "at the top of the file"
    assert value in refusal(lambda: parse({**DOCUMENT, "method": [here]}))
    assert f"all methods share it. Pass compare(..., {key}=" in refusal(lambda: fl.compare({"a": here}, **DATA))


def test_a_table_in_the_place_of_a_name_is_named_by_what_it_holds() -> None:
    said = refusal(lambda: parse({**DOCUMENT, "optimizer": {"name": "adam"}}))
    assert said.endswith('it belongs in [local]: optimizer = "adam"')
    assert parse({**DOCUMENT, "local": {"optimizer": "adam"}}).common.local.optimizer == "adam"
