"""The papers' tables and figures as recipes, run by one command each, with verdicts."""

from fedloom.reproduce.execute import Budget, reproduce
from fedloom.reproduce.recipe import Claim, Paper, Recipe, recipe, recipes
from fedloom.reproduce.summary import Summary

__all__ = ["Budget", "Claim", "Paper", "Recipe", "Summary", "recipe", "recipes", "reproduce"]
