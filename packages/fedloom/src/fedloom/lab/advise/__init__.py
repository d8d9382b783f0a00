"""Advice: a race of a small portfolio of methods on validation data, before the main budget is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import getter

if TYPE_CHECKING:
    from fedloom.lab.advise.advisor import Advisor as Advisor
    from fedloom.lab.advise.answer import Advice as Advice
    from fedloom.lab.advise.answer import Choice as Choice
    from fedloom.lab.advise.answer import Verdict as Verdict
    from fedloom.lab.advise.race import DEFAULT_BUDGET_RUNS as DEFAULT_BUDGET_RUNS
    from fedloom.lab.advise.settings import read_portfolio as read_portfolio

_ATTRIBUTE_PATHS = {
    "Advice": "fedloom.lab.advise.answer:Advice",
    "Advisor": "fedloom.lab.advise.advisor:Advisor",
    "Choice": "fedloom.lab.advise.answer:Choice",
    "Verdict": "fedloom.lab.advise.answer:Verdict",
    "DEFAULT_BUDGET_RUNS": "fedloom.lab.advise.race:DEFAULT_BUDGET_RUNS",
    "read_portfolio": "fedloom.lab.advise.settings:read_portfolio",
}

__all__ = [*_ATTRIBUTE_PATHS]

__getattr__ = getter(__name__, _ATTRIBUTE_PATHS)
