"""Sequences through the doors: run, report, evaluate, predict, adapt, export, tune; texts by speaker."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_rows import new_rows
from fedloom.engine.clients.poisoning import poison_training_data
from fedloom.engine.setup import make_job
from fedloom.errors import ConfigError, DataError, Refused
from fedloom.lab.cli import app
from fedloom.models import LSTM
from fedloom.rows.attacks import FlippedLabels
from fedloom.trained.export import load

FILE = """
rounds = 3
seeds = [0]
[data]
source = "docstrings"
length = 16
max_characters = 120
[partition]
kind = "natural"
clients = 5
validation = 0.2
[model]
kind = "{model}"
{size}
[task]
metrics = ["perplexity", "balanced_accuracy"]
[local]
lr = 0.5
clip = 1.0
[evaluate]
every = 3
[[analysis]]
kind = "confusion"
[tune]
trials = 2
[tune.space.fedavg]
"local.lr" = [0.1, 0.5]
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
"""
SIZES = {"lstm": "embedding = 4\nhidden = 8", "transformer": "width = 8\nlayers = 1\nheads = 2"}


def call(*words: object) -> str:
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture(scope="module", params=SIZES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.toml").write_text(FILE.format(model=request.param, size=SIZES[request.param]))
    call("run", folder / "text.toml", "--out", folder / "run")
    return folder / "run"


def test_perplexity_is_the_exponential_of_the_loss(run: Path) -> None:
    result = fl.open_run(run)
    for recorded in result:
        rows = [row for row in recorded.table().to_pylist() if row["client"] >= 0]
        found = {tuple(row[k] for k in ("round", "client", "model", "part", "metric")): row["value"] for row in rows}
        pairs = [(found[*key[:-1], "loss"], value) for key, value in found.items() if key[-1] == "perplexity"]
        assert len(pairs) >= 5 * 3 * 2
        np.testing.assert_allclose(*np.array([(np.exp(loss), value) for loss, value in pairs]).T)


def test_texts_are_predicted_character_by_character(run: Path) -> None:
    opened = fl.open_run(run)
    found = opened.predict(["return the ", "if"], method="fedavg")
    assert found.scores.shape[:2] == (2, 16)
    np.testing.assert_allclose(found.scores.sum(-1), 1)
    table = found.table()
    assert table.column("position").to_pylist() == [*range(1, 12), 1, 2]
    assert table.column("row").to_pylist() == [1] * 11 + [2] * 2
    assert found.labels.shape == (2, 16)


def test_one_line_is_one_sample_of_the_command(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("return the\nif\n")
    call("predict", run, tmp_path / "lines.txt", "--method", "fedavg", "--out", tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [int(row["position"]) for row in rows] == [*range(1, 11), 1, 2]
    assert {row["prediction"] for row in rows} <= set(fl.open_run(run)["fedavg", 0].models.recipe.facts.classes)


def test_samples_that_name_their_clients_are_read_by_their_models(run: Path, tmp_path: Path) -> None:
    opened = fl.open_run(run)
    rows, names = opened.read("docstrings"), ("4", "1", "new")
    rows = replace(rows, x=rows.x[:6], y=rows.y[:6], columns={}, users=torch.arange(6) % 3, user_names=names)
    found = opened.predict(rows, method="ditto", kind="personal")
    assert list(found.models) == ["4", "1", "global"] * 2
    for k, (name, kind) in enumerate([("4", "personal"), ("1", "personal"), (None, "global")] * 2):
        wanted = opened["ditto", 0].models.predict_proba(rows.x[k][None].numpy(), name, kind)
        np.testing.assert_allclose(found.scores[k][None], wanted, atol=1e-6)
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(DataError, match="none.txt contains no rows to predict. Write one text per line"):
        opened.predict(tmp_path / "none.txt")


def test_exports_give_what_predict_gives(run: Path, tmp_path: Path) -> None:
    rows = ["return the ", "if x"]
    model = fl.open_run(run)["ditto", 0].models.ready(None, 2)
    wanted = model.predict_proba(rows)
    call("export", run, "--method", "ditto", "--client", 2, "--format", "torch", "--out", tmp_path / "m.pt2")
    np.testing.assert_allclose(load(tmp_path / "m.pt2").scores(rows), wanted, atol=1e-6)
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    call("export", run, "--method", "ditto", "--client", 2, "--format", "onnx", "--out", tmp_path / "m.onnx")
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    x = new_rows(model.recipe.facts, rows).x.long().numpy()
    probabilities, classes = session.run(["probabilities", "class"], {"samples": x})
    np.testing.assert_allclose(probabilities, wanted, atol=1e-6)
    assert classes.tolist() == model.predict(rows).tolist()


OWN = """
rounds = 1
[data]
source = "texts"
path = "{path}"
text = "words"
client_column = "who"
[partition]
kind = "natural"
[model]
kind = "lstm"
embedding = 2
hidden = 2
[[method]]
algorithm = "ditto"
"""


def test_a_table_of_texts_is_predicted_by_whom_it_is_of(tmp_path: Path) -> None:
    lines = [f"{'yes' if k % 3 else 'no'} {k},{'ab'[k % 2]},{k % 3 > 0}" for k in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["words,who,good", *lines]))
    (tmp_path / "own.toml").write_text(OWN.format(path=tmp_path / "t.csv"))
    call("run", tmp_path / "own.toml", "--out", tmp_path / "run")
    (tmp_path / "new.csv").write_text("who,words\nb,yes 3\na,no\nc,what\n")
    said = call("predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert "not a client of the run, so the global model predicts: 'c' (1 row)" in said
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["b", "a", "global"]
    assert {row["prediction"] for row in rows} <= {"True", "False"}
    call("evaluate", tmp_path / "run", "--data", tmp_path / "t.csv")
    opened = fl.open_run(tmp_path / "run")
    alone = opened.predict(["yes 3"], client="b")
    np.testing.assert_allclose(alone.scores[0, 1], float(rows[0]["probability of True"]))


def test_new_speakers_are_scored_and_adapted_to(run: Path) -> None:
    data = fl.load("docstrings", length=16, max_characters=200, modules="odd")
    models = fl.open_run(run)["ditto", 0].models
    scored = models.model("global").score(data)
    assert scored["perplexity"] == pytest.approx(np.exp(scored["loss"]))
    adapted = models.adapt(data, rounds=1, steps=2)
    assert adapted.about["samples"]["train"] > 0


def test_a_search_chooses_on_validation(run: Path, tmp_path: Path) -> None:
    call("tune", run.parent / "text.toml", "--out", tmp_path / "tuned")
    assert (tmp_path / "tuned" / "tuned.toml").exists()


def test_parts_that_need_something_else_say_so() -> None:
    data = fl.load("docstrings", length=8, max_characters=100, min_characters=5000)
    fed = fl.partitions.natural()(data)
    method = fl.algorithms.FedAvg()
    with pytest.raises(ConfigError, match="needs numbers, but these samples are tokens"):
        fl.simulate(method, fed, model="mlp", rounds=1)
    with pytest.raises(
        Refused, match="augment requires images of shape .*, but a sample of 'docstrings' has shape 8. Omit"
    ):
        fl.simulate(method, fed, model="lstm", rounds=1, augment={"flip": 0.5})
    numbers = fl.partitions.iid(clients=2)((torch.rand(20, 4), torch.arange(20) % 2))
    with pytest.raises(ConfigError, match="model lstm needs tokens"):
        fl.simulate(method, numbers, model="lstm", rounds=1)


def test_flipped_labels_leave_positions_without_a_label_alone() -> None:
    fed = fl.partitions.natural()(fl.load("docstrings", length=8, max_characters=100, min_characters=5000))
    changed = poison_training_data(fed, FlippedLabels(), torch.tensor([0]), 0)
    old, new = fed.data.y[fed.indices("train", 0)], changed.data.y[fed.indices("train", 0)]
    assert torch.equal(old < 0, new < 0)
    assert torch.equal(new[new >= 0], len(fed.data.classes) - 1 - old[old >= 0])


@pytest.mark.parametrize("each", [True, False])
def test_the_server_of_a_deployment_has_a_blank_sequence(each: bool) -> None:
    x = torch.randint(1, 5, (12, 4), generator=torch.Generator().manual_seed(0))
    data = fl.Dataset.create((x, x % 3 if each else x[:, 0] % 3), vocabulary=5)
    local_data = pytest.importorskip("fedloom_sites.deploy.site.local_data")
    fed = local_data.make_blank_federation(InputSpec.create(data), torch.tensor([[3, 1, 1], [2, 0, 0]]))
    assert fed.data.tokens == data.tokens
    setting = fl.Setting(algorithm=fl.algorithms.FedAvg(), model=LSTM(embedding=2, hidden=3))
    job, _ = make_job(setting, fed)
    assert job.oracle.layout == make_job(setting, fl.partitions.iid(clients=2)(data))[0].oracle.layout


class Bag(torch.nn.Module):
    """A user's module of tokens: the mean embedding of what came so far."""

    def __init__(self, vocabulary: int, outputs: int, each: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.each = torch.nn.Embedding(vocabulary, 4), torch.nn.Linear(4, outputs), each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x).cumsum(1)
        return self.head(h if self.each else h[:, -1])


def test_a_module_of_the_user_takes_tokens() -> None:
    fed = fl.partitions.natural(clients=3)(fl.load("docstrings", length=8, max_characters=200))
    result = fl.simulate(fl.algorithms.FedAvg(), fed, model=Bag, rounds=2, local=fl.LocalSGD(lr=0.5))
    assert float(result.final("global", "loss").mean()) < np.log(len(fed.data.classes)) * 1.5
    with pytest.raises(ConfigError, match=r"must return \[b, 8, "):
        fl.simulate(fl.algorithms.FedAvg(), fed, model=lambda vocabulary: torch.nn.Embedding(vocabulary, 3), rounds=1)
