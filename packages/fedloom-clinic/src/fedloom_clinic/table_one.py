"""Table 1: counts, means, deviations, missing cells, histograms and quantiles by group, with tests of homogeneity.

References: T. J. Pollard et al., "tableone", JAMIA Open 2018. D. Yang and J. E. Dalton, SAS Global Forum 2012 (the
standardized difference of levels). The tests are the same as in SciPy, but are computed from the same sums as the
table.

Numbers are scaled to [-1, 1] by the agreed-upon ranges. A second question computes deviations around the means from the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fedloom.analyses import AnalysisTerms, Bounds, ClientRows, Question, Schema, ScriptedAnalysis, Total
from fedloom.errors import DataError, Refused
from fedloom_clinic.cells import (
    CLIENT_GROUP,
    MISSING_LEVEL,
    MergedCells,
    count_subjects,
    forbids_small_cells,
    group_codes,
    groups_of,
    level_codes,
    merge_bins,
    merge_small_cells,
    range_widths,
    unmerged_cells,
)
from fedloom_clinic.summaries import (
    TABLE_SCHEMA,
    GroupMoments,
    SummaryColumn,
    describe_code,
    describe_number,
    note_clients,
)

if TYPE_CHECKING:
    from fedloom.engine import Setting

SUM_STEP = 2.0**-36
"""Rounding step with masking: sums and squares are rounded to multiples of it."""
HOMOGENEITY_STEP = 2.0**-3
"""Rounding step, on the scale of a chi-square statistic, of a homogeneity statistic over clients if small cells are
merged."""
MIN_COMPARED_CLIENTS = 5
"""Minimum number of clients in a statistic if small cells are merged.

A statistic over three or four clients and the totals would leave only a few possible counts for each client.
"""
MIN_LEVEL_SHARE = 0.05
"""Proportion below which a level's statistic is rounded more coarsely, because it is divided by the proportion."""
GAPS_NOTE = (
    "if fewer than {} of a client's subjects have missing or out-of-range cells, these cells are not counted as such. "
    "They are replaced by the client's mean, its most frequent level, or the nearest limit of the range"
)


class TableOne(ScriptedAnalysis):
    """Table 1 of all clients' rows, computed from sums, by group or by client.

    The table contains tests of homogeneity across groups and clients.
    """

    kind: ClassVar[str] = "table-1"
    assumes_independence: ClassVar[bool] = True
    needs_table: ClassVar[bool] = True
    questions: ClassVar = {
        "counts": {},
        "spreads": {"centres": 2},
        "differences": {"means": 1, "variances": 1, "shares": 2},
    }

    group: str | None = Field(None, description="column whose levels are the groups, or 'client' (None: no groups)")
    bins: int = Field(50, ge=2, le=1000, description="number of equal-width bins over a numeric column's range")

    @property
    def shows_rows(self) -> bool:
        return self.group == CLIENT_GROUP

    @property
    def kept_columns(self) -> tuple[str, ...]:
        return () if self.group in (None, CLIENT_GROUP) else (str(self.group),)

    @property
    def _min_variance(self) -> float:
        """Smallest variance on [-1, 1] that may divide a statistic: the variance within a bin."""
        return (2 / self.bins) ** 2 / 12

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        groups_of(schema, self.group, ())

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        if question.name == "differences" and not compares_clients(terms):
            raise Refused(
                f"clients are compared only if there are at least {MIN_COMPARED_CLIENTS}, because their counts would "
                f"otherwise be revealed"
            )
        groups, columns = self._merged_cells(terms)
        numbers = sum(column.edges is not None for column in columns)
        lowest = {"centres": -1.0, "means": -1.0, "variances": self._min_variance, "shares": 0.0}
        rows = {"centres": len(groups.names), "means": numbers, "variances": numbers, "shares": len(columns) - numbers}
        for name, values in question.values.items():
            if len(values) != rows[name] or not bool(((values >= lowest[name]) & (values <= 1)).all()):
                raise Refused(f"{name} of a question must be {rows[name]} rows of numbers from {lowest[name]:.3g} to 1")

    def publish(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        columns, groups = self._agreed_columns(terms.schema), groups_of(terms.schema, self.group, terms.client_names)
        code = group_codes(client, terms, self.group)
        counts = [count_subjects(code, client.subjects, len(groups))]
        for g in range(len(groups)):
            some = client.select(code == g)
            counts += [_subjects_by_cell(some, column) for column in columns]
        return (torch.cat(counts) >= terms.rules.min_subjects).double()

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        most = float(terms.most_rows)
        groups, columns = self._merged_cells(terms)
        numbers = [column for column in columns if column.edges is not None]
        if question.name == "spreads":
            squares = Bounds.counts(len(groups.names) * len(numbers), 4 * most)
            return squares._replace(step=torch.full_like(squares.step, SUM_STEP))
        if question.name == "differences":
            shares, variances = question.values["shares"], question.values["variances"].double()
            smallest = torch.tensor([float(row[row > 0].min()) if bool((row > 0).any()) else 1.0 for row in shares])
            between = Bounds.counts(len(numbers), 4 * most)
            chi = Bounds.between(torch.zeros(len(shares)), most / smallest)
            unit = HOMOGENEITY_STEP if forbids_small_cells(terms.rules) else SUM_STEP
            coarse = unit * (MIN_LEVEL_SHARE / smallest.double()).clamp(min=1)
            present = Bounds.counts(len(columns), 1)
            return Bounds.join([between._replace(step=unit * variances), chi._replace(step=coarse), present])
        low, high, step = [], [], []
        for column in columns:
            size, last = column.size, int(column.edges is not None)
            low.append(torch.cat([torch.zeros(size - last), torch.full((last,), -most)]))
            high.append(torch.full((size,), most))
            step.append(torch.cat([torch.ones(size - last), torch.full((last,), SUM_STEP)]))
        sides = [torch.cat([torch.cat(side).double()] * len(groups.names)) for side in (low, high, step)]
        rows = Bounds.counts(len(groups.names), most)
        return Bounds.join([rows, Bounds(*sides)])

    def row_sets(self, client: ClientRows, terms: AnalysisTerms) -> Sequence[ClientRows]:
        groups, columns = self._merged_cells(terms)
        filled = self._fill_rare_gaps(client, terms, groups, columns)
        return [  # rows without imputed cells, so that a subject's rows do not depend on the groups
            client.select(
                ~filled.x[:, column.place].isnan() if column.edges is None else _scale_column(filled, column)[1]
            )
            for column in columns
        ]

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        groups, columns = self._merged_cells(terms)
        client = self._fill_rare_gaps(client, terms, groups, columns)
        code = groups.merged_index[group_codes(client, terms, self.group)]
        if question.name == "counts":
            return _count_groups(client, terms, columns, groups, self.group)
        numbers = [column for column in columns if column.edges is not None]
        if question.name == "spreads":
            squares = torch.zeros(len(groups.names), len(numbers), dtype=torch.float64)
            for k, column in enumerate(numbers):
                u, whole = _scale_column(client, column)
                gap = torch.where(whole, u - question.values["centres"][code, k], 0.0)
                squares[:, k].index_add_(0, code, gap**2)
            return squares.flatten()
        shares, between, chi, present = question.values["shares"], [], [], []
        for column, mean in zip(numbers, question.values["means"], strict=True):
            u, whole = _scale_column(client, column)
            between.append((u[whole] - mean).sum() ** 2 / max(int(whole.sum()), 1))
            present.append(whole.any().double())
        for k, column in enumerate(column for column in columns if column.edges is None):
            counts = _rows_by_level(client, column)[: column.cell_count]
            wanted = counts.sum() * shares[k, : column.cell_count]
            chi.append(torch.where(wanted > 0, (counts - wanted) ** 2 / wanted.clamp(min=1e-300), 0.0).sum())
            present.append(counts.any().double())
        return torch.cat([torch.stack(part) for part in (between, chi, present) if part])

    def conclude(self, ask: Callable[[Question], Total], terms: AnalysisTerms) -> tuple[pa.Table, None]:
        groups, columns = self._merged_cells(terms)
        count = len(groups.names)
        total, _ = ask(Question("counts"))
        if not total[:count].any():
            raise DataError("no client has enough rows to be counted. Agree on a smaller minimum count")
        blocks = [
            dict(zip(columns, row.split([c.size for c in columns]), strict=True))
            for row in total[count:].view(count, -1)
        ]
        numbers, codes = ([c for c in columns if (c.edges is None) == coded] for coded in (False, True))
        sums, whole = total.new_zeros(count, len(numbers)), total.new_zeros(count, len(numbers))
        for g, block in enumerate(blocks):
            for k, column in enumerate(numbers):
                sums[g, k], whole[g, k] = block[column][-1], block[column][:-3].sum()
        centres = sums / whole.clamp(min=1)
        means = sums.sum(0) / whole.sum(0).clamp(min=1)
        widest = max((c.size for c in codes), default=1)
        shares = torch.zeros(len(codes), widest, dtype=torch.float64)
        for k, column in enumerate(codes):
            counts = torch.stack([block[column] for block in blocks]).sum(0)
            shares[k, : column.cell_count] = counts[: column.cell_count] / counts[: column.cell_count].sum().clamp(
                min=1
            )
        squares = ask(Question("spreads", {"centres": centres}))[0].view(count, -1)
        spread = (squares + whole * (centres - means) ** 2).sum(0) / whole.sum(0).clamp(min=1)
        values = {"means": means, "variances": spread.clamp(self._min_variance, 1.0), "shares": shares}
        if compares_clients(terms):
            answer, _ = ask(Question("differences", values))
        else:
            answer = torch.zeros(len(numbers) + len(codes) + len(columns), dtype=torch.float64)
        between, chi, present = answer.split([len(numbers), len(codes), len(columns)])
        clients = dict(zip([*numbers, *codes], present.int().tolist(), strict=True))
        rows = list[dict[str, object]]()
        for column in columns:
            counted = [block[column].numpy() for block in blocks]
            if column.edges is not None:
                k = numbers.index(column)
                low, high = float(column.edges[0]), float(column.edges[-1])
                figures = GroupMoments(
                    whole[:, k].numpy(),
                    np.append(centres[:, k].numpy(), float(means[k])),
                    squares[:, k].numpy(),
                    (high - low) / 2,
                    (high + low) / 2,
                    len(terms.sizes) * SUM_STEP / 2,
                )
                rows += describe_number(column, groups, counted, figures, float(between[k]), clients[column])
            else:
                k = codes.index(column)
                rows += describe_code(column, groups, np.stack(counted), float(chi[k]), clients[column])
        if self.group == CLIENT_GROUP:
            note_clients(rows)
        if rows and terms.rules.min_subjects > 1:
            rows[0].setdefault("note", GAPS_NOTE.format(terms.rules.min_subjects))
        table = pa.Table.from_pylist(rows, schema=TABLE_SCHEMA)
        return table, None

    def _agreed_columns(self, schema: Schema) -> list[SummaryColumn]:
        """Return every column with its bins or all its levels."""
        columns = list[SummaryColumn]()
        for place, column in enumerate(schema.columns):
            if column.name == self.group:
                continue
            if column.levels:
                cells = unmerged_cells([*map(str, column.names), MISSING_LEVEL])
                columns.append(SummaryColumn(column.name, place, None, cells, column.levels, torch.zeros(0).long()))
                continue
            low, high = column.range or (0.0, 1.0)
            edges = torch.linspace(low, max(high, low + 1e-9), self.bins + 1, dtype=torch.float64)
            columns.append(SummaryColumn(column.name, place, edges, unmerged_cells(()), 0, torch.arange(self.bins)))
        return columns

    def _merged_cells(self, terms: AnalysisTerms) -> tuple[MergedCells, list[SummaryColumn]]:
        """Return the groups and the columns, restricted to cells in which enough clients have enough rows."""
        names, columns = groups_of(terms.schema, self.group, terms.client_names), self._agreed_columns(terms.schema)
        flags = torch.stack(terms.published)
        groups = merge_small_cells(names, flags[:, : len(names)], terms.rules)
        blocks = flags[:, len(names) :].view(len(flags), len(names), -1)
        filled = (groups.members @ blocks > 0)[:, groups.reached(flags[:, : len(names)])]
        kept = list[SummaryColumn]()
        for column, cells in zip(columns, filled.double().split([c.flags for c in columns], 2), strict=True):
            if column.edges is None:
                every = cells.amin(1)  # cells with enough subjects in every group
                gaps = bool(cells[:, :, -1].any())
                kept.append(replace(column, cells=merge_small_cells(column.cells.names, every, terms.rules, gaps)))
                continue
            what = f"subjects with a number in {column.name!r} within its range, in every group"
            fix = f"columns without {column.name!r} or fewer groups"
            of = merge_bins(cells, terms.rules, range_widths(self.bins), self.bins, what, fix)
            ends = [int((of == k).nonzero().max()) + 1 for k in range(int(of.max()) + 1)]
            kept.append(replace(column, edges=column.edges[[0, *ends]], merged_bins=of))
        return groups, kept

    def _fill_rare_gaps(
        self, client: ClientRows, terms: AnalysisTerms, groups: MergedCells, columns: Sequence[SummaryColumn]
    ) -> ClientRows:
        """Return a client's rows after imputing gaps of fewer subjects in a group than the rules allow to count.

        A missing cell is replaced by the client's mean or most frequent level, and a number outside the agreed range by
        the nearer end of the range. Any number of gaps that a sum reveals therefore involves enough of a client's
        subjects.
        """
        if terms.rules.min_subjects == 1:
            return client
        x, code = client.x.clone(), groups.merged_index[group_codes(client, terms, self.group)]
        for column in columns:
            values, whole = client.x[:, column.place], ~client.x[:, column.place].isnan()
            gaps = [~whole]
            if column.edges is not None:
                low, high = float(column.edges[0]), float(column.edges[-1])
                inside = (values >= low) & (values <= high)
                usual = values[inside].mean() if bool(inside.any()) else (low + high) / 2
                cells = torch.where(whole, values.clamp(low, high), usual)
                gaps.append(whole & ~inside)
            else:
                cells = torch.where(whole, values, values[whole].mode().values if bool(whole.any()) else 0.0)
            for gap in gaps:
                for g in range(len(groups.names)):
                    some = gap & (code == g)
                    if 0 < len(client.subjects[some].unique()) < terms.rules.min_subjects:
                        x[some, column.place] = cells[some]
        return replace(client, x=x)


def compares_clients(terms: AnalysisTerms) -> bool:
    """Return True if small cells are not merged or there are enough clients for statistics over clients.

    Clients that may be absent or have too few rows in every cell are not counted.
    """
    present = sum(bool(flags.any()) for flags in terms.published)
    return not forbids_small_cells(terms.rules) or present - terms.rules.missing >= MIN_COMPARED_CLIENTS


def _scale_column(client: ClientRows, column: SummaryColumn) -> tuple[Tensor, Tensor]:
    """Return a number scaled to [-1, 1] as ``[N]``, and flags of the cells that are present and within the range."""
    assert column.edges is not None
    values, low, high = client.x[:, column.place], column.edges[0], column.edges[-1]
    whole = (values >= low) & (values <= high)
    return torch.where(whole, (values - (high + low) / 2) / ((high - low) / 2), 0.0), whole


def _rows_by_level(client: ClientRows, column: SummaryColumn) -> Tensor:
    """Return the number of rows in each cell of a coded column."""
    codes = level_codes(client.x[:, column.place], column.levels)
    return torch.bincount(column.cells.merged_index[codes], minlength=len(column.cells.names)).double()


def _subjects_by_cell(client: ClientRows, column: SummaryColumn) -> Tensor:
    """Return the number of subjects with a row in each cell of a column.

    The cells of a numeric column are ranges of bins (see `merge_bins`).
    """
    values = client.x[:, column.place]
    if column.edges is None:
        return count_subjects(level_codes(values, column.levels), client.subjects, len(column.cells.names))
    whole, bins = _scale_column(client, column)[1], len(column.merged_bins)
    place = torch.searchsorted(column.edges[1:-1].contiguous(), values[whole].contiguous(), right=True)
    subjects = client.subjects[whole]
    return torch.cat([count_subjects(place // width, subjects, -(-bins // width)) for width in range_widths(bins)])


def _count_groups(
    client: ClientRows, terms: AnalysisTerms, columns: list[SummaryColumn], groups: MergedCells, group: str | None
) -> Tensor:
    """Return the number of rows in each group, followed by the values of each column in each group."""
    code = groups.merged_index[group_codes(client, terms, group)]
    blocks = []
    for g in range(len(groups.names)):
        some = client.select(code == g)
        for column in columns:
            if column.edges is None:
                blocks.append(_rows_by_level(some, column))
                continue
            values, (u, whole) = some.x[:, column.place], _scale_column(some, column)
            place = torch.searchsorted(column.edges[1:-1].contiguous(), values[whole].contiguous(), right=True)
            counts = torch.bincount(place, minlength=len(column.edges) - 1).double()
            missing = values.isnan().sum()
            blocks.append(torch.cat([counts, torch.stack([missing, (~whole).sum() - missing, u.sum()])]))
    rows = torch.bincount(code, minlength=len(groups.names)).double()
    return torch.cat([rows, *blocks])
