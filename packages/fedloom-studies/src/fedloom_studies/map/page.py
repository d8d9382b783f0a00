"""Pages of the map, and a table of all results. The pages are generated only from the records."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.algorithms import REGISTRY
from fedloom.formats import format_fixed, format_option, format_options, format_percent, format_significant, write_total
from fedloom.lab.report import FAMILY_ERROR_LEVEL, MIN_SEEDS, render_table_csv
from fedloom_studies.map.equal import BothProtocols, Records, compare_protocols, equal_section, protocol_summary_lines
from fedloom_studies.map.judge import (
    DETECTION_PROBABILITY,
    MethodStanding,
    OverallComparison,
    SetupVerdict,
    compare_overall,
    judge_setup,
)
from fedloom_studies.map.pictures import STATUS_SIGNS, draw_ladder, draw_overview
from fedloom_studies.map.records import NOT_RUN_STATUS, CellRecord, stale_reason
from fedloom_studies.map.references import References, reference_lines
from fedloom_studies.map.rules import advise_rule, rules_section
from fedloom_studies.map.setups import POOLED_METHOD, REFERENCE_METHODS, Cell, Setup, list_network_parts
from fedloom_studies.map.statements import (
    DETECTABLE_GAIN_POINTS,
    MAP_FOLDER,
    advice_lines,
    finding_text,
    format_signed,
    join_with_and,
    join_with_commas,
    setup_sentences,
    share_of_cells,
    state_result,
    write_percent,
)
from fedloom_studies.map.wider import wider_bullet, wider_section
from fedloom_studies.reproduce.summary import write_seeds

CORRECTED_TEXT = (
    "## Corrections\n\n| earlier statement on this page (until November 2026) | reason for the correction |\n"
    "|---|---|\n| No method is better in 13 of 18 federations. 17 of 18 federations cannot detect 3 points. | The t "
    "test of a single method had four degrees of freedom. The moderated test estimates the variance from all "
    "methods of a federation, at a level of 2.5 %. |\n| FEMNIST writers: use local training | "
    "No test distinguishes 52 of the methods, so the cheapest of them is not a recommendation. The means of pFedMe and "
    "FedSLR are 30 points higher, and five seeds are too few to settle this difference. |\n| Attack, two classes per "
    "client, unequal amounts and five more: use local training or FedAvg | Five seeds cannot rule out a gain of 3 "
    "points. The page now shows the number of seeds that can. |\n"
    "| Strong label skew: use pFedMe, which is better than the baseline | With nine instead of five seeds, FedSLR has "
    "the best mean. pFedMe is better than the baseline, too. |\n"
    '| Methods "level with the best", and the method with the least traffic among them | A difference that is not '
    "significant is not proof of equality, and the page stated no margin. |\n"
    "| Clients under attack: FedACS has the best mean, 93.2 ± 1.6 % | By default, FedACS now counts models with the "
    "same direction as one model, and models that are too short for a 32-bit norm no longer take over its mixtures. "
    "FedACS and HeurFedAMP were measured again. |\n"
    "| Clients under attack: FedNova, q-FFL, SCAFFOLD, FIAELT and other methods that encode their uploads | The "
    "attackers forged the encoded upload, so the same attack had a different strength for each of these methods. They "
    "now forge the model, and the method encodes it. |\n"
)
"""Section about corrections to earlier versions of the page."""
NO_FIGURES: Records = MappingProxyType({})
PERCENT_COLUMNS = {
    "mean": "mean", "worst10": "worst 10 % of clients", "gain_local": "gain over local",
    "gain_fedavg": "gain over FedAvg", "mean_at_fedavg_work": "mean after FedAvg's gradients",
}  # fmt: skip
"""Titles of the columns shown as percentages on a setup's page, keyed by value."""
MAP_TEXT = """# Benchmark map

Which method suits which clients? This page compares all fedloom methods in {count} federations ({cells}). A
federation is a data set, its split into clients, and a model. `fedloom map --page docs/map.md` generates this page
from the records in `studies/results`. Only the section on corrections is written by hand.

The **baseline** of a federation is local training or FedAvg, whichever is better. If no method beats the baseline,
use the baseline.

{advice}

{attacked}

![Gain over the baseline, by method and federation]({folder}/map.svg)

Triangles mark significant differences: they point up if the method is better and down if it is worse. Pale colors
mark inconclusive differences. The other symbols are {signs}.

{finding}

## How it is measured

- **Equal tuning.** Every method gets {trials} trials in its [search space](tuning.md). Each trial runs for the full
  number of rounds, uses separate seeds, and is scored on validation data. The best settings are then run with {seeds}
  new seeds. The total budget for all federations is {hours} core-hours. If a federation is expensive to run, every
  method gets fewer trials. With only one trial, every method runs with its default settings, and the mean ranks
  exclude the federation. Some federations have additional seeds, which do not count toward this budget.

- **Equal rounds.** All methods train for the same number of rounds. Each federation's page also shows every
  method's result after it has computed as many gradients as FedAvg.

- **One model per method.** Some methods train both a global model and personal models. With these methods, each client
  uses the model that performs better on its validation data. The tables call this choice *hybrid*.

- **Significance tests.** A moderated t-test across seeds compares every method with the baseline. The tests of
  each federation are adjusted with Holm's correction. The interval of a *gain* comes from this test: it excludes 0
  if and only if the verdict is *better* or *worse*. All other verdicts are *inconclusive*. The interval of a *mean*
  is an unadjusted 95 % confidence interval across seeds. With fewer than {enough} seeds, no method is tested. The
  tuning guide explains [why this test was chosen](tuning.md#statistical-tests). In its simulations with five seeds, the
  rate of false verdicts is slightly above 5 %. With the variances of *many clients, few per round*, the rate is far
  above 5 %.

- **Scope of a verdict.** A new seed changes the split, the sampled clients and the initial models, but the samples
  stay the same. A verdict therefore applies only to these samples and not to new samples.

- **Power.** All gains in a federation are assumed to have the same standard deviation across seeds. This standard
  deviation determines how many seeds are needed to detect a gain of {wanted} points with a probability of
  {power}, at the first step of Holm's correction. The calculation does not use the observed gains. If fewer seeds
  were run, the page does not recommend the baseline.

- **Additional seeds.** If {seeds} seeds are too few, the required number of seeds (at most {ceiling}) is fixed before
  any additional seed is run. Every method then runs all additional seeds. A single test of all seeds replaces the
  earlier test, even if the earlier verdict was significant. This test uses the usual level without a correction for
  repeated testing, because the decision to add seeds depends only on the standard deviation. If the standard
  deviation turns out to be larger with all seeds, a new number is fixed in the same way.

{widened}- **Replication.** Some methods were run again with different seeds. A verdict is *seen twice* if the new runs
  lead to the same verdict. Otherwise, it is *not confirmed*.

- **Missing and stale results.** A method is *not applicable* if it cannot run in the federation. A record is *stale*
  if it comes from a different version of the method or the protocol. Verdicts include stale results:
  {stale} for equal rounds and {old} for equal gradients.

- **Extra network components.** With a plain network, some methods are equivalent to FedAvg or FedPer. These methods
  use networks with extra components: {parts}.

- **No regularizer.** The training losses have no regularizer. Without one, FedMiD and FedDualAvg are equivalent to
  FedAvg with a server learning rate.

- **No text.** The map does not include text data. The only text source that requires no download reads the installed
  Python's docstrings, so the data would differ between machines.

You can also download a table with one row per run, as [Parquet]({folder}/map.parquet) or
[CSV]({folder}/map.csv). A single command adds [your own
method](own-algorithm.md#compare-it-with-all-methods)."""


def map_pages(
    setups: Mapping[str, Setup],
    records: Records,
    references: References = NO_FIGURES,
    gradients: Records = NO_FIGURES,
    ruled: Records = NO_FIGURES,
    wider: Mapping[str, Setup] = MappingProxyType({}),
    widened: Records = NO_FIGURES,
) -> Iterator[tuple[str, str | bytes]]:
    """Yield the names and contents of all files of the map.

    The name of the map's page is "". All other files are written to `MAP_FOLDER`.

    Args:
        setups: setups, keyed by name.
        records: records at equal rounds.
        references: records of scikit-learn models.
        gradients: records at equal gradients.
        ruled: records of methods that were run with aggregation rules under attack.
        wider: setups with a wider model, keyed by name.
        widened: records of methods with the wider model.

    Raises:
        ModuleNotFoundError: scikit-posthocs is not installed.
    """
    verdicts = [judge_setup(setup, records) for setup in setups.values()]
    comparisons = [compare_protocols(j, records, gradients) for j in verdicts]
    together = compare_overall(verdicts)
    methods = list(dict.fromkeys([*(together.methods if together else ()), *REGISTRY, *(m for _, m in records)]))
    bullet = wider_bullet([*wider.values()], widened)
    yield "", _overview_page(verdicts, together, comparisons, references, ruled, bullet)
    yield "map.svg", draw_overview(verdicts, methods).encode()
    if together:
        halves = [math.nan] * len(together.ranks)
        title = f"mean rank over {len(together.setups)} federations"
        yield "ranks.svg", draw_ladder(together.methods, together.ranks, halves, title, groups=together.groups).encode()
    for j, both in zip(verdicts, comparisons, strict=True):
        yield (
            f"{j.setup.name}.md",
            "\n".join(
                [
                    *_setup_page(j, references),
                    *equal_section(both),
                    *(rules_section(ruled) if "attack" in j.setup.document else ()),
                    *(wider_section(j, wider[j.setup.name], widened) if j.setup.name in wider else ()),
                ]
            ),
        )
        if j.standings:
            figures = [s.figures["mean"] for s in j.standings]
            names, percent = [s.method for s in j.standings], [(100 * f.mean, 100 * f.half) for f in figures]
            title = f"test {j.standings[0].record.metric}, %"
            better = {s.method for s in j.standings if s.better}
            picture = draw_ladder(names, [m for m, _ in percent], [h for _, h in percent], title, full=better)
            yield f"{j.setup.name}.svg", picture.encode()
    table, parquet = verdict_table([*verdicts, *(both.gradients for both in comparisons)]), io.BytesIO()
    pq.write_table(table, parquet, compression="zstd")
    yield "map.parquet", parquet.getvalue()
    yield "map.csv", render_table_csv(table)


def _overview_page(
    verdicts: Sequence[SetupVerdict],
    together: OverallComparison | None,
    comparisons: Sequence[BothProtocols],
    references: References,
    ruled: Records,
    widened: str,
) -> str:
    setup = verdicts[0].setup
    wanted = sum(max(len(j.records), len(REGISTRY)) for j in verdicts)
    head = MAP_TEXT.format(
        count=len(verdicts), cells=share_of_cells(sum(len(j.records) for j in verdicts), wanted), trials=setup.trials,
        seeds=len(setup.seeds), ceiling=len((*setup.seeds, *setup.further)),
        enough=MIN_SEEDS, wanted=DETECTABLE_GAIN_POINTS, power=format_percent(DETECTION_PROBABILITY),
        folder=MAP_FOLDER, stale=sum(_count_stale(j.setup, j.records) for j in verdicts),
        old=sum(_count_stale(c.rounds.setup, c.records) for c in comparisons),
        finding=finding_text(verdicts), attacked=advise_rule(ruled), widened=widened,
        advice="\n".join(advice_lines(verdicts, references)),
        hours=format_fixed(sum(j.setup.share for j in verdicts) / 60, 1),
        signs=join_with_and([f"{sign} ({state})" for state, sign in STATUS_SIGNS.items()]),
        parts=join_with_and([f"{name} uses {format_options(parts)}" for name, parts in list_network_parts().items()]),
    )  # fmt: skip
    lines = [head, "", "## Federation by federation", ""]
    for j in verdicts:
        lines += [f"### [{j.setup.title}]({MAP_FOLDER}/{j.setup.name}.md)", ""]
        lines += [f"{j.setup.says}. {j.setup.training}", "", " ".join(setup_sentences(j)), ""]
    lines += [*protocol_summary_lines(comparisons), CORRECTED_TEXT, "## Ranks across all federations", ""]
    if together is None:
        lines += ["There are too few results from tuned federations to compare ranks."]
        return "\n".join(lines) + "\n"
    counted = [method for method in together.methods if method != POOLED_METHOD]
    pooled = (
        f" The ranks include training on the pooled data (`{POOLED_METHOD}`)."
        if POOLED_METHOD in together.methods
        else ""
    )
    alike = "differ" if together.p < FAMILY_ERROR_LEVEL else "do not differ significantly"
    lines += [
        f"{len(counted)} methods have results in all {len(together.setups)} federations with tuning. Their mean ranks "
        f"{alike} (Friedman test, p = {format_significant(together.p, 2)}).{pooled} The federations are "
        f"{join_with_and([f'`{name}`' for name in together.setups])}. A bar connects methods whose ranks do not differ "
        "significantly in the Nemenyi test.",
        "",
        f"![Mean ranks of the methods]({MAP_FOLDER}/ranks.svg)",
    ]
    return "\n".join(lines) + "\n"


def _count_stale(setup: Setup, records: Mapping[str, CellRecord]) -> int:
    return sum(bool(stale_reason(Cell(setup, r.method, r.space, r.protocol), r)) for r in records.values())


def _setup_page(j: SetupVerdict, references: References) -> Iterator[str]:
    setup = j.setup
    about = f"{setup.says}. {setup.training} [Benchmark map](../map.md)"
    yield from (f"# {setup.title[:1].upper()}{setup.title[1:]}", "", about, "")
    yield from (*setup_sentences(j), "")
    if j.standings:
        yield from (
            f"![Means across seeds. Filled circles mark methods that are better than the baseline.]({setup.name}.svg)",
            "",
        )
        yield (
            f"The table shows each method's {j.standings[0].record.metric} and its gains in percentage points, with an "
            "unadjusted 95 % confidence interval. All methods train for the same number of rounds with seeds "
            f"{write_seeds(j.seeds)}. Filled circles in the chart mark methods that are better than the baseline "
            "(local training or FedAvg, whichever is better). Training on the pooled data (`centralized`) is shown for "
            "reference. *Clients that gain* is the percentage of clients that do better than with local training, "
            "followed by the percentage that do better than with FedAvg. *Rounds to 95 %* is the first evaluated round "
            "in which the method reaches 95 % of the best mean."
        )
        titles = [*PERCENT_COLUMNS.values(), "clients that gain", "variance", "gradients", "MB", "rounds to 95 %"]
        yield from (
            "",
            f"| method | model | {' | '.join(titles)} | chosen settings | remarks |",
            f"|{'---|' * (4 + len(titles))}",
        )
    for s in j.standings:
        figures = s.figures
        shown = [write_percent(figures.get(name)) for name in PERCENT_COLUMNS]
        shares = [
            format_percent(figures[f"gainers_{m}"].mean) if f"gainers_{m}" in figures else "-"
            for m in REFERENCE_METHODS[:2]
        ]
        rounds_to_95 = figures["rounds_to_95"]
        reached = (
            format_fixed(rounds_to_95.mean, 0)
            if len(rounds_to_95.finite) == len(rounds_to_95.by_seed)
            else "not with every seed"
        )
        costs = [write_total(figures["gradients"].mean), format_significant(figures["bytes"].mean / 1e6, 3), reached]
        cells = [
            *shown,
            " / ".join(shares),
            format_significant(figures["variance"].mean, 2),
            *costs,
            _chosen_settings_text(s.record),
        ]
        yield f"| {s.method} | {s.record.model} | {' | '.join(cells)} | {_record_notes(setup, s.record, s)} |"
    yield from reference_lines(j, references)
    rest = [record for record in j.records.values() if j.find(record.method) is None]
    yield ""
    for record in rest:
        yield f"{state_result(record)}{_record_notes(setup, record, None, ' (', ')')}"
    missing = [name for name in REGISTRY if name not in j.records]
    if missing:
        named = join_with_commas(missing) if j.records else "all methods"
        yield f"- To run the missing methods ({named}), use `fedloom map --setup {setup.name}`."
    spent = sum(record.minutes for record in j.records.values())
    commits = sorted({name[:12] or "unknown" for record in j.records.values() for name in record.commit.split(", ")})
    tried = f"{setup.trials} trials per method" if setup.trials > 1 else "default settings"
    revisions = "code from commit" if len(commits) == 1 else "code from commits"
    if j.records:
        yield (
            f"- The runs took {format_fixed(spent, 1)} of the planned {format_option(setup.share)} core-minutes, with "
            f"{tried} and {revisions} {join_with_and(commits)}."
        )
    yield ""


def _record_notes(
    setup: Setup, record: CellRecord, standing: MethodStanding | None, start: str = "", end: str = ""
) -> str:
    """Return remarks on a record: "stale", and the method's significant difference from the baseline."""
    old = stale_reason(Cell(setup, record.method, record.space), record)
    remarks = [f"stale ({old})"] if old else []
    if standing is not None and (standing.better or standing.worse):
        twice = {True: "seen twice", False: "not confirmed", None: "seen once"}[standing.confirmed]
        remarks.append(f"{standing.verdict}, {twice}")
    return f"{start}{', '.join(remarks)}{end}" if remarks else ""


def _chosen_settings_text(record: CellRecord) -> str:
    return format_options(record.chosen, 3)


def standing_table(verdicts: Iterable[SetupVerdict], methods: Iterable[str]) -> list[dict[str, str]]:
    """Return a row for each setup and method that compares the method with all recorded methods."""
    rows = []
    for j in verdicts:
        for method in methods:
            record, s = j.records.get(method), j.find(method)
            row = {"setup": j.setup.name, "method": method, "state": record.status if record else NOT_RUN_STATUS}
            if s is not None:
                row |= {
                    "mean, %": write_percent(s.figures["mean"]),
                    "over the better of local and FedAvg": format_signed(s.gain) if s.gain else "-",
                    "verdict": str(s.verdict) if s.gain else "baseline" if method == j.reference else "-",
                    "place": f"{j.standings.index(s) + 1} of {len(j.standings)}",
                }
            rows.append(row | ({"reason": record.reason} if record and record.reason else {}))
    return rows


def verdict_table(verdicts: Iterable[SetupVerdict]) -> pa.Table:
    """Return a table with one row per run, and one row per cell without a run.

    Numbers are neither rounded nor scaled.
    """
    rows = []
    for j in verdicts:
        for record in j.records.values():
            s = j.find(record.method)
            cell = {
                "setup": record.setup, "protocol": record.protocol, "method": record.method, "status": record.status,
                "reason": record.reason,
                "stale": stale_reason(Cell(j.setup, record.method, record.space, record.protocol), record),
                "verdict": str(s.verdict) if s and s.gain else "", "metric": record.metric, "model": record.model,
                "chosen": _chosen_settings_text(record),
                "trials": len(record.trials), "date": record.date, "minutes": record.minutes,
                "commit": record.commit, "machine": record.machine,
                "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
            }  # fmt: skip
            figures = s.figures if s else {}
            for seed in figures["mean"].by_seed if s else [None]:
                values = {name: e.by_seed.get(seed) for name, e in figures.items()} if seed is not None else {}
                rows.append(
                    {**cell, "seed": seed, **{k: v for k, v in values.items() if v is not None and math.isfinite(v)}}
                )
    columns = dict.fromkeys(["setup", "protocol", "method", "status", *(key for row in rows for key in row)])
    return pa.table({name: [row.get(name) for row in rows] for name in columns})
