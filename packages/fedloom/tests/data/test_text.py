"""Tokens: what a data set of them takes and refuses, LEAF's texts, and the docstrings of the standard library."""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedloom.data import Dataset, load, partitions
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_rows import new_rows
from fedloom.data.text import build_vocabulary, encode_texts, recode_tokens
from fedloom.errors import ConfigError, DataError, PartitionError, Refused
from tests.data.files import leaf, write

X = torch.tensor([[1, 2, 3], [4, 1, 0]], dtype=torch.int32)
NAMES = ("<pad>", "<unk>", "a", "b", "c")


def made(x: torch.Tensor = X, y: Any = (0, 1), **more: Any) -> Dataset:
    return Dataset("t", x, torch.as_tensor(y), classes=("no", "yes"), **{"vocabulary": NAMES, **more})


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (
            torch.tensor([[1, 5]], dtype=torch.int32),
            [0],
            "sample 0 contains the token 5 at position 1, but the vocabulary",
        ),
        (torch.tensor([[1, -1]], dtype=torch.int32), [0], "contains the token -1"),
        (torch.tensor([[1.0, 2.0]]), [0], "tokens must be whole numbers"),
        (torch.tensor([1, 2], dtype=torch.int32), [0, 1], "tokens must be whole numbers .N, length."),
        (torch.tensor([[0, 0]], dtype=torch.int32), [0], "sample 0 contains only padding"),
        (torch.tensor([[1, 0, 2]], dtype=torch.int32), [0], "contains padding .token 0. before its end. Pad"),
        (X, [[0, 1, 0], [1, 0, 0]], "sample 1 has a label on padding"),
        (X, [[0, 1, 0], [-1, -1, -1]], "sample 1 has no label"),
        (X, [[0, 1, 2], [1, 0, -1]], "labels must be within 0..1, or -1"),
        (X, [[0, 1], [1, 0]], "labels of positions must be int64 like the tokens"),
        (X, [0, -1], "labels must be from 0 to 1, got -1"),
    ],
)
def test_what_is_wrong_is_said(x: torch.Tensor, y: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        made(x, y)


def test_positions_need_tokens() -> None:
    with pytest.raises(DataError, match="a one-dimensional int64 tensor"):
        Dataset("t", torch.rand(2, 3), torch.zeros(2, 3, dtype=torch.long), classes=("a", "b"))


def test_whole_numbers_without_a_vocabulary_get_a_hint() -> None:
    with pytest.raises(DataError, match="pass a vocabulary"):
        Dataset("t", X, torch.tensor([0, 1]), classes=("no", "yes"))


def test_arrays_with_a_vocabulary_are_tokens() -> None:
    by_sample = Dataset.create((np.array([[1, 2], [3, 0]]), ["no", "yes"]), vocabulary=5)
    assert by_sample.tokens == (5, False)
    by_position = Dataset.create(([[1, 2], [3, 0]], [[0, 1], [2, -1]]), vocabulary=NAMES)
    assert by_position.tokens == (5, True)
    assert by_position.classes == ("0", "1", "2")
    assert by_position.describe()["classes"] == {"0": 1, "1": 1, "2": 1}
    with pytest.raises(DataError, match="Pad all samples to the same size"):
        Dataset.create(([[1, 2], [3]], [0, 1]), vocabulary=5)
    with pytest.raises(DataError, match="tokens must be whole numbers"):
        Dataset.create(([[1.5, 2], [3, 1]], [0, 1]), vocabulary=5)


def test_an_npz_file_may_hold_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[1, 2], [3, 0]]), y=np.array([[0, 1], [1, -1]]))
    data = load("npz", path=str(tmp_path / "a.npz"), vocabulary=4)
    assert data.tokens == (4, True)
    assert data.x.tolist() == [[1, 2], [3, 0]]


def test_partitions_by_class_or_of_features_say_why_not() -> None:
    data = made(y=[[0, 1, 0], [1, 0, -1]])
    with pytest.raises(Refused, match="has a label per position"):
        partitions.dirichlet(clients=2)(data)
    with pytest.raises(Refused, match="these are tokens"):
        partitions.feature_noise(clients=2, sigma=0.1)(data)
    with pytest.raises(PartitionError, match="has no natural clients"):
        partitions.natural()(data)
    assert partitions.iid(clients=2, test=0.0, validation=0.0)(data).sizes("train").tolist() == [1, 1]


def test_encoding_pads_at_the_end_and_cuts() -> None:
    vocabulary = build_vocabulary(["ab", "b"], "character")
    assert encode_texts(["ba", "abx", ""], vocabulary, 2).tolist() == [[3, 2], [3, 1], [1, 0]]  # last characters
    words = build_vocabulary(["one two", "two"], "word")
    assert encode_texts(["One two two", "zero"], words, 2).tolist() == [[2, 3], [1, 0]]  # first words
    assert recode_tokens(torch.tensor([[2, 3, 0]]), ("<pad>", "<unk>", "b", "z"), vocabulary).tolist() == [[3, 1, 0]]


# --------------------------------------------------------------------------------------------------------------- LEAF


def test_shakespeare_by_speaker(tmp_path: Path) -> None:
    files = {
        "train/a.json": leaf({"ROMEO": (["to be", "o be,"], [",", " "])}),
        "test/a.json": leaf({"ROMEO": (["be"], ["!"])}),
    }
    data = load("shakespeare", path=str(write(tmp_path, files)))
    assert data.user_names == ("ROMEO",)
    assert data.shape == (5,)
    assert set(data.vocabulary[2:]) == set("to be,!")
    assert ["".join(data.vocabulary[t] for t in row if t) for row in data.x] == ["be", "to be", "o be,"]
    assert [data.classes[k] for k in data.y] == ["!", ",", " "]
    assert data.test is not None
    assert data.test.tolist() == [0]


def test_sent140_by_user(tmp_path: Path) -> None:
    def tweet(text: str) -> list[str]:
        return ["1", "Mon", "NO_QUERY", "me", text]

    content = leaf({"me": ([tweet("Good, GOOD day"), tweet("")], [4, 0]), "you": ([tweet("bad day")], ["0"])})
    data = load("sent140", path=str(write(tmp_path, {"a.json": content})), length=3)
    assert data.task == "binary"
    assert data.y.tolist() == [1, 0, 0]
    assert [[data.vocabulary[t] for t in row if t] for row in data.x] == [
        ["good", ",", "good"],
        ["<unk>"],
        ["bad", "day"],
    ]


@pytest.mark.parametrize(
    ("source", "content", "words"),
    [
        ("shakespeare", leaf({"u": ([[1, 2]], ["a"])}), "user 'u' has x that are not texts"),
        ("shakespeare", leaf({"u": (["to"], ["ab"])}), "the y of user 'u' contains values that are not characters"),
        ("shakespeare", leaf({"u": (["to"], [1])}), "the y of user 'u' contains values that are not characters"),
        ("sent140", leaf({"u": (["to"], [1])}), "user 'u' has x that are no tweets"),
        ("sent140", leaf({"u": ([["", "", "", "", "a"]], [2])}), "has the label 2. The label of a tweet"),
        ("sent140", leaf({"u": ([["", "", "", "", "a"]], ["²"])}), "the y of user 'u' contains values that are not"),
        ("sent140", json.dumps({"users": []}).encode(), "lacks users or user_data"),
    ],
)
def test_a_spoiled_file_of_texts_is_refused(source: str, content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        load(source, path=str(write(tmp_path, {"a.json": content})))


# ------------------------------------------------------------------------------------------------------------- a table

TABLE = """words,who,mood
"Good, GOOD day",ann,glad
Ünd böse Tage,bob,sad
good  ,bob,glad
"""


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_texts_of_a_table(ending: str, tmp_path: Path) -> None:
    place = tmp_path / f"t.{ending}"
    if ending == "csv":
        place.write_text(TABLE)
    else:
        pq.write_table(pa.Table.from_pylist(list(csv.DictReader(TABLE.splitlines()))), place)
    data = load("texts", path=str(place), text="words", client_column="who", length=3)
    assert (data.name, data.task, data.classes) == ("t", "binary", ("glad", "sad"))
    assert data.y.tolist() == [0, 1, 0]
    assert data.user_names == ("ann", "bob")
    assert [[data.vocabulary[t] for t in row if t] for row in data.x] == [
        ["good", ",", "good"],
        ["ünd", "böse", "tage"],
        ["good"],
    ]
    letters = load("texts", path=str(place), text="words", target="who", level="character", length=2)
    assert "".join(letters.vocabulary[t] for t in letters.x[1]) == "ge"
    assert len(letters.vocabulary) == 2 + len(set("".join(row["words"] for row in csv.DictReader(TABLE.splitlines()))))


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (TABLE, {"text": "word"}, "no column 'word'; did you mean 'words'"),
        (TABLE, {"text": "words", "target": "words"}, "must be three different columns"),
        (TABLE, {"text": "words", "client_column": "mood"}, "must be three different columns"),
        ("a,b\n,x\nhi,\n  ,y\n", {"text": "a"}, r"row 2, column 'a': empty \(2 such\).*\n.*row 3, column 'b': empty"),
        ("a,b\n", {"text": "a"}, "no rows below the header"),
        ("", {"text": "a"}, "no column 'a'"),
    ],
)
def test_a_table_that_has_no_such_texts_is_refused(
    table: str, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises((ConfigError, DataError), match=words):
        load("texts", path=str(tmp_path / "t.csv"), **options)
    with pytest.raises(DataError, match="is not a table"):
        load("texts", path=str(write(tmp_path / "leaf", {"a.json": leaf({"u": (["to"], ["b"])})})), text="a")


def test_a_very_long_text_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "héllo " * 160_000 + ",x\nshort,y\n")
    data = load("texts", path=str(tmp_path / "t.csv"), text="a")
    assert data.x.shape == (2, 64)
    assert data.vocabulary[2:] == ("héllo", "short")


# ---------------------------------------------------------------------------------------------------------- docstrings


def test_docstrings_predict_the_next_character() -> None:
    data = load("docstrings", length=16, max_characters=300)
    assert {"json", "argparse"} & set(data.user_names) == {"argparse"}  # json is a folder
    who = data.user_names.index("argparse")
    assert data.users is not None
    x, y = data.x[data.users == who], data.y[data.users == who]
    text = "".join(data.vocabulary[t] for t in x.flatten() if t)
    following = "".join(data.classes[k] if k >= 0 else "?" for k in y[x != 0])
    known = [(a, b) for a, b in zip(text[1:], following, strict=False) if b != "?"]
    assert len(text) == 299
    assert all(a == b for a, b in known)
    assert text.startswith((ast.get_docstring(ast.parse("'''Command-line parsing library'''")) or "")[:12])
    assert int(((x != 0) & (y < 0)).sum()) == following.count("?")


def test_halves_of_the_modules_share_a_vocabulary() -> None:
    whole, even, odd = (load("docstrings", max_characters=100, modules=m) for m in ("all", "even", "odd"))
    assert even.vocabulary == odd.vocabulary == whole.vocabulary
    assert sorted(even.user_names + odd.user_names) == list(whole.user_names)
    with pytest.raises(DataError, match="docstrings. Lower `min_characters`"):
        load("docstrings", min_characters=10**9)


# ---------------------------------------------------------------------------------------------------- data for a model


def test_new_data_are_read_by_the_old_vocabulary() -> None:
    facts = InputSpec.create(made(y=[[0, 1, 0], [1, 0, -1]]))
    other = Dataset(
        "o", torch.tensor([[2, 3]]), torch.tensor([[0, 1]]), classes=("yes", "no"), vocabulary=("", "?", "b", "z")
    )
    taken = facts.take(other)
    assert taken.x.tolist() == [[3, 1, 0]]
    assert taken.y.tolist() == [[1, 0, -1]]
    with pytest.raises(DataError, match="one label per sample, but the model was trained on one label per position"):
        facts.take(made())
    plain = InputSpec.create(made(vocabulary=("0", "1", "2", "3", "4")))
    with pytest.raises(DataError, match="token '<unk>' is not in the vocabulary"):
        plain.take(made(y=[0, 1]))


def test_texts_to_predict() -> None:
    facts = InputSpec.create(made())
    rows = new_rows(facts, ["ab", "abcx", "b"])
    assert rows.x.tolist() == [[2, 3, 0], [3, 4, 1], [3, 0, 0]]
    assert "tokens outside the vocabulary of the training data, read as <unk>: 1" in rows.notes[0]
    assert new_rows(facts, np.array([[2, 3]])).x.tolist() == [[2, 3, 0]]
    for bad, words in (
        ([[1, 2, 3, 4]], "sequences have 4 tokens, but the model accepts at most 3"),
        ([[1, 7]], "but the vocabulary has 5"),
        ([[0.5, 1.0]], "must be texts, or tokens"),
        ([1, 2], "must be texts, or tokens"),
    ):
        with pytest.raises((DataError, ConfigError), match=words):
            new_rows(facts, np.array(bad))
