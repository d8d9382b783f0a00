"""Command ``fedloom glm``: linear, logistic and Poisson regression computed from sums over sites.

The result matches a fit on the pooled rows.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.lab.cli import DataDir, FileArgument, app, print_errors, say
from fedloom_clinic.cli.penalty import PenaltyName, Strength, read_strength, say_penalty


@app.command(rich_help_panel="Statistics")
def glm(
    file: FileArgument,
    by_client: Annotated[bool, typer.Option("--by-client", help="use a separate intercept for each client")] = False,
    penalty: PenaltyName = "none",
    strength: Strength = None,
    data_dir: DataDir = None,
) -> None:
    """Fit a regression to the rows of all sites of a table.

    The fit uses only sums. Coefficients are printed with their names and confidence intervals.

    The regression is logistic for a binary task, Poisson for counts, and linear for other targets.

    Example: fedloom glm patients.toml --by-client
    """
    with print_errors():
        import numpy as np

        from fedloom.data.site_rows import rows_by_site
        from fedloom.errors import ConfigError
        from fedloom.lab.experiment import read
        from fedloom.lab.printing import print_rows
        from fedloom_clinic.fits.glm import GlmSite, fit_glm

        chosen = read_strength(penalty, strength)
        rows = rows_by_site(read(file, trains=False).source, data_dir, centre=0.0, unit=1.0)
        families = {"binary": "logistic", "count": "poisson", "regression": "linear"}
        if rows.data.task not in families:
            other = "set target to a column with two values, counts or measurements"
            cure = "use fedloom cox" if rows.data.task == "survival" else other
            raise ConfigError(f"{rows.data.name} is a {rows.data.task}; {cure}")
        family = families[rows.data.task]
        say(*rows.notes)
        sites = [GlmSite(x, y[:, 0]) for x, y in rows.sites]
        fit = fit_glm(sites, family, rows.columns, rows.names if by_client else None, penalty=penalty, strength=chosen)
        low, high = fit.interval()
        ratio = {"logistic": "odds ratio", "poisson": "rate ratio"}.get(family)
        shown = np.stack([fit.beta, low, high])
        if ratio is not None:
            with np.errstate(over="ignore"):  # a ratio per large unit may overflow to inf
                shown = np.exp(shown)
        heads = [*([] if ratio is None else [ratio]), "95 % from", "to", "p"]
        figures = np.stack([*shown[ratio is None :], fit.p_values], 1).tolist()
        print_rows([
            {"column": name, "coefficient": beta, "standard error": se, **dict(zip(heads, values, strict=True))}
            for name, beta, se, values in zip(fit.names, fit.beta.tolist(), fit.se.tolist(), figures, strict=True)
        ])  # fmt: skip
        event = f" of {rows.data.classes[1]!r}" if family == "logistic" else ""
        say(f"{family} regression{event}: {fit.row_count} rows at {len(sites)} sites")
        say_penalty(penalty, fit.ridge)
