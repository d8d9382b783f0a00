"""Several labels of a sample, through every door: arrays, tables, files, a run, predictions, evaluation and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.sources.tabular import Csv
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app

NAMES = ["sepsis", "stroke", "aki"]


def frame(rows: int = 240) -> pd.DataFrame:
    """Three sites whose patients may have several diagnoses."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4))
    labels = x @ rng.normal(size=(4, 3)) + 0.3 * rng.normal(size=(rows, 3)) > 0.2
    return pd.DataFrame(x, columns=list("abcd")).assign(
        **dict(zip(NAMES, labels.T.astype(int), strict=True)), site=np.arange(rows) % 3
    )


def test_arrays_frames_and_files_give_one_data_set(tmp_path: Path) -> None:
    table = frame()
    table.to_csv(tmp_path / "t.csv", index=False)
    keys: dict[str, Any] = {"task": "multilabel", "client_column": "site"}
    alone = table[[*"abcd", "site"]]
    sets = [
        fl.Dataset.create(table, NAMES, **keys),
        fl.Dataset.create((alone, table[NAMES]), **keys),
        Csv(path=str(tmp_path / "t.csv"), target=tuple(NAMES), **keys).load(),
    ]
    for data in sets:
        assert (data.task, data.classes, data.outputs) == ("multilabel", tuple(NAMES), 3)
        assert torch.equal(data.y, torch.from_numpy(table[NAMES].to_numpy(float)))
        assert data.checksum() == sets[0].checksum()
    x, y = table[list("abcd")].to_numpy(np.float32), table[NAMES].to_numpy(bool)
    arrays = fl.Dataset.create(x, y, task="multilabel", classes=NAMES)
    assert torch.equal(arrays.y, sets[0].y)
    np.savez(tmp_path / "t.npz", x=x, y=y)
    assert fl.load(str(tmp_path / "t.npz"), task="multilabel").classes == ("0", "1", "2")
    fed = fl.partitions.natural()(sets[0], seed=0)
    counts = [table[NAMES].to_numpy()[fed.indices("train", i).numpy()].sum(0).tolist() for i in range(3)]
    assert fed.class_counts().tolist() == counts


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda t: fl.Dataset.create(t[list("abcd")].to_numpy(), t[NAMES].to_numpy()), "Give task = 'multilabel'"),
        (
            lambda t: fl.Dataset.create(t, NAMES, task="classification"),
            "a model predicts one column, got sepsis, stroke, aki",
        ),
        (lambda t: fl.Dataset.create(t, "sepsis", task="multilabel"), "needs target = "),
        (lambda t: fl.Dataset.create(t, ["sepsis"], task="multilabel"), "each given once"),
        (lambda t: fl.Dataset.create(t, ["sepsis", "nope"], task="multilabel"), "no column 'nope'"),
        (
            lambda t: fl.Dataset.create(t, ["sepsis", "site"], task="multilabel"),
            "row 2, column 'site': a label is 1 or",
        ),
        (
            lambda t: fl.Dataset.create(t, NAMES, task="multilabel", centre=1.0),
            "centre and unit can be used only for a regression",
        ),
        (lambda t: fl.Dataset.create(np.eye(3), np.eye(3) * 2, task="multilabel"), "every label must be 1 or 0"),
        (lambda t: fl.Dataset.create(np.eye(3), [0, 1, 0], task="multilabel"), r"\[N, labels\], got int64"),
        (
            lambda t: fl.Dataset.create(np.eye(3), np.ones((3, 1)), task="multilabel"),
            r"got int64|at least two|\[N, lab",
        ),
    ],
)
def test_wrong_labels_are_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises((ConfigError, DataError), match=sentence):
        make(frame())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"task": {"class_weights": "balanced"}}, "class_weights needs classes"),
        ({"task": {"metrics": ["accuracy"]}}, "'accuracy' is not defined for a multilabel"),
        ({"task": {"calibrate": True}}, "calibrate works only for binary tasks"),
        ({"attack": {"kind": "backdoor", "target": 0}}, "a backdoor needs samples of numbers with one class each"),
        ({"attack": {"kind": "flipped-labels"}}, "class"),
    ],
)
def test_choices_that_need_classes_are_refused(more: dict[str, Any], sentence: str) -> None:
    fed = fl.partitions.iid(clients=3)(fl.Dataset.create(frame(), NAMES, task="multilabel"), seed=0)
    with pytest.raises(ConfigError, match=sentence):
        fl.simulate("fedavg", fed, "softmax", rounds=1, **more)


def test_a_run_its_predictions_and_its_exports_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = frame()
    table.to_csv("t.csv", index=False)
    Path("labels.toml").write_text(
        'rounds = 6\nseeds = [0]\nmodel = { kind = "mlp", hidden = [8] }\n[local]\nlr = 0.5\n[data]\nsource = "t.csv"\n'
        f'task = "multilabel"\ntarget = {NAMES}\nclient_column = "site"\n[partition]\nkind = "natural"\n[task]\n'
        'metrics = ["label_auroc", "exact_match"]\n[[method]]\nalgorithm = "fedavg"\n[[method]]\nalgorithm = "ditto"\n'
        '[[analysis]]\nkind = "predictions"\n[[analysis]]\nkind = "groups"\nby = ["site"]\n'
    )

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "AUROC, mean over labels" in run("run", "labels.toml", "--out", "out")
    said = run("evaluate", "out", "--data", "t.csv", "--method", "fedavg")
    for name in NAMES:
        assert f"label_auroc[{name}]" in "".join(said.split())
    run("predict", "out", "t.csv", "--method", "fedavg", "--out", "p.csv", "--threshold", "0.4")
    predictions = pd.read_csv("p.csv")
    one = fl.open_run("out")["fedavg", 0].models
    p = predictions[[f"probability of {name}" for name in NAMES]].to_numpy()
    assert np.array_equal(predictions[[f"prediction of {name}" for name in NAMES]].to_numpy(), p >= 0.4)
    here = table["site"].to_numpy() == 1  # the command scales rows as those of their site
    assert np.allclose(one.predict_proba(table[here], client="1", kind="global"), p[here], atol=1e-12)
    assert np.array_equal(one.predict(table[here], client="1", kind="global"), (p[here] >= 0.5).astype(int))
    assert np.mean((p >= 0.5) == table[NAMES].to_numpy()) > 0.75
    mixed = table.rename(columns=dict(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True)))
    facts = one.model("global").recipe.facts
    swapped = fl.Dataset.create(mixed, [NAMES[2], *NAMES[:2]], task="multilabel", client_column="site")
    again = facts.take(swapped)
    assert torch.equal(again.y[:, 0], swapped.y[:, 1])
