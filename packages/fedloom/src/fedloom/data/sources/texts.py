"""Texts grouped by speaker or author: a user's table, LEAF's Shakespeare and Sentiment140, and Python docstrings.

Caldas et al. 2019, LEAF: a benchmark for federated settings, arXiv 1812.01097.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset, raise_data_problems
from fedloom.data.sources._base import FileSource, Source, locate, name_file_in_errors
from fedloom.data.sources.detect import detect_source
from fedloom.data.sources.leaf import (
    Floats,
    Leaf,
    LeafUserCollector,
    collect_user_samples,
    holds_json,
    make_user_dataset,
)
from fedloom.data.sources.table.levels import LevelCodeCollector
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.sources.tabular import Csv
from fedloom.data.text import NO_LABEL, Level, build_vocabulary, encode_texts, tokenize_text
from fedloom.errors import ConfigError, DataError, NoSamples
from fedloom.hints import suggest_nearest

TEXT_FIELD_INDEX = 4
"""Index of the text in a Sentiment140 tweet, whose columns are id, date, query, user and text."""


class Texts(FileSource):
    """Texts in a CSV or Parquet table, each with a class.

    A column may contain the client of each text.
    """

    text: str = Field(description="name of the text column")
    target: str | None = Field(default=None, description="name of the class column (default: the last column)")
    client_column: str | None = Field(default=None, description="name of the column that identifies each text's client")
    separator: str = Field(
        default=",", min_length=1, max_length=1, description="character that separates the cells of a CSV file"
    )
    level: Level = Field(
        default="word", description="tokenization unit: a word or punctuation mark, or a single character"
    )
    length: int = Field(
        default=64,
        ge=1,
        description="maximum number of tokens per text (the first words or the last characters are kept)",
    )
    tokens: int = Field(default=10_000, ge=3, description="maximum vocabulary size. The most frequent tokens are kept")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all rows, and build the vocabulary from all texts."""
        texts, codes, where = self._columns(data_dir, labelled=True)
        (y, classes), (users, names) = codes[0], codes[1] if self.client_column is not None else (None, ())
        vocabulary = build_vocabulary(texts, self.level, self.tokens)
        with name_file_in_errors(Path(where)):
            return Dataset(
                Path(where).stem,
                encode_texts(
                    texts, vocabulary, min(self.length, max(len(tokenize_text(t, self.level)) for t in texts))
                ),
                y,
                "binary" if len(classes) == 2 else "classification",
                classes,
                columns={} if users is None else {str(self.client_column): users},
                levels={} if users is None else {str(self.client_column): names},
                users=users,
                user_names=names,
                vocabulary=vocabulary,
            )

    def rows(self, data_dir: str | Path | None = None) -> tuple[list[str], list[str] | None]:
        """Return all texts, with or without labels, and their clients, or None if no column identifies the clients.

        Raises:
            DataError: the table cannot be read (see `load`).
        """
        texts, codes, _ = self._columns(data_dir, labelled=False)
        return texts, [codes[0][1][k] for k in codes[0][0].tolist()] if codes else None

    def _columns(
        self, data_dir: str | Path | None, labelled: bool
    ) -> tuple[list[str], list[tuple[torch.Tensor, tuple[str, ...]]], str]:
        """Return the texts, codes and levels of the label and the clients, and the name of the file."""
        place = locate("texts", self.path, data_dir, ("texts",), lambda p: True)
        kind = detect_source(place)
        if not issubclass(kind, TableSource):
            raise DataError(f"{place} is not a table. Texts need a CSV or Parquet file with a column of texts")
        table = kind(path=str(place), **({"separator": self.separator} if kind is Csv else {}))
        with table.open() as raw:
            label = (next(reversed(raw.names), None) if self.target is None else self.target) if labelled else None
            roles = [c for c in (label, self.client_column) if c is not None and (labelled or c in raw.names)]
            if absent := [c for c in (self.text, *roles) if c not in raw.names]:
                raise ConfigError(f"{place} has no column {absent[0]!r}; {suggest_nearest(absent[0], raw.names)}")
            if self.text in roles or len(set(roles)) < len(roles):
                raise ConfigError(
                    f"{place}: text, target and client_column must be three different columns, got "
                    f"{[self.text, *roles]}"
                )
            texts, coded = [], {c: LevelCodeCollector() for c in roles}
            for start, column, cells in raw.cells:
                empty = np.array([cell is None or not str(cell).strip() for cell in cells])
                if empty.any() and column in (self.text, *roles):
                    what = f"row {raw.problems.first + start + int(empty.argmax())}, column {column!r}: empty"
                    raw.problems.add("empty", column, what, [None] * int(empty.sum()), "fill it, or leave the row out")
                if column == self.text:
                    texts += [str(cell) for cell in cells]
                elif column in coded:
                    coded[column].add(cells, empty)
            raise_data_problems(raw.problems.where, raw.problems.sentences())
        if not texts:
            raise NoSamples(f"{place} contains no rows below the header, so the table is empty")
        coded_columns = [codes.build_codes() for codes in coded.values()]
        return texts, [(torch.from_numpy(code).long(), names) for code, names in coded_columns], str(place)


class _SpeakerLineCollector(LeafUserCollector):
    """Lines spoken by one speaker, each with the character that follows it."""

    wanted = "characters. Every sample needs the one character that follows its text"

    def _features(self, rows: list[Any]) -> NDArray[np.generic] | str:
        if not all(isinstance(row, str) and row for row in rows):
            return "has x that are not texts. Every sample needs a text"
        return np.array(rows, object)[:, None]

    def _labels(self, listed: Any) -> Floats | None:
        if not all(isinstance(value, str) and len(value) == 1 for value in listed):
            return None
        return np.array([ord(value) for value in listed], np.float64)

    def _check_labels(self, y: Floats, user: str, where: str) -> None:
        """Accept any character as a label."""


class _TweetCollector(LeafUserCollector):
    """Tweets of a user, each with a sentiment: 0 is negative, and 1 or 4 is positive."""

    def _features(self, rows: list[Any]) -> NDArray[np.generic] | str:
        fits = all(
            isinstance(row, list) and len(row) > TEXT_FIELD_INDEX and isinstance(row[TEXT_FIELD_INDEX], str)
            for row in rows
        )
        if not fits:
            return f"has x that are no tweets. Every sample must be a list with its text at index {TEXT_FIELD_INDEX}"
        return np.array([row[TEXT_FIELD_INDEX] for row in rows], object)[:, None]

    def _labels(self, listed: Any) -> Floats | None:
        return super()._labels([int(v) if isinstance(v, str) and v.isdecimal() else v for v in listed])

    def _check_labels(self, y: Floats, user: str, where: str) -> None:
        if strange := sorted(set(y.tolist()) - {0, 1, 4}):
            raise DataError(
                f"{where}: user {user!r} has the label {strange[0]:g}. The label of a tweet must be 0, 1 or 4"
            )


class Shakespeare(FileSource):
    """Shakespeare's plays by speaker (LEAF). The task is to predict the next character of a text.

    The speakers are the natural clients.
    """

    length: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of characters per text, counted from the end (default: all characters; LEAF: 80)",
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the samples of all speakers.

        The classes are the characters that occur in the texts, and each character is a token.
        """
        place = locate("Shakespeare", self.path, data_dir, ("shakespeare",), holds_json)
        users = collect_user_samples(place, "", _SpeakerLineCollector(Leaf(), None))
        texts, following = users.x[:, 0].tolist(), [chr(int(code)) for code in users.y]
        vocabulary = build_vocabulary([*texts, *following], "character")
        code = {character: k for k, character in enumerate(vocabulary[2:])}
        y = torch.tensor([code[character] for character in following])
        x = encode_texts(texts, vocabulary, self.length or max(map(len, texts)))
        return make_user_dataset(
            place, users, "shakespeare", "speaker", x, y, "classification", vocabulary[2:], vocabulary
        )


class Sent140(FileSource):
    """Sentiment140 by user (LEAF). The task is to predict whether the sentiment of a tweet is positive.

    The users are the natural clients.
    """

    length: int = Field(
        default=25, ge=1, description="maximum number of words per tweet, counted from the start (LEAF: 25)"
    )
    words: int = Field(default=10_000, ge=3, description="maximum vocabulary size. The most frequent words are kept")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the samples of all users. The tokens are words and punctuation marks in lower case."""
        place = locate("Sent140", self.path, data_dir, ("sent140",), holds_json)
        users = collect_user_samples(place, "", _TweetCollector(Leaf(), None))
        texts = users.x[:, 0].tolist()
        vocabulary = build_vocabulary(texts, "word", self.words)
        x, y = encode_texts(texts, vocabulary, self.length), torch.from_numpy((users.y > 0).astype(np.int64))
        return make_user_dataset(place, users, "sent140", "user", x, y, "binary", ("negative", "positive"), vocabulary)


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MIN_CHARACTER_COUNT = 20
"""Minimum number of occurrences of a character in the vocabulary. Rarer characters become the unknown token."""


class Docstrings(Source):
    """Docstrings of Python's standard library. The task is to predict the next character.

    The modules are the natural clients.

    The texts depend on the installed version of Python, so a different version yields different data. Each sample is a
    window of ``length`` characters. The last window of a module may be shorter. The label of each position is the next
    character.
    """

    length: int = Field(default=64, ge=2, description="number of characters per sample")
    max_characters: int = Field(default=4000, ge=2, description="maximum number of characters kept per module")
    min_characters: int = Field(
        default=1000, ge=2, description="minimum module size in characters. Smaller modules are omitted"
    )
    modules: Literal["all", "even", "odd"] = Field(
        default="all",
        description="indices of the modules to use, in the list sorted by name. The vocabulary covers all modules",
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the samples from all public single-file modules with enough text."""
        whole = _library_docstrings()
        texts = {name: text[: self.max_characters] for name, text in whole.items() if len(text) >= self.min_characters}
        if not texts:
            raise NoSamples(
                f"docstrings: no module has {self.min_characters} characters of docstrings. Lower `min_characters`"
            )
        vocabulary = build_vocabulary(whole.values(), "character", least=MIN_CHARACTER_COUNT)
        names = [n for k, n in enumerate(texts) if self.modules == "all" or k % 2 == (self.modules == "odd")]
        parts = [text_windows(texts[name], vocabulary, self.length) for name in names]
        users = torch.arange(len(names)).repeat_interleave(torch.tensor([len(x) for x, _ in parts]))
        x, y = (torch.cat(of) for of in zip(*parts, strict=True))
        return Dataset(
            "docstrings", x, y, classes=vocabulary[2:], columns={"module": users}, levels={"module": tuple(names)},
            users=users, user_names=tuple(names), vocabulary=vocabulary,
        )  # fmt: skip


def text_windows(text: str, vocabulary: tuple[str, ...], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return consecutive windows of a text as tokens, and the next token for each position, ``[n, length]`` each.

    The next tokens are numbered from entry 2 of the vocabulary. Other next tokens have no label.
    """
    (tokens,) = encode_texts([text], vocabulary, len(text))
    rows = -(-(len(tokens) - 1) // length)
    x, y = torch.zeros(rows * length, dtype=torch.int32), torch.full((rows * length,), NO_LABEL)
    x[: len(tokens) - 1], y[: len(tokens) - 1] = tokens[:-1], (tokens[1:].long() - 2).clamp(min=NO_LABEL)
    x, y = x.view(rows, length), y.view(rows, length)
    labelled = (y >= 0).any(1)
    return x[labelled], y[labelled]


@cache
def _library_docstrings() -> dict[str, str]:
    """Return the docstrings of all single-file modules in the standard library, keyed by module name."""
    files = [file for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if file.name[0] != "_"]
    if not files:
        raise DataError(
            "docstrings: this Python installation does not include the source of its standard library. "
            "Use a different source"
        )
    return {file.stem: _file_docstrings(file) for file in files}


def _file_docstrings(file: Path) -> str:
    docstrings = (ast.get_docstring(node) for node in _documented_nodes(ast.parse(file.read_bytes())))
    return "\n".join(text for text in docstrings if text)


def _documented_nodes(node: Documented) -> Iterator[Documented]:
    """Yield a module, class or function, and every class and function nested in it."""
    yield node
    for inner in node.body:
        if isinstance(inner, Documented):
            yield from _documented_nodes(inner)
