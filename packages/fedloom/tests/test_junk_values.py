"""Junk for every parameter of every Python face, from its signature: refused in a sentence, or used."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom as fl
from fedloom.data.sources.table.designs import DesignOptions
from fedloom.data.sources.table.reading import TableSource
from fedloom.engine.setting import Setting
from fedloom.errors import RunStopped
from fedloom.lab.experiment import Plan
from fedloom.lab.tune import Tuning
from fedloom.sklearn import FederatedClassifier

JUNK: dict[str, Any] = {
    "negative": -1, "zero": 0, "half": 0.5, "nan": float("nan"), "infinity": float("inf"), "huge": 10**400, "empty": "",
    "nul": "a\0b", "long": "x" * 5000, "half a character": "\ud800", "bytes": b"x", "list": [], "table": {}, "set": {1},
    "range": range(0), "object": object(), "function": lambda *a, **k: None, "true": True, "class": int, "dots": ...,
    "complex": 1j, "array": np.array([1.5, np.nan]), "tensor": torch.tensor(float("nan")), "tuple": (1, 2, 3),
    "path": Path("/dev/null/x"), "nested": {"a": {"b": [None]}}, "list of none": [None], "list of text": ["x"],
    "frame": pd.DataFrame(), "module": torch.nn.Linear(1, 1), "error": ValueError("x"),
}  # fmt: skip
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(45, 3)).astype(np.float32), np.arange(45) % 2
SITES = np.arange(45) % 3
FRAME = pd.DataFrame(X, columns=list("abc")).assign(y=Y, site=[f"s{k}" for k in SITES])
SPLIT = fl.partitions.iid(clients=3, validation=0.2)
FED = SPLIT((X, Y), seed=0)
HOSPITALS = fl.partitions.natural()(fl.Dataset.create(FRAME, target="y", client_column="site"), seed=0)
EXPERIMENT: dict[str, Any] = {
    "rounds": 1, "seeds": [0], "data": {"source": "digits"}, "partition": {"kind": "iid", "clients": 3},
    "method": [{"algorithm": "fedavg"}], "tune": {"trials": 1, "space": {"fedavg": {"local.lr": [0.1, 0.2]}}},
}  # fmt: skip


@cache
def fitted() -> FederatedClassifier:
    return FederatedClassifier(rounds=1).fit(X, Y, groups=SITES)


@pytest.fixture(scope="module", autouse=True)
def _fit_before_runs_are_stopped() -> None:
    fitted()


Face = tuple[Callable[..., object], dict[str, Any], list[str]]


def parameters(call: Callable[..., object]) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in inspect.signature(call).parameters.values() if p.kind not in kinds and p.name != "self"]


CHOICES = [name for name in Setting.model_fields if name != "algorithm"]
RUN = {"model": "softmax", "rounds": 1}
OF_TABLES = [*TableSource.model_fields, *DesignOptions.model_fields]


def faces() -> dict[str, Face]:
    """Every face by name: a call, the arguments with which it works, and the parameters to replace."""
    compared = {"methods": ["fedavg"], "data": (X, Y), "partition": SPLIT, "seeds": [0], "progress_bar": False, **RUN}
    of_runs, made = [*parameters(fl.simulate), *CHOICES], [*parameters(FederatedClassifier)]
    return {
        "simulate": (fl.simulate, {"algorithm": "fedavg", "fed": FED, **RUN}, of_runs),
        "compare": (fl.compare, compared, [p for p in parameters(fl.compare) if p != "name"]),
        "advise": (fl.advise, {"data": (X, Y), "budget": 1}, [p for p in parameters(fl.advise) if p != "budget"]),
        "analyze": (fl.analyze, {"analysis": "confusion", "clients": HOSPITALS}, parameters(fl.analyze)),
        "arrays": (fl.Dataset.create, {"obj": (X, Y)}, ["target", "task", "test", "name", "classes", "mean", "std",
                   "clients", "subject", "order", "strata", "features", "channels_last", "layout", "vocabulary"]),
        "tables": (fl.Dataset.create, {"obj": FRAME, "target": "y", "client_column": "site"}, OF_TABLES),
        "anything as data": (fl.Dataset.create, {}, ["obj"]),
        "clients": (fl.Federation.create, {}, ["clients"]),
        "open_run": (fl.open_run, {}, parameters(fl.open_run)[:1]),
        "open_model": (fl.open_model, {"path": "/dev/null/none", "model": torch.nn.Linear(1, 1)}, ["path"]),
        "fetch": (fl.fetch, {"name": "digits"}, ["name"]),
        "load": (fl.load, {"name_or_path": "digits"}, ["name_or_path", "data_dir"]),
        "tune": (lambda **keys: Tuning(EXPERIMENT | keys, "x.toml", Path("tune")), {}, [*EXPERIMENT]),
        "estimators": (lambda **keys: FederatedClassifier(**{"rounds": 1} | keys).fit(X, Y), {}, made),
        "fit": (FederatedClassifier(rounds=1).fit, {"X": X, "y": Y, "groups": SITES}, ["groups", "subjects"]),
        "predict": (lambda **keys: fitted().predict(**keys), {"X": X, "groups": SITES}, ["groups"]),
    }  # fmt: skip


def junk(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    call, given, replaced = faces()[name]
    for parameter in dict.fromkeys(replaced):
        for kind, value in JUNK.items():
            yield f"{parameter} = {kind}", lambda p=parameter, v=value: call(**given | {p: v})


@pytest.mark.parametrize("face", faces())
@pytest.mark.filterwarnings("ignore")
def test_no_junk_ends_in_an_error_of_a_library(face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def stop(*_: object, **__: object) -> None:
        raise RunStopped(fl.errors.Stop.INTERRUPTED, "the values were accepted")

    monkeypatch.setattr(sys.modules["fedloom.engine.simulate"], "run_rounds", stop)
    monkeypatch.setattr(Plan, "run", stop)
    raw = list[str]()
    for what, call in junk(face):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except fl.FedloomError as error:
            raw += [] if str(error).strip() else [f"{what}: no sentence"]
        except Exception as error:
            raw.append(f"{what}: {type(error).__name__}: {error}"[:160])
    assert not raw, "\n".join(raw)
