"""HTML of a report, built with templates that escape every text, so that recorded names are never read as markup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import

    loader = PackageLoader("fedloom.lab.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render_part(name: str, /, **values: object) -> str:
    """Render a part of `templates/parts.html`. Texts among the values are escaped."""
    return str(getattr(_templates().get_template("parts.html").module, name)(**values)).strip()


def render_page(**values: object) -> str:
    """Render the whole page. Texts among the values are escaped, except the output of `render_part`."""
    page: str = _templates().get_template("page.html").render(**values)
    return page + "\n"


def scrolling(
    label: str, heads: Sequence[str], lines: Sequence[Sequence[object]], text: Sequence[int] = (), title: str = ""
) -> str:
    """Render an HTML table that scrolls sideways. The first cell of a line is its heading.

    Args:
        label: description of the table for screen readers.
        heads: titles of the columns.
        lines: cells. A line that begins with ``All`` is highlighted.
        text: columns besides the first that contain sentences.
        title: heading above the table. Empty for a table without heading.
    """
    return render_part("table", label=label, heads=heads, lines=lines, text=text, title=title)
