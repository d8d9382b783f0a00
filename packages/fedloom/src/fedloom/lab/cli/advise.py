"""The command ``fedloom advise``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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


@app.command(rich_help_panel="Run")
def advise(
    file: FileArgument,
    out: Annotated[Path | None, typer.Option(help="race directory (default: runs/<name of the file>-advice)")] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="compute budget of the race, in multiples of the gradients of a FedAvg run (default: 16, twice the "
            "cost of tuning FedAvg with 8 trials)"
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="largest difference that does not matter in practice, in the metric's units (0.01 is one "
            "percentage point)"
        ),
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="number of processes, or 'auto'. Overrides [engine] workers")
    ] = None,
    data_dir: DataDir = None,
    join: Join = False,
    executor: ExecutorName = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Recommend a method and settings for your clients.

    A few methods compete on validation data. Test data are never used. To resume, run the same command again.

    The command writes advised.toml, an experiment file for the final comparison.

    Example: fedloom advise examples/quickstart.toml --out runs/quickstart-advice
    """
    with print_errors(), add_file_to_errors(file):
        count = None if workers is None else worker_count(workers)
        from fedloom.errors import ConfigError
        from fedloom.lab.advise import DEFAULT_BUDGET_RUNS, Advisor
        from fedloom.lab.experiment import open_executor
        from fedloom.lab.report.comparison.pairs import check_margin
        from fedloom.storage import read_toml
        from fedloom.trust import check_document
        from fedloom.values import check_is_table

        if budget is not None and not 0 < budget < float("inf"):
            raise ConfigError(f"--budget must be a number greater than 0, got {budget}")
        document = read_toml(file, "experiment file")
        check_document(document, file, trust=trust)
        if count is not None:
            document["engine"] = {**check_is_table(document.get("engine", {}), f"{file}: [engine]"), "workers": count}
        engine = None if executor is None else open_executor(executor)
        advisor = Advisor(
            document, str(file), out or Path("runs") / f"{file.stem}-advice", data_dir,
            budget=DEFAULT_BUDGET_RUNS if budget is None else budget, margin=check_margin(margin),
        )  # fmt: skip
        say(f"race: {advisor.plan}", err=True)
        advice = advisor.run(lambda line: say(line, err=True), join=join, executor=engine)
    if as_json:
        say_json(advice.record())
    else:
        say(*advice.lines())
    say(f"next: fedloom run {advisor.out / 'advised.toml'}", err=as_json)
