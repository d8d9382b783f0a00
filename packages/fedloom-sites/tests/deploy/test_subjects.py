"""Patients at sites: each site splits its own rows by patient, whatever its file says, and counts patients."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from fedloom.data.federation import DATA_PARTS
from fedloom.errors import DataError
from fedloom.lab.cli import app
from fedloom_sites.deploy.code import read_agreed
from fedloom_sites.deploy.setting_files import read_site
from fedloom_sites.deploy.site.local_data import site_federation

ROWS, PATIENTS = 120, 30


def save(path: Path, seed: int, patients: int = PATIENTS, named: bool = True) -> None:
    """Rows of some patients, in no order."""
    rng = np.random.default_rng(seed)
    who, x, y = rng.integers(patients, size=ROWS), rng.normal(size=(ROWS, 2)).round(3), rng.integers(2, size=ROWS)
    lines = [f"{f'p{p},' * named}{a},{b},{c}" for p, (a, b), c in zip(who, x, y, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"{'patient,' * named}a,b,y", *lines]) + "\n")


def deployed(folder: Path, monkeypatch: pytest.MonkeyPatch, **agreed: object) -> Path:
    """The first site of a deployment whose experiment names the patient in [data], or in its agreement."""
    save(folder / "cohort.csv", 0)
    data: dict[str, object] = {"source": "cohort.csv", "target": "y", "subject": "patient"}
    if agreed:
        pytest.importorskip("fedloom_clinic")
        said = CliRunner().invoke(app, ["init", str(folder / "cohort.csv"), "--target", "y", "--agree"])
        assert said.exit_code == 0, said.output
        document = folder / "cohort.agreement.toml"
        text = document.read_text()
        assert 'subject = "patient"' in text
        for key, value in agreed.items():
            text = text.replace(f"{key} = 1\n", f"{key} = {value}\n")
        document.write_text(text)
        data = {"source": "cohort.csv", "target": "y", "agreement": str(document)}
    partition = {"kind": "iid", "clients": 2, "test": 0.2}
    table = {"rounds": 1, "data": data, "partition": partition, "method": [{"algorithm": "fedavg"}]}
    (folder / "experiment.toml").write_text(tomli_w.dumps(table))
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        words = ["deploy", "init", "experiment.toml", "--sites", "2", "--own-data", "--out", str(folder / "made")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    return Path(shutil.move(folder / "made" / "sites" / "site-0", folder / "site"))


@pytest.mark.parametrize("by_agreement", [False, True])
def test_a_site_splits_its_own_rows_by_patient(
    by_agreement: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = deployed(tmp_path, monkeypatch, **({"patients": 2} if by_agreement else {}))
    save(home / "cohort.csv", 7)
    text = (home / "site.toml").read_text()
    (home / "site.toml").write_text("\n".join(line for line in text.splitlines() if not line.startswith("subject =")))
    site = read_site(home / "site.toml")
    fed = site_federation(read_agreed(site), site)
    design = fed.data.design
    here = {part: {*design.units[fed.indices(part, site.client).numpy()].tolist()} for part in DATA_PARTS}
    assert here["train"]
    assert here["test"]
    assert not here["train"] & here["test"]
    assert not here["validation"] & (here["train"] | here["test"])
    assert len(np.unique(design.units)) <= PATIENTS


def test_a_site_without_the_column_of_patients_takes_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = deployed(tmp_path, monkeypatch)
    save(home / "cohort.csv", 7, named=False)
    site = read_site(home / "site.toml")
    with pytest.raises(DataError, match="no column 'patient'"):
        site_federation(read_agreed(site), site)


def test_the_least_number_of_patients_is_of_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = deployed(tmp_path, monkeypatch, patients=20)
    save(home / "cohort.csv", 7, patients=8)  # of 120 rows
    site = read_site(home / "site.toml")
    with pytest.raises(DataError, match=r"8 subjects \('patient'\), but the agreement requires at least 20"):
        site_federation(read_agreed(site), site)
