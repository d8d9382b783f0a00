"""The papers' tables and figures as recipes, run by one command each, with verdicts."""

from fedloom_studies.reproduce.execute import TimeBudget, reproduce
from fedloom_studies.reproduce.recipe import Claim, Paper, Recipe, recipe, recipes
from fedloom_studies.reproduce.summary import RecipeSummary

__all__ = ["Claim", "Paper", "Recipe", "RecipeSummary", "TimeBudget", "recipe", "recipes", "reproduce"]
