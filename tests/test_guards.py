"""Every protection has a test that fails without it: the list of them is true, and (slow) each is taken out."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def load_guards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guards", ROOT / "scripts" / "guards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["guards"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


guards = load_guards()
ROWS = guards.guards()


def test_no_two_rows_are_of_one_guard() -> None:
    names = [row.guard for row in ROWS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.guard)
def test_a_row_names_code_and_a_test_that_are_there(row: guards.Guard) -> None:
    text = row.changed()
    if row.file.endswith(".py"):
        ast.parse(text)
    file, _, name = row.test.partition("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
    assert name.partition("[")[0].rpartition("::")[2] in functions


@pytest.mark.slow
@pytest.mark.attack("protections taken out")
@pytest.mark.timeout(2 * guards.SECONDS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.guard)
def test_a_protection_that_is_gone_is_noticed(row: guards.Guard) -> None:
    assert not guards.noticed(row)


@pytest.mark.slow
def test_a_change_that_takes_nothing_out_is_not_noticed() -> None:
    row = ROWS[0]
    same = guards.Guard("nothing", row.file, (row.change[0], row.change[0]), row.test)
    assert "passes without it" in guards.noticed(same)
    gone = guards.Guard("nothing", row.file, row.change, row.test + "_that_is_not_there")
    assert "does not run" in guards.noticed(gone)
