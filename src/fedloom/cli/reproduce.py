"""``fedloom reproduce``: the tables and figures of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli import _complete as offer
from fedloom.cli._app import DataDir, app, errors
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.reproduce import Budget, Recipe
    from fedloom.reproduce.recipe import Scale


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="a recipe, see --list", show_default=False, autocompletion=offer.recipes)
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke, laptop or full (the paper's protocol)", autocompletion=offer.one_of("smoke", "laptop", "full")
        ),
    ] = "laptop",
    seeds: Annotated[str | None, typer.Option(help="seeds instead of the recipe's, e.g. 1,10,100")] = None,
    only: Annotated[list[str] | None, typer.Option(help="run this method only; may be repeated")] = None,
    out: Annotated[Path, typer.Option(help="folder of the run directories")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="folder of the summaries")] = Path("results"),
    data_dir: DataDir = None,
    workers: Annotated[str, typer.Option(help="processes, or 'auto'")] = "1",
    list_: Annotated[bool, typer.Option("--list", help="all recipes: data, state, estimated time here")] = False,
    all_: Annotated[bool, typer.Option("--all", help="the next unfinished recipes, in order")] = False,
    budget: Annotated[str | None, typer.Option(help="stop in time and resume later, e.g. 150m or 2h")] = None,
    page: Annotated[Path | None, typer.Option(help="write the page of all results to this file")] = None,
) -> None:
    """Run a table or figure of a paper and judge it; run again to resume.

    Example: fedloom reproduce flame-table3-mnist --scale laptop --data-dir ~/data
    """
    if sum((name is not None, list_, all_, page is not None)) != 1:
        raise typer.BadParameter("give one of NAME, --list, --all, --page")
    with errors():
        from fedloom.reproduce import Budget, recipe, recipes
        from fedloom.reproduce.page import page as page_of
        from fedloom.reproduce.recipe import SCALES
        from fedloom.storage.files import make_folder, write_atomic
        from fedloom.values import choose

        how_much: Scale = choose("scale", {s: s for s in SCALES}, scale)
        if page is not None:
            make_folder(page.resolve().parent)
            write_atomic(page, page_of(recipes(), results).encode())
            typer.echo(f"page: {page}")
            return
        if list_:
            _list(recipes(), how_much, results, data_dir)
            return
        time = Budget(None if budget is None else _seconds(budget))
        chosen = [recipe(name)] if name is not None else list(recipes().values())
        given = _seeds(seeds)
        for one in chosen:
            if time.left <= 0 or not _run(
                one, how_much, out, results, data_dir, workers, given, only or [], time, all_
            ):
                typer.echo(f"stopped at {one.name}: the same command goes on from here", err=True)
                raise typer.Exit(130)


def _run(
    recipe: Recipe, scale: Scale, out: Path, results: Path, data_dir: Path | None, workers: str, seeds: list[int],
    only: list[str], budget: Budget, several: bool,
) -> bool:  # fmt: skip
    """Run one recipe and print its verdicts; whether the next may follow."""
    from fedloom.errors import DataError
    from fedloom.progress import counted
    from fedloom.reproduce import reproduce as run
    from fedloom.reproduce.summary import read
    from fedloom.reproduce.verdicts import print_verdicts

    known = read(results, recipe.name, scale)
    if several and known is not None and known.complete and known.protocol == recipe.protocol(scale):
        return True
    if several and scale == "laptop" and recipe.budget(scale) is None:
        typer.echo(f"{recipe.name}: no laptop scale; left out")
        return True
    typer.echo(f"{recipe.name}: {recipe.paper.title} ({recipe.says(scale)})")
    try:
        done = run(
            recipe, scale, out / recipe.name / scale, results=results, data_dir=data_dir, seeds=seeds, only=only,
            workers=workers if workers == "auto" else _count(workers), budget=budget, show=counted,
        )  # fmt: skip
    except DataError as error:
        if not several:
            raise
        typer.echo(f"{recipe.name}: data missing: {error}", err=True)
        return True
    if done is not None:
        print_verdicts(recipe, done)
    return done is not None and done.complete


def _list(recipes: dict[str, Recipe], scale: Scale, results: Path, data_dir: Path | None) -> None:
    from fedloom.reproduce.estimate import listing
    from fedloom.reproduce.verdicts import print_listing

    print_listing(list(listing(recipes, scale, results, data_dir)))


def _seeds(text: str | None) -> list[int]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--seeds must be numbers with commas between, e.g. 1,10,100, got {text!r}")
    return [int(part) for part in parts]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--workers must be a number from 1 or 'auto', got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        if unit is not None and float(text[:-1]) > 0:
            return unit * float(text[:-1])
    except ValueError:
        pass
    raise ConfigError(f"--budget must be a time such as 90s, 150m or 2h, got {text!r}")
