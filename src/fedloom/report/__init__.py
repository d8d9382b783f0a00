"""Reports of recorded runs: one offline page, tables as Arrow, CSV and LaTeX, charts as SVG. Reads files only."""

from __future__ import annotations

from fedloom.report.comparison.card import write_card
from fedloom.report.page import write
from fedloom.report.tables import result_table

__all__ = ["result_table", "write", "write_card"]
