"""Paths on the command line: folders that cannot be, and words that are empty; and output that nobody reads."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.lab.printing import print_texts
from tests.commands import call

FILE = """
rounds = 1
[data]
source = "digits"
[partition]
kind = "iid"
clients = 3
max_train_per_client = 60
[[method]]
algorithm = "fedavg"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "small.toml"


@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.parametrize(
    "words",
    [
        ["run", "FILE", "--out"],
        ["tune", "FILE", "--out"],
        ["deploy", "init", "FILE", "--out"],
        ["reproduce", "fiaelt-synthetic", "--scale", "smoke", "--out"],
        ["reproduce", "fiaelt-synthetic", "--scale", "smoke", "--results"],
        ["map", "--scale", "smoke", "--setup", "iid", "--method", "fedavg", "--results"],
        ["map", "--scale", "smoke", "--setup", "iid", "--method", "fedavg", "--out"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_folder_that_cannot_be_is_named_for_what_it_is(words: list[str], below: str, file: Path) -> None:
    plain, dangling, ring = (file.with_name(name) for name in ("plain", "dangling", "ring"))
    plain.write_text("kept")
    dangling.symlink_to("nowhere")
    ring.symlink_to("ring")
    for place, fault in (
        (plain, "is a file, not a folder. Choose another folder"),
        (dangling, "is a link to nowhere, which does not exist. Remove the link, or choose another folder"),
        (ring, "is a link to ring, which does not exist. Remove the link, or choose another folder"),
    ):
        said = call(*(file if word == "FILE" else word for word in words), place / below, code=2)
        assert f"error: {place} {fault}" in said
    assert plain.read_text() == "kept"
    assert not file.with_name("nowhere").exists()


@pytest.mark.parametrize(
    "words",
    [["run", "FILE", "--out", ""], ["run", "FILE", "--out="], ["run", ""], ["run", "FILE", "--data-dir", ""],
     ["map", "--out", ""], ["report", ""], ["deploy", "status", ""], ["deploy", "init", "FILE", "--out", ""]],
)  # fmt: skip
def test_an_empty_word_is_not_the_current_folder(
    words: list[str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    said = call(*(file if word == "FILE" else word for word in words), code=2)
    assert said.startswith("error: there is an empty word")
    assert words[-2] in said or words[-1] in said
    assert not [*Path().iterdir()]


def test_an_empty_path_is_refused_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    cut = fl.partitions.iid(clients=3, max_train_per_client=60)
    run: dict[str, Any] = {"model": "softmax", "rounds": 1, "folder": ""}
    for what, act in {
        "folder": lambda: fl.simulate("fedavg", cut(fl.load("digits")), **run),
        "compare: folder": lambda: fl.compare(["fedavg"], "digits", partition=cut, **run),
        "path": lambda: fl.open_run(""),
        "data_dir": lambda: fl.load("mnist", data_dir=""),
    }.items():
        with pytest.raises(fl.FedloomError, match=f"^{what} must be a path.*, got ''"):
            act()
    with pytest.raises(fl.FedloomError, match="path: string should have at least 1 character"):
        fl.load("mnist", path="")
    assert not [*tmp_path.iterdir()]


def test_an_empty_data_folder_of_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", "")
    with pytest.raises(fl.FedloomError, match="no data folder is set"):
        fl.load("mnist")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["list"], ["--help"], ["deploy", "--help"], ["describe", "ditto"]], ids=" ".join)
def test_output_that_nobody_reads_ends_the_command_without_a_word(words: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fedloom", *words],
            stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("log", ["pipe", "/dev/full"])
def test_a_run_whose_log_cannot_be_written_goes_on(log: str, file: Path) -> None:
    reader, writer = os.pipe() if log == "pipe" else (os.open(log, os.O_RDONLY), os.open(log, os.O_WRONLY))
    os.close(reader)
    words = [sys.executable, "-m", "fedloom", "run", str(file), "--out", str(file.with_name("out"))]
    try:
        assert subprocess.run(words, stdout=subprocess.DEVNULL, stderr=writer, check=False).returncode == 0
    finally:
        os.close(writer)
    assert file.with_name("out").joinpath("report.html").exists()


def test_a_table_leaves_it_to_the_program_that_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(BrokenPipeError):
        print_texts(["method"], [["fedavg"]])
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_run_ends_well_whatever_its_standard_streams_are(file: Path) -> None:
    """A file that is opened in the place of a closed one would get what libraries print."""
    words = shlex.join([sys.executable, "-m", "fedloom", "run", str(file), "--out", str(file.with_name("out"))])
    assert subprocess.run(f"exec {words} <&- >&- 2>&-", shell=True, check=False).returncode == 0
    assert file.with_name("out").joinpath("report.html").exists()
    plain = subprocess.run(
        f"exec {words} --dry-run",
        shell=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert plain.returncode == 0, plain.stderr
    assert b"fedavg" in plain.stdout
    assert plain.stdout.isascii()
    full = subprocess.run(f"exec {words} >/dev/full", shell=True, capture_output=True, text=True, check=False)
    assert (full.returncode, "Traceback" in full.stderr) == (1, False)
    assert "error: the disk is full" in full.stderr
