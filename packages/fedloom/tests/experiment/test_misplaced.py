"""Keys at the wrong place, in Python and in a file: each is refused with the place where it belongs."""

from __future__ import annotations

import ast
from typing import Any

import pytest

import fedloom as fl
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError
from fedloom.lab.experiment import parse

DOCUMENT: dict[str, Any] = {"data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("fedavg", {"lr": 0.1}, "'lr'; it belongs in local={'lr': 0.1}"),
        ("fedavg", {"learning_rate": 0.1}, "'learning_rate'; it belongs in local={'lr': 0.1}"),
        ("fedavg", {"local_epochs": 2}, "'local_epochs'; it belongs in local={'epochs': 2}"),
        ("fedavg", {"fraction_fit": 0.5}, "it belongs in sampler={'fraction': 0.5}"),
        ("fedavg", {"num_rounds": 3}, "did you mean 'rounds'?"),
        ("fedavg", {"num_clients": 3}, "or the partition, as fl.partition.iid(clients=3)"),
        ("ditto", {"epochs": 2}, "it belongs in local={'epochs': 2}"),
        ("fedprox", {"mu": 0.1}, "give fl.algorithms.FedProx(mu=0.1) in its place"),
        (fl.algorithms.FedProx(), {"mu": 0.2}, "give fl.algorithms.FedProx(mu=0.2) in its place"),
        ("equitable-fl", {"clusters": 2}, "give fl.algorithms.REGISTRY['equitable-fl'](clusters=2) in its place"),
        ("fedavg", {"mu": 0.1}, "an option of other methods (fedprox, "),
        ("fedavg", {"fraction": 0.5}, "it belongs in sampler={'fraction': 0.5}"),
        ("fedavg", {"f": 2}, "it belongs in aggregator={'kind': 'trimmed-mean', 'f': 2}"),
        ("fedavg", {"hidden": [8]}, "it belongs in model={'kind': 'mlp', 'hidden': [8]}"),
        ("fedavg", {"beta": 0.5}, "the partition, as fl.partition.dirichlet(beta=0.5)"),
        ("fedavg", {"workers": 2}, "it belongs in engine={'workers': 2}"),
        ("fedavg", {"roundz": 2}, "did you mean 'rounds'"),
        ("fedavg", {"local": {"mu": 0.1}}, "unknown key 'mu'; it is an option of other methods (fedprox, "),
    ],
)
def test_in_python(method: Any, given: dict[str, Any], sentence: str) -> None:
    fed = fl.partition.iid(clients=4)(fl.load("digits"), 0)
    for door in (lambda: fl.simulate(method, fed, rounds=1, **given), lambda: Setting.of(method, **given)):
        with pytest.raises(ConfigError) as refused:
            door()
        assert sentence in str(refused.value)
    with pytest.raises(ConfigError, match="unknown key"):
        fl.simulate(Setting.of(method), fed, **given)


def test_what_the_sentence_says_works() -> None:
    fed = fl.partition.iid(clients=4)(fl.load("digits"), 0)
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
            "it belongs in [local]: lr = 0.1; for this method alone, local = { lr = 0.1 }",
        ),
        ({"method": [{"algorithm": "fedavg", "servr_lr": 1.0}]}, "did you mean 'server_lr'"),
        ({"local": {"learning_rate": 0.1}}, "did you mean 'lr'"),
        ({"partition": {"kind": "dirichlet", "alpha": 0.1}}, "[partition]: unknown key 'alpha'; did you mean 'beta'"),
        ({"seed": 1}, "did you mean 'seeds'"),
    ],
)
def test_in_a_file(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({**DOCUMENT, **change})
    assert sentence in str(refused.value)
