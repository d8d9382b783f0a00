"""What a recipe leaves to be chosen is chosen by `fedloom.lab.tune`: every candidate once, scored as a plain run."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_recipe import TINY, tiny
from typer.testing import CliRunner

import fedloom as fl
from fedloom.errors import RunDirError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.events import Event, Listener
from fedloom.lab.tune.search import build_search_space
from fedloom.rundir import get_label
from fedloom_studies.reproduce import Recipe, estimate, read_recipe, read_recipes, reproduce
from fedloom_studies.reproduce.choices import (
    count_rounds,
    edge_keys,
    extend_grids,
    make_search_document,
    method_candidates,
    open_methods,
)
from fedloom_studies.reproduce.execute import PROTOCOL_FILE, parse_closed_document
from fedloom_studies.reproduce.recipe import RECIPE_SCALES, make_recipe, merge_tables
from tests.commands import in_a_fork

ALL = read_recipes()
METHODS = [
    {"algorithm": "fedavg", "choose": {"local.lr": [0.0001, 0.5, 0.05]}},
    {"algorithm": "ditto", "rounds": 2, "choose": {"lam": [0.1], "local.lr": [0.5, 0.01, 0.1]}},
    {"algorithm": "flame", "lam": 1.0},
]


def grid(**more: Any) -> Recipe:
    return make_recipe("tiny", merge_tables(TINY, {"method": METHODS, "choose": {"rounds": 3}, **more}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("choices")
    done = reproduce(grid(), "full", out, seeds=[3])
    assert done is not None
    return out, done


# --- the grids of the recipes


@pytest.mark.parametrize("name", [n for n in ALL if any("choose" in m for m in ALL[n].document["method"])])
def test_a_search_has_the_recipes_grids_and_equal_trials_for_all_methods(name: str) -> None:
    for scale in RECIPE_SCALES:
        for document in ALL[name].make_documents(scale).values():
            if not open_methods(document, {}):
                continue
            search = parse_closed_document(make_search_document(document), name)
            grids = {get_label(m): m["choose"] for m in document["method"] if "choose" in m}
            assert {m.label: build_search_space(m, search.tune, "") for m in search.methods} == {
                label: {key: tuple(values) for key, values in sorted(g.items())} for label, g in grids.items()
            }
            assert {len(method_candidates(m)) for m in open_methods(document, {})} == {search.tune.trials}
            assert search.tune.seeds == tuple(document["seeds"][: document["choose"].get("seeds", 1)])


def test_a_grid_is_not_that_of_a_method_called_as_its_algorithm() -> None:
    methods = [
        {"algorithm": "fedavg", "choose": {"local.lr": [0.1, 0.2]}},
        {"algorithm": "fedavg", "label": "other", "choose": {"server_lr": [1.0, 2.0]}},
    ]
    search = parse_closed_document(make_search_document({**tiny().document, "method": methods}), "")
    assert [list(build_search_space(m, search.tune, "")) for m in search.methods] == [["local.lr"], ["server_lr"]]


def test_an_estimate_counts_the_rounds_of_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    document = read_recipe("equitable-table2-mnist").make_documents("full")["MNIST"]
    rounds = {get_label(m): count_rounds(document, m) for m in document["method"]}
    assert rounds.pop("centralized") == 100  # of its own
    assert set(rounds.values()) == {25}
    monkeypatch.setattr(estimate, "_gradient_speed", lambda *_: 60.0)
    monkeypatch.setattr(estimate, "_gradients_per_round", lambda method, _samples: float(method.algorithm != "flame"))
    runs = 4 * (4 + 2)  # clients, and rounds of fedavg and ditto per seed
    trials = 4 * (3 * 3 + 3 * 2)
    one = merge_tables(TINY, {"method": METHODS, "choose": {"rounds": 3}, "seeds": [3, 4], "variants": ["few"]})
    assert estimate.estimate_minutes(make_recipe("tiny", one), "full") == 2 * runs + trials


# --- what is chosen


def test_the_choice_is_the_best_score_of_plain_runs(whole: Any) -> None:
    out, done = whole
    for variant, document in grid().make_documents("full", [3]).items():
        assert list(done.choices[variant]) == ["fedavg", "ditto"]
        for method in open_methods(document, {}):
            choice = done.choices[variant][get_label(method)]
            scores = {}
            for text, table in method_candidates(method):
                plain = {k: v for k, v in document.items() if k != "choose"}
                made = parse({**plain, "method": [{"rounds": 3, **table}]})
                fed = made.partition(made.source.load(), 3)
                result = fl.simulate(made.methods[0].setting.with_(seed=3), fed)
                models = ("global", "personal") if get_label(method) == "ditto" else ("global",)
                values = [float(result.final(model, "accuracy", "validation").nanmean()) for model in models]
                scores[text] = round(sum(values) / len(values), 6)
            assert list(choice["scores"].items()) == list(scores.items())
            assert scores[choice["chosen"]] == max(scores.values())
    run = parse({k: v for k, v in _settings(out / "few").items() if k != "resolved"})
    assert [m.setting.rounds for m in run.methods] == [4, 2, 4]
    assert f"local.lr = {run.methods[0].setting.local.lr}" == done.choices["few"]["fedavg"]["chosen"]
    assert (out / "choose" / "few" / "tuning.md").exists()
    assert not (out / "choose" / "few" / "tuned.toml").exists()


def _settings(folder: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads((folder / "experiment.toml").read_text())


def test_the_first_variant_chooses_for_all_where_it_is_to(whole: Any, tmp_path: Path) -> None:
    done = reproduce(grid(choose={"rounds": 3, "once": True}), "full", tmp_path, seeds=[3])
    assert done is not None
    assert done.choices == {"few": whole[1].choices["few"]}
    assert [p.name for p in (tmp_path / "choose").iterdir()] == ["once"]
    lrs = [_settings(tmp_path / variant)["method"][0]["local"]["lr"] for variant in ("few", "many")]
    assert lrs[0] == lrs[1]


def test_variants_whose_names_are_alike_have_run_directories_of_their_own(tmp_path: Path) -> None:
    alike = {"few!": TINY["variant"]["few"], "few?": TINY["variant"]["many"]}  # type: ignore[index]
    paper = {**TINY["paper"], "cells": {}}  # type: ignore[dict-item]
    done = reproduce(make_recipe("tiny", {**TINY, "variant": alike, "paper": paper}), "full", tmp_path, seeds=[3])
    assert done is not None
    assert done.complete
    clients = [_settings(folder)["partition"]["clients"] for folder in tmp_path.glob("few*")]
    assert sorted(clients) == [4, 6]


def test_one_method_after_the_other_is_the_same(whole: Any, tmp_path: Path) -> None:
    for only in (["ditto"], ["fedavg"], []):
        done = reproduce(grid(), "full", tmp_path, seeds=[3], only=only)
    assert done is not None
    assert (done.numbers, done.choices) == (whole[1].numbers, whole[1].choices)


def test_a_method_of_which_no_trial_completes_has_its_first_candidate(tmp_path: Path) -> None:
    methods = [{"algorithm": "fedavg", "choose": {"local.lr": [1e25, 1e26]}}]
    done = reproduce(
        make_recipe(
            "tiny", {**TINY, "method": methods, "paper": {**TINY["paper"], "columns": {}, "cells": {}, "claims": []}}
        ),
        "full",
        tmp_path,
        seeds=[3],
    )
    assert done is not None
    assert done.choices["few"]["fedavg"] == {
        "chosen": "local.lr = 1e+25",
        "values": {},
        "higher": True,
        "scores": {"local.lr = 1e+25": None, "local.lr = 1e+26": None},
        "trials": {"grid": 2, "beyond": 0},
    }
    assert len(done.failures) == 2


# --- stopped and run again


@pytest.mark.parametrize("at", [2, 10, 14])
def test_a_run_stopped_within_a_trial_goes_on_there(at: int, whole: Any, tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    @contextmanager
    def show(_rounds: object) -> Iterator[Listener]:
        def tell(event: Event) -> None:
            if event.status:
                return
            told.append((event.label, event.round))
            if len(told) == at:
                signal.raise_signal(signal.SIGINT)

        yield tell

    reproduce(grid(), "full", tmp_path, seeds=[3], show=show)
    assert len(told) == at
    assert not (tmp_path / "few").exists()
    done = reproduce(grid(), "full", tmp_path, seeds=[3], show=show)
    trials = [run for run in told if ":" in run[0]]
    assert len(set(trials)) == 3 * 3 + 3 * 2
    assert len(trials) == 2 * len(set(trials))  # of two variants, and nothing twice
    assert done is not None
    assert (done.numbers, done.choices) == (whole[1].numbers, whole[1].choices)


def test_a_run_killed_within_a_trial_goes_on(whole: Any, tmp_path: Path) -> None:
    often = grid(engine={"checkpoint_every": 1e-9})
    assert in_a_fork(lambda: reproduce(often, "full", tmp_path, seeds=[3]), 200) == 137
    there = tmp_path / "choose" / "few"
    assert (there / "trials" / "fedavg.log").read_text().count("samples_backward") > 0
    assert list((there / "checkpoints").glob("*/*"))
    done = reproduce(often, "full", tmp_path, seeds=[3])
    assert done is not None
    assert (done.numbers, done.choices) == (whole[1].numbers, whole[1].choices)


def test_an_executor_chooses_the_same(whole: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        done = reproduce(grid(), "full", tmp_path, seeds=[3], executor=executor)
    assert done is not None
    assert (done.numbers, done.choices) == (whole[1].numbers, whole[1].choices)


def test_workers_choose_the_same(whole: Any, tmp_path: Path) -> None:
    done = reproduce(grid(), "full", tmp_path, seeds=[3], workers=2)
    assert done is not None
    assert (done.numbers, done.choices) == (whole[1].numbers, whole[1].choices)


# --- grids that go on


@given(st.integers(1, 5), st.integers(0, 2))
def test_a_grid_goes_on_by_its_own_factor_where_the_best_is_at_an_edge(best: int, side: int) -> None:
    grid = [0.01 * 3**k for k in range(5)]
    place = (0, best % 3 + 1, 4)[side]
    document = tiny().make_documents("full")["few"] | {
        "method": [{"algorithm": "fedavg", "choose": {"local.lr": grid}}]
    }
    scores = {f"local.lr = {v}": float(k == place) for k, v in enumerate(grid)}
    known = {"fedavg": {"chosen": list(scores)[place], "scores": scores}}
    found = [method for further in extend_grids(document, known) for method in further["method"]]
    if 0 < place < 4:
        assert found == []
        assert edge_keys(**known["fedavg"]) == []
    else:
        assert edge_keys(**known["fedavg"]) == ["local.lr"]
        beyond = grid[place] * 3 ** (1 if place else -1)
        assert found[0]["choose"]["local.lr"] == [pytest.approx(beyond, rel=0.005)]


def test_no_grid_goes_on_where_the_method_may_not() -> None:
    document = tiny().make_documents("full")["few"] | {
        "method": [{"algorithm": "apfl", "choose": {"alpha": [0.25, 0.5, 1.0]}}]
    }
    known = {"apfl": {"chosen": "alpha = 1.0", "scores": {f"alpha = {a}": a for a in (0.25, 0.5, 1.0)}}}
    assert extend_grids(document, known) == []


def test_a_search_is_extended_twice_at_most_and_resumes(tmp_path: Path) -> None:
    small = [{"algorithm": "fedavg", "choose": {"local.lr": [0.0001, 0.0002]}}, {"algorithm": "flame", "lam": 1.0}]
    one = make_recipe("tiny", merge_tables(TINY, {"method": small, "choose": {"extend": 2}, "variants": ["few"]}))
    done = reproduce(one, "full", tmp_path, seeds=[3])
    assert done is not None
    choice = done.choices["few"]["fedavg"]
    scores = choice["scores"]
    assert choice["chosen"] == max(scores, key=lambda text: scores[text])
    edges = [0.0001 * 2**k for k in range(4)] if choice["values"]["local.lr"] > 0.0001 else None
    if edges:
        assert list(scores) == [f"local.lr = {v:g}" for v in edges]
    assert len(scores) in (2, 3, 4)
    run = parse({k: v for k, v in _settings(tmp_path / "few").items() if k != "resolved"})
    assert run.methods[0].setting.local.lr == choice["values"]["local.lr"]
    again = reproduce(one, "full", tmp_path, seeds=[3])
    assert again is not None
    assert (again.choices, again.numbers) == (done.choices, done.numbers)


# --- what is refused


def test_other_candidates_are_another_search(tmp_path: Path) -> None:
    small = [{"algorithm": "fedavg", "choose": {"local.lr": [0.1, 0.5]}}]
    paper = {**TINY["paper"], "columns": {}, "cells": {}, "claims": []}
    one = {**TINY, "method": small, "paper": paper, "variant": {"few": {}}}
    reproduce(make_recipe("tiny", one), "full", tmp_path, seeds=[3])
    other = {**one, "method": [{"algorithm": "fedavg", "choose": {"local.lr": [0.1, 0.2]}}]}
    with pytest.raises(
        RunDirError, match=r"variant 'few' has changed since it was run in .*few and .*choose/few. Delete"
    ):
        reproduce(make_recipe("tiny", other), "full", tmp_path, seeds=[3])
    (tmp_path / PROTOCOL_FILE).unlink()  # as an earlier version left the folder
    with pytest.raises(RunDirError, match="contains a different search: tune.space.fedavg.local.lr was"):
        reproduce(make_recipe("tiny", other), "full", tmp_path, seeds=[3])


def test_a_variant_that_changed_is_refused_before_any_other_runs(tmp_path: Path) -> None:
    recipe, results, out = tiny(), tmp_path / "results", tmp_path / "out"
    reproduce(recipe, "laptop", out, results=results)
    changed = make_recipe("tiny", merge_tables(TINY, {"variant": {"many": {"partition": {"clients": 5}}}}))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RunDirError, match=r"variant 'many' has changed since it was run in .*many. Delete that"):
        reproduce(changed, "laptop", out, results=results, seeds=[7, 8])
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    shutil.rmtree(out / "many")
    done = reproduce(changed, "laptop", out, results=results, seeds=[7, 8])
    assert done is not None
    assert done.complete
    (out / "choose" / "once").mkdir(parents=True)  # trials of the first variant are none of the second's
    shared = {"choose": {"once": True}, "variant": {"many": {"partition": {"clients": 5}}}}
    with pytest.raises(RunDirError, match=r"variant 'few' has changed .*few and .*once. Delete that"):
        reproduce(make_recipe("tiny", merge_tables(TINY, shared)), "laptop", out, results=results)
    shutil.rmtree(out / "few")
    shutil.rmtree(out / "many")
    (out / PROTOCOL_FILE).write_text(json.dumps({"many": {"": "0123456789abcdef"}}))
    assert reproduce(make_recipe("tiny", merge_tables(TINY, shared)), "laptop", out, results=results) is not None
    (out / PROTOCOL_FILE).write_text("{")
    with pytest.raises(RunDirError, match=r"protocol.json is damaged"):
        reproduce(changed, "laptop", out, results=results)


def test_optuna_is_asked_for_before_any_work_and_not_at_smoke_scale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in sys.modules if n.startswith("fedloom.lab.tune")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["fedloom"], "tune", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    where = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    result = CliRunner().invoke(app, ["reproduce", "fedacs-table2", "--scale", "full", *where])
    assert result.exit_code == 2
    assert "this command needs optuna. Run: pip install 'fedloom[tune]'" in result.output
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, ["reproduce", "fedacs-table2", "--scale", "smoke", *where])
    assert result.exit_code == 0, result.output
