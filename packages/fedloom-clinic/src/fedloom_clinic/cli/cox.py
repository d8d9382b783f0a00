"""Command ``fedloom cox``: Cox regression computed from sums over sites.

The result matches a fit on the pooled rows.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.formats import format_option, format_significant
from fedloom.lab.cli import DataDir, FileArgument, app, complete_one_of, print_errors, say
from fedloom_clinic.cli.penalty import PenaltyName, Strength, read_strength, say_penalty


@app.command(rich_help_panel="Statistics")
def cox(
    file: FileArgument,
    time: Annotated[
        str | None,
        typer.Option(help="column with the time to the event or the end of observation (default: from [data])"),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(help="column that is 1 if the event was observed, otherwise 0 (default: from [data])"),
    ] = None,
    ties: Annotated[
        str, typer.Option(help="method for ties: efron or breslow", autocompletion=complete_one_of("efron", "breslow"))
    ] = "efron",
    bins: Annotated[
        float | None, typer.Option(min=0, help="width of the time bins. With bins, sites send only secure sums")
    ] = None,
    min_events: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="with --bins, minimum number of events and of rows at risk in a bin. A site with fewer sends nothing "
            "for this bin (default: 5)",
        ),
    ] = None,
    stratify: Annotated[bool, typer.Option("--stratify", help="use a separate baseline hazard for each site")] = False,
    penalty: PenaltyName = "none",
    strength: Strength = None,
    test: Annotated[
        str | None,
        typer.Option(help="rows to hold out from the fit, as COLUMN=VALUE. The concordance on these rows is printed"),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Fit a Cox regression across the sites of a table.

    The fit uses only sums. Hazard ratios are printed with confidence intervals.

    Example: fedloom cox patients.toml --time followup_days --event died --stratify
    """
    with print_errors():
        import numpy as np

        from fedloom.data.site_rows import survival_rows
        from fedloom.errors import ConfigError
        from fedloom.lab.experiment import read
        from fedloom.lab.printing import print_rows
        from fedloom.tasks.survival import SurvivalRows, concordance
        from fedloom_clinic.fits.cox import SurvivalSite, fit_cox
        from fedloom_clinic.fits.cox_vectors import simulated_agreement
        from fedloom_clinic.fits.secure_cox import fit_secure_cox

        chosen = read_strength(penalty, strength)
        held_out = None if test is None else tuple(test.split("=", 1))
        if held_out is not None and len(held_out) != 2:
            raise ConfigError(f"--test must have the form COLUMN=VALUE, for example fold=test, got {test!r}")
        if bins is None and min_events is not None:
            raise ConfigError("--min-events can be used only with --bins. Add --bins, or omit --min-events")
        least = 5 if min_events is None else min_events
        if bins is not None and (penalty == "firth" or chosen == "cv"):
            raise ConfigError(
                "--bins cannot be combined with --penalty firth or a cross-validated --strength. Use --penalty "
                "ridge with a --strength that was chosen without --bins"
            )
        table = survival_rows(read(file, trains=False).source, time, event, data_dir, held_out)
        say(*table.notes)
        if bins is not None and stratify:
            raise ConfigError(
                "with --stratify, every site sends its own results, so secure sums would not protect anything. Omit "
                "one of the two options"
            )
        sites = [SurvivalSite(x, *y.T) for x, y in table.sites]
        fit = exact = fit_cox(sites, ties, stratify=stratify, names=table.columns, penalty=penalty, strength=chosen)
        if bins is not None:
            secure = fit_secure_cox(
                sites, simulated_agreement(sites, bins, least, ties, None if chosen == "cv" else chosen), table.columns
            )
            fit, losses = secure.fit, secure.losses
            say(
                f"bins of {format_option(bins)}, with at least {least} events and rows per site: "
                f"{losses.rare + losses.uncovered} of {losses.events} events are censored ({losses.rare} in bins with "
                f"too few events or rows, {losses.uncovered} after the last bin)"
            )
            say(
                f"rounding changes each coefficient by at most {format_significant(float(secure.bound.max()), 1)} "
                f"relative to the pooled fit of these rows"
            )
        low, high = fit.interval()
        heads = ("coefficient", "standard error", "hazard ratio", "95 % from", "to", "p")
        with np.errstate(over="ignore"):  # a ratio per large unit may overflow to inf
            ratios = np.exp([fit.beta, low, high])
        figures = np.stack([fit.beta, fit.se, *ratios, fit.p_values], 1).tolist()
        rows = [dict(zip(heads, values, strict=True)) for values in figures]
        if bins is not None:
            for row, beta, se in zip(rows, exact.beta, exact.se, strict=True):
                row |= {"with exact times": beta, "its standard error": se}
        print_rows([{"column": name, **row} for name, row in zip(table.columns, rows, strict=True)])
        baseline = "one baseline hazard per site" if stratify else "one baseline hazard"
        say(f"{fit.row_count} rows at {len(table.sites)} sites, {fit.events} events; ties by {ties}, {baseline}")
        say_penalty(penalty, fit.ridge)
        parts = [SurvivalRows(x @ fit.beta, *y.T) for x, y in table.test]
        if parts:
            whole = SurvivalRows(*(np.concatenate(part) for part in zip(*parts, strict=True)))
            by_site = ", ".join(
                f"{name} {format_significant(c, 3)}" if (c := concordance(rows)) == c else f"{name} none"
                for name, rows in zip(table.names, parts, strict=True)
            )
            say(
                f"concordance on {len(whole.z)} test rows with {int(whole.event.sum())} events: "
                f"{format_significant(concordance(whole), 3)}; by site: {by_site}"
            )
