"""The index: answers without torch, equal to those of the classes; a cache that is damaged or missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fedloom import cache, rundir
from fedloom.errors import ConfigError, FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import cards, editors, index, parse, schema

SLOW = ("torch", "numpy", "scipy", "sklearn", "pyarrow", "altair", "numba", "PIL")
"""What no answer of the index may import."""
CALLS = f"""
import contextlib, io, json, sys
from typer.testing import CliRunner
from fedloom.lab.cli import app

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
        index.read_index()
    return folder


DOCUMENT: dict[str, Any] = {"data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"round": 3}, "unknown key 'round'; did you mean 'rounds'?"),
    "unknown key of a table": ({"local": {"learning_rat": 0.1}}, "[local]: unknown key 'learning_rat'; "),
    "wrong type": ({"rounds": "many"}, "rounds: input should be a valid integer, got 'many' (rounds: "),
    "out of range": ({"local": {"lr": -1.0}}, "[local]: lr: input should be greater than "),
    "two at the top": ({"rounds": 0, "seeds": []}, "seeds: "),
    "no table": ({"sampler": 3}, "[sampler]: must be a table, got 3; write sampler = { kind = KIND }; allowed: "),
    "a kind in place of a table": (
        {"aggregator": "median"},
        "[aggregator]: must be a table, got 'median'; write aggregator = { kind = \"median\" }",
    ),
    "a kind in place of a method's table": (
        {"method": [{"algorithm": "fedavg", "upload_transform": "qsgdd"}]},
        "[[method]] 1: upload_transform: must be a table, got 'qsgdd'; write upload_transform = { kind = KIND "
        "}; did you mean 'qsgd'?",
    ),
    "a name in place of data": ({"data": "digits"}, "[data]: must be a table, got 'digits'; write data = { source = "),
    "a value in place of a table of keys": (
        {"local": 0.1},
        "[local]: must be a table, got 0.1; write local = { KEY = VALUE }; keys: lr, ",
    ),
    "one of several types": (
        {"client_weights": "size"},
        "client_weights: input should be 'samples', 'uniform' or 'groups', or a list, got 'size' (",
    ),
    "an item of one of several types": (
        {"client_weights": [1.0, -1.0]},
        "client_weights.1: input should be greater than or equal",
    ),
    "a key of one of several types": (
        {"method": [{"algorithm": "fedadmm", "server_lr": "all"}]},
        "[[method]] 1: server_lr: input should be a valid number, or 'fraction', got 'all' (server_lr: ",
    ),
    "no data": ({"data": {}}, "[data] needs source: the name of a data set, or a path. Names: adult,"),
    "unknown data": ({"data": {"source": "digit"}}, "[data]: unknown data set 'digit'; did you mean 'digits'?"),
    "no such path": ({"data": {"source": "no/such.csv"}}, "[data]: no/such.csv: no such file or folder"),
    "unknown kind": ({"partition": {"kind": "dirichlt"}}, "[partition]: unknown partition kind 'dirichlt'; did you"),
    "kind of a type": ({"sampler": {"kind": [1]}}, "[sampler]: unknown sampler kind [1]; allowed: "),
    "no kind": ({"aggregator": {"f": 1}}, "[aggregator]: kind is missing. Allowed:"),
    "nested": (
        {"tune": {"space": {"fedavg": {"local.lr": {"low": "a", "high": 1}}}}},
        "[tune]: space.fedavg.local.lr.low: ",
    ),
    "tagged": (
        {"aggregator": {"kind": "mean", "pre": [{"kind": "clip", "bound": 0}]}},
        "[aggregator]: pre.0.clip.bound: input should be greater than 0, got 0",
    ),
    "no methods": ({"method": []}, "at least one [[method]] is needed"),
    "no table of a method": ({"method": [3]}, "[[method]] 1: must be a table, got 3; for example [[method]] and"),
    "unknown method": ({"method": [{"algorithm": "fedavgg"}]}, "[[method]] 1: unknown algorithm 'fedavgg'; did you"),
    "own key of a method": ({"method": [{"algorithm": "flame", "rh": 1}]}, "[[method]] 1: unknown key 'rh'; did you"),
    "of a preset": (
        {"method": [{"algorithm": "power-of-choice", "candidates": 0}]},
        "[[method]] 1: candidates: input should be greater than or equal to 1, got 0",
    ),
    "own table of a method": (
        {"method": [{"algorithm": "fedavg", "local": {"lr": True}}]},
        "[[method]] 1: local: lr: input should be a valid number, got True",
    ),
    "own table that is none": (
        {"method": [{"algorithm": "fedavg", "local": 3}]},
        "[[method]] 1: local: must be a table, got 3",
    ),
    "misplaced in a method's table": (
        {"method": [{"algorithm": "fedavg", "local": {"fraction": 1}}]},
        "[[method]] 1: local: unknown key 'fraction'; it belongs in [sampler] or [attack] or "
        "[upload_transform]: fraction = 1",
    ),
    "rounds of a method": ({"method": [{"algorithm": "fedavg", "rounds": 0}]}, "[[method]] 1: rounds: input should be"),
    "constants": ({"method": [{"algorithm": "fedavg", "defaults": "x"}]}, "[[method]] 1: defaults: input should be "),
    "label": ({"method": [{"algorithm": "fedavg", "label": 3}]}, "[[method]] 1: label: input should be a valid string"),
    "labels": ({"method": [{"algorithm": "fedavg"}, {"algorithm": "fedavg"}]}, "two methods have the label 'fedavg'"),
    "of a paper": ({"model": {"kind": "flame-mlp", "hidden": [0]}}, "[model]: hidden.0: input should be greater than"),
}
"""Documents that no experiment can have, and the beginning of the sentence that refuses each."""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_document_is_refused_in_a_sentence(case: str) -> None:
    change, sentence = WRONG[case]
    with pytest.raises(FedloomError) as refused:
        parse({**DOCUMENT, **change}, "a.toml")
    assert str(refused.value).startswith(f"a.toml: {sentence}")
    assert str(refused.value).count("a.toml: ") == (2 if case == "two at the top" else 1)


@pytest.mark.needs("fedloom_sites")  # its child processes see every installed package
def test_answers_equal_the_slow_ones_and_import_nothing_slow(kept: Path) -> None:
    calls = [["--help"], ["list"], ["list", "partitions"], ["schema"], ["describe", "flam"]]
    calls += [["describe", name] for name in cards.all_method_cards()]
    before = sorted(kept.iterdir())
    found, loaded = answers(calls, FEDLOOM_CACHE=str(kept))
    assert loaded == []
    assert sorted(kept.iterdir()) == before

    overview, listed, partitions, schema, missing, *rest = found
    assert overview[0] == 0
    lines = [
        line
        for family, methods in cards.list_families().items()
        for line in (family, *(f"  {n:<22}{x}" for n, x in methods))
    ]
    assert listed == (0, "\n".join([*lines, ""]))
    assert partitions[0] == 0
    assert [line.split()[0] for line in partitions[1].splitlines()] == [*cards.PART_KINDS["partitions"]]
    assert schema == (0, editors.json_schema() + "\n")
    assert missing[0] == 2
    assert "did you mean 'flame'" in missing[1]
    assert rest == [(0, card + "\n") for card in cards.all_method_cards().values()]


@pytest.mark.parametrize("command", [["run"], ["tune"], ["deploy", "init"], ["run", "--workers", "2"]])
def test_commands_refuse_a_wrong_file_with_one_sentence(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(tomli_w.dumps({**DOCUMENT, "round": 3}))
    with pytest.raises(ConfigError) as refused:
        parse({**DOCUMENT, "round": 3}, str(file))
    result = CliRunner().invoke(app, [*command, str(file)])
    line = file.read_text().splitlines().index("round = 3") + 1
    said = str(refused.value).replace(f"{file}: ", f"{file}:{line}: ", 1)
    assert (result.exit_code, result.output) == (2, f"error: {said}\n")
    assert sorted(tmp_path.iterdir()) == [file]


def test_without_a_cache_the_classes_answer_and_one_is_made(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["describe", "flame"])
    assert (result.exit_code, result.output) == (0, cards.method_card("flame") + "\n")
    assert (tmp_path / index.INDEX_FILE).read_bytes() == (kept / index.INDEX_FILE).read_bytes()


@pytest.mark.parametrize("damage", ["empty", "torn", "changed", "of other sources", "a folder", "a file", "no device"])
def test_a_cache_that_is_no_use_changes_no_answer(
    kept: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (kept / index.INDEX_FILE).read_bytes()
    bad = {
        "empty": b"",
        "torn": good[: len(good) // 2],
        "changed": good.replace(b"fedavg", b"fedavh", 1),
        "of other sources": cache._cache_header("other", b"{}") + b"{}",
    }
    place = tmp_path / "cache"
    if damage == "a folder":
        (place / index.INDEX_FILE).mkdir(parents=True)
    elif damage == "a file":
        place.touch()
    elif damage == "no device":
        place = Path("/dev/null/cache")
    else:
        place.mkdir()
        (place / index.INDEX_FILE).write_bytes(bad[damage])
    monkeypatch.setenv("FEDLOOM_CACHE", str(place))
    assert cache.read_cached_text(index.INDEX_FILE, index._digest_sources()) is None
    result = CliRunner().invoke(app, ["describe", "flame"])
    assert (result.exit_code, result.output) == (0, cards.method_card("flame") + "\n")
    if damage in bad:
        assert (place / index.INDEX_FILE).read_bytes() == good
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_CACHE", raising=False)
    for name, folder in (("XDG_CACHE_HOME", tmp_path / "a"), ("HOME", tmp_path / "b" / ".cache")):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(name, str(folder.parent if name == "HOME" else folder))
        cache.write_cached_text("x", "key", "text")
        assert (folder / "fedloom" / "x").exists()
        assert cache.read_cached_text("x", "key") == "text"
        assert cache.read_cached_text("x", "another key") is None
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "c"))
    assert cache.read_cached_text("x", "key") is None


def test_changed_sources_make_another_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fedloom"
    (package / "experiment").mkdir(parents=True)
    monkeypatch.setattr(index, "__file__", str(package / "experiment" / "index.py"))
    seen = {index._digest_sources()}
    for k, text in enumerate(("a = 1", "a = 12", "a = 13")):
        (package / "new.py").write_text(text)
        os.utime(package / "new.py", (k, k))
        seen.add(index._digest_sources())
    monkeypatch.setattr(cache, "version", lambda _library: "0")
    seen.add(index._digest_sources())
    assert len(seen) == 5


def test_own_code_has_a_card_and_its_keys_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_average.py").write_text(
        '"""Own: FedAvg by another name."""\nfrom fedloom.algorithms import FedAvg\nclass Own(FedAvg):\n    pass\n'
    )
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["describe", "own_average:Own"]).output.startswith("Own: FedAvg by another name.")
    for key, cure in (("servr_lr", "did you mean 'server_lr'?"), ("lr", "it belongs in [local]: lr = 1.0")):
        with pytest.raises(ConfigError) as refused:
            parse({**DOCUMENT, "method": [{"algorithm": "own_average:Own", key: 1.0}]})
        assert str(refused.value).startswith(f"experiment: [[method]] 1: unknown key {key!r}; {cure}")


def test_the_schema_is_short_and_every_link_ends(kept: Path) -> None:
    text = editors.json_schema()
    schema = json.loads(text)
    assert len(text) < 270_000

    def links(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from ([part["$ref"]] if isinstance(part.get("$ref"), str) else [])
            yield from (link for value in part.values() for link in links(value))
        elif isinstance(part, list):
            yield from (link for value in part for link in links(value))

    found = set(links(schema))
    assert {
        f"#/$defs/{name}" for name in ("local", "sampler", "aggregation_weights", "aggregator", "upload_transform")
    } <= found
    assert {link.removeprefix("#/$defs/") for link in found} <= set(schema["$defs"])


def test_readers_without_torch_have_the_same_tables() -> None:
    assert tuple(schema.SETTING_TABLES) == rundir.EXPERIMENT_TABLES


def test_settings_of_an_experiment_make_the_same_experiment() -> None:
    settings = parse(DOCUMENT).settings()
    assert parse(settings).settings() == settings


def test_a_run_leaves_big_libraries_that_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(tomli_w.dumps({**DOCUMENT, "rounds": 2}))
    code = (
        "import sys; from pathlib import Path; from fedloom.lab.experiment import Plan, read\n"
        "(outcome,) = Plan(read(Path('two.toml')), Path('out')).run(page=False)\n"
        "print(outcome.status, [m for m in ('sklearn', 'PIL', 'optuna', 'flwr', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "done []\n"
