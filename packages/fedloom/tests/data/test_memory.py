"""Arrays, torch, Hugging Face and pandas data sets as data sets: the same samples by every door, or one sentence."""

from __future__ import annotations

import datetime
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_array
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fedloom as fl
from fedloom.data import Dataset, load, partitions
from fedloom.errors import ConfigError, DataError

X = np.random.default_rng(0).integers(0, 256, (12, 4, 5)).astype(np.uint8)
Y = np.arange(12) % 3
RECORDS = np.zeros(12, [("a", "f4"), ("b", "f4")])


class Pairs(TorchDataset[Any]):
    classes: ClassVar = ["0", "1", "2"]

    def __init__(self, give: Callable[[int], Any]) -> None:
        self._give = give

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return self._give(i)


class Endless(TorchDataset[Any]):
    """A data set that lacks its length."""

    def __getitem__(self, index: int) -> Any:
        return X[0], 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class HubSplit(list[dict[str, Any]]):
    column_names = ("image", "label")
    features: ClassVar = {"label": types.SimpleNamespace(names=["0", "1", "2"])}


class Stored:
    """An array of a file, as h5py and zarr have them."""

    def __init__(self, values: Any) -> None:
        self.shape, self.dtype, self._values = values.shape, values.dtype, values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._values, dtype)


SET = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
DOORS: dict[str, Any] = {
    "pair": (X, Y),
    "lists": (X[:, None], Y.tolist()),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "dictionary": {"x": X, "y": Y},
    "column of targets": (X, Y[:, None]),
    "targets as text": (X, Y.astype(str)),
    "TensorDataset": SET,
    "torch pairs": Pairs(lambda i: (torch.from_numpy(X[i]), int(Y[i]))),
    "list of pairs": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "pairs of transformers": Pairs(lambda i: {"pixel_values": X[i], "labels": int(Y[i])}),
    "pairs as dictionaries": Pairs(lambda i: {"image": X[i], "label": int(Y[i])}),
    "as scikit-learn has them": {"data": X, "target": Y},
    "objects": (X, Y.astype(object)),
    "arrays of a file": (Stored(X), Stored(Y)),
    "read-only": (np.frombuffer(X.tobytes(), np.uint8).reshape(X.shape), np.frombuffer(Y.tobytes(), Y.dtype)),
    "backwards": (X[::-1].copy()[::-1], Y[::-1].copy()[::-1]),
    "other byte order": (np.asfortranarray(X), Y.astype(">i4")),
    "one frame per sample": ([pd.DataFrame(x) for x in X], Y),
    "half": (X, Y.astype(np.float16)),
    "pictures": Pairs(lambda i: (Image.fromarray(X[i]), Y[i])),
    "stream": Stream(),
    "hub": HubSplit({"image": image, "label": int(label)} for image, label in zip(X, Y, strict=True)),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_the_same_data_set(door: str) -> None:
    data = Dataset.create(DOORS[door])
    assert data.task == "classification"
    assert data.classes == ("0", "1", "2")
    assert (
        data.checksum()
        == Dataset("d", torch.from_numpy(X)[:, None], torch.from_numpy(Y), classes=data.classes).checksum()
    )
    fed = partitions.iid(clients=3)(DOORS[door], seed=1)
    same = partitions.iid(clients=3)(data, seed=1)
    assert torch.equal(fed.parts["train"].index, same.parts["train"].index)


def test_options_of_arrays() -> None:
    data = fl.Dataset.create(
        X, Y, test=(X[:2], Y[:2]), clients=list("abcdefghijklmn"), mean=[0.5], classes=["x", "y", "z"]
    )
    assert (len(data), data.classes, data.user_names[-1]) == (14, ("x", "y", "z"), "n")
    assert data.test is not None
    assert data.test.tolist() == [12, 13]
    assert Dataset.create({"train": (X, Y), "test": (X[:2], Y[:2])}).checksum() == data.checksum()
    assert Dataset.create(X, Y / 2).task == "regression"
    assert Dataset.create(X, Y > 0, task="binary").outputs == 1
    assert Dataset.create(data) is data
    assert Dataset.create(Stored(X), Stored(Y)).checksum() == Dataset.create(X, Y).checksum()
    last = Dataset.create(np.zeros((2, 4, 5, 3)), [0, 1], channels_last=True)
    assert last.shape == (3, 4, 5)
    assert last.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Dataset.create(X), ConfigError, "features without targets. Pass the pair"),
        *(
            (lambda given=given: Dataset.create(given), ConfigError, "a list contains samples, but")
            for given in ([X, Y], [X[0], X[1]], [X[0], X[1], X[2]], [[1, 2], [3, 4]], next(iter(DataLoader(SET, 6))))
        ),
        (lambda: Dataset.create((X, Y), test=[X, Y]), ConfigError, r"as the tuple \(x, y\)"),
        (lambda: Dataset.create({"train": [X, Y]}), ConfigError, r"as the tuple \(x, y\)"),
        (lambda: partitions.iid(clients=2)([X, Y]), ConfigError, r"as the tuple \(x, y\)"),
        (lambda: Dataset.create(Pairs(lambda i: [X[i], 0])), DataError, "sample 0 is list of 2, .* as a tuple"),
        (
            lambda: Dataset.create(Pairs(lambda i: (X[i] if i else X[i] / 2, 0))),
            DataError,
            "sample 1 is uint8, but",
        ),
        (lambda: Dataset.create(((X, Y), (X, Y))), ConfigError, r"Pass {'train': \(x, y\), 'test'"),
        (lambda: Dataset.create((X, Y, X, Y)), ConfigError, r"Pass {'train': \(x, y\), 'test'"),
        (
            lambda: Dataset.create(RECORDS),
            ConfigError,
            r"is a structured array with the fields a, b. Pass pandas.DataFrame\(x\)",
        ),
        (
            lambda: Dataset.create(RECORDS, Y),
            ConfigError,
            r"a structured array with the fields a, b. Pass pandas.DataFrame\(x\)",
        ),
        (lambda: Dataset.create(X, Y.astype("S")), DataError, r"got \|S\d+ \(12,\); pass y.astype\(str\)"),
        (lambda: Dataset.create(pd.DataFrame(X[:, 0]), X[:, 0]), ConfigError, r"targets themselves, got ndarray \(12,"),
        (lambda: Dataset.create(Stored(X)), ConfigError, "features without targets. Pass the pair"),
        (lambda: Dataset.create(X, [b"a", b"b"] * 6), DataError, r"pass y.astype\(str\)"),
        (
            lambda: Dataset.create(X, np.array([b"a", b"b"] * 6, object)),
            DataError,
            r"value 0 is b'a'.*ass y\[:\].astype",
        ),
        (
            lambda: Dataset.create(torch.zeros(12, 2, device="meta"), Y),
            DataError,
            "device meta has no values. Create the tensor with",
        ),
        (lambda: Dataset.create(3), ConfigError, "int is not a known form of data. Known forms: arrays"),
        (lambda: Dataset.create((X, Y), clases=[1]), ConfigError, "unknown option 'clases'; did you mean 'classes'"),
        (lambda: Dataset.create(load("digits"), Y), ConfigError, "digits is already a Dataset"),
        (lambda: Dataset.create(X, Y[:3]), DataError, "12 samples but 3 targets"),
        (
            lambda: Dataset.create(X.astype(str), Y[:3]),
            DataError,
            "2 problems\n  - x must be numbers.*\n  - 12 samples but 3",
        ),
        (lambda: Dataset.create(np.ma.masked_less(X, 9), Y), DataError, "some values are masked. Fill these values"),
        (lambda: Dataset.create(X, [None, *Y[1:]]), DataError, "value 0 is None. Use only numbers or only text"),
        (
            lambda: Dataset.create(X, ["a", None, *Y[2:]]),
            DataError,
            "value 1 is None. Use only numbers or only text",
        ),
        (lambda: Dataset.create(X, X[:, 0] % 2), DataError, "only 0 and 1, like several labels per sample"),
        (
            lambda: Dataset.create(X, ["True", "TRUE", "0"] * 4),
            DataError,
            "written differently but seem the same: 'TRUE' .4. = 'True' .4.. Write them in one",
        ),
        (lambda: Dataset.create(X, Y * 0 + 0.5), DataError, "the target is the same in every row"),
        (
            lambda: Dataset.create(X, Y, task="classify"),
            DataError,
            "unknown task 'classify'; did you mean 'classification'",
        ),
        (lambda: Dataset.create(X, Y, classes="abc"), DataError, "classes must be a list of names, got the text 'abc'"),
        (lambda: Dataset.create(X, Y, mean="a"), DataError, "mean and std must be numbers, one per channel, got 'a'"),
        (lambda: Dataset.create(X, Y, clients=[None] * 12), DataError, "data: users: value 0 is None"),
        (lambda: Dataset.create(X, Y, clients=[np.nan] * 12), DataError, "sample 0 has no client"),
        (lambda: Dataset.create(X, Y, clients=["a", " ", ""] * 4), DataError, "sample 1 has an empty client name .8 "),
        (
            lambda: Dataset.create(np.zeros((12, 9, 8, 3)), Y),
            DataError,
            "channels last. Set channels_last = True or False",
        ),
        (
            lambda: Dataset.create(np.zeros((12, 9, 8, 2)), Y),  # grey with alpha
            DataError,
            "channels last. Set channels_last = True or False",
        ),
        (
            lambda: Dataset.create(np.zeros((12, 32, 32, 13)), Y),  # bands of a satellite
            DataError,
            "channels last. Set channels_last = True or False",
        ),
        (
            lambda: Dataset.create(np.full((12, 2), 1e300), Y),
            DataError,
            r"row 0, column 0: .* got 1e\+300 \(12 such rows",
        ),
        (
            lambda: Dataset.create(TensorDataset(torch.from_numpy(X))),
            ConfigError,
            "has 1 tensors, but expected features and",
        ),
        (
            lambda: Dataset.create(Pairs(lambda i: (X[i] / 2 if i else X[i], 0))),
            DataError,
            "sample 1 is float64, but earlier samples",
        ),
        (
            lambda: Dataset.create("data.csv"),
            ConfigError,
            "str is not a known form of data; load a file or a named data set with fl.load",
        ),
        (
            lambda: Dataset.create(types.SimpleNamespace(toarray=0)),
            ConfigError,
            r"x.toarray\(\)",
        ),
        (lambda: partitions.iid(clients=2)((X, Y), seed="a"), ConfigError, "seed must be a whole number, got 'a'"),
        (lambda: Dataset.create(([[1], [2, 3]], [0, 1])), DataError, "rows have different lengths. Pad"),
        (
            lambda: Dataset.create(
                torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged), Y[:2]
            ),
            DataError,
            "rows have different lengths. Pad",
        ),
        (lambda: Dataset.create(X, Y.astype("M8[D]")), DataError, r"got datetime64\[D\] \(12,\); pass y.astype\(str\)"),
        (lambda: Dataset.create(X, Y / 2, task="binary"), DataError, "must be whole numbers"),
        (
            lambda: Dataset.create(X, Y.astype(str), classes=["0", "1"]),
            DataError,
            "y contains '2', but the classes are 0, 1",
        ),
        (lambda: Dataset.create((X, Y), test=(X[:1], [7])), DataError, "no training sample has: '7'. .* or list all"),
        (lambda: Dataset.create((X, Y), test=(X[:2], Y[:1])), DataError, "the test set: 2 samples but 1 targets"),
        (
            lambda: Dataset.create((X, Y), test=(X[:2] / 255, Y[:2])),
            DataError,
            "bytes, .* but the features of the test set are",
        ),
        (
            lambda: Dataset.create({"x": X, "y": Y}, Y[::-1]),
            ConfigError,
            "already contains targets. Omit `target`",
        ),
        (
            lambda: Dataset.create(Pairs(lambda i: (X[i], 0)), Y),
            ConfigError,
            "already contains targets. Omit `target`",
        ),
        (
            lambda: Dataset.create((csr_array(X[:, 0]), Y)),
            ConfigError,
            "csr_array is sparse, but models need",
        ),
        (lambda: Dataset.create(DataLoader(SET)), ConfigError, "pass its .dataset. Known"),
        (
            lambda: Dataset.create(DataLoader(SET, collate_fn=list)),
            ConfigError,
            "pass its .dataset, whose samples come from its collate_fn",
        ),
        (
            lambda: Dataset.create(DataLoader(SET, sampler=SubsetRandomSampler([1, 2]))),
            ConfigError,
            r"pass torch.utils.data.Subset\(x.dataset, list\(x.sampler\)\)",
        ),
        (
            lambda: Dataset.create((X, Y), test=(X[:1, :2], [0])),
            DataError,
            "training samples have shape .* test samples have",
        ),
        (lambda: Dataset.create(X, Y, clients=["a"]), DataError, "users have shape \\(1,\\) for 12 samples"),
        (lambda: Dataset.create(Pairs(lambda i: 1.0)), DataError, "sample 0 is float, expected the pair"),
        (lambda: Dataset.create(Pairs(lambda i: (X[i], 0, i))), DataError, "sample 0 is tuple of 3, expected the pair"),
        (
            lambda: Dataset.create(Pairs(lambda i: {"picture": X[i], "class": 0})),
            DataError,
            "sample 0 is dict with 'picture', 'class', expected .* features and target by name: x and y, ",
        ),
        (lambda: Dataset.create(types.SimpleNamespace(to_pandas=0)), ConfigError, r"pass x.to_pandas\(\)"),
        (
            lambda: Dataset.create(Pairs(lambda i: (X[i][: i + 1], 0))),
            DataError,
            "sample 1 has shape .* All samples must have the same size",
        ),
        (lambda: Dataset.create(Pairs(lambda i: ("a", 0))), DataError, "but a sample must be an image or numbers"),
        (
            lambda: Dataset.create(Endless()),
            ConfigError,
            "Endless has no __len__. Add this method, or make the class an IterableDataset",
        ),
        (lambda: Dataset.create(Pairs(lambda i: (X[i], [][i]))), DataError, "sample 0 cannot be read: IndexError"),
        (lambda: partitions.iid(clients=2)((X, 0 * Y)), DataError, "the target is the same in every row"),
        (lambda: Dataset.create(Y, Y), DataError, r"For a single feature, pass x\[:, None\]"),
        (lambda: Dataset.create(X, np.eye(3)[Y]), DataError, "like one-hot classes. Pass y.argmax"),
        (
            lambda: Dataset.create((np.full((2, 2), np.nan), [0, 1])),
            DataError,
            "NaN or Inf in the features of 2 samples",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_test_set_may_have_every_class_that_is_named() -> None:
    """None of them need be in the training set, and the model has an output for each."""
    data = Dataset.create((X[Y < 2], Y[Y < 2]), test=(X, Y), classes=["a", "b", "c"])
    assert (data.outputs, len(data)) == (3, 12 + int((Y < 2).sum()))
    assert data.y[data.test].tolist() == Y.tolist()


def test_targets_of_pandas_belong_to_rows_of_their_index() -> None:
    """In one order of the index they are paired by place; in another they are refused, as features and as a table."""
    frame = pd.DataFrame(X[:, 0] * 1.0, index=range(5, 17))
    target = pd.Series(Y, index=frame.index, name="t")
    for same in (target, target.to_numpy(), target.reset_index(drop=True)):
        assert Dataset.create(frame, same).y.tolist() == Y.tolist()
    for named in (target.rename(0), target.rename(None), pd.DataFrame({0: target})):
        assert Dataset.create(frame, named).shape == (5,), "the first column is no target"
    with pytest.raises(
        ConfigError, match="a column of the table is also called 't', but has different values. Rename one"
    ):
        Dataset.create(frame.assign(t=1 - target), target)
    assert Dataset.create(frame.assign(t=target), target).shape == (5,), "the target is no feature"
    for make in (
        lambda: Dataset.create(frame, target[::-1]),
        lambda: fl.Federation.create([(frame, target[::-1])] * 2),
    ):
        with pytest.raises(
            DataError,
            match=r"index of the targets has a different order than the index of the features. Pass y.loc\[x.index\]",
        ):
            make()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # is deprecated
def test_tensors_of_any_kind_are_read() -> None:
    x, y = torch.arange(24.0).reshape(12, 2), torch.from_numpy(Y)
    same = Dataset.create(x, y).checksum()
    whole = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
    for given in (x.bfloat16(), x.half(), x.to_sparse(), x.clone().requires_grad_(), x.T.contiguous().T, whole):
        assert Dataset.create(given, y).checksum() == same


def test_text_of_variable_width_is_text() -> None:
    assert (
        Dataset.create(X, Y.astype(np.dtypes.StringDType())).checksum() == Dataset.create(X, Y.astype(str)).checksum()
    )


@pytest.mark.parametrize("how", ["array", "tensor", "clients"])
def test_whole_numbers_that_lose_digits_are_noted(how: str) -> None:
    """Where float32 has another number, and nowhere else."""
    x = np.arange(12, dtype=np.int64).reshape(6, 2)
    y, one, other = np.arange(6) % 2, 2**24 + 1, -(2**62) - 1

    def notes(x: Any) -> list[str]:
        if how == "clients":
            return [n for n in fl.Federation.create([(x, y), (x, y)]).data.notes if "float32" in n]
        return [n for n in Dataset.create(torch.from_numpy(x) if how == "tensor" else x, y).notes if "float32" in n]

    exact = x.copy()
    exact[2, 1], exact[3, 0] = 2**24, 2**40
    for fine in (x, exact, exact.astype(np.float64) + 1e-9, x.astype(np.int16)):
        assert notes(fine) == []
    exact[4, 1], exact[5, 0] = one, other
    (note,) = notes(exact)
    assert note.startswith(f"x: {4 if how == 'clients' else 2} whole numbers beyond 16,777,216 are rounded to float32")
    assert f"(sample 4, column 1: {one} is {one - 1})" in note


def test_columns_of_large_numbers_are_noted() -> None:
    """Arrays are taken as they are; where a column or a target is far from 1, a note names it and the cure."""
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(40, 3)), rng.normal(size=40)

    def notes(x: Any, y: Any) -> list[str]:
        return [note for note in Dataset.create(x, y).notes if "not scaled" in note]

    assert notes(x, target) == []
    assert notes(50 * x, target) == []
    (note,) = notes(x * [1, 30_000, 200], target)
    assert note.startswith(f"column 1 has large numbers, with a median size of {30_000 * np.median(abs(x[:, 1])):,.4g}")
    assert "the largest of 2 such columns" in note
    (note,) = notes(x, 500 * target)
    assert note.startswith(f"column y has large numbers, with a median size of {500 * np.median(abs(target)):,.4g}")
    assert notes(x, np.arange(40) % 3 + 5000) == [], "classes are no numbers"


def test_numbers_that_may_be_measurements_are_noted_as_classes() -> None:
    """Of a table and of arrays; not where they are few, text, or said to be measurements."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 3)), np.arange(80) // 2 * 3.0

    def notes(y: Any, **options: Any) -> list[str]:
        frames = [Dataset.create(pd.DataFrame(x), y, **options), Dataset.create(x, y, **options)]
        return [note for data in frames for note in data.notes if "measurements" in note]

    assert len(notes(y)) == 2
    assert (
        "has 40 different numbers, and each is read as a class. Set task = 'regression' if they are measurements"
        in notes(y)[0]
    )
    assert notes(y % 30) == notes(np.char.add("p", y.astype(int).astype(str))) == notes(y, task="regression") == []


def test_a_picture_of_a_palette_has_colours() -> None:
    pictures = [Image.new("RGB", (4, 5), (10 * i, 5, 250 - i)).quantize() for i in range(12)]
    found = Dataset.create(Pairs(lambda i: (pictures[i], int(Y[i]))))
    assert found.shape == (3, 5, 4)
    assert found.x[3, :, 0, 0].tolist() == [30, 5, 247]


def test_bytes_in_a_table_are_text(tmp_path: Any) -> None:
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": range(12), "s": ["é", "v", "w w"] * 4, "y": ["n", "p"] * 6})
    raw = frame.assign(s=frame["s"].str.encode("utf-8"), y=frame["y"].str.encode("utf-8"))
    arrow = pa.Table.from_pandas(raw)
    raw.to_parquet(tmp_path / "t.parquet")
    raw.astype({"a": float}).to_parquet(tmp_path / "u.parquet", use_dictionary=False)
    options: dict[str, Any] = {"target": "y", "categorical": ["s"]}
    text = Dataset.create(frame, **options)
    for table in (raw, arrow, tmp_path / "t.parquet", tmp_path / "u.parquet"):
        read = load(table, **options) if isinstance(table, Path) else Dataset.create(table, **options)
        assert read.classes == text.classes
        assert torch.equal(read.x, text.x)
    columns = {"a": np.arange(12), "s": raw["s"].to_numpy().astype("S4")}
    model = fl.simulate("fedavg", partitions.iid(clients=2)(text, 0), rounds=1).models.ready("global")
    np.testing.assert_array_equal(model.predict_proba(columns), model.predict_proba(frame))


def test_a_pandas_table_is_read_as_a_csv_file(tmp_path: Any) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "s": ["u", "v", "u", "v"], "y": ["n", "n", "p", "p"]})
    frame.to_csv(tmp_path / "data.csv", index=False)
    read = load(tmp_path / "data.csv", categorical=("s",))
    for data in (Dataset.create(frame, "y", categorical=("s",)), Dataset.create(frame.astype({"s": "category"}))):
        assert data.checksum() == read.checksum()
        assert data.prepare == read.prepare
    moved = Dataset.create(frame.rename(columns={"y": "label"})[["label", "a", "s"]], categorical=("s",))
    assert moved.describe()["classes"] == read.describe()["classes"], "a column called label is the target"
    assert Dataset.create(frame[["y", "a", "s"]], target="y", categorical=("s",)).shape == read.shape
    assert partitions.iid(clients=2)(frame.drop(columns="s")).n == 2
    with pytest.raises(
        DataError, match=r"row 0, column 's': expected a finite number, got 'u' \(4 such, values 'u', 'v'\)"
    ):
        Dataset.create(frame)
    with pytest.raises(DataError, match="3 problems"):
        Dataset.create(frame.assign(a=[1, None, 2, 3], y="n"))
    with pytest.raises(ConfigError, match="no column 'z'"):
        Dataset.create(frame, "z")
    for target in (frame["y"], frame["y"].tolist(), frame["y"].sample(frac=1, random_state=0).sort_index()):
        apart = Dataset.create(frame.drop(columns="y").set_index("a", drop=False), target, categorical=("s",))
        assert apart.checksum() == read.checksum()
    for one in (frame["y"], frame[["y"]], frame[["y"]].to_numpy()):
        assert Dataset.create((frame.drop(columns="y"), one), categorical=("s",)).checksum() == read.checksum()
    assert Dataset.create(frame[["a", "y"]].set_axis([0, 1], axis=1), 1).classes == ("n", "p")
    with pytest.raises(DataError, match="4 samples but 3 targets"):
        Dataset.create(frame, frame["y"][:3])
    with pytest.raises(DataError, match="the target is the same in every row"):
        partitions.iid(clients=2)(frame[["a", "y"]].assign(y="n"))


class HubVectors(list[dict[str, Any]]):
    column_names = ("id", "left", "right", "label")
    features: ClassVar = {"label": None}


def test_columns_of_the_hub_that_are_not_read_are_noted() -> None:
    """Features are the first column of arrays or pictures; where there are others, the note names them."""
    table = HubVectors({"id": k, "left": X[k, 0], "right": X[k, 1], "label": int(Y[k])} for k in range(12))
    data = Dataset.create(table)
    assert data.x.tolist() == X[:, 0].tolist()
    assert "data: fedloom reads the columns 'left' and 'label', and ignores 'id', 'right'" in data.notes
    chosen = Dataset.create(table, features="right")
    assert chosen.x.tolist() == X[:, 1].tolist()
    assert not any("columns" in note for note in chosen.notes)


class HubTable(list[dict[str, Any]]):
    column_names = ("age", "ward", "label")
    features: ClassVar = {
        "age": None,
        "ward": types.SimpleNamespace(names=["A", "B"]),
        "label": types.SimpleNamespace(names=["no", "yes"]),
    }

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, int) else [row[key] for row in self]


def test_classes_of_a_table_of_the_hub_have_their_names() -> None:
    table = HubTable({"age": 30.0 + k, "ward": k % 2, "label": k // 2 % 2} for k in range(4))
    data = Dataset.create(table)
    assert (data.classes, data.task) == (("no", "yes"), "binary")
    assert data.y.tolist() == [0, 0, 1, 1]
    assert data.x.tolist() == [[30, 0], [31, 1], [32, 0], [33, 1]]
    assert Dataset.create(table, client_column="ward").user_names == ("A", "B")
    with pytest.raises(DataError, match="column 'age': .*; add the column to drop, or convert it to days: days_since"):
        Dataset.create(HubTable({**row, "age": datetime.datetime(2020, 1, 1)} for row in table))
    with pytest.raises(DataError, match="row 0, column 'label': missing value"):
        Dataset.create(HubTable([{"age": 1.0, "ward": 0, "label": -1}, *table]))


def test_everything_wrong_with_a_table_is_said_at_once(tmp_path: Any) -> None:
    (tmp_path / "t.csv").write_text("a,b,c,y\n1,x,,n\n2,y,3,n\nz,z,4\n5,x,6,n\n")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "t.csv")
    said = str(caught.value).split("\n  - ")
    assert said[0].endswith("t.csv: 4 problems")
    for sentence, words in zip(
        said[1:],
        (
            "row 4 has 3 cells, expected 4",
            "row 2, column 'b': expected a finite number, got 'x' (3 such, values 'x', 'y')",
            "row 2, column 'c': missing value",
            "the label 'y' is 'n' in every row",
        ),
        strict=True,
    ):
        assert sentence.startswith(words)


def test_data_and_federations_print_in_one_line() -> None:
    data = load("digits")
    assert repr(data) == "Dataset('digits': 1,797 samples of shape 1x8x8, classification of 10 classes)"
    fed = repr(partitions.iid(clients=10)(data))
    assert fed.startswith("Federation(10 clients by iid, 1,257 train, 180 validation, 360 test samples, 125 to 126 ")
    assert "\n" not in fed + repr(load("sklearn", set="diabetes"))
