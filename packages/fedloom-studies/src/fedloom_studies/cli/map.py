"""``fedloom map``: every method in every kind of federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.lab.cli import DataDir, Join, algorithms, app, errors, one_of, say, worker_count
from fedloom_studies.cli._complete import setups as setup_names
from fedloom_studies.cli.reproduce import seconds

if TYPE_CHECKING:
    from fedloom_studies.map.setups import Protocol, Scale, Setup


@app.command(name="map", rich_help_panel="Studies")
def map_command(
    method: Annotated[
        list[str] | None,
        typer.Option(help="a method, or my_package:MyMethod; may be repeated", autocompletion=algorithms),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="search space of that method's own settings (TOML)")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="only this setup; may be repeated", autocompletion=setup_names)
    ] = None,
    budget: Annotated[str | None, typer.Option(help="stop in time and resume later, e.g. 60m or 2h")] = None,
    list_: Annotated[bool, typer.Option("--list", help="all setups: what is recorded, estimated time here")] = False,
    page: Annotated[
        Path | None, typer.Option(help="write the page of the map to this file, those of the setups beside it")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="look again at recorded cells, with other seeds and what was chosen")
    ] = False,
    references: Annotated[
        bool, typer.Option("--references", help="fit scikit-learn's models where data are a table, and nothing else")
    ] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="also stale cells: confirm them by a seed, or run them anew")
    ] = False,
    protocol: Annotated[
        str,
        typer.Option(
            help="equal rounds, or gradients: rounds that FedAvg's gradients buy",
            autocompletion=one_of("rounds", "gradients"),
        ),
    ] = "rounds",
    scale: Annotated[
        str, typer.Option(help="full, or smoke: two setups, one seed", autocompletion=one_of("smoke", "full"))
    ] = "full",
    out: Annotated[Path, typer.Option(help="folder of the run directories")] = Path("runs/map"),
    results: Annotated[
        Path | None, typer.Option(help="folder of the records, read and written; lines of several machines merge")
    ] = None,
    data_dir: DataDir = None,
    workers: Annotated[str, typer.Option(help="cells at a time, or 'auto'")] = "1",
    join: Join = False,
) -> None:
    """Measure every method in every kind of federation.

    Run it again to resume, in any order, on any number of machines.

    Every method has equally many trials, chosen on validation, then fresh seeds. A method of your own gets its row
    beside the recorded ones.

    Example: fedloom map --method my_package:MyMethod --space space.toml
    """
    if list_ and page is not None:
        raise typer.BadParameter("give one of --list, --page")
    if space is not None and len(method or ()) != 1:
        raise typer.BadParameter("--space needs one --method")
    with errors():
        from fedloom.lab.printing import print_rows
        from fedloom.outputs import check_output_folder
        from fedloom.processes import cores
        from fedloom_studies.appendices import check_page
        from fedloom_studies.store import folder_of

        for place in (out, results):
            if place is not None:
                check_output_folder(place, (space,))
        if page is not None:
            check_page(page)
        folder = folder_of(results)
        recorded = folder / f"map-{scale}.jsonl"
        if list_ and not method:
            from fedloom_studies.listing import listed

            def rows() -> list[dict[str, Any]]:
                from fedloom_studies.map.measure import due, estimates
                from fedloom_studies.map.records import read

                _, wanted, equal = _chosen(scale, setup, protocol)
                records = read(recorded, equal)
                todo = due(wanted, records, again=again, old=stale, protocol=equal)
                return estimates(wanted, todo, records, data_dir, equal)

            print_rows(listed("setups", (scale, setup, protocol, again, stale), rows, folder, data_dir))
            return
        at_once = cores() if (count := worker_count(workers)) == "auto" else int(count)
        from fedloom.lab.progress import counted
        from fedloom_studies.appendices import write_pages
        from fedloom_studies.map.judge import judge
        from fedloom_studies.map.measure import due, estimates, measure_all
        from fedloom_studies.map.page import pages, standing_table
        from fedloom_studies.map.records import read, with_reused, write
        from fedloom_studies.map.references import measure
        from fedloom_studies.map.setups import Cell, space_from
        from fedloom_studies.map.statements import FOLDER
        from fedloom_studies.reproduce import TimeBudget

        every, wanted, equal = _chosen(scale, setup, protocol)
        methods, records = method or [], read(recorded, equal)
        beside = recorded.with_name(f"map-{scale}-references.jsonl")
        if page is not None:
            write_pages(page, FOLDER, pages(every, read(recorded), read(beside), read(recorded, "gradients")))
            say(f"page: {page}")
            return
        if references:
            for one in (one for one in wanted if one.references):
                for record in measure(one, data_dir):
                    write(record, beside)
                    say(f"{record.method} in {one.name}: {record.status}")
            return
        own_space = space_from(space, methods[0]) if space is not None else {}
        for name in methods:
            _ = Cell(wanted[0], name, own_space, equal).digest  # what cannot be is refused before work
        todo = due(wanted, records, methods, own_space, again=again, old=stale, protocol=equal)
        print_rows(estimates(wanted, todo, records, data_dir, equal))
        if list_:
            return
        time = TimeBudget(None if budget is None else seconds(budget))
        ended = measure_all(
            todo, records, recorded, out / scale, data_dir, time, counted, lambda line: say(line, err=True),
            again=again, workers=at_once, join=join,
        )  # fmt: skip
        if methods:
            now = with_reused(read(recorded, equal), read(recorded))
            print_rows(standing_table([judge(one, now) for one in wanted], methods))
        if not ended:
            say("stopped: the same command resumes from here", err=True)
            raise typer.Exit(130)


def _chosen(scale: str, names: list[str] | None, protocol: str) -> tuple[dict[str, Setup], list[Setup], Protocol]:
    """Choose the setups of a scale, those of them that are named, and the protocol, by what the user gave."""
    from fedloom.values import choose
    from fedloom_studies.map.setups import setups

    scales: dict[str, Scale] = {"smoke": "smoke", "full": "full"}
    protocols: dict[str, Protocol] = {"rounds": "rounds", "gradients": "gradients"}
    every = setups(choose("scale", scales, scale))
    return every, [choose("setup", every, name) for name in names or every], choose("protocol", protocols, protocol)
