"""Readers on small files made here: what they read, in every wrapping, and what they refuse."""

from __future__ import annotations

import gzip
import io
import pickle  # noqa: TID251  (to write what the reader must refuse)
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import fedloom as fl
from fedloom.data import Dataset, load, source
from fedloom.data.partitions import Iid
from fedloom.data.sources import archive, arrays, embedded
from fedloom.data.sources.detect import detect_source
from fedloom.errors import ConfigError, DataError
from tests.cures import applied
from tests.data.files import WRAPPINGS, as_tar, as_zip, idx, idx_files, leaf, png, records, write


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_idx_in_every_wrapping(wrapping: str, tmp_path: Path) -> None:
    files = idx_files()
    data = load(WRAPPINGS[wrapping](tmp_path, files))
    assert data.name == "mnist"
    assert data.x.shape == (10, 1, 28, 28)
    assert data.x.numpy()[:7].tobytes() == files["train-images-idx3-ubyte"][16:]
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert data.test is not None
    assert data.test.tolist() == [7, 8, 9]


def spoil(files: dict[str, bytes], name: str, change: Callable[[bytes], bytes]) -> dict[str, bytes]:
    return {**files, name: change(files[name])}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "truncated: the data needs 5,488 bytes, got 5,487"),
        ("train-images-idx3-ubyte", lambda b: b[:9], "truncated: the header"),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "data follow"),
        ("train-labels-idx1-ubyte", lambda b: b"\0\0\x08\x03" + b[4:], "wrong magic .* 0x00000801, got 0x00000803"),
        ("train-labels-idx1-ubyte", lambda b: idx(np.arange(6)), "7 train images but 6 labels"),
        (
            "t10k-labels-idx1-ubyte",
            lambda b: idx(np.array([0, 10, 1])),
            "t10k-labels.*sample 1 has the unknown label 10: labels must be from 0 to 9",
        ),
        ("t10k-images-idx3-ubyte", lambda b: idx(np.zeros((3, 27, 28))), "images of size \\(28, 28\\) .* \\(27, 28\\)"),
        ("train-images-idx3-ubyte", lambda b: struct.pack(">4I", 0x803, 2**31, 28, 28), "unpacks to"),
    ],
)
def test_a_spoiled_idx_file_is_refused(name: str, change: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
    write(tmp_path, spoil(idx_files(), name, change))
    with pytest.raises(DataError, match=words):
        load("mnist", path=str(tmp_path))


def test_a_missing_file_and_a_missing_folder_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = idx_files()
    del files["t10k-labels-idx1-ubyte"]
    with pytest.raises(DataError, match="lacks t10k-labels-idx1-ubyte"):
        load("mnist", path=str(write(tmp_path, files)))
    with pytest.raises(DataError, match="found. Looked in .*nowhere/fashion-mnist"):
        load("fashion-mnist", tmp_path / "nowhere")
    with pytest.raises(DataError, match="not found at"):
        load("mnist", path=str(tmp_path / "nowhere"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    with pytest.raises(DataError, match="no data folder is set. Set FEDLOOM_DATA"):
        load("mnist")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is a file, not a folder of data sets"):
        load("mnist")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "mnist"))
    write(tmp_path / "mnist" / "mnist", idx_files())
    assert len(load("mnist")) == 10


def test_a_folder_is_walked_in_the_order_of_names(tmp_path: Path) -> None:
    names = ["b/c.txt", "a.txt", "a/z.txt", "a b/x.txt", "a/b/c.txt", "B.txt", "a-1/é.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "c.txt").symlink_to(tmp_path / "a.txt")
    expected = sorted(Path(name) for name in [*names, "c.txt"])
    assert [Path(entry.name) for entry in archive.iterate_entries(tmp_path)] == expected


def test_the_root_of_the_file_system_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/")
    for place in ("/", str(link), str(link / ".")):
        with pytest.raises(DataError, match="root of the file system"):
            load(place)


def test_a_folder_without_a_known_name_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"{i:03}.unknown": b"" for i in range(50)} | {"z.csv": b"a,label\n1,x\n2,y\n"})
    assert detect_source(tmp_path).__name__ == "Csv"
    monkeypatch.setitem(detect_source.__globals__, "MAX_CHECKED_NAMES", 20)
    with pytest.raises(DataError, match="no data set in a known format. Known formats"):
        detect_source(tmp_path)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_torn_tar_of_images_is_not_taken_for_a_short_one(cut: int, tmp_path: Path) -> None:
    files = {f"cat/{i}.png": png(i) for i in range(4)} | {f"dog/{i}.png": png(i) for i in range(4)}
    place = as_tar(tmp_path / "all.tar", files, "w")
    assert len(load(place)) == 8
    place.write_bytes(place.read_bytes()[: cut * 2 * 1024])  # header and content of one file take a block of 512 each
    with pytest.raises(DataError, match="truncated"):
        load(place)


@pytest.mark.parametrize("wrapping", ["gz", "xz", "zip", "tar", "tar.gz", "tar.xz"])
def test_a_torn_archive_is_refused(wrapping: str, tmp_path: Path) -> None:
    place = WRAPPINGS[wrapping](tmp_path, idx_files(train=60))
    torn = place if place.is_file() else next(place.glob("train-images*"))
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match="truncated or damaged|truncated"):
        load("mnist", path=str(place))


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    place = WRAPPINGS["gz"](tmp_path, idx_files(train=60))
    file = next(place.glob("train-images*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))
    with pytest.raises(DataError):
        load("mnist", path=str(place))


def test_unknown_names_and_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        load("mnits")
    with pytest.raises(ValueError, match="maen"):
        load("digits", maen=3)
    with pytest.raises(DataError, match="no such file"):
        load("./not/here")


def bomb(path: Path, kind: str) -> Path:
    zeros = bytes(archive.ALWAYS_ALLOWED_BYTES + 2**20)
    if kind == "zip":
        return as_zip(path / "b.zip", {"images/a.png": zeros})
    if kind == "tar.xz":
        return as_tar(path / "b.tar.xz", {"images/a.png": zeros}, "w:xz")
    if kind == "csv.gz":
        (path / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n" + zeros))
        return path / "b.csv.gz"
    (path / "b.npz").write_bytes(as_zip(path / "b.zip", {}).read_bytes())
    np.savez_compressed(path / "b.npz", x=np.zeros((8000, 2000)), y=np.zeros(8000, np.int64))
    return path / "b.npz"


@pytest.mark.parametrize("kind", ["zip", "tar.xz", "csv.gz", "npz"])
def test_a_bomb_is_refused_before_it_goes_off(kind: str, tmp_path: Path) -> None:
    place = bomb(tmp_path, kind)
    assert place.stat().st_size < 2**20
    with pytest.raises(DataError, match="bytes, which is too much for the size of the archive"):
        load(place)


def test_an_image_that_declares_a_huge_size_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("1", (20_000, 1)).save(buffer, "PNG")
    write(tmp_path, {"a/x.png": buffer.getvalue()})
    with pytest.raises(DataError, match="declares 20000x1 pixels"):
        load(tmp_path)


# --- CIFAR ---------------------------------------------------------------------------------------------------------

CIFAR10 = {"data_batch_1": [3, 9], "data_batch_2": [0], "test_batch": [1, 2]}


@pytest.mark.parametrize("wrapping", ["plain", "xz", "tar.gz", "zip"])
def test_cifar10_in_every_wrapping(wrapping: str, tmp_path: Path) -> None:
    data = load(WRAPPINGS[wrapping](tmp_path, {f"{k}.bin": records(v) for k, v in CIFAR10.items()}))
    assert data.name == "cifar-10"
    assert data.shape == (3, 32, 32)
    assert data.y.tolist() == [3, 9, 0, 1, 2]
    assert data.test is not None
    assert data.test.tolist() == [3, 4]
    assert data.x[0].numpy().tobytes() == records([3])[1:]


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    write(tmp_path, {"train.bin": records([99], b"\x07"), "test.bin": records([5, 6], b"\x01")})
    data = load("cifar-100", path=str(tmp_path))
    assert sorted(data.y.tolist()) == [5, 6, 99]
    assert data.test is not None
    assert data.y[data.test].tolist() == [5, 6]


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("source", "files"), [("cifar-10", ("data_batch_1", "test_batch")), ("cifar-100", ("train", "test", "meta"))]
)
@pytest.mark.parametrize("wrapping", ["plain", "tar.gz"])
def test_a_pickle_is_refused_unread_with_the_archive_to_take_instead(
    source: str, files: tuple[str, ...], wrapping: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = WRAPPINGS[wrapping](tmp_path, {name: pickle.dumps(_Evil(), 2) for name in files})
    for name, options in ((place, {}), (source, {"path": str(place)})):
        with pytest.raises(DataError, match=f"a pickle, .*. Use the binary version .* {source}-binary.tar.gz from"):
            load(name, **options)  # type: ignore[arg-type]
    assert "executed" not in capsys.readouterr().out


def test_python_batches_beside_binary_ones_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {"data_batch_1.bin": records([3]), "data_batch_1": pickle.dumps(_Evil(), 2)})
    assert load("cifar-10", path=str(tmp_path)).y.tolist() == [3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (records([1])[:-1], "truncated: records have 3073 bytes"),
        (records([10]), "unknown label 10: labels must be from 0 to 9"),
    ],
)
def test_a_spoiled_binary_batch_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        load("cifar-10", path=str(write(tmp_path, {"data_batch_1.bin": content})))


# --- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapping", ["plain", "zip", "tar.xz"])
def test_images_by_folder(wrapping: str, tmp_path: Path) -> None:
    files = {"train/cat/1.png": png(10), "train/dog/1.png": png(20), "test/cat/1.png": png(30)}
    data = load(WRAPPINGS[wrapping](tmp_path, files))
    assert data.classes == ("cat", "dog")
    assert data.shape == (1, 4, 6)
    order = data.x[:, 0, 0, 0].argsort()
    assert data.x[order, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.y[order].tolist() == [0, 1, 0]
    assert data.test is not None
    assert data.x[data.test, 0, 0, 0].tolist() == [30]


@pytest.mark.parametrize("wrapping", ["plain", "gz", "tar.xz"])
def test_an_image_longer_than_a_buffer_is_read_whole(wrapping: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (500, 500)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    assert buffer.tell() > 2**17
    place = WRAPPINGS[wrapping](tmp_path, {"a/1.png": buffer.getvalue()})
    assert np.array_equal(load("images", path=str(place)).x[0, 0].numpy(), noise)


def test_colour_and_size_can_be_asked_for(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.png": png(10, (8, 8), "RGB"), "b/1.png": png(20, (4, 4))})
    assert load(tmp_path, side=5).shape == (3, 5, 5)
    assert load(tmp_path, side=5, rgb=False).shape == (1, 5, 5)
    with pytest.raises(DataError, match="the image is 4x4, but the others are 8x8. Set side"):
        load(tmp_path)


def test_spoiled_images_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.png": png(1), "a/2.png": png(1)[:40]})
    with pytest.raises(DataError, match="2.png is not a readable image"):
        load(tmp_path)
    write(tmp_path / "c", {"a/1.jpg": b"no image"})
    with pytest.raises(DataError, match="not a readable image"):
        load(tmp_path / "c")


def test_tiny_imagenet_takes_its_labels_from_the_annotations(tmp_path: Path) -> None:
    files = {
        "train/n00000001/images/n00000001_0.JPEG": png(1, mode="RGB"),
        "train/n00000002/images/n00000002_0.JPEG": png(2, mode="RGB"),
        "val/images/val_0.JPEG": png(3, mode="RGB"),
        "val/val_annotations.txt": b"val_0.JPEG\tn00000002\t0\t0\t62\t57\n",
        "test/images/test_0.JPEG": png(4, mode="RGB"),
        "wnids.txt": b"n00000001\nn00000002\n",
    }
    data = load(write(tmp_path, files))
    assert data.name == "tiny-imagenet"
    assert data.y.tolist() == [0, 1, 1]
    assert data.x[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert data.test is not None
    assert data.test.tolist() == [2]
    write(tmp_path, {"val/val_annotations.txt": b"val_0.JPEG\tn00000003\n"})
    with pytest.raises(DataError, match="unknown label 'n00000003' in the test images"):
        load(tmp_path)
    write(tmp_path, {"val/val_annotations.txt": b""})
    with pytest.raises(DataError, match="val_0.JPEG: the image has no class"):
        load(tmp_path)


# --- LEAF ----------------------------------------------------------------------------------------------------------


A, B = ([[0.5, 1.0], [1, 2e-3]], [0, 2]), ([[3, 4]], [1.0])


def test_leaf_users_and_official_test_set(tmp_path: Path) -> None:
    write(tmp_path, {"train/a.json": leaf({"u1": A}), "train/b.json": leaf({"u2": B}), "test/a.json": leaf({"u1": B})})
    data = load(tmp_path)
    by_user = sorted(zip(data.users.tolist(), data.y.tolist(), data.x.tolist(), strict=True))  # type: ignore[union-attr]
    names = [data.user_names[code] for code, *_ in by_user]
    assert sorted(zip(names, (y for _, y, _ in by_user), strict=True)) == [("u1", 0), ("u1", 1), ("u1", 2), ("u2", 1)]
    assert data.x.dtype == torch.float32
    assert data.test is not None
    assert data.x[data.test].tolist() == [[3, 4]]
    assert data.classes == ("0", "1", "2")


def test_leaf_rows_may_be_nested_and_y_real(tmp_path: Path) -> None:
    image = [[[0, 1], [0.2, 0.4]], [[1, 1], [0, 0]]]
    write(tmp_path, {"a.json": leaf({"u": (image, [0, 1])})})
    data = load("leaf", path=str(tmp_path), shape=(1, 2, 2), pixels=True)
    assert data.x.tolist() == [[[[0, 255], [51, 102]]], [[[255, 255], [0, 0]]]]
    write(tmp_path, {"a.json": leaf({"u": ([[1, 2]], [0.25])})})
    assert load("leaf", path=str(tmp_path), task="regression").y.tolist() == [[0.25]]
    with pytest.raises(DataError, match="not whole numbers"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (leaf({"u": A}, users=["u", "u"]), "user 'u' is listed twice"),
        (leaf({"u": A}, users=["u", "v"]), "user 'v' is in only one of"),
        (leaf({"u": A}, num_samples=[3]), "num_samples contradicts user_data"),
        (leaf({"u": ([[1, 2]], [0, 1])}), "x of user 'u' has length 1, but y has length 2"),
        (leaf({"u": ([[1, 2], [3]], [0, 1])}), "sample of 1 value, but the others have 2"),
        (leaf({"u": ([["a", "b"]], [0])}), "user 'u' has x that are not numbers"),
        (leaf({"u": ([], [])}), "user 'u' has no samples. Remove the user"),
        (leaf({"u": A})[:-20], "invalid JSON"),
        (leaf({"u": A}) + b"{}", "invalid JSON .Extra data"),
        (b"[1, 2]", "not a LEAF file"),
        (b"{}", "lacks users or user_data"),
        (leaf({"u": A}).replace(b'"u": {"x"', b'"u": {"x": [[1, 2]], "y": [0]}, "u": {"x"'), "user 'u' occurs twice"),
    ],
)
def test_a_spoiled_leaf_file_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        load("leaf", path=str(write(tmp_path, {"a.json": content})))


def test_a_user_in_two_files_and_pixels_out_of_range_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": leaf({"u": A}), "b.json": leaf({"u": B})})
    with pytest.raises(DataError, match=r"user 'u' occurs twice \(also in .*a.json"):
        load(tmp_path)
    write(tmp_path / "c", {"a.json": leaf({"u": B})})
    with pytest.raises(DataError, match="k/255"):
        load("leaf", path=str(tmp_path / "c"), pixels=True)


# --- the user's own tables and arrays ------------------------------------------------------------------------------


def test_arrays(tmp_path: Path) -> None:
    x = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    np.savez_compressed(
        tmp_path / "a.npz", x_train=x, y_train=[[0], [2]], x_test=np.asfortranarray(x[:1]), y_test=[[2]]
    )
    data = load(tmp_path / "a.npz", channels_last=True)
    assert data.shape == (3, 4, 5)
    assert data.x[2].tolist() == x[0].transpose(2, 0, 1).tolist()
    assert data.y.tolist() == [0, 2, 2]
    assert data.test is not None
    assert data.test.tolist() == [2]
    np.savez(tmp_path / "b.npz", x=np.ones((3, 2)), y=[0.5, 1, 2], users=["b", "a", "b"])
    data = load(tmp_path / "b.npz")
    assert data.task == "regression"
    assert data.user_names == ("a", "b")
    assert data.users is not None
    assert data.users.tolist() == [1, 0, 1]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", [np.float64, np.int16, np.float32, np.uint8])
def test_arrays_of_any_type_and_order_are_read_in_blocks(
    kind: type[np.generic], order: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CONVERSION_BLOCK_BYTES", 200)
    x = np.random.default_rng(0).integers(0, 200, (7, 4, 5, 3)).astype(kind, order=order)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(7), names=["a", "b"])
    for channels_last, wanted in ((False, x), (True, x.transpose(0, 3, 1, 2))):
        data = load(tmp_path / "a.npz", channels_last=channels_last)
        assert data.x.dtype == (torch.uint8 if kind is np.uint8 else torch.float32)
        assert np.array_equal(data.x.numpy(), wanted)


def test_images_with_their_channels_last_are_asked_about_in_files_as_in_memory(tmp_path: Path) -> None:
    """The answers that the errors name work; before, a model expected 3 channels and got 64."""
    x, y = np.random.default_rng(0).integers(0, 256, (9, 8, 7, 3)).astype(np.uint8), np.arange(9) % 2
    first = np.moveaxis(x, -1, 1)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(DataError, match=r"a.npz: x \(9, 8, 7, 3\) looks like images .*. Set channels_last = true or"):
        load(tmp_path / "a.npz")
    assert np.array_equal(load(tmp_path / "a.npz", channels_last=True).x.numpy(), first)
    assert np.array_equal(load(tmp_path / "a.npz", channels_last=False).x.numpy(), x)
    (tmp_path / "n").mkdir()
    np.save(tmp_path / "n" / "x.npy", x)
    np.save(tmp_path / "n" / "y.npy", y)
    with pytest.raises(DataError, match=r"x.npy: \(9, 8, 7, 3\) looks like .*. Save the images .*, as numpy") as error:
        load("npy", path=str(tmp_path / "n"))
    assert load("npy", path=str(tmp_path / "n"), channels_last=False).shape == (8, 7, 3)
    code = str(error.value).split("channels first, as ")[1].split(", or set")[0]
    np.save(tmp_path / "n" / "x.npy", applied(code, x=x))
    assert np.array_equal(load("npy", path=str(tmp_path / "n")).x.numpy(), first)


@pytest.mark.parametrize(
    "names", [("images", "labels"), ("image", "label"), ("features", "target"), ("data", "labels")]
)
@pytest.mark.parametrize("form", ["{}", "{}_train", "train_{}"])
def test_arrays_of_a_file_have_the_names_that_a_dictionary_may_have(
    names: tuple[str, str], form: str, tmp_path: Path
) -> None:
    x, y = np.random.default_rng(0).random((6, 2)).astype(np.float32), np.arange(6) % 2
    held = {form.format(name): values for name, values in zip(names, (x, y), strict=True)}
    tests = {name.replace("train", "test"): values[:2] for name, values in held.items() if form != "{}"}
    np.savez(tmp_path / "a.npz", **held, **tests)
    data = load(tmp_path / "a.npz")
    assert (len(data), 0 if data.test is None else len(data.test)) == (6 + 2 * bool(tests), 2 * bool(tests))
    assert np.array_equal(data.x[:6].numpy(), x)
    assert form != "{}" or fl.Dataset.create(dict(zip(names, (x, y), strict=True))).checksum() == data.checksum()


def test_arrays_of_a_file_that_are_not_read_are_named(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((6, 2)), np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y, weight=y, about=np.ones(2))
    assert "fedloom reads 'x' and 'y' of a.npz, and ignores 'weight'" in load(tmp_path / "a.npz").notes
    np.savez(tmp_path / "b.npz", x=x, y=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match="x_test beside x and y. Name the arrays x_train, y_train,"):
        load(tmp_path / "b.npz")
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert len(load(tmp_path / "b.npz").test) == 6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"x": np.array([{}], object), "y": np.zeros(1)}, "a pickle"),
        ({"z": np.zeros(3)}, "needs arrays x and y"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "3 samples but 2 targets"),
        ({"x": np.full((1, 2), np.nan), "y": np.zeros(1)}, "NaN or Inf"),
        ({"x": np.zeros((1, 2)), "y": np.array([-1])}, "sample 0 has the unknown label -1"),
    ],
)
def test_spoiled_arrays_are_refused(held: dict[str, Any], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **held)
    with pytest.raises(DataError, match=words):
        load(tmp_path / "a.npz")


def folder_of(place: Path, x: Any, y: Any, **more: Any) -> Path:
    for name, values in {"x": x, "y": y, **more}.items():
        np.save(place / f"{name}.npy", values)
    return place


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_arrays_on_disk_are_those_in_memory(kind: type[np.generic], tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 200, (40, 3, 4, 5)).astype(kind), np.arange(40) % 3
    data = load(folder_of(tmp_path, x, y, users=np.arange(40) // 10))
    assert load("npy", path=str(tmp_path)).checksum() == data.checksum() == Dataset.create(x, y).checksum()
    assert data.user_names == ("0", "1", "2", "3")
    stored = (tmp_path / "x.npy").read_bytes()
    one, other = (Iid(clients=4)(d, seed=0) for d in (data, Dataset.create(x, y)))
    assert torch.equal(one.fetch(one.indices("train", 2)), other.fetch(other.indices("train", 2)))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / "x.npy") in line]
    assert mapped  # the samples are the file itself
    data.x[0] = 0
    assert (tmp_path / "x.npy").read_bytes() == stored


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((3, 2)), "contains float64 in C order, but an array that stays on disk must be uint8 or float32"),
        (np.zeros((3, 2), np.float32, order="F"), "float32 in Fortran order"),
        (np.full((3, 2), np.nan, np.float32), "NaN or Inf"),
        (np.zeros((2, 2), np.float32), "2 samples but 3 targets"),
        (np.array([{}] * 3, object), "cannot be read as an array"),
    ],
)
def test_spoiled_arrays_on_disk_are_refused(x: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        load("npy", path=str(folder_of(tmp_path, x, np.arange(3))))


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, np.zeros((30, 20), np.float32), np.arange(30)) / "x.npy"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"x.npy cannot be read as an array"):
        load(tmp_path)


TABLE = b"age, job ,site,label\n30,a,n,yes\n40, b,n,no\n50,a,s,yes\n"


def test_a_csv_with_roles(tmp_path: Path) -> None:
    write(tmp_path, {"t.csv.gz": gzip.compress(TABLE.replace(b" ,", b",").replace(b", ", b","))})
    data = load(tmp_path / "t.csv.gz", categorical=("job",), client_column="site")
    assert (data.task, data.classes) == ("binary", ("no", "yes"))
    assert data.y.tolist() == [1, 0, 1]
    assert data.user_names == ("n", "s")
    assert data.x.tolist() == [[30, 0], [40, 1], [50, 0]]
    assert data.prepare is not None
    with pytest.raises(ConfigError, match="did you mean 'label'"):
        load(tmp_path / "t.csv.gz", target="labl")


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"a,b\n1,0\nx,1\n", {}, "row 3, column 'a': expected a finite number, got 'x'"),
        (b"a,b\n1,0\n,1\n", {}, "row 3, column 'a': missing value"),
        (b"a,b\n1,0\n?,1\n", {}, "row 3, column 'a': missing value"),
        (b"a,b\n1,\n2,1\n", {"impute": True}, "row 2, column 'b': missing value"),
        (b"a,b\n1,0\n2\n", {}, "row 3 has 1 cell, expected 2"),
        (b"a,b\n", {}, "no rows"),
        (b"a,a\n1,2\n", {}, "same name"),
        (b"a,b\n1,inf\n2,1\n", {"task": "regression"}, "row 2, column 'b': expected a finite number"),
        (b"a,b\n\xff\xfe,1\n", {}, "UTF-8"),
    ],
)
def test_a_spoiled_csv_is_refused(content: bytes, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, {"t.csv": content})
    with pytest.raises(DataError, match=words):
        load(tmp_path / "t.csv", **options)


def test_parquet_reads_what_csv_reads(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"age": [30, 40, None], "job": ["a", "b", "a"], "y": [1.5, 2.0, 3.0]})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="row 4, column 'age': missing value"):
        load(tmp_path / "t.parquet", categorical=("job",), task="regression")
    data = load(tmp_path / "t.parquet", categorical=("job",), task="regression", impute=True)
    assert data.y.tolist() == [[1.5], [2.0], [3.0]]
    assert data.x[:2].tolist() == [[30, 0], [40, 1]]
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a readable Parquet"):
        load(tmp_path / "t.parquet")


# --- the hub -------------------------------------------------------------------------------------------------------


def test_the_hub_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install 'fedloom\\[hub\\]'"):
        load("hub:owner/name")


class _HubSplit(list[dict[str, Any]]):
    column_names = ("image", "label", "who")
    features: ClassVar = {"label": types.SimpleNamespace(names=["cat", "dog"])}


def test_the_hub_offline_and_online(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", fake)

    def offline(*_: Any) -> None:
        raise ConnectionError("no route")

    fake.load_dataset = offline  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="hub:owner/name: cannot be loaded .*Check the name and the connection"):
        load("hub:owner/name")
    rows = [{"image": np.full((2, 2, 3), i, np.uint8), "label": i % 2, "who": f"u{i}"} for i in range(3)]
    fake.load_dataset = lambda *_: {"train": _HubSplit(rows), "test": _HubSplit(rows[:1])}  # type: ignore[attr-defined]
    data = load("hub:owner/name", client_column="who")
    assert data.shape == (3, 2, 2)
    assert data.classes == ("cat", "dog")
    assert data.user_names == ("u0", "u1", "u2")
    assert data.test is not None
    assert data.test.tolist() == [3]
    with pytest.raises(DataError, match="no split 'validation'"):
        load("hub:owner/name", train="validation")
    with pytest.raises(DataError, match="no column 'nothing'"):
        load("hub:owner/name", y="nothing")


# --- embedded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [True, False])
def test_digits_are_those_of_scikit_learn(file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not file:
        monkeypatch.setattr(embedded, "find_spec", lambda _name: None)
    data, theirs = load("digits"), load_digits()
    assert np.array_equal(data.x[:, 0].numpy(), theirs.images)
    assert data.x.dtype == torch.uint8
    assert np.array_equal(data.y.numpy(), theirs.target)
    assert data.y.dtype == torch.int64


def test_digits_need_no_file() -> None:
    data = load("digits")
    assert (len(data), data.shape, data.outputs) == (1797, (1, 8, 8), 10)
    assert int(data.x.max()) == 16
    assert source("digits") == source("digits")


@pytest.mark.parametrize(
    ("name", "task", "outputs"),
    [
        ("iris", "classification", 3),
        ("wine", "classification", 3),
        ("breast_cancer", "binary", 1),
        ("diabetes", "regression", 1),
        ("linnerud", "regression", 3),
    ],
)
def test_embedded_tables(name: str, task: str, outputs: int) -> None:
    data: Dataset = load("sklearn", set=name)
    assert (data.task, data.outputs) == (task, outputs)
