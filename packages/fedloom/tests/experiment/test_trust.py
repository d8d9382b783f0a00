"""An experiment file, or a run directory, that somebody else wrote: it runs no code that nobody asked for."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

import fedloom as fl
from fedloom import trust
from fedloom.errors import ConfigError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse, read

MARK = "run_by_a_file"
SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "engine": {"workers": 1},
    "method": [{"algorithm": "ditto"}],
    "tune": {"trials": 1, "space": {"all": {"local.lr": [0.01, 0.02]}}},
}
EVIL = f"""
from pathlib import Path
Path("{MARK}").mkdir()
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        return super().forward(x.flatten(1))
"""
REEXPORTS = """
import functools, os, shutil, subprocess
from os import mkdir as make
from posixpath import join
partly = functools.partial(os.mkdir)
twice = functools.partial(functools.partial(os.mkdir))
class Holder:
    tool = subprocess.Popen
    module = shutil
    method = {}.update
hidden = Holder()
"""
PYTHON = (
    "os:mkdir", "os:system", "os.path:join", "posix:mkdir", "subprocess:getoutput", "subprocess:Popen",
    "shutil:rmtree", "builtins:exec", "builtins:eval", "functools:partial", "importlib:import_module", "pathlib:Path",
    "pathlib:Path.mkdir", "runpy:run_path", "antigravity:webbrowser.open", "__main__:os.mkdir", "pip.__main__:sys",
    "torch:os.mkdir", "torch:sys.exit", "torch.utils.cpp_extension:subprocess.Popen", "fedloom.imports:import_module",
    "fedloom.hints:ALIAS_NAMES.update", "reexports:make", "reexports:os.mkdir", "reexports:join", "reexports:partly",
    "reexports:twice", "reexports:Holder.tool", "reexports:Holder.module.rmtree", "reexports:Holder.method",
    "reexports:hidden.tool", "linked:rmtree", "linked:os.mkdir",
)  # fmt: skip
PLACES = {
    "model": lambda path: {"model": {"kind": path, "path": MARK, "name": MARK, "command": f"mkdir {MARK}"}},
    "imported model": lambda path: {"model": {"kind": "import", "path": path, "options": {"path": MARK}}},
    "algorithm": lambda path: {"method": [{"algorithm": path}]},
    "source": lambda path: {"data": {"source": path}},
    "partition": lambda path: {"partition": {"kind": path}},
    "loss": lambda path: {"task": {"loss": path}},
    "metric": lambda path: {"task": {"metrics": [path]}},
    "optimizer": lambda path: {"local": {"optimizer": path}},
    "regulariser": lambda path: {"method": [{"algorithm": "fedmid", "regulariser": {"kind": path}}]},
    "upload_transform": lambda path: {"method": [{"algorithm": "fedavg", "upload_transform": {"kind": path}}]},
}


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def given_away(*paths: Path) -> None:
    """The files as another user's."""
    for path in paths:
        os.chown(path, 65534, 65534, follow_symlinks=False)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "reexports.py").write_text(REEXPORTS)
    (folder / "linked.py").symlink_to(shutil.__file__)
    (folder / "evil_net.py").write_text(EVIL)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(trust, "_vouched", set())
    for name in ("reexports", "linked", "evil_net"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def written(name: str = "small.toml", **tables: Any) -> Path:
    Path(name).write_text(tomli_w.dumps({**SMALL, **tables}))
    return Path(name)


@pytest.mark.parametrize("path", PYTHON)
def test_nothing_of_python_itself_is_a_part(path: str) -> None:
    before = set(sys.modules)
    for place in PLACES.values():
        with pytest.raises(ConfigError, match="of Python itself|cannot import 'pip"):
            parse({**SMALL, **place(path)}, "small.toml").methods[0].setting.model.build((64,), 10)
    assert not Path(MARK).exists()
    assert not {"antigravity", "linked"} & (set(sys.modules) - before)


@pytest.mark.parametrize("command", ["run", "tune", "deploy init", "bench"])
@pytest.mark.parametrize("path", ["os:mkdir", "torch:os.mkdir"])
def test_every_command_refuses_it(command: str, path: str) -> None:
    file = written(model={"kind": path, "path": MARK})
    where = () if command == "bench" else ("--out", "out")
    for more in ((), ("--trust",)):
        result = call(*command.split(), file, *where, *more)
        assert result.exit_code == 2, result.output
        assert "of Python itself" in result.output
        assert not Path(MARK).exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.toml").write_text(tomli_w.dumps(SMALL))
    assert call("run", folder / "small.toml", "--out", folder / "out").exit_code == 0
    return folder / "out"


DOORS = {
    "export": ("--out", "m.safetensors"),
    "predict": ("digits",),
    "evaluate": ("--data", "digits"),
    "adapt": ("--data", "digits"),
}


def changed(settings: Path, model: str) -> None:
    """Give the settings of a run another model, and take out their digest, as one who attacks would."""
    settings.write_text(settings.read_text().rpartition("# ")[0].replace('kind = "softmax"', model))


@pytest.mark.parametrize("door", DOORS)
def test_a_hostile_run_directory_runs_no_function_of_python(door: str, finished: Path) -> None:
    run = shutil.copytree(finished, Path("run"))
    changed(run / "experiment.toml", f'kind = "os:mkdir"\npath = "{MARK}"')
    for more in ((), ("--trust",)):
        result = call(door, run, *DOORS[door], *more)
        assert result.exit_code == 2, result.output
        assert "of Python itself" in result.output
    assert not Path(MARK).exists()
    assert call("models", run).exit_code == 0


@as_root
@pytest.mark.parametrize("door", [*DOORS, "run", "tune", "deploy init", "bench"])
def test_what_another_user_wrote_is_run_only_when_it_is_trusted(door: str, finished: Path) -> None:
    if door in DOORS:
        target: Path = shutil.copytree(finished, Path("run"))
        file = target / "experiment.toml"
        changed(file, 'kind = "evil_net:Net"')
        more = DOORS[door]
    else:
        target = file = written(model={"kind": "evil_net:Net"})
        more = () if door == "bench" else ("--out", "out")
    given_away(file)
    result = call(*door.split(), target, *more)
    assert result.exit_code == 2, result.output
    for word in ("another user (nobody)", "model.kind = 'evil_net:Net'", str(Path("evil_net.py").resolve()), "--trust"):
        assert word in " ".join(result.output.split()), result.output
    assert not Path(MARK).exists()
    assert "another user" not in call(*door.split(), target, *more, "--trust").output
    assert Path(MARK).exists()


@as_root
@pytest.mark.parametrize("way", ["file", "folder", "link to the file", "link in a folder", "module", "package"])
def test_ownership_is_seen_through_links_folders_and_modules(way: str, tmp_path: Path) -> None:
    module = "evil_net"
    file = written(model={"kind": f"{module}:Net"})
    match way:
        case "file":
            given_away(file)
        case "folder":
            (tmp_path / "theirs").mkdir()
            file = file.rename(tmp_path / "theirs" / "small.toml")
            given_away(file.parent)
        case "link to the file":
            given_away(file)
            Path("link.toml").symlink_to(file.resolve())
            file = Path("link.toml")
        case "link in a folder":
            (tmp_path / "theirs").mkdir()
            given_away(tmp_path / "theirs")
            link = tmp_path / "theirs" / "link.toml"
            link.symlink_to(file.resolve())
            file = link
        case "module":
            given_away(Path("evil_net.py"))
        case "package":
            package = Path("evil_pack")
            package.mkdir()
            (package / "__init__.py").write_text("")
            Path("evil_net.py").rename(package / "evil_net.py")
            given_away(package / "evil_net.py")
            file = written(model={"kind": "evil_pack.evil_net:Net"})
    with pytest.raises(ConfigError, match="another user"):
        read(file)
    assert not Path(MARK).exists()
    read(file, trust=True).methods[0].setting.model.build((64,), 10)
    assert Path(MARK).exists()


@as_root
def test_a_directory_of_another_user_without_user_code_needs_no_trust(finished: Path) -> None:
    run = shutil.copytree(finished, Path("run"))
    given_away(run, run / "experiment.toml")
    assert call("export", run, "--out", "m.safetensors").exit_code == 0
    assert fl.open_run(run).experiment.head.name == "experiment"


def test_one_s_own_partial_function_is_a_part() -> None:
    Path("reexports.py").write_text(f"{EVIL}\nimport functools\nsmall = functools.partial(functools.partial(Net))\n")
    experiment = read(written(model={"kind": "reexports:small"}))
    assert experiment.methods[0].setting.model.build((64,), 10) is not None


def test_one_s_own_code_in_one_s_own_folder_runs_as_before() -> None:
    experiment = read(written(model={"kind": "evil_net:Net"}))
    assert experiment.methods[0].setting.model.build((64,), 10) is not None


@pytest.mark.parametrize("path", ["torch.hub:load", "torch:load", "torch:save", "fedloom.storage.files:delete_files"])
def test_a_function_of_a_package_is_not_called_with_what_a_file_says(path: str) -> None:
    document = {**SMALL, "model": {"kind": path, "f": MARK, "repo_or_dir": MARK}}
    with pytest.raises(ConfigError, match="function of an installed package"):
        parse(document, "small.toml").methods[0].setting.model.build((64,), 10)
    assert parse({**SMALL, "task": {"loss": "torch.nn.functional:cross_entropy"}}).common.task.loss is not None


def test_a_function_that_is_given_in_python_is_vouched_for() -> None:
    fed = fl.partitions.iid(clients=3)(fl.load("digits"), seed=0)
    assert fl.simulate("fedavg", fed, shutil_free_net, rounds=1).status == "done"
    with pytest.raises(ConfigError, match="torch"):
        fl.simulate("fedavg", fed, {"kind": "torch.hub:load"}, rounds=1)  # type: ignore[arg-type]


def shutil_free_net(shape: tuple[int, ...], outputs: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))


def test_keys_that_name_code_are_listed_and_labels_are_not() -> None:
    document = {
        "name": "x:y",
        "data": {"source": "a:A", "path": "b:b"},
        "model": {"kind": "import", "path": "c:C"},
        "method": [{"algorithm": "d:D", "label": "e:e", "local": {"optimizer": "f:F"}}],
        "tune": {"space": {"all": {"local.optimizer": ["sgd", "g:G"]}}},
        "task": {"metrics": ["accuracy", "h:h"]},
    }
    assert [path for _, path in trust.paths_in(document)] == ["a:A", "c:C", "d:D", "f:F", "g:G", "h:h"]
