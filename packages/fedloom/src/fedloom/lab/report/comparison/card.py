"""Model card of a run in Markdown, with recorded facts and with headings to be completed by people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import ConfigError
from fedloom.formats import format_significant
from fedloom.lab.report.comparison.contenders import best_row, select_contenders
from fedloom.lab.report.comparison.gains import MAX_LISTED_SITES, federated_leader, site_estimate, values_by_seed
from fedloom.lab.report.groups import group_cells
from fedloom.lab.report.naming import describe_figure, titled
from fedloom.lab.report.numbers import Row, leading_metric, method_rows, test_metrics
from fedloom.lab.report.page import explain_report_errors, replace_text
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import cell_text
from fedloom.metrics import SUMMARY_METRICS
from fedloom.outputs import FileKind, check_output_file, never_own
from fedloom.rundir import RESULT_FOLDERS

OPEN_QUESTION_TEXT = "*To be completed by the people responsible for the model.*"


def write_card(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the model cards of several runs to one file.

    Args:
        run_dirs: paths of the run directories.
        out: path of the Markdown file.

    Returns:
        The path of the written file.

    Raises:
        ConfigError: the file already exists. It is not replaced, because people may have edited it.
        RunDirError: a directory is not a run, or one of its files is damaged.
        CheckpointError: the disk is full or the file cannot be written.
    """
    check_card(out)
    text = "\n".join(model_card(run) for run in read_runs(run_dirs))
    with explain_report_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, text)
    return out


def check_card(out: Path) -> None:
    """Raise an error if a model card's file already exists.

    Raises:
        ConfigError: the file already exists. It is not replaced, because people may have edited it.
    """
    if out.exists():
        raise ConfigError(
            f"{out} already exists and may contain text written by people. Move the file, then write the card again"
        )

    def owns(place: Path) -> bool:
        return len(place.parts) == 2 and place.parts[0] not in RESULT_FOLDERS

    check_output_file(out, FileKind("Markdown", "a model card", never_own), owns=owns, force=None)


def model_card(run: Run) -> str:
    """Render the card of the model with the best primary metric.

    Federated models whose runs ended well are preferred.
    """
    lead = leading_metric([run])
    shown = [row for row in select_contenders([run], method_rows([run])) if row.result(lead)]
    methods = [row for row in shown if row.algorithm]
    row = federated_leader(shown, lead) or best_row(methods, lead) or next(iter(methods), None)
    options = run.options
    data = options.get("data", {})
    parts = [f"# Model card: {_escape(run.summary.name or run.label)}", ""]
    if row is None:
        return "\n".join([*parts, "No results have been recorded yet.", ""])
    parameters = next((record.parameters for record in row.records if record.parameters), None)
    model = options.get("model", {}).get("kind", "own")
    parts += [
        "## Model", "",
        f"- Method: {_escape(row.method)} ({_escape(row.algorithm)}), {row.model} model",
        f"- Network: {_escape(str(model))}" + (f", {parameters} parameters" if parameters else ""),
        f"- Rounds: {max((record.rounds for record in row.records), default=0)}",
        f"- Status: {_escape(row.status)}", "",
        "## Intended use", "", OPEN_QUESTION_TEXT, "",
        "## Limits and risks", "", OPEN_QUESTION_TEXT, "",
        "## Data", "",
        f"- Source: {_escape(str(data.get('source', 'own')))}",
        *(f"- {key.title()}: {_escape(str(data[key]))}" for key in ("target", "event") if key in data),
        f"- Split across clients: {_escape(str(options.get('partition', {}).get('kind', 'own')))}, {run.clients} "
        "clients",
        *([f"- Classes: {', '.join(map(_escape, run.summary.classes))}"] if run.summary.classes else []), "",
        "## Results", "", *_results_table(run, row), "", *_groups_table(run, row, lead),
        "## Privacy", "", _privacy_lines(run, row), "",
        "## Versions", "", _version_lines(run), "",
    ]  # fmt: skip
    return "\n".join(parts)


def _results_table(run: Run, row: Row) -> list[str]:
    """Render a table of last-round test metrics: means over seeds and half-widths of 95 % intervals."""
    names = [name for name in SUMMARY_METRICS if name in test_metrics(run, row.method, row.model)]
    heads = ["Site", "Training samples", *(titled(describe_figure(name)) for name in names)]
    lines = [heads, ["---"] * len(heads)]
    values = {name: values_by_seed(run, row, name) for name in names}
    if 0 < len(run.names) <= MAX_LISTED_SITES:
        for place, site in enumerate(run.names):
            sizes = sorted({int(part.sizes[place]) for part in run.partitions.values()})
            size = " to ".join(dict.fromkeys((str(sizes[0]), str(sizes[-1])))) if sizes else ""
            lines.append([_escape(site), size, *(cell_text(n, site_estimate(values[n], place)) for n in names)])
    lines.append(["Mean over clients", "", *(cell_text(name, row.figures.get(name)) for name in names)])
    about = "On the clients' test sets in the last round: mean over seeds ± half-width of the 95 % interval."
    return [about, "", *(f"| {' | '.join(line)} |" for line in lines)]


def _groups_table(run: Run, row: Row, lead: str) -> list[str]:
    """Render the primary metric for groups of patients. Return an empty list if no groups were scored."""
    cells = group_cells(run, row, lead)
    if cells is None:
        return []
    heads, lines, lead = cells
    table = [heads, ["---"] * len(heads), *lines]
    about = (
        f"{titled(describe_figure(lead))} on test samples, with the number of samples in parentheses. A dash means "
        "that the group is too small to be scored."
    )
    return ["## Groups of patients", "", about, "", *(f"| {' | '.join(map(_escape, line))} |" for line in table), ""]


def _privacy_lines(run: Run, row: Row) -> str:
    spent = [
        float(points.value.max())
        for key, points in run.totals.items()
        if key.method == row.method and key.metric == "epsilon" and len(points.value)
    ]
    if spent:
        return f"Epsilon spent by the client that participated most often: {format_significant(max(spent))}."
    return "No epsilon was recorded: the model has no guarantee of differential privacy."


def _version_lines(run: Run) -> str:
    return ", ".join(f"{name} {_escape(version)}" for name, version in run.versions.items()) + "."


def _escape(text: str) -> str:
    r"""Escape recorded text so that Markdown shows it verbatim on a single line.

    >>> _escape("a|b <i>*\n")
    'a\\|b \\<i\\>\\*'
    """
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", " ".join(text.split()))
