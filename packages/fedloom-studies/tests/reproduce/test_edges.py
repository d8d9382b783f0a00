"""Every key whose best value is at its edge goes on, alike for all methods, and by what the recipe judges."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from small_recipe import TINY, tiny

from fedloom.rundir import get_label
from fedloom_studies.reproduce import read_recipes, reproduce
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.choices import edge_keys, extend_grids, method_candidates
from fedloom_studies.reproduce.recipe import make_recipe, merge_tables
from fedloom_studies.store import CHECKOUT_FOLDER

ALL = read_recipes()
KEYS = {"lr": [0.009, 0.03], "tau": [0.5, 1.0], "beta": [0.1, 1.0, 10.0]}


@pytest.mark.parametrize("best", list(itertools.product(*KEYS.values())))
def test_every_key_at_its_edge_goes_on_and_nothing_is_tried_twice(best: tuple[float, ...]) -> None:
    method = {"algorithm": "fiaelt", "solver": "svrg", "choose": KEYS}
    document = tiny().make_documents("full")["few"] | {"method": [method], "choose": {"extend": 2, "edges": "every"}}
    texts = {
        text: float(values == best)
        for values, (text, _) in zip(itertools.product(*KEYS.values()), method_candidates(method), strict=True)
    }
    chosen = max(texts, key=lambda text: texts[text])
    choice = {"chosen": chosen, "values": dict(zip(KEYS, best, strict=True)), "scores": texts}
    edges = [key for key in edge_keys(chosen, texts) if (key, choice["values"][key]) != ("tau", 1.0)]  # tau is <= 1
    found = [
        text
        for further in extend_grids(document, {"fiaelt": choice})
        for m in further["method"]
        for text, _ in method_candidates(m)
    ]
    assert len(found) == len(set(found)) == 2 ** len(edges) - 1
    assert not set(found) & set(texts)
    for text in found:  # the best values, or one step beyond
        moved = {part.split(" = ")[0] for part in text.split(", ")} - {
            part.split(" = ")[0] for part in set(text.split(", ")) & set(chosen.split(", "))
        }
        assert moved <= set(edges)
    first = document | {"choose": {"extend": 2}}
    old = [m["choose"] for further in extend_grids(first, {"fiaelt": choice}) for m in further["method"]]
    edge = next(iter(edge_keys(chosen, texts)), None)
    assert old == [] or [key for key in KEYS if old[0][key] != KEYS[key]] == [edge]  # as recorded recipes went on


def test_all_keys_of_a_search_go_on_and_their_trials_are_counted(tmp_path: Path) -> None:
    grid = {"local.lr": [0.0001, 0.0002], "server_lr": [0.5, 0.6]}
    small = [{"algorithm": "fedavg", "choose": grid}, {"algorithm": "flame", "lam": 1.0}]
    choose = {"extend": 2, "edges": "every", "metric": "accuracy/weighted"}
    one = make_recipe("tiny", merge_tables(TINY, {"method": small, "choose": choose, "variants": ["few"]}))
    done = reproduce(one, "full", tmp_path, seeds=[3])
    assert done is not None
    choice = done.choices["few"]["fedavg"]
    assert choice["trials"]["grid"] == 4
    assert choice["trials"]["beyond"] == len(choice["scores"]) - 4 <= 6
    assert choice["scores"][choice["chosen"]] == max(choice["scores"].values())
    again = reproduce(one, "full", tmp_path, seeds=[3])
    assert again is not None
    assert (again.choices, again.numbers) == (done.choices, done.numbers)


def test_a_grid_of_one_key_goes_on_by_its_one_candidate(tmp_path: Path) -> None:
    paper = {**TINY["paper"], "columns": {}, "cells": {}, "claims": []}
    method = [{"algorithm": "fedavg", "choose": {"local.lr": [0.0001, 0.01]}}]
    one = make_recipe(
        "tiny", {**TINY, "choose": {"rounds": 1, "extend": 1}, "method": method, "paper": paper, "variant": {"few": {}}}
    )
    done = reproduce(one, "full", tmp_path, seeds=[3])
    assert done is not None
    choice = done.choices["few"]["fedavg"]
    assert (choice["trials"], len(choice["scores"])) == ({"grid": 2, "beyond": 1}, 3)


def tried(methods: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The values of every candidate of some methods, by its text."""
    combinations = [
        dict(zip(m["choose"], values, strict=True))
        for m in methods
        for values in itertools.product(*m["choose"].values())
    ]
    texts = [text for m in methods for text, _ in method_candidates(m)]
    return dict(zip(texts, combinations, strict=True))


@pytest.mark.parametrize("name", ["equitable-table2-mnist-fair", "fedacs-figure1-fair", "fiaelt-synthetic-fair"])
def test_recorded_searches_went_on_as_they_would_now(name: str) -> None:
    done = summaries.read_summary(Path(__file__).parents[4] / CHECKOUT_FOLDER, name, "laptop")
    assert done is not None
    if done.protocol != ALL[name].protocol("laptop"):
        pytest.skip("the recipe has changed since it was run")
    for variant, document in ALL[name].make_documents("laptop").items():
        for label, kept in done.choices[variant].items():
            own = tried([m for m in document["method"] if get_label(m) == label])
            for _ in range(document["choose"]["extend"]):
                scores = {text: kept["scores"][text] for text in kept["scores"] if text in own}
                best = max(scores, key=lambda text: -1.0 if scores[text] is None else scores[text])
                choice = {"chosen": best, "scores": scores, "values": own[best]}
                own |= tried([m for one in extend_grids(document, {label: choice}) for m in one["method"]])
            assert list(kept["scores"]) == sorted(own, key=list(kept["scores"]).index)


RECORDED = {"fedacs-figure1-fair", "fedacs-table2-fair"}
"""Fair recipes that ran before every key at its edge went on."""
UNWEIGHTED = {
    "fiaelt-femnist-l1-reduced", "fiaelt-femnist-rates-reduced", "fiaelt-femnist-reduced", "fiaelt-synthetic",
}  # fmt: skip
"""Recipes that are judged on a weighted figure and ran before a choice could be made by it."""


BINARY = {"flamby-heart-fair"}
"""Recipes of two classes that judge accuracy, where a search would go by AUROC."""


@pytest.mark.parametrize("name", [n for n in ALL if any("choose" in m for m in ALL[n].document["method"])])
def test_settings_are_chosen_by_what_the_recipe_judges_and_every_edge_goes_on(name: str) -> None:
    weighted = ALL[name].paper.figure.endswith("/weighted")
    metrics = {document.get("choose", {}).get("metric") for document in ALL[name].make_documents("laptop").values()}
    judged = ALL[name].paper.figure if (weighted and name not in UNWEIGHTED) or name in BINARY else None
    assert metrics == {judged}
    choose = ALL[name].document.get("choose", {})
    assert "extend" not in choose or (choose.get("edges") == "every") == (name not in RECORDED)


FAIR = [name for name in ALL if ALL[name].paper.mode == "fair"]


@pytest.mark.parametrize("name", FAIR)
def test_in_a_fair_recipe_every_method_searches_its_own_options_in_spaces_of_equal_size(name: str) -> None:
    """Its own: what `fedloom tune` searches for it; what is left out is said with its reason."""
    spaces = tomllib.loads(files("fedloom.lab.tune").joinpath("spaces.toml").read_text())
    for document in ALL[name].make_documents("full").values():
        sizes = {len(method_candidates(method)) for method in document["method"]}
        assert len(sizes) == 1, sizes
        assert sizes.pop() > 1
        labels = {get_label(method) for method in document["method"]}
        assert set(ALL[name].paper.fixed) <= labels
        for method in document["method"]:
            keys = set(method["choose"])
            assert {"local.lr", "lr"} & keys, get_label(method)
            own = set(spaces.get(method["algorithm"], {})) | set(spaces.get(get_label(method), {})) - {"source"}
            left = {key for key in own - {"source"} if not any(k.split(".")[-1] == key for k in keys)}
            said = ALL[name].paper.fixed.get(get_label(method), "")
            assert not left or said, f"{get_label(method)} does not search {left}, and the recipe does not say why"


def test_multiples_go_on_at_their_edges_as_numbers_do() -> None:
    method = {"algorithm": "flame", "choose": {"local.lr": [0.1, 0.2], "rho": ["0.5x", "1x"]}}
    document = {"data": {"source": "digits"}, "partition": {"kind": "iid", "clients": 3}, "rounds": 1, "seeds": [0],
                "name": "t", "choose": {"extend": 1, "edges": "every"}, "method": [method]}  # fmt: skip
    scores = {text: 0.5 for text, _ in method_candidates(method)}
    choice = {"chosen": "local.lr = 0.1, rho = 1x", "values": {"local.lr": 0.1, "rho": "1x"}, "scores": scores}
    grids = [m["choose"] for one in extend_grids(document, {"flame": choice}) for m in one["method"]]
    assert grids == [{"local.lr": [0.05], "rho": ["1x"]}, {"local.lr": [0.1, 0.05], "rho": ["2x"]}]
    assert edge_keys("rho = 1x", ["rho = 1x"]) == []
    assert edge_keys("rho = 1x", ["rho = 0.5x", "rho = 1x", "rho = 2x"]) == []


@pytest.mark.parametrize("name", ALL)
def test_sending_less_is_judged_only_where_thresholds_add_up_to_the_protocols(name: str) -> None:
    """The protocol has 1,000 rounds of lambda 1e-4; a shorter run scales lambda, so that the sum is the same."""
    one = ALL[name]
    if not any("sends less than" in claim.text or "less communication" in claim.text for claim in one.paper.claims):
        return
    for document in one.make_documents("laptop" if one.budget("laptop") else "full").values():
        for method in (m for m in document["method"] if get_label(m) == "fedslr"):
            assert document["rounds"] * method["lam"] == pytest.approx(0.1, rel=0.01)
