"""``fedloom cox``: time to event over sites, by sums that equal the pooled fit."""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.cli import _complete as offer
from fedloom.cli._app import DataDir, FileArgument, app, errors, say


@app.command()
def cox(
    file: FileArgument,
    time: Annotated[
        str | None, typer.Option(help="column of the time to the event, or to the end of observation; as in [data]")
    ] = None,
    event: Annotated[
        str | None, typer.Option(help="column with 1 where the time is that of an event, else 0; as in [data]")
    ] = None,
    ties: Annotated[
        str, typer.Option(help="efron or breslow", autocompletion=offer.one_of("efron", "breslow"))
    ] = "efron",
    stratify: Annotated[bool, typer.Option("--stratify", help="a baseline hazard for every site")] = False,
    data_dir: DataDir = None,
) -> None:
    """Fit a Cox regression over the sites of an experiment's table, from sums alone: hazard ratios with intervals.

    Example: fedloom cox patients.toml --time followup_days --event died --stratify
    """
    with errors():
        import numpy as np

        from fedloom.data.survival import survival_table
        from fedloom.experiment import read
        from fedloom.progress import print_rows
        from fedloom.tasks.cox import SurvivalSite, fit_cox

        table = survival_table(read(file).source, time, event, data_dir)
        for note in table.notes:
            say(note)
        fit = fit_cox([SurvivalSite(*site) for site in table.sites], ties, stratify=stratify, names=table.columns)
        low, high = fit.interval()
        heads = ("coefficient", "standard error", "hazard ratio", "95 % from", "to", "p")
        figures = np.stack([fit.beta, fit.se, np.exp(fit.beta), np.exp(low), np.exp(high), fit.p_values], 1).tolist()
        rows = zip(table.columns, figures, strict=True)
        print_rows([{"column": name, **dict(zip(heads, values, strict=True))} for name, values in rows])
        whose = "a baseline hazard for every site" if stratify else "one baseline hazard"
        say(f"{fit.rows} rows of {len(table.sites)} sites, {fit.events} events; ties by {ties}, {whose}")
