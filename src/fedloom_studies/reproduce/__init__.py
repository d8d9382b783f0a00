"""The papers' tables and figures as recipes, run by one command each, with verdicts."""

from fedloom_studies.reproduce.execute import Budget, reproduce
from fedloom_studies.reproduce.recipe import Claim, Paper, Recipe, recipe, recipes
from fedloom_studies.reproduce.summary import Summary

__all__ = ["Budget", "Claim", "Paper", "Recipe", "Summary", "recipe", "recipes", "reproduce"]
