"""Sites of a deployment: the rounds that each site joined or missed, and the reasons for rejected replies.

A second table shows the privacy budget spent.
"""

from __future__ import annotations

import numpy as np

from fedloom.formats import format_fixed, format_percent, format_significant
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.run import Run
from fedloom.rundir import SiteSummary

MAX_ROUND_LINES = 25
"""Maximum number of lines in a table by round. If there are more rounds, an evenly spaced selection is shown, including
the first and the last round."""

SITES_TEXT = "The run's progress at the sites. A round counts for a site once its upload is accepted."


def site_tables(runs: list[Run]) -> str:
    """Render an HTML table for each run of a deployment. If all runs are simulations, return ""."""
    parts = []
    for run in runs:
        rounds = max((record.rounds for record in run.summary.runs), default=0)
        lines = [_site_line(name, site, rounds) for name, site in run.summary.sites.items()]
        stale = [site.staleness for site in run.summary.sites.values()]
        if lines:
            title = run.label if len(runs) > 1 else ""
            heads: tuple[str, ...] = (
                "Site", "Rounds", "Share", "Missed", "Last reply", "Rejected", "Reason, by check",
            )  # fmt: skip
            if any(s is not None for s in stale):
                heads = (*heads, "Mean staleness")
                lines = [[*line, "" if s is None else format_fixed(s, 1)] for line, s in zip(lines, stale, strict=True)]
            parts.append(render_scrolling_table(f"Sites of {run.label}", heads, lines, (4, 6), title))
    return "".join(parts)


def privacy_tables(runs: list[Run]) -> str:
    """Render an HTML table of epsilon by round for each run that spent any privacy budget.

    The table contains one column per method. Each cell is the maximum over seeds.
    """
    parts = []
    for run in runs:
        spent: dict[str, dict[int, float]] = {}
        for key, points in run.totals.items():
            if key.metric == "epsilon":
                by_round = spent.setdefault(key.method, {})
                for t, value in zip(points.round.tolist(), points.value.tolist(), strict=True):
                    by_round[t] = max(value, by_round.get(t, 0.0))
        if spent:
            rounds = sorted(set[int]().union(*spent.values()))
            places = np.unique(np.linspace(0, len(rounds) - 1, MAX_ROUND_LINES).round().astype(int))
            values = [[format_significant(spent[m][t]) if t in spent[m] else "" for m in spent] for t in rounds]
            lines = [[f"{rounds[k]}", *values[k]] for k in places]
            title = run.label if len(runs) > 1 else ""
            parts.append(render_scrolling_table(f"Privacy spent in {run.label}", ("Round", *spent), lines, title=title))
    return "".join(parts)


def _site_line(name: str, site: SiteSummary, rounds: int) -> list[str]:
    share = format_percent(site.accepted / rounds) if rounds else ""
    last = (site.last_reply or "")[:19].replace("T", " ") or ("none accepted" if site.rejected else "never")
    why = "; ".join(f"step {step}: {one.reason} ({one.count})" for step, one in site.rejected.items())
    rejected = sum(one.count for one in site.rejected.values())
    mark = "" if site.here else " (gone)"
    return [name, f"{site.accepted}", share, f"{site.missed}", f"{last}{mark}", f"{rejected}", why]
