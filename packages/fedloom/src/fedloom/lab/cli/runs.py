"""The commands ``fedloom run``, ``merge`` and ``report``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.errors import adapt_wording, choose_exit_code
from fedloom.formats import format_duration
from fedloom.hints import unknown_name_error
from fedloom.lab.cli import _complete as offer
from fedloom.lab.cli._app import (
    AsJson,
    DataDir,
    ExecutorName,
    FileArgument,
    Join,
    Trust,
    add_file_to_errors,
    app,
    print_errors,
    say,
    say_json,
    worker_count,
)

if TYPE_CHECKING:
    from fedloom.lab.experiment import Plan
    from fedloom.lab.experiment.outputs import Outcome
    from fedloom.lab.report.comparison.contenders import Models


@app.command(rich_help_panel="Run")
def run(
    file: FileArgument,
    out: Annotated[
        Path | None, typer.Option(help="run directory (default: runs/<name of the file>, with -refit after --refit)")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="number of processes, or 'auto'. Overrides [engine] workers")
    ] = None,
    data_dir: DataDir = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="delete the results in the run directory and start over. With --method, only these methods' results "
            "are deleted",
        ),
    ] = False,
    track: Annotated[
        str | None,
        typer.Option(
            help="also log metrics to 'tensorboard', 'mlflow' or 'wandb' (offline)",
            autocompletion=offer.complete_one_of("tensorboard", "mlflow", "wandb"),
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="print the plan, its sizes and its estimated time without writing anything"),
    ] = False,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=(
                "change a value, such as local.lr=0.1, defaults=paper or method.LABEL.mu=1. A method's own table "
                "takes precedence (may be repeated)"
            ),
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="run only this method, given by label or algorithm (may be repeated)")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="number of communication rounds for every method")] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="train on all samples with the first seed and without a test set, for example after cross-validation",
        ),
    ] = False,
    join: Join = False,
    executor: ExecutorName = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Run an experiment with all of its methods and seeds.

    To resume, run the same command again.

    With --dry-run, print the plan and the estimated run time without writing anything.

    Example: fedloom run examples/quickstart.toml --out runs/quickstart --workers 2

    On several machines or GPUs: torchrun --nproc-per-node 4 -m fedloom.lab.cli run FILE.toml
    """
    with print_errors(), add_file_to_errors(file), adapt_wording("command"):
        count = None if workers is None else worker_count(workers)
        from fedloom.lab.experiment import read

        experiment = read(file, values or (), method or (), rounds, trust=trust, refit=refit, workers=count)
        from fedloom.lab.experiment import Plan
        from fedloom.lab.experiment.track import Tracker, check_tracker
        from fedloom.lab.experiment.units.executors import open_executor
        from fedloom.lab.progress import show_progress
        from fedloom.processes.distributed import join_ranks

        with join_ranks() as ranks:
            where = out or Path("runs") / (f"{file.stem}-refit" if refit else file.stem)
            check_tracker(track)
            engine = None if executor is None else open_executor(executor)
            plan = Plan(
                experiment, where, data_dir, force=force, partly=bool(method), dry=dry_run, reads=(file,), ranks=ranks
            )
            say(*(plan.remarks if ranks.rank == 0 else ()), err=True)
            if dry_run:
                if ranks.rank == 0:
                    _print_plan(plan)
                return
            tracker = Tracker(track, plan.experiment, where) if track and ranks.rank == 0 else None
            before = _recorded_figures(where)
            with show_progress(plan) as show:
                outcomes = plan.run(show, *([tracker] if tracker else []), join=join, executor=engine)
    open_runs = [outcome for outcome in outcomes if outcome.status == "interrupted"]
    if plan.ranks.rank == 0:
        if open_runs:
            finished = len(outcomes) - len(open_runs)
            say(
                f"interrupted: {finished} of {len(outcomes)} runs are finished. Run the same command again to continue",
                err=True,
            )
        elif before and before == _recorded_figures(plan.out):
            say(f"nothing to do, because every run in {plan.out} is finished", err=as_json)
        _print_failures(outcomes)
        if as_json:
            _print_json([plan.out] if (plan.out / "metrics.parquet").exists() else [])
        elif not open_runs:
            _print_table(plan.out)
            _print_conclusions([plan.out])
        if (plan.out / "report.html").exists() and not open_runs:
            say(f"report: {plan.out / 'report.html'}", err=as_json)
        if tracker is not None and tracker.wrote:
            say(f"tracked: {tracker.view}", err=as_json)
    if code := choose_exit_code(o.status for o in outcomes):
        raise typer.Exit(code)
    if plan.ranks.rank == 0 and (unanswered := plan.unanswered):
        say(f"no answer: {', '.join(unanswered)}. The report states the reasons", err=True)
        raise typer.Exit(2)


def _print_plan(plan: Plan) -> None:
    """Print an experiment's plan, including its sizes and its estimated cost."""
    from fedloom.lab.experiment.measure.bench import estimate_costs, total_minutes
    from fedloom.lab.printing import print_rows

    head, fed = plan.experiment.head, plan.federations[plan.experiment.head.seeds[0]]
    methods, seeds = len(plan.experiment.compared), len(head.seeds)
    sizes = {part: fed.sizes(part) for part in fed.parts}
    train = sizes["train"]
    say(f"{head.name}: {methods} methods, {seeds} seeds, {methods * seeds} runs, into {plan.out}")
    source, shape = plan.experiment.source_options["source"], list(fed.data.shape)
    say(f"data: {source}, {len(fed.data)} samples of shape {shape}, {fed.data.task}")
    say(
        f"clients: {fed.n}, {int(train.min())} to {int(train.max())} training samples each; "
        + ", ".join(f"{part} {int(size.sum())}" for part, size in sizes.items())
    )
    costs = {}
    for label, cost in estimate_costs(plan):
        costs[label] = cost
        say(f"tried {len(costs)}/{methods}: {label}", err=True)
    timed = any(cost.round.simulated is not None for cost in costs.values())
    beside = any(any(cost.other) for cost in costs.values())
    print_rows(
        [
            {
                "method": label,
                "rounds": cost.rounds,
                "clients/round": round(cost.round.clients, 1),
                "steps/round": round(cost.round.steps),
                "samples/round": round(cost.round.samples),
                "MB up/round": cost.round.bytes_up / 1e6,
                "MB down/round": cost.round.bytes_down / 1e6,
                "parameters": cost.parameters,
                "s/round": cost.round.seconds,
                **({"simulated s/round": cost.round.simulated} if timed else {}),
                **({"other samples": round(cost.other.samples)} if beside else {}),
                **({"other MB": (cost.other.bytes_up + cost.other.bytes_down) / 1e6} if beside else {}),
            }
            for label, cost in costs.items()
        ]
    )
    if beside:
        say(
            "additional work, once per run: finding clusters for the shares, and training personal "
            "models for the last evaluation"
        )
    time = total_minutes(plan, costs)
    say(
        "estimated time: "
        + ("unknown, because there were too few trial rounds" if time is None else f"about {format_duration(time)}")
    )


def _print_table(out: Path) -> None:
    from fedloom.lab import report
    from fedloom.lab.printing import print_results

    if (out / "metrics.parquet").exists():
        print_results(report.result_table(out))


def _recorded_figures(out: Path) -> bytes:
    """Return a digest of the recorded metrics, or an empty string if there are none."""
    place = out / "metrics.parquet"
    return hashlib.sha256(place.read_bytes()).digest() if place.is_file() else b""


def _print_failures(outcomes: Sequence[Outcome]) -> None:
    """Print the reason for every failed or diverged run. Interrupted runs are not listed."""
    for outcome in outcomes:
        if outcome.status not in ("done", "interrupted"):
            say(f"{outcome.label}, seed {outcome.seed}: {outcome.reason}", err=True)


def _print_conclusions(
    runs: Sequence[Path],
    baseline: str | None = None,
    compare_model: Models = "best-on-validation",
    margin: float | None = None,
) -> None:
    """Print the winner and its lead, the compared models, and their costs."""
    from fedloom.lab import report

    if all((run / "metrics.parquet").exists() for run in runs):
        for conclusions in report.conclude_runs(runs, baseline, compare_model, margin):
            say(*conclusions.lines())


def _print_json(
    runs: Sequence[Path], baseline: str | None = None, compare_model: Models = "best-on-validation",
    margin: float | None = None, **more: object,
) -> None:  # fmt: skip
    """Print the results, comparisons and conclusions of run directories as one JSON object."""
    from fedloom.lab import report

    say_json(report.comparison_record(runs, baseline, compare_model, margin) | more)


@app.command(rich_help_panel="Run")
def merge(
    runs: Annotated[list[Path], typer.Argument(help="run directories of the same experiment", show_default=False)],
    out: Annotated[Path, typer.Option(help="the new run directory", show_default=False)],
) -> None:
    """Merge several run directories of the same experiment.

    They may contain different seeds or methods.

    Example: fedloom merge runs/seeds-0-4 runs/seeds-5-9 --out runs/all
    """
    with print_errors():
        from fedloom.lab import report
        from fedloom.lab.experiment.units.merge import merge as join_folders
        from fedloom.lab.report.charts.look import can_draw
        from fedloom.outputs import check_output_folder

        check_output_folder(out, runs, entries=())
        lacks = join_folders(runs, out)
        _print_conclusions([out])
        if can_draw():
            say(f"report: {report.write_report([out], out / 'report.html', charts=False)}")
    for label, seed in lacks:
        say(f"no directory contains {label}, seed {seed}", err=True)
    if lacks:
        say(f"next: fedloom run {out / 'experiment.toml'} --out {out}")


@app.command(name="report", rich_help_panel="Run")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="run directories", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write (default: report.html in the first run directory)")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help=(
                "columns of results.tex, given by their names in results.csv, such as 'accuracy,bytes_up' (default: "
                "six columns)"
            )
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="baseline method in pairs.csv and pairs.tex (default: local or fedavg)"),
    ] = None,
    compare_model: Annotated[
        str,
        typer.Option(
            help=(
                "which model of each method to compare and print: best-on-validation (per client, the better of "
                "global and "
                "personal), personal (global if there is no personal model), or all"
            ),
            autocompletion=offer.complete_one_of("best-on-validation", "personal", "all"),
        ),
    ] = "best-on-validation",
    margin: Annotated[
        float | None,
        typer.Option(
            help="largest difference that counts as equivalent, in the metric's units (0.01 is one percentage point)"
        ),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="also write a draft model card, card.md, to be completed by hand")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="replace existing files, even if they do not belong to a report")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an offline HTML report on one or more runs.

    Every chart is also saved as SVG and CSV in a folder next to the page.

    Example: fedloom report runs/a --baseline local
    """
    with print_errors():
        from fedloom.lab import report
        from fedloom.lab.report.comparison.contenders import COMPARED_MODELS

        chosen = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
        kind = next((kind for kind in COMPARED_MODELS if kind == compare_model), None)
        if kind is None:
            raise unknown_name_error("choice", compare_model, COMPARED_MODELS, "--compare-model")
        page = out or runs[0] / "report.html"
        beside = page.with_suffix("") / "card.md"
        if card:
            report.check_card(beside)
        shown = report.write_report(
            runs, page, columns=chosen, baseline=baseline, compare_model=kind, margin=margin, force=force
        )
        page_file = report.write_card(runs, beside) if card else None
        if as_json:
            _print_json(
                runs,
                baseline,
                kind,
                margin,
                report=str(shown),
                **({} if page_file is None else {"card": str(page_file)}),
            )
            return
        _print_conclusions(runs, baseline, kind, margin)
        say(f"report: {shown}")
        if page_file is not None:
            say(f"model card: {page_file}")
