"""Command ``fedloom reproduce``, which reproduces tables and figures of papers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.errors import ConfigError
from fedloom.formats import format_significant
from fedloom.lab.cli import DataDir, ExecutorName, Join, app, complete_one_of, print_errors, say, worker_count
from fedloom_studies.cli._complete import recipes as recipe_names

if TYPE_CHECKING:
    from fedloom.lab.experiment import Executor
    from fedloom_studies.reproduce import Recipe, TimeBudget
    from fedloom_studies.reproduce.recipe import Scale
    from fedloom_studies.reproduce.summary import RecipeSummary

CHEAP_CORE_MINUTES = 30.0
"""Cost of a recipe with five seeds, in core-minutes, below which more seeds may be added."""


@app.command(rich_help_panel="Studies")
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="name of a recipe, from --list", show_default=False, autocompletion=recipe_names),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="scale of the run: smoke, laptop or full (the paper's protocol)",
            autocompletion=complete_one_of("smoke", "laptop", "full"),
        ),
    ] = "laptop",
    seeds: Annotated[str | None, typer.Option(help="seeds to use instead of the recipe's, e.g. 1,10,100")] = None,
    only: Annotated[list[str] | None, typer.Option(help="run this method only (may be repeated)")] = None,
    out: Annotated[Path, typer.Option(help="folder for the run directories")] = Path("runs/reproduce"),
    results: Annotated[Path | None, typer.Option(help="folder to read summaries from and write them to")] = None,
    data_dir: DataDir = None,
    workers: Annotated[str, typer.Option(help="number of processes, or 'auto'")] = "1",
    device: Annotated[str, typer.Option(help="device to run on: cpu, cuda or cuda:N")] = "cpu",
    list_: Annotated[
        bool, typer.Option("--list", help="list all recipes with their data, state and estimated time")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="run the next unfinished recipes, in order")] = False,
    budget: Annotated[
        str | None, typer.Option(help="time limit, after which the run stops and can be resumed later, e.g. 150m or 2h")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="write the page of all papers to this file, and the pages of the recipes to a folder"),
    ] = None,
    tables_of_others: Annotated[
        bool,
        typer.Option(
            "--others", help="with --page: write the page that compares with tables from other programs instead"
        ),
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help=(
                "measure the time and memory required by recipes that have no laptop scale, for "
                "--page. With --list: by recipes that have not been run"
            ),
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="rerun one seed of NAME and compare the result with the summary of NAME")
    ] = False,
    decide: Annotated[
        bool,
        typer.Option(
            "--decide",
            help="add seeds to NAME, up to 20, as long as a claim is undecided. Without NAME: work "
            "through the frozen list of experiments for open headline claims",
        ),
    ] = False,
    join: Join = False,
    executor: ExecutorName = None,
) -> None:
    """Run the experiments of a paper's table and judge its claims.

    Run the same command again to resume.

    Example: fedloom reproduce flame-table3-mnist --scale laptop --data-dir ~/data
    """
    works_through = decide and name is None and not all_
    if sum((name is not None, list_, all_, page is not None, estimate and not list_, works_through)) != 1:
        raise typer.BadParameter("use one of NAME, --list, --all, --page, --estimate, --decide")
    if tables_of_others and page is None:
        raise typer.BadParameter("--others works only with --page, which names the file to write")
    with print_errors():
        from fedloom import Engine
        from fedloom.outputs import check_output_folder
        from fedloom.values import choose, make
        from fedloom_studies.appendices import check_page
        from fedloom_studies.reproduce.recipe import RECIPE_SCALES
        from fedloom_studies.store import choose_folder

        for folder in (out, results):
            if folder is not None:
                check_output_folder(folder)
        if page is not None:
            check_page(page)
        recorded = choose_folder(results)
        how_much: Scale = choose("scale", {s: s for s in RECIPE_SCALES}, scale)
        if list_:
            _print_recipes(how_much, recorded, data_dir, estimate)
            return
        from fedloom_studies.appendices import write_pages
        from fedloom_studies.others import page as tables
        from fedloom_studies.reproduce import TimeBudget, read_recipe, read_recipes
        from fedloom_studies.reproduce.papers import paper_pages
        from fedloom_studies.reproduce.reasons import PAPERS_FOLDER

        if page is not None:
            contents = (tables.render_pages if tables_of_others else paper_pages)(read_recipes(), recorded)
            write_pages(page, PAPERS_FOLDER, contents)
            say(f"page: {page}")
            return
        if estimate:
            from fedloom_studies.reproduce.estimate import store_estimates

            say(f"estimates: {store_estimates(read_recipes(), recorded, data_dir)}")
            return
        if verify:
            if name is None:
                raise typer.BadParameter("--verify works only with NAME")
            if device != "cpu":
                raise typer.BadParameter(
                    "--verify computes on the CPU, because a GPU rounds differently. Omit --device"
                )
            _verify_summary(read_recipe(name), how_much, recorded, data_dir, workers, only or [])
            return
        from fedloom.lab.experiment import open_executor

        make(Engine, {"device": device}, "--device", Engine.model_fields)
        engine = None if executor is None else open_executor(executor)
        time = TimeBudget(None if budget is None else parse_seconds(budget))
        if works_through:
            _run_frozen_list(out, recorded, data_dir, workers, time)
            return
        chosen = [read_recipe(name)] if name is not None else list(read_recipes().values())
        seed_numbers = _parse_seeds(seeds)
        for one in chosen:

            def run_with(count: list[int], one: Recipe = one) -> bool:
                return _run_recipe(
                    one, how_much, out, recorded, data_dir, workers, device, count, only or [], time, all_, join, engine
                )

            if (
                time.remaining_seconds <= 0
                or not run_with(seed_numbers)
                or (decide and not _add_deciding_seeds(one, how_much, recorded, run_with))
            ):
                say(f"stopped at {one.name}. The same command resumes from here", err=True)
                raise typer.Exit(130)


def _run_recipe(
    recipe: Recipe, scale: Scale, out: Path, results: Path, data_dir: Path | None, workers: str, device: str,
    seeds: list[int], only: list[str], budget: TimeBudget, several: bool, join: bool,
    engine: Executor | None,
) -> bool:  # fmt: skip
    """Run a recipe and print its verdicts. Return True if the next recipe may be run."""
    from fedloom.errors import DataError
    from fedloom.lab.progress import count_progress
    from fedloom_studies.reproduce import reproduce as run
    from fedloom_studies.reproduce.summary import add_rivals, read_summary

    summary = read_summary(results, recipe.name, scale)
    if several and summary is not None and summary.complete and summary.protocol == recipe.protocol(scale):
        return True
    if several and scale == "laptop" and recipe.budget(scale) is None:
        say(f"{recipe.name}: no laptop scale; left out")
        return True
    say(f"{recipe.name}: {recipe.paper.title} ({recipe.sentence(scale)})")
    try:
        done = run(
            recipe, scale, out / recipe.name / scale, results=results, data_dir=data_dir, seeds=seeds, only=only,
            workers=worker_count(workers), device=device, budget=budget, show=count_progress, join=join,
            executor=engine,
        )  # fmt: skip
    except DataError as error:
        if not several:
            raise
        say(f"{recipe.name}: data are missing: {error}", err=True)
        return True
    if done is not None:
        _print_verdicts(recipe, add_rivals(recipe, done, results))
    return done is not None and done.complete


def _print_verdicts(recipe: Recipe, summary: RecipeSummary) -> None:
    """Print a recipe's table of values and its table of claims."""
    from fedloom.lab.printing import print_texts
    from fedloom_studies.reproduce import judge
    from fedloom_studies.reproduce.cells import make_table_cells
    from fedloom_studies.reproduce.figures import get_unit

    compare = recipe.follows_paper(summary.scale, summary.samples)
    rows = [
        (c.variant, c.column, get_unit(c.figure).value(c.mean, c.std), str(c.n), get_unit(c.figure).value(c.chosen),
         "-" if c.paper is None else get_unit(c.figure).value(c.paper, c.paper_std), c.verdict)
        for c in make_table_cells(recipe, summary.numbers, compare=compare)
    ]  # fmt: skip
    if rows:
        print_texts(
            ("variant", "column", "ours", "seeds", "at validation's round", "paper", "verdict"), rows, names=True
        )
    claims = [(c.claim.text, c.summary) for c in judge.judge_claims(recipe, summary.numbers)]
    if claims:
        print_texts(("claim", "verdict"), claims, names=True)
    for failure in summary.failures:
        say(f"without a result: {failure}")


def _add_deciding_seeds(recipe: Recipe, scale: Scale, results: Path, run: Callable[[list[int]], bool]) -> bool:
    """Add seeds step by step while a claim is undecided, provided that the recipe is cheap.

    Return False if the time limit has been reached.
    """
    from fedloom_studies.reproduce.judge import judge_claims
    from fedloom_studies.reproduce.looks import LOOK_LEVELS, UNDECIDED
    from fedloom_studies.reproduce.summary import read_summary

    if recipe.paper.rivals:  # the rivals' recorded seeds limit the comparison
        return True
    for count, _ in LOOK_LEVELS[1:]:
        summary = read_summary(results, recipe.name, scale)
        if (
            summary is None
            or scale == "smoke"
            or summary.minutes * LOOK_LEVELS[0][0] / len(summary.seeds) >= CHEAP_CORE_MINUTES
        ):
            return True
        verdicts = [one for one in judge_claims(recipe, summary.numbers) if not one.claim.construction]
        if any(one.verdict == UNDECIDED for one in verdicts if one.measured) and not run(recipe.seeds(count)):
            return False
    return True


def _run_frozen_list(out: Path, results: Path, data_dir: Path | None, workers: str, budget: TimeBudget) -> None:
    """Run the experiments of the frozen list, in order of increasing cost per claim.

    If the time limit is reached, exit with code 130.
    """
    from fedloom.lab.printing import print_texts
    from fedloom.lab.progress import count_progress
    from fedloom_studies import decide
    from fedloom_studies.reproduce import read_recipes
    from fedloom_studies.reproduce import reproduce as run
    from fedloom_studies.reproduce.summary import read_summary, write_summary

    by_name = read_recipes()
    titles = ("recipe", "what it adds", "core-hours", "claims", "state")
    print_texts(titles, list(decide.decision_rows(by_name, results)), names=True)
    for one in decide.read_decisions()[0]:
        for name in filter(None, (by_name[one.recipe].paper.rivals, one.recipe)):
            recipe, summary = by_name[name], read_summary(results, name, "laptop")
            if decide.is_done(one, recipe, summary):
                continue
            say(f"{name}: {one.how}")
            if decide.can_extend(recipe, summary):
                assert summary is not None
                seeds = decide.seeds_to_run(recipe, summary, one.seeds)
                done = decide.add_seeds(
                    recipe, summary, seeds, out / name / "decide", data_dir=data_dir,
                    workers=worker_count(workers), budget=budget, show=count_progress,
                ) if budget.remaining_seconds > 0 else None  # fmt: skip
                if done is not None:
                    write_summary(done, results)
            else:
                done = run(
                    recipe, "laptop", out / name / "laptop", results=results, data_dir=data_dir,
                    workers=worker_count(workers), budget=budget, show=count_progress,
                ) if budget.remaining_seconds > 0 else None  # fmt: skip
            if done is None or not done.complete:
                say(f"stopped at {name}. The same command resumes from here", err=True)
                raise typer.Exit(130)
            _print_verdicts(recipe, done)


def _verify_summary(
    recipe: Recipe, scale: Scale, results: Path, data_dir: Path | None, workers: str, only: list[str]
) -> None:  # fmt: skip
    """Rerun one seed of a summary, and report whether its values are equal, equal up to numerical noise, or different.

    In the last case, exit with code 1.
    """
    from tempfile import TemporaryDirectory

    from fedloom.lab.progress import count_progress
    from fedloom_studies.reproduce.execute import SUM_ORDER_TOLERANCE, verify_seed
    from fedloom_studies.reproduce.summary import read_summary

    summary = read_summary(results, recipe.name, scale)
    if summary is None:
        raise ConfigError(f"{results} contains no summary of {recipe.name} at {scale} scale. Run the recipe first")
    with TemporaryDirectory() as folder:
        differences = verify_seed(
            recipe, summary, Path(folder) / "run", data_dir=data_dir, only=only,
            workers=worker_count(workers), show=count_progress,
        )  # fmt: skip
    worst = max(differences, key=lambda d: d.size)
    equal = sum(d.size == 0 for d in differences)
    word = (
        "equal"
        if equal == len(differences)
        else "within numerical noise"
        if worst.size <= SUM_ORDER_TOLERANCE
        else "not equal"
    )
    code = f", commit {summary.commit}" if summary.commit else ""
    say(
        f"{recipe.name}, seed {summary.seeds[0]}: {word}: {equal} of {len(differences)} values equal, the largest "
        f"relative difference {format_significant(worst.size, 2)} ({worst.reference}: {worst.recorded_value} then, "
        f"{worst.measured_value} now; noise is up to {format_significant(SUM_ORDER_TOLERANCE)})."
        f" Then: {summary.date}{code}, torch {summary.versions['torch']}, {summary.machine}"
    )
    if word == "not equal":
        raise typer.Exit(1)


def _print_recipes(scale: Scale, results: Path, data_dir: Path | None, estimated: bool) -> None:
    from fedloom.lab.printing import print_texts
    from fedloom_studies.listing import read_listing

    def rows() -> list[tuple[str, ...]]:
        from fedloom_studies.reproduce import read_recipes
        from fedloom_studies.reproduce.estimate import recipe_rows

        return list(recipe_rows(read_recipes(), scale, results, data_dir, estimated=estimated))

    titles = ("recipe", "what", "data", "state", "budget", "time")
    print_texts(titles, read_listing("recipes", (scale, estimated), rows, results, data_dir), names=True)


def _parse_seeds(text: str | None) -> list[int]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--seeds must be numbers separated by commas, e.g. 1,10,100, got {text!r}")
    return [int(part) for part in parts]


def parse_seconds(text: str) -> float:
    """Convert a duration such as 90s, 150m or 2h to seconds.

    Raises:
        ConfigError: the text does not state a duration.
    """
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        if unit is not None and float(text[:-1]) > 0:
            return unit * float(text[:-1])
    except ValueError:
        pass
    raise ConfigError(f"--budget must be a time such as 90s, 150m or 2h, got {text!r}")
