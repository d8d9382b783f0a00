"""Sentences about the reasons for verdicts, filled with measured numbers.

The sentences may contain three kinds of placeholders: ``{A - B}`` for the measured difference between two references
``RECIPE | VARIANT | METHOD: MODEL[: FIGURE]``, expressed in words, ``{A}`` for the mean of one reference, and
``{RECIPE}`` for a link to a recipe. A sentence is omitted if the current version of its recipe has no result. A
sentence whose difference is not significant raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from fedloom.errors import ConfigError
from fedloom_studies.reproduce import judge
from fedloom_studies.reproduce.cells import finite_by_seed
from fedloom_studies.reproduce.figures import Reference, get_unit
from fedloom_studies.reproduce.page import is_earlier_version
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.summary import RecipeSummary

PAPERS_FOLDER = "papers"
"""Folder next to the page about all papers that contains a page and a figure for each recipe."""


def fill_numbers(why: str, recipes: Mapping[str, Recipe], summaries: Mapping[str, RecipeSummary | None]) -> str:
    """Return the sentences with their placeholders replaced by measured numbers."""
    if "\n\n" in why:
        paragraphs = (fill_numbers(one, recipes, summaries) for one in why.split("\n\n"))
        return "\n\n".join(filter(None, paragraphs))
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z*])", why) if why else []
    whole = []
    for sentence in sentences:
        shown: dict[str, str | None] = {}
        for held in re.findall(r"\{([^{}]+)\}", sentence):
            shown[held] = _measured_text(held.split(" - "), recipes, summaries)
        if all(text is not None for text in shown.values()):
            plain = [text for held, text in shown.items() if "|" in held and " - " not in held]
            if len(set(plain)) < len(plain):
                raise ConfigError(
                    f"papers.toml: {sentence!r} says that values differ, but they are equal: "
                    f"{', '.join(map(str, plain))}"
                )
            whole.append(re.sub(r"\{([^{}]+)\}", lambda m, shown=shown: str(shown[m[1]]), sentence))
    return " ".join(whole)


def _measured_text(
    sides: list[str], recipes: Mapping[str, Recipe], summaries: Mapping[str, RecipeSummary | None]
) -> str | None:
    """Render the link to a recipe, or a measured mean or difference. Return None if the value was not measured.

    Raises:
        ConfigError: a difference is not significant, because it has no interval or its interval contains 0.
    """
    name = sides[0].split("|")[0].strip()
    if "|" not in sides[0]:
        return f"[{name}]({PAPERS_FOLDER}/{name}.md)"
    recipe, summary = recipes[name], summaries.get(name)
    if summary is None or is_earlier_version(recipe, summary):
        return None
    values = []
    for side in sides:
        _, variant, reference = (part.strip() for part in side.split("|"))
        read = Reference.create(reference, recipe.paper.figure)
        values.append(finite_by_seed(summary.numbers.get(variant, {}).get(str(read), {})))
        of = get_unit(read.figure)
    if not all(values):
        return None
    if len(sides) == 1:
        text = of.value(float(np.mean(list(values[0].values()))))
    else:
        look = judge.compare_references(recipe, *values, log=of.compares_ratios)
        if not look.half < abs(look.difference):
            shown = of.lead(look.difference, look.half)
            raise ConfigError(f"papers.toml: {' - '.join(sides)!r} is not clear: {shown}. Omit the sentence")
        text = of.write_words(look.difference, look.half)
    return f"[{text}]({PAPERS_FOLDER}/{name}.md)"
