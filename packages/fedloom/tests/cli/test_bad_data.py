"""Bad data as a user meets it: every command says what, where, got and do, ends with code 2, and leaves nothing."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import pickle  # noqa: TID251  (to write what must be refused)
import re
import struct
import sys
import tracemalloc
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.input_spec import InputSpec
from fedloom.data.sources import archive
from fedloom.data.tables import TableColumn
from fedloom.errors import FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from tests.data.files import as_tar, as_zip, idx_files, leaf, png, records, write

RUNNER = CliRunner()
A, B = ([[0.5, 1.0], [1, 0.25]], [0, 2]), ([[3, 4]], [1.0])
SMALL = 2**20
ZEROS = bytes(12 * SMALL)
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HEART = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"


class Case(NamedTuple):
    """A data set by name, its files below the data folder; or by the path of one of them."""

    source: str
    files: dict[str, bytes]
    words: str
    by_path: str = ""


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


def mnist(name: str, change: Callable[[bytes], bytes], words: str) -> Case:
    files = idx_files()
    return Case("mnist", {**files, name: change(files[name])}, words)


def packed(name: str, change: Callable[[bytes], bytes], words: str) -> Case:
    files = {f"{k}.gz": gzip.compress(v) for k, v in idx_files(train=60).items()}
    return Case("mnist", {**files, f"{name}.gz": change(files[f"{name}.gz"])}, words)


def by_path(name: str, content: bytes, words: str, **more: bytes) -> Case:
    return Case("", {name: content, **more}, words, name)


def images(files: dict[str, bytes], words: str) -> Case:
    return Case("", {f"all/{name}": content for name, content in files.items()}, words, "all")


def cifar(content: bytes, words: str, name: str = "data_batch_1") -> Case:
    return Case("cifar-10", {name: content}, words)


def heart(rows: str, words: str) -> Case:
    files = {f"processed.{hospital}.data": f"{HEART}\n".encode() for hospital in ("cleveland", "hungarian", "va")}
    return Case("heart", {**files, "processed.switzerland.data": rows.encode()}, words)


def npz(words: str, **arrays: Any) -> Case:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return by_path("a.npz", buffer.getvalue(), words)


def blank(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def npy(shape: str) -> bytes:
    """An array of zeros whose header says another shape."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(8)


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


CASES = {
    "negative shape": by_path(
        "a.npz", zipped({"x.npy": npy("(-5, 3)"), "y.npy": npy("(1,)")}), r"shape \(-5, 3\) is impossible. The file is"
    ),
    "negative axis": by_path(
        "a.npz", zipped({"x.npy": npy("(2, -3, -1)"), "y.npy": npy("(2,)")}), "is impossible. The file is damaged"
    ),
    "truncated IDX": mnist(IMAGES, lambda b: b[:-1], "truncated: the data needs 5,488 bytes, got 5,487. Fetch"),
    "truncated gz": packed(IMAGES, lambda b: b[:-30], "truncated or damaged .*. Fetch the file again"),
    "truncated CIFAR": cifar(records([1])[:-1], "truncated: records have 3073 bytes, .*over. F", "data_batch_1.bin"),
    "empty CIFAR": cifar(b"", "no records. Fetch the file again", "data_batch_1.bin"),
    "truncated image": images({"a/1.png": png(1), "a/2.png": png(1)[:40]}, "2.png is not a readable image .*. Replace"),
    "truncated LEAF": by_path("a.json", leaf({"u": A})[:-9], "invalid JSON .*. The file is truncated or not a LEAF"),
    "truncated heart": heart(HEART[:-9], "row 1 has [0-9]+ cells, expected 14; the file may be truncated"),
    "wrong magic": mnist(LABELS, lambda b: b"\0\0\x08\x03" + b[4:], "magic .* 0x00000801, got 0x00000803. This is not"),
    "no image": images({"a/1.png": b"GIF89a"}, "1.png is not a readable image \\(no known format"),
    "no archive": by_path("a.zip", b"PK\x03\x04garbage", "a.zip is truncated or damaged .*. Fetch"),
    "image of another size": images(
        {"a/1.png": png(1), "b/1.png": png(2, (5, 5))}, "b/1.png: the image is 5x5, but the others are 6x4. Set side"
    ),
    "unknown label, IDX": mnist(LABELS, lambda b: b[:-1] + b"\x0a", "sample 6 has the unknown label 10: labels must"),
    "unknown label, CIFAR": cifar(records([1, 12]), "unknown label 12: labels must be from 0 to 9", "data_batch_1.bin"),
    "unknown label, image": images(
        {"train/a/1.png": png(1), "test/c/1.png": png(2)}, "unknown label 'c' in the test images of .*, because no"
    ),
    "image without label": images({"a/1.png": png(1), "2.png": png(2)}, "2.png: the image has no class. Put the image"),
    "unknown label, LEAF": by_path("a.json", leaf({"u": ([[1, 2]], [1e12])}), "'u' has the unknown label 1e\\+12"),
    "label below 0, LEAF": by_path("a.json", leaf({"u": ([[1, 2]], [-1])}), "user 'u' has the unknown label -1"),
    "unknown label, FEMNIST": Case(
        "femnist", {"a.json": leaf({"u": ([[1.0] * 784], [62])})}, "user 'u' has the unknown label 62: labels"
    ),
    "unknown label, heart": heart(HEART[:-1] + "7", "row 1, column 'num': unknown label '7'; .* 0, 1, 2, 3, 4. Fetch"),
    "unknown label, arrays": npz("has the unknown label 1e\\+09. .*. Correct", x=np.zeros((2, 1)), y=[0, 10**9]),
    "unknown level": heart(HEART.replace("6.0,0", "5.0,0"), "row 1, column 'thal': unknown level '5.0'; the"),
    "empty client, LEAF": by_path("a.json", leaf({"u": A, "v": ([], [])}), "user 'v' has no samples. Remove the user"),
    "empty client, heart": heart("", "processed.switzerland.data is empty, .*. Fetch"),
    "duplicate users": by_path("a.json", leaf({"u": A}, users=["u", "u"]), "user 'u' is listed twice. Each user may"),
    "duplicate data": by_path(
        "a.json",
        leaf({"u": A}).replace(b'"u": {"x"', b'"u": {"x": [[1, 2]], "y": [0]}, "u": {"x"'),
        r"user 'u' occurs twice \(also in .*\). Each user may",
    ),
    "more y than x": by_path(
        "a.json", leaf({"u": ([[1, 2]], [0, 1])}), "x of user 'u' has length 1, but y has length 2. Make"
    ),
    "no y": by_path("a.json", leaf({"u": A}).replace(b'"y"', b'"w"'), "user 'u' has length 2, but y has length 0"),
    "users that are no names": by_path("a.json", leaf({"u": A}, users=[1]), "lacks users or user_data"),
    "nested too deeply": by_path("a.json", b'{"users":' + b"[" * 100_000, "nested too deeply.* fetch the file again"),
    "pickle": cifar(pickle.dumps(Evil(), 2), "a pickle, .*. Use the binary version .*cifar-10-binary.tar.gz from"),
    "arrays with objects": npz("x.npy contains object \\(a pickle\\), .*. Save the", x=np.array([{}], object), y=[0]),
    "arrays of text": npz("a.npz: x contains text .*, but only numbers are allowed", x=np.array([["a"]]), y=[0]),
    "arrays that do not match": npz("3 samples but 2 targets. Every sample needs", x=np.zeros((3, 1)), y=[0, 1]),
    "arrays with NaN": npz("a.npz: .*NaN or Inf in the features of 1 sample .*. Remove", x=[[np.nan]], y=[0]),
    "missing cell": by_path("t.csv", b"a,b\n1,0\n,1\n", "t.csv: row 3, column 'a': missing value; repair it, "),
    "text in a number": by_path("t.csv", b"a,b\n1,0\nx,1\n", "row 3, column 'a': expected a finite number, got 'x'; "),
    "infinite number": by_path("t.csv", b"a,b\n1,0\ninf,1\n", "row 3, column 'a': expected a finite number, got 'inf'"),
    "missing label": by_path("t.csv", b"a,b\n1,0\n2,\n3,1\n", "row 3, column 'b': missing value; repair it"),
    "label with fractions": by_path("t.csv", b"a,b\n1,0\n2,.5\n", "t.csv: the label has fractions. Set task"),
    "short row": by_path("t.csv", b"a,b\n1,0\n2\n3,1\n", "row 3 has 1 cell, expected 2; .*Repair the row"),
    "no feature": by_path("t.csv", b"ab\n1\n2\n", "no column is left as a feature. The header contains 'ab'. Check"),
    "empty table": by_path("t.csv", b"", "t.csv is empty. A table needs a header row"),
    "two tables": Case("csv", {"s.csv": b"a,b\n1,0\n", "t.csv": b"a,b\n1,0\n"}, "more than one table, .*. Pass"),
    "nothing there": Case("mnist", {}, "not found. Looked in .*. Put its original files there"),
}  # fmt: skip


def place(case: Case, folder: Path) -> list[str]:
    write(folder, case.files)
    return [str(folder / case.by_path)] if case.by_path else [case.source, "--data-dir", str(folder)]


def refused(words: str, where: str, *command: str) -> str:
    """The one sentence of a command that must fail: where it looked, what it found, nothing else."""
    result = RUNNER.invoke(app, command)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stdout == ""
    error = result.stderr.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert where in error
    assert re.search(words, error), error
    return error


def experiment(folder: Path, source: str, *lines: str, partition: str = 'kind = "iid"\nclients = 2') -> Path:
    file = folder / "bad.toml"
    data = "\n".join([f'source = "{source}"', *lines])
    file.write_text(f'rounds = 1\n[data]\n{data}\n[partition]\n{partition}\n[[method]]\nalgorithm = "fedavg"\n')
    return file


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_refused_by_every_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    data = tmp_path / "data"
    data.mkdir()
    source, *options = place(case, data)
    refused(case.words, str(data), "data", source, *options)
    file = experiment(tmp_path, source)
    refused(case.words, str(data), "run", str(file), "--out", "out", *options)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "bad.toml"}


def bombs() -> dict[str, Callable[[Path], Path]]:
    """Small files that unpack to more than they may."""

    def file(name: str, pack: Callable[[bytes], bytes], head: bytes) -> Callable[[Path], Path]:
        return lambda folder: write(folder, {name: pack(head + ZEROS)}) / name

    def xz(content: bytes) -> bytes:
        return lzma.compress(content, preset=0)  # with a small dictionary, which the measure would see

    def npz_bomb(folder: Path) -> Path:
        np.savez_compressed(folder / "b.npz", x=np.zeros((1500, 1000)), y=np.zeros(1500, np.int64))
        return folder / "b.npz"

    def parquet_bomb(folder: Path) -> Path:
        rows = SMALL // 8
        table = pa.table({"x": pa.array(np.zeros(rows, np.float64)), "y": pa.array(np.arange(rows) % 2)})
        parquet.write_table(table, folder / "b.parquet", compression="zstd")
        return folder / "b.parquet"

    def texts_bomb(folder: Path) -> Path:
        text = "x" * 10_000
        table = pa.table({"x": pa.array([text] * (SMALL // 5000)), "y": pa.array(np.arange(SMALL // 5000) % 2)})
        parquet.write_table(table, folder / "b.parquet", compression="zstd")
        return folder / "b.parquet"

    def tar_xz(folder: Path) -> Path:
        plain = as_tar(folder / "b.tar", {"a/1.png": ZEROS}, "w")
        packed = write(folder, {"b.tar.xz": xz(plain.read_bytes())}) / "b.tar.xz"
        plain.unlink()
        return packed

    return {
        "zip": lambda folder: as_zip(folder / "b.zip", {"a/1.png": ZEROS}),
        "zip of many": lambda folder: as_zip(folder / "b.zip", {f"{k}.json": bytes(SMALL // 9) for k in range(10)}),
        "tar": lambda folder: as_tar(folder / "b.tar.gz", {"a/1.png": ZEROS}, "w:gz"),
        "tar.xz": tar_xz,
        "npz": npz_bomb,
        "parquet": parquet_bomb,
        "parquet of texts": texts_bomb,
        "gz": file("t.csv.gz", gzip.compress, b"a,b\n"),
        "xz": file("t.csv.xz", xz, b"a,b\n"),
        "json.gz": file("a.json.gz", gzip.compress, b'{"users":["'),
        "idx.gz": file("train-images-idx3-ubyte.gz", gzip.compress, struct.pack(">4I", 0x803, 99_999, 28, 28)),
        "images": lambda folder: write(folder, {f"a/{k}.png": blank(900) for k in range(2)}),
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused_before_it_goes_off(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "ALWAYS_ALLOWED_BYTES", SMALL)
    monkeypatch.setattr(archive, "MAX_UNPACKING_RATIO", 1)
    place = bombs()[name](tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < SMALL / 30
    tracemalloc.start()
    try:
        refused("unpacks to at least [0-9,]+ bytes, .*. If the file is genuine", str(tmp_path), "data", str(place))
        assert tracemalloc.get_traced_memory()[1] < 5 * SMALL < len(ZEROS) / 2
    finally:
        tracemalloc.stop()


def test_a_packed_table_is_read_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without end that are no bomb by size: the time is bounded by the packed size, of plain files it is not."""
    lines = b"a,b,y\n" + b"".join(b"%d,%d,%d\n" % (k, k * k, k % 2) for k in range(40_000))
    folder = write(tmp_path, {"t.csv": lines, "t.csv.gz": gzip.compress(lines), "t.csv.xz": lzma.compress(lines)})
    monkeypatch.setattr(archive, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(archive, "PACKED_BYTES_PER_SECOND", 1e12)
    for name in ("t.csv.gz", "t.csv.xz"):
        words = "reading took more than 0 s, which is too long for the size of the archive. If the file is genuine"
        refused(words, str(folder / name), "data", str(folder / name))
    assert len(fl.load(str(folder / "t.csv"))) == 40_000
    monkeypatch.undo()
    assert len(fl.load(str(folder / "t.csv.gz"))) == 40_000


@pytest.mark.parametrize("mark", ["\u202e", "\u2066", "\u200f", "\u061c"])
def test_a_name_that_looks_like_another_is_refused_wherever_it_enters(mark: str) -> None:
    odd = f"be{mark}nign"
    entrances: dict[str, Callable[[], object]] = {
        "class": lambda: fl.Dataset.create((np.zeros((4, 2), np.float32), [odd, "b", odd, "b"])),
        "column": lambda: TableColumn(name=odd),
        "level": lambda: TableColumn(name="a", levels=1, names=(odd,)),
        "classes of an agreement": lambda: InputSpec(shape=(2,), task="binary", classes=(odd, "b")),
        "client": lambda: fl.Federation.create({odd: (np.zeros((9, 2), np.float32), np.arange(9) % 2)}),
        "experiment": lambda: parse({"name": odd, "data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}),
        "label": lambda: parse({"data": {"source": "digits"}, "method": [{"algorithm": "fedavg", "label": odd}]}),
    }
    for enter in entrances.values():
        with pytest.raises((FedloomError, ValueError), match=f"U\\+{ord(mark):04X}"):
            enter()


def test_a_zip_that_lies_about_its_size_is_damaged(tmp_path: Path) -> None:
    place = as_zip(tmp_path / "b.zip", {"a/1.png": ZEROS})
    content = bytearray(place.read_bytes())
    with zipfile.ZipFile(place) as file:
        directory = file.start_dir
    for at in (22, directory + 24):  # uncompressed size in the local header and in the directory
        content[at : at + 4] = struct.pack("<I", 1000)
    place.write_bytes(bytes(content))
    refused("truncated or damaged", str(place), "data", str(place))


def test_a_path_or_name_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    for name, words in (
        ("patients.csv", "patients.csv: no such file or folder. Check the path"),
        ("mnits", "unknown data set 'mnits'; did you mean 'mnist'"),
        ("mnist", "no data folder is set. Set FEDLOOM_DATA, or pass"),
    ):
        refused(words, "", "data", name)
        refused(words, "", "run", str(experiment(tmp_path, name)), "--out", "out")
    assert {path.name for path in tmp_path.iterdir()} == {"bad.toml"}


# --- the hub -------------------------------------------------------------------------------------------------------


def offline(*_: Any) -> None:
    raise ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (None, r"needs the `hub` extra. Run: pip install 'fedloom\[hub\]'"),
        (
            types.SimpleNamespace(load_dataset=offline),
            "cannot be loaded .*. Check the name and the connection, or load it once",
        ),
    ],
    ids=["without its library", "without a connection"],
)
def test_a_hub_name_offline(library: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", library)
    refused(words, "hub:owner/name", "data", "hub:owner/name")
    file = experiment(tmp_path, "hub:owner/name")
    refused(words, "hub:owner/name", "run", str(file), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    refused("the name of a data set is missing. Write hub:owner/name", "hub:", "data", "hub:")


# --- clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ('kind = "iid"\nclients = 5000', "5000 clients with at least 1 sample .* 1797 .*. Use fewer"),
        (
            'kind = "dirichlet"\nclients = 600\nalpha = 0.01',
            "smallest client had at most 0 samples .*; use a larger alpha",
        ),
        (
            'kind = "shards"\nlabels_per_client = 11',
            "labels_per_client = 11, but digits has 10 classes. Use",
        ),
        ('kind = "natural"', "digits has no natural clients. Use kind by-column"),
    ],
)
def test_a_client_without_samples(partition: str, words: str, tmp_path: Path) -> None:
    file = experiment(tmp_path, "digits", partition=partition)
    refused(words, "digits", "run", str(file), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_class_that_only_the_test_part_of_a_client_has_is_said_in_the_report(tmp_path: Path) -> None:
    x = [[0.5, 1.0], [1, 0.25], [0, 1]]
    train = leaf({"known": (x, [0, 1, 0]), "blind": (x, [1, 1, 1])})
    test = leaf({"known": (x, [0, 1, 0]), "blind": (x, [0, 1, 0]), "new": (x, [0, 0, 1])})
    write(tmp_path / "data", {"train/a.json": train, "test/a.json": test})
    file = experiment(tmp_path, str(tmp_path / "data"), partition='kind = "natural"\ntest_from = "clients"')
    result = RUNNER.invoke(app, ["run", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    warnings = json.loads((tmp_path / "out" / "summary.json").read_text())["warnings"]
    said = [w for w in warnings if "first: client 'blind', 2 test samples of class '0'" in w]
    assert said, warnings
    assert said[0].startswith("data, seed 0: 1 client is tested on a class that they have no training sample of")
    assert "data, seed 0: 1 of 3 natural clients have no training sample and are left out" in warnings
    assert "no training sample of" in (tmp_path / "out" / "report.html").read_text()
