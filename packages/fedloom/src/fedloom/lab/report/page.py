"""Writing of a report: a self-contained HTML page, with tables and charts as separate files in a folder next to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from pyarrow import ArrowException

from fedloom.errors import ConfigError, FedloomError, RunDirError, check_folder, explain_os_error
from fedloom.lab.report.charts.calibrated import draw_calibrated, thresholds_csv
from fedloom.lab.report.charts.clients import draw_clients
from fedloom.lab.report.charts.curves import draw_curves, draw_robustness
from fedloom.lab.report.charts.importance import draw_importances
from fedloom.lab.report.charts.inspection import draw_inspections
from fedloom.lab.report.charts.kit import HIDDEN_COLUMNS, Figure
from fedloom.lab.report.charts.partition import draw_cluster_shares, draw_clusters, draw_splits
from fedloom.lab.report.charts.tradeoffs import draw_costs, draw_tradeoffs
from fedloom.lab.report.comparison.by_patient import differences_csv, patient_gains
from fedloom.lab.report.comparison.conclusion import conclude_groups
from fedloom.lab.report.comparison.contenders import Models
from fedloom.lab.report.comparison.devices import devices_csv
from fedloom.lab.report.comparison.gains import gains_csv, gains_latex, site_gains
from fedloom.lab.report.comparison.pairs import check_margin, compare_pairs, pairs_csv, pairs_latex
from fedloom.lab.report.comparison.paper import experiment_names, results_latex
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.document import REPORT_TITLE_END, render_document
from fedloom.lab.report.groups import groups_csv
from fedloom.lab.report.numbers import Row, leading_metric, method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Run
from fedloom.lab.report.sections import make_sections
from fedloom.lab.report.tables import csv_text
from fedloom.outputs import FILE_KINDS, FileKind, check_output_file, is_run_directory
from fedloom.rundir import REPORT_FILE, RESULT_FOLDERS

HEADER_CHECK_BYTES = 4096
"""Number of bytes at the start of a page that always contain its title. An experiment's name is expected to be much
shorter."""


def write_report(
    run_dirs: Sequence[Path], out: Path, *, columns: Sequence[str] | None = None, charts: bool = True,
    baseline: str | None = None, compare_model: Models = "best-on-validation", margin: float | None = None,
    force: bool = False,
) -> Path:  # fmt: skip
    """Write a report on one or more run directories and return its path.

    ``out`` is the path of a self-contained page. Readers can save every chart as SVG and its data as CSV. The files
    ``results.csv`` and ``results.tex`` are written to a folder with the page's name, without the file extension. If
    there is a baseline, ``pairs.csv`` and ``pairs.tex`` are also written. If there are only a few, named clients,
    ``sites.csv`` and ``sites.tex`` are also written.

    Args:
        run_dirs: paths of the run directories. If there are several paths, the runs are compared.
        out: path of the HTML file, e.g. ``RUN/report.html``. The folder of the file is created if it does not exist.
        columns: metrics in ``results.tex``, by the names of their columns in ``results.csv``. If None, up to six
            metrics that suit the task are chosen.
        charts: True to also write each chart as SVG, and its data as CSV, to the folder.
        baseline: label of the method to which all others are compared. If None, the baseline is local training or, if
            it was not run, FedAvg. If neither was run, there is no baseline.
        compare_model: which models of each method are included in ``results.tex`` and in the comparison: the model that
            a client would use, the personal model, or all models.
        margin: largest difference in the primary metric that does not matter in practice, in the metric's units. If
            None, equivalence is not tested.
        force: True to replace files that were not written by a report.

    Returns:
        ``out``.

    Raises:
        RunDirError: a folder is not a run directory, or one of its files is damaged, or ``out`` would be inside a file.
            Nothing has been written.
        ConfigError: ``out`` does not end in ``.html``, or lies inside a run directory (other than ``RUN/NAME.html``),
            or exists but is not a report, or its folder contains files that do not belong to a report. This error is
            also raised if a column or method does not exist, or if the margin is not a number above 0.
        CheckpointError: the disk is full or a write fails. The recorded runs are not changed.
    """
    beside = check_report(run_dirs, out, force=force)
    with _recorded_data_error(run_dirs):
        runs = read_runs(run_dirs)
        rows = method_rows(runs)
        shown = make_figures(runs, rows, compare_model)
        tex = results_latex(runs, rows, columns, compare_model)
        compared = compare_pairs(runs, rows, baseline, compare_model, margin=check_margin(margin))
        by_site = site_gains(runs, rows, leading_metric(runs))
        sections = make_sections(runs, rows, leading_metric(runs))
        conclusions = conclude_groups(runs, rows, baseline, compare_model, margin)
        text = render_document(runs, rows, shown, tex, compared, by_site, compare_model, sections, conclusions)
    contents = {"results.csv": csv_text(rows), "results.tex": tex}
    if compared:
        contents |= {"pairs.csv": pairs_csv(compared), "pairs.tex": pairs_latex(compared, experiment_names(runs))}
    if by_site:
        contents |= {"sites.csv": gains_csv(by_site), "sites.tex": gains_latex(by_site, experiment_names(runs))}
    more = {
        "groups": groups_csv(runs),
        "devices": devices_csv(runs, rows, leading_metric(runs), compare_model),
        "thresholds": thresholds_csv(runs, rows, leading_metric(runs)),
        "sites-by-patient": differences_csv(by_patient) if (by_patient := patient_gains(runs, by_site)) else "",
    }
    more |= {name: table for section in sections.values() for name, table in section.files.items()}
    contents |= {f"{name}.csv": table for name, table in more.items() if table}
    for figure in shown if charts else ():
        contents |= {f"{figure.id}.svg": figure.svg(), f"{figure.id}.csv": _figure_csv(figure)}
    check_tables(out, beside, contents, force=force)
    with explain_report_errors(beside):
        beside.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_text(beside / name, content)
    replace_text(out, text)
    return out


@contextmanager
def _recorded_data_error(run_dirs: Sequence[Path]) -> Iterator[None]:
    """Raise `RunDirError` if the recorded files are readable but inconsistent."""
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
            f"{where}: the recorded files are inconsistent ({type(error).__name__}: "
            f"{error!s:.200}). Run the experiment again to rewrite these files"
        ) from error


def make_figures(runs: list[Run], rows: list[Row], compare_model: Models = "best-on-validation") -> list[Figure]:
    """Build all charts whose metrics were recorded.

    Colors represent kinds of models unless a chart's caption states otherwise.
    """
    lead = leading_metric(runs)
    charts = [
        *draw_calibrated(runs, rows, lead),
        *draw_importances(runs, rows, lead),
        *draw_clients(runs, rows, lead),
        *draw_inspections(runs),
        *draw_tradeoffs(runs, rows, lead),
        *draw_robustness(runs, rows, lead),
        draw_clusters(runs, rows),
        draw_cluster_shares(runs, rows),
        *draw_curves(runs, rows, lead),
        *draw_costs(runs, rows, lead, compare_model),
        *draw_splits(runs),
    ]
    return [figure for figure in charts if figure is not None]


def _figure_csv(figure: Figure) -> str:
    columns = [name for name in figure.columns(figure.table) if name not in HIDDEN_COLUMNS]
    return render_csv(columns, figure.data[figure.table])


def check_report(run_dirs: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Check that a report and its folder can be written, and return the folder.

    Raises:
        RunDirError: a file already exists at the path of the folder.
        ConfigError: the page must not be written to this path (see `write_report`).
    """
    if not out.name:
        raise ConfigError(f"a report is one HTML file, got {out}. Use a file name")
    beside = out.with_suffix("")
    if out.suffix.lower() not in FILE_KINDS["HTML"] or out.is_dir():
        raise ConfigError(f"a report is one HTML file, got {out}. Use a name such as {out.with_suffix('.html')}")
    if beside.is_symlink():
        raise ConfigError(
            f"{beside} is a link, and the report would overwrite the files that it points to. Remove the link"
        )
    check_folder(beside)

    def owns(place: Path) -> bool:
        return len(place.parts) == 1 and place.stem not in RESULT_FOLDERS

    check_output_file(out, FileKind("HTML", "a report", _is_report), run_dirs, owns=owns, force=force)
    if is_run_directory(beside):
        raise ConfigError(
            f"{beside} is a run directory, but the report would write the tables of {out} there. Choose another path"
        )
    return beside


def _is_report(path: Path) -> bool:
    if path.name == REPORT_FILE and is_run_directory(path.parent):
        return True
    with path.open("rb") as file:
        return REPORT_TITLE_END.encode() in file.read(HEADER_CHECK_BYTES)


def check_tables(out: Path, beside: Path, names: Iterable[str], *, force: bool) -> None:
    """Raise an error if a report's folder contains files that would be replaced but were not written by a report.

    Files are assumed to have been written by a report if the report exists (which `check_report` has checked), or if
    the folder lies in a run directory. If one of the files is a symbolic link, the link itself is replaced, not the
    file to which it points.

    Raises:
        ConfigError: a file exists, but there is no report.
    """
    if force or out.exists() or is_run_directory(out.parent):
        return
    kind = FileKind("other", "a table or chart of a report", lambda _path: False)
    for name in names:
        if os.path.lexists(beside / name):
            check_output_file(beside / name, kind)


def replace_text(path: Path, text: str) -> None:
    """Write text to a temporary file that then replaces the file, so that readers never see a partially written file.

    Raises:
        CheckpointError: the disk is full or the write fails.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with explain_report_errors(path):
        try:
            draft.unlink(missing_ok=True)
            draft.touch(exist_ok=False)  # a new file, never a link to an existing one
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def explain_report_errors(path: Path) -> AbstractContextManager[None]:
    """Return a context manager that converts errors in writing a report to a sentence for the user."""
    return explain_os_error(path, "The results of the run are intact", "write the report with 'fedloom report'")
