"""Doors of the command line: lists of every kind, a look at a run, other values, fewer methods, other rounds."""

from __future__ import annotations

import itertools
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedloom.errors import ConfigError
from fedloom.lab.cli import app
from fedloom.lab.cli.facts import LISTED_KINDS
from fedloom.lab.experiment import open_run, parse, read
from fedloom.lab.experiment.cards import PART_KINDS, list_parts
from fedloom.lab.experiment.overrides import apply_overrides

FILE = """
rounds = 4
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "dirichlet"
clients = 4
alpha = 0.5
[local]
steps = 3
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedprox"
label = "prox 1"
mu = 1.0
rounds = 3
[[method]]
algorithm = "fedprox"
mu = 0.1
local = { lr = 0.5 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "small.toml"


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("workers", ["0", "-1", "1.5", "many", "²"])
def test_workers_are_a_number_from_1_or_auto(workers: str, file: Path, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"]
    places = [["run", file, *out], ["tune", file, *out], ["bench", file]]
    if find_spec("fedloom_studies") is not None:
        places.append(["reproduce", "fiaelt-synthetic", *out])
    for words in places:
        done = call(*words, "--workers", workers)
        assert done.exit_code == 2, done.output
        assert f"error: --workers must be 'auto' or a number of at least 1, got {workers!r}" in done.output
    assert [*tmp_path.iterdir()] == [file]


def test_every_command_takes_auto(file: Path, tmp_path: Path) -> None:
    words = ["tune", file, "--trials", "1", "--out", tmp_path / "out"]
    assert call(*words, "--workers", "auto").exit_code == 0
    assert call("bench", file, "--rounds", "1", "--gradient-engine", "compiled", "--workers", "auto").exit_code == 0


def set_to(*values: str, methods: tuple[str, ...] = (), rounds: int | None = None) -> Any:
    return apply_overrides(tomllib.loads(FILE), "small.toml", values, methods, rounds)


# --- list


def test_bare_list_lists_methods() -> None:
    assert call("list").stdout == call("list", "methods").stdout
    assert "  fedavg " in call("list").stdout


@pytest.mark.parametrize("kind", [k for k in LISTED_KINDS if k != "methods"])
def test_every_name_of_a_kind_is_listed_with_a_line(kind: str) -> None:
    found = call("list", kind)
    assert found.exit_code == 0
    listed = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in found.stdout.splitlines()]
    if kind == "recipes":
        studies = pytest.importorskip("fedloom_studies.reproduce.recipe")
        assert {line[0] for line in listed} == set(studies.recipe_names())
        return
    want = {"metrics": lambda: [name for name, _ in list_parts("metrics")]}
    assert {line[0] for line in listed} == set(want.get(kind, lambda: PART_KINDS.get(kind, ()))())
    assert all(len(line) == 2 and len(line[1]) > 3 for line in listed)


def test_an_unknown_kind_is_refused() -> None:
    found = call("list", "partition")
    assert found.exit_code == 2
    assert "did you mean 'partitions'?" in found.stderr


# --- other values


def test_values_are_those_of_toml_and_words_need_no_quotes() -> None:
    found = set_to("local.lr=0.25", "rounds=9", "partition.kind=iid", "name=two words".replace(" ", "-"), "seeds=[3]")
    assert (found["local"]["lr"], found["rounds"], found["name"], found["seeds"]) == (0.25, 9, "two-words", [3])
    assert found["partition"] == {"kind": "iid"}  # beta belonged to the other kind
    made = parse(found)
    assert [m.setting.local.lr for m in made.methods] == [0.25, 0.25, 0.5]
    assert tomllib.loads(FILE) == set_to()


def test_epochs_take_the_place_of_steps() -> None:
    assert set_to("local.epochs=2")["local"] == {"epochs": 2}
    with pytest.raises(ConfigError, match="set either epochs or steps, not both"):
        parse(set_to("local.epochs=2", "local.steps=5"))


def test_the_order_of_changes_has_no_effect() -> None:
    changes = ("partition.clients=3", "partition.kind=shards", "local.steps=5", "partition.labels_per_client=1")
    found = [set_to(*order) for order in itertools.permutations(changes)]
    assert found[0]["partition"] == {"kind": "shards", "clients": 3, "labels_per_client": 1}
    assert all(other == found[0] for other in found)
    tables = "partition={ kind = 'iid', clients = 4 }", "partition.clients=3"
    assert set_to(*tables) == set_to(*reversed(tables))
    assert set_to(*tables)["partition"] == {"kind": "iid", "clients": 3}


def test_a_method_has_values_of_its_own() -> None:
    found = set_to("method.prox 1.mu=3", "method.fedprox.local.lr=0.01", "method.fedavg.local.epochs=1")
    assert found["method"][1]["mu"] == 3
    assert found["method"][2]["local"] == {"lr": 0.01}
    assert found["method"][0]["local"] == {"epochs": 1}
    assert parse(found).methods[0].setting.local.steps is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local.lr", "must be key=value, for example --set local.lr=0.1"),
        ("=3", "must be key=value"),
        ("local..lr=3", "must be key=value"),
        ("local.lr=0,1", "--set local.lr: '0,1' is not a TOML value"),
        ("rounds.x=1", "--set rounds.x: [rounds]"),
        ("method.mu=1", "method keys have the form method.LABEL.key. Labels: fedavg, prox 1, fedprox"),
        ("method.fedporx.mu=1", "did you mean 'fedprox'?"),
    ],
)
def test_a_value_that_cannot_be_set_names_its_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        set_to(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local.lr=fast", r"\[local\]: lr"),
        ("local.lr=-1", r"\[local\]: lr"),
        ("local.rl=1", r"\[local\]: unknown key 'rl'"),
        ("roundz=1", "unknown key 'roundz'; did you mean 'rounds'"),
        ("partition.kind=idd", "did you mean 'iid'"),
    ],
)
def test_a_value_that_the_experiment_refuses_names_its_key(text: str, said: str, file: Path, tmp_path: Path) -> None:
    found = call("run", file, "--out", tmp_path / "out", "--set", text)
    assert found.exit_code == 2
    assert re.search(said, found.stderr)
    assert not (tmp_path / "out").exists()


def test_methods_are_chosen_by_label_or_algorithm(file: Path) -> None:
    assert [m.label for m in read(file, methods=["prox 1"]).methods] == ["prox 1"]
    assert [m.label for m in read(file, methods=["fedprox"]).methods] == ["prox 1", "fedprox"]
    assert [m.label for m in read(file, methods=["fedavg", "prox 1"]).methods] == ["fedavg", "prox 1"]
    with pytest.raises(ConfigError, match="--method: unknown method 'fedavgg'; did you mean 'fedavg'"):
        read(file, methods=["fedavgg"])


def test_rounds_are_those_of_every_method(file: Path) -> None:
    assert [m.setting.rounds for m in read(file).methods] == [4, 3, 4]
    assert [m.setting.rounds for m in read(file, rounds=7).methods] == [7, 7, 7]


def test_run_takes_them_all(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = call(
        "run", file, "--out", out, "--method", "fedavg", "--rounds", 2, "--set", "local.lr=0.125", "--set", "seeds=[5]"
    )
    assert found.exit_code == 0, found.output
    written = tomllib.loads((out / "experiment.toml").read_text())
    assert (written["rounds"], written["seeds"], [m["label"] for m in written["method"]]) == (2, [5], ["fedavg"])
    assert written["method"][0]["local"]["lr"] == 0.125


def test_the_file_of_a_run_directory_runs_again(file: Path, tmp_path: Path) -> None:
    """It has a table `resolved` with versions; in another folder it gives the same figures, in its own it goes on."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert call("run", file, "--out", one, "--rounds", 2).exit_code == 0
    before = (one / "experiment.toml").read_bytes()
    assert "resolved" in tomllib.loads(before.decode())
    for out in (two, one):
        again = call("run", one / "experiment.toml", "--out", out)
        assert again.exit_code == 0, again.output
        assert (out / "metrics.parquet").read_bytes() == (one / "metrics.parquet").read_bytes()
    assert (two / "experiment.toml").read_bytes() == before


# --- a look


def test_a_dry_run_shows_the_plan_and_writes_nothing(file: Path, tmp_path: Path) -> None:
    found = call("run", file, "--out", tmp_path / "out", "--dry-run", "--set", "engine.workers=1")
    assert found.exit_code == 0, found.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.toml"]
    assert "3 methods, 2 seeds, 6 runs" in found.stdout
    assert "digits, 1797 samples of shape [1, 8, 8]" in found.stdout
    assert re.search(r"clients: 4, \d+ to \d+ training samples each; train \d+", found.stdout)
    assert re.search(r"estimated time: about \d+ (s|min)", found.stdout)
    row = next(line for line in found.stdout.splitlines() if line.strip().startswith("prox 1"))
    method, rounds, clients, steps, samples, up, down, parameters, seconds = re.split(r"\s{2,}", row.strip())
    assert (method, rounds, float(clients), steps) == ("prox 1", "3", 4.0, str(4 * 3))
    assert int(samples) <= 4 * 3 * 20
    for traffic in (up, down):
        assert float(traffic) == pytest.approx(4 * 4 * int(parameters) / 1e6, rel=0.1)
    assert float(seconds) > 0


def test_a_dry_run_leaves_a_run_directory_as_it_is(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("run", file, "--out", out, "--method", "fedavg").exit_code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert call("run", file, "--out", out, "--method", "fedavg", "--dry-run", "--force").exit_code == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    refused = call("run", file, "--out", out, "--dry-run", "--set", "partition.alpha=0.1")
    assert refused.exit_code == 2
    assert "partition.alpha" in refused.stderr


@pytest.mark.parametrize("look", [["--dry-run"], []])
def test_a_run_says_what_is_known_of_a_method_before_its_first_round(file: Path, look: list[str]) -> None:
    given = [file, "--out", file.parent / "out", "--rounds", "1", *look]
    found = call("run", *given, "--set", "local.steps=1")
    assert found.exit_code == 0, found.output
    noted, after = found.output.split("FedProx with one local step is the same as FedAvg", 1)
    assert noted == "prox 1, fedprox: "
    assert "one local step" not in after
    assert "round 1" not in noted
    assert "one local step" not in call("run", *given, "--force").output


def test_a_refit_trains_on_all_samples_after_cross_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What folds and groups ask for is left out or has nothing to score; every row is in training."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{k % 7},{'fm'[k % 2]},{'ab'[k % 3 > 0]},{int(k % 5 > 2)}\n" for k in range(60))
    (tmp_path / "t.csv").write_text(f"x,sex,site,y\n{rows}")
    document = """
        rounds = 1
        seeds = [0, 1]
        [data]
        source = "t.csv"
        client_column = "site"
        drop = ["sex"]
        [partition]
        kind = "natural"
        folds = 2
        [[analysis]]
        kind = "groups"
        by = ["sex"]
        [[analysis]]
        kind = "predictions"
        [[method]]
        algorithm = "local"
        [[method]]
        algorithm = "ditto"
    """
    (tmp_path / "cv.toml").write_text(document)
    done = call("run", "cv.toml", "--refit", "--method", "ditto")
    assert done.exit_code == 0, done.output
    experiment = read(tmp_path / "cv.toml", methods=["ditto"], refit=True)
    assert experiment.head.seeds == (0,)
    federation = experiment.partition(experiment.source.read(None), 0)
    assert {part: int(federation.sizes(part).sum()) for part in federation.parts} == {
        "train": 60, "validation": 0, "test": 0,
    }  # fmt: skip
    assert len(open_run(tmp_path / "runs" / "cv-refit").predict(tmp_path / "t.csv", "ditto").scores) == 60


@pytest.mark.parametrize(
    ("table", "change", "sizes"),
    [
        ("", "", (60, 0, 0)),
        ("[evaluate]\nparts = ['test']", "", (60, 0, 0)),
        ("", "partition.validation=0.25", (45, 15, 0)),
        ("[early_stop]\npatience = 1\n[evaluate]\nparts = ['validation', 'test']", "", (54, 6, 0)),
        ("[early_stop]\npart = 'train'", "", (60, 0, 0)),
    ],
)
def test_a_refit_trains_on_all_rows_that_no_other_key_needs_and_ends_as_done(
    table: str, change: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("x,site,y\n" + "".join(f"{k % 7},{'ab'[k % 3 > 0]},{k % 2}\n" for k in range(60)))
    (tmp_path / "e.toml").write_text(
        "rounds = 2\n[data]\nsource = 't.csv'\nclient_column = 'site'\n[partition]\nkind = 'natural'\n"
        f"validation = 0.1\n{table}\n[[method]]\nalgorithm = 'fedavg'\n"
    )
    given = ["--set", change] if change else []
    done = call("run", "e.toml", "--refit", *given)
    assert done.exit_code == 0, done.output
    assert "trained, but not evaluated" in done.output
    experiment = read(tmp_path / "e.toml", given[1:], refit=True)
    federation = experiment.partition(experiment.source.read(None), 0)
    assert tuple(int(federation.sizes(part).sum()) for part in ("train", "validation", "test")) == sizes
    refused = call("run", "e.toml", "--refit", "--set", "partition.test=0.2")
    assert refused.exit_code == 2
    assert "Omit --refit or --set partition.test" in refused.output
