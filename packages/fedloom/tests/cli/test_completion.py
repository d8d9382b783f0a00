"""What a shell gets after Tab: commands, options, and names, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.algorithms import REGISTRY
from fedloom.data.sources import SOURCES

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a command `fedloom` that fails if torch is imported."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "fedloom"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.modules['torch'] = None\nfrom fedloom.lab.cli import main\nmain()\n"
    )
    command.chmod(0o755)
    home = tmp_path_factory.mktemp("home")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    made = {**os.environ, "PATH": path, "HOME": str(home), "ZDOTDIR": str(home)}
    named = {**made, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # no shell may be among the parents
    shown = subprocess.run(["fedloom", "--show-completion", "bash"], env=named, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return {**made, "SHOWN": shown.stdout}


def in_bash(program: dict[str, str], line: str) -> list[str]:
    """Words that bash offers at the end of a line, by the script that fedloom prints."""
    ask = f"""
eval "$SHOWN"
IFS=$' ' read -r -a COMP_WORDS <<< {json.dumps(line)}
[[ {json.dumps(line)} == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_fedloom_completion fedloom
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", ask], env=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.split()


def by_protocol(program: dict[str, str], shell: str, line: str) -> str:
    asked = {"_FEDLOOM_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    if shell == "fish":
        asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    done = subprocess.run(["fedloom"], env={**program, **asked}, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


@pytest.mark.needs("fedloom_sites")
def test_commands_and_options(program: dict[str, str]) -> None:
    assert set(in_bash(program, "fedloom de")) == {"describe", "deploy"}
    assert "--data-dir" in in_bash(program, "fedloom run first.toml --d")


def test_every_method_data_set_and_recipe_is_offered(program: dict[str, str]) -> None:
    setups = pytest.importorskip("fedloom_studies.map.setups").read_setups
    recipes = pytest.importorskip("fedloom_studies.reproduce").read_recipes
    assert in_bash(program, "fedloom describe ") == list(REGISTRY)
    assert in_bash(program, "fedloom data ") == list(SOURCES)
    assert set(in_bash(program, "fedloom reproduce ")) == set(recipes())
    assert set(in_bash(program, "fedloom map --setup ")) == set(setups("full"))
    assert in_bash(program, "fedloom describe flam") == ["flame"]
    assert in_bash(program, "fedloom reproduce flame-table3-mnist --scale s") == ["smoke"]


def test_names_of_a_run_directory_are_offered(program: dict[str, str], tmp_path: Path) -> None:
    runs = [{"method": m, "seed": s} for m in ("fedavg", "ditto") for s in (0, 7)]
    summary = {"runs": runs, "clients": 12}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert in_bash(program, f"fedloom adapt {tmp_path} --method ") == ["fedavg", "ditto"]
    assert in_bash(program, f"fedloom adapt {tmp_path} --seed ") == ["0", "7"]
    assert in_bash(program, f"fedloom evaluate {tmp_path} --client 1") == ["1", "10", "11"]
    assert in_bash(program, f"fedloom export {tmp_path} --format o") == ["onnx"]
    assert in_bash(program, f"fedloom export {tmp_path / 'none'} --method ") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_ask_in_their_own_way(program: dict[str, str], shell: str) -> None:
    found = by_protocol(program, shell, "fedloom describe fedad")
    assert all(name in found for name in ("fedadmm", "fedadmm-composite", "fedadmm-inexact"))
    assert "flame" not in found
    assert "describe" in by_protocol(program, shell, "fedloom des")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_and_the_shell_reads_it(program: dict[str, str], shell: str) -> None:
    named = {**program, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the shell is named, not looked for
    done = subprocess.run(["fedloom", "--install-completion", shell], env=named, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    end = {
        "bash": ".bash_completions/fedloom.sh",
        "zsh": ".zfunc/_fedloom",
        "fish": ".config/fish/completions/fedloom.fish",
    }
    script = Path(program["HOME"]) / end[shell]
    assert "_FEDLOOM_COMPLETE" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; it has not read its script")
    checked = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.needs("fedloom_studies")
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(program: dict[str, str]) -> None:
    named = {**program, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(["fedloom", "--show-completion", "fish"], env=named, capture_output=True, text=True).stdout
    ask = f"{script}\ncomplete -C 'fedloom describe flam'; complete -C 'fedloom reproduce x --scale la'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], env=program, capture_output=True, text=True)
    assert done.stdout.split() == ["flame", "laptop"], done.stdout + done.stderr
