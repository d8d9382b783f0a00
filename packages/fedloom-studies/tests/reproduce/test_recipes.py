"""Every recipe is an experiment at every scale, speaks of methods and variants that it has, and runs at smoke scale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_recipe import TINY, tiny

from fedloom.errors import ConfigError
from fedloom.lab.experiment import Plan
from fedloom.rundir import get_label
from fedloom_studies.reproduce import TimeBudget, read_recipe, read_recipes, reproduce
from fedloom_studies.reproduce.choices import chosen_experiment, first_candidate_experiment, method_candidates
from fedloom_studies.reproduce.execute import parse_closed_document
from fedloom_studies.reproduce.figures import Reference
from fedloom_studies.reproduce.papers import select_papers
from fedloom_studies.reproduce.recipe import NOMINAL_SETS, RECIPE_SCALES, make_recipe, merge_tables

ALL = read_recipes()
NAMES = list(ALL)
FULL = {source: size.train + size.test for source, size in NOMINAL_SETS.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_an_experiment_at_every_scale(name: str) -> None:
    for scale in RECIPE_SCALES:
        for document in ALL[name].make_documents(scale).values():
            for k in range(max(len(method_candidates(m)) for m in document["method"])):
                methods = [method_candidates(m)[min(k, len(method_candidates(m)) - 1)][1] for m in document["method"]]
                rest = {key: v for key, v in document.items() if key != "choose"}
                assert parse_closed_document(rest | {"method": methods}, name).methods


@pytest.mark.parametrize("name", NAMES)
def test_columns_and_claims_speak_of_methods_and_variants_of_the_recipe(name: str) -> None:
    one = ALL[name]
    both = [one, *(ALL[name] for name in (one.paper.rivals,) if name)]
    methods = {get_label(m) for other in both for m in other.document["method"]}
    texts = [*one.paper.columns.values(), *(t for c in one.paper.claims for t in (c.subject, *c.than))]
    for reference in (Reference.create(text, one.paper.figure) for text in texts if isinstance(text, str)):
        assert reference.method in methods, reference
        assert reference.model in ("global", "personal", "hybrid", "hybrid-validation", "")
        assert reference.variant in ("", *one.variants)
    for variant in (v for claim in one.paper.claims for v in claim.variants):
        known = {v for other in ALL.values() for v in other.variants}
        assert variant in known, variant


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_promises(name: str) -> None:
    one = ALL[name]
    assert name.endswith("-reduced") == (one.paper.reduced is not None)
    assert one.paper.unknown
    assert one.paper.columns
    budget = one.budget("laptop")
    assert budget is None or 0 < budget <= 480  # a night
    assert not one.follows_paper("laptop", FULL) or one.paper.reduced is None
    for variant, cells in one.paper.cells.items():
        assert len(cells) in (0, len(one.paper.columns)), variant


def test_methods_of_a_table_have_equally_many_candidates() -> None:
    for name, one in ALL.items():
        counts = {len(method_candidates(m)) for m in one.document["method"]}
        assert len(counts - {1}) <= 1, name


def test_comparable_means_not_behind_by_more_than_the_margin() -> None:
    behind = [
        claim for one in ALL.values() for claim in one.paper.claims if re.search(r"at most .+ behind", claim.text)
    ]
    assert len(behind) > 4
    assert all(claim.margin and not claim.equivalent for claim in behind)


def test_every_data_set_of_flame_s_table_is_asked_as_published() -> None:
    asked = {
        document["data"]["source"]
        for one in ALL.values()
        if one.paper.mode == "published" and one.paper.title.startswith("FLAME, Table III")
        for document in one.make_documents("laptop").values()
    }
    assert {"mnist", "fashion-mnist", "medical-mnist", "cifar-10"} <= asked
    claims = [claim for claim in ALL["flame-table3-mnist-published"].paper.claims if "Fig. 3" in claim.text]
    assert [claim.variants for claim in claims] == [("hybrid",)] * 2


def test_every_table_and_figure_of_the_papers_has_a_recipe() -> None:
    titles = " ".join(one.paper.title for one in ALL.values())
    wanted = {
        "FedACS": ["Table 1", "Table 2", "Fig. 1"],
        "Equitable-FL": ["Table 2", "Table 3", "Table 4", "Table 5", "Figs. 3 to 5", "Fig. 2", "Fig. 6"],
        "FLAME": [
            "Table III",
            "Fig. 3 and Fig. 8",
            "Figs. 4 to 7",
            "Fig. 9",
            "Fig. 10",
            "Fig. 11",
            "Fig. 12",
            "Figs. 13 to 20",
            "Figs. 21 to 35",
        ],
        "FedSLR": ["Tables 1 and 2", "Tables 3 and 9", *(f"Table {k}" for k in range(4, 9)), "Figs. 2 to 4", "Fig. 5"],
        "FIAELT": ["Figs. 1 and 6", "Figs. 2 and 7", "Fig. 3", "Figs. 4 and 5"],
    }
    for paper, parts in wanted.items():
        mine = [one.paper.title for one in ALL.values() if one.paper.title.startswith(paper)]
        for part in parts:
            assert any(re.search(rf"{re.escape(part)}\b", title) for title in mine), (paper, part)
    assert all(title.split(",")[0] in wanted for title in (one.paper.title for one in select_papers(ALL).values())), (
        titles
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_at_smoke_scale_on_digits(name: str, tmp_path: Path) -> None:
    done = reproduce(ALL[name], "smoke", tmp_path)
    assert done is not None
    assert done.complete
    assert not done.failures
    (numbers,) = done.numbers.values()
    paper = ALL[name].paper
    texts = [*paper.columns.values(), *(side for c in paper.claims for side in (c.subject, *c.than))]
    own = {get_label(m) for m in ALL[name].document["method"]}  # the others are those of another record
    references = [Reference.create(text, paper.figure) for text in texts if isinstance(text, str)]
    stated = {str(reference) for reference in references if reference.method in own}
    lacking = ("factorised", "c_index")  # digits have no times to an event
    assert {reference for reference in stated - numbers.keys() if not any(k in reference for k in lacking)} == set()


# --- the format


def test_a_table_that_names_another_kind_takes_the_place_of_the_base() -> None:
    base = {"partition": {"kind": "iid", "clients": 3}, "local": {"lr": 0.1, "epochs": 2}}
    change = {"partition": {"kind": "shards"}, "local": {"lr": 0.2}}
    assert merge_tables(base, change) == {"partition": {"kind": "shards"}, "local": {"lr": 0.2, "epochs": 2}}
    assert merge_tables({"partition": {"clients": 3}}, change)["partition"] == {"kind": "shards", "clients": 3}
    assert base["local"]["lr"] == 0.1


def test_variants_scales_seeds_and_only_change_the_experiment() -> None:
    full, laptop = tiny().make_documents("full"), tiny().make_documents("laptop", only=["fedavg"])
    assert full["few"]["method"][1]["rho"] == 0.5
    assert "rho" not in full["many"]["method"][1]
    assert full["many"]["partition"]["clients"] == 6
    assert laptop["few"]["seeds"] == [7]
    assert [get_label(m) for m in laptop["few"]["method"]] == ["fedavg"]
    assert tiny().make_documents("full", seeds=[9])["few"]["seeds"] == [9]
    assert list(tiny().make_documents("smoke")) == ["few"]
    assert tiny().follows_paper("laptop", FULL)
    assert not tiny().follows_paper("smoke", FULL)


def test_what_a_recipe_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        tiny().make_documents("full", only=["fedavgg"])
    with pytest.raises(ConfigError, match=r"did you mean 'flame-table3-mnist"):
        read_recipe("flame-table-3-mnist")
    with pytest.raises(ConfigError, match="cells of 'few' contain 1 value, but there are 2 columns"):
        make_recipe("tiny", merge_tables(TINY, {"paper": {"cells": {"few": [0.5]}}}))
    with pytest.raises(ConfigError, match="set higher or lower"):
        make_recipe("tiny", merge_tables(TINY, {"paper": {"claims": [{"text": "t", "than": ["flame: personal"]}]}}))
    with pytest.raises(ConfigError, match="unknown scale 'cluster'"):
        make_recipe("tiny", merge_tables(TINY, {"scale": {"cluster": {}}}))


def test_what_a_base_does_not_know_may_be_stated() -> None:
    base, network = (read_recipe(name) for name in ("flame-table3-mnist", "flame-table3-mnist-mlp"))
    assert {u.what for u in base.paper.open} - {u.what for u in network.paper.open} == {"model"}
    known = network.paper.model_dump()
    with pytest.raises(ValueError, match="no entry of `unknown` is named weather"):
        type(network.paper)(**{**known, "stated": ["weather"]})


# --- running


def test_candidates_are_a_grid_and_one_is_chosen_on_validation(tmp_path: Path) -> None:
    grid = {"algorithm": "fedavg", "local": {"epochs": 2}, "choose": {"local.lr": [1, 2], "server_lr": [3, 4]}}
    tables = [table for _, table in method_candidates(grid)]
    assert [(t["local"], t["server_lr"]) for t in tables] == [
        ({"epochs": 2, "lr": lr}, server) for lr in (1, 2) for server in (3, 4)
    ]
    done = reproduce(tiny(), "full", tmp_path / "out", results=tmp_path / "results", seeds=[3])
    assert done is not None
    for choices in done.choices.values():
        assert choices["fedavg"]["chosen"] == "local.lr = 0.5"
        assert choices["fedavg"]["scores"]["local.lr = 0.5"] > choices["fedavg"]["scores"]["local.lr = 0.0001"]
    document = tiny().make_documents("full")["few"]
    assert chosen_experiment(document, done.choices["few"])["method"][0]["local"]["lr"] == 0.5
    assert first_candidate_experiment(document)["method"][0]["local"]["lr"] == 0.0001


def test_a_budget_that_is_over_stops_the_run_which_goes_on_later(tmp_path: Path) -> None:
    whole = reproduce(tiny(), "full", tmp_path / "whole", seeds=[3])
    assert reproduce(tiny(), "full", tmp_path / "cut", seeds=[3], budget=TimeBudget(0)) is None
    budgets = [TimeBudget(1e-9 + seconds) for seconds in (0.3, 0.6)]
    for budget in budgets:
        reproduce(tiny(), "full", tmp_path / "cut", seeds=[3], budget=budget)
    resumed = reproduce(tiny(), "full", tmp_path / "cut", seeds=[3])
    assert whole is not None
    assert resumed is not None
    assert (resumed.numbers, resumed.choices, resumed.complete) == (whole.numbers, whole.choices, True)


@pytest.mark.slow
def test_the_full_resnet_recipe_starts_steps_and_resumes(tmp_path: Path) -> None:
    document = ALL["fedslr-table1"].make_documents("full", only=["fedslr"])["C10 non-IID"]
    small = {
        "data": {"source": "npz", "path": str(_images(tmp_path))},
        "partition": {"kind": "iid", "clients": 4, "test_from": "own", "test": 0.3},
        "local": {"epochs": 1},
        "sampler": {"clients": 2},
        "evaluate": {"every": 1000},
    }
    made = parse_closed_document(merge_tables(document, {**small, "rounds": 2}), "ResNet-18")
    quiet = lambda *_: None  # noqa: E731
    for tell, status, rounds in ((TimeBudget(0), "interrupted", 1), (quiet, "done", 2)):
        (outcome,) = Plan(made, tmp_path / "out").run(tell, page=False)
        assert outcome.result is not None
        assert (outcome.status, outcome.result.rounds) == (status, rounds)
        assert outcome.result.job.oracle.layout.d == 11_173_952


def _images(folder: Path) -> Path:
    import numpy as np

    rng = np.random.default_rng(0)
    file = folder / "images.npz"
    np.savez(file, x=rng.integers(0, 256, (80, 3, 32, 32)).astype(np.uint8), y=np.arange(80) % 10)
    return file
