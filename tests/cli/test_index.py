"""The index: answers and refusals without torch, equal to those of the classes; a cache that is damaged or missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fedloom import cache
from fedloom.cli import app
from fedloom.errors import ConfigError, InvalidValue
from fedloom.experiment import cards, editors, index, parse
from fedloom.experiment.check import Grammar, check
from fedloom.experiment.schema import GRAMMAR
from fedloom.experiment.shapes import Shape, plain
from fedloom.values import make

SLOW = ("torch", "numpy", "scipy", "sklearn", "pyarrow", "altair", "numba", "PIL")
"""What no answer of the index may import."""
CALLS = f"""
import contextlib, io, json, sys
from typer.testing import CliRunner
from fedloom.cli import app

def call(*args):
    result = CliRunner().invoke(app, list(args))
    return [result.exit_code, result.output]

found = [call(*args) for args in json.load(sys.stdin)]
print(json.dumps([found, [m for m in {SLOW!r} if m in sys.modules]]))
"""


def answers(calls: list[list[str]], **environment: str) -> tuple[list[tuple[int, str]], list[str]]:
    """(exit code, output) of commands in a fresh process, and what it imported of `SLOW`."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    found, loaded = json.loads(done.stdout)
    return [(code, text) for code, text in found], loaded


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the index."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_CACHE", str(folder))
        index.index()
    return folder


DOCUMENT: dict[str, Any] = {"data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}
WRONG: dict[str, dict[str, Any]] = {
    "unknown key": {"round": 3},
    "unknown key of a table": {"local": {"learning_rate": 0.1}},
    "wrong type": {"rounds": "many"},
    "out of range": {"local": {"lr": -1.0}},
    "no table": {"sampler": 3},
    "no data": {"data": {}},
    "unknown data": {"data": {"source": "digit"}},
    "unknown kind": {"partition": {"kind": "dirichlt"}},
    "no kind": {"aggregator": {"f": 1}},
    "nested": {"tune": {"space": {"fedavg": {"local.lr": {"low": "a", "high": 1}}}}},
    "tagged": {"aggregator": {"kind": "mean", "pre": [{"kind": "clip", "tau": 0}]}},
    "no methods": {"method": []},
    "unknown method": {"method": [{"algorithm": "fedavgg"}]},
    "own key of a method": {"method": [{"algorithm": "flame", "rh": 1}]},
    "of a preset": {"method": [{"algorithm": "power-of-choice", "candidates": 0}]},
    "own table of a method": {"method": [{"algorithm": "fedavg", "local": {"lr": True}}]},
    "rounds of a method": {"method": [{"algorithm": "fedavg", "rounds": 0}]},
    "label": {"method": [{"algorithm": "fedavg", "label": 3}]},
    "labels": {"method": [{"algorithm": "fedavg"}, {"algorithm": "fedavg"}]},
    "of a paper": {"model": {"kind": "flame-mlp", "hidden": [0]}},
}


def sentence(document: Mapping[str, Any], where: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(document, where)
    return str(refused.value)


def test_answers_equal_the_slow_ones_and_import_nothing_slow(kept: Path, tmp_path: Path) -> None:
    files = []
    for k, change in enumerate(WRONG.values()):
        files.append(tmp_path / f"{k}.toml")
        files[-1].write_text(tomli_w.dumps({**DOCUMENT, **change}))
    calls = [["list"], ["schema"], ["describe", "flam"]]
    calls += [["describe", name] for name in cards.cards()]
    calls += [["run", str(file)] for file in files]
    calls += [["tune", str(files[0])], ["deploy", "init", str(files[0])], ["run", str(files[0]), "--workers", "2"]]
    before = sorted(kept.iterdir())
    found, loaded = answers(calls, FEDLOOM_CACHE=str(kept))
    assert loaded == []
    assert sorted(kept.iterdir()) == before

    listed, schema, missing, *rest = found
    lines = [
        line
        for family, methods in cards.families().items()
        for line in (family, *(f"  {n:<22}{x}" for n, x in methods))
    ]
    assert listed == (0, "\n".join([*lines, ""]))
    assert schema == (0, editors.json_schema() + "\n")
    assert missing[0] == 2
    assert "did you mean 'flame'" in missing[1]
    for (code, text), card in zip(rest, cards.cards().values(), strict=False):
        assert (code, text) == (0, card + "\n")
    refused = rest[len(cards.cards()) :]
    expected = [sentence({**DOCUMENT, **change}, str(file)) for change, file in zip(WRONG.values(), files, strict=True)]
    assert refused == [(2, f"error: {text}\n") for text in [*expected, *expected[:1] * 3]]


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported torch yet, for the index; the rest of this process has."""
    monkeypatch.setattr(index, "sys", SimpleNamespace(modules={}, version=sys.version))


def refusal_and_card(folder: Path) -> list[list[str]]:
    """The commands that ask the index, of a file with an unknown key and of a method."""
    file = folder / "wrong.toml"
    file.write_text(tomli_w.dumps({**DOCUMENT, "round": 3}))
    return [["run", str(file)], ["describe", "flame"]]


def right_answers(folder: Path) -> list[tuple[int, str]]:
    refused = sentence({**DOCUMENT, "round": 3}, str(folder / "wrong.toml"))
    return [(2, f"error: {refused}\n"), (0, cards.card("flame") + "\n")]


def test_without_a_cache_the_classes_answer_and_one_is_made(kept: Path, tmp_path: Path) -> None:
    found, loaded = answers(refusal_and_card(tmp_path), FEDLOOM_CACHE=str(tmp_path))
    assert found == right_answers(tmp_path)
    assert "torch" in loaded
    assert (tmp_path / index.NAME).read_bytes() == (kept / index.NAME).read_bytes()


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("damage", ["empty", "torn", "changed", "of other sources", "a folder", "a file", "no device"])
def test_a_cache_that_is_no_use_changes_no_answer(
    kept: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (kept / index.NAME).read_bytes()
    bad = {
        "empty": b"",
        "torn": good[: len(good) // 2],
        "changed": good.replace(b"fedavg", b"fedavh", 1),
        "of other sources": cache._head("other", b"{}") + b"{}",
    }
    place = tmp_path / "cache"
    if damage == "a folder":
        (place / index.NAME).mkdir(parents=True)
    elif damage == "a file":
        place.touch()
    elif damage == "no device":
        place = Path("/dev/null/cache")
    else:
        place.mkdir()
        (place / index.NAME).write_bytes(bad[damage])
    monkeypatch.setenv("FEDLOOM_CACHE", str(place))
    assert index._find() is None
    for words, right in zip(refusal_and_card(tmp_path), right_answers(tmp_path), strict=True):
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, result.output) == right
    if damage in bad:
        assert (place / index.NAME).read_bytes() == good
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_CACHE", raising=False)
    for name, folder in (("XDG_CACHE_HOME", tmp_path / "a"), ("HOME", tmp_path / "b" / ".cache")):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(name, str(folder.parent if name == "HOME" else folder))
        cache.keep("x", "key", "text")
        assert (folder / "fedloom" / "x").exists()
        assert cache.find("x", "key") == "text"
        assert cache.find("x", "another key") is None
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "c"))
    assert cache.find("x", "key") is None


def test_changed_sources_make_another_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fedloom"
    (package / "experiment").mkdir(parents=True)
    monkeypatch.setattr(index, "__file__", str(package / "experiment" / "index.py"))
    seen = {index._sources()}
    for k, text in enumerate(("a = 1", "a = 12", "a = 13")):
        (package / "new.py").write_text(text)
        os.utime(package / "new.py", (k, k))
        seen.add(index._sources())
    monkeypatch.setattr(index, "version", lambda _library: "0")
    seen.add(index._sources())
    assert len(seen) == 5


def test_own_code_is_left_to_the_slow_way(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        '"""Own: FedAvg by another name."""\nfrom fedloom.algorithms import FedAvg\nclass Own(FedAvg):\n    pass\n'
    )
    file = tmp_path / "own.toml"
    file.write_text(tomli_w.dumps({**DOCUMENT, "method": [{"algorithm": "own:Own", "servr_lr": 1.0}]}))
    calls = [["describe", "own:Own"], ["run", str(file)]]
    found, loaded = answers(
        calls, FEDLOOM_CACHE=str(kept), PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    assert found[0][1].startswith("Own: FedAvg by another name.")
    assert found[1][0] == 2
    assert "[[method]] 1: unknown key 'servr_lr'; did you mean 'server_lr'?" in found[1][1]
    assert "torch" in loaded


def leaves(grammar: Grammar) -> Iterator[tuple[str, Any]]:
    yield "head", grammar.head
    yield "own", grammar.own
    yield from grammar.method.items()
    for name, table in grammar.tables.items():
        yield from ((f"{name}-{kind}", leaf) for kind, leaf in table.kinds.items())


LEAVES = list(leaves(GRAMMAR))


def said(value: Any, options: dict[str, Any], fields: Mapping[str, Any]) -> str:
    """What a class, or a shape, refuses options with; empty if it does not."""
    try:
        make(value, options, "here", fields)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "value"), LEAVES, ids=[name for name, _ in LEAVES])
def test_shapes_refuse_as_the_classes_do(name: str, value: Any) -> None:
    """Every field, with values of every type and size: the same sentence, unless code of the class is what refuses."""
    stored = json.loads(json.dumps(plain(value)))
    shape = Shape(stored)
    needed = {k for part in stored["parts"] for k, f in part["schema"]["schema"]["fields"].items() if not f["optional"]}
    refused = 0
    for key in shape.fields:
        for wrong in (-(10**9), 10**9, 2**70, 0, 0.5, -1e300, True, "text", "", [], [-1], ["x", 0], {}, {"kind": "x"}):
            options = {**dict.fromkeys(needed, "1"), key: wrong}
            by_class = said(value, options, shape.fields)
            by_shape = said(shape._validate, options, shape.fields)
            refused += bool(by_shape)
            if by_shape:
                assert by_shape == by_class, (key, wrong)
            elif by_class:
                with pytest.raises(ConfigError) as error:
                    value(**options)
                if isinstance(error.value, InvalidValue):
                    assert code_decides(error.value, stored), (key, wrong, by_class)
    assert refused or not shape.fields


def code_decides(error: InvalidValue, stored: Any) -> bool:
    """Whether an error is one of code of the class, not of pydantic's own checks of the table."""
    return all(e["type"] == "value_error" or _anything(str(e["loc"][0]), stored) for e in error.errors())


def _anything(key: str, stored: Any) -> bool:
    field = next(p["schema"]["schema"]["fields"][key] for p in stored["parts"] if key in p["keys"])
    return '{"type": "any"}' in json.dumps(field)


def test_the_schema_is_short_and_every_link_ends(kept: Path) -> None:
    text = editors.json_schema()
    schema = json.loads(text)
    assert len(text) < 250_000

    def links(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from ([part["$ref"]] if isinstance(part.get("$ref"), str) else [])
            yield from (link for value in part.values() for link in links(value))
        elif isinstance(part, list):
            yield from (link for value in part for link in links(value))

    found = set(links(schema))
    assert {f"#/$defs/{name}" for name in ("local", "sampler", "weigher", "aggregator", "channel")} <= found
    assert {link.removeprefix("#/$defs/") for link in found} <= set(schema["$defs"])


def test_a_right_file_passes_both_ways() -> None:
    stored = json.loads(json.dumps(GRAMMAR.map(plain)))
    assert stored
    check(DOCUMENT, GRAMMAR.map(plain), Shape, "file")
    check(parse(DOCUMENT).settings(), GRAMMAR, Shape.of, "file")


def test_a_run_leaves_big_libraries_that_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(tomli_w.dumps({**DOCUMENT, "rounds": 2}))
    code = (
        "import sys; from pathlib import Path; from fedloom.experiment import Plan, read\n"
        "(outcome,) = Plan(read(Path('two.toml')), Path('out')).run(page=False)\n"
        "print(outcome.status, [m for m in ('sklearn', 'PIL', 'optuna', 'flwr', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "done []\n"
