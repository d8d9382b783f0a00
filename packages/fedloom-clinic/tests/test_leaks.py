"""Planted leaks of repeated subjects and augmented copies are noted, and clean data have no note."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_iris
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import TargetEncoder
from typer.testing import CliRunner

import fedloom as fl
from fedloom.errors import Note
from fedloom.lab.cli import app
from fedloom.sklearn import FederatedClassifier
from fedloom_clinic.drafts.columns import TableSurvey

N = 240


def table(seed: int = 0, rows: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "age": rng.normal(60, 9, rows).round(1), "crp": rng.exponential(9, rows).round(2),
        "died": rng.integers(2, size=rows),
    }  # fmt: skip


REPEATED: dict[str, tuple[str, Any]] = {
    "patients": ("patient_id", np.arange(N) // 3), "text": ("subject", [f"s{k // 4}" for k in range(N)]),
    "a record": ("record_id", np.arange(N) // 2 + 10**6), "one word": ("patientId", np.arange(N) // 5),
    "a key": ("case key", [f"k{k % 60:04d}" for k in range(N)]), "an animal": ("animal", np.arange(N) % 50),
    "in no order": ("pid", np.random.default_rng(1).integers(70, size=N)), "stays": ("hadm_id", np.arange(N) // 3 + 20),
}  # fmt: skip


@pytest.mark.parametrize("case", REPEATED)
def test_an_identifier_that_repeats_is_noted_until_it_is_the_subject(case: str) -> None:
    name, cells = REPEATED[case]
    frame = pd.DataFrame({name: cells, **table()})
    text = isinstance(cells, list)
    leaky = fl.Dataset.create(frame, "died", categorical=[name] if text else [])
    (note,) = [note for note in leaky.notes if "different values in 240 rows" in note]
    assert "good. Set it as subject" in note
    sound = fl.Dataset.create(frame, "died", subject=name)
    assert sound.notes == ()
    assert [column.name for column in sound.prepare.columns] == ["age", "crp"]


@pytest.mark.parametrize("name", ["patient_id", "id", "Fallnummer", "caseId", "MRN", "EmployeeNumber", "policynumber"])
def test_a_number_of_a_person_that_would_be_a_feature_is_noted(name: str) -> None:
    numbers = np.random.default_rng(0).permutation(10**6)[:N]
    data = fl.Dataset.create(pd.DataFrame({name: numbers, **table()}), "died")
    assert any(f"column {name!r} differs in every row" in note for note in data.notes)


@pytest.mark.parametrize(
    "name",
    ["uric_acid", "amount_paid", "case_load", "household_income", "patient_volume", "key_rate", "cases", "stay"],
)
def test_a_measurement_whose_name_contains_a_word_for_people_is_a_feature(name: str, tmp_path: Path) -> None:
    cells = np.random.default_rng(2).integers(300, 360, N)
    frame = pd.DataFrame({name: cells, **table()})
    assert fl.Dataset.create(frame, "died").notes == ()
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "died"]).output
    assert "subject:" not in said
    assert f"{name!r}: identifies" not in said


@pytest.mark.parametrize("cell", ["unknown", "-1", "0", "999"])
@pytest.mark.parametrize("memory", [False, True])
def test_rows_of_unknown_subjects_are_not_silently_one_patient(cell: str, memory: bool) -> None:
    who = [cell if k % 10 == 3 else str(k // 3 + 1) for k in range(N)]
    plain = pd.DataFrame({"who": who, **table()})
    if memory:
        data = fl.Dataset.create((plain[["age", "crp"]].to_numpy(), plain["died"].to_numpy()), subject=who)
        notes = fl.partitions.iid(clients=3)(data, seed=0).notes
    else:
        notes = fl.Dataset.create(plain, "died", subject="who").notes
    assert any(f"{cell!r} (24 rows) may mean that the subject is unknown" in note for note in notes)
    if cell == "0":  # which other columns contain
        return
    sound = fl.Dataset.create(plain, "died", subject="who", missing=(cell,), unlabelled="drop")
    assert (len(sound), any("unknown" in note for note in sound.notes)) == (216, False)


def smooth(count: int, seed: int = 0, side: int = 16) -> torch.Tensor:
    """Images with structure: noise whose low frequencies are the strongest, from 0 to 1."""
    g = torch.Generator().manual_seed(seed)
    waves = torch.fft.rfft2(torch.randn(count, 1, side, side, generator=g))
    u = torch.fft.fftfreq(side).abs()[:, None] + torch.fft.rfftfreq(side)[None]
    images = torch.fft.irfft2(waves / (0.05 + u), s=(side, side))
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return (images - low) / (high - low)


AUGMENTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mirrored": lambda x: x.flip(-1), "upside down": lambda x: x.flip(-2), "turned": lambda x: x.rot90(1, (-2, -1)),
    "shifted": lambda x: x.roll((1, 2), (-2, -1)), "brighter": lambda x: (x * 1.2).clamp(0, 1),
    "noisy": lambda x: (x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1),
    "equal": lambda x: x.clone(),
}  # fmt: skip


@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize("case", AUGMENTED)
def test_augmented_copies_of_images_are_noted_unless_they_are_of_one_subject(case: str, bytes_: bool) -> None:
    images, labels = smooth(150), np.arange(150) % 3
    both = torch.cat([images, AUGMENTED[case](images)])
    both = (both * 255).round().to(torch.uint8) if bytes_ else both
    y = np.concatenate([labels, labels])
    noted = fl.Dataset.create((both, y)).notes
    assert any("images have a neighbor that is much closer" in note for note in noted)
    known = fl.Dataset.create((both, y), subject=np.tile(np.arange(150), 2))
    assert not any("much closer" in note for note in known.notes)
    parts = fl.partitions.iid(clients=3)(known, 0).parts
    train, test = (({*(parts[p].index % 150).tolist()}) for p in ("train", "test"))
    assert not train & test


def test_a_folder_of_pictures_with_copies_is_noted(tmp_path: Path) -> None:
    for k, image in enumerate(smooth(60)):
        folder = tmp_path / "ab"[k % 2]
        folder.mkdir(exist_ok=True)
        pixels = (image[0] * 255).round().byte().numpy()
        Image.fromarray(pixels).save(folder / f"{k}.png")
        Image.fromarray(np.fliplr(pixels)).save(folder / f"{k}-mirrored.png")
    assert any("120 images have a neighbor" in note for note in fl.load(tmp_path).notes)


@pytest.mark.parametrize("seed", range(4))
def test_images_without_copies_have_no_note(seed: int) -> None:
    assert not any("neighbor" in note for note in fl.Dataset.create((smooth(300, seed), np.arange(300) % 3)).notes)
    noise = torch.rand(300, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    assert not any("neighbor" in note for note in fl.Dataset.create((noise, np.arange(300) % 3)).notes)
    digits = fl.load("digits")
    some = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))[:600]
    written = fl.Dataset.create((digits.x[some], digits.y[some]))
    assert not any("neighbor" in note for note in written.notes)


def test_rows_of_a_subject_may_be_alike() -> None:
    """Copies with noise are a leak among rows, and visits of a patient where the patient is known."""
    rng = np.random.default_rng(0)
    one = rng.normal(size=(120, 5))
    x = np.concatenate([one, one + 0.01 * rng.normal(size=one.shape)])
    frame = pd.DataFrame({**{f"x{k}": x[:, k] for k in range(5)}, "who": np.tile(np.arange(120), 2),
                          "y": np.tile(rng.integers(2, size=120), 2)})  # fmt: skip
    assert any("much closer" in note for note in fl.Dataset.create(frame.drop(columns="who"), "y").notes)
    assert fl.Dataset.create(frame, "y", subject="who").notes == ()


def with_number(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(record=np.random.default_rng(2).permutation(len(frame)) + 5000)


def three_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Every row with two copies, whose numbers differ a little."""
    three = pd.concat([frame] * 3, ignore_index=True)
    three[["age", "crp"]] += 0.004 * np.random.default_rng(3).normal(size=(len(three), 2))
    return three


COPIED: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "copies with a number of their own": (
        lambda f: with_number(pd.concat([f, f[:60]], ignore_index=True)), "60 of 300 rows are exact copies"),
    "two copies with noise": (three_times, "of 720 rows have a neighbor"),
    "a text per row": (lambda f: f.assign(key=[f"k{7 * k:x}" for k in range(len(f))]), "each level is rare. Add it"),
}  # fmt: skip


@pytest.mark.parametrize("case", COPIED)
def test_copies_are_noted_whatever_numbers_their_rows(case: str) -> None:
    change, words = COPIED[case]
    frame = change(pd.DataFrame(table()))
    data = fl.Dataset.create(frame, "died", categorical=["key"] if "key" in frame else [])
    assert any(words in note for note in data.notes), data.notes


def test_equal_rows_in_two_parts_have_a_note_with_a_rule() -> None:
    frame = with_number(pd.concat([pd.DataFrame(table())] * 2, ignore_index=True))
    fed = fl.partitions.iid(clients=2)(fl.Dataset.create(frame, "died"), 0)
    rules = [note.rule for note in fed.notes if isinstance(note, Note)]
    assert "parts-share-rows" in rules
    assert any(isinstance(note, Note) and note.rule for note in fl.simulate("fedavg", fed, rounds=1).notes)


def test_copies_with_other_outcomes_are_noted() -> None:
    frame = pd.DataFrame(table())
    both = pd.concat([frame, frame.assign(died=1 - frame["died"])], ignore_index=True)
    assert any("although the outcome differs" in note for note in fl.Dataset.create(both, "died").notes)


@pytest.mark.parametrize(("sign", "digits"), [(1, 6), (1, 1), (-1, 6)])
def test_two_columns_that_give_the_target_are_noted(sign: int, digits: int) -> None:
    frame = pd.DataFrame(table())
    total = (frame["age"] + sign * frame["crp"]).round(digits)
    notes = fl.Dataset.create(frame.assign(total=total), "total", task="regression").notes
    assert any(f"together give 'total' (age {'+' if sign > 0 else '-'} crp)" in note for note in notes), notes
    blurred = frame.assign(total=total + np.random.default_rng(1).normal(size=N))
    assert not any("together" in n for n in fl.Dataset.create(blurred, "total", task="regression").notes)


def _by(frame: pd.DataFrame, groups: Any, column: str = "died") -> Any:
    """The mean of a column over the rows of each group, for every row."""
    return frame[column].groupby(np.asarray(groups)).transform("mean")


def _encoded(frame: pd.DataFrame, groups: Any, column: str = "died") -> Any:
    groups = np.asarray(groups)[:, None]
    kind = "continuous" if column == "cost" else "binary"
    return TargetEncoder(target_type=kind).fit(groups, frame[column]).transform(groups)[:, 0]


def _left_out(frame: pd.DataFrame, groups: Any, column: str) -> Any:
    each = frame[column].groupby(np.asarray(groups))
    return (each.transform("sum") - frame[column]) / (each.transform("count") - 1)


_DRAWN = np.random.default_rng(9)
ZIP, WARD = _DRAWN.integers(0, 25, N), _DRAWN.choice(list("abcdefgh"), N)
DOCTOR, STAGE = _DRAWN.choice(30, N, p=np.arange(1, 31) / 465), _DRAWN.integers(4, size=N)
COST = _DRAWN.normal(200, 40, N).round(2)
FEE, VISITS, SIZE = _DRAWN.gamma(3, 9, N).round(2), _DRAWN.poisson(0.8, N), _DRAWN.normal(1.7, 0.1, N).round(2)
MONEY: dict[str, Any] = {"target": "cost", "task": "regression"}
DERIVED: dict[str, tuple[Callable[[pd.DataFrame], dict[str, Any]], dict[str, Any], str]] = {
    "mean per zip code": (lambda f: {"rate": _by(f, ZIP)}, {}, "column 'rate' is the mean of 'died' in groups"),
    "rounded percents": (lambda f: {"rate": (100 * _by(f, ZIP)).round(1)}, {}, "column 'rate' is the mean of 'died'"),
    "standardized": (
        lambda f: {"rate": (_by(f, ZIP) - f["died"].mean()) / 0.21}, {}, "column 'rate' is the mean of 'died'"),
    "the other class": (lambda f: {"alive": 1 - _by(f, ZIP)}, {}, "column 'alive' is the mean of 'died'"),
    "of one class": (
        lambda f: {"rate": _by(f.assign(s=STAGE == 2), ZIP, "s"), "stage": STAGE}, {"target": "stage"},
        "column 'rate' is the mean of 'stage'"),
    "of a measurement": (
        lambda f: {"mean {x}": _by(f.assign(c=COST), WARD, "c"), "cost": COST}, MONEY,
        "column 'mean {x}' is the mean of 'cost'"),
    "sums by doctor": (
        lambda f: {"doctor": DOCTOR, "cases": f["died"].groupby(DOCTOR).transform("sum")}, {},
        "column 'cases' is the sum of 'died' by 'doctor'"),
    "TargetEncoder": (lambda f: {"code": _encoded(f, ZIP)}, {}, "column 'code' is the mean of 'died'"),
    "TargetEncoder of numbers": (
        lambda f: {"code": _encoded(f.assign(cost=COST), ZIP, "cost"), "cost": COST}, MONEY,
        "column 'code' is the mean of 'cost'"),
    "smoothed": (
        lambda f: {"zip": ZIP, "code": (_by(f, ZIP) * (n := np.bincount(ZIP)[ZIP]) + 9 * f["died"].mean()) / (n + 9)},
        {}, "column 'code' is the mean of 'died'"),
    "leave one out": (
        lambda f: {"zip": ZIP, "code": _left_out(f, ZIP, "died")}, {}, "'died' exactly among rows with the same 'zip'"),
    "leave one out of numbers": (
        lambda f: {"zip": ZIP, "code": _left_out(f.assign(c=COST), ZIP, "c"), "cost": COST}, MONEY,
        "column 'code' alone predicts 'cost' exactly among rows with the same 'zip'"),
    "units by site": (
        lambda f: {"ward": WARD, "bill": COST * (1 + 9 * (WARD == "a") + 0.1 * (WARD == "b")), "cost": COST},
        {**MONEY, "client_column": "ward"}, "column 'bill' alone predicts 'cost' exactly among rows with the same"),
    "product": (lambda f: {"fee": FEE, "n": 1 + VISITS, "cost": FEE * (1 + VISITS)}, MONEY, "give 'cost' (fee * n)"),
    "product with zeros": (lambda f: {"fee": FEE, "n": VISITS, "cost": FEE * VISITS}, MONEY, "give 'cost' (fee * n)"),
    "ratio": (lambda f: {"fee": FEE, "n": 1 + VISITS, "cost": (FEE / (1 + VISITS)).round(3)}, MONEY, "(fee / n)"),
    "power": (lambda f: {"kg": COST, "m": SIZE, "cost": (COST / SIZE**2).round(1)}, MONEY, "give 'cost' (kg / m^2)"),
    "sum of three": (
        lambda f: {"fee": FEE, "n": 9 * VISITS, "m": 99 * SIZE, "cost": FEE + 9 * VISITS + 99 * SIZE}, MONEY,
        "give 'cost' (fee + n + m)"),
    "weighted": (
        lambda f: {"one": COST, "two": FEE, "cost": (0.4 * COST + 0.6 * FEE).round()}, MONEY, "(0.4 * one + 0.6 * two"),
    "next row": (lambda f: {"then": np.roll(COST, -1), "cost": COST}, MONEY, "'then' contains 'cost' of the next row"),
    "previous row": (
        lambda f: {"then": np.roll(COST, 1), "cost": COST}, MONEY, "'then' contains 'cost' of the previous row"),
    "next class": (lambda f: {"then": np.roll(f["died"], -1)}, {}, "'then' contains 'died' of the next row"),
    "next class by name": (
        lambda f: {"then": np.roll(WARD, -1), "ward": WARD}, {"target": "ward", "categorical": ["then"]},
        "'then' contains 'ward' of the next row"),
    "delayed state": (
        lambda f: {"then": np.roll(np.arange(N) // 30 % 2, 5), "died": np.arange(N) // 30 % 2}, {},
        "'then' contains 'died' of the row 5 rows above"),
    "a week before": (
        lambda f: {"then": np.roll(COST, 7), "cost": COST}, MONEY, "'then' contains 'cost' of the row 7 rows above"),
    "next visit": (
        lambda f: {"then": pd.Series(COST).groupby(np.arange(N) // 4).shift(-1).fillna(0), "cost": COST}, MONEY,
        "'then' contains 'cost' of the next row"),
    "merged classes": (lambda f: {"late": STAGE // 2, "stage": STAGE}, {"target": "stage"}, "'late' follows from"),
    "one class with an error": (
        lambda f: {"late": (STAGE == 3) ^ (np.arange(N) == 5), "stage": STAGE}, {"target": "stage"},
        "'late' follows from 'stage'"),
    "one number": (lambda f: {"two": VISITS == 2, "cost": VISITS}, MONEY, "'two' follows from 'cost'"),
}  # fmt: skip


@pytest.mark.parametrize("case", DERIVED)
def test_a_column_that_is_computed_from_the_target_is_noted(case: str) -> None:
    build, options, words = DERIVED[case]
    frame = pd.DataFrame(table())
    frame = frame.drop(columns="died" if "target" in options else []).assign(**build(frame))
    notes = fl.Dataset.create(frame, **{"target": "died", **options}).notes
    assert any(words in note for note in notes), notes


def test_the_previous_outcome_is_known_where_later_rows_are_the_test_rows() -> None:
    frame = pd.DataFrame(table()).assign(day=np.arange(N) * 3 + 7, then=np.roll(COST, 1), cost=COST)
    assert not any("previous row" in n for n in fl.Dataset.create(frame, **MONEY, order="day").notes)


def _longitudinal(r: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    child, age = np.repeat(np.arange(60), 6), np.tile(np.arange(6), 60) + 3
    height = 80 + 6 * age + r.normal(0, 4, 60)[child] + r.normal(0, 0.4, 360)
    return {"child": child, "age": age, "height": height.round(1)}, {"task": "regression", "subject": "child"}


def _on_training_rows(r: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    zips, trains = r.integers(0, 30, 1000), r.random(1000) < 0.7
    died = (r.random(1000) < r.uniform(0.1, 0.9, 30)[zips]).astype(int)
    rate = pd.Series(died[trains]).groupby(zips[trains]).mean().reindex(zips).to_numpy()
    return {"area": zips, "rate": rate, "age": r.normal(size=1000), "died": died}, {}


def _crossed(r: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    zips = r.integers(0, 30, 1000)
    died = (r.random(1000) < r.uniform(0.1, 0.9, 30)[zips]).astype(int)
    halves = np.arange(1000) % 2
    means = pd.Series(died).groupby([zips, halves]).mean()
    return {
        "area": zips,
        "code": [means[zips[k], 1 - halves[k]] for k in range(1000)],
        "age": r.normal(size=1000),
        "died": died,
    }, {}


def _grades(r: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    first = r.normal(11, 3, 400).round()
    second = (first + r.normal(0, 1.2, 400)).round()
    return {"G1": first, "G2": second, "G3": (second + r.normal(0, 0.9, 400)).round()}, {"task": "regression"}


HONEST: dict[str, Callable[[np.random.Generator], tuple[dict[str, Any], dict[str, Any]]]] = {
    "growth": _longitudinal, "encoded on training rows": _on_training_rows, "encoded across folds": _crossed,
    "grades": _grades,
    "a score that is calibrated": lambda r: (
        lambda s: ({"score": s, "age": r.normal(size=900), "y": s + r.normal(0, 1.5, 900).round()},
                   {"task": "regression"}))(r.integers(0, 11, 900)),
    "a rate of the year before": lambda r: (
        lambda h, p: ({"hospital": h, "before": (r.binomial(80, p) / 80)[h], "age": r.normal(size=1500),
                       "died": (r.random(1500) < p[h]).astype(int)}, {})
        )(r.integers(30, size=1500), r.uniform(0, 1, 30)),
    "nearly a product": lambda r: (
        lambda a, b: ({"a": a, "b": b, "y": a * b * np.exp(0.03 * r.normal(size=N))},
                      {"task": "regression"}))(*np.exp(r.normal(size=(2, N)))),
    "nearly a sum": lambda r: (
        lambda a, b: ({"a": a, "b": b, "y": 3 * a + 2 * b + 0.05 * r.normal(size=N)},
                      {"task": "regression"}))(*r.normal(size=(2, N))),
    "more columns than rows can tell apart": lambda r: (
        {**{f"x{k}": r.normal(size=120) for k in range(110)}, "y": r.normal(size=120)}, {"task": "regression"}),
    "a slow sensor": lambda r: (
        lambda t: ({"t": (np.roll(t, 3) + r.normal(0, 0.1, 600)).round(1), "power": (9 - t).round(1)},
                   {"task": "regression"}))(np.cumsum(r.normal(size=600))),
    "classes in blocks": lambda r: (
        lambda y: ({"x": np.roll(y, 2) ^ (r.random(600) < 0.1), "a": r.normal(size=600), "y": y}, {})
        )(np.arange(600) // 20 % 2),
    "an alarm with few errors": lambda r: (
        lambda y: ({"alarm": y ^ (r.random(3000) < 0.01), "a": r.normal(size=3000), "y": y}, {})
        )(np.arange(3000) // 150 % 2),
    "rare": lambda r: ({"a": r.random(2000) < 0.004, "b": r.normal(size=2000), "y": r.random(2000) < 0.006}, {}),
    "few small numbers": lambda r: (
        {**{f"g{k}": r.integers(0, 5, 60) for k in range(10)}, "y": r.integers(5, size=60)}, {"task": "regression"}),
    "a rare class with a rare symptom": lambda r: (
        {"rash": (np.arange(4000) < 8) | (np.arange(4000) % 1999 == 20), "age": r.normal(size=4000),
         "y": np.searchsorted([14, 28], np.arange(4000), side="right")}, {}),
    "life that remains": lambda r: (
        {"cycle": np.tile(np.arange(9), 50), "heat": r.normal(size=450),
         "y": np.repeat(r.integers(20, 90, 50), 9) - np.tile(np.arange(9), 50)}, {"task": "regression"}),
    "matched cases": lambda r: (
        {"stratum": np.arange(400) // 4, "exposed": r.integers(2, size=400), "y": np.arange(400) % 4 == 0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", HONEST)
def test_honest_columns_are_not_taken_for_the_target(case: str) -> None:
    for seed in range(2):
        columns, options = HONEST[case](np.random.default_rng(seed))
        notes = fl.Dataset.create(pd.DataFrame(columns), **{"target": [*columns][-1], **options}).notes
        assert [note for note in notes if "may mean missing" not in note] == [], seed


UNITS: dict[str, tuple[float, float, float, float]] = {
    "height": (170.0, 9.0, 0.01, 0.0), "temperature": (37.0, 0.6, 1.8, 32.0),
    "creatinine": (90.0, 20.0, 1 / 88.42, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_two_units_in_a_column_are_noted(name: str) -> None:
    center, spread, factor, shift = UNITS[name]
    one = np.random.default_rng(0).normal(center, spread, N)
    frame = pd.DataFrame(table()).assign(**{name: np.where(np.arange(N) % 4, one, one * factor + shift)})
    assert any(f"{name!r}: 60 of 240 numbers are far" in note for note in fl.Dataset.create(frame, "died").notes)
    frame[name] = one
    assert not any("as if the unit were different" in note for note in fl.Dataset.create(frame, "died").notes)


def test_two_species_are_not_two_units() -> None:
    frame = load_iris(as_frame=True).frame
    assert not any("another unit" in note for note in fl.Dataset.create(frame, "target").notes)


@pytest.mark.parametrize("name", ["phone_minutes", "mobile_usage_kb", "fax_bytes", "phone"])
def test_large_measurements_of_phones_are_no_phone_numbers(name: str) -> None:
    frame = pd.DataFrame(table()).assign(**{name: np.random.default_rng(0).integers(10**6, 10**9, N)})
    left_out = any("phone numbers" in note for note in fl.Dataset.create(frame, "died").notes)
    assert left_out is (name == "phone")


@pytest.mark.parametrize("seed", range(8))
def test_clean_tables_have_no_note(seed: int) -> None:
    """Zeros and limits of detection lie in one place, and rows are close there without being copies."""
    rng = np.random.default_rng(seed)
    wide = np.exp(rng.normal(size=N))
    frame = pd.DataFrame({
        **table(seed), "limited": np.minimum(wide, 4).round(2),
        "none": np.where(rng.random(N) < 0.45, 0.0, wide * 0.01),
        "pulse": rng.normal(70, 9, N).round(0), "half": rng.normal(20, 4, N).round(0) / 2,
    })  # fmt: skip
    notes = fl.Dataset.create(frame, "died").notes
    assert [note for note in notes if "may mean missing" not in note] == []


THRESHOLDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a * b": lambda t: t["a"] * t["b"] > 0.3,
    "a + b": lambda t: t["a"] + t["b"] > 1,
    "w / h^2": lambda t: t["w"] / t["h"] ** 2 > 26,
    "age - w": lambda t: t["w"] - t["age"] > 20,
    "w": lambda t: t["w"] > 90,
    "a * b * c": lambda t: t["a"] * t["b"] * t["c"] > 0.1,
    "a + b - c": lambda t: t["a"] + t["b"] - t["c"] > 1,
    "w * p / h": lambda t: t["w"] * t["p"] / t["h"] > 900,
    "a + b + c - d": lambda t: t["a"] + t["b"] + t["c"] - t["d"] > 1,
    "w / h * p * q * r": lambda t: t["w"] / t["h"] * t["p"] * t["q"] * t["r"] > 3e5,
    "none": lambda t: t["a"] + t["b"] + np.random.default_rng(1).normal(0, 0.5, N) > 1,
}


@pytest.mark.parametrize("formula", THRESHOLDS)
def test_a_class_that_is_a_threshold_of_columns_is_noted(formula: str) -> None:
    rng = np.random.default_rng(5)
    columns = table() | {
        "w": rng.normal(75, 12, N).round(1), "h": rng.normal(1.72, 0.09, N).round(2), "a": rng.normal(size=N),
        "b": rng.normal(size=N), "p": rng.normal(20, 3, N), "q": rng.exponential(9, N), "r": rng.normal(40, 4, N),
        "c": rng.normal(size=N), "d": rng.normal(size=N),
    }  # fmt: skip
    notes = fl.Dataset.create(pd.DataFrame(columns | {"died": THRESHOLDS[formula](columns).astype(int)}), "died").notes
    found = [note for note in notes if "recorded after the outcome" in note]
    assert len(found) == (formula != "none"), notes
    assert formula == "none" or (f"(a threshold on {formula})" if " " in formula else "column 'w' alone") in found[0]


@pytest.mark.parametrize("seed", range(4))
def test_classes_that_differ_widely_are_not_called_a_threshold(seed: int) -> None:
    """Sums of two columns separate such classes by chance, as in tables of tumors with many measurements."""
    rng = np.random.default_rng(seed)
    y = rng.random(200) < 0.4
    frame = pd.DataFrame(rng.normal(size=(200, 30)) + 3 * y[:, None]).rename(columns="gene{}".format)
    notes = fl.Dataset.create(frame.assign(tumor=y.astype(int)), "tumor").notes
    assert not [note for note in notes if "threshold" in note]


def test_without_the_subject_noise_is_learned_and_with_it_it_is_not() -> None:
    """The leak itself: features that only tell patients apart, and outcomes that are tossed per patient."""
    aurocs = {}
    for known in (False, True):
        figures = []
        for seed in range(6):
            rng = np.random.default_rng(seed)
            who = np.repeat(np.arange(60), 5)
            x = rng.normal(size=(60, 4))[who] + 0.05 * rng.normal(size=(300, 4))
            y = rng.integers(2, size=60)[who]
            data = fl.Dataset.create((x.astype(np.float32), y), subject=who if known else None)
            fed = fl.partitions.iid(clients=1, test=0.3, validation=0.0)(data, seed)
            train, test = (fed.parts[part].index.numpy() for part in ("train", "test"))
            nearest = ((x[:, None] - x[None, train]) ** 2).sum(-1).argmin(1)
            figures.append(roc_auc_score(y[test], y[train][nearest[test]]))
        aurocs[known] = float(np.mean(figures))
    assert aurocs[False] > 0.95
    assert abs(aurocs[True] - 0.5) < 0.15


def test_init_names_the_patient_or_the_site_and_never_both(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    patient = np.sort(rng.integers(80, size=N))
    stay = patient * 10 + np.arange(N) % 2
    frame = pd.DataFrame({
        "subject_id": patient, "hospital": np.array(["a", "b", "c"])[patient % 3],
        "admitted": (pd.Timestamp("2022-01-01") + pd.to_timedelta(rng.integers(700, size=N), "D")).strftime("%Y-%m-%d"),
        "birth_date": [f"19{50 + k % 40}-01-01" for k in patient], **table(),
    })  # fmt: skip
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "died", "--agree"])
    assert said.exit_code == 0, said.output
    text = (tmp_path / "t.toml").read_text()
    assert 'client_column = "hospital"' in text
    assert '# order = "admitted"' in text
    assert '\norder = "' not in text
    assert 'subject = "subject_id"' in (tmp_path / "t.agreement.toml").read_text()
    assert "subject: 'subject_id'" in said.output
    draft = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "died", "--subject", "", "--force"])
    assert draft.exit_code == 0, draft.output
    assert "\nsubject =" not in (tmp_path / "t.toml").read_text()
    chosen = CliRunner().invoke(
        app,
        [
            "init",
            str(tmp_path / "t.csv"),
            "--target",
            "died",
            "--client-column",
            "hospital",
            "--subject",
            "hospital",
            "--force",
        ],
    )
    assert chosen.exit_code != 0
    assert "site. Name two different columns" in chosen.output
    frame.assign(stay_id=stay).to_csv(tmp_path / "u.csv", index=False)
    assert TableSurvey(tmp_path / "u.csv").subjects(["died"])[0] == ["subject_id"]
    for name in ("subject", "patient", "user"):  # a column of few is a site by its rows, and no subject
        few = frame.drop(columns=["subject_id", "hospital"]).assign(**{name: patient % 6})
        few.to_csv(tmp_path / "v.csv", index=False)
        survey = TableSurvey(tmp_path / "v.csv")
        assert not {*survey.sites(["died"])[0]} & {*survey.subjects(["died"])[0]}
        assert "subject" not in survey.sites(["died"])[0]


def test_the_estimators_keep_the_rows_of_a_subject_together() -> None:
    rng = np.random.default_rng(0)
    x, y, who = rng.normal(size=(120, 3)), rng.integers(2, size=120), np.repeat(np.arange(30), 4)
    fitted = FederatedClassifier(rounds=1, clients=4).fit(x, y, subjects=who)
    assert fitted.predict(x).shape == (120,)
    with pytest.raises(ValueError, match="subjects has 5 entries for 120 rows"):
        FederatedClassifier(rounds=1).fit(x, y, subjects=who[:5])
