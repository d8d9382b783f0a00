"""Sites with data of their own, in folders that cannot see each other; the file that `init` read is gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from typer.testing import CliRunner

from fedloom.errors import DataError, Stop
from fedloom.lab.cli import app
from fedloom_sites.deploy.ops.loopback import run_all
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site
from fedloom_sites.deploy.site.client import Client
from tests.deploy.grid import FakeGrid, outside_flower
from tests.deploy.scene import FIRST

NAMES = {"csv": "cohort.csv", "npz": "cohort.npz", "parquet": "cohort.parquet"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def save(path: Path, seed: int, rows: int = 40) -> None:
    """Two numbers and a class that depends on them, in the format of the name."""
    x = np.random.default_rng(seed).normal(size=(rows, 2)).astype(np.float32)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, x=x, y=y)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": y}), path)
    else:
        path.write_text("a,b,y\n" + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(x, y, strict=True)))


def init(folder: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any]) -> Path:
    """A deployment of an experiment whose data is named by a path relative to the planner's folder, since deleted."""
    planner = folder / "planner"
    file = Path(str(data.get("path", data["source"])))
    save(planner / file, 0)
    document = {
        "rounds": 2,
        "data": data,
        "partition": {"kind": "iid", "clients": 2, "test": 0.2},
        "evaluate": {"every": 2},
        "method": [{"algorithm": "fedavg"}],
    }
    (planner / "experiment.toml").write_text(tomli_w.dumps(document))
    with monkeypatch.context() as patch:
        patch.chdir(planner)
        words = ["deploy", "init", "experiment.toml", "--sites", "2", "--own-data", "--out", str(folder / "made")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    shutil.rmtree(planner)
    return folder / "made"


def check(site: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["deploy", "check", str(site), "--offline"])
    return done.exit_code, done.output


@pytest.mark.parametrize("how", ["source", "path", "below a folder", "elsewhere"])
@pytest.mark.parametrize("kind", NAMES)
def test_sites_that_share_no_path(kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and sites are moved to folders of their own; each site has its file beside or below its settings."""
    outside_flower()
    name = NAMES[kind]
    data = {"source": name} if how == "source" else {"source": kind, "path": name}
    made = init(tmp_path, monkeypatch, data if how != "below a folder" else {"source": kind, "path": f"deep/{name}"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    server = shutil.move(made / "server", tmp_path / "machine-0" / "server")
    clients = []
    for k in range(2):
        home = Path(shutil.move(made / "sites" / f"site-{k}", tmp_path / f"machine-{k + 1}" / "site"))
        code, said = check(home)
        assert code == 1
        assert f"no data at {home / name}. Set path in [data] of site.toml" in said
        if how == "elsewhere":
            text = (home / "site.toml").read_text().replace(f'path = "{name}"', f'path = "../own/{name}"')
            (home / "site.toml").write_text(text)
            save(home.parent / "own" / name, k + 1)
        else:
            save(home / name, k + 1)
        code, said = check(home)
        assert code == 0, said
        assert "samples for training" in said
        clients.append(Client(read_site(home / "site.toml")))
    shutil.rmtree(made)
    grid = FakeGrid({FIRST + c.site.client: c.answer for c in clients})
    assert serve_run(grid, read_server(Path(server) / "server.toml"), lambda _: None) is Stop.DONE
    assert str(tmp_path / "planner") not in "".join(p.read_text() for p in tmp_path.rglob("*.toml"))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda home: (home / "cohort.csv").mkdir(), "no .csv file. Pass"),
        (lambda home: (home / "cohort.csv").write_text("a,y\n1,0\n2,1\n"), "no column 'b' (the agreement names it)"),
        (
            lambda home: (home / "cohort.csv").write_text("a,b,y\n1,2,0\n2,3,1\n4,5,2\n"),
            "the label 'y' is '2', but only 0, 1 are allowed",
        ),
        (lambda home: (home / "cohort.csv").write_text("a,b,y\n1,2,0\n2,x,1\n"), "expected a finite number"),
    ],
)
def test_check_says_what_is_wrong_with_a_sites_file(
    write: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = init(tmp_path, monkeypatch, {"source": "cohort.csv"})
    home = made / "sites" / "site-0"
    write(home)
    code, said = check(home)
    assert code == 1
    assert sentence in said, said


def test_a_source_by_name_that_is_mistyped_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = init(tmp_path, monkeypatch, {"source": "csv", "path": "cohort.csv"})
    home = made / "sites" / "site-0"
    (home / "site.toml").write_text((home / "site.toml").read_text().replace('source = "csv"', 'source = "digitz"'))
    code, said = check(home)
    assert code == 1
    assert "digits" in said


def test_a_local_run_refuses_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = init(tmp_path, monkeypatch, {"source": "cohort.csv"})
    save(made / "sites" / "site-0" / "cohort.csv", 1)
    with pytest.raises(DataError, match="site-1"):
        run_all(made, lambda _: None)
    assert not (made / "local").exists()


@pytest.mark.slow
@pytest.mark.deploy
def test_a_deployed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kind of file: how a site reads each of them is tested above."""
    made = init(tmp_path, monkeypatch, {"source": "cohort.parquet"})
    for k in range(2):
        save(made / "sites" / f"site-{k}" / "cohort.parquet", k + 1)
    said: list[str] = []
    here = run_all(made, said.append)
    assert any(line.startswith("round 2/2: 2 of 2 accepted") for line in said), said
    assert {row["site"] for row in here.table()} == {"site-0", "site-1"}


def test_sites_read_a_table_of_scikit_learn(tmp_path: Path) -> None:
    """It takes no agreement on columns: what they are is fixed."""
    outside_flower()
    file = tmp_path / "experiment.toml"
    document = {
        "rounds": 1,
        "data": {"source": "sklearn", "set": "breast_cancer"},
        "partition": {"kind": "iid", "clients": 2},
        "method": [{"algorithm": "fedavg"}],
    }
    file.write_text(tomli_w.dumps(document))
    done = CliRunner().invoke(app, ["deploy", "init", str(file), "--sites", "2", "--out", str(tmp_path / "d")])
    assert done.exit_code == 0, done.output
    for k in range(2):
        code, text = check(tmp_path / "d" / "sites" / f"site-{k}")
        assert code == 0, text


def test_a_site_gives_bytes_or_their_255th_parts_to_an_experiment_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else is refused before the first round; so is another mean, which predictions would not have."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1, 3, 3)).astype(np.uint8)
    pixels[0, 0, 0, :2] = 0, 255

    def write(path: Path, x: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=x, y=np.arange(40) % 2)

    monkeypatch.setattr("tests.deploy.test_own_data.save", lambda path, _seed: write(path, pixels))
    made = init(tmp_path, monkeypatch, {"source": "cohort.npz", "mean": [0.5]})
    home = made / "sites" / "site-0"
    for x in (pixels, (pixels / 255).astype(np.float32)):
        write(home / "cohort.npz", x)
        code, said = check(home)
        assert code == 0, said
    for x, cure in (
        (pixels * 1.0, "pass bytes: x.astype('uint8')"),
        (pixels.astype(int), "pass bytes: x.astype('uint8')"),
    ):
        write(home / "cohort.npz", x)
        code, said = check(home)
        assert code == 1
        assert "the model was trained on bytes" in " ".join(said.split())
        assert cure in " ".join(said.split())
    write(home / "cohort.npz", pixels)
    settings = home / "site.toml"
    settings.write_text(settings.read_text().replace("0.5", "0.25", 1))
    code, said = check(home)
    assert code == 1
    assert "mean and std of [data] are ((0.25,), None), but the experiment has ((0.5,), None)" in " ".join(said.split())


def test_a_site_gives_no_bytes_to_an_experiment_of_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = init(tmp_path, monkeypatch, {"source": "cohort.npz"})
    home = made / "sites" / "site-0"
    np.savez(home / "cohort.npz", x=np.ones((40, 2), np.uint8), y=np.arange(40) % 2)
    code, said = check(home)
    assert code == 1
    assert "samples are bytes (uint8), but the model was trained on floats without scaling. Convert" in " ".join(
        said.split()
    )
