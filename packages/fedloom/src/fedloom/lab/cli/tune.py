"""The command ``fedloom tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.formats import format_significant
from fedloom.lab.cli._app import (
    DataDir,
    ExecutorName,
    FileArgument,
    Join,
    Trust,
    add_file_to_errors,
    app,
    print_errors,
    say,
    worker_count,
)

if TYPE_CHECKING:
    from fedloom.lab.tune import Trial


@app.command(rich_help_panel="Run")
def tune(
    file: FileArgument,
    out: Annotated[
        Path | None, typer.Option(help="output directory of the search (default: runs/<name of the file>-tune)")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="number of trials per method. Overrides [tune] trials")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help="number of methods to tune in parallel, or 'auto'. Overrides [engine] workers"),
    ] = None,
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="delete the results in the directory and start over")] = False,
    join: Join = False,
    executor: ExecutorName = None,
    trust: Trust = False,
) -> None:
    """Choose every method's settings on validation data.

    All methods get the same number of trials and the same compute budget. To resume, run the same command again.

    The command writes tuned.toml, the experiment file with the chosen settings, and tuning.md, a report on the trials.

    Example: fedloom tune examples/quickstart.toml --out runs/quickstart-tune --trials 20
    """
    with print_errors(), add_file_to_errors(file):
        count = None if workers is None else worker_count(workers)
        from fedloom.storage import read_toml
        from fedloom.trust import check_document
        from fedloom.values import check_is_table

        document = read_toml(file, "experiment file")
        check_document(document, file, trust=trust)
        for name, key, value in (("tune", "trials", trials), ("engine", "workers", count)):
            if value is not None:
                document[name] = {**check_is_table(document.get(name, {}), f"{file}: [{name}]"), key: value}
        from fedloom.lab.experiment import open_executor
        from fedloom.lab.tune import Tuning
        from fedloom.lab.tune.search import note_limits, report_overspending

        engine = None if executor is None else open_executor(executor)
        search = Tuning(document, str(file), out or Path("runs") / f"{file.stem}-tune", data_dir, force=force)
        for sentence in search.remarks:
            say(f"note: {sentence}", err=True)
        findings = search.run(_print_trial, join=join, executor=engine)
    for f in findings:
        if f.best is not None and f.best.value is not None:
            say(
                f"{f.study.method.label}: {f.best.setting}, validation {search.goal.metric} "
                f"{format_significant(f.best.value)}"
            )
    for sentence in report_overspending(findings):
        say(f"warning: {sentence}", err=True)
    for sentence in note_limits(findings):
        say(f"note: {sentence}", err=True)
    say(f"report: {search.out / 'tuning.md'}\nnext:   fedloom run {search.out / 'tuned.toml'}")


def _print_trial(label: str, trial: Trial) -> None:
    end = trial.reason if trial.value is None else format_significant(trial.value)
    say(f"{label}, trial {trial.number}: {trial.setting}: {trial.state}, {end}")
