"""Tables of others: data as they cut them, words that say what differs, and a page that its records make."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import train_test_split

import fedloom as fl
from fedloom.errors import DataError
from fedloom.lab.report import read_runs
from fedloom_studies.others import page, sources
from fedloom_studies.others.page import CellWord, name_cell, recipes_by_table, verdict_words
from fedloom_studies.reproduce import read_recipes, reproduce
from fedloom_studies.reproduce.cells import make_table_cells
from fedloom_studies.reproduce.figures import Reference, get_unit, values_by_seed
from fedloom_studies.reproduce.page import is_earlier_version, last_summary
from fedloom_studies.store import CHECKOUT_FOLDER

RESULTS = Path(__file__).parents[4] / CHECKOUT_FOLDER
GROUPS = recipes_by_table(read_recipes())
PUBLISHED = [one for group in GROUPS.values() for one in group if one.paper.mode == "published"]
HOSPITALS = {"cleveland": 60, "hungarian": 50, "switzerland": 12, "va": 40}


def write_hospitals(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in HOSPITALS.items():
        table = rng.normal(50, 9, (count, 14)).round(1)
        table[:, 2], table[:, 6], table[:, 13] = rng.integers(1, 5, count), rng.integers(0, 3, count), 0
        table[:, 4] = 0.0 if name == "switzerland" else table[:, 4]
        table[: count // 2 if name != "switzerland" else 2, 13] = rng.integers(1, 5)
        lines = [
            ",".join("?" if rng.random() < 0.01 and k < 13 else f"{v:g}" for k, v in enumerate(row)) for row in table
        ]
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")


def flamby(folder: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Prepare the hospitals with pandas, step by step as FLamby's README has it: features, targets, test marks."""
    frames = []
    for name in HOSPITALS:
        frame = pd.read_csv(folder / f"processed.{name}.data", header=None, na_values="?")
        frames.append(frame.drop(columns=[10, 11, 12]).dropna())
    whole = pd.get_dummies(pd.concat(frames, keys=range(len(frames))).drop(columns=13), columns=[2, 6], drop_first=True)
    made = []
    for k, frame in enumerate(frames):
        y = (frame[13] > 0).to_numpy().astype(int)
        stratify = y if np.bincount(y, minlength=2).min() > 2 else None
        train, _ = train_test_split(
            np.arange(len(y)), test_size=0.34, train_size=0.66, random_state=43, stratify=stratify
        )
        x = whole.loc[k].to_numpy().astype(float)
        tested = ~np.isin(np.arange(len(y)), train)
        made.append(((x - x[train].mean(0)) / (x[train].std(0, ddof=1) + 1e-9), y, tested))
    return made


def test_the_hospitals_are_those_of_flamby(tmp_path: Path) -> None:
    write_hospitals(tmp_path)
    data = sources.FlambyHeart(path=str(tmp_path)).load()
    federation = fl.partitions.natural(test_from="clients", validation=0.0)(data)
    assert federation.sizes().tolist() == [int((~tested).sum()) for _, _, tested in flamby(tmp_path)]
    assert data.x.shape[1] == 13
    for k, (x, y, tested) in enumerate(flamby(tmp_path)):
        rows = data.users.numpy() == k
        assert 0 < rows.sum() < [*HOSPITALS.values()][k] + 1
        np.testing.assert_allclose(data.x.numpy()[rows], x, atol=2e-5)
        np.testing.assert_array_equal(data.y.numpy()[rows], y)
        np.testing.assert_array_equal(np.isin(np.flatnonzero(rows), data.test.numpy()), tested)


def test_a_missing_file_names_all_files_and_the_command_that_fetches_them(tmp_path: Path) -> None:
    write_hospitals(tmp_path)
    (tmp_path / "processed.va.data").unlink()
    with pytest.raises(DataError, match=r"processed\.va\.data were not found together.*fedloom data heart --fetch"):
        sources.FlambyHeart().load(tmp_path)
    (tmp_path / "processed.va.data").write_text("<html>\n")
    with pytest.raises(DataError, match=r"processed\.va\.data is not a table of the UCI heart disease data"):
        sources.FlambyHeart().load(tmp_path)
    with pytest.raises(DataError, match=r"brca\.csv, train_test_split\.csv or split\.csv were not found.*owkin/FLamby"):
        sources.FlambyBrca().load(tmp_path)


def test_the_regions_of_the_survival_table_and_its_test_patients_are_those_of_the_split(tmp_path: Path) -> None:
    rng, names = np.random.default_rng(0), [f"P{k}" for k in range(30)]
    table = pd.DataFrame(rng.integers(0, 2, (30, 39)), index=names)
    table["E"], table["T"] = rng.integers(0, 2, 30).astype(float), rng.integers(0, 900, 30).astype(float)
    table.to_csv(tmp_path / "brca.csv", index_label="pid")
    kept = rng.permutation(names)[:28]
    split = pd.DataFrame({"pid": kept, "fold": ["train"] * 20 + ["test"] * 8, "fold2": [
        f"{'train' if k < 20 else 'test'}_{k % 4}" for k in range(28)]})  # fmt: skip
    split.to_csv(tmp_path / "train_test_split.csv")
    data = sources.FlambyBrca(path=str(tmp_path)).load()
    np.testing.assert_array_equal(data.test.numpy(), np.arange(20, 28))
    np.testing.assert_array_equal(data.users.numpy(), np.arange(28) % 4)
    np.testing.assert_array_equal(data.y.numpy(), table.loc[kept, ["T", "E"]].to_numpy())
    np.testing.assert_array_equal(data.x.numpy(), table.loc[kept].iloc[:, :39].to_numpy())


def test_the_initial_model_is_the_one_of_torch_after_its_seed() -> None:
    before = torch.get_rng_state()
    made = [sources.SeededLinear().build((13,), 1, seed=seed) for seed in (42, 43)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(42)  # noqa: TID251 (as the other program)
    known = torch.nn.Linear(13, 1)
    torch.set_rng_state(before)
    assert torch.equal(made[0].weight, known.weight)
    assert torch.equal(made[0].bias, known.bias)
    assert not torch.equal(made[0].weight, made[1].weight)


def test_the_figure_of_one_client_is_that_of_its_own_series(tmp_path: Path) -> None:
    heart = read_recipes()["flamby-heart"]
    assert reproduce(heart, "smoke", tmp_path, only=["fedavg"]) is not None
    (run,) = read_runs([tmp_path / "all"])
    one = [values_by_seed(run, Reference.create(f"fedavg: global: loss/client-{k}", "loss")) for k in range(4)]
    mean = values_by_seed(run, Reference.create("fedavg: global", "loss"))
    assert np.mean([by_seed[42] for by_seed in one]) == pytest.approx(mean[42])
    assert len({by_seed[42] for by_seed in one}) > 1
    assert get_unit("accuracy/client-0").name == "%"


def test_words_of_cells_say_how_far_they_are() -> None:
    heart = read_recipes()["flamby-heart"]
    (cell, *_) = make_table_cells(
        heart, {"all": {"fedavg: global: accuracy/client-0": {"42": 0.7308, "43": 0.7308}}}, compare=True
    )
    named = {
        gap: name_cell(heart, replace(cell, mean=0.7308 + gap, verdict="above (...)")) for gap in (4e-5, 0.009, 0.03)
    }
    assert [*named.values()] == [CellWord.EXACT, CellWord.CLOSE, CellWord.OPEN]
    assert name_cell(heart, replace(cell, mean=0.77, verdict="within (...)")) is CellWord.SPREAD
    told = replace(heart, paper=heart.paper.with_(explained={cell.column: "c"}))
    assert name_cell(told, replace(cell, mean=0.77, verdict="above (...)")) is CellWord.EXPLAINED
    assert name_cell(heart, replace(cell, paper=None)) is None


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda one: one.name)
def test_no_printed_cell_that_was_run_differs_without_a_reason(recipe: object) -> None:
    words = verdict_words(recipe, last_summary(recipe, RESULTS))  # type: ignore[arg-type]
    assert CellWord.OPEN not in words.values()
    explained = {column for column, word in words.items() if word is CellWord.EXPLAINED}
    assert not words or explained == {*recipe.paper.explained}  # type: ignore[attr-defined]


def test_the_first_table_is_exact_in_most_cells_and_takes_two_minutes() -> None:
    """What the first page and the page of tables say of it."""
    heart = read_recipes()["flamby-heart"]
    summary = last_summary(heart, RESULTS)
    assert summary is not None
    assert not is_earlier_version(heart, summary)
    assert summary.minutes < 2
    words = [*verdict_words(heart, summary).values()]
    assert len(words) == 24
    assert words.count(CellWord.EXACT) >= 16
    assert {*words} == {CellWord.EXACT, CellWord.CLOSE}
    exact = {column for column, word in verdict_words(heart, summary).items() if word is CellWord.EXACT}
    assert {
        f"{method}, {k}" for method in ("FedAvg", "FedProx") for k in ("Cleveland", "Hungary", "Switzerland")
    } < exact
    assert "in about two minutes" in page.OTHERS_TEXT


def test_every_count_and_verdict_of_the_page_is_that_of_its_records() -> None:
    text = dict(page.render_pages(read_recipes(), RESULTS))[""]
    for recipe in PUBLISHED:
        words = [*verdict_words(recipe, last_summary(recipe, RESULTS)).values()]
        for word in CellWord:
            if word in words:
                assert f"{words.count(word)} {word}" in text
        section = text.partition(f"(papers/{recipe.name}.md)): ")[2].partition("**")[0]
        shown = re.findall(r" / \d+\.\d+ (\w+)", section)
        assert sorted(shown) == sorted(map(str, words)), recipe.name
    assert not re.search(r"\bnan\b", text)
