"""Recalibration: a line through the logits of each client's validation part, and the same probabilities in use."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score

import fedloom as fl
from fedloom.errors import ConfigError
from fedloom.lab.experiment import Plan, parse
from fedloom.tasks import Objective, make_task
from fedloom.tasks.calibration import MIN_SLOPE_ROWS, recalibrate, recalibration
from fedloom.trained.export import export_model
from tests import hospitals

EXPERIMENT = """
rounds = 4
seeds = [0]
[data]
source = "PATH"
target = "died"
client_column = "hospital"
categorical = ["sex", "ward"]
drop = ["patient_id", "troponin_hs", "hours_to_death"]
missing = ["-9"]
impute = true
[partition]
kind = "natural"
validation = 0.4
[local]
lr = 0.1
[task]
class_weights = "balanced"
calibrate = CALIBRATE
[[method]]
algorithm = "ditto"
"""


def test_a_line_is_the_logistic_regression_on_the_logits_and_meets_the_share_of_events() -> None:
    gen = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(900, 1, generator=gen, dtype=torch.float64) + 1
    owner = torch.arange(900) % 3
    y = (torch.rand(900, generator=gen, dtype=torch.float64) < (0.5 * z[:, 0] - 2).sigmoid()).long()
    y[owner == 1] = 0
    y[(owner == 1).nonzero()[: MIN_SLOPE_ROWS - 1, 0]] = 1
    y[owner == 2] = 0
    lines = recalibration(z, y, owner, 3)
    mine = owner == 0
    fit = LogisticRegression(C=1e12, tol=1e-12, max_iter=10000).fit(z[mine].numpy(), y[mine].numpy())
    assert lines[0].tolist() == pytest.approx([fit.coef_[0, 0], fit.intercept_[0]], abs=1e-4)
    assert float(lines[1, 0]) == 1.0
    assert lines[2].isnan().all()
    for client in (0, 1):
        mine = owner == client
        p = recalibrate(z[mine], lines[client]).sigmoid()
        assert float(p.mean()) == pytest.approx(float(y[mine].double().mean()), abs=1e-9)
    assert torch.equal(recalibrate(z[owner == 2], lines[2]), z[owner == 2])
    worse = recalibration(-z, y, owner, 3)
    assert float(worse[0, 0]) == 1.0


def test_slope_and_intercept_tell_probabilities_that_are_too_extreme_or_too_high() -> None:
    gen = torch.Generator().manual_seed(1)
    truth = torch.randn(20000, 1, generator=gen, dtype=torch.float64) - 1
    y = (torch.rand(20000, generator=gen, dtype=torch.float64) < truth[:, 0].sigmoid()).long()
    owner = torch.arange(20000) % 4
    output = torch.where(owner[:, None] == 1, 2 * truth, torch.where(owner[:, None] == 2, truth + 1.5, truth))
    y[owner == 3] = 0
    metrics = make_task(
        SimpleNamespace(task="binary", classes=("0", "1"), y=y),
        Objective(metrics=("calibration_slope", "calibration_intercept")),
    ).metrics(output, y, owner, 4)
    slope, intercept = metrics["calibration_slope"], metrics["calibration_intercept"]
    assert slope[:3].tolist() == pytest.approx([1.0, 0.5, 1.0], abs=0.06)
    assert intercept[[0, 2]].tolist() == pytest.approx([0.0, -1.5], abs=0.08)
    assert slope[3].isnan()
    assert intercept[3].isnan()


def test_class_weights_spoil_probabilities_and_calibrate_mends_them(tmp_path: Path) -> None:
    path = hospitals.everyone(tmp_path / "all.csv", sites=("Amsel", "Birke", "Celle"))
    found = {}
    for name in ("false", "true"):
        text = EXPERIMENT.replace("PATH", str(path)).replace("CALIBRATE", name)
        plan = Plan(parse(tomllib.loads(text)), tmp_path / name)
        assert any("class_weights raise the probabilities" in n for n in plan.notes["ditto"]) == (name == "false")
        plan.run(page=False)
        found[name] = fl.open_run(tmp_path / name)
    spoiled, mended = (found[n]["ditto", 0].final("global", "calibration_error").mean() for n in ("false", "true"))
    assert float(spoiled) > 0.2
    assert float(mended) < 0.05
    first, second = (found[n]["ditto", 0].final("global", "auroc") for n in ("false", "true"))
    torch.testing.assert_close(first, second)
    in_use_as_recorded(found["true"], path, tmp_path)


def in_use_as_recorded(opened: fl.experiment.RunDirectory, path: Path, folder: Path) -> None:
    """`predict`, `evaluate` and exports have the line of the client; a new client the medians over clients."""
    fed = fl.partitions.natural(validation=0.4)(opened.read(path), seed=0)
    run = opened["ditto", 0]
    for kind in ("personal", "global"):
        scores = opened.predict(path, "ditto", kind=kind).scores
        for client in range(3):
            rows = fed.indices("test", client)
            died = fed.data.y[rows].numpy()
            assert roc_auc_score(died, scores[rows, 1]) == pytest.approx(float(run.final(kind, "auroc")[client]))
            log = -np.log(np.where(died == 1, scores[rows, 1], scores[rows, 0])).mean()
            assert log == pytest.approx(float(run.final(kind, "loss")[client]), abs=1e-5)
            assert brier_score_loss(died, scores[rows, 1]) < 0.06
    model = run.models.ready("global", "Birke")
    rows = hospitals.patients("Birke")
    export_model(model, folder / "m.onnx", "onnx")
    graph = onnxruntime.InferenceSession(folder / "m.onnx")
    names = json.loads(graph.get_modelmeta().custom_metadata_map["columns"])
    feed = {
        "numbers": np.array(
            [[np.nan if r[n] in (None, -9.0) else r[n] for n in names["numbers"]] for r in rows], float
        ),
        "texts": np.array([[r[n] for n in names["texts"]] for r in rows], object),
    }
    want = opened.predict(path, "ditto", kind="global").scores[1200:1800]
    np.testing.assert_allclose(graph.run(["probabilities"], feed)[0], want, atol=1e-6)
    lines = torch.stack([run.models.ready("global", c).calibration for c in range(3)])  # type: ignore[arg-type]
    torch.testing.assert_close(run.models.ready().calibration, lines.nanquantile(0.5, dim=0))
    personal = torch.stack([run.models.ready("personal", c).calibration for c in range(3)])  # type: ignore[arg-type]
    new = hospitals.write(folder / "new.csv", hospitals.patients("Birke", seed=1), drop=("hospital",))
    adapted = run.models.adapt(opened.read(new), rounds=2, holdout=0.3)
    torch.testing.assert_close(adapted.calibration, personal.nanquantile(0.5, dim=0))
    scores = opened.predict(new, kind=str(adapted.save(folder / "adapted.safetensors"))).scores
    np.testing.assert_array_equal(scores, adapted.predict_proba(opened.read(new)))
    assert float(scores[:, 1].mean()) == pytest.approx(26 / 600, abs=0.05)
    assert adapted.about["scores"]["adapted"]["calibration_error"] < 0.1


def test_a_site_that_cannot_be_recalibrated_is_named(tmp_path: Path) -> None:
    path = hospitals.everyone(tmp_path / "all.csv", sites=("Amsel", "Esche"))
    Plan(parse(tomllib.loads(EXPERIMENT.replace("PATH", str(path)).replace("CALIBRATE", "true"))), tmp_path / "o").run(
        page=False
    )
    opened = fl.open_run(tmp_path / "o")
    notes = opened.predict(path, "ditto").notes
    model = opened["ditto", 0].models.ready("personal", "Esche")
    assert model.calibration is not None
    named = [note for note in notes if "not recalibrated" in note and note.endswith("20 rows of Esche")]
    assert len(named) == bool(model.calibration.isnan().any()) == 1


def test_what_is_not_binary_is_not_recalibrated() -> None:
    with pytest.raises(ConfigError, match="binary tasks"):
        fl.simulate(
            fl.algorithms.FedAvg(),
            fl.partitions.iid(clients=2)(fl.load("digits"), 0),
            rounds=1,
            task=Objective(calibrate=True),
        )
