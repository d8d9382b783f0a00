"""``fedloom run`` and ``fedloom report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import _complete as offer
from fedloom.cli._app import DataDir, FileArgument, app, errors
from fedloom.errors import ConfigError


@app.command()
def run(
    file: FileArgument,
    out: Annotated[Path | None, typer.Option(help="run directory; runs/<name of the file> by default")] = None,
    workers: Annotated[str | None, typer.Option(help="processes, or 'auto'; replaces [engine] workers")] = None,
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="forget what the run directory holds and start anew")] = False,
    track: Annotated[
        str | None,
        typer.Option(
            help="log figures to 'tensorboard' or 'mlflow' as they come",
            autocompletion=offer.one_of("tensorboard", "mlflow"),
        ),
    ] = None,
) -> None:
    """Run all methods and seeds of an experiment; run again to resume.

    Example: fedloom run examples/quickstart.toml --out runs/quickstart --workers 2
    On several machines or GPUs: torchrun --nproc-per-node 4 -m fedloom.cli run FILE.toml
    """
    with errors():
        count: int | str | None = workers
        if workers is not None and workers != "auto":
            if not workers.isdigit() or int(workers) < 1:
                raise ConfigError(f"--workers must be a number from 1 or 'auto', got {workers!r}")
            count = int(workers)
        from fedloom.experiment import read

        experiment = read(file, workers=count)
        from fedloom.experiment import Plan
        from fedloom.experiment.track import Tracker, check_tracker
        from fedloom.processes.distributed import joined
        from fedloom.progress import shown

        with joined() as ranks:
            where = out or Path("runs") / file.stem
            check_tracker(track)
            plan = Plan(experiment, where, data_dir, force=force, ranks=ranks)
            tracker = Tracker(track, plan.experiment, where) if track and ranks.rank == 0 else None
            with shown(plan) as tell:
                outcomes = plan.run(tell, tracker=tracker)
    if plan.ranks.rank == 0:
        _print_table(plan.out)
        for outcome in outcomes:
            if outcome.status != "done":
                typer.echo(f"{outcome.label}, seed {outcome.seed}: {outcome.reason}", err=True)
        typer.echo(f"report: {plan.out / 'report.html'}")
        if tracker is not None:
            typer.echo(f"tracked: {tracker.view}")
    if any(o.status == "interrupted" for o in outcomes):
        raise typer.Exit(130)
    if any(o.status != "done" for o in outcomes):
        raise typer.Exit(1)


def _print_table(out: Path) -> None:
    from fedloom import report
    from fedloom.progress import print_table

    if (out / "metrics.parquet").exists():
        print_table(report.result_table(out))


@app.command(name="report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="run directories", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; report.html of the first run directory by default")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="columns of results.tex, by their names in results.csv: 'accuracy,bytes_up'; six by default"),
    ] = None,
) -> None:
    """Write one offline HTML report of one or several run directories, and every chart as SVG and CSV beside it.

    Example: fedloom report runs/a runs/b --out comparison.html
    """
    with errors():
        from fedloom import report

        chosen = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
        typer.echo(f"report: {report.write(runs, out or runs[0] / 'report.html', columns=chosen)}")
