"""Write the report: one HTML file that needs nothing else, and its tables and charts as files beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from pyarrow import ArrowException

from fedloom.errors import ConfigError, FedloomError, RunDirError, check_folder, explain_os_error
from fedloom.report.charts.calibrated import calibrated, thresholds_csv
from fedloom.report.charts.clients import clients
from fedloom.report.charts.curves import curves, robustness
from fedloom.report.charts.importance import importances
from fedloom.report.charts.inspection import inspection
from fedloom.report.charts.kit import HIDDEN, Figure
from fedloom.report.charts.partition import cluster_shares, clusters, splits
from fedloom.report.charts.tradeoffs import costs, tradeoffs
from fedloom.report.comparison.by_patient import by_patients, differences_csv
from fedloom.report.comparison.contenders import Models
from fedloom.report.comparison.cox import cox_csv
from fedloom.report.comparison.devices import devices_csv
from fedloom.report.comparison.gains import gains, gains_csv, gains_latex
from fedloom.report.comparison.pairs import checked_margin, pairs, pairs_csv, pairs_latex
from fedloom.report.comparison.paper import results_latex, title
from fedloom.report.csv_files import csv_of
from fedloom.report.document import document
from fedloom.report.groups import groups_csv
from fedloom.report.left_out import left_out_csv
from fedloom.report.numbers import Row, leading_metric, rows_of
from fedloom.report.reading import read_runs
from fedloom.report.run import Run
from fedloom.report.tables import csv_text


def write(
    run_dirs: Sequence[Path],
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    charts: bool = True,
    against: str | None = None,
    models: Models = "used",
    margin: float | None = None,
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
        margin: differences of the leading metric up to it do not matter, in its own units; None: none is stated.

    Returns:
        ``out``.

    Raises:
        RunDirError: a directory is not a run, or one of its files is damaged, or ``out`` would lie in a file; nothing
            is written.
        ConfigError: ``out`` does not end in ``.html``, or there is no such column or method, or the margin is no
            number above 0.
        CheckpointError: the disk is full or refuses; the runs are as they were.
    """
    beside = out.with_suffix("")
    for path in (out, beside):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, through which a report would overwrite other files; remove the link")
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"a report is one HTML file, got {out}; give a name such as {out.with_suffix('.html')}")
    check_folder(beside)
    with _recorded(run_dirs):
        runs = read_runs(run_dirs)
        rows = rows_of(runs)
        shown = figures(runs, rows, models)
        tex = results_latex(runs, rows, columns, models)
        compared = pairs(runs, rows, against, models, margin=checked_margin(margin))
        by_site = gains(runs, rows, leading_metric(runs))
        text = document(runs, rows, shown, tex, compared, by_site, models)
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
        "left_out": left_out_csv(runs),
        "groups": groups_csv(runs),
        "devices": devices_csv(runs, rows, leading_metric(runs), models),
        "cox": cox_csv(runs),
        "thresholds": thresholds_csv(runs, rows, leading_metric(runs)),
        "sites-by-patient": differences_csv(by_patient) if (by_patient := by_patients(runs, by_site)) else "",
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


def figures(runs: list[Run], rows: list[Row], models: Models = "used") -> list[Figure]:
    """Every chart that the recorded figures allow; colour means the model unless the caption has another legend."""
    lead = leading_metric(runs)
    charts = [
        *calibrated(runs, rows, lead),
        *importances(runs, rows, lead),
        *clients(runs, rows, lead),
        *inspection(runs),
        *tradeoffs(runs, rows, lead),
        *robustness(runs, rows, lead),
        clusters(runs, rows),
        cluster_shares(runs, rows),
        *curves(runs, rows, lead),
        *costs(runs, rows, lead, models),
        *splits(runs),
    ]
    return [figure for figure in charts if figure is not None]


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
    return explain_os_error(path, "the results of the run are", "'fedloom report' with the run directory writes it")
