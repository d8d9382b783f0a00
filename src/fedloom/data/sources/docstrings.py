"""The docstrings of Python's standard library, a module being a speaker: text without a download."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import Source
from fedloom.data.text import NO_LABEL, encoded, vocabulary_of
from fedloom.errors import DataError, NoSamples

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
RARE = 20
"""A character that occurs less often in all texts is the unknown token."""


class Docstrings(Source):
    """Next character of docstrings of Python's standard library; modules are the natural clients.

    The texts are those of the Python that runs: another version gives other data. A sample is a window of ``length``
    characters, the last one of a module shorter; every position has the next character as its label.
    """

    length: int = Field(default=64, ge=2, description="characters of a sample")
    most: int = Field(default=4000, ge=2, description="characters kept of a module")
    least: int = Field(default=1000, ge=2, description="modules with fewer characters are left out")
    modules: Literal["all", "even", "odd"] = Field(
        default="all", description="which modules, in the order of their names; the vocabulary is that of all texts"
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Single files of the standard library that have enough text, private ones left out."""
        whole = _texts()
        texts = {name: text[: self.most] for name, text in whole.items() if len(text) >= self.least}
        if not texts:
            raise NoSamples(f"docstrings: no module has {self.least} characters of them; lower least")
        vocabulary = vocabulary_of(whole.values(), "character", least=RARE)
        names = [n for k, n in enumerate(texts) if self.modules == "all" or k % 2 == (self.modules == "odd")]
        parts = [windows(texts[name], vocabulary, self.length) for name in names]
        users = torch.arange(len(names)).repeat_interleave(torch.tensor([len(x) for x, _ in parts]))
        x, y = (torch.cat(of) for of in zip(*parts, strict=True))
        return Dataset(
            "docstrings",
            x,
            y,
            classes=vocabulary[2:],
            columns={"module": users},
            levels={"module": tuple(names)},
            users=users,
            user_names=tuple(names),
            vocabulary=vocabulary,
        )


def windows(text: str, vocabulary: tuple[str, ...], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A text in windows: tokens and next tokens, ``[n, length]`` each; next tokens count from entry 2 on."""
    (tokens,) = encoded([text], vocabulary, len(text))
    rows = -(-(len(tokens) - 1) // length)
    x, y = torch.zeros(rows * length, dtype=torch.int32), torch.full((rows * length,), NO_LABEL)
    x[: len(tokens) - 1], y[: len(tokens) - 1] = tokens[:-1], (tokens[1:].long() - 2).clamp(min=NO_LABEL)
    x, y = x.view(rows, length), y.view(rows, length)
    labelled = (y >= 0).any(1)
    return x[labelled], y[labelled]


@cache
def _texts() -> dict[str, str]:
    """The docstrings of every module that is one file, by its name."""
    files = [file for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if file.name[0] != "_"]
    if not files:
        raise DataError("docstrings: this Python comes without the source of its standard library; use another source")
    return {file.stem: _docstrings(file) for file in files}


def _docstrings(file: Path) -> str:
    found = (ast.get_docstring(node) for node in _documented(ast.parse(file.read_bytes())))
    return "\n".join(text for text in found if text)


def _documented(node: Documented) -> Iterator[Documented]:
    """A module, class or function, and what is defined in it."""
    yield node
    for inner in node.body:
        if isinstance(inner, Documented):
            yield from _documented(inner)
