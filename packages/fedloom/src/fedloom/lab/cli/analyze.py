"""The command ``fedloom analyze``, which computes an analysis from sums over an experiment file's clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.lab.cli import _complete as offer
from fedloom.lab.cli._app import DataDir, FileArgument, app, print_errors, say

if TYPE_CHECKING:
    from fedloom.analyses import Analysis, Rules
    from fedloom.lab.experiment import Experiment


def _analysis_names() -> Iterator[str]:
    from fedloom.analyses.registry import ANALYSES

    yield from ANALYSES


@app.command("analyze", rich_help_panel="Statistics")
def analyze_file(
    name: Annotated[
        str,
        typer.Argument(
            help="name of the analysis, from 'fedloom list analyses'",
            show_default=False,
            autocompletion=offer.complete_from(_analysis_names),
        ),
    ],
    file: FileArgument,
    values: Annotated[
        list[str] | None, typer.Option("--set", help="an option of the analysis, such as width=30 (may be repeated)")
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", help="a limit of the analysis, such as min_subjects=5 (may be repeated)"),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Compute statistics from sums over all clients in a file.

    The clients are the users named in the table. If no users are named, the clients are created by the file's partition
    with the first seed. Options are taken from the file's [[analysis]] table of this kind and can be changed with
    --set.

    Example: fedloom analyze table-1 patients.toml --rule min_subjects=5
    """
    with print_errors():
        import pyarrow as pa

        from fedloom.analyses import analyze as run_analysis
        from fedloom.data.dataset import Dataset
        from fedloom.data.groups import keep_group_columns
        from fedloom.data.sources.table.reading import TableSource
        from fedloom.errors import write_singular
        from fedloom.formats import format_option
        from fedloom.lab.experiment import read
        from fedloom.lab.printing import print_rows

        experiment = read(file, trains=False)
        analysis, agreed = choose_analysis(experiment, name, values or (), rules or ())
        source = keep_group_columns(experiment.source, analysis.kept_columns)
        source = source.with_(impute=True) if isinstance(source, TableSource) else source
        data = source.read(data_dir)
        clients = data if data.users is not None else experiment.partition(data, experiment.head.seeds[0])
        count = len(data.user_names) if isinstance(clients, Dataset) else clients.n
        result = run_analysis(analysis, clients, rules=agreed)
        say(*result.notes)
        columns = {  # columns that contain lists, such as histograms, are not printed
            field.name: result.table[field.name].to_pylist()
            for field in result.table.schema
            if not pa.types.is_list(field.type) and result.table[field.name].null_count < len(result.table)
        }
        facts = {name: of[0] for name, of in columns.items() if len(of) > 1 and len({*of}) == 1}
        shown = [key for key in columns if key not in facts]
        print_rows([dict(zip(shown, row, strict=True)) for row in zip(*(columns[key] for key in shown), strict=True)])
        if facts:
            say(
                ", ".join(
                    f"{key.replace('_', ' ')}: {format_option(value)}" for key, value in facts.items() if value != ""
                )
            )
        questions = write_singular(f"{len(result.log)} questions")
        say(f"the analysis sent {questions} to {write_singular(f'{count} clients')} and received only sums")


def choose_analysis(
    experiment: Experiment, name: str, values: Sequence[str], rules: Sequence[str]
) -> tuple[Analysis, Rules]:
    """Return the requested analysis and its rules.

    Args:
        experiment: experiment described by the file. If it contains an analysis with this name, the defaults are taken
            from that analysis.
        name: name of the analysis.
        values: changes to the analysis options, such as ``width=30``.
        rules: changes to the rules, such as ``min_subjects=5``.

    Raises:
        ConfigError: the name, an option or a rule is unknown.
    """
    from fedloom.analyses import Rules, resolve_analysis
    from fedloom.lab.experiment.overrides import apply_overrides
    from fedloom.values import dump_value, make

    options, chosen = apply_overrides({}, "fedloom analyze", values), experiment.find(name)
    analysis: Analysis = (
        resolve_analysis(name, options)
        if chosen is None
        else make(chosen.with_, options, name, type(chosen).model_fields)
    )
    table = (
        {}
        if analysis.rules is None
        else {key: dump_value(analysis.rules)[key] for key in analysis.rules.model_fields_set}
    )
    agreed = make(Rules, {**table, **apply_overrides({}, "fedloom analyze", rules)}, "--rule", Rules.model_fields)
    return analysis, agreed
