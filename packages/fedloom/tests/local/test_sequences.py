"""Sequences of tokens: engines against a loop written by hand, and padding, which changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

import fedloom as fl
from fedloom.data import Dataset, Federation, Split
from fedloom.data.order import plan_batches
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import ORACLES, Network, make_oracle
from fedloom.models import LSTM, MLP, ModelSpec, Transformer
from fedloom.seeds import generator
from fedloom.tasks import Objective, make_task

SIZES, VOCABULARY, LONGEST, CLASSES = (1, 7, 20), 9, 6, 5
EXACT = {"rtol": 0.0, "atol": 1e-10}
MODELS: dict[str, ModelSpec] = {
    "lstm": LSTM(embedding=3, hidden=4, layers=2),
    "causal": Transformer(width=4, layers=2, heads=2),
    "tagger": Transformer(width=4, layers=1, heads=1, causal=False),
}


def federation(each: bool, pad: int = 0) -> Federation:
    """Clients with sequences of 2 to 6 tokens, some positions without a label."""
    g = torch.Generator().manual_seed(2)
    n = sum(SIZES)
    x = torch.randint(1, VOCABULARY, (n, LONGEST), generator=g)
    lengths = torch.randint(2, LONGEST + 1, (n, 1), generator=g)
    x = torch.where(torch.arange(LONGEST) < lengths, x, 0)
    y = torch.randint(0, CLASSES, (n, LONGEST) if each else (n,), generator=g)
    if each:
        hidden = torch.rand(n, LONGEST, generator=g) < 0.3
        hidden[:, 0] = False
        y = functional.pad(torch.where((x == 0) | hidden, -1, y), (0, pad), value=-1)
    x = functional.pad(x, (0, pad)).int()
    names = tuple(map(str, range(VOCABULARY)))
    data = Dataset("random", x, y, classes=names[:CLASSES], vocabulary=names)
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    empty = Split(torch.empty(0, dtype=torch.long), torch.zeros(len(SIZES) + 1, dtype=torch.long))
    parts = {"train": Split(torch.randperm(n, generator=g), offsets), "validation": empty, "test": empty}
    return Federation(data, parts, names=tuple(map(str, SIZES)), dtype=torch.float64)


def oracle(spec: ModelSpec, fed: Federation, name: str, objective: Objective | None = None) -> Network:
    module = spec.build(fed.data.shape, CLASSES, 1, fed.data.tokens)
    return make_oracle(module, make_task(fed.data, objective or Objective()), fed, name)


def trained(network: Network, local: LocalSGD) -> Tensor:
    start = network.layout.vector(network.module, torch.float64).expand(len(SIZES), -1)
    return descend(start.clone(), Work(network, torch.arange(len(SIZES)), torch.full((len(SIZES), 1), 1 / 3), local))


def by_hand(spec: ModelSpec, fed: Federation, client: int, each: bool) -> Tensor:
    """Two passes of SGD with momentum over batches of 4; a client's loss is the mean over its labelled positions."""
    module = spec.build(fed.data.shape, CLASSES, 1, fed.data.tokens).double().train()
    parameters = list(module.parameters())
    optimiser = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    index = fed.indices("train", client)
    x, y = fed.data.x[index].long(), fed.data.y[index]
    for row in plan_batches(len(x), 4, 2 * -(-len(x) // 4), generator(0, 1, client, "local")):
        batch = row[row >= 0]
        optimiser.zero_grad()
        if each:
            loss = functional.cross_entropy(module(x[batch]).mT, y[batch], ignore_index=-1, reduction="sum")
            loss = loss / (len(batch) * (y >= 0).sum() / len(y))
        else:
            loss = functional.cross_entropy(module(x[batch]), y[batch])
        loss.backward()
        optimiser.step()
    return torch.cat([p.detach().reshape(-1) for p in parameters])


@pytest.mark.parametrize("each", [False, True], ids=["a label", "a label per position"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_training_is_the_loop_written_by_hand(engine: str, model: str, each: bool) -> None:
    fed = federation(each)
    found = trained(oracle(MODELS[model], fed, engine), LocalSGD(lr=0.1, momentum=0.5, batch_size=4, epochs=2))
    for client, row in enumerate(found):
        torch.testing.assert_close(row, by_hand(MODELS[model], fed, client, each), **EXACT)


@pytest.mark.parametrize("each", [False, True], ids=["a label", "a label per position"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_more_padding_changes_nothing(engine: str, model: str, each: bool) -> None:
    local = LocalSGD(lr=0.1, batch_size=4, epochs=2)
    found = []
    for pad in (0, 5):
        network = oracle(MODELS[model], federation(each, pad), engine)
        rows = trained(network, local)
        work = Work(network, torch.arange(len(SIZES)), torch.full((len(SIZES), 1), 1 / 3), local)
        index, sizes = network.fed.gather("train", torch.arange(len(SIZES)))
        owner = torch.arange(len(SIZES)).repeat_interleave(sizes)
        outputs = network.outputs_of(rows, index, sizes)
        figures = network.task.metrics(outputs, network.fed.targets(index), owner, len(SIZES))
        figures |= {"objective": work.loss(rows), "own": work.accuracy(rows), "sizes": work.sizes}
        figures["activations"] = work.activations(rows)
        found.append({"rows": rows, "gradient": work.full_grad(rows), **figures})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, **EXACT, equal_nan=True)


@pytest.mark.parametrize("each", [False, True], ids=["a label", "a label per position"])
def test_the_loss_that_is_shown_is_the_objective(each: bool) -> None:
    network = oracle(MODELS["causal"], federation(each), "loop")
    row = network.layout.vector(network.module)
    work = Work(network, torch.arange(len(SIZES)), torch.full((len(SIZES), 1), 1 / 3), LocalSGD())
    index, sizes = network.fed.gather("train", torch.arange(len(SIZES)))
    owner = torch.arange(len(SIZES)).repeat_interleave(sizes)
    outputs = torch.cat([*network.outputs(row, index)])
    shown = network.task.metrics(outputs, network.fed.targets(index), owner, len(SIZES))
    torch.testing.assert_close(shown["loss"], work.loss(row)[:, 0], **EXACT)
    for i in range(len(SIZES)):
        where = network.fed.indices("train", i)
        module = network.module.eval()
        vector_to_parameters(row.clone(), module.parameters())
        logits, y = module(network.fed.data.x[where].long()), network.fed.data.y[where]
        logits, y = (logits[y >= 0], y[y >= 0]) if each else (logits, y)
        torch.testing.assert_close(shown["loss"][i], functional.cross_entropy(logits, y).detach(), **EXACT)
        assert float(shown["accuracy"][i]) == pytest.approx(float((logits.argmax(-1) == y).double().mean()))


def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, written by a user."""
    return functional.cross_entropy(outputs, y)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_an_own_loss_and_weights_of_one_see_labelled_positions_only(engine: str) -> None:
    fed, local = federation(True), LocalSGD(lr=0.1, batch_size="full", epochs=3)
    plain = trained(oracle(MODELS["causal"], fed, engine), local)
    own = trained(oracle(MODELS["causal"], fed, engine, Objective(loss=own_loss, metrics=("perplexity",))), local)
    weighed = trained(oracle(MODELS["causal"], fed, engine, Objective(class_weights=[1.0] * CLASSES)), local)
    torch.testing.assert_close(own, plain, **EXACT)
    torch.testing.assert_close(weighed, plain, **EXACT)


def test_engines_agree_with_dropout() -> None:
    fed, spec = federation(True), Transformer(width=4, layers=1, heads=2, dropout=0.3)
    rows = [trained(oracle(spec, fed, name), LocalSGD(lr=0.1, batch_size=4)) for name in ("loop", "vmap")]
    torch.testing.assert_close(*rows, **EXACT)
    assert not torch.equal(
        rows[0], trained(oracle(spec.with_(dropout=0.0), fed, "loop"), LocalSGD(lr=0.1, batch_size=4))
    )


def test_classes_are_counted_by_position() -> None:
    fed = federation(True)
    counts = fed.class_counts("train")
    for i in range(len(SIZES)):
        y = fed.data.y[fed.indices("train", i)]
        assert counts[i].tolist() == torch.bincount(y[y >= 0], minlength=CLASSES).tolist()
    assert fed.sizes("train").tolist() == list(SIZES)


def test_positions_after_a_token_do_not_change_what_is_predicted_there() -> None:
    fed = federation(True)
    for name in ("lstm", "causal"):
        module: nn.Module = MODELS[name].build((LONGEST,), CLASSES, 0, fed.data.tokens)
        x = torch.randint(1, VOCABULARY, (3, LONGEST), generator=torch.Generator().manual_seed(0))
        changed = x.clone()
        changed[:, 4:] = 1 + x[:, 4:] % (VOCABULARY - 1)
        a, b = module(x), module(changed)
        torch.testing.assert_close(a[:, :4], b[:, :4], rtol=0, atol=1e-6)
        assert not torch.allclose(a[:, 4:], b[:, 4:])


def test_fused_takes_no_tokens() -> None:
    assert type(oracle(MODELS["lstm"], federation(False), "auto")) is ORACLES["loop"]
    with pytest.raises(Exception, match="needs numbers, but these samples are tokens"):
        MLP().build((LONGEST,), CLASSES, 0, (VOCABULARY, False))


def test_a_federation_of_tokens_on_another_type_keeps_them_whole() -> None:
    fed = federation(True).to(dtype=torch.float32)
    assert fed.fetch(torch.arange(2)).dtype == torch.int64
    assert replace(fed, dtype=torch.float64).fetch(torch.arange(2)).dtype == torch.int64


def test_a_layer_for_every_position_trains() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 5, 3, generator=rng), torch.randint(0, 3, (20, 5), generator=rng)
    data = fl.Dataset("positions", x, y, classes=("a", "b", "c"), positions=True)
    fed = fl.partitions.iid(clients=2)(data, seed=0)
    rows, net = [], nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    for oracle in ("auto", "vmap"):
        rows.append(fl.simulate("fedavg", fed, net, rounds=2, engine={"gradient_engine": oracle}).models.rows("global"))
    torch.testing.assert_close(*rows)
    with pytest.raises(fl.errors.Refused, match="gradient engine 'compiled' requires"):
        fl.simulate("fedavg", fed, net, rounds=2, engine={"gradient_engine": "compiled"})
