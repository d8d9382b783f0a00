"""HTML of a report, from templates that escape all texts. Recorded names are never interpreted as markup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any


@cache
def _template_environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import

    loader = PackageLoader("fedloom.lab.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render_part(name: str, /, **values: object) -> str:
    """Render one of the parts in `templates/parts.html`. String values are escaped."""
    return str(getattr(_template_environment().get_template("parts.html").module, name)(**values)).strip()


def render_page(**values: object) -> str:
    """Render the whole page. String values are escaped, except values returned by `render_part`."""
    page: str = _template_environment().get_template("page.html").render(**values)
    return page + "\n"


def render_scrolling_table(
    label: str, heads: Sequence[str], lines: Sequence[Sequence[object]], text: Sequence[int] = (), title: str = ""
) -> str:
    """Render an HTML table that scrolls horizontally. The first cell of each line is its heading.

    Args:
        label: description of the table for screen readers.
        heads: titles of the columns.
        lines: cells of each line. A line whose first cell is ``All`` is highlighted.
        text: indices of the columns, apart from the first one, that contain text instead of numbers.
        title: heading above the table. If the title is empty, the table has no heading.
    """
    return render_part("table", label=label, heads=heads, lines=lines, text=text, title=title)
