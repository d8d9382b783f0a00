"""A file of models that is damaged anywhere is refused, and written anew by the next run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedloom as fl
from fedloom.errors import LayoutError, RunDirError
from fedloom.lab import report
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.report.reading import read_table
from fedloom.storage.checkpoint import check_file_digest, save_tensors
from fedloom.trained.model import open_tensors

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "model": {"kind": "mlp", "hidden": [4]},
    "engine": {"workers": 1},
    "method": [{"algorithm": "ditto"}],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    Plan(parse(SMALL), out).run(page=False)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_flipped_bit_of_a_small_file_is_noticed(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", {"rows": torch.arange(3.0), "more": torch.zeros(2, 0)}
    save_tensors(path, tensors, {"about": '"sha256": "0"'})
    check_file_digest(path)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flip(path, bit)
        try:
            file = open_tensors(path)
        except LayoutError:
            pass
        else:  # the name of the digest itself; the tensors are as they were
            assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())
        path.write_bytes(whole)
    for cut in (whole[:-1], whole[:20], b"", b"[]", whole + b"\0"):
        path.write_bytes(cut)
        with pytest.raises(LayoutError, match="damaged"):
            check_file_digest(path)


def test_a_file_of_another_program_has_no_digest_and_passes(tmp_path: Path) -> None:
    save_file({"rows": torch.zeros(3)}, tmp_path / "a.safetensors", {"about": "{}"})
    check_file_digest(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["global", "personal", "hybrid", "server"])
def test_damaged_models_are_refused_at_every_door(name: str, run: Path) -> None:
    path = run / "models" / "ditto-0" / f"{name}.safetensors"
    end = path.stat().st_size
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    for byte in (8, 60, header - 1, header, (header + end) // 2, end - 1):
        whole = path.read_bytes()
        flip(path, 8 * byte + 6)
        with pytest.raises(LayoutError, match=rf"{name}\.safetensors"):
            fl.open_run(run)["ditto", 0].models.adapt(fl.load("digits"))
        path.write_bytes(whole)
    flip(path, 8 * (end - 1) + 6)
    for words in (("export", run, "--out", run / "m.safetensors"), ("evaluate", run, "--data", "digits")):
        if name != "server":
            result = CliRunner().invoke(app, [str(word) for word in words])
            assert (result.exit_code, "damaged" in result.output) == (2, True), result.output
    assert not (run / "m.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("experiment.toml", b"rounds = 1", b"rounds = 7"), ("summary.json", b'"clients": 3', b'"clients": 4')],
)
def test_settings_and_summaries_that_have_changed_are_refused(name: str, old: bytes, new: bytes, run: Path) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content.replace(old, new))
    for read in (fl.open_run, lambda path: report.write_report([path], path / "report.html")):
        with pytest.raises(RunDirError, match=f"{name} is damaged or was changed"):
            read(run)
    (run / name).write_bytes(content.replace(b"sha256 of", b"none of").replace(old, new))  # has no digest then
    fl.open_run(run)


def test_a_figure_that_has_changed_is_refused(run: Path) -> None:
    path = run / "metrics.parquet"
    before, refused = repr(read_table(path, ("value",)).to_pylist()), 0
    for byte in range(4, path.stat().st_size - 8, 29):
        whole = path.read_bytes()
        flip(path, 8 * byte + 2)
        try:
            rows = repr(read_table(path, ("value",)).to_pylist())
        except RunDirError:
            refused += 1
        else:  # in the words before the digest: the file has none, and else it is as it was
            assert rows == before, byte
        path.write_bytes(whole)
    assert refused > 100


def test_the_next_run_writes_damaged_models_anew(finished: Path, run: Path) -> None:
    whole = {path.name: path.read_bytes() for path in (finished / "models" / "ditto-0").iterdir()}
    for name in whole:
        flip(run / "models" / "ditto-0" / name, 8 * (len(whole[name]) - 1))
    Plan(parse(SMALL), run).run(page=False)
    assert {path.name: path.read_bytes() for path in (run / "models" / "ditto-0").iterdir()} == whole


def test_a_damaged_adapted_model_is_refused(run: Path, tmp_path: Path) -> None:
    path = fl.open_run(run)["ditto", 0].models.adapt(fl.load("digits")).save(tmp_path / "adapted.safetensors")
    opened = fl.open_run(run)
    assert json.loads(opened.load(path).recipe.header({})["about"]) == {}
    flip(path, 8 * (path.stat().st_size - 2))
    with pytest.raises(LayoutError, match="damaged"):
        opened.load(path)


@pytest.mark.parametrize("name", ["global", "personal", "hybrid", "server"])
def test_a_pipe_in_the_place_of_models_is_not_waited_for(name: str, run: Path) -> None:
    path = run / f"models/ditto-0/{name}.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LayoutError, match="is not a regular file"):
        open_tensors(path)
    for words in (
        ("models",),
        ("export", "--out", f"{run.parent}/x.safetensors", "--method", "ditto", "--client", "0"),
    ):
        result = CliRunner().invoke(app, [words[0], str(run), *words[1:]])
        assert isinstance(result.exception, SystemExit | None)


@pytest.mark.parametrize("name", ["personal", "hybrid", "server"])
def test_models_of_another_shape_in_their_place_get_a_sentence(name: str, run: Path) -> None:
    """The digest of each file is right: the files are those of other models."""
    folder = run / "models/ditto-0"
    shutil.copy(
        folder / ("global.safetensors" if name != "hybrid" else "server.safetensors"), folder / f"{name}.safetensors"
    )
    words = ["export", str(run), "--out", f"{run.parent}/x.safetensors", "--method", "ditto", "--client", "0"]
    for more in (["--model", "personal"], ["--model", "hybrid"], []):
        result = CliRunner().invoke(app, [*words, *more])
        assert isinstance(result.exception, SystemExit | None), result.exception
    adapt = CliRunner().invoke(app, ["adapt", str(run), "--data", "digits", "--method", "ditto"])
    assert isinstance(adapt.exception, SystemExit | None), adapt.exception
