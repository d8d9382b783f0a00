"""FedSLR, Table 2: the gigabytes of a whole run, by the messages of the recipe's methods on its ResNet-18."""

from __future__ import annotations

import pytest
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.partitions import Iid
from fedloom.engine.clients.messages import Messages
from fedloom.local import Ctx, Work
from fedloom.local.oracles import make_oracle
from fedloom.tasks import make_task
from fedloom_studies.reproduce import read_recipe
from fedloom_studies.reproduce.choices import first_candidate_experiment
from fedloom_studies.reproduce.execute import parse_closed_document

PRINTED = {
    "fedavg": 893.92, "scaffold": 1787.83, "feddyn": 893.92, "perfedavg": 893.92, "apfl": 893.92, "ditto": 893.92,
    "fedspa": 446.96, "lg-fedavg": 0.41, "fedrep": 893.51, "local": 0.0,
}  # fmt: skip
"""GB, CIFAR-10; FedDyn, Per-FedAvg and Ditto are FedAvg's (*), local training sends nothing."""


def test_the_gigabytes_of_the_papers_table_are_those_of_its_methods_messages() -> None:
    """1,000 rounds of ten clients, both ways, four bytes a parameter."""
    one = read_recipe("fedslr-table1")
    document = one.make_documents("full")["C10 non-IID"]
    exchanges = document["rounds"] * document["sampler"]["clients"]
    assert exchanges == 10_000
    plan = parse_closed_document(first_candidate_experiment(document), one.name)
    images = Dataset("random", torch.rand(10, 3, 32, 32), torch.arange(10), "classification", tuple("0123456789"))
    fed = Iid(clients=1, test=0.0, validation=0.0)(images, 0)
    module = plan.common.model.build((3, 32, 32), 10, 0, None)
    oracle = make_oracle(module, make_task(images), fed)
    assert oracle.layout.d == 11_173_952  # 11.17 M in the table
    measured = {}
    for method in plan.methods:
        setting, ids, whole = method.setting.resolved(), torch.arange(1), torch.ones(1, 1)
        sizes = torch.tensor([[10]])
        ctx = Ctx(0, 1, 1, ids, oracle.layout, whole, sizes, None, setting.local, 0, setting.rounds)
        algorithm = setting.method.derive_options(ctx)
        server, template, kept = algorithm.init(oracle.layout.vector(module), ctx)
        down = algorithm.down(server, kept, ctx)
        rows = type(template)(*[row[None] for row in template])
        up, _ = algorithm.client(down, rows, Work(oracle, ids, whole, setting.local).idle())
        messages = Messages(algorithm, oracle.layout, torch.device("cpu"), None)
        lengths = (messages.up(up).lengths()[1], messages.down(down, server).lengths()[1])
        measured[method.label] = exchanges * sum(int(length.sum()) for length in lengths) / 1e9
    assert measured.keys() == PRINTED.keys() | {"fedslr"}
    for label, printed in PRINTED.items():
        assert measured[label] == pytest.approx(printed, abs=0.006), label
    assert measured["fedslr"] == measured["fedavg"]  # before its rank falls
