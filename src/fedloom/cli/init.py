"""``fedloom init``: looks at a table, says everything about it at once, and drafts an experiment file that runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli._app import app, errors, say
from fedloom.errors import ConfigError


@app.command()
def init(
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file, a row per sample", show_default=False)],
    by: Annotated[str | None, typer.Option(help="column that names the site of a row")] = None,
    target: Annotated[str | None, typer.Option(help="column to predict")] = None,
    out: Annotated[Path | None, typer.Option(help="experiment file; beside the table by default")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an experiment file that is there")] = False,
) -> None:
    """Look at a table, report everything about it at once, and draft an experiment file that runs as it is.

    Example: fedloom init patients.csv --by hospital --target died
    """
    with errors():
        from fedloom.data.draft import Draft
        from fedloom.data.survey import Survey
        from fedloom.storage.files import make_folder, write_atomic

        place = out or table.parent / f"{table.name.lstrip('.').partition('.')[0] or 'data'}.toml"
        if place.exists() and not force:
            raise ConfigError(f"{place} is there already; give --force to replace it, or another --out")
        draft = Draft(Survey(table), by, target)
        for line in draft.report:
            say(line)
        text = draft.text(place)
        _try(text, place)
        make_folder(place.parent)
        write_atomic(place, text.encode())
        say(f"\ndraft: {place}; run it with: fedloom run {place}")


def _try(text: str, place: Path) -> None:
    """Reads the data as the draft says, so that no draft is written that would not run."""
    from fedloom.experiment import parse

    experiment = parse(tomllib.loads(text), str(place))
    experiment.partition(experiment.source.read(None), seed=0)
