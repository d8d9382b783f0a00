"""Cox regression over the rows of all clients by sums, as sites answer them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.data.federation import DATA_PARTS, Federation
from fedloom.data.site_rows import numbers_of
from fedloom.data.tables import Table
from fedloom.errors import ConfigError, Refused
from fedloom.tasks.cox import SurvivalSite
from fedloom.tasks.cox_vectors import CoxAgreement, bin_ends
from fedloom.tasks.secure_cox import SecureCoxFit


def table_of(data: Dataset) -> Table:
    """Return the table of a survival task.

    Raises:
        Refused: the samples are no rows of a table, or their targets are no times.
    """
    table = data.prepare if data.fitted is None else data.fitted.table
    if data.task != "survival" or not isinstance(table, Table):
        raise Refused(
            f"the analysis cox is of times to an event in a table, and {data.name} has none",
            rule="cox-needs-times",
            fix="leave it out",
        )
    return table


def agreement_of(choice: Any, ranges: tuple[Sequence[float], Sequence[float]]) -> CoxAgreement:
    """Return what the sites agree on.

    Args:
        choice: of the experiment.
        ranges: smallest and largest plausible value of every column of the regression.
    """
    width, until = choice.width, choice.until
    ends = np.zeros(0) if width is None or until is None else bin_ends(width, until)
    low, high = map(np.array, ranges)
    return CoxAgreement(
        ends, low, high, choice.least, ties=choice.ties, stratify=choice.stratify, ridge=choice.strength
    )


def agreed_ranges(table: Table) -> tuple[list[float], list[float]]:
    """Smallest and largest value of every column of the regression, as the sites have agreed.

    Raises:
        ConfigError: a number has no range.
    """
    missing = [column.name for column in table.columns if not column.levels and column.range is None]
    if missing:
        raise ConfigError(
            f"the analysis cox puts numbers on one scale by agreed ranges, and {', '.join(map(repr, missing[:5]))} has "
            "none; give each range = [LOWEST, HIGHEST] in the agreement (fedloom init --agree)"
        )
    pairs = [
        pair
        for column in table.columns
        for pair in ([(0.0, 1.0)] * (column.levels - 1) if column.levels else [column.range or (0.0, 1.0)])
    ]
    return [low for low, _ in pairs], [high for _, high in pairs]


def survival_site(data: Dataset, table: Table, rows: Tensor) -> SurvivalSite:
    """Complete rows of raw data, of those at `rows` ``[N]``."""
    x, y = numbers_of(table, data.x[rows]), data.y[rows].double()
    whole = ~data.x[rows].isnan().any(1)
    return SurvivalSite(x[whole].numpy(), *y[whole].T.numpy())


def within(site: SurvivalSite, terms: CoxAgreement) -> SurvivalSite:
    """Return the rows within the agreed ranges."""
    inside = ((site.x >= terms.low) & (site.x <= terms.high)).all(1)
    return SurvivalSite(site.x[inside], site.time[inside], site.event[inside])


def rows_of(fed: Federation, client: int) -> Tensor:
    """Places of all samples of a client, whatever they are used for."""
    return torch.cat([fed.indices(part, client) for part in DATA_PARTS])


def cox_table(fit: SecureCoxFit, names: Sequence[str], terms: CoxAgreement) -> pa.Table:
    """Return a row per column of the regression, with the rows of the fit and the lost rows."""
    low, high = fit.fit.interval()
    figures = {
        "coefficient": fit.fit.beta, "standard_error": fit.fit.se, "low": low, "high": high, "p": fit.fit.p_values,
        "bound": fit.bound,
    }  # fmt: skip
    facts: dict[str, float | str] = {"likelihood": fit.fit.likelihood, "rows": fit.fit.rows, "events": fit.fit.events}
    facts |= {f"{name}_lost": count for name, count in zip(("late", "rare"), fit.losses[2:4], strict=True)}
    facts |= {"left_out": fit.losses.left_out, "bins": len(terms.ends), "least": terms.least, "ties": terms.ties}
    facts |= {} if terms.ridge is None else {"ridge": terms.ridge}
    columns = {name: pa.array([fact] * len(names)) for name, fact in facts.items()}
    return pa.table({"column": pa.array(names, pa.string()), **{k: pa.array(v) for k, v in figures.items()}, **columns})
