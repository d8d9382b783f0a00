"""Samples, models and losses as apps have them: a step is that of torch on the app's own module and loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fedloom_sites.flower as ff
from fedloom.errors import ConfigError, FedloomError
from tests.cures import applied
from tests.flower.app import App

N, LR = 6, 0.1


def numbers(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1))


def codes(most: int, *shape: int) -> Tensor:
    return torch.randint(1, most, (N, *shape), generator=torch.Generator().manual_seed(2))


class Texts(nn.Module):
    """A model of two inputs by name, whose output has fields, as those of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Mean of the embeddings, and scores."""
        rows = (self.tokens(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return SimpleNamespace(logits=self.head(rows))


class Masked(Texts):
    """A model that in evaluation fails on a text without any position, as torch's own encoder does."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Scores."""
        if not self.training and not bool(attention_mask.any(1).all()):
            raise ValueError("a text has no position")
        return super().forward(input_ids, attention_mask)


class Pairs(nn.Module):
    """A model of two inputs by position."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.left(a) + self.right(b.flatten(1))
        return scores


class Squeezed(nn.Linear):
    """A model that gives a number per sample, without a second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Numbers."""
        return super().forward(x).squeeze(1)


class Items(Dataset[Any]):
    """Samples that are what a function makes of a number."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> Any:
        return self.item(k)


class Stream(IterableDataset[Any]):
    """Samples that come in their order only."""

    def __iter__(self) -> Any:
        return zip(numbers(5), codes(3), strict=True)


LENGTHS = [2, 5, 3, 4, 1, 5]


def padded(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch of texts of several lengths, as an app's collate_fn makes it."""
    tokens = nn.utils.rnn.pad_sequence([text for text, _ in items], batch_first=True)
    return {"attention_mask": (tokens > 0).long(), "input_ids": tokens, "labels": torch.tensor([y for _, y in items])}


class Case(NamedTuple):
    """An app: its module, samples and loss; and the outputs and targets that torch has of all samples."""

    module: Callable[[], nn.Module]
    samples: Callable[[], Any]
    loss: Any
    torch: Callable[[nn.Module], tuple[Tensor, Tensor]]
    keys: tuple[str, ...] = ()


def texts() -> list[tuple[Tensor, int]]:
    return [(codes(20, 5)[k, :length], int(codes(3)[k])) for k, length in enumerate(LENGTHS)]


def text_outputs(module: nn.Module) -> tuple[Tensor, Tensor]:
    batch = padded(texts())
    y = batch.pop("labels")
    return module(**batch).logits, y


def next_tokens() -> Tensor:
    """The tokens after those of `codes`; -100 after the end of a text."""
    tokens = codes(9, 5).roll(-1, 1)
    return tokens.where(torch.arange(5) < torch.tensor(LENGTHS)[:, None] - 1, -100).index_fill(0, torch.tensor([4]), 3)


def tags() -> Tensor:
    """A label per position, at least one of which is 1."""
    return (codes(4, 4) % 3).index_fill(1, torch.tensor([0]), 1)


def of_sequences(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the last position of every sequence."""
    return nn.functional.cross_entropy(outputs[:, -1, :], targets[:, -1])


def image_items(k: int) -> dict[str, Any]:
    return {"writer": k, "image": numbers(1, 4, 4)[k].numpy(), "character": int(codes(3)[k])}


class Answers(nn.Linear):
    """Gives a dict."""

    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, x: Tensor) -> Any:
        """The scores, and the input beside them."""
        return {"hidden": x, "logits": super().forward(x)}


CASES = {
    "texts by a collate_fn": Case(
        Texts, lambda: DataLoader(Items(lambda k: texts()[k]), 2, shuffle=True, collate_fn=padded),
        nn.CrossEntropyLoss(), text_outputs,
    ),
    "texts under a mask": Case(
        Masked, lambda: DataLoader(Items(lambda k: texts()[k]), 2, collate_fn=padded), None, text_outputs,
    ),
    "dicts with more entries": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), lambda: Items(image_items),
        nn.CrossEntropyLoss(), lambda m: (m(numbers(1, 4, 4)), codes(3)), ("image", "character"),
    ),
    "inputs by position": Case(
        Pairs, lambda: Items(lambda k: (numbers(3)[k], numbers(2, 2)[k], int(codes(2)[k]))),
        None, lambda m: (m(numbers(3), numbers(2, 2)), codes(2)),
    ),
    "tokens": Case(
        lambda: nn.EmbeddingBag(9, 3), lambda: (codes(9, 4), codes(3)), None, lambda m: (m(codes(9, 4)), codes(3)),
    ),
    "a number per sample": Case(
        lambda: Squeezed(5, 1), lambda: (numbers(5), numbers(2)[:, 0]), nn.HuberLoss(),
        lambda m: (m(numbers(5)), numbers(2)[:, 0]),
    ),
    "images as outputs": Case(
        lambda: nn.Conv2d(1, 1, 3, padding=1), lambda: (numbers(1, 4, 4), numbers(1, 4, 4)), nn.L1Loss(),
        lambda m: (m(numbers(1, 4, 4)), numbers(1, 4, 4)),
    ),
    "several labels": Case(
        lambda: nn.Linear(5, 3), lambda: (numbers(5), (numbers(3) > 0).float()), nn.BCEWithLogitsLoss(),
        lambda m: (m(numbers(5)), (numbers(3) > 0).float()),
    ),
    "shares of classes": Case(
        lambda: nn.Linear(5, 3), lambda: (numbers(5), numbers(3).softmax(1)), nn.CrossEntropyLoss(),
        lambda m: (m(numbers(5)), numbers(3).softmax(1)),
    ),
    "soft labels of two classes": Case(
        lambda: nn.Linear(5, 1), lambda: (numbers(5), numbers(1).sigmoid()), nn.BCEWithLogitsLoss(),
        lambda m: (m(numbers(5)), numbers(1).sigmoid()),
    ),
    "whole numbers of a weighted loss": Case(
        lambda: Squeezed(5, 1), lambda: (numbers(5).double().numpy(), codes(2).numpy()),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), lambda m: (m(numbers(5)), codes(2).float()),
    ),
    "logarithms of probabilities": Case(
        lambda: nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(1)), lambda: (numbers(5), codes(3)), nn.NLLLoss(),
        lambda m: (m(numbers(5)), codes(3)),
    ),
    "counts": Case(
        lambda: nn.Linear(5, 1), lambda: (numbers(5), codes(9, 1)), nn.PoissonNLLLoss(),
        lambda m: (m(numbers(5)), codes(9, 1)),
    ),
    "next tokens": Case(
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), lambda: (codes(9, 5), next_tokens()), None,
        lambda m: (m(codes(9, 5)).transpose(1, 2), next_tokens()),
    ),
    "tags but of padding": Case(
        lambda: nn.Linear(5, 3), lambda: (numbers(4, 5), tags()), nn.CrossEntropyLoss(ignore_index=2),
        lambda m: (m(numbers(4, 5)).transpose(1, 2), tags()),
    ),
    "a loss of positions": Case(
        lambda: nn.Linear(5, 3), lambda: (numbers(4, 5), codes(3, 4)), nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda m: (m(numbers(4, 5)).flatten(0, 1), codes(3, 4).flatten()),
    ),
    "a loss of whole sequences": Case(
        lambda: nn.Linear(5, 3), lambda: (numbers(4, 5), codes(3, 4)), of_sequences,
        lambda m: (m(numbers(4, 5)), codes(3, 4)),
    ),
    "arrays of numpy": Case(
        lambda: nn.Linear(5, 3), lambda: (numbers(5).numpy(), codes(3).numpy()), None,
        lambda m: (m(numbers(5)), codes(3)),
    ),
    "a dict with logits": Case(
        Answers, lambda: (numbers(5), codes(3)), None, lambda m: (m(numbers(5))["logits"], codes(3)),
    ),
    "a stream": Case(
        lambda: nn.Linear(5, 3), lambda: DataLoader(Stream()), None, lambda m: (m(numbers(5)), codes(3)),
    ),
    "a loader of some samples": Case(
        lambda: nn.Linear(5, 3),
        lambda: DataLoader(TensorDataset(numbers(5), codes(3)), sampler=SubsetRandomSampler([4, 1])),
        None, lambda m: (m(numbers(5)[[1, 4]]), codes(3)[[1, 4]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_step_on_all_samples_is_that_of_torch(case: Case) -> None:
    module = case.module()
    app = App(lambda context: ff.Local(case.module(), case.samples(), case.loss, keys=case.keys), 1)
    strategy = ff.Strategy("fedavg", module, min_nodes=1, local={"lr": LR, "batch_size": "full", "steps": 1})
    moved = strategy.start(app.grid, ArrayRecord(module.state_dict()), num_rounds=1).arrays.to_torch_state_dict()
    outputs, y = case.torch(module)
    grads = torch.autograd.grad((case.loss or nn.CrossEntropyLoss())(outputs, y), list(module.parameters()))
    for (name, value), g in zip(module.named_parameters(), grads, strict=True):
        torch.testing.assert_close(moved[name], value.detach() - LR * g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["ditto", "fedrep", "fedala"])
def test_a_model_of_several_inputs_is_personalised_and_scored(method: str) -> None:
    case = CASES["texts by a collate_fn"]
    app = App(lambda context: ff.Local(Texts(), case.samples(), testset=case.samples()), 2)
    strategy = ff.Strategy(method, Texts(), local={"lr": 0.5, "batch_size": 2, "epochs": 2})
    figures = strategy.start(app.grid, ArrayRecord(Texts().state_dict()), num_rounds=6).evaluate_metrics_clientapp
    assert figures[6]["personal/test/loss"] < figures[1]["personal/test/loss"]
    module = Texts()
    module.load_state_dict(ff.personal_model(app.contexts[100]))
    outputs, y = text_outputs(module.eval())
    own = strategy.client_metrics[6][0]["personal/test/loss"]
    assert nn.functional.cross_entropy(outputs, y).item() == pytest.approx(own, rel=1e-5)


SENTENCES: dict[str, tuple[Callable[[], ff.Local], str]] = {
    "no target by name": (
        lambda: ff.Local(nn.Linear(5, 3), Items(image_items)),
        (
            "trainset: the samples contain the entries 'writer', 'image', 'character', and fedloom does not "
            "know which one is the target. Name"
        ),
    ),
    "no such key": (
        lambda: ff.Local(nn.Linear(5, 3), Items(image_items), keys=("picture", "character")),
        "keys: the samples in trainset do not contain 'picture'. Their entries are: 'writer', 'image', 'character'",
    ),
    "no target": (lambda: ff.Local(nn.Linear(5, 3), Items(lambda k: numbers(5)[k])), "a sample has no target: Tensor"),
    "no tensors": (
        lambda: ff.Local(nn.Linear(5, 3), Items(lambda k: ("good", 1))),
        "'0' of the samples must be a tensor or a number, got tuple",
    ),
    "a sampler that weighs": (
        lambda: ff.Local(
            nn.Linear(5, 3),
            DataLoader(TensorDataset(numbers(5), codes(3)), sampler=WeightedRandomSampler([1.0] * N, N)),
        ),
        (
            "uses a WeightedRandomSampler, but the strategy's local settings determine how batches are drawn. Pass "
            "the Dataset"
        ),
    ),
    "other lengths": (
        lambda: ff.Local(nn.Linear(5, 3), (numbers(5), codes(3)), testset=(numbers(4), codes(3))),
        r"0: samples have the shapes \[4\] and \[5\]. Pad all parts to the same length",
    ),
    "no row per sample": (
        lambda: ff.Local(nn.Sequential(nn.Linear(5, 3), nn.Flatten(0)), (numbers(5), codes(3))),
        "a tensor with one row per sample, .* got shape .6. for 2 samples",
    ),
    "batches": (
        lambda: ff.Local(nn.Linear(5, 3), [*DataLoader(TensorDataset(numbers(5), codes(3)), N - 1)]),
        r"trainset is a list of 2 batches. Pass the data set of the batches, or \(torch.cat",
    ),
    "no training samples": (lambda: ff.Local(nn.Linear(5, 3), None), "trainset is None"),
    "no such device": (
        lambda: ff.Local(nn.Linear(5, 3), (numbers(5), codes(3)), device="gpu"), "device: 'gpu' does not exist",
    ),
    "large codes": (
        lambda: ff.Local(nn.EmbeddingBag(9, 3), (codes(9, 4) * 2**24, codes(3))), "whole numbers of at least 16777216",
    ),
    "a loss of other shapes": (
        lambda: ff.Local(nn.Linear(5, 3), (numbers(5), codes(3)), loss=lambda o, y: (o.view(7, 7) - y).mean()),
        r"loss: <lambda> fails on outputs \[2, 3\] with targets \[2\] \(RuntimeError",
    ),
    "a loss that is not reduced": (
        lambda: ff.Local(nn.Linear(5, 1), (numbers(5), numbers(1)), loss=nn.MSELoss(reduction="none")),
        r"loss: MSELoss must return one number for a batch, for example the mean, got \[2, 1\]",
    ),
    "labels of an image": (
        lambda: ff.Local(nn.Conv2d(1, 3, 3, padding=1), (numbers(1, 4, 4), codes(3, 4, 4))),
        r"targets of shape \[4, 4\] do not fit outputs of \[3, 4, 4\]",
    ),
    "outputs without logits": (
        lambda: ff.Local(nn.LSTM(5, 3), (numbers(4, 5), codes(3))),
        "a dict or object whose 'logits' are such a tensor, got tuple for 2 samples",
    ),
    "labels beyond": (lambda: ff.Local(nn.Linear(5, 2), (numbers(5), codes(9))), "labels must be from 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize(("local", "sentence"), SENTENCES.values(), ids=SENTENCES.keys())
def test_samples_that_cannot_be_are_a_sentence(local: Callable[[], ff.Local], sentence: str) -> None:
    with pytest.raises(FedloomError, match=sentence):
        local().read()


def frozen(seed: int) -> nn.Module:
    first = nn.Linear(5, 6).requires_grad_(requires_grad=False)
    nn.init.normal_(first.weight, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(first.bias)
    return nn.Sequential(first, nn.Linear(6, 3))


def test_values_that_do_not_train_must_be_those_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    def mixed(context: Context) -> ff.Local:
        return ff.Local(frozen(int(context.node_id == 101)), (numbers(5), codes(3)))

    strategy = ff.Strategy("ditto", frozen(0))
    strategy.start(App(mixed, 3).grid, ArrayRecord(frozen(0).state_dict()), num_rounds=1)
    assert strategy.state is not None
    assert len(strategy.state.uploads) == 2
    assert "node 101: '0.weight' is not trained, but its values on the node (mean " in capsys.readouterr().err


def test_models_of_text_are_personalised_and_scored_by_position() -> None:
    texts, net = (codes(9, 5), next_tokens()), lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    app = App(lambda context: ff.Local(net(), texts, testset=texts), 2)
    strategy = ff.Strategy("ditto", net(), local={"lr": 0.5, "batch_size": 2, "epochs": 2})
    strategy.start(app.grid, ArrayRecord(net().state_dict()), num_rounds=2)
    module = net()
    module.load_state_dict(ff.personal_model(app.contexts[100]))
    own = strategy.client_metrics[2][0]
    outputs, y = module(texts[0]).transpose(1, 2), texts[1]
    assert nn.functional.cross_entropy(outputs, y).item() == pytest.approx(own["personal/test/loss"], rel=1e-5)
    right = (outputs.argmax(1) == y)[y >= 0].float().mean().item()
    assert right == pytest.approx(own["personal/test/accuracy"], rel=1e-5)


def test_a_strategy_of_flower_is_told_that_nodes_run_fedloom() -> None:
    app = App(lambda context: ff.Local(nn.Linear(5, 3), (numbers(5), codes(3))), 2)
    (reply, *_) = app.grid.send_and_receive(
        [
            Message(
                RecordDict({"arrays": ArrayRecord(nn.Linear(5, 3).state_dict())}), dst_node_id=100, message_type="train"
            )
        ]
    )
    assert reply.has_error()
    assert "strategy. Use fedloom_sites.flower.Strategy" in reply.error.reason


def test_nodes_with_other_samples_take_no_part() -> None:
    def mixed(context: Context) -> ff.Local:
        x = codes(9, 4) if context.node_id != 102 else codes(9, 3)
        return ff.Local(nn.EmbeddingBag(9, 3), (x, codes(3)))

    strategy = ff.Strategy("ditto", nn.EmbeddingBag(9, 3), min_nodes=3)
    with pytest.raises(ConfigError, match=r"node 102: its samples are \[3\] int64 for a classification with 3 outputs"):
        strategy.start(App(mixed, 3).grid, ArrayRecord(nn.EmbeddingBag(9, 3).state_dict()), num_rounds=1)


def test_random_changes_of_samples_are_refused_and_what_the_error_names_works() -> None:
    """Samples are read once, so they would have been drawn once; a loader's own collate_fn counts."""
    x, y = numbers(1, 4, 4), codes(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return x[i] + torch.rand(()), y[i]

    d = Noisy()
    for given in (d, DataLoader(d, 2, shuffle=True)):
        with pytest.raises(
            FedloomError, match="trainset: sample . differs when it is read again.*pass augment to"
        ) as e:
            ff.Local(model, given).read()
    frozen = applied(str(e.value).split(", pass ")[-1], d=d)
    assert len(ff.Local(model, frozen).read().fed.data) == N

    def masked(samples: list[Any]) -> Any:
        values = torch.stack([a for a, _ in samples])
        return values * (torch.rand(len(values), 1, 1, 1) > 0.15), torch.stack([b for _, b in samples])

    steady = TensorDataset(x, y)
    before = torch.get_rng_state()
    with pytest.raises(
        ConfigError,
        match="the collate_fn of the DataLoader is random: it makes different batches from the same samples",
    ):
        ff.Local(model, DataLoader(steady, 2, collate_fn=masked)).read()
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(ff.Local(model, DataLoader(steady, 2)).read().fed.data.x, x)


def test_a_subject_in_two_sets_is_refused_and_its_entry_is_no_input() -> None:
    def sets(first: int) -> list[dict[str, object]]:
        values = torch.Generator().manual_seed(first)
        return [
            {"x": torch.randn(5, generator=values), "patient": f"p{first + k // 2}", "label": k % 3} for k in range(8)
        ]

    apart = ff.Local(nn.Linear(5, 3), sets(0), testset=sets(10), subject="patient").read()
    assert apart.fed.data.shape == (5,)
    assert len(apart.fed.data.design.units) == 16
    with pytest.raises(FedloomError, match="a subject .* is in both the train set and the test set"):
        ff.Local(nn.Linear(5, 3), sets(0), testset=sets(3), subject="patient").read()
    with pytest.raises(
        FedloomError, match="the samples in trainset have no entry 'person'; they have 'x', 'patient', 'label'"
    ):
        ff.Local(nn.Linear(5, 3), sets(0), subject="person").read()
