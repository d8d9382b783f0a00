"""Advice: a small portfolio of methods competes on validation data before you spend the main budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import lazy_names, make_getattr

if TYPE_CHECKING:
    from fedloom.lab.advise.advisor import Advisor as Advisor
    from fedloom.lab.advise.answer import Advice as Advice
    from fedloom.lab.advise.answer import Choice as Choice
    from fedloom.lab.advise.answer import Verdict as Verdict
    from fedloom.lab.advise.race import DEFAULT_BUDGET_RUNS as DEFAULT_BUDGET_RUNS
    from fedloom.lab.advise.settings import read_portfolio as read_portfolio

__all__ = [*lazy_names(__name__)]

__getattr__ = make_getattr(__name__)
