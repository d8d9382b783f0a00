"""Facts on public code: each has a line for every recipe in the published protocol, and the lines are true."""

from __future__ import annotations

import re

import pytest

from fedloom_studies.reproduce import read_recipes
from fedloom_studies.reproduce.facts import Fact, fact_holds, published_recipes, read_facts
from fedloom_studies.reproduce.papers import read_paper_sections

KNOWN = read_recipes()


def name_of(fact: Fact) -> str:
    return f"{fact.paper}: {fact.text}"


@pytest.mark.parametrize("fact", read_facts(), ids=name_of)
def test_a_fact_has_one_line_for_every_published_recipe_of_its_paper(fact: Fact) -> None:
    assert sorted(fact.recipes) == sorted(published_recipes(KNOWN, fact.paper))


@pytest.mark.parametrize("fact", [fact for fact in read_facts() if fact.holds], ids=name_of)
def test_a_recipe_has_the_options_of_the_facts_that_it_uses_and_of_no_other(fact: Fact) -> None:
    assert {name for name in fact.recipes if fact_holds(fact, KNOWN[name])} == {*fact.used}


def test_every_paper_has_facts_with_their_place_or_has_no_public_code() -> None:
    assert {fact.paper for fact in read_facts()} == {sheet.name for sheet in read_paper_sections()}
    without = {fact.paper for fact in read_facts() if fact.source == "none"}
    assert without == {"FedACS", "Equitable-FL"}
    for fact in read_facts():
        assert (fact.paper in without) == (fact.source == "none")
        assert fact.source == "none" or re.fullmatch(r"\S+/\S+ [0-9a-f]{8}, .+:\d.*", fact.source), fact.source


def test_most_facts_that_a_recipe_uses_are_checked_by_options() -> None:
    checked = [fact for fact in read_facts() if fact.holds]
    assert 2 * len(checked) > len([fact for fact in read_facts() if fact.used])
    assert any(not fact_holds(fact, KNOWN[name]) for fact in checked for name in fact.recipes)
