"""Rows in files of every form, by adaptation and by the reader of a site: the same figures, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from fedloom.data.federation import DATA_PARTS
from fedloom.errors import FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, open_run, parse

RNG = np.random.default_rng(0)
COUNT = 60
ROWS = pd.DataFrame(
    {
        "age": RNG.integers(20, 80, COUNT).astype(float),
        "hb": RNG.normal(12, 2, COUNT).round(1),
        "ward": RNG.choice([*"ABC"], COUNT),
        "smoker": RNG.random(COUNT) < 0.4,
        "grade": RNG.integers(1, 4, COUNT),
        "y": RNG.integers(0, 2, COUNT),
    }
)
SAME: dict[str, Callable[[Path], object]] = {
    "order.csv": lambda p: ROWS.iloc[:, ::-1].to_csv(p, index=False),
    "semicolon.csv": lambda p: ROWS.to_csv(p, index=False, sep=";", decimal=","),
    "tab.tsv": lambda p: ROWS.to_csv(p, index=False, sep="\t"),
    "mark.csv": lambda p: ROWS.to_csv(p, index=False, encoding="utf-8-sig"),
    "index.csv": lambda p: ROWS.to_csv(p),
    "quotes.csv": lambda p: ROWS.to_csv(p, index=False, quoting=1),
    "lines.csv": lambda p: ROWS.to_csv(p, index=False, lineterminator="\r\n"),
    "packed.csv.gz": lambda p: ROWS.to_csv(p, index=False),
    "levels.csv": lambda p: ROWS.assign(grade=ROWS.grade.astype(float)).to_csv(p, index=False),
    "spaces.csv": lambda p: (
        ROWS.rename(columns=" {}".format).assign(**{" ward": " " + ROWS.ward}).to_csv(p, index=False)
    ),
    "bits.csv": lambda p: ROWS.assign(smoker=ROWS.smoker.astype(int)).to_csv(p, index=False),
    "upper.csv": lambda p: ROWS.assign(smoker=ROWS.smoker.astype(str).str.upper()).to_csv(p, index=False),
    "more.csv": lambda p: ROWS.assign(note=1.5).to_csv(p, index=False),
    "target.csv": lambda p: ROWS.assign(y=ROWS.y.astype(float)).to_csv(p, index=False),
    "plain.parquet": lambda p: ROWS.to_parquet(p),
    "nullable.parquet": lambda p: ROWS.convert_dtypes().to_parquet(p),
    "category.parquet": lambda p: ROWS.astype({"ward": "category", "grade": "category"}).to_parquet(p),
    "plain.feather": lambda p: ROWS.to_feather(p),
    "plain.xlsx": lambda p: ROWS.to_excel(p, index=False),
    "plain.dta": lambda p: ROWS.assign(smoker=ROWS.smoker.astype(int)).to_stata(p, write_index=False),
}
"""Files that mean the same rows."""
KINDS = {".parquet": "parquet", ".feather": "feather", ".xlsx": "excel", ".dta": "statistics"}
"""Source that a site names for a file."""
OTHER: dict[str, Callable[[Path], object]] = {
    "wide.csv": lambda p: ROWS.to_csv(p, index=False, encoding="utf-16"),
    "words.csv": lambda p: ROWS.assign(smoker=np.where(ROWS.smoker, "yes", "no")).to_csv(p, index=False),
    "twice.csv": lambda p: p.write_text(ROWS.to_csv(index=False).replace("age,hb", "age,age", 1)),
    "less.csv": lambda p: ROWS.drop(columns="hb").to_csv(p, index=False),
    "text.csv": lambda p: ROWS.assign(hb="high").to_csv(p, index=False),
    "old.xls": lambda p: ROWS.to_csv(p, index=False),
    "no_target.csv": lambda p: ROWS.drop(columns="y").to_csv(p, index=False),
}
"""Files whose rows cannot be read with certainty."""


def document(folder: Path) -> dict[str, Any]:
    ROWS.to_csv(folder / "rows.csv", index=False)
    return {
        "rounds": 1,
        "seeds": [0],
        "data": {"source": str(folder / "rows.csv"), "target": "y", "categorical": ["ward", "grade"]},
        "partition": {"kind": "iid", "clients": 2},
        "method": [{"algorithm": "ditto"}],
    }


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """Probabilities of the model that is adapted to a file."""
    folder = tmp_path_factory.mktemp("adapt")
    Plan(parse(document(folder)), folder / "run").run()
    run = open_run(folder / "run")
    (one,) = run.runs()
    return lambda path: one.models.adapt(run.read(path), rounds=2).predict_proba(ROWS.drop(columns="y"))


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """Samples that a deployed site reads from a file."""
    files = pytest.importorskip("fedloom_sites.deploy.setting_files")
    code, data = (pytest.importorskip(f"fedloom_sites.deploy.{name}") for name in ("code", "site.local_data"))
    folder = tmp_path_factory.mktemp("site")
    file = folder / "x.toml"
    file.write_text(tomli_w.dumps(document(folder)))
    words = ["deploy", "init", str(file), "--sites", "2", "--own-data", "--out", str(folder / "made")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    site = files.read_site(folder / "made" / "sites" / "site-0" / "site.toml")
    agreed = code.read_agreed(site)

    def read(path: Path) -> Any:
        kind = KINDS.get(path.suffix, "csv")
        fed = data.site_federation(agreed, site.with_(data={**site.data, "source": kind, "path": str(path)}))
        index = np.concatenate([fed.indices(part, 0).numpy() for part in DATA_PARTS])
        return np.concatenate([fed.fetch(torch.from_numpy(index)).numpy(), fed.data.y.numpy()[index, None]], 1)

    return read


@pytest.mark.parametrize("door", ["adapted", "held"])
def test_files_that_mean_the_same_rows_give_the_same_figures(
    door: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    read = request.getfixturevalue(door)
    ROWS.to_csv(tmp_path / "rows.csv", index=False)
    want = read(tmp_path / "rows.csv")
    for name, write in SAME.items():
        write(tmp_path / name)
        np.testing.assert_array_equal(read(tmp_path / name), want, err_msg=name)


@pytest.mark.parametrize("door", ["adapted", "held"])
def test_files_that_do_not_are_refused_with_a_cure(door: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    read = request.getfixturevalue(door)
    for name, write in OTHER.items():
        write(tmp_path / name)
        with pytest.raises(FedloomError) as caught:
            read(tmp_path / name)
        assert len(str(caught.value).split()) > 5, name
