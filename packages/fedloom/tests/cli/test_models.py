"""Models in hand as a user meets them: list, evaluate, adapt, export; bad input leaves nothing behind."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from safetensors.torch import load_file

import fedloom as fl
from fedloom.errors import ConfigError, LayoutError, RunDirError
from fedloom.lab.experiment import Plan, parse
from tests.commands import call

SMALL = """
name = "small"
rounds = 3
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "mixed"
clients = 6
[local]
lr = 0.1
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
lam = 0.5
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    outcomes = Plan(parse(tomllib.loads(SMALL)), folder / "out").run(page=False)
    assert {o.status for o in outcomes} == {"done"}
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out", ignore=shutil.ignore_patterns("report*", "checkpoints"))
    return tmp_path / "out"


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of a new client: images of two digits, as arrays without names."""
    data, path = fl.load("digits"), tmp_path_factory.mktemp("new") / "new.npz"
    two = ((data.y == 2) | (data.y == 5)).nonzero()[:80, 0]
    np.savez(path, x=data.x[two].numpy()[:, 0], y=data.y[two].numpy())
    return path


def refused(folder: Path, *arguments: object) -> str:
    """The message of a command that must fail and write nothing."""
    before = sorted(folder.rglob("*"))
    said = call(*arguments, code=2)
    assert said.startswith("error: ")
    assert "Traceback" not in said
    assert sorted(folder.rglob("*")) == before
    return said


def test_models_are_listed_with_their_scores(out: Path, new: Path) -> None:
    call("adapt", out, "--data", new, "--method", "ditto")
    rows = [line.split() for line in call("models", out).splitlines() if ".safetensors" in line]
    assert [(row[0], row[1], row[2]) for row in rows[:3]] == [
        ("fedavg", "0", "global"),
        ("fedavg", "1", "global"),
        ("ditto", "0", "global"),
    ]
    assert len(rows) == 2 + 2 * 3 + 1
    recorded = fl.open_run(out)["ditto", 1].final("personal")
    mine = next(row for row in rows if row[:3] == ["ditto", "1", "personal"])
    assert float(mine[4]) == pytest.approx(float(recorded.mean()), abs=1e-4)
    assert (out / mine[-1]).is_file()
    assert rows[-1][2:5] == ["adapted", "to", "new"]


def test_a_directory_is_opened_without_its_data_and_without_computing(out: Path) -> None:
    opened = fl.open_run(out)
    assert len(opened) == 4
    run = opened["ditto", 0]
    assert (run.status, run.rounds) == ("done", 3)
    table = run.table()
    assert table.column_names == ["round", "client", "model", "part", "metric", "value"]
    assert pc.max(table["round"]).as_py() == 3
    assert run.models.kinds() == ["global", "personal", "hybrid"]
    x = torch.zeros(1, 1, 8, 8)
    assert run.models.personal[4](x).shape == (1, 10)
    assert sorted(r.method for r in opened.runs(seed=1)) == ["ditto", "fedavg"]
    with pytest.raises(ConfigError, match="recorded. Recorded: global/test/accuracy"):
        run.final("global", "precision")
    with pytest.raises(ConfigError, match="no run of 'ditto' with seed 5"):
        opened["ditto", 5]


def test_evaluate_scores_what_was_asked_for(out: Path, new: Path) -> None:
    everything = call("evaluate", out, "--data", new)
    assert everything.count("global") == 4
    one = call("evaluate", out, "--data", new, "--method", "ditto", "--seed", 0, "--client", 2)
    assert [word in one for word in ("global", "personal", "hybrid", "fedavg")] == [True, True, True, False]
    want = fl.open_run(out)["ditto", 0].models.model("personal", 2).score(fl.load(new))
    assert f"{want['loss']:.4g}" in one
    only = call("evaluate", out, "--data", new, "--method", "ditto", "--client", 2, "--model", "hybrid")
    assert "personal" not in only


def test_adapt_writes_a_model_that_evaluate_and_export_take(out: Path, new: Path, tmp_path: Path) -> None:
    said = call("adapt", out, "--data", new, "--method", "ditto", "--rounds", 8, "--holdout", 0.25)
    assert "trained on 60 samples; scores on the 20 samples held out" in said
    path = out / "adapted" / "ditto-0-new.safetensors"
    assert str(path) in said
    assert "adapted" in call("evaluate", out, "--data", new, "--model", path)
    assert "has no" not in call("export", out, "--model", path, "--out", tmp_path / "own.safetensors")
    module = fl.open_run(out).load(path).module()
    state = load_file(tmp_path / "own.safetensors")
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    said = call("adapt", out, "--data", new, "--method", "ditto", "--holdout", 0, "--out", tmp_path / "deep" / "m.st")
    assert "samples. No samples were held out" in said
    assert (tmp_path / "deep" / "m.st").is_file()


def test_export_writes_the_model_that_was_asked_for(out: Path, tmp_path: Path) -> None:
    models = fl.open_run(out)["ditto", 1].models
    for words, want in ((("--model", "personal"), models.personal[3]), ((), models.hybrid[3])):  # () as predict does
        call("export", out, "--method", "ditto", "--seed", 1, "--client", 3, *words, "--out", tmp_path / "own")
        state = want.state_dict()
        assert all(torch.equal(t, state[name]) for name, t in load_file(tmp_path / "own").items())
    models = fl.open_run(out)["ditto", 0].models
    shared = next(i for i, takes in enumerate(models.takes_global()) if takes)
    call("export", out, "--method", "ditto", "--seed", 0, "--client", shared, "--out", tmp_path / "own")
    state = models["global"].state_dict()
    assert all(torch.equal(t, state[name]) for name, t in load_file(tmp_path / "own").items())
    assert "global model of fedavg" in call("export", out, "--method", "fedavg", "--out", tmp_path / "shared")


def test_bad_input_is_a_sentence_and_leaves_nothing(out: Path, new: Path, tmp_path: Path) -> None:
    data = fl.load(new)
    np.savez(tmp_path / "narrow.npz", x=data.x.numpy()[:, 0, :, :5], y=data.y.numpy())
    np.savez(tmp_path / "classes.npz", x=data.x.numpy()[:, 0], y=data.y.numpy() + 10)
    (tmp_path / "table.csv").write_text("a,y\n1,0\n2,1\n")
    cure = "is a table, but the model takes samples of shape 1x8x8; pass an array of samples, an NPZ file or"
    for arguments, sentence in (
        (("evaluate", out, "--data", tmp_path / "table.csv"), cure),
        (("predict", out, tmp_path / "table.csv"), cure),
        (("models", tmp_path), "is not a run directory"),
        (("evaluate", tmp_path / "none", "--data", new), "is not a run directory"),
        (("evaluate", out, "--data", tmp_path / "none.npz"), "no such file"),
        (("evaluate", out, "--data", tmp_path / "narrow.npz"), "shape 1x8x5, but the model takes 1x8x8"),
        (("adapt", out, "--method", "ditto", "--data", tmp_path / "narrow.npz"), "shape 1x8x5"),
        (("adapt", out, "--method", "ditto", "--data", tmp_path / "classes.npz"), "unknown class '12'"),
        (("evaluate", out, "--data", new, "--client", "nobody"), "allowed: 0, 1, 2, 3, 4, 5"),
        (("predict", out, tmp_path / "narrow.npz"), "shape 8x5, but the model takes 1x8x8"),
        (("predict", out, tmp_path / "none.csv"), "no such file"),
        (("predict", out, new, "--method", "dito"), "did you mean 'ditto'"),
        (("predict", out, new, "--client", "nobody"), "allowed: 0, 1, 2, 3, 4, 5"),
        (("predict", out, new, "--method", "fedavg", "--model", "personal"), "no 'personal' model"),
        (("export", out, "--method", "ditto", "--client", 9, "--out", tmp_path / "x"), "unknown client '9'"),
        (("adapt", out, "--data", new, "--method", "fedavg"), "global model. Methods with personal models: ditto"),
        (("adapt", out, "--data", new), "the run has several methods. Add --method: fedavg, ditto"),
        (("adapt", out, "--data", new, "--method", "dito"), "did you mean 'ditto'"),
        (("adapt", out, "--data", new, "--method", "ditto", "--seed", 7), "no seed 7. Its seeds: 0, 1"),
        (("adapt", out, "--data", new, "--method", "ditto", "--rounds", 0), "rounds must be an integer from 1"),
        (("export", out, "--method", "ditto", "--format", "h5", "--out", tmp_path / "x"), "unknown format 'h5'"),
        (
            ("export", out, "--method", "fedavg", "--model", "personal", "--client", 1, "--out", "x"),
            "has no 'personal'",
        ),
    ):
        assert sentence in refused(tmp_path, *arguments), arguments


def test_models_of_another_layout_are_refused(out: Path, new: Path) -> None:
    settings = out / "experiment.toml"
    other = settings.read_text().replace('kind = "softmax"', 'kind = "mlp"\nhidden = [7]')
    settings.write_text(other)
    assert "is damaged or was changed" in refused(out, "evaluate", out, "--data", new)
    settings.write_text(other.rpartition("# ")[0])
    said = refused(out, "evaluate", out, "--data", new)
    assert "contains a model with a different layout" in said
    with pytest.raises(LayoutError):
        fl.open_run(out)["ditto", 0].models.kinds()


def test_damaged_directories_are_named(out: Path, new: Path) -> None:
    shutil.rmtree(out / "models" / "ditto-0")
    assert "contains no models of ditto, seed 0" in refused(out, "evaluate", out, "--data", new)
    (out / "models" / "fedavg-0" / "global.safetensors").write_bytes(b"torn")
    mended = (
        "not a readable file of models (Error while deserializing header: header too small). Write the file again with"
    )
    assert mended in refused(out, "evaluate", out, "--data", new)
    (out / "summary.json").write_text("{")
    assert "is damaged" in refused(out, "models", out)
    (out / "summary.json").unlink()
    with pytest.raises(RunDirError, match="yet. Wait until 'fedloom run' has finished"):
        fl.open_run(out)
