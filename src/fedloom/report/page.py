"""Writes the report: one HTML file that needs nothing else, and its tables and charts as files beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from pyarrow import ArrowException

from fedloom.cache import find, keep
from fedloom.errors import ConfigError, FedloomError, RunDirError, explained
from fedloom.report import overview
from fedloom.report.calibrated import LEAD as IN_USE
from fedloom.report.calibrated import calibrated, threshold_tables, thresholds_csv
from fedloom.report.clients import clients
from fedloom.report.comparison.by_patient import Difference, differences, differences_csv, differences_html
from fedloom.report.comparison.contenders import Models, contenders
from fedloom.report.comparison.gains import LEAD, Table, gains, gains_csv, gains_html, gains_latex
from fedloom.report.comparison.pairs import Pair, pairs, pairs_csv, pairs_html, pairs_latex
from fedloom.report.comparison.paper import results_latex, title
from fedloom.report.csv_files import csv_of
from fedloom.report.curves import curves, robustness
from fedloom.report.figure import Figure, Rows, theme
from fedloom.report.groups import LEAD as GROUPED
from fedloom.report.groups import group_tables, groups_csv
from fedloom.report.importance import importances
from fedloom.report.inspection import inspection
from fedloom.report.left_out import LEAD as NEW
from fedloom.report.left_out import left_out_csv, left_out_tables
from fedloom.report.numbers import Row, leading_metric, rows_of, run_of
from fedloom.report.partition import clusters, skew_table, splits
from fedloom.report.reading import Run, read_runs
from fedloom.report.settings import settings
from fedloom.report.sites import SITES, privacy_tables, site_tables
from fedloom.report.tables import csv_text
from fedloom.report.tradeoffs import costs, tradeoffs

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What the page may do: run its own scripts; it can reach no network."""
BUNDLE = "vega.js"
"""Name of the scripts that are kept."""
HIDDEN = ("label", "label_narrow", "side", "place", "middle")
"""Columns of the data of charts that serve the drawing only."""

PLACES = {
    "patients": ("Calibrated", IN_USE),
    "importance": ("What drives it", "Which columns the model uses, site by site."),
    "left_out": ("A new site", NEW),
    "groups": ("Groups of patients", GROUPED),
    "curves": ("Learning curves", "How the result grows with rounds, traffic, gradients of samples and time."),
    "clients": ("Clients", "A mean hides who gains and who loses; here is every client."),
    "fairness": ("Fairness", "A good mean that costs no client its share is best."),
    "attacks": ("Robustness", "How the result falls as more clients attack."),
    "clusters": ("Clusters", "Which clients were found to be alike, and how well that agrees with the planted groups."),
    "structure": ("Sparsity and rank", "How small the models are, and what that costs."),
    "costs": ("Work and traffic", "What the methods spent."),
    "privacy": (
        "Privacy",
        "Epsilon spent after each round, of the client that took part most often; no amplification.",
    ),
    "convergence": ("Convergence", "How near the methods are to a solution of their problem."),
    "others": ("Other figures", "What else was recorded about the whole federation."),
    "partition": ("Data", "How the samples are split over the clients."),
}
"""Sections of the page by group of figures, in order."""

PAIRS = (
    "Every method against one of them, as one family of tests: the interval of a difference leaves out 0 exactly where "
    "the difference is significant."
)
READING = {
    "Result": "Mean over the clients' own test parts at the last round, then mean over seeds; "
    "± is half the width of the 95 % Student t interval over seeds.",
    "At best validation round": "The same test mean, at the round whose validation mean is best. "
    "No round is ever chosen on test.",
    "Worst 10 %": "Mean over the tenth of the clients with the worst results.",
    "Variance of losses": "Variance over clients of their test losses: 0 is perfectly fair.",
    "Models": "Global: one model for all. Personal: each client's own. "
    "Hybrid: for each client the better of the two on its validation part. A method is compared by the model that a "
    "client would use: the hybrid one of two, else its only one. Beside hybrid models stands what they must beat: for "
    "each client the better of training alone and FedAvg.",
    "Work and traffic": "Totals over all clients up to the last round. MB is 10⁶ bytes of the messages as sent.",
    "Clear, not significant, not decidable": "The leader is compared with every other method, one row each, seed by "
    "seed (paired t test, Holm's correction, level 5 %); a lead's interval leaves out 0 exactly where it is "
    "significant. With fewer than five common seeds nothing is decided. Runs with other data, another partition or "
    "another attack are not compared with each other.",
    "Attacks": "Where clients attack, every figure is of the benign ones.",
}


def write(
    run_dirs: Sequence[Path],
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    charts: bool = True,
    against: str | None = None,
    models: Models = "used",
) -> Path:
    """Writes a report of one or several run directories.

    ``out`` becomes one self-contained page, from which every chart can be saved as SVG and its data as CSV. A folder
    of the same name without its suffix receives ``results.csv`` and ``results.tex``, and where there is a method to
    compare the others with, ``pairs.csv`` and ``pairs.tex``; where clients are few and named, ``sites.csv`` and
    ``sites.tex``.

    Args:
        run_dirs: output directories of runs; several are compared.
        out: the HTML file, e.g. ``RUN/report.html``; its folder is made if need be.
        columns: figures of ``results.tex``, by their names in ``results.csv``; up to six that fit the task when None.
        charts: write every chart as SVG and its data as CSV into the folder too.
        against: label of the method that every other one is compared with; `local` or `fedavg` when None, if there.
        models: rows of a method in ``results.tex`` and in the comparison: that of the model that a client would use,
            that of the personal one, or all.

    Returns:
        ``out``.

    Raises:
        RunDirError: a directory is not a run, or one of its files is damaged; nothing is written.
        ConfigError: ``out`` does not end in ``.html``, or there is no such column or method.
        CheckpointError: the disk is full or refuses; the runs are as they were.
    """
    beside = out.with_suffix("")
    for path in (out, beside):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, through which a report would overwrite other files; remove the link")
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"a report is one HTML file, got {out}; give a name such as {out.with_suffix('.html')}")
    with _recorded(run_dirs):
        runs = read_runs(run_dirs)
        rows = rows_of(runs)
        shown = figures(runs, rows)
        tex = results_latex(runs, rows, columns, models)
        compared = pairs(runs, rows, against, models)
        by_site = gains(runs, rows, leading_metric(runs))
        text = page(runs, rows, shown, tex, compared, by_site)
    with _explained(beside):
        beside.mkdir(parents=True, exist_ok=True)
    _replace(beside / "results.csv", csv_text(rows))
    _replace(beside / "results.tex", tex)
    if compared:
        _replace(beside / "pairs.csv", pairs_csv(compared))
        _replace(beside / "pairs.tex", pairs_latex(compared, title(runs)))
    if by_site:
        _replace(beside / "sites.csv", gains_csv(by_site))
        _replace(beside / "sites.tex", gains_latex(by_site, title(runs)))
    more = {
        "groups": groups_csv(runs),
        "left_out": left_out_csv(runs),
        "thresholds": thresholds_csv(runs, rows, leading_metric(runs)),
        "sites-by-patient": differences_csv(by_patient) if (by_patient := _by_patient(runs, by_site)) else "",
    }
    for name, table in more.items():
        if table:
            _replace(beside / f"{name}.csv", table)
    for figure in shown if charts else ():
        _replace(beside / f"{figure.id}.svg", figure.svg())
        _replace(beside / f"{figure.id}.csv", _data_csv(figure))
    _replace(out, text)
    return out


@contextmanager
def _recorded(run_dirs: Sequence[Path]) -> Iterator[None]:
    """Say of files that are readable one by one, but make no results together, that they do not."""
    try:
        yield
    except FedloomError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        ArrowException,
    ) as error:
        where = ", ".join(map(str, run_dirs))
        raise RunDirError(
            f"{where}: what the files record does not fit together ({type(error).__name__}: {error!s:.200}); run the "
            "experiment again to write them anew"
        ) from error


def figures(runs: list[Run], rows: list[Row]) -> list[Figure]:
    """Every chart that the recorded figures allow; colour means the model unless the caption says otherwise."""
    lead = leading_metric(runs)
    found = [
        *calibrated(runs, rows, lead),
        *importances(runs, rows, lead),
        *clients(runs, rows, lead),
        *inspection(runs),
        *tradeoffs(runs, rows, lead),
        *robustness(runs, rows, lead),
        clusters(runs, rows),
        *curves(runs, rows, lead),
        *costs(runs, rows, lead),
        *splits(runs),
    ]
    return [figure for figure in found if figure is not None]


def _data_csv(figure: Figure) -> str:
    columns = [name for name in figure.columns(figure.table) if name not in HIDDEN]
    return csv_of(columns, figure.data[figure.table])


def _replace(path: Path, text: str) -> None:
    """Writes under a temporary name first, so that no half-written file is ever seen."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with _explained(path):
        try:
            draft.unlink(missing_ok=True)
            draft.touch(exist_ok=False)  # a file of its own, not a link to another
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def _explained(path: Path) -> AbstractContextManager[None]:
    return explained(path, "the results of the run are", "'fedloom report' with the run directory writes it")


@cache
def _scripts() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, safe within a script element; kept, since it takes seconds."""
    key = version("vl-convert-python")
    kept = find(BUNDLE, key)
    if kept is not None:
        return kept
    import vl_convert  # slow to import, needed once

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    text = bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    keep(BUNDLE, key, text)
    return text


def _asset(name: str) -> str:
    return (files("fedloom.report") / name).read_text(encoding="utf-8")


def _json(id: str, value: object) -> str:
    """A value for the page's script, so written that it cannot end its element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="{id}">{text}</script>'


def page(
    runs: list[Run],
    rows: list[Row],
    shown: list[Figure],
    tex: str,
    compared: Sequence[Pair] = (),
    by_site: Sequence[Table] = (),
) -> str:
    """The whole page as text."""
    name = escape(title(runs))
    bodies = {group: _gallery([figure for figure in shown if figure.group == group]) for group in PLACES}
    lead = leading_metric(runs)
    bodies["patients"] += threshold_tables(runs, rows, lead)
    bodies["left_out"] += left_out_tables(runs, rows, lead)
    bodies["groups"] += group_tables(runs, rows, lead)
    bodies["partition"] += skew_table(runs)
    bodies["privacy"] += privacy_tables(runs)
    parts = {
        **(
            {
                "gains": (
                    "Who gains",
                    _section(
                        "gains", "Who gains", LEAD, gains_html(by_site) + differences_html(_by_patient(runs, by_site))
                    ),
                )
            }
            if by_site
            else {}
        ),
        "overview": (
            "Overview",
            _section("overview", "Overview", "Who leads by which criterion.", overview.cards(runs, rows)),
        ),
        **({"pairs": ("Pairs", _section("pairs", "Pairs", PAIRS, pairs_html(compared)))} if compared else {}),
        "results": (
            "Results",
            _section(
                "results", "Results", READING["Result"], overview.results([*rows, *_rivals(runs, rows)]) + _downloads()
            ),
        ),
        **{g: (PLACES[g][0], _section(g, *PLACES[g], body)) for g, body in bodies.items() if body},
        **({"sites": ("Sites", _section("sites", "Sites", SITES, table))} if (table := site_tables(runs)) else {}),
        "settings": ("Settings", _section("settings", "Settings", "Exactly what ran.", settings(runs))),
        "reading": ("How to read", _section("reading", "How to read this report", "", _glossary())),
    }
    links = "".join(f'<li><a href="#{id}">{name}</a></li>' for id, (name, _) in parts.items())
    payload = [_payload(figure) for figure in shown]
    return f"""<!doctype html>
<html lang="en" data-look="light">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} · fedloom report</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#{next(iter(parts))}">Skip to the results</a>
<header class="wrap">
<div class="top"><h1>{name}</h1><button data-do="look">Dark look</button></div>
<p class="facts">{escape(overview.facts(runs, rows))}</p>
{overview.note_list(runs, rows)}
</header>
<nav aria-label="Sections"><div class="wrap"><ul>{links}</ul></div></nav>
<main class="wrap">
<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>
{"".join(html for _, html in parts.values())}
</main>
<footer class="wrap">Made by fedloom from recorded files only. This page works offline and contacts nobody.</footer>
{_json("figures", payload)}
{_json("themes", {"light": theme(dark=False), "dark": theme(dark=True)})}
{_json("file-csv", csv_text(rows))}
{_json("file-tex", tex)}
<script>{_scripts()}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _by_patient(runs: list[Run], by_site: Sequence[Table]) -> list[tuple[str, list[Difference]]]:
    """Gains over test samples of the runs that kept their predictions, by the run's label where there are several."""
    made = [(table.run, differences(run_of(runs, table.alone), table)) for table in by_site]
    return [(label, lines) for label, lines in made if lines]


def _rivals(runs: list[Run], rows: list[Row]) -> list[Row]:
    """The rows of the comparison that are of no method."""
    return [row for row in contenders(runs, rows) if row not in rows]


def _payload(figure: Figure) -> dict[str, object]:
    """A figure for the page's script: its data sets as columns and lists of cells."""

    def compact(name: str, rows: Rows) -> dict[str, object]:
        columns = figure.columns(name)
        return {"columns": columns, "rows": [[row.get(column) for column in columns] for row in rows]}

    data = {name: compact(name, rows) for name, rows in figure.data.items()}
    spec = {**figure.spec(), "datasets": data}
    about = {"id": figure.id, "layout": figure.layout, "canvas": figure.canvas, "table": figure.table}
    return {**about, "hidden": HIDDEN, "spec": spec}


def _section(id: str, title: str, lead: str, body: str) -> str:
    first = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section id="{id}" aria-labelledby="{id}-title"><h2 id="{id}-title">{title}</h2>{first}{body}</section>\n'


def _downloads() -> str:
    return (
        '<div class="tools"><button data-do="file" value="file-csv" data-name="results.csv" data-type="text/csv">'
        'Table as CSV</button><button data-do="file" value="file-tex" data-name="results.tex" data-type="text/x-tex">'
        "Table as LaTeX</button></div>"
    )


def _gallery(own: list[Figure]) -> str:
    """The figures of a group, one at a time behind tabs where there are several."""
    tabs = ""
    if len(own) > 1:
        choices = "".join(
            f'<label><input type="radio" name="tab-{f.group}" value="place-{escape(f.id)}"'
            f"{'' if i else ' checked'}>{escape(f.tab)}</label>"
            for i, f in enumerate(own)
        )
        tabs = f'<fieldset class="tabs"><legend class="unseen">Which chart</legend>{choices}</fieldset>'
    return tabs + "".join(_figure(f, hidden=i > 0) for i, f in enumerate(own))


def _figure(figure: Figure, *, hidden: bool) -> str:
    id, title = escape(figure.id), escape(figure.title)
    return (
        f'<figure id="place-{id}"{" hidden" if hidden else ""}>'
        f'<div class="chart" data-figure="{id}" role="img" aria-label="{title}. {escape(figure.caption)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption>"
        f'<div class="tools"><button data-do="svg" value="{id}">SVG<span class="unseen"> of {title}</span></button>'
        f'<button data-do="csv" value="{id}">CSV<span class="unseen"> of {title}</span></button></div>'
        f'<details data-data="{id}"><summary>Data of this chart</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Data: {title}"></div></details></figure>'
    )


def _glossary() -> str:
    return f"<dl>{''.join(f'<dt>{term}</dt><dd>{text}</dd>' for term, text in READING.items())}</dl>"
