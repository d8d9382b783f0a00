"""A deployment of three sites, written once: tests that change it take a copy."""

import shutil

import pytest

from fedloom.lab.experiment import parse
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.server import bounded, presence, transport
from tests.deploy.grid import Clock


def make_experiment(*methods, rounds=3, clients=3, **tables):
    """A small comparison on digits."""
    document = {
        "name": "try",
        "rounds": rounds,
        "data": {"source": "digits"},
        "partition": {"kind": "iid", "clients": clients, "max_train_per_client": 60},
        "model": {"kind": "softmax"},
        "local": {"lr": 0.1, "batch_size": 20, "epochs": 1},
        "evaluate": {"every": 1},
        "method": [{"algorithm": name} if isinstance(name, str) else name for name in methods or ("fedavg",)],
    }
    return parse({**document, **tables})


@pytest.fixture(scope="session")
def experiment():
    return make_experiment


@pytest.fixture(scope="session")
def planned():
    return plan_deployment(make_experiment(), 3)


@pytest.fixture(scope="session")
def written(planned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment") / "try"
    write_directory(planned, folder, Location(host="fl.example.org"))
    return folder


@pytest.fixture
def ready(written, tmp_path):
    return shutil.copytree(written, tmp_path / "try")


@pytest.fixture
def clock(monkeypatch):
    """Time for the server that passes only where it sleeps."""
    made = Clock()
    for module in (bounded, transport, presence):
        monkeypatch.setattr(module, "time", made)
    return made
