"""How unlike the clients are, from the recorded class counts: every seed, and all together."""

from __future__ import annotations

import math
from html import escape
from typing import Any, NamedTuple

import numpy as np

from fedloom.report.reading import Numbers, Run

TITLES = {
    "sizes": "Samples per client",
    "emd": "Earth mover's distance",
    "js": "Jensen-Shannon divergence",
    "effective_classes": "Effective classes",
}


class Skew(NamedTuple):
    """Figures of one partition, a value per client each; nan for a client without samples.

    Attributes:
        seed: of the partition.
        values: ``sizes``; and for classes, against the labels of all: ``emd`` (sum of absolute differences, in [0, 2]),
            ``js`` (Jensen-Shannon divergence to base 2, in [0, 1]), ``effective_classes`` (exponential of the entropy).
    """

    seed: int
    values: dict[str, Numbers]

    def words(self) -> str:
        """The means over clients, e.g. ``earth mover's distance 1.02, ...``."""
        means = {name: _mean(values) for name, values in self.values.items() if name != "sizes"}
        titles = {name: TITLES[name] if name == "js" else TITLES[name].lower() for name in means}
        return ", ".join(f"{titles[name]} {mean:.3g}" for name, mean in means.items())


def same_data(runs: list[Run]) -> list[list[Run]]:
    """The runs in groups whose clients hold the same samples by class, seed by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        sizes = [skew.values["sizes"].tolist() for skew in skews_of(run)]
        found.setdefault(repr([run.summary.partition.counts, run.summary.partition.clients, sizes]), []).append(run)
    return list(found.values())


def skews_of(run: Run) -> list[Skew]:
    """The skew of every recorded partition of a run."""
    seeds = list(dict.fromkeys(record.seed for record in run.summary.runs))
    partition = run.summary.partition
    found = []
    for index, table in enumerate(partition.counts):
        counts = np.array(table, dtype=np.float64)
        values = label_skew(counts) if counts.shape[1] else _recorded_sizes(partition.skew, index)
        found.append(Skew(seeds[index] if index < len(seeds) else index, values))
    return [skew for skew in found if skew.values]


def label_skew(counts: Numbers) -> dict[str, Numbers]:
    """See `Skew`; counts are ``[n, C]``."""
    size = counts.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        p, q = counts / size[:, None], counts.sum(0) / counts.sum()
        js = (_entropy((p + q) / 2) - (_entropy(p) + _entropy(q[None])) / 2) / math.log(2)
    effective = np.exp(_entropy(p))
    return {"sizes": size, "emd": np.abs(p - q).sum(1), "js": np.maximum(js, 0), "effective_classes": effective}


def _entropy(p: Numbers) -> Numbers:
    found: Numbers = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), p * 0).sum(1)
    return found


def _recorded_sizes(skew: dict[str, Any] | list[dict[str, Any]], index: int) -> dict[str, Numbers]:
    """Sizes where there are no classes to count."""
    recorded = skew[index] if isinstance(skew, list) and index < len(skew) else {}
    return {"sizes": np.array(recorded["sizes"], dtype=np.float64)} if recorded.get("sizes") else {}


def skew_table(runs: list[Run]) -> str:
    """An HTML table: a line per run and seed, mean over clients with the smallest and the largest."""
    groups = same_data(runs)
    found = [(", ".join(run.label for run in group), skew) for group in groups for skew in skews_of(group[0])]
    if not found:
        return ""
    names = [name for name in TITLES if any(name in skew.values for _, skew in found)]
    several = len(groups) > 1
    heads = [*(["Run"] if several else []), "Seed", *(TITLES[name] for name in names)]
    body = []
    for label, skew in found:
        first = f'<th scope="row">{escape(label)}</th><td>{skew.seed}</td>' if several else ""
        first = first or f'<th scope="row">{skew.seed}</th>'
        body.append(f"<tr>{first}{''.join(_cell(skew.values.get(name)) for name in names)}</tr>")
    if len(found) > 1:
        pooled = {name: np.concatenate([s.values.get(name, np.empty(0)) for _, s in found]) for name in names}
        first = '<th scope="row">All</th>' + ("<td></td>" if several else "")
        body.append(f'<tr class="all">{first}{"".join(_cell(pooled[name]) for name in names)}</tr>')
    head = "".join(f'<th scope="col"{" class=text" if i == 0 else ""}>{title}</th>' for i, title in enumerate(heads))
    return (
        "<h3>Skew of every seed</h3>"
        "<p class=lead>Mean over the clients, and the smallest and largest of them. Earth mover's distance (0 to 2) "
        "and Jensen-Shannon divergence (0 to 1) are of a client's labels to those of all clients; effective classes "
        "are the exponential of the entropy of its labels.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Skew of every seed"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(values: Numbers | None) -> str:
    known = np.empty(0) if values is None else values[np.isfinite(values)]
    if not len(known):
        return "<td></td>"
    mean, low, high = (f"{v:.2f}" if known.max() < 20 else f"{v:.0f}" for v in (known.mean(), known.min(), known.max()))
    return f'<td>{mean} <span class="half">{low} to {high}</span></td>'


def _mean(values: Numbers) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
