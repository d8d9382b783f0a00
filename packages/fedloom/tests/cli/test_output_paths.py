"""No command writes over what is not its own: every option that names an output, with every place that is refused."""

from __future__ import annotations

import errno
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from safetensors.torch import save_file

import fedloom as fl
from fedloom.lab import report
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.trained.export import export_model
from tests.commands import call

EXPERIMENT = """
rounds = 1
seeds = [0]
[data]
source = "{table}"
target = "died"
drop = ["hospital"]
[partition]
kind = "iid"
clients = 2
[[method]]
algorithm = "ditto"
"""

READ = {
    "advise": {"file", "data_dir"},
    "analyze": {"file", "data_dir"},
    "bench": {"file", "data_dir"},
    "cox": {"file", "data_dir"},
    "models": {"run"},
    "evaluate": {"run", "data_dir"},
    "predict": {"run", "data_dir"},
    "adapt": {"run", "data_dir"},
    "export": {"run"},
    "glm": {"file", "data_dir"},
    "init": {"table"},
    "merge": {"runs"},
    "run": {"file", "data_dir"},
    "report": {"runs"},
    "tune": {"file", "data_dir"},
    "watch": {"run"},
    "reproduce": {"data_dir"},
    "map": {"space", "data_dir"},
    "deploy init": {"file", "data_dir", "home", "programs", "memory"},  # the last three are of other machines
    "deploy analyze": {"file", "data_dir"},
    "deploy check": {"site"},
    "deploy rehearse": {"site"},
    "deploy stop": {"folder"},
    "deploy local": {"directory"},
    "deploy status": {"folder"},
    "deploy renew": {"directory"},  # these change the deployment that they are given
    "deploy add": {"directory", "home", "programs", "memory"},
    "deploy upgrade": {"directory"},
    "deploy rotate": {"directory"},
    "deploy approve": {"site", "change"},
    "deploy snapshot": {"site"},
    "deploy remove": {"directory"},
    "deploy revoke": {"directory"},
    "deploy models": {"folder"},
    "deploy predict": {"site", "rows"},
    "deploy evaluate": {"site", "rows"},
    "deploy export": {"site"},
    "deploy verify-log": {"place"},
}
"""Paths of every command that it reads, or that it was made to change."""
FILES: dict[tuple[str, str], tuple[list[str], str]] = {
    ("predict", "out"): (["predict", "RUN", "TABLE", "--out", "X"], "new.csv"),
    ("adapt", "out"): (["adapt", "RUN", "--data", "TABLE", "--out", "X"], "new.safetensors"),
    ("export", "out"): (["export", "RUN", "--model", "ADAPTED", "--out", "X"], "new.safetensors"),
    ("report", "out"): (["report", "RUN", "--out", "X"], "new.html"),
    ("init", "out"): (["init", "TABLE", "--client-column", "hospital", "--target", "died", "--out", "X"], "new.toml"),
    ("reproduce", "page"): (["reproduce", "--page", "X"], "new.md"),
    ("map", "page"): (["map", "--scale", "smoke", "--page", "X"], "new.md"),
    ("deploy predict", "out"): (["deploy", "predict", "SITE", "TABLE", "--out", "X"], "new.csv"),
    ("deploy export", "out"): (["deploy", "export", "SITE", "--out", "X"], "new.onnx"),
}
"""A call for every option that names a file to write, and a name that such a file could have."""
FOLDERS: dict[tuple[str, str], list[str]] = {
    ("advise", "out"): ["advise", "EXPERIMENT", "--out", "X"],
    ("run", "out"): ["run", "EXPERIMENT", "--out", "X"],
    ("merge", "out"): ["merge", "RUN", "--out", "X"],
    ("tune", "out"): ["tune", "EXPERIMENT", "--out", "X"],
    ("reproduce", "out"): ["reproduce", "fiaelt-synthetic", "--scale", "smoke", "--out", "X"],
    ("reproduce", "results"): ["reproduce", "fiaelt-synthetic", "--scale", "smoke", "--results", "X"],
    ("map", "out"): ["map", "--scale", "smoke", "--setup", "iid", "--method", "fedavg", "--out", "X"],
    ("map", "results"): ["map", "--scale", "smoke", "--setup", "iid", "--method", "fedavg", "--results", "X"],
    ("deploy init", "out"): ["deploy", "init", "EXPERIMENT", "--out", "X"],
    ("deploy analyze", "out"): ["deploy", "analyze", "table-1", "EXPERIMENT", "--out", "X"],
    ("deploy models", "out"): ["deploy", "models", "SITE", "--out", "X"],
    ("data", "data_dir"): ["data", "mnist", "--fetch", "--data-dir", "X"],
}
"""A call for every option that names a folder to write into."""
FORCED = {command for command, _ in FILES} - {"reproduce", "map"}
"""Commands with --force, which replaces a file of another kind, and nothing else that is refused."""


def commands(group: Any, *path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command of the tree by its words."""
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)
    if not hasattr(group, "commands"):
        yield " ".join(path), group


@pytest.mark.needs("fedloom_clinic", "fedloom_sites", "fedloom_studies")
def test_every_path_of_every_command_is_known_as_read_or_as_written() -> None:
    for name, command in commands(typer.main.get_command(app)):
        paths = {p.name for p in command.params if isinstance(p.type, click.Path) or "Path" in type(p.type).__name__}
        written = {option for other, option in (*FILES, *FOLDERS) if other == name}
        assert paths | written == READ.get(name, set()) | written, (
            f"{name}: say in this test which of {paths} it writes"
        )
        assert not READ.get(name, set()) & written
    assert {name for name, _ in (*FILES, *FOLDERS)} <= {name for name, _ in commands(typer.main.get_command(app))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, a run of it with an adapted model, and a site of a deployment."""
    folder = tmp_path_factory.mktemp("finished")
    lines = [f"{k % 7},{k % 5 / 4},{'north' if k % 2 else 'south'},{int(k % 7 + k % 3 > 4)}" for k in range(120)]
    table = folder / "Table.csv"
    table.write_text("\n".join(["age,crp,hospital,died", *lines, ""]))
    (folder / "mine.toml").write_text(EXPERIMENT.format(table=table))
    Plan(parse(tomllib.loads((folder / "mine.toml").read_text())), folder / "run").run()
    fl.open_run(folder / "run")["ditto", 0].models.model("personal", 0).save(
        folder / "run" / "adapted" / "a.safetensors"
    )
    (folder / "site").mkdir()
    (folder / "site" / "site.toml").write_text("")
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    shutil.copytree(finished, place, symlinks=True)
    table = place / "Table.csv"
    (place / "mine.toml").write_text(EXPERIMENT.format(table=table))
    monkeypatch.chdir(place)
    return place


def contents(folder: Path) -> dict[str, object]:
    """Every path below a folder, with what a file holds and where a link leads."""
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def words_of(call: list[str], here: Path, target: Path | str) -> list[str]:
    names = {
        "RUN": here / "run", "TABLE": here / "Table.csv", "SITE": here / "site", "EXPERIMENT": here / "mine.toml",
        "ADAPTED": here / "run" / "adapted" / "a.safetensors", "X": target,
    }  # fmt: skip
    return [str(names.get(word, word)) for word in call]


def link(path: Path, to: str | Path) -> Path:
    path.symlink_to(to)
    return path


def written(path: Path, text: str = "of someone else") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def hard(path: Path, to: Path) -> Path:
    path.hardlink_to(to)
    return path


Place = Callable[[Path, Path, str], Path | str]
"""(folder, the call's own input, a name that fits) -> an output that is refused."""
NEVER: dict[str, Place] = {
    "its input": lambda here, table, name: table,
    "its input by another way": lambda here, table, name: f"run/../{table.relative_to(here)}",
    "a link to its input": lambda here, table, name: link(here / f"link-{name}", table),
    "a hard link to its input": lambda here, table, name: hard(here / f"hard-{name}", table),
    "its input in another case": lambda here, table, name: table.with_name(table.name.swapcase()),
    "its input through a linked folder": lambda here, table, name: link(here / "door", table.parent) / table.name,
    "settings of a run": lambda here, table, name: here / "run" / "experiment.toml",
    "among the models of a run": lambda here, table, name: here / "run" / "models" / name,
    "anew in a run, deep": lambda here, table, name: here / "run" / "deep" / "er" / name,
    "in a run through a link": lambda here, table, name: link(here / "door", here / "run" / "models") / name,
    "in a deployment": lambda here, table, name: here / "site" / name,
    "settings of a site": lambda here, table, name: here / "site" / "site.toml",
    "a link that leads nowhere": lambda here, table, name: link(here / name, "nowhere"),
    "a link in a ring": lambda here, table, name: link(here / name, name),
    "a folder": lambda here, table, name: here / "run",
    "below a file": lambda here, table, name: written(here / "plain") / name,
    "below a link that leads nowhere": lambda here, table, name: link(here / "door", "nowhere") / name,
    "a device": lambda here, table, name: "/dev/null",
    "the standard output": lambda here, table, name: "/dev/stdout",
    "the standard output by its sign": lambda here, table, name: "-",
    "an option": lambda here, table, name: "--trust",
    "two lines": lambda here, table, name: here / f"a\n{name}",
}
OTHERS: dict[str, Place] = {
    "a text": lambda here, table, name: written(here / "precious.txt"),
    "the name of a text": lambda here, table, name: here / "new.txt",
    "another table": lambda here, table, name: written(here / "other.csv", "age,died\n1,0\n"),
    "an experiment": lambda here, table, name: here / "mine.toml",
    "a file of this kind by someone else": lambda here, table, name: written(here / name),
    "an empty file": lambda here, table, name: written(here / name, ""),
}


@pytest.mark.parametrize("option", FILES, ids=" ".join)
def test_a_file_that_is_not_the_commands_own_is_left_alone(option: tuple[str, str], here: Path, tmp_path: Path) -> None:
    words, name = FILES[option]
    given = here / {"export": "run/adapted/a.safetensors", "report": "run/summary.json"}.get(option[0], "Table.csv")
    force = ["--force"] if option[0] in FORCED else []
    cases = [(place, more) for place in (*NEVER, *OTHERS) for more in ([[], force] if place in NEVER else [[]])]
    for place, more in cases:
        if option[0] == "report" and "hard" in place and more:
            continue  # a report reads the run directory; with --force the second name of its file is replaced
        folder = tmp_path / "case"
        shutil.copytree(here, folder, symlinks=True)
        (folder / "mine.toml").write_text(EXPERIMENT.format(table=folder / "Table.csv"))
        os.chdir(folder)
        target = {**NEVER, **OTHERS}[place](folder, folder / given.relative_to(here), name)
        before = contents(folder)
        said = call(*words_of([*words, *more], folder, target), code=2)
        assert contents(folder) == before, (place, more)
        assert said.startswith("error: "), (place, said)
        os.chdir(here)
        shutil.rmtree(folder)


@pytest.mark.parametrize("option", FOLDERS, ids=" ".join)
def test_a_folder_that_is_not_the_commands_own_is_left_alone(option: tuple[str, str], here: Path) -> None:
    for place in (
        here / "run" / "models",
        here / "run" / "deep" / "er",
        link(here / "door", here / "run") / "models",
        here / "site" / "new",
        written(here / "plain"),
        here / "plain" / "new",
        link(here / "dangling", "nowhere"),
        Path("-"),
        Path("--trust"),
        here / "a\nb",
    ):
        before = contents(here)
        said = call(*words_of(FOLDERS[option], here, place), code=2)
        wrong_option = f"Error: Invalid value for '--data-dir': Directory '{place}' "
        assert said.startswith("error: ") or (option[1] == "data_dir" and wrong_option in said), (place, said)
        assert contents(here) == before, place


@pytest.mark.parametrize("command", ["run", "tune"])
def test_an_experiment_file_is_not_replaced_by_the_settings_that_its_run_records(command: str, here: Path) -> None:
    """A folder that has an experiment.toml of the user's own is no run directory."""
    own = {"run": "experiment.toml", "tune": "search.toml"}[command]
    (here / "study").mkdir()
    (here / "mine.toml").rename(here / "study" / own)
    before = contents(here)
    for more in ([], ["--force"]):
        said = call(command, here / "study" / own, "--out", here / "study", *more, code=2)
        assert "which this call reads, would be replaced or deleted" in said
        assert contents(here) == before


@pytest.mark.parametrize("text", ["rounds = 3\n", "of someone else"])
def test_an_experiment_file_of_someone_else_stays_where_another_one_is_run(text: str, here: Path) -> None:
    mine = written(here / "study" / "experiment.toml", text)
    if "rounds" in text:
        mine.write_text(text + EXPERIMENT.format(table=here / "Table.csv").replace("rounds = 1\n", ""))
    before = contents(here)
    for more in ([], ["--force"]):
        said = call("run", here / "mine.toml", "--out", here / "study", *more, code=2)
        assert "was not written by a run, but would be overwritten" in said
        assert contents(here) == before


def test_data_in_a_folder_that_a_run_deletes_are_an_input(here: Path) -> None:
    (here / "Table.csv").rename(here / "run" / "models" / "Table.csv")
    (here / "mine.toml").write_text(EXPERIMENT.format(table=here / "run" / "models" / "Table.csv"))
    before = contents(here)
    said = call("run", here / "mine.toml", "--out", here / "run", "--force", code=2)
    assert "Table.csv, which this call reads, would be replaced or deleted" in said
    assert contents(here) == before


@pytest.mark.parametrize(
    "option", [o for o in FILES if o[0] in ("predict", "adapt", "export", "report", "init")], ids=" ".join
)
def test_a_command_replaces_its_own_file_as_a_whole_or_not_at_all(
    option: tuple[str, str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, name = FILES[option]
    again = words_of([*words, *(["--force"] if option[0] == "init" else [])], here, here / "new" / name)
    call(*words_of(words, here, here / "new" / name))
    before = contents(here / "new")
    call(*again)
    assert contents(here / "new").keys() == before.keys()
    rename = os.replace

    def refuse(source: Any, target: Any, *more: Any, **options: Any) -> None:
        if Path(target).name == name:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        rename(source, target, *more, **options)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    before = contents(here / "new")
    said = call(*again, code=1)
    assert "could not be written: Read-only file system" in said
    assert contents(here / "new")[name] == before[name]
    assert contents(here / "new").keys() == before.keys()


@pytest.mark.parametrize(
    "option", [o for o in FILES if o[0] in ("predict", "adapt", "export", "report", "init")], ids=" ".join
)
def test_force_replaces_a_file_of_another_kind(option: tuple[str, str], here: Path) -> None:
    words, name = FILES[option]
    place = written(here / name)
    said = call(*words_of(words, here, place), code=2)
    assert "--force" in said
    assert place.read_text() == "of someone else"
    call(*words_of([*words, "--force"], here, place))
    assert place.read_bytes()[:15] != b"of someone else"


def test_a_file_that_only_may_be_read_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(FILES["predict", "out"][0], here, here / "p.csv")
    call(*words)
    before = (here / "p.csv").read_bytes()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and allowed(path, mode))
    assert "is read-only. Change" in call(*words, code=2)
    assert (here / "p.csv").read_bytes() == before


def test_predictions_to_which_someone_added_a_column_stay(here: Path) -> None:
    words = words_of(FILES["predict", "out"][0], here, here / "p.csv")
    call(*words)
    lines = (here / "p.csv").read_text().splitlines()
    (here / "p.csv").write_text("\n".join(f"{line},{'seen' if k == 0 else 'yes'}" for k, line in enumerate(lines)))
    before = (here / "p.csv").read_bytes()
    assert "is not a CSV file of predictions with the same columns" in call(*words, code=2)
    assert (here / "p.csv").read_bytes() == before


def test_tables_beside_a_report_replace_no_tables_of_someone_else(here: Path) -> None:
    mine = written(here / "study" / "results.csv")
    assert "results.csv already" in call("report", here / "run", "--out", here / "study.html", code=2)
    assert mine.read_text() == "of someone else"
    assert not (here / "study.html").exists()
    for name in ("models.html", "checkpoints.html", "adapted.HTML"):
        assert "is in the run directory" in call("report", here / "run", "--out", here / "run" / name, code=2)
    call("report", here / "run", "--card")
    assert "may contain text written by people. Move" in call("report", here / "run", "--card", code=2)


def test_methods_that_write_refuse_the_same_places(here: Path) -> None:
    models = fl.open_run(here / "run")["ditto", 0].models
    model = models.model("personal", 0)
    foreign = here / "pretrained.safetensors"
    save_file({"w": torch.zeros(2)}, foreign)
    acts: dict[str, Callable[[Path], object]] = {
        "save": model.save,
        "export": lambda path: export_model(model, path),
        "card": lambda path: report.write_card([here / "run"], path),
        "report": lambda path: report.write_report([here / "run"], path),
    }
    for name, act in acts.items():
        for place in (here / "run" / "models" / "new", here / "site" / "new", written(here / "note.txt"), foreign,
                      link(here / f"link-{name}", here / "new")):  # fmt: skip
            before = contents(here)
            with pytest.raises(fl.FedloomError):
                act(place)
            assert contents(here) == before, (name, place)
    for folder in (here / "run", here / "run" / "models", here / "site" / "new"):
        before = contents(here)
        with pytest.raises(fl.FedloomError, match="is in"):
            models.save(folder)
        assert contents(here) == before
    save_file({"w": torch.zeros(2)}, here / "personal.safetensors")
    with pytest.raises(fl.FedloomError, match="is not a model file that fedloom wrote"):
        models.save(here)
    assert len(models.save(here / "mine")) == len(models.save(here / "mine"))
