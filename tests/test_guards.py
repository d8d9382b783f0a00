"""Every promise of the pages on security has a test, and every protection one that fails without it.

The lists of both are true; the slow tests take each protection out.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

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
ROWS = guards.read_guards()
Claim = dict[str, Any] | str
"""The attack that tests play, and these tests; or a reason why the sentence is no promise."""
CLAIMS: dict[str, dict[str, Claim]] = tomllib.loads((ROOT / "tests" / "claims.toml").read_text())
PROMISE = re.compile(
    r"\b(refuse[sd]?|reject(s|ed)?|never|nothing|cannot|at most|(does|do) not (accept|answer|open|run|use|trust))\b"
)
PAGES = (
    "SECURITY.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("deploy*.md"))),
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("secur*.md"))),
    "docs/differential-privacy.md",
    "docs/norm-bound.md",
)
"""Pages that promise what a deployment does and does not do."""


def sentences() -> Iterator[tuple[str, str]]:
    """The sentences and rows of tables of the pages on security, by the heading that they stand under."""
    for page in PAGES:
        heading = page
        text = re.sub(r"^[ ]*```.*?```", "", (ROOT / page).read_text(), flags=re.S | re.M)
        for block in re.split(r"\n\s*\n", text):
            if block.startswith("#"):
                heading = block.strip("# ") if page != "SECURITY.md" else page
            elif block.startswith("|"):
                yield from ((heading, row) for row in block.splitlines())
            else:
                yield from ((heading, one) for one in re.split(r"(?<=[.:;])\s+(?=\W*[A-Z`])", " ".join(block.split())))


@cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}


def test_every_promise_has_a_test() -> None:
    """A sentence that says that something is refused or never happens stands in the list of claims."""
    promises = [(heading, text) for heading, text in sentences() if PROMISE.search(text)]
    missing = [text for heading, text in promises if not any(words in text for words in CLAIMS.get(heading, ()))]
    assert not missing, "\n".join(missing)


def test_claims_are_on_their_page_and_their_tests_are_there() -> None:
    texts = [*sentences()]
    for heading, claims in CLAIMS.items():
        for words, claim in claims.items():
            assert sum(words in text for where, text in texts if where == heading) == 1, (heading, words)
            for file, _, name in (one.partition("::") for one in claimed_tests(claim)):
                assert name in functions_of(file), (words, name)


def claimed_tests(claim: Claim) -> list[str]:
    return [] if isinstance(claim, str) else claim["tests"]


def test_every_claim_names_the_attack_that_its_tests_play() -> None:
    """Two claims with other tests have other attacks: the name says what the tests try."""
    attacks = dict[str, set[tuple[str, ...]]]()
    for heading, claims in CLAIMS.items():
        for words, claim in claims.items():
            if isinstance(claim, str):
                continue
            assert isinstance(claim, dict), (heading, words)
            assert {*claim} == {"attack", "tests"}, (heading, words)
            assert len(claim["attack"].split()) > 3, (heading, words)
            assert claim["tests"], (heading, words)
            attacks.setdefault(claim["attack"], set()).add(tuple(claim["tests"]))
    assert len(attacks) > 180
    assert {attack for attack, tests in attacks.items() if len(tests) > 1} == set()


def test_no_two_rows_are_of_one_guard() -> None:
    names = [row.guard for row in ROWS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.guard)
def test_a_row_names_code_and_a_test_that_are_there(row: guards.Guard) -> None:
    text = row.remove_guard()
    if row.file.endswith(".py"):
        ast.parse(text)
    file, _, name = row.test.partition("::")
    assert name.partition("[")[0].rpartition("::")[2] in functions_of(file)


@pytest.mark.slow
@pytest.mark.attack("protections taken out")
@pytest.mark.timeout(2 * guards.SECONDS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.guard)
def test_a_protection_that_is_gone_is_noticed(row: guards.Guard) -> None:
    assert not guards.find_problem(row)


@pytest.mark.slow
def test_a_change_that_takes_nothing_out_is_not_noticed() -> None:
    row = ROWS[0]
    same = guards.Guard("nothing", row.file, (row.change[0], row.change[0]), row.test)
    assert "passes without it" in guards.find_problem(same)
    gone = guards.Guard("nothing", row.file, row.change, row.test + "_that_is_not_there")
    assert "does not run" in guards.find_problem(gone)
