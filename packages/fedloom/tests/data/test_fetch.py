"""Files of named data sets from a server on loopback; the addresses in the code are not tried."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.sources import fetch
from fedloom.data.sources._base import FileSource
from fedloom.data.sources.census import HEART_HOSPITALS
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app
from tests.data.files import as_tar, as_zip, idx, idx_files, png, records

pytest.importorskip("pooch")
FORMATS = {
    "csv", "excel", "feather", "images", "jsonl", "leaf", "npy", "npz", "parquet", "statistics", "texts",
}  # fmt: skip
"""Sources of files of one's own."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server's address, and its folder with small files of the form of MNIST's."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in idx_files(train=12, test=5).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def found_at(address: str, folder: Path, name: str) -> fetch.RemoteFiles:
    """A named data set whose files are those of a folder that is served."""
    files = {file.name: f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in folder.iterdir()}
    return fetch.RemoteFiles(fetch.REMOTE_SETS[name].folder, (address,), files)


@pytest.fixture
def remote(served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """MNIST as it is on that server; nothing leaves this machine."""
    monkeypatch.setitem(fetch.REMOTE_SETS, "mnist", found_at(*served, "mnist"))
    return served


def test_fetched_files_are_loaded_and_fetched_once(remote: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = remote
    place = fetch.fetch("mnist", tmp_path / "data")
    assert {file.name for file in place.iterdir()} == {file.name for file in folder.iterdir()}
    assert len(fl.load("mnist", tmp_path / "data")) == 17
    before = {file: file.stat().st_mtime_ns for file in place.iterdir()}
    for file in folder.iterdir():
        file.unlink()
    assert fetch.fetch("mnist", tmp_path / "data") == place
    assert {file: file.stat().st_mtime_ns for file in place.iterdir()} == before


def test_the_command_line_fetches_only_when_asked(remote: tuple[str, Path], tmp_path: Path) -> None:
    call = partial(CliRunner().invoke, app)
    data = ["data", "mnist", "--data-dir", str(tmp_path / "data")]
    assert call(data).exit_code == 2
    assert not (tmp_path / "data").exists()
    found = call([*data, "--fetch"])
    assert found.exit_code == 0, found.output
    assert "17" in found.output


def test_a_mirror_takes_the_place_of_one_that_fails(remote: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = remote
    (folder / "other").mkdir()
    (folder / "other" / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    place = fetch.fetch("mnist", tmp_path, mirrors=("http://127.0.0.1:9", f"{address}/none", f"{address}/other"))
    assert len(list(place.iterdir())) == 4
    assert (place / "train-images-idx3-ubyte.gz").read_bytes() == (folder / "train-images-idx3-ubyte.gz").read_bytes()


def test_what_has_another_digest_is_not_kept(remote: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = remote
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(12))))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz could not be fetched .*does not have the digest"):
        fetch.fetch("mnist", tmp_path)
    assert not (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").exists()


def test_offline_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(
        fetch.REMOTE_SETS, "mnist", fetch.REMOTE_SETS["mnist"]._replace(mirrors=("http://127.0.0.1:9/",))
    )
    with pytest.raises(DataError, match=r"Is this machine offline\? Put the original file into .*mnist manually"):
        fetch.fetch("mnist", tmp_path)


def test_what_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown data set to fetch 'mnits'; did you mean 'mnist'"):
        fetch.fetch("mnits", tmp_path)
    monkeypatch.delenv(fetch.DATA_FOLDER_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="FEDLOOM_DATA"):
        fetch.fetch("mnist")


def test_what_needs_no_file_or_has_no_address_names_what_to_do(tmp_path: Path) -> None:
    for name, sentence in fetch.UNFETCHED_SETS.items():
        assert fl.data.sources.SOURCES[name]
        with pytest.raises(ConfigError, match=re.escape(f"{name} {sentence}")):
            fl.fetch(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_digests_have_the_length_of_their_algorithm() -> None:
    for remote in fetch.REMOTE_SETS.values():
        assert remote.files
        for digest in remote.files.values():
            algorithm, _, number = digest.partition(":")
            assert len(bytes.fromhex(number)) == hashlib.new(algorithm).digest_size
        assert all(mirror.endswith("/") for mirror in remote.mirrors)


def cifar(folder: Path, name: str, prefix: bytes) -> None:
    batches = {"cifar-10": ("data_batch_1", "test_batch"), "cifar-100": ("train", "test")}[name]
    as_tar(folder / f"{name}-binary.tar.gz", {f"{name}/{b}.bin": records([3, 9], prefix) for b in batches}, "w:gz")


def tiny_imagenet(folder: Path) -> None:
    files = {f"t/train/n{k}/images/{k}.JPEG": png(k, mode="RGB") for k in (1, 2, 3)}
    files |= {"t/val/images/v.JPEG": png(3, mode="RGB"), "t/val/val_annotations.txt": b"v.JPEG\tn2\t0\t0\t6\t4\n"}
    as_zip(folder / "tiny-imagenet-200.zip", files)


def adult(folder: Path) -> None:
    row = "39, State-gov, 7, Bachelors, 13, Never-married, Adm-clerical, Unmarried, White, Male, 0, 0, 40, Japan, <=50K"
    (folder / "adult.data").write_text(f"{row}\n" * 3)
    (folder / "adult.test").write_text(f"|1x3 Cross validator\n{row}.\n")


def heart(folder: Path) -> None:
    for hospital in HEART_HOSPITALS:
        (folder / f"processed.{hospital}.data").write_text("63,1,1,145,233,1,2,150,0,2.3,3,0,6,0\n")


def mednist(folder: Path) -> None:
    as_tar(folder / "MedNIST.tar.gz", {f"M/{c}/{k}.jpeg": png(k) for c in "ab" for k in (1, 2)}, "w:gz")


FILES: dict[str, Callable[[Path], object]] = {
    "adult": adult,
    "cifar-10": partial(cifar, name="cifar-10", prefix=b""),
    "cifar-100": partial(cifar, name="cifar-100", prefix=b"\x01"),
    "heart": heart,
    "medical-mnist": mednist,
    "tiny-imagenet": tiny_imagenet,
}


@pytest.mark.parametrize("name", FILES)
def test_the_source_of_that_name_reads_what_was_fetched(
    name: str, served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = served
    (folder / name).mkdir()
    FILES[name](folder / name)
    monkeypatch.setitem(fetch.REMOTE_SETS, name, found_at(f"{address}/{name}", folder / name, name))
    with pytest.raises(DataError, match=rf"fetch them \(fedloom data {name} --fetch\)"):
        fl.load(name, tmp_path)
    fl.fetch(name, tmp_path)
    assert len(fl.load(name, tmp_path)) == 4


def test_every_named_data_set_of_files_is_fetched_or_has_a_sentence() -> None:
    sources = fl.data.sources.SOURCES
    named = {name for name, kind in sources.items() if issubclass(kind, FileSource)} - FORMATS
    assert set(FILES) | {"mnist", "fashion-mnist"} == set(fetch.REMOTE_SETS)
    assert named <= {*fetch.REMOTE_SETS, *fetch.UNFETCHED_SETS}
