"""Gains: comparison of each named site's local model with the federated model, with paired intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedloom.formats import UNKNOWN_DASH, finite_or_none, format_interval, format_pair
from fedloom.lab.report.comparison.contenders import best_row, last_points, select_contenders, select_run_contenders
from fedloom.lab.report.comparison.family import (
    DifferenceTest,
    PairVerdict,
    pair_verdict,
    run_family_tests,
    seed_differences,
    untested_reason,
)
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_part, render_scrolling_table
from fedloom.lab.report.naming import describe_figure, lowercase_title, metric, titled
from fedloom.lab.report.numbers import MIN_SEEDS, Estimate, Row, find_run, test_metrics
from fedloom.lab.report.run import Key, Numbers, Run
from fedloom.lab.report.tables import (
    BOOKTABS_LINE,
    decimals_of_metric,
    escape_tex,
    latex_tabular,
    mark_cell,
    render_cell,
)

MAX_LISTED_SITES = 20
"""Maximum number of sites that are listed individually."""
SITE_PARTITIONS = ("by-column", "natural")
"""Kinds of partitions whose clients are real sites, even if their names are numbers."""
MEAN_ROWS = ("Mean over sites", "Mean weighted by training samples")

GAINS_TEXT = (
    "Alone: a model trained on the site's own samples. Together: the federated method with the best mean. A gain is "
    "the difference between them with the same seed. A positive gain means that 'together' is better. The interval "
    "decides the verdict: 'together' is better if the interval is above 0, and worse if it is below 0. All rows form "
    f"one family of paired t tests (Holm's correction, level 5 %, at least {MIN_SEEDS} seeds). Seeds and folds share "
    "samples, so the variance of a gain is corrected (Nadeau and Bengio) using the site's numbers of test and "
    "training samples. The method was chosen based on the same results, so its gain is slightly optimistic."
)


class SiteGain(NamedTuple):
    """Line of the table of gains, for one site or for a mean over sites.

    Attributes:
        site: name of the site or of the mean.
        samples: number of training samples with each seed. Empty if not recorded.
        events: number of training samples of the second class with each seed. Empty unless the task has exactly two
            classes.
        alone: result of the site's local model, keyed by seed.
        together: result of the federated method, keyed by seed.
        comparison: result of the federated method minus the result of the local model. The sign is chosen so that a
            positive value favors the federated method. All rows of the table form one family of tests.
        reason: sentence that states why there is no gain. Empty if there is one.
    """

    site: str
    samples: tuple[int, ...]
    events: tuple[int, ...]
    alone: Estimate
    together: Estimate
    comparison: DifferenceTest
    reason: str

    @property
    def verdict(self) -> PairVerdict:
        """Verdict on the federated method compared with the local model."""
        return pair_verdict(self.comparison, higher=True)

    @property
    def words(self) -> str:
        """Verdict, followed by the reason if the difference is not tested."""
        reason = untested_reason(self.comparison) if self.comparison.seeds else "no result"
        return f"{self.verdict} ({reason})" if reason else str(self.verdict)


class SiteGains(NamedTuple):
    """Table of the gains at all sites in a run.

    Attributes:
        run: label of the run. Empty if there is only one run.
        metric: name of the primary metric.
        alone: row of the local-training method.
        together: row of the federated method with the best mean.
        lines: one line per site, followed by the means over sites.
    """

    run: str
    metric: str
    alone: Row
    together: Row
    lines: tuple[SiteGain, ...]


def site_gains(runs: list[Run], rows: list[Row], lead: str) -> list[SiteGains]:
    """Return a table for each run with few sites, a local-training method, and a federated method.

    Args:
        runs: runs that contain the rows.
        rows: rows of the results table, one for each model of each method.
        lead: metric used to compare the models.
    """
    tables = (
        _gains_table(run, [row for row in rows if find_run(runs, row) is run], lead) for run in runs if _is_by_site(run)
    )
    return [table for table in tables if table is not None]


def _is_by_site(run: Run) -> bool:
    numbered = all(name.isdigit() for name in run.names)
    return 1 < len(run.names) <= MAX_LISTED_SITES and (
        not numbered or run.options.get("partition", {}).get("kind") in SITE_PARTITIONS
    )


def _gains_table(run: Run, rows: list[Row], lead: str) -> SiteGains | None:
    shown = [row for row in select_contenders([run], rows) if row.result(lead)]
    alone = next((row for row in shown if row.role == "alone"), None)
    together = federated_leader(shown, lead)
    if alone is None or together is None:
        return None
    sign = 1 if metric(lead).higher_is_better else -1
    results = [values_by_seed(run, row, lead) for row in (alone, together)]
    pairs = [(site_estimate(results[0], k), site_estimate(results[1], k)) for k in range(len(run.names))]
    pairs += [_site_means(run, *results, weigh=weigh) for weigh in (False, True)]
    pairs = [(replace(a, repeats=alone.repeats), replace(b, repeats=together.repeats)) for a, b in pairs]
    better = (
        seed_differences(shared, local) if sign > 0 else seed_differences(local, shared) for local, shared in pairs
    )
    ratios = run.ratios
    by_line = [*(ratios if ratios is not None else [0.0] * len(run.names)), run.ratio, run.ratio]
    tests = run_family_tests(dict(enumerate(better)), ratio=dict(enumerate(map(float, by_line))))
    lines = []
    for k, (name, (local, shared)) in enumerate(zip((*run.names, *MEAN_ROWS), pairs, strict=True)):
        place = k if k < len(run.names) else None
        samples, events = _site_counts(run, place, lead)
        reason = _no_gain_reason(run, alone, place, name, samples, events, lead) if not tests[k].seeds else ""
        lines.append(SiteGain(name, samples, events, local, shared, tests[k], reason))
    return SiteGains(alone.run, lead, alone, together, tuple(lines))


def federated_leader(rows: Sequence[Row], lead: str) -> Row | None:
    """Return the row of the federated method with the best mean (see `best_row`), or None if there is none.

    Args:
        rows: one row of each method.
        lead: metric used to compare the models.
    """
    return best_row([row for row in rows if row.algorithm and row.role not in ("alone", "pooled")], lead)


def find_leader(run: Run, runs: list[Run], rows: Sequence[Row], lead: str) -> Row | None:
    """Return the federated method with the best mean in a run, or None if there is none."""
    return federated_leader(select_run_contenders(run, runs, rows, lead), lead)


def values_by_seed(run: Run, row: Row, name: str) -> dict[int, Numbers]:
    """Return the clients' values ``[n]`` in the last round, keyed by seed. Missing values are NaN."""
    values, count = {}, run.clients
    for record in row.records:
        points = None if record.lost else last_points(run, row, record.seed, "test", name)
        if points is not None:
            values[record.seed] = np.full(count, np.nan)
            values[record.seed][points.client] = points.value
    return values


def site_estimate(values: dict[int, Numbers], place: int) -> Estimate:
    """Return the values of the client with the given index for all seeds."""
    return Estimate({seed: float(by_client[place]) for seed, by_client in values.items()})


def _site_means(
    run: Run, alone: dict[int, Numbers], together: dict[int, Numbers], *, weigh: bool
) -> tuple[Estimate, Estimate]:
    """For each seed, return both means over the sites with both results, optionally weighted by training samples."""
    means: tuple[dict[int, float], dict[int, float]] = {}, {}
    for seed in alone.keys() & together.keys():
        both = np.isfinite(alone[seed]) & np.isfinite(together[seed])
        if not both.any() or (weigh and seed not in run.partitions):
            continue
        weights = run.partitions[seed].sizes[both] if weigh else np.ones(both.sum())
        for mean, values in zip(means, (alone, together), strict=True):
            mean[seed] = float(np.average(values[seed][both], weights=weights)) if weights.sum() else math.nan
    return Estimate(means[0]), Estimate(means[1])


def _site_counts(run: Run, place: int | None, lead: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of training samples and events at a site, or at all sites, for each seed."""
    parts = [*run.partitions.values()]
    chosen = slice(None) if place is None else slice(place, place + 1)
    binary = lead == "auroc" and all(part.counts.shape[1] == 2 for part in parts)
    samples = tuple(int(part.sizes[chosen].sum()) for part in parts)
    return samples, tuple(int(part.counts[chosen, 1].sum()) for part in parts) if binary else ()


def _no_gain_reason(
    run: Run, alone: Row, place: int | None, name: str, samples: tuple[int, ...], events: tuple[int, ...], lead: str
) -> str:
    if place is None:
        return f"{name}: there are no seeds with both results."
    parts = [f"{_span_text(samples)} samples"] if samples else []
    parts += [f"{_span_text(events)} event{'s' * (_span_text(events) != '1')}"] if events else []
    about = f"{name} ({', '.join(parts)} in training)" if parts else name
    seeds = [record.seed for record in alone.records]
    if seeds and all(place in run.attackers(seed) for seed in seeds):
        return f"{about} is an attacker and is not scored."
    tested = any(
        np.isfinite(points.value[points.client == place]).any()
        for seed in seeds
        for other in test_metrics(run, alone.method, alone.model)
        if (points := run.series.get(Key(alone.method, seed, alone.model, "test", other))) is not None
    )
    title = lowercase_title(metric(lead).title)
    if not tested:
        return f"{about} has no {title}, because none of its samples was tested."
    return (
        f"{about} has no "
        f"{title}{', because its test sets contain only one class' if lead in ('auroc', 'auprc') else ''}."
    )


def _span_text(values: tuple[int, ...]) -> str:
    """Return text with the minimum and the maximum of several counts.

    >>> _span_text((16, 17, 16)), _span_text((1, 1)), _span_text(())
    ('16 to 17', '1', '–')
    """
    ends = sorted({min(values), max(values)}) if values else []
    return " to ".join(map(str, ends)) or UNKNOWN_DASH


def gains_csv(tables: Sequence[SiteGains]) -> str:
    """Return the unrounded, unscaled gains as CSV. Unknown values are left empty."""
    records = [_csv_record(table, line) for table in tables for line in table.lines]
    return render_csv(list(records[0]), records) if records else ""


def _csv_record(table: SiteGains, line: SiteGain) -> dict[str, Any]:
    test = line.comparison
    numbers = {
        "samples": float(np.mean(line.samples)) if line.samples else math.nan,
        "events": float(np.mean(line.events)) if line.events else math.nan,
        "alone": line.alone.mean, "together": line.together.mean, "gain": test.mean, "half_width": test.half,
        "p": test.p, "p_holm": test.holm,
    }  # fmt: skip
    return {
        "run": table.run, "site": line.site, "metric": table.metric, "alone_method": table.alone.method,
        "together_method": table.together.method, "together_model": table.together.model, "seeds": test.seeds,
        **{key: finite_or_none(value) for key, value in numbers.items()},
        "verdict": str(line.verdict), "reason": line.reason or untested_reason(line.comparison),
    }  # fmt: skip


def gains_html(tables: Sequence[SiteGains]) -> str:
    """Render the gains as HTML tables, each followed by the reasons for missing results."""
    text = ""
    for table in tables:
        lines = [_gain_words(table, line) for line in table.lines]
        label = f"Every site alone and together {table.run}".strip()
        text += render_scrolling_table(label, _column_heads(table), lines, title=table.run)
        text += render_part("texts", texts=[line.reason for line in table.lines if line.reason])
    return text


def _column_heads(table: SiteGains) -> list[str]:
    shown = describe_figure(table.metric)
    unit = " (points)" if shown.scale == 100 else ""
    together = f"{table.together.method} {table.together.model}".strip()
    counts = ["Training samples", *(["Events"] if _has_events(table) else [])]
    return ["Site", *counts, f"{titled(shown)} alone", f"Together ({together})", f"Gain{unit}", "Verdict"]


def _has_events(table: SiteGains) -> bool:
    """Return True if the task has events. Regression has none."""
    return any(line.events for line in table.lines)


def _result_cells(table: SiteGains, line: SiteGain) -> list[tuple[str, str]]:
    """Format the two results and the gain, each with its interval's half-width."""
    scale = describe_figure(table.metric).scale
    mean, half = line.comparison.mean * scale, line.comparison.half * scale
    gain = (
        format_interval(mean, half, decimals_of_metric(table.metric), signed=True)
        if line.comparison.seeds
        else (UNKNOWN_DASH, "")
    )
    return [*(render_cell(table.metric, estimate) for estimate in (line.alone, line.together)), gain]


def _gain_words(table: SiteGains, line: SiteGain) -> list[str]:
    numbers = [format_pair(*number) for number in _result_cells(table, line)]
    events = [_span_text(line.events)] if _has_events(table) else []
    return [line.site, _span_text(line.samples), *events, *numbers, line.words]


def gains_latex(tables: Sequence[SiteGains], caption: str) -> str:
    """Render the gains as LaTeX, with one tabular environment per run (package booktabs).

    Gains are printed in bold at sites where the federated method is better.
    """
    text = [BOOKTABS_LINE]
    for table in tables:
        words = escape_tex(f"{caption}, {table.run}" if table.run else caption) + (
            ": every site alone and together. Gains are paired over seeds. Bold: `together' is better "
            "(paired t test, Holm, 5\\,\\%). The interval of a gain decides the verdict."
        )
        lines = []
        for line in table.lines:
            words_of_line = [escape_tex(word).replace(UNKNOWN_DASH, "--") for word in _gain_words(table, line)]
            alone, together, gain = _result_cells(table, line)
            cells = [mark_cell(*alone), mark_cell(*together), mark_cell(*gain, best=line.verdict == PairVerdict.BETTER)]
            lines.append(" & ".join([*words_of_line[:-4], *cells, words_of_line[-1]]) + " \\\\")
        heads = _column_heads(table)
        text += latex_tabular(words, f"l{'r' * (len(heads) - 2)}l", heads, lines)
    return "\n".join([*text, ""])
