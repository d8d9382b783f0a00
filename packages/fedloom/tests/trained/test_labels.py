"""Several labels of a sample, through every door: arrays, tables, files, a run, predictions, evaluation and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import binary_cross_entropy_with_logits
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.sources.tabular import Csv
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app
from fedloom.local import LocalSGD, Work
from fedloom.local.oracles import make_oracle
from fedloom.models import MLP
from fedloom.tasks import Objective, make_task
from fedloom.tasks.sums import compute_metrics, compute_sums

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
        (lambda t: fl.Dataset.create(t[list("abcd")].to_numpy(), t[NAMES].to_numpy()), "Set task = 'multilabel'"),
        (
            lambda t: fl.Dataset.create(t, NAMES, task="classification"),
            "a model predicts a single column, got sepsis, stroke, aki",
        ),
        (lambda t: fl.Dataset.create(t, "sepsis", task="multilabel"), "requires target = "),
        (lambda t: fl.Dataset.create(t, ["sepsis"], task="multilabel"), "each given once"),
        (lambda t: fl.Dataset.create(t, ["sepsis", "nope"], task="multilabel"), "no column 'nope'"),
        (
            lambda t: fl.Dataset.create(t, ["sepsis", "site"], task="multilabel"),
            "row 2, column 'site': a label must be 1",
        ),
        (
            lambda t: fl.Dataset.create(t, NAMES, task="multilabel", centre=1.0),
            "`centre` and `unit` can be used only for a regression",
        ),
        (
            lambda t: fl.Dataset.create(np.eye(3), np.eye(3) * 2, task="multilabel"),
            "every label must be 1 .present., 0 .absent.",
        ),
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
        ({"task": {"class_weights": [1.0, 2.0]}}, "contains 2 numbers for 3 classes"),
        (
            {"task": {"class_weights": "balanced", "loss": torch.nn.functional.binary_cross_entropy_with_logits}},
            "weight the labels inside the loss, like pos_weight",
        ),
        ({"task": {"metrics": ["accuracy"]}}, "'accuracy' is not defined for a multilabel"),
        ({"task": {"calibrate": True}}, "calibrate works only for binary tasks"),
        ({"attack": {"kind": "backdoor", "target": 0}}, "a backdoor requires numeric samples with one class each"),
        ({"attack": {"kind": "flipped-labels"}}, "class"),
    ],
)
def test_choices_that_need_classes_are_refused(more: dict[str, Any], sentence: str) -> None:
    fed = fl.partitions.iid(clients=3)(fl.Dataset.create(frame(), NAMES, task="multilabel"), seed=0)
    with pytest.raises(ConfigError, match=sentence):
        fl.simulate("fedavg", fed, "softmax", rounds=1, **more)


@pytest.mark.parametrize("engine", ["compiled", "vmap", "loop"])
@pytest.mark.parametrize("weights", ["balanced", [2.0, 0.0, 5.0], {"aki": 3.0}])
def test_weighted_labels_give_the_gradient_of_the_loss_with_pos_weight(engine: str, weights: Any) -> None:
    """Every label is weighted separately, and unknown labels have no weight. Batches are short at some clients."""
    x, rng = frame()[list("abcd")].to_numpy(), np.random.default_rng(2)
    y = np.where(rng.random((240, 3)) < 0.2, -1, frame()[NAMES].to_numpy())
    y[:40, 1] = np.where(y[:40, 1] < 0, -1, 1)  # the first client has the label in all rows
    data = fl.Dataset.create(x, y, task="multilabel", classes=NAMES, clients=np.repeat([0, 1, 2], [40, 77, 123]))
    fed = fl.partitions.natural(test=0.0)(data, seed=0).to(dtype=torch.float64)
    oracle = make_oracle(
        MLP(hidden=(5,)).build((4,), 3, seed=1), make_task(data, Objective(class_weights=weights)), fed, engine
    )
    work = Work(oracle, torch.arange(3), torch.full((3, 1), 1 / 3), LocalSGD(batch_size="full"), seed=0)
    rows = oracle.layout.vector(oracle.module).double().expand(3, -1).contiguous()
    found, losses = work.full_grad(rows), work.loss(rows)
    for i in range(3):
        index = fed.indices("train", i)
        target, w = fed.targets(index).double(), torch.ones(2, 3, dtype=torch.float64)
        for k, name in enumerate(NAMES):
            known = target[target[:, k] >= 0, k].numpy()
            if weights == "balanced":
                classes = np.unique(known).astype(int)
                w[classes, k] = torch.from_numpy(compute_class_weight("balanced", classes=classes, y=known))
            else:
                w[1, k] = weights[k] if isinstance(weights, list) else weights.get(name, 1.0)
        leaf = rows[i].clone().requires_grad_()
        z = torch.func.functional_call(oracle.module, oracle.layout.tree(leaf), (fed.fetch(index),))
        each = binary_cross_entropy_with_logits(z, target.clamp(min=0), reduction="none")
        loss = (each * torch.where(target > 0, w[1], w[0]) * (target >= 0)).mean()
        torch.testing.assert_close(losses[i, 0], loss.detach())
        torch.testing.assert_close(found[i], torch.autograd.grad(loss, leaf)[0])


def test_unknown_labels_count_in_no_loss_and_no_metric(tmp_path: Path) -> None:
    """scikit-learn's figures of the known labels; rows without any label are left out."""
    table, rng = frame(), np.random.default_rng(1)
    gaps = rng.random((240, 3)) < 0.3
    table[NAMES] = table[NAMES].astype(float).mask(gaps)
    table.to_csv(tmp_path / "t.csv", index=False)
    keys: dict[str, Any] = {"task": "multilabel", "target": NAMES, "client_column": "site"}
    with pytest.raises(DataError, match="or 'keep' to train on the other labels of these rows"):
        fl.load(tmp_path / "t.csv", **keys)
    data = fl.load(tmp_path / "t.csv", unlabelled="keep", **keys)
    some = ~gaps.all(1)
    assert len(data) == some.sum()
    assert torch.equal(data.y < 0, torch.from_numpy(gaps[some]))
    x, y = table[list("abcd")].to_numpy()[some], table[NAMES].fillna(-1).to_numpy()[some]
    assert torch.equal(fl.Dataset.create(x, y, task="multilabel", classes=NAMES).y, data.y)
    with pytest.raises(DataError, match="or -1 .unknown."):
        fl.Dataset.create(x, np.where(y < 0, -2, y), task="multilabel", classes=NAMES)
    with pytest.raises(ConfigError, match="'keep' works only for task = 'multilabel'"):
        fl.load(tmp_path / "t.csv", unlabelled="keep", target="sepsis", client_column="site")
    fed = fl.partitions.natural(test=0.4)(data, seed=0)
    task = {"metrics": ["label_auroc", "label_f1"]}
    result = fl.simulate("fedavg", fed, "softmax", rounds=3, local=fl.LocalSGD(lr=0.5), task=task)
    index = torch.cat([fed.indices("test", k) for k in range(3)])
    z = result.job.oracle.run(result.models.rows("global"), fed.fetch(index)).double()
    target, owner = data.y[index], torch.zeros(len(index), dtype=torch.long)
    one = result.job.oracle.task
    figures = one.metrics(z, target, owner, 1)
    for k, name in enumerate(NAMES):
        known = target[:, k] >= 0
        truth, scores = target[known, k].numpy(), z[known, k].numpy()
        assert float(figures[f"label_auroc[{name}]"]) == pytest.approx(roc_auc_score(truth, scores))
        assert float(figures[f"label_f1[{name}]"]) == pytest.approx(f1_score(truth, scores > 0))
    sums = compute_metrics(one, compute_sums(one, z, target))
    assert all(float(figures[name]) == pytest.approx(value) for name, value in sums.items())
    known = target >= 0
    every = torch.nn.functional.binary_cross_entropy_with_logits(z, target.clamp(min=0), reduction="none")
    assert float(figures["loss"]) == pytest.approx(float((every * known).sum() / 3 / len(z)))
    outputs = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(one.loss(outputs, target).sum(), outputs)
    torch.testing.assert_close(one.dloss(z, target), grad)


def test_a_group_with_a_rare_label_shows_no_figure_of_it() -> None:
    """Counts by label are sums of a group, so a label of few patients is a small cell as a class is."""
    table = frame()
    table["ward"] = np.where(np.arange(240) % 2, "icu", "gen")
    table.loc[(table.ward == "icu") & (table.sepsis == 1), "sepsis"] = 0
    table.loc[table[table.ward == "icu"].index[:2], "sepsis"] = 1
    data = fl.Dataset.create(
        table, NAMES, task="multilabel", client_column="site", categorical=["ward"], group_columns=["ward"]
    )
    fed = fl.partitions.natural(test=0.5)(data, seed=0)
    result = fl.simulate("fedavg", fed, "softmax", rounds=1, local=fl.LocalSGD(lr=0.5))
    found = fl.analyze("groups", result, by=["ward"], min_rows=5).table.to_pandas()
    pooled = found[found.client == -1]
    assert set(pooled[pooled.subgroup.str.contains("icu")].metric) == {"samples"}
    assert "macro_f1" in set(pooled[pooled.subgroup.str.contains("gen")].metric)


def test_a_run_its_predictions_and_its_exports_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = frame()
    table.to_csv("t.csv", index=False)
    Path("labels.toml").write_text(
        'rounds = 6\nseeds = [0]\nmodel = { kind = "mlp", hidden = [8] }\n[local]\nlr = 0.5\n[data]\nsource = "t.csv"\n'
        f'task = "multilabel"\ntarget = {NAMES}\nclient_column = "site"\n[partition]\nkind = "natural"\n[task]\n'
        'metrics = ["label_auroc", "exact_match"]\n[[method]]\nalgorithm = "fedavg"\n[[method]]\nalgorithm = "ditto"\n'
        '[[method]]\nalgorithm = "local"\n'
        '[[analysis]]\nkind = "predictions"\n[[analysis]]\nkind = "groups"\nby = ["site"]\n'
    )

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "AUROC, mean over labels" in run("run", "labels.toml", "--out", "out")
    gains = pd.read_csv("out/report/sites-by-patient.csv").set_index("site")
    stored = pd.read_parquet("out/predictions.parquet")
    chosen = pd.read_csv("out/report/sites.csv").iloc[0]
    models = {"alone": ("local", "personal"), "together": (chosen.together_method, chosen.together_model)}
    for side, (method, model) in models.items():
        some = stored[(stored.method == method) & (stored.model == model)]
        areas = [roc_auc_score(some[f"target {k}"], some[f"prediction {k}"]) for k in range(3)]
        assert gains.loc["All", side] == pytest.approx(np.mean(areas))
    assert set(gains.metric) == {"macro_auroc"}
    assert (gains.half > 0).all()
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
