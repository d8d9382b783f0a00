"""Junk in place of every argument and option of every command, from the command tree: a sentence, code 2, no change."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import typer
from typer.testing import CliRunner

import fedloom as fl
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from tests.cli.test_output_paths import EXPERIMENT, FILES, FOLDERS, commands, contents

CALLS = {
    "advise": "mine.toml --out new", "analyze": "table-1 mine.toml", "bench": "mine.toml --rounds 1 --workers 1",
    "list": "methods", "describe": "fedavg", "data": "digits", "models": "run", "evaluate": "run --data Table.csv",
    "predict": "run Table.csv", "adapt": "run --data Table.csv", "export": "run --out new.onnx",
    "run": "mine.toml --dry-run", "merge": "run --out new", "report": "run --out new.html",
    "tune": "mine.toml --out new", "watch": "run --list", "cox": "cox.toml --bins 3", "glm": "mine.toml",
    "init": "Table.csv --target died", "reproduce": "fiaelt-synthetic --scale smoke",
    "map": "--scale smoke --setup iid --method fedavg", "deploy init": "mine.toml --out d2 --own-data --sites 2",
    "deploy analyze": "table-1 mine.toml --out d3 --own-data --sites 2", "deploy check": "dep/sites/site-1 --offline",
    "deploy rehearse": "dep/sites/site-1", "deploy local": "dep", "deploy status": "dep/server",
    "deploy stop": "dep/server", "deploy verify-log": "dep", "deploy renew": "dep", "deploy add": "dep new",
    "deploy approve": "dep/sites/site-1 change.toml", "deploy remove": "dep site-1", "deploy revoke": "dep site-1",
    "deploy models": "dep/server --out new", "deploy predict": "dep/sites/site-1 Table.csv --out new.csv",
    "deploy evaluate": "dep/sites/site-1 Table.csv", "deploy export": "dep/sites/site-1 --out new.onnx",
    "deploy rotate": "dep site-1", "deploy upgrade": "dep", "deploy snapshot": "dep/sites/site-1",
}  # fmt: skip
"""A call of every command with arguments. Words in place of one of its own must be refused."""
TEXTS = (" ", "=", "[", "\x1b[2J", "é\u202e", "a=[", "x" * 5000, "~/new")
NUMBERS = ("-1", "1_0", "٣", "2 ", "nan", "1e400", "0x10", "9" * 5000, "", "one")
INPUTS = (
    "missing",
    "folder",
    "Table.csv/x",
    "x" * 300,
    "broken.toml",
    "bytes",
    "empty",
    "link",
    "/dev/null",
    "/",
    "a\nb",
)
OUTPUTS = ("Table.csv/x", "x" * 300, "link", "/dev/null", "run/models/new", "~")
MEANT: dict[str, set[str]] = {
    "deploy init": {"--home", "--programs"}, "deploy add": {"--home", "--programs"},  # of other machines
    "reproduce": {"--results"}, "map": {"--results"},  # folders of records, which may be anywhere
}  # fmt: skip
"""Arguments and options for which such words may have a meaning."""


class Case(NamedTuple):
    """A word in place of an argument or option of a command."""

    command: str
    option: str
    word: str


EMPTY_FILES = (Case("map", "--space", "empty"),)
"""A space without a key, which is whole."""


def _words(command: str, option: Any) -> tuple[str, ...]:
    if option.name == "data_dir":
        return ("Table.csv", "~")
    if option.name in {name for of, name in (*FILES, *FOLDERS) if of == command}:
        return OUTPUTS
    if "Path" in type(option.type).__name__:
        return INPUTS
    return NUMBERS if option.type.name.startswith(("int", "float")) else TEXTS


def cases() -> Iterator[Case]:
    """Yield every case of the command tree."""
    for command, parsed in commands(typer.main.get_command(app)):
        for option in parsed.params:
            named = option.name if option.param_type_name == "argument" else option.opts[0]
            if not getattr(option, "is_flag", False) and named not in MEANT.get(command, ()):
                words = (Case(command, named, word) for word in _words(command, option))
                yield from (case for case in words if case not in EMPTY_FILES)


def words_with(case: Case) -> list[str]:
    """Return the words of a call with the case's word."""
    parsed = dict(commands(typer.main.get_command(app)))[case.command]
    words, flags = CALLS[case.command].split(), {o for p in parsed.params if getattr(p, "is_flag", 0) for o in p.opts}
    if case.option.startswith("-"):
        if case.option in words:
            place = words.index(case.option)
            del words[place : place + 2]
        return [*case.command.split(), *words, f"{case.option}={case.word}"]
    places = [
        k for k, w in enumerate(words) if w[0] != "-" and (not k or words[k - 1][0] != "-" or words[k - 1] in flags)
    ]
    arguments = [p.name for p in parsed.params if p.param_type_name == "argument"]
    words[places[arguments.index(case.option)]] = case.word
    return [*case.command.split(), *(["--"] if case.word.startswith("-") else []), *words]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tables, files of experiments, a run and a deployment."""
    folder = tmp_path_factory.mktemp("made")
    lines = [f"{k % 7},{k % 5 / 4},{'north' if k % 2 else 'south'},{int(k % 7 + k % 3 > 4)}" for k in range(60)]
    (folder / "Table.csv").write_text("\n".join(["age,crp,hospital,died", *lines, ""]))
    (folder / "times.csv").write_text("age,time,event\n" + "".join(f"{k % 7},{k % 11},{k % 2}\n" for k in range(60)))
    (folder / "mine.toml").write_text(EXPERIMENT.format(table="Table.csv"))
    (folder / "cox.toml").write_text(
        '[data]\nsource = "times.csv"\ntarget = "time"\nevent = "event"\n[partition]\nkind = "iid"\nclients = 2\n'
        '[[method]]\nalgorithm = "fedavg"\n'
    )
    (folder / "broken.toml").write_text("a = [")
    (folder / "change.toml").write_text("")
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "empty").write_text("")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("nowhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Plan(parse(tomllib.loads((folder / "mine.toml").read_text())), folder / "run").run()
        fl.open_run(folder / "run")
        CliRunner().invoke(app, ["deploy", "init", "mine.toml", "--out", "dep", "--sites", "2", "--own-data"])
    return folder


def check(case: Case, folder: Path) -> None:
    """Call the command in the folder, and check how it refuses the word."""
    before = contents(folder)
    result = CliRunner().invoke(app, words_with(case))
    shown = (case, result.output[-400:])
    assert result.exception is None or isinstance(result.exception, SystemExit), (*shown, repr(result.exception))
    assert result.exit_code == 2, shown
    assert re.search(r"^(error|Error): \S", result.output, re.MULTILINE), shown
    assert "Traceback" not in result.output
    after = {path: held for path, held in contents(folder).items() if not path.endswith(".lock")}
    assert after == {path: held for path, held in before.items() if not path.endswith(".lock")}, shown


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    return tmp_path / "here"


@pytest.mark.needs("fedloom_clinic", "fedloom_sites", "fedloom_studies")
@pytest.mark.parametrize("command", CALLS)
def test_a_word_of_junk_is_refused(command: str, here: Path) -> None:
    """One case of every command. All cases run among the slow tests."""
    chosen = [case for case in cases() if case.command == command]
    check(chosen[crc32(command.encode()) % len(chosen)], here)


@pytest.mark.slow
@pytest.mark.needs("fedloom_clinic", "fedloom_sites", "fedloom_studies")
@pytest.mark.parametrize("command", CALLS)
def test_all_junk_is_refused(command: str, here: Path) -> None:
    for case in cases():
        if case.command == command:
            check(case, here)


@pytest.mark.needs("fedloom_clinic", "fedloom_sites", "fedloom_studies")
def test_every_command_with_arguments_has_a_call() -> None:
    tree = dict(commands(typer.main.get_command(app)))
    assert {*CALLS} == {name for name, command in tree.items() if command.params}
    assert len([*cases()]) > 1000
