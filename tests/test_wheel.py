"""The wheels work where there is no checkout: every file that a package reads is in its wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


PACKAGES = sorted(folder.name for folder in (ROOT / "packages").iterdir() if (folder / "pyproject.toml").is_file())


def project(package: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "--target",
            "wheel",
            "--directory",
            str(folder / package),
        ]
        subprocess.run(command, cwd=ROOT / "packages" / package, check=True, capture_output=True)
    return {package: next((folder / package).glob("*.whl")) for package in PACKAGES}


@pytest.fixture(scope="module")
def fedloom(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The command of an environment that has the wheels, and their dependencies from this environment."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home / "env", with_pip=False)
    places = sysconfig.get_paths(vars={"base": str(home / "env"), "platbase": str(home / "env")})
    site = Path(places["purelib"])
    for wheel in wheels.values():
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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_has_every_file_of_its_package(wheels: dict[str, Path], package: str) -> None:
    source = f"packages/{package}/src/"
    listed = subprocess.run(["git", "ls-files", source], cwd=ROOT, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(wheels[package]) as file:
        names, about = set(file.namelist()), [n for n in file.namelist() if n.endswith("METADATA")]
        metadata = file.read(about[0]).decode()
    assert len(listed.stdout.split()) > 5
    assert {name.removeprefix(source) for name in listed.stdout.split()} <= names
    if package == "fedloom-studies":
        assert {"fedloom_studies/results/papers.jsonl", "fedloom_studies/results/map-full.jsonl"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"Requires-Python: {project(package)['requires-python']}" in metadata
    assert "Version: 0.1.0" in metadata


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_the_license_of_the_repository(package: str) -> None:
    assert (ROOT / "packages" / package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert len((ROOT / "packages" / package / "README.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "failing", ["pydantic==2.10.0", "scikit-learn==1.5.2", "typer==0.15.0"], ids=["import", "fl.sklearn", "--help"]
)
def test_versions_that_were_seen_to_fail_are_excluded(failing: str) -> None:
    """Installed in place of the newest ones, with the lowest allowed versions of all others."""
    needed = {needed.name: needed.specifier for needed in map(Requirement, project("fedloom")["dependencies"])}
    name, _, version = failing.partition("==")
    assert version not in needed[name]


@pytest.mark.slow
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
