"""Writer of the page of a report as one HTML text: its sections, its charts as data, and the scripts that draw them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from types import MappingProxyType

from fedloom.cache import find, keep
from fedloom.lab.report import overview
from fedloom.lab.report.charts.calibrated import CALIBRATION_TEXT as IN_USE
from fedloom.lab.report.charts.calibrated import threshold_tables
from fedloom.lab.report.charts.kit import HIDDEN_COLUMNS, Figure, Rows
from fedloom.lab.report.charts.look import can_draw, import_charts, theme
from fedloom.lab.report.charts.partition import skew_table
from fedloom.lab.report.comparison.by_patient import differences_html, patient_gains
from fedloom.lab.report.comparison.conclusion import Conclusion
from fedloom.lab.report.comparison.contenders import Models, contenders
from fedloom.lab.report.comparison.devices import DEVICES_TEXT as DEVICES
from fedloom.lab.report.comparison.devices import device_tables
from fedloom.lab.report.comparison.family import scope
from fedloom.lab.report.comparison.gains import GAINS_TEXT, SiteGains, gains_html
from fedloom.lab.report.comparison.pairs import Pair, pairs_html
from fedloom.lab.report.comparison.paper import title
from fedloom.lab.report.groups import GROUPS_TEXT as GROUPED
from fedloom.lab.report.groups import group_tables
from fedloom.lab.report.markup import render_page, render_part
from fedloom.lab.report.numbers import Row, leading_metric
from fedloom.lab.report.run import Run
from fedloom.lab.report.sections import Section
from fedloom.lab.report.settings import settings
from fedloom.lab.report.sites import SITES_TEXT, privacy_tables, site_tables
from fedloom.lab.report.tables import csv_text
from fedloom.rundir import file_name

CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content policy of the page: it runs its embedded scripts and makes no network requests."""
REPORT_TITLE_END = " · fedloom report</title>"
"""End of the title of a report, which no other page uses."""
SCRIPTS_FILE = "vega.js"
"""Name of the file in which the scripts are cached."""
SECTION_ORDER = {
    "patients": ("Calibrated", IN_USE),
    "importance": ("What drives it", "Importance of each column for the model, site by site."),
    "groups": ("Groups of patients", GROUPED),
    "curves": ("Learning curves", "Results against rounds, traffic, sample gradients and time."),
    "clients": ("Clients", "A mean hides which clients gain and which lose. This section shows every client."),
    "devices": ("Classes of devices", DEVICES),
    "fairness": ("Fairness", "The best method has a good mean without bad results for single clients."),
    "attacks": ("Robustness", "Results when more clients attack."),
    "clusters": ("Clusters", "Clusters of clients that a method found, and their agreement with the true groups."),
    "structure": ("Sparsity and rank", "Size of the models, and its effect on results."),
    "costs": ("Work and traffic", "Cost of each method."),
    "privacy": (
        "Privacy",
        "Epsilon spent after each round by the client that took part most often. No amplification is assumed.",
    ),
    "convergence": ("Convergence", "Distance of the methods to a solution of their problem."),
    "others": ("More results", "Further values about the whole federation."),
    "partition": ("Data", "Distribution of the samples over the clients."),
}
"""Sections of the page by group of figures, in order, with title and text."""

FIRST_PLACES = ("patients", "importance")
"""Sections before the sections of analyses by packages."""
PAIRS_TEXT = (
    "Every method against the baseline, as one family of tests. The interval of the difference decides the verdict: "
    "better or worse if it excludes 0, equivalent if it is inside a stated margin, otherwise inconclusive."
)
READING_TEXTS = {
    "Result": "Mean over the clients' own test parts at the last round, then mean over seeds; "
    "± is half the width of the 95 % Student t interval over seeds.",
    "At the best validation round": "The same test mean, at the round with the best validation mean. Test data "
    "never choose a round.",
    "Worst 10 %": "Mean over the tenth of the clients with the worst results, over one client at least.",
    "Variance of losses": "Variance of the test losses over clients: 0 means equal losses for all clients.",
    "Models": "Global: one model for all clients. Personal: each client's own model. Methods that tune it from "
    "the global model for each evaluation, such as FedAvg-FT and FedBABU, also do so in round 0. "
    "Hybrid: for each client, the better of the two on its validation part. The overview compares "
    "the model that a client would use: the hybrid model if a method has two models, otherwise the "
    "only one, and on request the personal one. Hybrid models should beat the same choice without "
    "the method: for each client, the better of training alone and FedAvg.",
    "Work and traffic": "Totals over all clients up to the last round. MB is 10⁶ bytes of the messages as sent.",
    "Better, inconclusive, not tested": "Each row compares the leader with another method, seed by seed "
    "(paired t test, Holm's "
    "correction, level 5 %). The interval of a lead decides the verdict: it excludes 0 exactly if "
    "the leader is better. Work, traffic and variances are compared by their ratios. With fewer than "
    "five common seeds, nothing is tested. Seeds that repeat runs to the last digit count once. Runs "
    "with other data, another partition or another attack are not compared.",
    "These samples, new samples": "If every seed splits the same samples anew, the results depend on each "
    "other. The variance of a "
    "difference then has the correction of Nadeau and Bengio (2003), and a verdict holds for new "
    "samples from the same source. If seeds share their test parts, a verdict holds for these "
    "samples.",
    "Attacks": "If clients attack, every result is a result of the benign clients. Work and traffic include all "
    "clients.",
}


@cache
def _scripts() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that is safe within a script element.

    The script is cached, since it takes seconds to build.
    """
    key = version("vl-convert-python") if can_draw() else ""
    kept = find(SCRIPTS_FILE, key)
    if kept is not None:
        return kept
    vl_convert = import_charts("vl_convert")
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    text = bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    keep(SCRIPTS_FILE, key, text)
    return text


def _asset(name: str) -> str:
    return (files("fedloom.lab.report") / name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """Render a value for the script of the page so that it cannot close the script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def document(
    runs: list[Run],
    rows: list[Row],
    shown: list[Figure],
    tex: str,
    compared: Sequence[Pair] = (),
    by_site: Sequence[SiteGains] = (),
    models: Models = "best-on-validation",
    sections: Mapping[str, Section] = MappingProxyType({}),
    conclusions: Sequence[Conclusion] = (),
) -> str:
    """Render the whole page."""
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
        "overview": ("Overview", "The leading method by each criterion.", overview.cards(runs, rows, models)),
        **({"pairs": ("Comparison", f"{PAIRS_TEXT} {_scope(runs)}", pairs_html(compared))} if compared else {}),
        "results": (
            "Results",
            READING_TEXTS["Result"],
            overview.results([*rows, *_rivals(runs, rows)], runs) + render_part("downloads"),
        ),
        **{group: (*SECTION_ORDER[group], bodies[group]) for group in FIRST_PLACES if bodies[group]},
        **{file_name(kind): (one.title, one.lead, one.body) for kind, one in sections.items()},
        **{
            group: (*SECTION_ORDER[group], body) for group, body in bodies.items() if body and group not in FIRST_PLACES
        },
        **({"sites": ("Sites", SITES_TEXT, table)} if (table := site_tables(runs)) else {}),
        "settings": ("Settings", "Exactly what ran.", settings(runs)),
        "reading": ("How to read this report", "", render_part("glossary", terms=READING_TEXTS)),
    }
    data = {
        "figures": [_payload(figure) for figure in shown],
        "themes": {"light": theme(dark=False), "dark": theme(dark=True)},
        "file-csv": csv_text(rows),
        "file-tex": tex,
    }
    return render_page(
        name=title(runs),
        policy=CONTENT_POLICY,
        title_end=REPORT_TITLE_END,
        style=_asset("page.css"),
        answer=overview.answer(conclusions),
        facts=overview.facts(runs, rows),
        notes=overview.note_list(runs, rows),
        sections=[{"id": id, "title": name, "lead": words, "body": body} for id, (name, words, body) in parts.items()],
        data={id: _json(value) for id, value in data.items()},
        scripts=[_scripts(), _asset("page.js")],
    )


def _scope(runs: list[Run]) -> str:
    return scope(max(run.ratio for run in runs))


def _rivals(runs: list[Run], rows: list[Row]) -> list[Row]:
    """Return the rows of the comparison that belong to no method."""
    return [row for row in contenders(runs, rows) if row not in rows]


def _payload(figure: Figure) -> dict[str, object]:
    """Convert a figure for the script of the page: its data sets as columns and lists of cells."""

    def compact(name: str, rows: Rows) -> dict[str, object]:
        columns = figure.columns(name)
        return {"columns": columns, "rows": [[row.get(column) for column in columns] for row in rows]}

    data = {name: compact(name, rows) for name, rows in figure.data.items()}
    spec = {**figure.spec(), "datasets": data}
    about = {"id": figure.id, "layout": figure.layout, "canvas": figure.canvas, "table": figure.table}
    return {**about, "hidden": HIDDEN_COLUMNS, "spec": spec}
