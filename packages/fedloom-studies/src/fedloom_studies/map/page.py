"""Pages of the map, and a table of all results. The pages are generated only from the records."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.algorithms import REGISTRY
from fedloom.formats import fixed, option, options, percent, significant, write_total
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
from fedloom_studies.map.records import NOT_RUN, CellRecord, stale_reason
from fedloom_studies.map.references import References, reference_lines
from fedloom_studies.map.rules import advise_rule, rules_section
from fedloom_studies.map.setups import POOLED_METHOD, REFERENCE_METHODS, Cell, Setup, parts_of_networks
from fedloom_studies.map.statements import (
    MAP_FOLDER,
    WANTED_POINTS,
    advice_lines,
    finding_text,
    join_with_and,
    join_with_commas,
    setup_sentences,
    share_of_cells,
    signed,
    write_percent,
)
from fedloom_studies.map.wider import wider_bullet, wider_section

CORRECTED_TEXT = (
    "## Corrected\n\n| earlier statement on this page (until November 2026) | reason for the correction |\n"
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
    "mean": "mean", "worst10": "worst 10 % of clients", "gain_local": "over local", "gain_fedavg": "over FedAvg",
    "mean_at_fedavg_work": "mean at FedAvg's gradients",
}  # fmt: skip
"""Titles of the columns shown as percentages on a setup's page, keyed by value."""
MAP_TEXT = """# Benchmark map

Which method suits which clients? This page compares every fedloom method in {count} federations ({cells}). A
federation consists of a data set, its split into clients, and a model. `fedloom map --page docs/map.md` generates the
page from the records in `studies/results`. Only the section on corrections is written by hand.

The **baseline** of a federation is the better of local training and FedAvg. If no method beats the baseline, the
baseline is enough.

{advice}

{attacked}

![Gain over the baseline, by method and federation]({folder}/map.svg)

Triangles mark significant differences: up for better, down for worse. Pale colors mean that the difference is
inconclusive. The other signs are {signs}.

{finding}

## How it is measured

- **Equal search.** Every method gets {trials} trials in its [search space](tuning.md). Each trial trains for all
  rounds, with separate seeds, and is scored on validation data. The best settings are then run with {seeds} new
  seeds. The budget for all federations together is {hours} core-hours. In a federation that is expensive to run, every
  method gets a smaller number of trials. With only one trial, every method runs with its defaults, and the federation
  is excluded from the mean ranks. Some federations have further seeds, which are outside this budget.

- **Equal rounds.** All methods train for the same number of rounds. The page for each federation also shows the
  result of each method after it has computed as many gradients as FedAvg.

- **One model per method.** Some methods train both a global model and personal models. For these methods, each client
  uses the model that is better on its validation data. The tables call this choice *hybrid*.

- **Significance tests.** A moderated t test over seeds compares every method with the baseline. Holm's correction
  covers all methods of a federation. The interval of a gain comes from this test: it excludes 0 if and only if the
  verdict is *better* or *worse*. All other verdicts are *inconclusive*. The interval of a *mean* is the plain 95
  % interval over seeds. With fewer than {enough} seeds, no method is tested. The tuning guide explains [the choice of
  the test](tuning.md#statistical-tests). In its simulations with five seeds, the rate of false verdicts is slightly
  above 5 %, and far above 5 % with the variances of *many clients, few per round*.

- **Scope of a verdict.** A new seed changes the split, the sampled clients and the initial models, but the samples
  stay the same. A verdict therefore applies only to these samples and not to new samples.

- **Power.** All gains in a federation are assumed to have the same standard deviation over seeds. This standard
  deviation determines how many seeds are needed to detect a gain of {wanted} points with a probability of
  {power}, at the first step of Holm's correction. The computation does not use the observed gains. If fewer seeds
  were run, the page does not recommend the baseline.

- **Further seeds.** If {seeds} seeds are too few, the needed number of seeds, at most {ceiling}, is fixed before any
  further seed is run. Every method then runs all further seeds. A single test of all seeds together replaces the
  earlier test, even if the earlier verdict was significant. This test has the usual level and needs no correction for a
  second look, because only the standard deviation decides whether seeds are added, and how many. If the standard
  deviation of all seeds together is larger, a new number is fixed in the same way.

{widened}- **Confirmation.** Some methods were run again with different seeds. A verdict is *seen twice* if the runs
  with new seeds have the same verdict, and *not confirmed* if they do not.

- **Words for missing and old results.** *Not applicable*: the method cannot run in this federation. *Stale*: the
  record comes from a different version of the method or of the protocol. Verdicts include stale
  results: {stale} at equal rounds and {old} at equal gradients.

- **Parts of the network.** On a plain network, some methods are identical to FedAvg or FedPer. These methods need extra
  parts in the network: {parts}.

- **No regularizer.** The training losses contain no regularizer. Without a regularizer, FedMiD and FedDualAvg are
  the same as FedAvg with a server learning rate.

- **No text.** The map includes no text data. The only text source that needs no download reads the docstrings of the
  installed Python, so the data would differ between machines.

All runs are also available as a table with one row per run: [Parquet]({folder}/map.parquet),
[CSV]({folder}/map.csv). You can add [your own method](own-algorithm.md#compare-it-with-all-methods) with one
command."""


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
        enough=MIN_SEEDS, wanted=WANTED_POINTS, power=percent(DETECTION_PROBABILITY),
        folder=MAP_FOLDER, stale=sum(_count_stale(j.setup, j.records) for j in verdicts),
        old=sum(_count_stale(c.rounds.setup, c.records) for c in comparisons),
        finding=finding_text(verdicts), attacked=advise_rule(ruled), widened=widened,
        advice="\n".join(advice_lines(verdicts, references)), hours=fixed(sum(j.setup.share for j in verdicts) / 60, 1),
        signs=join_with_and([f"{sign} ({state})" for state, sign in STATUS_SIGNS.items()]),
        parts=join_with_and([f"{name} uses {options(parts)}" for name, parts in parts_of_networks().items()]),
    )  # fmt: skip
    lines = [head, "", "## Federation by federation", ""]
    for j in verdicts:
        lines += [f"### [{j.setup.title}]({MAP_FOLDER}/{j.setup.name}.md)", ""]
        lines += [f"{j.setup.says}. Training: {j.setup.training}.", "", " ".join(setup_sentences(j)), ""]
    lines += [*protocol_summary_lines(comparisons), CORRECTED_TEXT, "## Over all federations", ""]
    if together is None:
        lines += ["There are too few results of tuned federations for a comparison of ranks."]
        return "\n".join(lines) + "\n"
    counted = [method for method in together.methods if method != POOLED_METHOD]
    pooled = (
        f" The ranks include training on the pooled data ({POOLED_METHOD})."
        if POOLED_METHOD in together.methods
        else ""
    )
    alike = "differ" if together.p < FAMILY_ERROR_LEVEL else "do not differ significantly"
    lines += [
        f"{len(counted)} methods have results in all {len(together.setups)} federations with tuning. Their mean ranks "
        f"{alike} (Friedman's test, p = {significant(together.p, 2)}).{pooled} The federations are "
        f"{join_with_and(together.setups)}. A bar connects methods that Nemenyi's test does not distinguish.",
        "",
        f"![mean ranks]({MAP_FOLDER}/ranks.svg)",
    ]
    return "\n".join(lines) + "\n"


def _count_stale(setup: Setup, records: Mapping[str, CellRecord]) -> int:
    return sum(bool(stale_reason(Cell(setup, r.method, r.space, r.protocol), r)) for r in records.values())


def _setup_page(j: SetupVerdict, references: References) -> Iterator[str]:
    setup = j.setup
    about = f"{setup.says}. Training: {setup.training}. [Benchmark map](../map.md)"
    yield from (f"# {setup.title[:1].upper()}{setup.title[1:]}", "", about, "")
    yield from (*setup_sentences(j), "")
    if j.standings:
        yield from (
            f"![Means over seeds. A full circle marks a method that is better than the baseline.]({setup.name}.svg)",
            "",
        )
        yield (
            f"The means and gains show {j.standings[0].record.metric} in percent at equal rounds, with the plain 95 % "
            f"interval over the seeds {join_with_commas(j.seeds)}. A full circle in the picture marks a method "
            "that is better than the baseline (the better of local training and FedAvg). Training on the pooled data "
            "(centralized) is shown for reference. The column *clients that gain* shows the percentage of clients with "
            "a better result than with local training, followed by the percentage with a better result than with "
            "FedAvg. The column *rounds to 95 %* shows the first evaluated round that reaches 95 % of the best mean."
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
            percent(figures[f"gainers_{m}"].mean) if f"gainers_{m}" in figures else "-" for m in REFERENCE_METHODS[:2]
        ]
        rounds_to_95 = figures["rounds_to_95"]
        reached = (
            fixed(rounds_to_95.mean, 0)
            if len(rounds_to_95.finite) == len(rounds_to_95.by_seed)
            else "not in every seed"
        )
        costs = [write_total(figures["gradients"].mean), significant(figures["bytes"].mean / 1e6, 3), reached]
        cells = [
            *shown,
            " / ".join(shares),
            significant(figures["variance"].mean, 2),
            *costs,
            _chosen_settings_text(s.record),
        ]
        yield f"| {s.method} | {s.record.model} | {' | '.join(cells)} | {_record_notes(setup, s.record, s)} |"
    yield from reference_lines(j, references)
    rest = [record for record in j.records.values() if j.find(record.method) is None]
    yield ""
    for record in rest:
        yield f"- {record.method} is {record.status}: {record.reason}{_record_notes(setup, record, None, ' (', ')')}"
    missing = [name for name in REGISTRY if name not in j.records]
    if missing:
        named = join_with_commas(missing) if j.records else "every method"
        yield f"- Not run: {named}. Command: `fedloom map --setup {setup.name}`"
    spent = sum(record.minutes for record in j.records.values())
    commits = sorted({name[:12] or "unknown" for record in j.records.values() for name in record.commit.split(", ")})
    tried = f"{setup.trials} trials per method" if setup.trials > 1 else "default settings"
    if j.records:
        yield (
            f"- The runs took {fixed(spent, 1)} core-minutes (planned: {option(setup.share)}), with {tried}. Commits "
            f"of the code: {join_with_commas(commits)}"
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
    return options(record.chosen, 3)


def standing_table(verdicts: Iterable[SetupVerdict], methods: Iterable[str]) -> list[dict[str, str]]:
    """Return a row for each setup and method that compares the method with all recorded methods."""
    rows = []
    for j in verdicts:
        for method in methods:
            record, s = j.records.get(method), j.find(method)
            row = {"setup": j.setup.name, "method": method, "state": record.status if record else NOT_RUN}
            if s is not None:
                row |= {
                    "mean, %": write_percent(s.figures["mean"]),
                    "over the better of local and FedAvg": signed(s.gain) if s.gain else "-",
                    "verdict": str(s.verdict) if s.gain else "baseline" if method == j.reference else "-",
                    "place": f"{j.standings.index(s) + 1} of {len(j.standings)}",
                }
            rows.append(row | ({"reason": record.reason} if record and record.reason else {}))
    return rows


def verdict_table(verdicts: Iterable[SetupVerdict]) -> pa.Table:
    """Return a table with one row for each run, and one for each cell that has no run.

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
