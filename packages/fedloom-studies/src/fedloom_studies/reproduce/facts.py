"""Facts about the public code of papers, and which recipes as published use them (``facts.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from fedloom.rundir import get_label
from fedloom.values import Value
from fedloom_studies.reproduce.recipe import Recipe

FACTS_PAGE = "facts"
"""Name of the page, which is in the folder with the pages of the recipes."""
FACTS_TEXT = (
    "This page lists facts about the public code that the papers omit or contradict. It also states how many recipes "
    "with the published protocol use each fact. Each repository is listed with the commit that we read. FedACS and "
    "Equitable-FL have no public code."
)


class UnusedFact(Value):
    """Recipes that do not make use of a fact, with the reason."""

    because: str
    recipes: tuple[str, ...] = Field(min_length=1)


class Fact(Value):
    """Fact about the public code that belongs to a paper."""

    paper: str = Field(description="name of the paper, as in the recipes' titles")
    text: str = Field(description="what the code does")
    source: str = Field(description="repository, commit, file and lines of the public code (None: no public code)")
    holds: dict[str, Any] = Field(
        default_factory=dict,
        description="options of an experiment that use the fact, such as local.lr or method.LABEL.mu",
    )
    used: tuple[str, ...] = Field((), description="recipes that use the fact")
    unused: tuple[UnusedFact, ...] = Field((), description="recipes that do not use the fact, with the reason")

    @property
    def recipes(self) -> list[str]:
        """Recipes that are listed for the fact, whether or not they use it."""
        return [*self.used, *(name for reason in self.unused for name in reason.recipes)]


@cache
def read_facts() -> tuple[Fact, ...]:
    """Return all facts, in the order of the file, which groups them by paper."""
    document = tomllib.loads(files("fedloom_studies.reproduce").joinpath("facts.toml").read_text())
    return tuple(Fact(**one) for one in document["fact"])


def published_recipes(recipes: Mapping[str, Recipe], paper: str) -> list[str]:
    """Return the recipes of a paper that repeat it as published.

    Every fact about the paper must mention each of these recipes.
    """
    of_paper = [(name, one) for name, one in recipes.items() if one.paper.title.startswith(f"{paper},")]
    return [name for name, one in of_paper if one.paper.mode == "published"]


def fact_holds(fact: Fact, recipe: Recipe) -> bool:
    """Return True if all experiments of a recipe have the options that identify a fact."""
    documents = recipe.make_documents("laptop" if "laptop" in recipe.scales else "full").values()
    return all(_option_at(document, key) == value for document in documents for key, value in fact.holds.items())


def _option_at(document: Mapping[str, Any], key: str) -> Any:
    """Return an option of an experiment, given by its dotted key.

    A key ``method.LABEL.option`` refers to an option of a method, which may be ``defaults``.
    """
    table, _, rest = key.partition(".")
    if table != "method":
        value = document.get(table)
        return value.get(rest) if rest and value is not None else value
    label, _, option = rest.rpartition(".")
    methods = [m for m in document["method"] if get_label(m) == label or get_label(m).startswith(f"{label},")]
    values = {m.get(option, m.get("defaults") if option == "solver" else None) for m in methods}
    return values.pop() if len(values) == 1 else None


def facts_page(recipes: Mapping[str, Recipe]) -> str:
    """Render the page about all facts in Markdown, with a table for each paper."""
    lines = ["# What the papers' public code does", "", FACTS_TEXT, "", "[All papers](../papers.md)", ""]
    for paper in dict.fromkeys(fact.paper for fact in read_facts()):
        count = len(published_recipes(recipes, paper))
        lines += [f"## {paper}", "", "| what the code does | source | used by |", "|---|---|---|"]
        for fact in (fact for fact in read_facts() if fact.paper == paper):
            why = "".join(
                f". {len(one.recipes)} {'recipes do' if len(one.recipes) > 1 else 'recipe does'} not: {one.because}"
                for one in fact.unused
            )
            lines.append(f"| {fact.text} | {fact.source} | {len(fact.used)} of {count} recipes{why} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
