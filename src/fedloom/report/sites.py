"""The sites of a deployment: rounds that each took part in or missed, and why its replies were rejected."""

from __future__ import annotations

from html import escape

from fedloom.report.reading import Run, Site
from fedloom.report.tables import scrolling

SITES = "Where the run took place. A round counts for a site once its upload was accepted."


def site_tables(runs: list[Run]) -> str:
    """An HTML table per deployed run, nothing where all runs are simulations."""
    parts = []
    for run in runs:
        rounds = max((record.rounds for record in run.summary.runs), default=0)
        lines = [_line(name, site, rounds) for name, site in run.summary.sites.items()]
        if lines:
            title = f"<h3>{escape(run.label)}</h3>" if len(runs) > 1 else ""
            heads = ("Site", "Rounds", "Share", "Missed", "Last reply", "Rejected", "Why, by step of the check")
            parts.append(title + scrolling(f"Sites of {run.label}", heads, lines, (4, 6)))
    return "".join(parts)


def _line(name: str, site: Site, rounds: int) -> list[str]:
    share = f"{site.accepted / rounds:.0%}" if rounds else ""
    last = "never" if site.last_reply is None else site.last_reply[:19].replace("T", " ")
    why = "; ".join(f"step {step}: {one.reason} ({one.count})" for step, one in site.rejected.items())
    rejected = sum(one.count for one in site.rejected.values())
    cells = (
        name,
        f"{site.accepted}",
        share,
        f"{site.missed}",
        last + ("" if site.here else " (gone)"),
        f"{rejected}",
        why,
    )
    return [escape(cell) for cell in cells]
