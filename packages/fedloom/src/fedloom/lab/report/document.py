"""Report page: assemble the sections, the chart data, and the chart scripts into one HTML text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from types import MappingProxyType

from fedloom.cache import read_cached_text, write_cached_text
from fedloom.lab.report import overview
from fedloom.lab.report.charts.calibrated import CALIBRATION_TEXT as IN_USE
from fedloom.lab.report.charts.calibrated import threshold_tables
from fedloom.lab.report.charts.kit import HIDDEN_COLUMNS, Figure, Rows
from fedloom.lab.report.charts.look import can_draw, chart_theme, import_charts
from fedloom.lab.report.charts.partition import skew_table
from fedloom.lab.report.comparison.by_patient import differences_html, patient_gains
from fedloom.lab.report.comparison.conclusion import Conclusion
from fedloom.lab.report.comparison.contenders import Models, select_contenders
from fedloom.lab.report.comparison.devices import DEVICES_TEXT as DEVICES
from fedloom.lab.report.comparison.devices import device_tables
from fedloom.lab.report.comparison.family import scope_sentence
from fedloom.lab.report.comparison.gains import GAINS_TEXT, SiteGains, gains_html
from fedloom.lab.report.comparison.pairs import Pair, pairs_html
from fedloom.lab.report.comparison.paper import experiment_names
from fedloom.lab.report.groups import GROUPS_TEXT as GROUPED
from fedloom.lab.report.groups import group_tables
from fedloom.lab.report.markup import render_page, render_part
from fedloom.lab.report.numbers import Row, leading_metric
from fedloom.lab.report.run import Run
from fedloom.lab.report.sections import Section
from fedloom.lab.report.settings import render_settings
from fedloom.lab.report.sites import SITES_TEXT, privacy_tables, site_tables
from fedloom.lab.report.tables import csv_text
from fedloom.rundir import file_name

CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy of the page, which allows the embedded scripts and blocks all network requests."""
REPORT_TITLE_END = " · fedloom report</title>"
"""End of a report's title. It identifies reports, because no other page has it."""
SCRIPTS_FILE = "vega.js"
"""Name of the cache file for the scripts."""
SECTION_ORDER = {
    "patients": ("Calibrated", IN_USE),
    "importance": ("Important columns", "The columns that matter to the model at each site."),
    "groups": ("Groups of patients", GROUPED),
    "curves": ("Learning curves", "Results by round, traffic, sample gradients and time."),
    "clients": ("Clients", "Every client's results. A mean hides clients that lose."),
    "devices": ("Device classes", DEVICES),
    "fairness": ("Fairness", "The best method has a good mean and a good result for the worst clients."),
    "attacks": ("Robustness", "Results with different fractions of attacking clients."),
    "clusters": (
        "Clusters",
        "The groups of similar clients found by the methods, and their agreement with the true groups.",
    ),
    "structure": ("Sparsity and rank", "The size of the models, and the loss of accuracy at smaller sizes."),
    "costs": ("Work and traffic", "Every method's gradients, traffic and time."),
    "privacy": (
        "Privacy",
        "Epsilon after each round for the client with the most rounds, without privacy amplification.",
    ),
    "convergence": ("Convergence", "Every method's distance from a solution of its problem."),
    "others": ("More results", "Other federation-wide metrics."),
    "partition": ("Data", "The distribution of samples across clients."),
}
"""Sections of the page in order, keyed by the group of charts, with their title and text."""

FIRST_GROUPS = ("patients", "importance")
"""Sections before those that packages add for analyses."""
PAIRS_TEXT = (
    "Every method is compared with the baseline. The interval of the difference decides the verdict: better or worse "
    "if it excludes 0, equivalent if it is within a stated margin, and otherwise inconclusive. Holm's correction "
    "covers all comparisons."
)
READING_TEXTS = {
    "Result": "Every client's model is scored on the client's test data after the last round. The table shows the "
    "mean over clients and then over seeds. ± shows the half-width of the 95 % t interval over seeds.",
    "At the best validation round": "The same test mean, at the round with the best mean on validation data. "
    "No round is ever chosen on test data.",
    "Worst 10 %": "Mean over the worst 10 % of clients (at least one client).",
    "Loss variance": "Variance of the clients' test losses. 0 is perfectly fair.",
    "Models": "Global: one model for all clients. Personal: each client's own model. FedAvg-FT, FedBABU and similar "
    "methods fine-tune it from the global model before each evaluation, including round 0. Hybrid: for each client, "
    "whichever of its global and personal model is better on its validation data. Methods are compared by the hybrid "
    "model, or by "
    "their only model. The option compare_model selects personal models instead. Hybrid models must beat the row "
    "'local or fedavg': for each client, the better of local training and FedAvg.",
    "Work and traffic": "Totals over all clients up to the last round. One MB is 10⁶ bytes of sent messages.",
    "Better, inconclusive, not tested": "The leader is compared with every other method, seed by seed (paired t test, "
    "Holm's correction, level 5 %). The interval of a lead decides its verdict: it excludes 0 if and only if the "
    "leader is better. Work, traffic and variances are compared by their ratios. At least five common seeds are "
    "needed for a "
    "test. Seeds with identical runs count once. Runs with different data, partitions or attacks are not compared.",
    "These samples, new samples": "If every seed splits the same samples anew, the seeds' results are not "
    "independent. The variance of a difference then includes the correction of Nadeau and Bengio (2003), and the "
    "verdict applies to new samples from the same source. If seeds share their test data, the verdict applies to "
    "these samples.",
    "Attacks": "Results describe the benign clients only. Work and traffic include all clients.",
}


@cache
def _chart_scripts() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script for use inside a script element.

    It is cached, because building it takes several seconds.
    """
    key = version("vl-convert-python") if can_draw() else ""
    kept = read_cached_text(SCRIPTS_FILE, key)
    if kept is not None:
        return kept
    bundle: str = import_charts("vl_convert").javascript_bundle("window.vegaEmbed = vegaEmbed;")
    text = bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    write_cached_text(SCRIPTS_FILE, key, text)
    return text


def _read_asset(name: str) -> str:
    return (files("fedloom.lab.report") / name).read_text(encoding="utf-8")


def _script_json(value: object) -> str:
    """Render a value as JSON for the script of the page. The JSON text cannot close the script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def render_document(
    runs: list[Run], rows: list[Row], shown: list[Figure], tex: str, compared: Sequence[Pair] = (),
    by_site: Sequence[SiteGains] = (), models: Models = "best-on-validation",
    sections: Mapping[str, Section] = MappingProxyType({}), conclusions: Sequence[Conclusion] = (),
) -> str:  # fmt: skip
    """Render the whole report page."""
    bodies = {
        group: render_part("gallery", figures=[figure for figure in shown if figure.group == group])
        for group in SECTION_ORDER
    }
    lead = leading_metric(runs)
    bodies["patients"] += threshold_tables(runs, rows, lead)
    bodies["groups"] += group_tables(runs, rows, lead)
    bodies["devices"] += device_tables(runs, rows, lead, models)
    bodies["partition"] += skew_table(runs)
    bodies["privacy"] += privacy_tables(runs)
    gained = gains_html(by_site) + differences_html(patient_gains(runs, by_site)) if by_site else ""
    parts = {
        **({"gains": ("Who gains", "", f'{gained}<p class="lead">{GAINS_TEXT}</p>')} if by_site else {}),
        "overview": ("Overview", "The leading method by each criterion.", overview.render_cards(runs, rows, models)),
        **(
            {"pairs": ("Comparison", f"{PAIRS_TEXT} {_runs_scope_sentence(runs)}", pairs_html(compared))}
            if compared
            else {}
        ),
        "results": (
            "Results",
            READING_TEXTS["Result"],
            overview.render_results([*rows, *_rows_without_method(runs, rows)], runs) + render_part("downloads"),
        ),
        **{group: (*SECTION_ORDER[group], bodies[group]) for group in FIRST_GROUPS if bodies[group]},
        **{file_name(kind): (one.title, one.lead, one.body) for kind, one in sections.items()},
        **{
            group: (*SECTION_ORDER[group], body) for group, body in bodies.items() if body and group not in FIRST_GROUPS
        },
        **({"sites": ("Sites", SITES_TEXT, table)} if (table := site_tables(runs)) else {}),
        "settings": ("Settings", "The exact settings of every run.", render_settings(runs)),
        "reading": ("How to read this report", "", render_part("glossary", terms=READING_TEXTS)),
    }
    data = {
        "figures": [_chart_payload(figure) for figure in shown],
        "themes": {"light": chart_theme(dark=False), "dark": chart_theme(dark=True)},
        "file-csv": csv_text(rows),
        "file-tex": tex,
    }
    return render_page(
        name=experiment_names(runs),
        policy=CONTENT_POLICY,
        title_end=REPORT_TITLE_END,
        style=_read_asset("page.css"),
        answer=overview.render_answer(conclusions),
        facts=overview.render_facts(runs, rows),
        notes=overview.note_list(runs, rows),
        sections=[{"id": id, "title": name, "lead": words, "body": body} for id, (name, words, body) in parts.items()],
        data={id: _script_json(value) for id, value in data.items()},
        scripts=[_chart_scripts(), _read_asset("page.js")],
    )


def _runs_scope_sentence(runs: list[Run]) -> str:
    return scope_sentence(max(run.ratio for run in runs))


def _rows_without_method(runs: list[Run], rows: list[Row]) -> list[Row]:
    """Return the compared rows that do not belong to a method."""
    return [row for row in select_contenders(runs, rows) if row not in rows]


def _chart_payload(figure: Figure) -> dict[str, object]:
    """Convert a chart for the script of the page. Each data set is converted to columns and lists of cells."""

    def compact(name: str, rows: Rows) -> dict[str, object]:
        columns = figure.columns(name)
        return {"columns": columns, "rows": [[row.get(column) for column in columns] for row in rows]}

    data = {name: compact(name, rows) for name, rows in figure.data.items()}
    spec = {**figure.spec(), "datasets": data}
    about = {"id": figure.id, "layout": figure.layout, "canvas": figure.canvas, "table": figure.table}
    return {**about, "hidden": HIDDEN_COLUMNS, "spec": spec}
