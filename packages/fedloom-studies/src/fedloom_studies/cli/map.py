"""The command ``fedloom map``, which measures every method in every kind of federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.errors import ConfigError
from fedloom.lab.cli import (
    DataDir,
    ExecutorName,
    Join,
    algorithms,
    app,
    complete_one_of,
    print_errors,
    say,
    worker_count,
)
from fedloom_studies.cli._complete import setups as setup_names
from fedloom_studies.cli.reproduce import parse_seconds

if TYPE_CHECKING:
    from fedloom_studies.map.setups import Protocol, Scale, Setup


@app.command(name="map", rich_help_panel="Studies")
def map_command(
    method: Annotated[
        list[str] | None,
        typer.Option(help="a method, or my_package:MyMethod (may be repeated)", autocompletion=algorithms),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="TOML file with the search space for the method's options")] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="restrict the map to this setup (may be repeated)", autocompletion=setup_names),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="time limit, after which the run stops and can be resumed later, e.g. 60m or 2h")
    ] = None,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", help="list all setups with their recorded results and the estimated time on this machine"
        ),
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="write the map page to this file, and the pages of the setups next to it")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="rerun recorded experiments with other seeds and the settings chosen before")
    ] = False,
    references: Annotated[
        bool, typer.Option("--references", help="fit only scikit-learn's models, and only in setups with tables")
    ] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="run only methods with aggregation rules, under attack and at equal rounds")
    ] = False,
    wider: Annotated[
        bool, typer.Option("--wider", help="run only closed-form heads and their rivals, with a wider model")
    ] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="also process outdated results: confirm them with one seed or rerun them")
    ] = False,
    protocol: Annotated[
        str,
        typer.Option(
            help="amount of work that is equal for all methods. rounds: every method gets as many rounds as FedAvg. "
            "gradients: every method gets as many gradients as FedAvg",
            autocompletion=complete_one_of("rounds", "gradients"),
        ),
    ] = "rounds",
    scale: Annotated[
        str,
        typer.Option(
            help="size of the map: full, or smoke (two setups, one seed)",
            autocompletion=complete_one_of("smoke", "full"),
        ),
    ] = "full",
    out: Annotated[Path, typer.Option(help="folder for the run directories")] = Path("runs/map"),
    results: Annotated[
        Path | None,
        typer.Option(help="folder to read records from and write them to. Records from several machines can be merged"),
    ] = None,
    data_dir: DataDir = None,
    workers: Annotated[str, typer.Option(help="number of experiments to run at a time, or 'auto'")] = "1",
    join: Join = False,
    executor: ExecutorName = None,
) -> None:
    """Measure every method in every kind of federation.

    Run the same command again to resume. Neither the order of the work nor the number of machines affects the results.

    The settings of every method are chosen on validation data with the same number of trials. The method is then run
    with new seeds. Your own method gets a row in the table, next to the recorded methods.

    Example: fedloom map --method my_package:MyMethod --space space.toml
    """
    if references + rules + wider > 1:
        raise typer.BadParameter("use one of --references, --rules, --wider")
    if wider and protocol != "rounds":
        raise typer.BadParameter("--wider works only at equal rounds")
    if list_ and page is not None:
        raise typer.BadParameter("use one of --list, --page")
    if space is not None and len(method or ()) != 1:
        raise typer.BadParameter("--space works only with exactly one --method")
    with print_errors():
        from fedloom.lab.printing import print_rows
        from fedloom.outputs import check_output_folder
        from fedloom.processes import usable_cores
        from fedloom_studies.appendices import check_page
        from fedloom_studies.store import choose_folder

        for place in (out, results):
            if place is not None:
                check_output_folder(place, (space,))
        if page is not None:
            check_page(page)
        folder = choose_folder(results)
        first, beside, ruled, widened = (
            folder / f"map-{scale}{kind}.jsonl" for kind in ("", "-references", "-rules", "-wider")
        )
        recorded, out = (widened, out / "wider") if wider else (first, out)
        if list_ and not method:
            from fedloom_studies.listing import read_listing

            def rows() -> list[dict[str, Any]]:
                from fedloom_studies.map.measure import cells_to_run, estimate_setups
                from fedloom_studies.map.records import read_records

                (_, wide), wanted, equal = _choose_setups(scale, setup, protocol, wider=wider)
                listed, estimates = [(wanted, recorded)], list[dict[str, Any]]()
                if not wider and equal == "rounds":
                    listed.append(([wide[one.name] for one in wanted if one.name in wide], widened))
                for setups, file in listed:
                    records = read_records(file, equal)
                    todo = cells_to_run(setups, records, again=again, old=stale, protocol=equal)
                    estimates += estimate_setups(setups, todo, records, data_dir, equal)
                return estimates

            question = (scale, setup, protocol, again, stale, wider)
            print_rows(read_listing("setups", question, rows, folder, data_dir))
            return
        at_once = usable_cores() if (count := worker_count(workers)) == "auto" else int(count)
        from fedloom.lab.progress import count_progress
        from fedloom_studies.appendices import write_pages
        from fedloom_studies.map.judge import judge_setup
        from fedloom_studies.map.measure import cells_to_run, estimate_setups, measure_all
        from fedloom_studies.map.page import map_pages, standing_table
        from fedloom_studies.map.records import fill_reused, read_records, record_cell
        from fedloom_studies.map.references import measure_references
        from fedloom_studies.map.setups import Cell, space_from
        from fedloom_studies.map.statements import MAP_FOLDER
        from fedloom_studies.reproduce import TimeBudget

        (every, wide), wanted, equal = _choose_setups(scale, setup, protocol, wider=wider)
        methods, records = method or [], read_records(recorded, equal)
        if page is not None:
            write_pages(
                page,
                MAP_FOLDER,
                map_pages(
                    every,
                    read_records(first),
                    read_records(beside),
                    read_records(first, "gradients"),
                    read_records(ruled),
                    wide,
                    read_records(widened),
                ),
            )
            say(f"page: {page}")
            return
        if references:
            for one in (one for one in wanted if one.references):
                for record in measure_references(one, data_dir):
                    record_cell(record, beside)
                    say(f"{record.method} in {one.name}: {record.status}")
            return
        time = TimeBudget(None if budget is None else parse_seconds(budget))
        if rules:
            from fedloom_studies.map.rules import measure_rules as measure_rules

            if not measure_rules(records, ruled, out / "rules", data_dir, time, say):
                raise typer.Exit(130)
            return
        own_space = space_from(space, methods[0]) if space is not None else {}
        for name in methods:
            _ = Cell(wanted[0], name, own_space, equal).digest  # raises an error for an impossible cell before any work
        todo = cells_to_run(wanted, records, methods, own_space, again=again, old=stale, protocol=equal)
        print_rows(estimate_setups(wanted, todo, records, data_dir, equal))
        if list_:
            return
        if executor is not None:
            from fedloom.lab.experiment import open_executor
            from fedloom_studies.map.elsewhere import measure_elsewhere

            if join or budget is not None:
                raise ConfigError("an executor already distributes the work. Omit --join and --budget")
            ended = measure_elsewhere(
                open_executor(executor), todo, records, recorded, data_dir, lambda line: say(line, err=True),
                again=again,
            )  # fmt: skip
        else:
            ended = measure_all(
                todo, records, recorded, out / scale, data_dir, time, count_progress, lambda line: say(line, err=True),
                again=again, workers=at_once, join=join,
            )  # fmt: skip
        if methods:
            now = fill_reused(read_records(recorded, equal), read_records(recorded))
            print_rows(standing_table([judge_setup(one, now) for one in wanted], methods))
        if not ended:
            say("stopped. The same command resumes from here", err=True)
            raise typer.Exit(130)


def _choose_setups(
    scale: str, names: list[str] | None, protocol: str, *, wider: bool
) -> tuple[tuple[dict[str, Setup], dict[str, Setup]], list[Setup], Protocol]:
    """Return all setups of a scale with their own and with wider models, the selected setups, and the protocol."""
    from fedloom.values import choose
    from fedloom_studies.map.setups import read_setups, wider_setups

    scales: dict[str, Scale] = {"smoke": "smoke", "full": "full"}
    protocols: dict[str, Protocol] = {"rounds": "rounds", "gradients": "gradients"}
    size = choose("scale", scales, scale)
    both = read_setups(size), wider_setups(size)
    every = both[wider]
    return both, [choose("setup", every, name) for name in names or every], choose("protocol", protocols, protocol)
