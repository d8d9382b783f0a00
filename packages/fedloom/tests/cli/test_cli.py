"""The command line as a user meets it: run, resume, add a method, bad files, reports, cards."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

import fedloom
from fedloom.lab.cli import app
from fedloom.lab.cli._app import HELP_PANELS
from fedloom.lab.cli.facts import format_columns
from fedloom.lab.printing import print_rows, print_texts
from fedloom.version import __version__
from tests.commands import call, in_a_fork

RUNNER = CliRunner()
SMALL = """
name = "small"
rounds = 3
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "mixed"
clients = 6
labels_per_client = 2
alpha = 0.5
[local]
lr = 0.05
[evaluate]
every = 2
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "flame"
rho = 0.2
"""


def run(text: str, folder: Path, *more: str, code: int = 0) -> str:
    file = folder / "small.toml"
    file.write_text(text)
    result = RUNNER.invoke(app, ["run", str(file), "--out", str(folder / "out"), *more])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(SMALL, folder)
    return folder / "out"


def test_a_run_directory_holds_everything(finished: Path) -> None:
    for name in ("experiment.toml", "metrics.parquet", "timings.parquet", "summary.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    assert {p.name for p in (finished / "models").iterdir()} == {"fedavg-0", "fedavg-1", "flame-0", "flame-1"}
    table = pq.read_table(finished / "metrics.parquet")
    assert table.column_names == ["method", "seed", "round", "client", "model", "part", "metric", "value"]
    assert set(table["round"].to_pylist()) == {0, 2, 3}
    summary = json.loads((finished / "summary.json").read_text())
    assert {r["status"] for r in summary["runs"]} == {"done"}
    assert {r["oracle"] for r in summary["runs"]} == {"compiled"}


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fedloom", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"fedloom {__version__}\n"


def test_labels_that_differ_in_punctuation_have_folders_of_their_own(tmp_path: Path) -> None:
    labels = ["a b", "a-b", "a/b", "..", "a, b", "plain=0.1"]
    methods = "".join(
        f'[[method]]\nalgorithm = "fedprox"\nmu = {k}.0\nlabel = "{label}"\n' for k, label in enumerate(labels)
    )
    run(SMALL.partition("[[method]]")[0].replace("[0, 1]", "[0]") + methods, tmp_path)
    folders = {p.name for p in (tmp_path / "out" / "models").iterdir()}
    assert len(folders) == len(labels)
    assert {"plain=0.1-0", "a-b-0"} <= folders
    models = {(tmp_path / "out" / "models" / f / "global.safetensors").read_bytes() for f in folders}
    assert len(models) == len(labels)
    listed = RUNNER.invoke(app, ["models", str(tmp_path / "out")])
    assert listed.exit_code == 0
    assert all(folder in listed.output for folder in folders)


@pytest.mark.parametrize("label", ["\N{LATIN SMALL LETTER E WITH ACUTE}" * 80, "x" * 300], ids=["letters", "long"])
def test_a_label_of_any_length_runs_goes_on_and_is_reported(label: str, tmp_path: Path) -> None:
    """Two labels that differ at their end only; the second is added to the finished run, and its model is exported."""
    head = (
        SMALL[: SMALL.index("[[method]]")].replace("rounds = 3", "rounds = 1").replace("seeds = [0, 1]", "seeds = [0]")
    )
    one, two = (f'[[method]]\nalgorithm = "flame"\nlabel = "{label}{end}"\n' for end in "ab")
    run(head + one, tmp_path)
    run(head + one + two, tmp_path)
    out, both = tmp_path / "out", {f"{label}a", f"{label}b"}
    assert {r["method"] for r in json.loads((out / "summary.json").read_text())["runs"]} == both
    assert set(pq.read_table(out / "metrics.parquet")["method"].to_pylist()) == both
    assert len(list((out / "models").iterdir())) == 2
    assert label in (out / "report" / "results.csv").read_text()
    words = ["export", str(out), "--method", f"{label}b", "--client", "1", "--out", str(tmp_path / "model.safetensors")]
    exported = RUNNER.invoke(app, words)
    assert exported.exit_code == 0, exported.output


def test_a_name_that_is_not_utf_8_is_refused_before_any_work(tmp_path: Path) -> None:
    """A folder's name may be any bytes; what has to be printed, written into a page or into TOML may not."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    words = ["run", str(file), "--out", os.fsencode(tmp_path) + b"/out-\xff\xfe"]
    done = subprocess.run([sys.executable, "-m", "fedloom", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not UTF-8 text. Use another name" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_running_again_does_nothing_and_changes_nothing(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    before = (tmp_path / "out" / "metrics.parquet").read_bytes()
    timings = (tmp_path / "out" / "timings.parquet").read_bytes()
    run(SMALL, tmp_path)
    assert (tmp_path / "out" / "metrics.parquet").read_bytes() == before
    assert (tmp_path / "out" / "timings.parquet").read_bytes() == timings


def test_workers_change_no_number(finished: Path, tmp_path: Path) -> None:
    run(SMALL, tmp_path, "--workers", "2")
    assert (tmp_path / "out" / "metrics.parquet").read_bytes() == (finished / "metrics.parquet").read_bytes()


def test_adding_a_method_and_a_seed_changes_no_other_number(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    more = SMALL.replace("[0, 1]", "[0, 1, 2]") + '[[method]]\nalgorithm = "ditto"\nlocal = {lr = 0.1}\n'
    run(more, tmp_path)
    old, new = (pq.read_table(f / "metrics.parquet") for f in (finished, tmp_path / "out"))
    pairs = zip(new["method"].to_pylist(), new["seed"].to_pylist(), strict=True)
    kept = new.filter([method in ("fedavg", "flame") and seed in (0, 1) for method, seed in pairs])
    assert kept.drop(["value"]).equals(old.drop(["value"]))
    assert str(kept["value"].to_pylist()) == str(old["value"].to_pylist())


def test_another_experiment_is_refused_and_force_starts_anew(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    before = (tmp_path / "out" / "metrics.parquet").read_bytes()
    output = run(SMALL.replace("lr = 0.05", "lr = 0.1"), tmp_path, code=2)
    assert "a different experiment" in output
    assert "method fedavg" in output
    output = run(SMALL.replace("alpha = 0.5", "alpha = 5.0"), tmp_path, code=2)
    assert "partition.alpha was 0.5, now it is 5.0" in output
    for old, new, words in (
        (
            "alpha = 0.5",
            "alpha = 0.5\nmax_train_per_client = 5",
            "partition.max_train_per_client was not set, now it is 5",
        ),
        (
            "[data]",
            '[attack]\nkind = "sign-flip"\nfraction = 0.5\n\n[data]',
            "attack.fraction was not set, now it is 0.5",
        ),
    ):
        assert words in run(SMALL.replace(old, new), tmp_path, code=2)
    assert contents(tmp_path / "out") == contents(finished)
    settings = tmp_path / "out" / "experiment.toml"
    settings.write_text(settings.read_text().replace("[partition]", "[partition]\nof_an_earlier_version = 1"))
    run(SMALL.replace("alpha = 0.5", "alpha = 0.5\ntest_count = 100"), tmp_path)
    assert (tmp_path / "out" / "metrics.parquet").read_bytes() == before
    run(SMALL.replace("lr = 0.05", "lr = 0.1"), tmp_path, "--force")
    assert (tmp_path / "out" / "metrics.parquet").read_bytes() != before


def test_a_folder_that_is_no_run_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for more in ((), ("--force",)):
        output = run(SMALL, tmp_path, *more, code=2)
        assert "not a run directory" in output
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]


BAD = {
    "algorithm": (('"fedavg"', '"fedagv"'), "did you mean 'fedavg'"),
    "top key": (("rounds = 3", "round = 3"), "did you mean 'rounds'"),
    "method key": (("rho = 0.2", "rhoo = 0.2"), "did you mean 'rho'"),
    "data name": (('"digits"', '"digitz"'), "did you mean 'digits'"),
    "model name": (("[local]", '[model]\nkind = "mpl"\n[local]'), "did you mean 'mlp'"),
    "partition name": (('"mixed"', '"mixde"'), "did you mean 'mixed'"),
    "range": (("rho = 0.2", "rho = -1.0"), "rho: input should be greater than 0, got -1.0"),
    "type": (("rounds = 3", 'rounds = "many"'), "got 'many'"),
    "truth for a number": (("rounds = 3", "rounds = true"), "rounds: input should be a valid integer, got True"),
    "text for a number": (("lr = 0.05", 'lr = "0.05"'), "[local]: lr: input should be a valid number, got '0.05'"),
    "number for truth": (
        ("every = 2", "every = 2\npersonal_on_common = 1"),
        "personal_on_common: input should be a valid boolean",
    ),
    "item": (("[0, 1]", "[1.5]"), "got 1.5 (seeds: random seeds. Every method runs once per seed)\n"),
    "name": (('name = "small"', 'name = "a\\u0000b"'), "name: must be printable text, got 'a\\x00b'"),
    "no label": (('"flame"', '"flame"\nlabel = " "'), "label: must be printable text, got ' '"),
    "label type": (('"flame"', '"flame"\nlabel = 3'), "label: input should be a valid string, got 3"),
    "size": (("rounds = 3", "rounds = 9223372036854775808"), "less than or equal to 9223372036854775807"),
    "memory": (
        ("[local]", '[model]\nkind = "mlp"\nhidden = [1000000000000]\n[local]'),
        "the model does not fit in memory",
    ),
    "long path": (('"digits"', f'"{"a" * 300}/b.npz"'), "no such file"),
    "labels": (("labels_per_client = 2", "labels_per_client = 11"), "11"),
    "clients": (("clients = 6", "clients = 5000"), "Use fewer clients"),
    "sampler": (
        ("[local]", '[sampler]\nkind = "uniform"\nclients = 7\n[local]'),
        "at most the number of clients in the federation (6)",
    ),
    "pair": (("[local]", '[aggregation_weights]\nkind = "samples"\n[local]'), "no effect with FLAME"),
    "both": (("lr = 0.05", "lr = 0.05\nsteps = 3\nepochs = 2"), "epochs or steps, not both"),
    "label twice": (('"flame"\nrho = 0.2', '"fedavg"'), "two methods have the label 'fedavg'"),
    "no method": (("[[method]]", "[[methods]]"), "unknown key 'methods'"),
    "toml": (("rounds = 3", "rounds = = 3"), "not a TOML file"),
    "seed": (("[0, 1]", "[0, 0]"), "every seed may occur only once"),
    "workers": (("[local]", "[engine]\nworkers = 0\n[local]"), "workers"),
    "path": (('"digits"', '"no/such/file.npz"'), "no/such/file.npz"),
    "aggregator": (("[local]", '[aggregator]\nkind = "krum"\nf = 3\n[local]'), "2 f + 3"),
    "not a table": (('name = "small"', 'name = "small"\nmodel = 3'), "must be a table"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_files_are_refused_before_any_work(case: str, tmp_path: Path) -> None:
    (old, new), sentence = BAD[case]
    assert old in SMALL
    output = run(SMALL.replace(old, new), tmp_path, code=2)
    assert output.startswith("error: ")
    assert sentence in output
    assert not (tmp_path / "out").exists()


def test_missing_file_and_missing_data(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["run", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "cannot read the experiment file" in result.output
    output = run(SMALL.replace('"digits"', '"mnist"'), tmp_path, "--data-dir", str(tmp_path), code=2)
    assert "train-images" in output or "mnist" in output


def test_a_diverging_method_stops_and_the_others_go_on(tmp_path: Path) -> None:
    text = SMALL + '[[method]]\nalgorithm = "fedprox"\nlocal = {lr = 1e25}\n'
    output = run(text, tmp_path, code=1)
    assert "fedprox, seed 0: diverged" in output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [r["status"] for r in summary["runs"]] == ["done"] * 4 + ["diverged"] * 2
    assert "diverged" in (tmp_path / "out" / "report.html").read_text()


def test_list_describe_schema_data_report(finished: Path, tmp_path: Path) -> None:
    listed = RUNNER.invoke(app, ["list"]).output
    assert "fedavg" in listed
    assert "equitable-fl" in listed
    said = [line[24:] for line in listed.splitlines() if line.startswith("  ")]
    assert len(set(said)) == len(said)
    card = RUNNER.invoke(app, ["describe", "flame"]).output
    assert "Zhu" in card
    assert "rho = 0.1" in card
    attack = RUNNER.invoke(app, ["describe", "backdoor"])
    assert attack.exit_code == 2
    assert "listed under attacks" in attack.output
    assert "backdoor" in RUNNER.invoke(app, re.findall(r"fedloom (list \w+)", attack.output)[0].split()).output
    missing = RUNNER.invoke(app, ["describe", "flam"])
    assert missing.exit_code == 2
    assert "did you mean 'flame'" in missing.output
    schema = json.loads(RUNNER.invoke(app, ["schema"]).output)
    assert "digits" in json.dumps(schema["properties"]["data"])
    assert "1797" in RUNNER.invoke(app, ["data", "digits"]).output
    made = RUNNER.invoke(app, ["report", str(finished), "--out", str(tmp_path / "r.html")])
    assert made.exit_code == 0
    assert (tmp_path / "r.html").exists()
    assert RUNNER.invoke(app, ["report", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["run", "{file}", "--out", "{blocked}"], "is a file"),
        (["tune", "{file}", "--out", "{blocked}"], "is a file"),
        (["report", "{run}", "--out", "{blocked}/x.html"], "is a file, not a folder"),
        (["report", "{run}", "--out", "{run}"], "one HTML file"),
        (["report", "{run}", "--out", "comparison"], "one HTML file"),
        (["export", "{run}", "--method", "flame", "--client", "0", "--out", "{run}"], "is a folder, not a file"),
        (["export", "{run}", "--method", "flame", "--client", "0", "--out", "."], "is a folder, not a file"),
        (["reproduce", "flame-figure12", "--scale", "smoke", "--out", "{blocked}"], "is a file, not a folder"),
    ],
)
def test_output_that_cannot_be_written_is_said(
    command: list[str], reason: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "blocked").write_text("kept")
    monkeypatch.chdir(tmp_path)
    names = {"file": "small.toml", "blocked": "blocked", "run": str(finished)}
    done = RUNNER.invoke(app, [word.format(**names) for word in command])
    assert done.exit_code in (1, 2)
    assert reason in done.output
    assert done.output.count("error: ") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blocked", "small.toml"]
    assert (tmp_path / "blocked").read_text() == "kept"


@pytest.mark.parametrize(("words", "nearest"), [(["lst"], "list"), (["deploy", "lcal"], "local")])
def test_a_wrong_command_names_the_nearest_once(words: list[str], nearest: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.output.count(f"Did you mean '{nearest}'?") == 1


@pytest.mark.parametrize(
    ("module", "command", "package"),
    [
        ("optuna", ["tune", "small.toml"], "fedloom[tune]"),
        ("cryptography", ["deploy", "init", "small.toml"], "fedloom-sites[deploy]"),
        (
            "onnx",
            ["export", "{run}", "--method", "flame", "--format", "onnx", "--out", "model.onnx"],
            "fedloom[export]",
        ),
    ],
)
def test_a_missing_extra_is_named(
    module: str, command: list[str], package: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    for name in [n for n in sys.modules if n.startswith(("fedloom.lab.tune", "fedloom_sites.deploy"))]:
        monkeypatch.delitem(sys.modules, name)  # what imports it is imported anew
    for name in ("tune", "deploy"):
        monkeypatch.setattr(fedloom, name, None, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    done = RUNNER.invoke(app, [word.format(run=finished) for word in command])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert f"pip install '{package}'" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["small.toml"]


def commands(group: click.Group, *path: str) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield [*path, name]


@pytest.mark.parametrize("path", list(commands(get_command(app))), ids=" ".join)
def test_the_help_of_every_command_has_an_example_that_could_be_typed(path: list[str]) -> None:
    said = RUNNER.invoke(app, [*path, "--help"]).output
    assert said == RUNNER.invoke(app, [*path, "-h"]).output
    assert "\\[" not in said
    found = re.search(r"Example: fedloom ((?:.+\n)+)", said)
    assert found is not None
    words = shlex.split(found[1].replace("\n", " ").partition(">")[0].partition("On several")[0])
    assert words[: len(path)] == path
    command: click.Command = get_command(app)
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    command.make_context(path[-1], words[len(path) :])  # raises what the command line would say


@pytest.mark.parametrize("name", ["models", "evaluate", "predict", "adapt", "export"])
def test_examples_of_models_in_hand_are_commands_of_their_page(name: str) -> None:
    """Whose test runs them: new rows of a table are of no use to a run of images."""
    [example] = re.findall(r"Example: (fedloom (?:.+\n)+)", RUNNER.invoke(app, [name, "--help"]).output)
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text().replace("\\\n", " ")
    assert " ".join(example.split()) in [" ".join(line.split()) for line in page.splitlines()]


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_tables_fold_no_number_and_no_name_at_any_width(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    titles = ["method", "accuracy", "worst 10 %", "MB up", "status"]
    numbers = [["fedavg", "81.2 ± 4.0", "60.1 ± 9.9", "0.026", "done"], ["local", "7.0 ± 0.1", "5.0", "0", "failed"]]
    print_texts(titles, numbers, right=titles[1:4], width=width)
    table = capsys.readouterr().out
    assert all(len(line) <= width for line in table.splitlines())
    assert all(text in table for row in [titles, *numbers] for text in row)
    print_rows(
        [{"method": "fedavg", "seed": 7, "loss": 0.123456, "accuracy": 0.98765}], ("method", "seed"), width=width
    )
    heads = [line for line in capsys.readouterr().out.splitlines() if "loss" in line or "accuracy" in line]
    assert all("method" in line and "seed" in line for line in heads)
    path = "models/fedavg-0/global.safetensors"
    print_rows([{"method": "fedavg", "seed": 7, "file": path}], ("method", "seed"), width=width)
    assert path in capsys.readouterr().out
    name, words = "a-name-of-many-letters-to-copy", "amber " * 12
    print_texts(
        ["recipe", "what", "data"], [[name, words, "digits"], [f"{name}-2", words, ""]], names=True, width=width
    )
    listing = capsys.readouterr().out
    assert [found in listing for found in (name, f"{name}-2", "digits")] == [True] * 3
    assert all(len(line) <= max(width, len(name) + 2) for line in listing.splitlines())
    assert listing.count("amber") == 24


@given(st.lists(st.tuples(st.text("ab-", min_size=1, max_size=40), st.text("cd ", max_size=90))), st.integers(30, 120))
def test_a_list_breaks_no_name_and_is_no_wider_than_the_terminal(lines: list[tuple[str, str]], width: int) -> None:
    lines = [(name, " ".join(word[:20] for word in line.split())) for name, line in lines or [("a", "c")]]
    shown, whole = [*format_columns(lines, width)], [*format_columns(lines, None)]
    assert "".join("".join(shown).split()) == "".join("".join(whole).split())
    assert all(name in shown_line for name, shown_line in zip((n for n, _ in lines), whole, strict=True))
    assert all(any(line.startswith(f"  {name}") for line in shown) for name, _ in lines)
    assert all(len(line.rstrip()) <= max(width, 2 + max(len(n) for n, _ in lines)) for line in shown)


@pytest.mark.needs("fedloom_clinic", "fedloom_sites", "fedloom_studies")  # whose groups it expects
def test_the_help_lists_every_command_in_one_group() -> None:
    text = RUNNER.invoke(app, ["--help"]).output
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and line != "Options:"] == [*HELP_PANELS]
    for command in get_command(app).commands:
        assert len(re.findall(rf"^  {command}  +\S", text, re.MULTILINE)) == 1, command


@pytest.mark.parametrize("path", [[], ["deploy"]], ids=["fedloom", "fedloom deploy"])
def test_every_verb_has_its_purpose_on_one_line(path: list[str]) -> None:
    listed = RUNNER.invoke(app, [*path, "--help"]).output.partition("Options:")[2].partition("\n\n")[2]
    assert listed.count("\n") > 9
    assert "..." not in listed


ENVIRONMENT = {**os.environ}
LONGER = SMALL.replace("rounds = 3", "rounds = 40").replace(
    "[evaluate]", "[engine]\ncheckpoint_every = 0.05\n[evaluate]"
)


def start(file: Path, out: Path, errors: int = subprocess.DEVNULL, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedloom.lab.cli", "run", str(file), "--out", str(out), "--workers", "2"]
    environment = {**ENVIRONMENT, **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def contents(out: Path) -> dict[Path, bytes]:
    """Of every file."""
    return {file.relative_to(out): file.read_bytes() for file in out.rglob("*") if file.is_file()}


def files(out: Path) -> dict[str, bytes]:
    """What must be equal bit for bit."""
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.glob("models/*/*.safetensors"))}
    return found | {"metrics": (out / "metrics.parquet").read_bytes()}


def without_page(file: Path, out: Path) -> None:
    from fedloom.lab import report

    report.write_report = lambda *_, **__: out / "report.html"
    call("run", file, "--out", out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stopped_at_every_write_fsync_and_rename_and_run_again(tmp_path: Path) -> None:
    text = SMALL.replace("[evaluate]", "[engine]\ncheckpoint_every = 1e-9\nstate_memory_mib = 0\n[evaluate]")
    file = tmp_path / "small.toml"
    file.write_text(text.replace("[0, 1]", "[0]"))
    assert in_a_fork(lambda: without_page(file, tmp_path / "whole"), 0) == 0
    stop = 1
    while in_a_fork(lambda: without_page(file, tmp_path / f"broken-{stop}"), stop) != 0:  # noqa: B023
        assert in_a_fork(lambda: without_page(file, tmp_path / f"broken-{stop}"), 0) == 0, stop  # noqa: B023
        assert files(tmp_path / f"broken-{stop}") == files(tmp_path / "whole"), stop
        shutil.rmtree(tmp_path / f"broken-{stop}")
        stop += 1
    assert stop > 60


@pytest.mark.slow
@pytest.mark.parametrize("workers_kind", ["side by side", "chunks"])
def test_killed_at_random_moments_and_run_again(tmp_path: Path, workers_kind: str) -> None:
    text = LONGER if workers_kind == "side by side" else LONGER.replace("clients = 6", "clients = 20")
    file = tmp_path / "longer.toml"
    file.write_text(text)
    assert start(file, tmp_path / "whole").wait() == 0
    moments = np.random.default_rng(0)
    for _ in range(10):
        process = start(file, tmp_path / "broken")
        time.sleep(moments.uniform(2.0, 6.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(file, tmp_path / "broken").wait() == 0
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


def test_a_finished_run_has_nothing_to_do_and_json_on_standard_output(tmp_path: Path) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(SMALL)
    first = RUNNER.invoke(app, ["run", str(file), "--out", str(out)])
    assert "nothing to do" not in first.output
    assert "Answer: " in first.output
    again = RUNNER.invoke(app, ["run", str(file), "--out", str(out), "--json"])
    assert f"nothing to do, because every run in {out} is finished" in again.stderr
    found = json.loads(again.stdout)
    assert {row["method"] for row in found["results"]} == {"fedavg", "flame"}
    assert json.loads(RUNNER.invoke(app, ["describe", "flame", "--json"]).stdout)["options"].keys() >= {"rho", "lam"}
    listed = json.loads(RUNNER.invoke(app, ["list", "--json"]).stdout)
    assert {"fedavg", "flame"} <= {part["name"] for part in listed}
    measured = json.loads(RUNNER.invoke(app, ["bench", str(file), "--rounds", "1", "--workers", "1", "--json"]).stdout)
    assert {row["method"] for row in measured["rounds"]} == {"fedavg", "flame"}


def test_interrupt_leaves_a_resumable_run(tmp_path: Path) -> None:
    file = tmp_path / "longer.toml"
    file.write_text(LONGER.replace("rounds = 40", "rounds = 40_000"))
    process = start(file, tmp_path / "out", subprocess.PIPE)
    while not list((tmp_path / "out").glob("checkpoints/*/*.json")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    lines = [line for line in errors.decode().splitlines() if "interrupted" in line or "same command" in line]
    assert lines == ["interrupted: 0 of 4 runs are finished. Run the same command again to continue"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "interrupted" in {r["status"] for r in summary["runs"]}
