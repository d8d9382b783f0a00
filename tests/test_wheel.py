"""The wheel works where there is no checkout: every file that the package reads is in it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SMALL = """
name = "small"
rounds = 1
seeds = [0]
[data]
source = "digits"
[partition]
clients = 3
[[method]]
algorithm = "ditto"
"""
END = "-- the end --\n"
COMMANDS = f"""
import os, runpy, sys
import torch  # slow to import: once, for all of them

for words in ("run small.toml --out run", "report run --out page.html", "deploy init small.toml --out sites",
              "list recipes"):
    pid = os.fork()
    if pid == 0:
        sys.argv = ["fedloom", *words.split()]
        runpy.run_module("fedloom", run_name="__main__", alter_sys=True)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(code)
    print(end={END!r}, flush=True)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fedloom(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The command of an environment that has the wheel, and what it depends on from this environment."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home / "env", with_pip=False)
    places = sysconfig.get_paths(vars={"base": str(home / "env"), "platbase": str(home / "env")})
    site = Path(places["purelib"])
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FEDLOOM_DATA")}
    environment["NUMBA_DISABLE_JIT"] = "1"  # nothing is compiled for three clients

    def call(*arguments: str) -> str:
        command = [str(home / "env" / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert call("-c", "import fedloom; print(fedloom.__file__)").startswith(str(site))
    (home / "small.toml").write_text(SMALL)
    return call


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(wheel) as file:
        names, about = set(file.namelist()), [n for n in file.namelist() if n.endswith("METADATA")]
        metadata = file.read(about[0]).decode()
    assert {name.removeprefix("src/") for name in listed.stdout.split()} <= names
    assert {"fedloom_studies/results/papers.jsonl", "fedloom_studies/results/map-full.jsonl"} <= names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Requires-Python: {project['requires-python']}" in metadata
    assert "Version: 0.1.0" in metadata


def test_a_source_distribution_has_all_that_make_and_the_pages_use() -> None:
    """Hidden files but `.dockerignore` are of the repository alone; hatchling adds pyproject.toml itself."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = {f"/{name.partition('/')[0]}" for name in listed.stdout.split()}
    wanted = {name for name in names if not name.startswith("/.")} | {"/.dockerignore"}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    patterns = (*build["include"], "/pyproject.toml")
    assert not [name for name in sorted(wanted) if not any(fnmatch(name, pattern) for pattern in patterns)]


@pytest.mark.parametrize(
    "failing", ["pydantic==2.10.0", "scikit-learn==1.5.2", "typer==0.15.0"], ids=["import", "fl.sklearn", "--help"]
)
def test_versions_that_were_seen_to_fail_are_excluded(failing: str) -> None:
    """Installed in place of the newest ones, with the lowest allowed versions of all others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {needed.name: needed.specifier for needed in map(Requirement, project["dependencies"])}
    name, _, version = failing.partition("==")
    assert version not in needed[name]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recipes_are_estimated_from_the_wheel(fedloom: Callable[..., str]) -> None:
    assert "flame-table3-mnist" in fedloom("-m", "fedloom", "reproduce", "--list")


def test_the_commands_work_from_the_wheel(fedloom: Callable[..., str]) -> None:
    ran, reported, made, recipes = fedloom("-c", COMMANDS).split(END)[:-1]
    assert "ditto" in ran
    assert "report:" in reported
    assert "flame-table3-mnist" in recipes
    assert "small.toml" not in made.splitlines()[0]
    fedloom("-c", "import pathlib; assert 'vegaEmbed' in pathlib.Path('page.html').read_text()")
    fedloom("-c", "import pathlib; assert list(pathlib.Path('sites').rglob('*.service'))")
