"""Cells of a notebook that are changed and run again: a folder of before gives no result of the new code."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fedloom as fl
from fedloom.errors import RunDirError
from fedloom.imports import read_source_text
from fedloom.models.imported import describe_model

NUMBERS = count()
Cell = Callable[[str], dict[str, Any]]
CLIENTS = [(np.arange(60.0).reshape(30, 2) % (3 + k) - 1, np.arange(30) % 2) for k in range(3)]
HEAD = "import torch, fedloom as fl\nfrom fedloom.algorithms import Delta\nfrom fedloom.local import descend\n"
MINE = """
class Mine(fl.algorithms.FedAvg):
    def client(self, down, rows, work):
        return Delta({} * (descend(down.x, work) - down.x)), rows
"""
NET = """
class Part(torch.nn.Module):
    def forward(self, x):
        return {} * x
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), Part()
        torch.nn.init.ones_(self.first.weight)
        torch.nn.init.ones_(self.first.bias)
    def forward(self, x):
        return self.second(self.first(x))
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Run a cell in the kernel's main module, which has no file, as IPython does; its names."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(source: str) -> dict[str, Any]:
        file = f"<cell {next(NUMBERS)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), main.__dict__)
        return main.__dict__

    run(HEAD)
    return run


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("def loss(o, t): return (o - t).sum()", "def loss(o, t): return (o - t).mean()"),
        ("def inner(o): return o\ndef loss(o, t): return inner(o)", "def inner(o): return 2 * o"),
        ("SCALE = 1\ndef loss(o, t): return SCALE * o", "SCALE = 2"),
        ("SCALE = {'a': 1}\ndef loss(o, t): return SCALE['a'] * o", "SCALE['a'] = 2"),
        ("SCALE = torch.ones(3)\ndef loss(o, t): return SCALE * o", "SCALE = torch.zeros(3)"),
        ("SCALE = 1\ndef loss(o, t): return [SCALE for _ in o]", "SCALE = 2"),
        ("SCALE = 1\nclass Of:\n  def f(self): return SCALE\ndef loss(o, t): return Of().f()", "SCALE = 2"),
        ("class Of:\n  scale = 1\ndef loss(o, t): return Of.scale", "Of.scale = 2"),
        ("class Of:\n  def __call__(self, o, t): return o\nloss = Of()", "Of.__call__ = lambda self, o, t: 2 * o"),
        ("def make(a): return lambda o, t: a * o\nloss = make(1)", "loss = make(2)"),
        ("SCALE = 1\ndef f(a, o, t): return SCALE\nimport functools\nloss = functools.partial(f, 1)", "SCALE = 2"),
    ],
)
def test_what_a_function_uses_of_its_notebook_is_of_its_text(cell: Cell, first: str, second: str) -> None:
    text = read_source_text(cell(first)["loss"])
    assert read_source_text(cell("o = t = UNUSED = 7")["loss"]) == text
    assert read_source_text(cell(second)["loss"]) != text
    assert read_source_text(cell(first)["loss"]) == text


def test_functions_that_use_each_other_have_a_text(cell: Cell) -> None:
    names = cell("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)")
    assert "def odd" in read_source_text(names["even"])


def test_a_module_in_a_module_is_of_its_digest(cell: Cell) -> None:
    whole = "torch.nn.Sequential(Net(), torch.nn.Softmax(1))"
    nets = [cell(f"{NET.format(scale)}\nnet = {whole}")["net"] for scale in (1.0, 1.0, 2.0)]
    first, again, other = (getattr(describe_model(net), "digest", None) for net in nets)
    assert first == again
    assert first != other


@pytest.mark.parametrize("what", ["method", "model", "loss"])
def test_a_folder_gives_no_result_of_changed_code(cell: Cell, what: str, tmp_path: Path) -> None:
    def compared(scale: float) -> Any:
        names = cell(MINE.format(scale if what == "method" else 1.0) + NET.format(scale if what == "model" else 1.0))
        loss = cell(
            f"SCALE = {scale if what == 'loss' else 1.0}\n"
            "def loss(o, t): return SCALE * torch.nn.functional.cross_entropy(o, t)"
        )["loss"]
        choices: dict[str, Any] = {"rounds": 2, "seeds": [0], "progress_bar": False, "task": {"loss": loss}}
        found = fl.compare({"mine": names["Mine"]()}, CLIENTS, names["Net"](), folder=tmp_path, **choices)
        return found.results["mine", 0].final("global", "loss", "train")

    first = compared(1.0)
    assert (compared(1.0) == first).all()
    with pytest.raises(
        RunDirError, match="a different (run|experiment): .*. Choose another folder, or delete this one"
    ) as error:
        compared(3.0)
    assert "--" not in str(error.value)
