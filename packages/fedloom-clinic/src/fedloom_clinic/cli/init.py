"""Command ``fedloom init``: examines a table, reports its findings, and drafts an experiment file that runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.errors import ConfigError
from fedloom.lab.cli import app, print_errors, say

if TYPE_CHECKING:
    from fedloom.data import Dataset


@app.command(rich_help_panel="Start")
def init(
    table: Annotated[
        Path,
        typer.Argument(
            help="file with one row per sample: CSV, Parquet, Excel, SPSS, Stata or SAS", show_default=False
        ),
    ],
    client_column: Annotated[
        str | None,
        typer.Option(help="column that identifies the client of each row, such as a hospital. Use '' if there is none"),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="column to predict. For a multilabel task, repeat the option for each label's column"),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            help="column that is 1 for an observed event, if the target is a time to an event. Use '' if there is none"
        ),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(help="column that identifies the subject of each row, such as a patient. Use '' if there is none"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="experiment file to write (default: next to the table)")] = None,
    agree: Annotated[
        bool, typer.Option("--agree", help="also write an agreement on the columns for all sites")
    ] = False,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="option to set in the draft, such as data.skip=2 or data.sheet='visits'"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing experiment file")] = False,
) -> None:
    """Examine a table and draft an experiment file for it.

    All findings about the table are reported at once. The draft runs unchanged unless questions remain. In that case,
    the file contains the questions and the options that answer them.

    Example: fedloom init patients.csv --client-column hospital --target died
    """
    with print_errors():
        from fedloom.lab.experiment.overrides import apply_overrides
        from fedloom.outputs import FileKind, check_output_file, never_own
        from fedloom.storage import make_folder, write_atomic
        from fedloom_clinic.drafts.columns import TableSurvey
        from fedloom_clinic.drafts.draft import ExperimentDraft, unnamed_level_notes

        place = out or table.parent / f"{table.name.lstrip('.').partition('.')[0] or 'data'}.toml"
        if place.is_dir():
            raise ConfigError(f"{place} is a folder. Set --out to a path for the experiment file")
        document = place.with_name(f"{place.stem}.agreement.toml")
        for path in (place, document) if agree else (place,):
            check_output_file(path, FileKind("TOML", "an experiment file", never_own), (table,), force=force)
        for text in values or ():
            if not text.startswith("data."):
                raise ConfigError(f"--set {text!r:.80}: init accepts only keys of [data], such as --set data.skip=2")
        options = apply_overrides({"data": {}}, "fedloom init", values or ())["data"]
        draft = ExperimentDraft(TableSurvey(table, **options), client_column, target, event, subject)
        say(*draft.report)
        text = draft.text(place)
        data = None if draft.asks else _try_reading(text, place)
        say(*(f"  {note}" for note in ([] if data is None else data.notes)))
        if agree and (data is None or draft.questions):
            raise ConfigError(
                f"{table}: an agreement cannot be written until this question is answered: {draft.questions[0]}"
            )
        make_folder(place.parent)
        if agree and data is not None:
            agreement = draft.agreement(data)
            write_atomic(document, agreement.text().encode())
            text = draft.text(place, document)
            _try_reading(text, place)
            say(*(f"  {sentence}" for sentence in unnamed_level_notes(data, agreement)))
        write_atomic(place, text.encode())
        if draft.questions:
            say(f"\ndraft: {place}. The draft does not run until this question is answered:")
            say(*(f"  {question}" for question in draft.questions))
            return
        say(f"\ndraft: {place}. Run it with: fedloom run {place}")
        if agree:
            say(f"agreement: {document}. Fill in the units, and have every site review and sign the agreement")


def _try_reading(text: str, place: Path) -> Dataset:
    """Read the data with the draft's options, and return the data.

    This verifies that a draft runs before it is written.
    """
    from fedloom.lab.experiment import parse

    document = {key: value for key, value in tomllib.loads(text).items() if key != "questions"}
    experiment = parse(document, str(place))
    data = experiment.source.read(None)
    experiment.partition(data, seed=0)
    return data
