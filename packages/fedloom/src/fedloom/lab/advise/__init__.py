"""Advice: a race of a small portfolio of methods on validation data, before the budget is spent."""

from __future__ import annotations

from fedloom.lab.advise.advise import advise
from fedloom.lab.advise.advisor import DEFAULT_BUDGET_RUNS, Advisor
from fedloom.lab.advise.answer import Advice, Choice, Verdict
from fedloom.lab.advise.settings import read_portfolio

__all__ = ["DEFAULT_BUDGET_RUNS", "Advice", "Advisor", "Choice", "Verdict", "advise", "read_portfolio"]
