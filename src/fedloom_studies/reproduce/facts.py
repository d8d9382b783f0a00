"""Facts about the papers' public code, and which recipes in the published protocol use them (``facts.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from fedloom.rundir import label_of
from fedloom.values import Value
from fedloom_studies.reproduce.recipe import Recipe


class Unused(Value):
    """Recipes that do not use a fact, and why."""

    because: str
    recipes: tuple[str, ...] = Field(min_length=1)


class Fact(Value):
    """What a paper's public code does."""

    paper: str = Field(description="as the recipes' titles begin")
    text: str = Field(description="what the code does")
    source: str = Field(description="repository, commit, file and lines; none where there is no public code")
    holds: dict[str, Any] = Field(
        default_factory=dict, description="options of an experiment that show the use, as local.lr or method.LABEL.mu"
    )
    used: tuple[str, ...] = Field((), description="recipes that use it")
    unused: tuple[Unused, ...] = Field((), description="recipes that do not")

    @property
    def recipes(self) -> list[str]:
        """Every recipe that has a line."""
        return [*self.used, *(name for reason in self.unused for name in reason.recipes)]


@cache
def facts() -> tuple[Fact, ...]:
    """Every fact, by paper."""
    document = tomllib.loads(files("fedloom_studies.reproduce").joinpath("facts.toml").read_text())
    return tuple(Fact(**one) for one in document["fact"])


def published(recipes: Mapping[str, Recipe], paper: str) -> list[str]:
    """The recipes of a paper that need a line for each of its facts: those in the published protocol."""
    of_paper = [(name, one) for name, one in recipes.items() if one.paper.title.startswith(f"{paper},")]
    return [name for name, one in of_paper if one.paper.mode == "published"]


def holds(fact: Fact, recipe: Recipe) -> bool:
    """Whether every experiment of a recipe, as it is run here, has the options that show the use of a fact."""
    documents = recipe.at("laptop" if "laptop" in recipe.scales else "full").values()
    return all(_option(document, key) == value for document in documents for key, value in fact.holds.items())


def _option(document: Mapping[str, Any], key: str) -> Any:
    """An option by its dotted key; of a method by its label, with the constants that ``settings`` names."""
    table, _, rest = key.partition(".")
    if table != "method":
        found = document.get(table)
        return found.get(rest) if rest and found is not None else found
    label, _, option = rest.rpartition(".")
    methods = [m for m in document["method"] if label_of(m) == label or label_of(m).startswith(f"{label},")]
    values = {m.get(option, m.get("settings") if option == "solver" else None) for m in methods}
    return values.pop() if len(values) == 1 else None


def table(recipes: Mapping[str, Recipe], paper: str) -> Iterator[str]:
    """The facts of a paper as lines of a Markdown table."""
    yield from ("| what the public code does | where | used by its recipes |", "|---|---|---|")
    for fact in facts():
        if fact.paper == paper:
            count = f"{len(fact.used)} of {len(published(recipes, paper))}"
            why = "; ".join(f"not in {len(one.recipes)}: {one.because}" for one in fact.unused)
            yield f"| {fact.text} | {fact.source} | {count}{f'; {why}' if why else ''} |"
    yield ""
