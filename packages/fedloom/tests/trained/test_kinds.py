"""Every kind of model that a run can leave gives the same numbers by evaluate, predict and export, from every door."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss, mean_poisson_deviance, root_mean_squared_error

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.data import Dataset
from fedloom.errors import DataError, Refused
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.opened import RunDirectory
from fedloom.trained.export import export_model, load, unit_sentence
from tests.data.test_doors import Hub

SITES = ("north", "south", "west")
ROWS = 24
METHODS = {
    "ditto": "",
    "calibrated": 'algorithm = "fedavg"\ntask = { calibrate = true }',
    "fedem": "mixture = 2",
    "fedproto": "",
    "knn-per": "memory = 30",
    "gpfl": "guided = true",
    "fedrod": "",
    "ifca": "",
}
"""Methods whose personal models are made in other ways, with what their own network has or the keys of the method."""
TARGETS = {
    "binary": 'target = "ill"\ntask = "binary"\ncategorical = ["ward"]',
    "count": 'target = "visits"\ntask = "count"',
    "regression": 'target = "cost"\ntask = "regression"',
    "hazard": 'target = "week"\nevent = "ill"',
    "survival": 'target = "week"\nevent = "ill"',
}
OTHERS = ("count", "regression", "hazard", "survival")
FEATURES = {"binary": ["age", "dose", "ward"], **{target: ["age", "dose"] for target in OTHERS}}
LABELS = {"binary": ["ill"], "count": ["visits"], "regression": ["cost"]}
EXPERIMENT = """
rounds = 2
[data]
source = "PATH"
client_column = "site"
missing = ["-9"]
impute = true
TARGET
[partition]
kind = "natural"
validation = 0.2
[model]
kind = "mlp"
hidden = [3]
[local]
lr = 0.1
"""


def patients(rows: int, seed: int) -> pd.DataFrame:
    gen = np.random.default_rng(seed)
    age, dose, ward = gen.normal(55, 10, rows), gen.normal(2, 1, rows), gen.integers(3, size=rows)
    z = (age - 55) / 10 + (np.arange(rows) % 3 == 1) * (dose - 2) + 0.5 * ward
    ill = (z + gen.normal(size=rows) > 0.5).astype(int)
    dose[2] = -9
    age[4] = np.nan
    columns = {"age": age.round(1), "dose": dose.round(2), "ward": np.array(["A", "B", "C"])[ward]}
    outcomes = {"ill": ill, "visits": gen.poisson(np.exp(z / 3)), "cost": (z + 5).round(3)}
    week = gen.integers(1, 40, rows)
    return pd.DataFrame({**columns, "site": np.array(SITES)[np.arange(rows) % 3], **outcomes, "week": week})


def table(target: str, rows: int, seed: int) -> pd.DataFrame:
    labels = LABELS.get(target, ["week", "ill"])
    return patients(rows, seed)[[*FEATURES[target], "site", *labels]]


def methods(target: str) -> Iterator[str]:
    if target != "binary":
        yield from ('[[method]]\nalgorithm = "fedavg"', '[[method]]\nalgorithm = "ditto"')
        return
    for label, more in METHODS.items():
        yield "[[method]]\n" + ("" if "algorithm" in more else f'algorithm = "{label}"\n') + f'label = "{label}"'
        if more:
            yield more if "algorithm" in more else f'model = {{ kind = "mlp", hidden = [3], {more} }}'


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDirectory]:
    """The run of every target, made when a test asks for it."""
    made: dict[str, RunDirectory] = {}

    class Made(dict[str, RunDirectory]):
        def __missing__(self, target: str) -> RunDirectory:
            folder = tmp_path_factory.mktemp(target)
            table(target, 120, 0).to_csv(folder / "t.csv", index=False)
            text = EXPERIMENT.replace("PATH", f"{folder}/t.csv").replace("TARGET", TARGETS[target])
            text += "[task]\nhorizon = 20\n" if target == "survival" else ""
            plan = Plan(parse(tomllib.loads(text + "\n".join(methods(target)))), folder / "out")
            assert {outcome.status for outcome in plan.run(page=False)} == {"done"}
            return self.setdefault(target, fl.open_run(folder / "out"))

    made = Made()
    return made


def hub(frame: pd.DataFrame) -> Hub:
    rows = Hub(frame.to_dict("records"))
    rows.features = dict.fromkeys(frame.columns)  # type: ignore[misc]
    return rows


def doors(frame: pd.DataFrame, target: str, folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The rows by every door that has names of columns, and by those that have none."""
    labels = LABELS.get(target, ["week", "ill"])
    bare = frame.drop(columns=labels)
    frame.to_csv(folder / "rows.csv", index=False)
    frame.to_csv(folder / "semicolon.csv", index=False, sep=";", decimal=",")
    bare[[*reversed(bare.columns)]].to_csv(folder / "bare.csv", index=False)
    bare.to_parquet(folder / "bare.parquet")
    named: dict[str, object] = {n: folder / n for n in ("rows.csv", "semicolon.csv", "bare.csv", "bare.parquet")}
    named |= {"pandas": bare, "hub": hub(bare), "columns": bare.to_dict("list"), "arrow": pa.Table.from_pandas(bare)}
    if target == "binary":
        return named, {}
    numbers = frame[FEATURES[target]].to_numpy()
    np.savez(folder / "rows.npz", x=numbers)
    return named, {"array": numbers, "npz": folder / "rows.npz"}


def labelled(opened: RunDirectory, frame: pd.DataFrame, target: str, folder: Path) -> dict[str, Dataset]:
    """The rows with labels by every door."""
    frame.to_csv(folder / "labelled.csv", index=False)
    frame.to_parquet(folder / "labelled.parquet")
    made = {name: opened.read(folder / name) for name in ("labelled.csv", "labelled.parquet")}
    keys: dict[str, Any] = tomllib.loads(TARGETS[target])
    keys |= {"client_column": "site", "missing": ("-9",), "impute": True}
    label = keys.pop("target")
    return made | {"pandas": Dataset.create(frame, label, **keys), "hub": Dataset.create(hub(frame), label, **keys)}


def check_figures(
    figures: dict[str, float], target: str, frame: pd.DataFrame, scores: np.ndarray, door: str, rel: float = 1e-5
) -> None:
    """The metrics are those of other libraries, or of their definition, on what is predicted."""
    if target == "binary":
        assert figures["loss"] == pytest.approx(log_loss(frame.ill, scores[:, 1]), rel=rel, abs=2e-6), door
        return
    values = scores[:, 0]
    if target == "count":
        name, want = "deviance", mean_poisson_deviance(frame.visits, values)
    elif target == "regression":
        name, want = "rmse", root_mean_squared_error(frame.cost, values)
    else:
        week, ill = frame.week.to_numpy() + 0.5 * (frame.ill == 0).to_numpy(), frame.ill.to_numpy()
        pairs = [(a, b) for a in np.flatnonzero(ill) for b in range(len(week)) if week[b] > week[a]]
        name, want = "c_index", np.mean([(values[a] > values[b]) + 0.5 * (values[a] == values[b]) for a, b in pairs])
    assert figures[name] == pytest.approx(want, rel=rel), (door, figures)


CASES = [("binary", method) for method in METHODS] + [(t, m) for t in OTHERS for m in ("fedavg", "ditto")]


@pytest.mark.parametrize(("target", "method"), CASES)
def test_every_door_gives_the_same_numbers(
    runs: dict[str, RunDirectory], target: str, method: str, tmp_path: Path
) -> None:
    opened, frame = runs[target], table(target, ROWS, 1)
    named, nameless = doors(frame, target, tmp_path)
    data = labelled(opened, frame, target, tmp_path)
    for kind in opened[method, 0].models.kinds():
        for client in (None, "south"):
            want = opened.predict(named["rows.csv"], method, client=client, kind=kind).scores
            assert np.isfinite(want).all()
            for door, rows in (named if client is None else named | nameless).items():
                predictions = opened.predict(rows, method, client=client, kind=kind)
                np.testing.assert_array_equal(predictions.scores, want, err_msg=f"{kind}, {client}, {door}")
            for door, rows_with_labels in data.items():
                (line,) = opened.evaluate(rows_with_labels, method, client=client, kind=kind)
                check_figures(line.metrics(), target, frame, want, door)


@pytest.mark.parametrize(("target", "method"), [case for case in CASES if case[1] not in ("fedavg", "calibrated")])
def test_an_adapted_model_is_used_as_it_was_made(
    runs: dict[str, RunDirectory], target: str, method: str, tmp_path: Path
) -> None:
    """Of a method with a network of its own too."""
    opened, frame = runs[target], table(target, ROWS, 1)
    new = opened.read(opened.path.parent / "t.csv")
    made = opened[method, 0].models.adapt(new, rounds=2)
    path = made.save(tmp_path / "adapted.safetensors")
    want = made.scores(made.recipe.facts.raw(labelled(opened, frame, target, tmp_path)["pandas"]))
    for door, rows in doors(frame, target, tmp_path)[0].items():
        np.testing.assert_array_equal(opened.predict(rows, method, kind=str(path)).scores, want, err_msg=door)
    (line,) = opened.evaluate(opened.read(tmp_path / "labelled.csv"), method, kind=str(path))
    check_figures(line.metrics(), target, frame, want, "adapted")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_models_in_use_have_the_figures_that_the_run_recorded(target: str, tmp_path: Path) -> None:
    """Of every method, kind and client: the rows of its test part, with units of their own at one site."""
    frame = table(target, 150, 0)
    frame.loc[frame.site == "west", "dose"] *= 16  # exact in binary
    frame.to_csv(tmp_path / "t.csv", index=False)
    text = EXPERIMENT.replace("PATH", f"{tmp_path}/t.csv").replace("TARGET", TARGETS[target])
    text = text.replace('missing = ["-9"]', 'missing = ["-9"]\nfactors = { dose = { west = 0.0625 } }')
    text += "[task]\nhorizon = 20\n" if target == "survival" else ""
    needed = {"fedbn": 'layers = ["head.bias"]'}
    seen = 0
    for name in REGISTRY:
        method = f'[[method]]\nalgorithm = "{name}"\n{needed.get(name, "")}\n'
        try:
            plan = Plan(parse(tomllib.loads(text + method)), tmp_path / name)
            assert {outcome.status for outcome in plan.run(page=False)} == {"done"}, name
        except Refused:  # a method that needs classes
            continue
        opened = fl.open_run(tmp_path / name)
        fed = fl.partitions.natural(validation=0.2)(opened.read(tmp_path / "t.csv"), seed=0)
        run = opened[name, 0]
        for kind in run.models.kinds():
            scores = opened.predict(tmp_path / "t.csv", name, kind=kind).scores
            lead = {"binary": "loss", "count": "deviance", "regression": "rmse"}.get(target, "c_index")
            for client in range(3):
                rows = fed.indices("test", client).numpy()
                recorded = {lead: float(run.final(kind, lead)[client])}
                check_figures(recorded, target, frame.iloc[rows], scores[rows], f"{name}, {kind}, {client}", rel=1e-4)
                model = run.models.model(kind, client)
                in_hand = model.predict_proba if target == "binary" else lambda x: model.predict(x)[:, None]  # noqa: B023
                place = f"{name}, {kind}, {client}"
                np.testing.assert_allclose(in_hand(frame.iloc[rows]), scores[rows], rtol=1e-5, atol=1e-6, err_msg=place)
                seen += 1
    assert seen > (150 if target == "binary" else 100), seen


@pytest.mark.parametrize("factors", [{"dose": {"west": 0.0625}, "age": 0.5}, {"age": 0.5}])
def test_models_in_hand_take_rows_in_the_units_of_their_table(factors: dict[str, Any], tmp_path: Path) -> None:
    """As all rows in one unit would be taken; by a run in memory, from its folder, and from a file of one model."""
    frame = table("binary", 120, 0)
    other = frame.assign(age=frame.age * 2, dose=frame.dose.where(frame.site != "west", frame.dose * 16))
    other = other if "dose" in factors else other.assign(dose=frame.dose)
    keys: dict[str, Any] = {"client_column": "site", "missing": ["-9", "-144"], "impute": True, "categorical": ["ward"]}
    partition, short = fl.partitions.natural(validation=0.2), {"rounds": 1, "local": {"lr": 0.1}}
    want, found = (
        fl.simulate("ditto", partition(Dataset.create(rows, "ill", task="binary", **keys, **more), seed=0), **short)
        for rows, more in ((frame, {}), (other, {"factors": factors}))
    )
    other.to_csv(tmp_path / "t.csv", index=False)
    compared = fl.compare(
        ["ditto"],
        fl.load(tmp_path / "t.csv", target="ill", task="binary", factors=factors, **keys),
        partition=partition,
        seeds=[0],
        folder=tmp_path / "run",
        progress_bar=False,
        **short,
    )
    opened = fl.open_run(compared.folder)
    new = {"one": table("binary", ROWS, 1), "other": table("binary", ROWS, 1)}
    new["other"] = new["other"].assign(age=new["other"].age * 2)
    if "dose" in factors:
        west = new["other"].site == "west"
        new["other"] = new["other"].assign(dose=new["other"].dose.where(~west, new["other"].dose * 16))
    scores = want.models.predict_proba(new["one"], client="west")
    model = found.models.model("personal", "west")
    saved = opened.load(model.save(tmp_path / "one.safetensors"))
    for door in (found.models, opened["ditto", 0].models):
        np.testing.assert_array_equal(door.predict_proba(new["other"], client="west"), scores)
    np.testing.assert_array_equal(saved.predict_proba(new["other"]), scores)
    np.testing.assert_array_equal(opened.predict(new["other"], client="west").scores, scores)
    assert not unit_sentence(want.models.model("personal", "west"), None)
    assert "age by 0.5" in unit_sentence(saved, None)
    if "dose" in factors:
        with pytest.raises(DataError, match="no column 'site', so no factor by client is applied. Rename that column"):
            saved.predict(new["other"].drop(columns="site"))


QUICK = [("binary", "gpfl", "onnx"), ("binary", "gpfl", "torch")]
EXPORTS = [(target, method, format) for target, method in CASES for format in ("onnx", "torch")]


@pytest.mark.parametrize(
    ("target", "method", "format"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EXPORTS],
)
def test_every_exported_model_gives_the_same_numbers(
    runs: dict[str, RunDirectory], target: str, method: str, format: str, tmp_path: Path
) -> None:
    """A graph of raw rows, for any number of rows."""
    opened, frame = runs[target], table(target, ROWS, 1)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    models = opened[method, 0].models
    want = opened.predict(tmp_path / "rows.csv", method, client="south").scores
    export_model(models.ready(None, "south"), tmp_path / "m", format)
    if format == "torch":
        program = load(tmp_path / "m")
        for count in (1, 5, ROWS):
            np.testing.assert_allclose(program.scores(frame[:count]), want[:count], rtol=1e-5, atol=1e-6)
        return
    session = onnxruntime.InferenceSession(tmp_path / "m")
    names = json.loads(session.get_modelmeta().custom_metadata_map["columns"])
    assert session.get_outputs()[0].shape[0] == "batch"
    for count in (1, 5, ROWS):
        numbers = frame[names["numbers"]].replace(-9.0, np.nan).to_numpy(float)[:count]
        feed = {"numbers": numbers} | (
            {"texts": frame[names["texts"]].to_numpy(object)[:count]} if names["texts"] else {}
        )
        np.testing.assert_allclose(session.run(None, feed)[0], want[:count], rtol=1e-5, atol=1e-6)
