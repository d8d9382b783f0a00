"""Tables and figures of papers as recipes. Each recipe is run by a single command and produces verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import make_getattr
from fedloom_studies.reproduce.recipe import Claim, Paper, Recipe, read_recipe, read_recipes

__all__ = ["Claim", "Paper", "Recipe", "RecipeSummary", "TimeBudget", "read_recipe", "read_recipes", "reproduce"]

if TYPE_CHECKING:
    from fedloom_studies.reproduce.execute import TimeBudget as TimeBudget
    from fedloom_studies.reproduce.execute import reproduce as reproduce
    from fedloom_studies.reproduce.summary import RecipeSummary as RecipeSummary

__getattr__ = make_getattr(__name__)
"""Torch is imported only when a recipe is run. Listing names and titles does not import it."""
