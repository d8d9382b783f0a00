"""Files of named data sets from a server on loopback; the addresses in the code are not tried."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli import app
from fedloom.data.sources import fetch
from fedloom.errors import ConfigError, DataError

pytest.importorskip("pooch")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server's address, and its folder with small files of the form of MNIST's."""
    folder, rng = tmp_path / "served", np.random.default_rng(0)
    folder.mkdir()
    for side, count in (("train", 12), ("t10k", 5)):
        (folder / f"{side}-images-idx3-ubyte.gz").write_bytes(idx(rng.integers(0, 256, (count, 28, 28))))
        (folder / f"{side}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(count) % 10))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """MNIST as it is on that server; nothing leaves this machine."""
    address, folder = served
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setitem(fetch.REMOTE, "mnist", fetch.Remote("mnist", (address,), files))
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
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(12)))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz was not fetched .*another SHA-256"):
        fetch.fetch("mnist", tmp_path)
    assert not (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").exists()


def test_offline_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(fetch.REMOTE, "mnist", fetch.REMOTE["mnist"]._replace(mirrors=("http://127.0.0.1:9/",)))
    with pytest.raises(DataError, match=r"is this machine offline\? Put the original file into .*mnist by hand"):
        fetch.fetch("mnist", tmp_path)


def test_what_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown data set to fetch 'mnits'; did you mean 'mnist'"):
        fetch.fetch("mnits", tmp_path)
    monkeypatch.delenv(fetch.ENV, raising=False)
    with pytest.raises(ConfigError, match="FEDLOOM_DATA"):
        fetch.fetch("mnist")


def test_digests_are_of_sha_256() -> None:
    for remote in fetch.REMOTE.values():
        assert all(len(bytes.fromhex(digest)) == 32 for digest in remote.files.values())
        assert len(remote.mirrors) > 1
